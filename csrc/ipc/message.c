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

/* ---- what another process has written ------------------------------------------- */

static int is_inside(uint64_t offset, uint64_t n, size_t n_bytes)
{
    return offset <= n_bytes && n <= n_bytes - offset;
}

size_t pli_message_elems(const pli_message_entry *entry)
{
    size_t n = 1;
    for (uint32_t d = 0; d < entry->n_dims; d++)
        if (entry->dims[d] == 0)
            return 0;
    for (uint32_t d = 0; d < entry->n_dims; d++)
        if (entry->dims[d] < 0 ||
            __builtin_mul_overflow(n, (size_t)entry->dims[d], &n) || n > PTRDIFF_MAX)
            return SIZE_MAX;
    return n;
}

/* Whether an entry's elements lie in its bytes: they fill these, in some order. */
static int is_block(const pli_message_entry *entry)
{
    const size_t n_elems = pli_message_elems(entry);
    int64_t last = 0;
    if (n_elems == 0 || n_elems == SIZE_MAX)
        return n_elems == 0 && entry->n_bytes == 0;
    for (uint32_t d = 0; d < entry->n_dims; d++) {
        const int64_t size = entry->dims[d], stride = entry->dims[entry->n_dims + d];
        int64_t step = 0;
        if (size > 1 &&
            (stride < 0 || __builtin_mul_overflow(size - 1, stride, &step) ||
             __builtin_add_overflow(last, step, &last)))
            return 0;
    }
    return (uint64_t)last < n_elems && entry->n_bytes % n_elems == 0 &&
           (entry->n_bytes > 0 || entry->n_dims == 0);
}

/* Whether the entry at byte `at` lies before byte `end`, and its data in the message.
 */
static int is_entry(const char *message, uint64_t at, uint64_t end, size_t n_bytes)
{
    const pli_message_entry *entry =
        (const pli_message_entry *)(const void *)(message + at);
    return is_inside(at, sizeof *entry, end) && entry->n_dims <= PLI_MAX_DIMS &&
           is_inside(at, entry_bytes(entry->n_dims), end) &&
           entry->offset % PL_CACHE_LINE == 0 &&
           is_inside(entry->offset, entry->n_bytes, n_bytes) && is_block(entry);
}

pl_status pli_message_open(const void *memory, size_t n_bytes,
                           const pli_message_header **out)
{
    pl_status st = PL_OK;
    const pli_message_header *header = memory;
    uint64_t at = sizeof *header;
    int is_whole = n_bytes >= sizeof *header &&
                   is_inside(header->payload_offset, header->payload_bytes, n_bytes);
    for (uint32_t i = 0; is_whole && i < header->n_leaves; i++) {
        is_whole = is_entry(memory, at, header->payload_offset, n_bytes);
        if (is_whole)
            at += entry_bytes(
                ((const pli_message_entry *)(const void *)((const char *)memory + at))
                    ->n_dims);
    }
    if (!is_whole)
        PL_FAIL(PL_EMISMATCH,
                "%zu bytes from another process are no message: they were overwritten, "
                "or are another version's",
                n_bytes);
    *out = header;
done:
    return st;
}
