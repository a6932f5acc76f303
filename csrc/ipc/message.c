/* message.c - the two passes of a message: where each part goes, then its bytes. */
#include "message.h"

#include <string.h>

static size_t align(size_t offset)
{
    return (offset + PL_CACHE_LINE - 1) & ~(size_t)(PL_CACHE_LINE - 1);
}

static size_t entry_bytes(size_t n_dims)
{
    return sizeof(pli_message_entry) + 2 * n_dims * sizeof(int64_t);
}

static size_t payload_offset(const pli_message *message)
{
    size_t offset = sizeof(pli_message_header);
    for (uint32_t i = 0; i < message->n_leaves; i++)
        offset += entry_bytes((size_t)message->leaves[i].elems.n_dims);
    return offset;
}

size_t pli_message_lay_out(const pli_message *message)
{
    size_t offset = align(payload_offset(message) + message->payload_bytes);
    for (uint32_t i = 0; i < message->n_leaves; i++) {
        pli_message_leaf *leaf = &message->leaves[i];
        leaf->offset = offset;
        offset = align(offset + pli_strided_bytes(&leaf->elems));
    }
    return offset;
}

static void write_entry(const pli_message_leaf *leaf, pli_message_entry *out)
{
    const pli_strided *elems = &leaf->elems;
    const int is_kept = pli_strided_density(elems) == PLI_DENSE;
    *out = (pli_message_entry){.form = leaf->form,
                               .flags = leaf->flags,
                               .dtype = leaf->dtype,
                               .n_dims = (uint32_t)elems->n_dims,
                               .n_bytes = pli_strided_bytes(elems),
                               .offset = leaf->offset};
    int64_t stride = 1;
    for (int d = elems->n_dims - 1; d >= 0; d--) {
        out->dims[d] = elems->dims[d].size;
        out->dims[elems->n_dims + d] =
            is_kept ? elems->dims[d].stride / (int64_t)elems->elem_bytes : stride;
        stride *= elems->dims[d].size;
    }
}

void pli_message_write(const pli_message *message, void *memory)
{
    char *to = memory;
    pli_message_header *header = memory;
    pli_message_entry *entry = (pli_message_entry *)(void *)(header + 1);
    *header = (pli_message_header){.kind = message->kind,
                                   .n_leaves = message->n_leaves,
                                   .payload_bytes = message->payload_bytes,
                                   .payload_offset = payload_offset(message)};
    if (message->payload_bytes > 0)
        memcpy(to + header->payload_offset, message->payload, message->payload_bytes);
    for (uint32_t i = 0; i < message->n_leaves; i++) {
        const pli_message_leaf *leaf = &message->leaves[i];
        write_entry(leaf, entry);
        pli_strided_pack(&leaf->elems, leaf->data, to + leaf->offset);
        entry = (pli_message_entry *)pli_message_next(entry);
    }
}

const pli_message_entry *pli_message_first(const pli_message_header *header)
{
    return (const pli_message_entry *)(const void *)(header + 1);
}

const pli_message_entry *pli_message_next(const pli_message_entry *entry)
{
    return (const pli_message_entry *)(const void *)((const char *)entry +
                                                     entry_bytes(entry->n_dims));
}
