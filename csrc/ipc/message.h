/* message.h - how tensors and bytes lie in a message.
 *
 *     | header | an entry a leaf: form, dtype, sizes, strides | payload | data of
 * leaves |
 *
 * A leaf's data is packed straight into the message (core/layout.h), where it begins on
 * a cache line.  What `form` and `dtype` mean is for the two ends to agree.
 */
#ifndef PLI_MESSAGE_H
#define PLI_MESSAGE_H

#include "core/layout.h"

/* One on its way out; bytes that are no tensor are one element without dimensions. */
typedef struct pli_message_leaf {
    uint8_t form;
    uint8_t flags;
    uint32_t dtype;
    pli_strided elems;
    const void *data;
    size_t offset; /* in the message */
} pli_message_leaf;

typedef struct pli_message {
    uint32_t kind;
    uint32_t n_leaves;
    pli_message_leaf *leaves;
    const void *payload;
    size_t payload_bytes;
} pli_message;

/* The same in the message's memory. */
typedef struct pli_message_header {
    uint32_t kind;
    uint32_t n_leaves;
    uint64_t payload_bytes;
    uint64_t payload_offset;
} pli_message_header;

typedef struct pli_message_entry {
    uint8_t form;
    uint8_t flags;
    uint32_t dtype;
    uint32_t n_dims;
    uint64_t n_bytes;
    uint64_t offset;
    int64_t dims[]; /* sizes, then strides in elements */
} pli_message_entry;

/* Gives each part its offset; returns the message's size. */
size_t pli_message_lay_out(const pli_message *message);

/* Writes a message that is laid out into memory of its size, aligned to a cache line.
 */
void pli_message_write(const pli_message *message, void *memory);

/* Sees to it that all parts of a message that another process has written lie in its
 * n_bytes: payload, entries, and each element of each leaf by its strides.
 * PL_EMISMATCH where they do not. */
pl_status pli_message_open(const void *memory, size_t n_bytes,
                           const pli_message_header **out) PL_MUST_USE;

/* How many elements an entry has; SIZE_MAX: more than there can be. */
size_t pli_message_elems(const pli_message_entry *entry);

/* The first entry, and the one behind `entry`. */
const pli_message_entry *pli_message_first(const pli_message_header *header);
const pli_message_entry *pli_message_next(const pli_message_entry *entry);

#endif
