/* Messages: what is written is read back, packed. */
#include <string.h>

#include "check.h"
#include "ipc/message.h"

enum { MOST_BYTES = 1 << 14 };

static _Alignas(PL_CACHE_LINE) char memory[MOST_BYTES];

static void leaves_of_any_kind_are_read_back(void)
{
    static const int32_t grid[2][6] = {{0, 1, 2, 3, 4, 5}, {6, 7, 8, 9, 10, 11}};
    static const int32_t packed[] = {0, 2, 4, 6, 8, 10}; /* every other column */
    static const pli_dim gaps[] = {{2, 24}, {3, 8}}, dense[] = {{6, 4}, {2, 24}};
    static const int64_t sizes[] = {2, 3, 3, 1}, kept[] = {6, 2, 1, 6};
    pli_message_leaf leaves[] = {
        {.form = 1,
         .flags = 1,
         .dtype = 0x01020304,
         .elems = {gaps, 2, 4},
         .data = grid},
        {.form = 2, .dtype = 7, .elems = {dense, 2, 4}, .data = grid},
        {.form = 0},
        {.form = 3, .elems = {NULL, 0, 5}, .data = "hello"},
    };
    const pli_message message = {.kind = 9,
                                 .n_leaves = 4,
                                 .leaves = leaves,
                                 .payload = "payload",
                                 .payload_bytes = 7};
    const size_t n_bytes = pli_message_lay_out(&message);
    if (!CHECK(n_bytes <= MOST_BYTES))
        return;
    pli_message_write(&message, memory);
    const pli_message_header *header = (const pli_message_header *)(void *)memory;
    CHECK(header->kind == 9 && header->n_leaves == 4 && header->payload_bytes == 7);
    CHECK(memcmp(memory + header->payload_offset, "payload", 7) == 0);
    const pli_message_entry *entry = pli_message_first(header);
    CHECK(entry->form == 1 && entry->flags == 1 && entry->dtype == 0x01020304);
    CHECK(entry->n_dims == 2 && memcmp(entry->dims, sizes, sizeof sizes) == 0);
    CHECK(entry->n_bytes == sizeof packed && entry->offset % PL_CACHE_LINE == 0);
    CHECK(memcmp(memory + entry->offset, packed, sizeof packed) == 0);
    entry = pli_message_next(entry);
    CHECK(entry->dtype == 7 && memcmp(entry->dims, kept, sizeof kept) == 0);
    CHECK(memcmp(memory + entry->offset, grid, sizeof grid) == 0);
    entry = pli_message_next(entry);
    CHECK(entry->form == 0 && entry->n_bytes == 0);
    entry = pli_message_next(entry);
    CHECK(entry->form == 3 && entry->n_bytes == 5 && entry->n_dims == 0);
    CHECK(memcmp(memory + entry->offset, "hello", 5) == 0);
    CHECK(entry->offset + 5 <= n_bytes);
}

static void a_message_of_nothing_is_its_header(void)
{
    const pli_message message = {.kind = 1};
    CHECK(pli_message_lay_out(&message) == PL_CACHE_LINE);
    pli_message_write(&message, memory);
    const pli_message_header *header = (const pli_message_header *)(void *)memory;
    CHECK(header->kind == 1 && header->n_leaves == 0 && header->payload_bytes == 0);
}

int main(void)
{
    RUN(leaves_of_any_kind_are_read_back);
    RUN(a_message_of_nothing_is_its_header);
    return check_report();
}
