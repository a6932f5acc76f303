/* gpu_rank.h - a rank with a fake device: its streams, kernels and memory.
 *
 * A rank has a main stream, for work outside backward, and others on which gradients
 * are made, as torch's engine does it: they wait for the main stream when a backward
 * begins, and the main stream waits for them when it ends.  Gradients live in memory
 * that belongs to a stream.  Once freed, the memory is reused at once in that stream's
 * order, and first overwritten with garbage.  Kernels of the main stream check the
 * means.  So if any order is missing, a number is wrong.
 */
#ifndef PLT_GPU_RANK_H
#define PLT_GPU_RANK_H

#include "backend/cuda.h"
#include "comm/window.h"
#include "fake/fake.h"
#include "nccl/gpu_comm.h"
#include "steps.h"

enum {
    GPU_STREAMS = 4,
    GPU_BLOCKS = 4 * STEPS_MAX_PARAMS, /* per stream */
    GPU_BLOCK_BYTES = STEPS_MAX_ELEMS * 16,
    GPU_KEPT = 4,
    SPOILT = 0x5a,
};

/* Memory of one stream, for one gradient. */
typedef struct block {
    CUdeviceptr at; /* 0: none */
    size_t stream;
} block;

typedef struct block_pool {
    CUdeviceptr unused[GPU_BLOCKS];
    size_t n_unused;
} block_pool;

typedef enum step_kernel {
    KERNEL_FILL,
    KERNEL_CHECK,
    KERNEL_PUT_WORD,
    KERNEL_CHECK_WORD,
    N_STEP_KERNELS
} step_kernel;

/* A gradient to which the program has kept a view. */
typedef struct kept_view {
    pli_window *window; /* NULL: nothing is kept */
    size_t param;
    const void *at;
    uint64_t step;
    int divisor;
} kept_view;

typedef struct gpu_rank {
    const model *model;
    pli_nccl_library *nccl;
    succession *worlds;
    pl_comm *comm;
    pl_backend *backend;
    pl_reducer *reducer;
    pli_window *window;
    int rank;
    draw *random;
    CUcontext context;
    CUmodule module;
    CUfunction kernels[N_STEP_KERNELS];
    CUstream streams[GPU_STREAMS]; /* the first is the main one */
    size_t n_streams;
    CUevent event;
    block_pool pools[GPU_STREAMS];
    block held[STEPS_MAX_PARAMS];
    block late[STEPS_MAX_PARAMS];
    int taken[STEPS_MAX_PARAMS];
    kept_view kept[GPU_KEPT];
    size_t n_dropped; /* buckets whose gradients are freed */
    int n_late;
    int n_renewed;
    unsigned percent_flushed; /* of what is held */
    int is_joined; /* the main stream waits for the others after a backward */
    int is_read;   /* the host waits for the device in some steps */
} gpu_rank;

/* ---- kernels -------------------------------------------------------------------- */

typedef struct fill_args {
    const model *model;
    uint64_t step;
    size_t param;
    void *out;
    int from, to;
    int rank;
    int unused; /* the fake takes words for addresses: no padding */
} fill_args;

typedef struct check_args {
    const model *model;
    uint64_t step;
    size_t param;
    const void *at;
    int rank;
    int divisor;
} check_args;

typedef struct word_args {
    uint64_t *at;
    uint64_t word;
} word_args;

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

static atomic_int fill_ms; /* that the first parameter's takes */

STEP_KERNEL(fill, fill_args)
{
    if (it->param == 0)
        pli_sleep_ns(atomic_load(&fill_ms) * PLI_MS);
    fill_grads(it->model, it->step, it->rank, it->param, it->from, it->to, it->out);
}

static atomic_int n_checked; /* number of its runs */

STEP_KERNEL(check, check_args)
{
    atomic_fetch_add(&n_checked, 1);
    check_mean(it->model, it->step, it->rank, it->param, it->at, it->divisor);
}

STEP_KERNEL(put_word, word_args)
{
    *it->at = it->word;
}

STEP_KERNEL(check_word, word_args)
{
    CHECK(*it->at == it->word);
}

static const struct {
    const char *name;
    size_t n_bytes;
    fake_kernel_fn run;
} step_kernels[N_STEP_KERNELS] = {
    [KERNEL_FILL] = {"plt_fill", sizeof(fill_args), run_fill},
    [KERNEL_CHECK] = {"plt_check", sizeof(check_args), run_check},
    [KERNEL_PUT_WORD] = {"plt_put_word", sizeof(word_args), run_put_word},
    [KERNEL_CHECK_WORD] = {"plt_check_word", sizeof(word_args), run_check_word},
};

static inline void launch(const gpu_rank *self, step_kernel kernel, size_t stream,
                          void *args)
{
    CHECK(cuLaunchKernel(self->kernels[kernel], 1, 1, 1, 1, 1, 1, 0,
                         self->streams[stream], &args, NULL) == 0);
}

/* ---- memory --------------------------------------------------------------------- */

static inline block take_block(gpu_rank *self, size_t stream)
{
    block_pool *pool = &self->pools[stream];
    block it = {.stream = stream};
    if (pool->n_unused > 0)
        it.at = pool->unused[--pool->n_unused];
    else
        CHECK(cuMemAlloc(&it.at, GPU_BLOCK_BYTES) == 0);
    return it;
}

static inline void give_block(gpu_rank *self, block *it)
{
    block_pool *pool = &self->pools[it->stream];
    if (it->at == 0)
        return;
    CHECK(cuMemsetD8Async(it->at, SPOILT, GPU_BLOCK_BYTES, self->streams[it->stream]) ==
          0);
    if (CHECK(pool->n_unused < GPU_BLOCKS))
        pool->unused[pool->n_unused++] = it->at;
    *it = (block){.at = 0};
}

static inline void *block_memory(const block *it)
{
    return (void *)(uintptr_t)it->at; /* NOLINT(performance-no-int-to-ptr) */
}

/* Frees the gradients of the buckets posted in the meantime. */
static inline void drop_posted(gpu_rank *self)
{
    const pl_plan *plan = self->reducer->plan;
    for (; self->n_dropped < self->reducer->n_posted; self->n_dropped++) {
        const pl_bucket_plan *bucket = &plan->buckets[self->n_dropped];
        for (size_t m = 0; m < bucket->n_params; m++)
            give_block(self, &self->held[bucket->params[m]]);
    }
}

static inline void drop_all(gpu_rank *self)
{
    for (size_t i = 0; i < self->model->n_params; i++) {
        give_block(self, &self->held[i]);
        give_block(self, &self->late[i]);
    }
}

/* ---- life ----------------------------------------------------------------------- */

static inline pl_stream *stream_of(const gpu_rank *self, size_t k)
{
    return (pl_stream *)(void *)self->streams[k];
}

static inline int gpu_rank_furnish(gpu_rank *self)
{
    int is_good = cuModuleLoadData(&self->module, "plt") == 0;
    for (size_t k = 0; k < N_STEP_KERNELS; k++)
        is_good &= cuModuleGetFunction(&self->kernels[k], self->module,
                                       step_kernels[k].name) == 0;
    for (size_t k = 0; k < self->n_streams; k++)
        is_good &= cuStreamCreate(&self->streams[k], CU_STREAM_NON_BLOCKING) == 0;
    is_good &= cuEventCreate(&self->event, CU_EVENT_DISABLE_TIMING) == 0;
    return CHECK(is_good);
}

static inline pl_status gpu_rank_prepare(gpu_rank *self)
{
    pl_reducer_set_stream(self->reducer, stream_of(self, 0));
    return pl_reducer_prepare(self->reducer);
}

/* Makes a world and its reducer.  On success the GPU world owns `base`. */
static inline int gpu_rank_join(gpu_rank *self, pl_comm *base)
{
    const pl_reducer_spec spec = spec_of(self->model);
    const size_t host_bytes = pl_reducer_header_bytes(&spec);
    const pli_gpu_comm_options options = {
        .base = base,
        .backend = self->backend,
        .nccl = self->model->world_size > 1 ? self->nccl : NULL,
        .host_bytes = host_bytes,
        .device_bytes = pl_reducer_arena_bytes(&spec) - host_bytes,
        .n_ops = pl_reducer_max_ops(&spec),
        .deadline_ns = RANKS_DEADLINE_NS,
    };
    return CHECK_OK(pli_gpu_comm_create(&options, &self->comm)) &&
           CHECK_OK(
               pl_reducer_create(&spec, self->comm, self->backend, &self->reducer));
}

static inline int gpu_rank_create(const model *it, pl_comm *base, succession *worlds,
                                  pli_nccl_library *nccl, draw *random, gpu_rank *self)
{
    const pli_cuda_options cuda = {.device = pl_comm_rank(base), .driver = fake_path()};
    memset(self, 0, sizeof *self);
    self->model = it;
    self->nccl = nccl;
    self->worlds = worlds;
    self->rank = pl_comm_rank(base);
    self->random = random;
    self->percent_flushed = 12;
    self->is_joined = draw_below(random, 2) == 0;
    self->is_read = draw_below(random, 4) > 0;
    self->n_streams = 1 + draw_below(random, GPU_STREAMS);
    if (!CHECK_OK(pli_cuda_backend_create(&cuda, &self->backend)) ||
        !CHECK(cuDevicePrimaryCtxRetain(&self->context, self->rank) == 0) ||
        !CHECK(cuCtxPushCurrent(self->context) == 0))
        return 0;
    return gpu_rank_join(self, base) && gpu_rank_furnish(self) &&
           CHECK_OK(gpu_rank_prepare(self));
}

/* Leaves a failed world for the next, while the failed step may still be under way on
 * the device.  Views of means are kept. */
static inline int gpu_rank_renew(gpu_rank *self)
{
    pl_comm *failed_comm = self->comm;
    pl_reducer *failed = self->reducer;
    pl_comm *base = succession_meet(self->worlds, self->model, self->rank);
    if (base == NULL || !gpu_rank_join(self, base) || !CHECK_OK(gpu_rank_prepare(self)))
        return 0;
    CHECK_OK(pl_reducer_check_weights(failed));
    pl_reducer_follow(self->reducer, failed);
    pl_reducer_destroy(failed);
    pli_window_release(self->window);
    self->window = NULL;
    pl_comm_destroy(failed_comm);
    return 1;
}

static inline void forget_kept(kept_view *it)
{
    if (it->window != NULL)
        pli_window_unsee(it->window, it->param);
    it->window = NULL;
}

static inline void gpu_rank_destroy(gpu_rank *self)
{
    CUcontext popped = NULL;
    pl_reducer_destroy(self->reducer); /* while its operations are under way */
    pli_window_release(self->window);
    if (self->rank % 2 == 0) /* views may outlive the world */
        for (size_t k = 0; k < GPU_KEPT; k++)
            forget_kept(&self->kept[k]);
    pl_comm_destroy(self->comm);
    for (size_t k = 0; k < GPU_KEPT; k++)
        forget_kept(&self->kept[k]);
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
