/* fuzz_message.c - a worker's end of a channel over memory that a caller has written:
 * the lane's header, and the message in it.
 */
#include "bytes.h"
#include "ipc/channel.h"
#include "ipc/message.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static volatile uint8_t message_byte;

static void read_range(const char *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        message_byte = (uint8_t)from[i];
}

/* Reads each element of a leaf, by its strides. */
static void read_elements(const pli_message_entry *entry, uint32_t d, const char *at,
                          size_t elem_bytes)
{
    if (d == entry->n_dims) {
        read_range(at, elem_bytes);
        return;
    }
    for (int64_t i = 0; i < entry->dims[d]; i++)
        read_elements(entry, d + 1,
                      at + i * entry->dims[entry->n_dims + d] * (int64_t)elem_bytes,
                      elem_bytes);
}

static void read_message(const char *message, size_t n_bytes)
{
    const pli_message_header *header = NULL;
    if (pli_message_open(message, n_bytes, &header) != PL_OK)
        return;
    const pli_message_entry *entry = pli_message_first(header);
    read_range(message + header->payload_offset, header->payload_bytes);
    for (uint32_t i = 0; i < header->n_leaves; i++) {
        const size_t n_elems = pli_message_elems(entry);
        must(entry->n_dims <= PLI_MAX_DIMS);
        read_range(message + entry->offset, entry->n_bytes);
        if (n_elems > 0)
            read_elements(entry, 0, message + entry->offset, entry->n_bytes / n_elems);
        entry = pli_message_next(entry);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const int n_before = n_descriptors();
    const bytes content = {data, n};
    const int request = bytes_file(content, n);
    pli_channel *caller = NULL, *worker = NULL;
    must(pli_channel_create(&caller) == PL_OK);
    if (pli_channel_adopt(request, caller->in->fd, &worker) == PL_OK &&
        pli_channel_has_message(worker)) {
        const char *message = NULL;
        size_t n_bytes = 0;
        if (pli_channel_receive(worker, &message, &n_bytes) == PL_OK)
            read_message(message, n_bytes);
        (void)pli_channel_has_calmed(worker);
    }
    pli_channel_destroy(worker);
    pli_channel_destroy(caller);
    (void)close(request);
    must(n_descriptors() == n_before);
    return 0;
}
