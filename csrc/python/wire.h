/* wire.h - tensors and arrays as bytes of a message, and back.
 *
 *     | kind, counts | one item a tensor: form, dtype, sizes, strides | words | data
 *
 * A tensor's data is written straight into the message: in one piece where its elements
 * are dense, whose strides are then kept, else packed row-major.  What is no strided
 * tensor in CPU memory, nor an array of numbers (sparse tensors, arrays of strings),
 * travels pickled.  Each item starts on a cache line.
 */
#ifndef PLI_WIRE_H
#define PLI_WIRE_H

#include "../comm/channel.h"
#include "state.h"

/* Writes a message and sends it; -1 with an exception set, and nothing sent.  `objects`
 * has torch tensors, NumPy arrays and None. */
int pli_wire_send(const module_state *state, pli_channel *channel, uint32_t kind,
                  PyObject *words, PyObject *objects);

typedef enum pli_wire_hold {
    PLI_WIRE_VIEWS,  /* of the channel, good until its end sends the next message */
    PLI_WIRE_COPIES, /* in memory of their own */
} pli_wire_hold;

/* Takes the message that has come: (kind, words, objects, flags). */
PyObject *pli_wire_receive(const module_state *state, pli_channel *channel,
                           pli_wire_hold hold);

#endif
