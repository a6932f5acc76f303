/* fake_ranks.h - ranks over the fake of NCCL, for the fake's own tests.
 *
 * Each rank has a device, two streams and memory.  One thread drives them all, or each
 * has a thread, or a process.
 */
#ifndef PLT_FAKE_RANKS_H
#define PLT_FAKE_RANKS_H

#include <pthread.h>

#include "fake_gpu.h"
#include "values.h"

enum { RANK_N = 100, RANK_BYTES = RANK_N * 8, MAX_RANKS = 4 };

typedef struct rank {
    int rank, n_ranks;
    ncclUniqueId id;
    CUcontext context;
    CUstream compute, side;
    CUevent ready;
    CUdeviceptr memory; /* RANK_BYTES for each rank */
    ncclComm_t comm;
} rank;

static inline void *rank_memory(const rank *it)
{
    return (void *)(uintptr_t)it->memory;
}

/* Makes all but the communicator. */
static inline rank rank_make(int me, int n_ranks, const ncclUniqueId *id)
{
    rank it = {.rank = me, .n_ranks = n_ranks, .id = *id};
    CHECK(cuDevicePrimaryCtxRetain(&it.context, me) == CUDA_SUCCESS);
    CHECK(cuCtxPushCurrent(it.context) == CUDA_SUCCESS);
    CHECK(cuMemAlloc(&it.memory, RANK_BYTES * MAX_RANKS) == CUDA_SUCCESS);
    CHECK(cuStreamCreate(&it.compute, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    CHECK(cuStreamCreate(&it.side, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    CHECK(cuEventCreate(&it.ready, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    CHECK(cuCtxPopCurrent(NULL) == CUDA_SUCCESS);
    return it;
}

static inline void rank_enter(const rank *it)
{
    CHECK(cuCtxPushCurrent(it->context) == CUDA_SUCCESS);
}

static inline void rank_leave(void)
{
    CHECK(cuCtxPopCurrent(NULL) == CUDA_SUCCESS);
}

/* Leaves the context of the rank before `it`, and enters that of `it`. */
static inline rank *rank_turn(rank *it, const rank *first, const rank *end)
{
    if (it > first)
        rank_leave();
    if (it < end)
        rank_enter(it);
    return it;
}

/* Visits each rank in turn, in its own context; the body may not leave the loop. */
#define EACH_RANK(it, ranks, n)                                                        \
    for (rank *it = rank_turn(ranks, ranks, (ranks) + (n)); it < (ranks) + (n);        \
         it = rank_turn(it + 1, ranks, (ranks) + (n)))

/* The same, in a group of calls. */
#define EACH_RANK_IN_GROUP(it, ranks, n)                                               \
    for (int once = CHECK(ncclGroupStart() == ncclSuccess); once;                      \
         once = 0, CHECK(ncclGroupEnd() == ncclSuccess))                               \
        EACH_RANK (it, ranks, n)

/* The communicator must have ended. */
static inline void rank_free(rank *it)
{
    rank_enter(it);
    CHECK(cuEventDestroy(it->ready) == CUDA_SUCCESS);
    CHECK(cuMemFree(it->memory) == CUDA_SUCCESS);
    CHECK(cuStreamDestroy(it->compute) == CUDA_SUCCESS);
    CHECK(cuStreamDestroy(it->side) == CUDA_SUCCESS);
    rank_leave();
    CHECK(cuDevicePrimaryCtxRelease(it->rank) == CUDA_SUCCESS);
}

static inline fake_options ranks_options(uint64_t seed, fake_schedule schedule)
{
    fake_options options = fake_defaults();
    options.seed = seed;
    options.schedule = schedule;
    options.devices = MAX_RANKS;
    options.alloc_waits = 0;
    options.quiet = 1;
    return options;
}

/* Makes all ranks in one thread, in a group. */
static inline void ranks_make(rank *ranks, int n, const fake_options *options)
{
    ncclUniqueId id;
    fake_reset(options);
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    for (int r = 0; r < n; r++)
        ranks[r] = rank_make(r, n, &id);
    EACH_RANK_IN_GROUP (it, ranks, n)
        CHECK(ncclCommInitRank(&it->comm, n, id, it->rank) == ncclSuccess);
}

static inline void ranks_check_clean(void)
{
    if (!CHECK(fake_errors() == 0))
        CHECK_MORE("%s", fake_error(0));
    CHECK(fake_live_objects() == 0);
    CHECK(fake_pending() == 0);
}

/* Aborts all: operations that wait end with garbage, for nothing else ends them. */
static inline void ranks_abort(rank *ranks, int n)
{
    for (int r = 0; r < n; r++)
        CHECK(ncclCommAbort(ranks[r].comm) == ncclSuccess);
    for (int r = 0; r < n; r++)
        rank_free(&ranks[r]);
    ranks_check_clean();
}

static inline void ranks_end(rank *ranks, int n)
{
    CHECK(fake_synchronize_all());
    for (int r = 0; r < n; r++) {
        CHECK(ncclCommDestroy(ranks[r].comm) == ncclSuccess);
        rank_free(&ranks[r]);
    }
    ranks_check_clean();
}

/* A test with the ranks of a world, which end well; one thread drives them all. */
#define RANKS_TEST(n, seed, schedule, name)                                            \
    TEST_BY(name, rank *ranks, {                                                       \
        rank its[MAX_RANKS];                                                           \
        const fake_options options = ranks_options(seed, schedule);                    \
        ranks_make(its, n, &options);                                                  \
        name##_by(its);                                                                \
        ranks_end(its, n);                                                             \
    })

/* Element i of rank r: a small integer that is a multiple of the number of ranks. */
static inline int rank_value(const rank *it, int r, int i)
{
    return it->n_ranks * (r + 1 + i % 3);
}

/* Writes n elements on the stream; the host has nothing to wait for afterwards. */
static inline void rank_fill(const rank *it, pl_dtype dtype, int n, CUstream stream)
{
    char bytes[RANK_BYTES * MAX_RANKS];
    for (int i = 0; i < n; i++)
        value_put(bytes, dtype, (size_t)i, rank_value(it, it->rank, i));
    CHECK(cuMemcpyHtoDAsync(it->memory, bytes, (size_t)n * pl_dtype_bytes(dtype),
                            stream) == CUDA_SUCCESS);
}

static inline void rank_read(const rank *it, void *out, size_t n_bytes, CUstream stream)
{
    CHECK(cuMemcpyDtoHAsync(out, it->memory, n_bytes, stream) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(stream) == CUDA_SUCCESS);
}

/* The number of elements that are not the mean of all ranks'. */
static inline int rank_wrong_means(const rank *it, CUstream stream)
{
    float out[RANK_N];
    int n_wrong = 0;
    rank_read(it, out, sizeof out, stream);
    for (int i = 0; i < RANK_N; i++) {
        int sum = 0;
        for (int r = 0; r < it->n_ranks; r++)
            sum += rank_value(it, r, i);
        n_wrong += out[i] != (float)(sum / it->n_ranks);
    }
    return n_wrong;
}

/* Reduces the first elements of the rank's memory, in place, on the side stream. */
static inline ncclResult_t rank_reduce(const rank *it, size_t n, ncclDataType_t dtype,
                                       ncclRedOp_t op)
{
    return ncclAllReduce(rank_memory(it), rank_memory(it), n, dtype, op, it->comm,
                         it->side);
}

/* Writes values on the compute stream, and averages them on the side stream. */
static inline ncclResult_t rank_average(const rank *it, int has_wait)
{
    rank_fill(it, PL_F32, RANK_N, it->compute);
    CHECK(cuEventRecord(it->ready, it->compute) == CUDA_SUCCESS);
    if (has_wait)
        CHECK(cuStreamWaitEvent(it->side, it->ready, 0) == CUDA_SUCCESS);
    return rank_reduce(it, RANK_N, ncclFloat32, ncclAvg);
}

#endif
