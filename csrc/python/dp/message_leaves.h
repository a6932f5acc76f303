/* message_leaves.h - tensors and arrays as leaves of a message, and back.
 *
 * What is a strided tensor in CPU memory or an array of numbers is packed into the
 * message without a copy between (ipc/message.h); anything else of torch's and NumPy's
 * (sparse tensors, arrays of strings) is sent pickled.
 */
#ifndef PLI_MESSAGE_LEAVES_H
#define PLI_MESSAGE_LEAVES_H

#include "ipc/channel.h"
#include "python/state.h"

/* Writes a message and sends it; -1 with an exception set, and nothing sent.  `payload`
 * is bytes; `objects` has torch tensors, NumPy arrays and None. */
int pli_message_send(const module_state *state, pli_channel *channel, uint32_t kind,
                     PyObject *payload, PyObject *objects);

typedef enum pli_received {
    PLI_RECEIVED_VIEWS,  /* of the channel, good until its end sends the next message */
    PLI_RECEIVED_COPIES, /* in memory of their own */
} pli_received;

/* Takes the message that has come: (kind, payload, objects, flags). */
PyObject *pli_message_receive(const module_state *state, pli_channel *channel,
                              pli_received how);

#endif
