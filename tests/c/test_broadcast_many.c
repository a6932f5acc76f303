/* test_broadcast_many.c - ranges of any sizes reach every rank, in loads of the arena's
 * size, on the CPU and on a device. */
#include "comm/broadcast_many.h"

#include "gpu_ranks.h"

enum { MOST_RANGES = 9, MOST_BYTES = 3000, GUARD = 0x5a };

/* Drawn the same on every rank: the number of ranges, and their sizes. */
typedef struct shapes {
    size_t n;
    size_t n_bytes[MOST_RANGES];
} shapes;

typedef struct case_of {
    uint64_t seed;
    int root;
} case_of;

static shapes draw_shapes(uint64_t seed)
{
    draw random = draw_of(seed);
    shapes it = {.n = draw_below(&random, MOST_RANGES + 1)};
    for (size_t i = 0; i < it.n; i++)
        it.n_bytes[i] =
            draw_below(&random, 4) == 0 ? 0 : draw_below(&random, MOST_BYTES + 1);
    return it;
}

static unsigned char byte_of(int rank, size_t range, size_t at)
{
    return (unsigned char)(1 + (size_t)rank * 71 + range * 13 + at * 7);
}

static void fill(unsigned char *data, int rank, size_t range, size_t n_bytes)
{
    memset(data, GUARD, MOST_BYTES + 1);
    for (size_t at = 0; at < n_bytes; at++)
        data[at] = byte_of(rank, range, at);
}

static size_t count_wrong(const unsigned char *data, int root, size_t range,
                          size_t n_bytes)
{
    size_t n_wrong = 0;
    for (size_t at = 0; at < n_bytes; at++)
        n_wrong += data[at] != byte_of(root, range, at);
    return n_wrong + (data[n_bytes] != GUARD);
}

static pl_status carry(pli_broadcast_many *all)
{
    pl_status st = PL_OK;
    PL_TRY(pli_broadcast_many_begin(all));
    while (all->n_left > 0) {
        pl_ticket ticket = 0;
        PL_TRY(pli_broadcast_many_issue(all, &ticket));
        PL_TRY(wait_through(all->comm, ticket));
        PL_TRY(pli_broadcast_many_receive(all));
    }
done:
    pli_broadcast_many_end(all);
    return st;
}

/* ---- on the CPU ----------------------------------------------------------------- */

static void send_on_the_cpu(rank_job *job)
{
    const case_of *it = job->context;
    const shapes drawn = draw_shapes(it->seed);
    static _Thread_local unsigned char data[MOST_RANGES][MOST_BYTES + 1];
    pli_byte_range ranges[MOST_RANGES + 1];
    for (size_t i = 0; i < drawn.n; i++) {
        fill(data[i], job->rank, i, drawn.n_bytes[i]);
        ranges[i] = (pli_byte_range){data[i], drawn.n_bytes[i]};
    }
    pli_broadcast_many all = {
        .comm = job->comm, .root = it->root, .ranges = ranges, .n_ranges = drawn.n};
    if (!CHECK_OK(carry(&all)))
        return;
    for (size_t i = 0; i < drawn.n; i++)
        if (!CHECK(count_wrong(data[i], it->root, i, drawn.n_bytes[i]) == 0))
            CHECK_MORE("seed %d, rank %d, range %zu of %zu bytes", (int)it->seed,
                       job->rank, i, drawn.n_bytes[i]);
}

TEST(ranges_reach_every_rank)
{
    for (uint64_t seed = 1; seed <= 60; seed++) {
        const int world_size = 1 + (int)(seed % 4);
        case_of it = {.seed = seed, .root = (int)(seed / 4) % world_size};
        ranks_run_world(world_size, 1 + seed * 37 % 900, send_on_the_cpu, &it, seed);
    }
}

static void send_from_nobody(rank_job *job)
{
    char byte = 0;
    const pli_byte_range range = {&byte, 1};
    pli_broadcast_many all = {
        .comm = job->comm, .root = job->world_size, .ranges = &range, .n_ranges = 1};
    CHECK_FAILS(carry(&all), PL_EINVAL, "root 2 is not one of the 2 ranks");
}

TEST(a_root_that_is_no_rank_is_refused)
{
    ranks_run_world(2, 64, send_from_nobody, NULL, 1);
}

/* ---- on a device ---------------------------------------------------------------- */

static pl_status read_back(gpu_rank *self, const case_of *it, const shapes *drawn,
                           const pli_byte_range *ranges)
{
    pl_status st = PL_OK;
    unsigned char data[MOST_BYTES + 1];
    for (size_t i = 0; i < drawn->n; i++) {
        PL_TRY(pli_cuda_read(self->backend, data, ranges[i].data, sizeof data,
                             self->stream));
        if (!CHECK(count_wrong(data, it->root, i, drawn->n_bytes[i]) == 0))
            CHECK_MORE("seed %d, rank %d, range %zu of %zu bytes", (int)it->seed,
                       self->rank, i, drawn->n_bytes[i]);
    }
done:
    return st;
}

static pl_status send_all(gpu_rank *self, const case_of *it, void *memory)
{
    pl_status st = PL_OK;
    const shapes drawn = draw_shapes(it->seed);
    pli_byte_range ranges[MOST_RANGES + 1];
    unsigned char data[MOST_BYTES + 1];
    for (size_t i = 0; i < drawn.n; i++) {
        fill(data, self->rank, i, drawn.n_bytes[i]);
        ranges[i] = (pli_byte_range){(char *)memory + i * 4096, drawn.n_bytes[i]};
        PL_TRY(pli_cuda_write(self->backend, ranges[i].data, data, sizeof data,
                              self->stream));
    }
    pli_broadcast_many all = {.comm = self->comm,
                              .root = it->root,
                              .ranges = ranges,
                              .n_ranges = drawn.n,
                              .stream = self->stream,
                              .is_on_device = 1};
    PL_TRY(carry(&all));
    PL_TRY(read_back(self, it, &drawn, ranges));
done:
    return st;
}

static void send_on_a_device(gpu_rank *self)
{
    void *memory = NULL;
    const pl_backend_ops *ops = self->backend->ops;
    if (!CHECK_OK(ops->alloc(self->backend, (MOST_RANGES + 1) * (size_t)4096, &memory)))
        return;
    CHECK_OK(send_all(self, self->all->context, memory));
    ops->free(self->backend, memory);
}

TEST(ranges_on_a_device_reach_every_rank)
{
    for (uint64_t seed = 1; seed <= 12; seed++) {
        gpu_ranks all =
            gpu_ranks_of(1 + (int)(seed % 3), seed, seed % 2 ? FAKE_LATE : FAKE_RANDOM);
        case_of it = {.seed = seed, .root = (int)(seed / 3) % all.world_size};
        all.device_bytes = 256 * (1 + seed % 8);
        all.context = &it;
        gpu_ranks_run_world(&all, send_on_a_device);
    }
}
