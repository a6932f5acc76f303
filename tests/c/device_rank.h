/* device_rank.h - a rank with a fake device: its streams and memory.
 *
 * A rank has a main stream, for work outside backward, and others on which gradients
 * are made, as torch's engine does it: they wait for the main stream when a backward
 * begins, and the main stream waits for them when it ends.  Gradients live in memory
 * that belongs to a stream.  Once freed, the memory is reused at once in that stream's
 * order, and first overwritten with garbage.  Kernels check the means.  So if any order
 * is missing, a number is wrong.
 */
#ifndef PLT_DEVICE_RANK_H
#define PLT_DEVICE_RANK_H

#include "backend/cuda.h"
#include "device_memory.h"
#include "ranks.h"

enum {
    DEVICE_STREAMS = 4,
    DEVICE_BLOCKS = 160, /* per stream */
    DEVICE_BLOCK_BYTES = 4800,
    SPOILT = 0x5a,
};

/* Memory of one stream, for one gradient. */
typedef struct block {
    CUdeviceptr at; /* 0: none */
    size_t stream;
} block;

typedef struct block_pool {
    CUdeviceptr unused[DEVICE_BLOCKS];
    size_t n_unused;
} block_pool;

typedef struct device_rank {
    int rank;
    draw *random;
    pl_backend *backend;
    pl_comm *comm;
    CUcontext context;
    CUmodule module;
    CUstream streams[DEVICE_STREAMS]; /* the first is the main one */
    size_t n_streams;
    CUevent event;
    block_pool pools[DEVICE_STREAMS];
} device_rank;

/* A kernel run_NAME(), whose only argument is `it`. */
#define STEP_KERNEL(name, type)                                                        \
    static inline void do_##name(const type *it);                                      \
    static inline void run_##name(void *const *args, const unsigned grid[3],           \
                                  const unsigned threads[3])                           \
    {                                                                                  \
        (void)grid;                                                                    \
        (void)threads;                                                                 \
        do_##name(args[0]);                                                            \
    }                                                                                  \
    static inline void do_##name(const type *it)

/* ---- memory --------------------------------------------------------------------- */

static inline block take_block(device_rank *self, size_t stream)
{
    block_pool *pool = &self->pools[stream];
    block it = {.stream = stream};
    if (pool->n_unused > 0)
        it.at = pool->unused[--pool->n_unused];
    else
        CHECK(cuMemAlloc(&it.at, DEVICE_BLOCK_BYTES) == 0);
    return it;
}

static inline void give_block(device_rank *self, block *it)
{
    block_pool *pool = &self->pools[it->stream];
    if (it->at == 0)
        return;
    CHECK(cuMemsetD8Async(it->at, SPOILT, DEVICE_BLOCK_BYTES,
                          self->streams[it->stream]) == 0);
    if (CHECK(pool->n_unused < DEVICE_BLOCKS))
        pool->unused[pool->n_unused++] = it->at;
    *it = (block){.at = 0};
}

static inline void *block_memory(const block *it)
{
    return (void *)(uintptr_t)it->at; /* NOLINT(performance-no-int-to-ptr) */
}

/* ---- streams -------------------------------------------------------------------- */

static inline pl_stream *stream_of(const device_rank *self, size_t k)
{
    return (pl_stream *)(void *)self->streams[k];
}

/* Makes stream `behind` wait for stream `k`. */
static inline void stream_behind(const device_rank *self, size_t behind, size_t k)
{
    if (behind == k)
        return;
    CHECK(cuEventRecord(self->event, self->streams[k]) == 0);
    CHECK(cuStreamWaitEvent(self->streams[behind], self->event, 0) == 0);
}

/* Makes all streams wait for the main one. */
static inline void streams_behind(const device_rank *self)
{
    for (size_t k = 1; k < self->n_streams; k++)
        stream_behind(self, k, 0);
}

/* ---- life ----------------------------------------------------------------------- */

static inline int device_rank_create(int rank, draw *random, device_rank *self)
{
    const pli_cuda_options cuda = {.device = rank, .driver = fake_path()};
    *self = (device_rank){.rank = rank,
                          .random = random,
                          .n_streams = 1 + draw_below(random, DEVICE_STREAMS)};
    if (!CHECK_OK(pli_cuda_backend_create(&cuda, &self->backend)) ||
        !CHECK(cuDevicePrimaryCtxRetain(&self->context, rank) == 0) ||
        !CHECK(cuCtxPushCurrent(self->context) == 0) ||
        !CHECK(cuModuleLoadData(&self->module, "plt") == 0))
        return 0;
    for (size_t k = 0; k < self->n_streams; k++)
        CHECK(cuStreamCreate(&self->streams[k], CU_STREAM_NON_BLOCKING) == 0);
    return CHECK(cuEventCreate(&self->event, CU_EVENT_DISABLE_TIMING) == 0);
}

static inline void device_rank_destroy(device_rank *self)
{
    CUcontext popped = NULL;
    pl_comm_destroy(self->comm);
    for (size_t k = 0; k < self->n_streams; k++)
        CHECK(cuStreamSynchronize(self->streams[k]) == 0);
    for (size_t k = 0; k < self->n_streams; k++) {
        block_pool *pool = &self->pools[k];
        while (pool->n_unused > 0)
            CHECK(cuMemFree(pool->unused[--pool->n_unused]) == 0);
        CHECK(cuStreamDestroy(self->streams[k]) == 0);
    }
    CHECK(cuEventDestroy(self->event) == 0);
    CHECK(cuModuleUnload(self->module) == 0);
    CHECK(cuCtxPopCurrent(&popped) == 0);
    CHECK(cuDevicePrimaryCtxRelease(self->rank) == 0);
    pli_backend_destroy(self->backend);
}

#endif
