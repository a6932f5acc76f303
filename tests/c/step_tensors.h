/* step_tensors.h - a rank whose gradients are tensors of a fake device: all that a step
 * asks of its caller on a GPU.
 *
 * Each tensor has a multiple of one pattern, so the mean of several is that of their
 * factors.  Its memory is a block of a stream (device_rank.h): once the last reference
 * is dropped, it is spoilt and reused in the order of that stream.  Kernels check the
 * values, so a step that waits for too little ends with a wrong number.
 */
#ifndef PLT_STEP_TENSORS_H
#define PLT_STEP_TENSORS_H

#include "device_rank.h"
#include "reducer/step_state.h"
#include "succession.h"

enum {
    N_PARAMS = 9,
    N_BUFFERS = 3,
    N_KEPT = 3,
    EMPTY_PARAM = 7,
    BUFFER_COLS = 20,
    VIEW_BYTES = 150,
};

typedef struct rank_tensors rank_tensors;

struct pl_grad {
    rank_tensors *owner;
    int n_refs;
    long own_writes;
    long *n_writes; /* of a tensor that shares them with others */
    pli_layout layout;
    float *data;
    block memory;        /* .at 0: the memory of another */
    device_memory *seen; /* the world's, of a view of a slot */
};

/* A world, and what each of its ranks does. */
typedef struct tensor_world {
    model it; /* seed, size, percentages */
    pli_nccl_library *nccl;
    succession worlds;
    void (*train)(rank_tensors *self);
    pl_step_size size;
    unsigned percent_hooks, percent_strided, percent_recorded, percent_grown;
    int keeps_grads;
    atomic_int n_late, n_views; /* on all ranks, in all steps */
} tensor_world;

typedef struct expected_tensor {
    pl_grad *tensor; /* NULL: none */
    double factor;
} expected_tensor;

struct rank_tensors {
    device_rank gpu; /* its streams and memory */
    tensor_world *world;
    pl_step *step;
    pl_step_settings settings;
    size_t current; /* stream of this thread */
    CUfunction write, check;
    expected_tensor grads[N_PARAMS], buffers[N_BUFFERS], kept[N_KEPT];
    long shared_writes;        /* of the first two buffers */
    int takes_over[N_BUFFERS]; /* the next forward does: the root's of that step */
    uint64_t last_step;
    int is_recorded;
    int is_let_go;
    long n_alive;
};

/* ---- kernels -------------------------------------------------------------------- */

typedef struct tensor_args {
    float *to;
    const float *from; /* NULL: the pattern */
    int64_t n_rows, n_cols;
    int64_t to_row, to_col, from_row, from_col; /* strides */
    double factor;
    int64_t adds;
} tensor_args;

static inline float pattern_at(const tensor_args *it, int64_t row, int64_t col)
{
    return (float)(it->factor * (double)(1 + (row * it->n_cols + col) % 7));
}

STEP_KERNEL(write_tensor, tensor_args)
{
    for (int64_t row = 0; row < it->n_rows; row++)
        for (int64_t col = 0; col < it->n_cols; col++) {
            float *to = it->to + row * it->to_row + col * it->to_col;
            const float value = it->from == NULL
                                    ? pattern_at(it, row, col)
                                    : it->from[row * it->from_row + col * it->from_col];
            *to = it->adds ? *to + value : value;
        }
}

static atomic_int n_checked; /* number of its runs */

STEP_KERNEL(check_tensor, tensor_args)
{
    int64_t n_wrong = 0;
    atomic_fetch_add(&n_checked, 1);
    for (int64_t row = 0; row < it->n_rows; row++)
        for (int64_t col = 0; col < it->n_cols; col++)
            n_wrong +=
                it->to[row * it->to_row + col * it->to_col] != pattern_at(it, row, col);
    if (!CHECK(n_wrong == 0))
        CHECK_MORE("%d of %d x %d, the first is %g in place of %g", (int)n_wrong,
                   (int)it->n_rows, (int)it->n_cols, (double)*it->to, it->factor);
}

static inline void tensor_launch(const rank_tensors *self, CUfunction kernel,
                                 size_t stream, const pl_grad *to, tensor_args args)
{
    void *all[] = {&args};
    args.to = to->data;
    args.n_rows = to->layout.dims[0].size;
    args.n_cols = to->layout.dims[1].size;
    args.to_row = to->layout.dims[0].stride;
    args.to_col = to->layout.dims[1].stride;
    if (to->layout.n_elems > 0)
        CHECK(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, self->gpu.streams[stream],
                             all, NULL) == 0);
}

/* On the stream of this thread. */
static inline void tensor_fill(pl_grad *to, double factor)
{
    const rank_tensors *self = to->owner;
    ++*to->n_writes;
    tensor_launch(self, self->write, self->current, to,
                  (tensor_args){.factor = factor});
}

static inline void tensor_write(pl_grad *to, const pl_grad *from, int adds)
{
    const rank_tensors *self = to->owner;
    ++*to->n_writes;
    tensor_launch(self, self->write, self->current, to,
                  (tensor_args){.from = from->data,
                                .from_row = from->layout.dims[0].stride,
                                .from_col = from->layout.dims[1].stride,
                                .adds = adds});
}

static inline void tensor_check(const expected_tensor *it)
{
    if (it->tensor != NULL)
        tensor_launch(it->tensor->owner, it->tensor->owner->check,
                      it->tensor->owner->current, it->tensor,
                      (tensor_args){.factor = it->factor});
}

/* ---- tensors -------------------------------------------------------------------- */

static inline pli_layout layout_of(int n_rows, int n_cols, int is_strided)
{
    return (pli_layout){.dtype = PL_F32,
                        .n_dims = 2,
                        .n_elems = (size_t)n_rows * (size_t)n_cols,
                        .dims = {{.size = n_rows, .stride = is_strided ? 1 : n_cols},
                                 {.size = n_cols, .stride = is_strided ? n_rows : 1}}};
}

static inline pli_layout param_layout(size_t i, int is_strided)
{
    return layout_of(1 + (int)i % 4, i == EMPTY_PARAM ? 0 : 3 + 5 * (int)i, is_strided);
}

static inline pl_grad *tensor_bare(rank_tensors *self, const pli_layout *layout)
{
    pl_grad *it = calloc(1, sizeof *it);
    if (it == NULL)
        exit(2);
    it->owner = self;
    it->n_refs = 1;
    it->n_writes = &it->own_writes;
    it->layout.dtype = layout->dtype;
    it->layout.n_dims = layout->n_dims;
    it->layout.n_elems = layout->n_elems;
    memcpy(it->layout.dims, layout->dims, 2 * sizeof *layout->dims);
    self->n_alive++;
    return it;
}

/* A new tensor, in memory of this thread's stream. */
static inline pl_grad *tensor_new(rank_tensors *self, const pli_layout *layout)
{
    pl_grad *it = tensor_bare(self, layout);
    if (layout->n_elems > 0) {
        it->memory = take_block(&self->gpu, self->current);
        it->data = block_memory(&it->memory);
    }
    return it;
}

static inline void tensor_hold(pl_grad *it)
{
    CHECK(it->n_refs > 0 && !it->owner->is_let_go);
    it->n_refs++;
}

static inline void tensor_drop(pl_grad *it)
{
    if (it == NULL)
        return;
    CHECK(it->n_refs > 0 && !it->owner->is_let_go);
    if (--it->n_refs > 0)
        return;
    it->owner->n_alive--;
    give_block(&it->owner->gpu, &it->memory);
    device_memory_drop(it->seen);
    free(it);
}

static inline void tensor_replace(expected_tensor *place, pl_grad *it)
{
    pl_grad *before = place->tensor;
    place->tensor = it;
    tensor_drop(before);
}

static inline pl_grad *hold_maybe(pl_grad *it)
{
    if (it != NULL)
        tensor_hold(it);
    return it;
}

/* ---- the operations of a step --------------------------------------------------- */

static inline rank_tensors *tensors_of(void *context)
{
    rank_tensors *self = context;
    CHECK(!self->is_let_go);
    return self;
}

static inline pl_status tensors_find(void *context, size_t i, pl_grad **out)
{
    *out = hold_maybe(tensors_of(context)->grads[i].tensor);
    return PL_OK;
}

static inline pl_status tensors_read(void *context, pl_reading how, const char *what,
                                     pl_grad *it, pli_tensor *out)
{
    (void)how;
    CHECK(what != NULL && it->n_refs > 0 && it->owner == tensors_of(context));
    out->data = it->data;
    out->layout = it->layout;
    return PL_OK;
}

static inline pl_status tensors_read_arrived(void *context, pl_grad **it,
                                             unsigned *n_sparse_dims, pli_tensor *out)
{
    *n_sparse_dims = 0;
    return tensors_read(context, PL_READ_GRAD, "a gradient", *it, out);
}

static inline void tensors_put_back(void *context, size_t i, pl_grad *it)
{
    tensor_replace(&tensors_of(context)->grads[i], hold_maybe(it));
}

static inline pl_status tensors_put(void *context, size_t i, pl_grad *it)
{
    tensors_put_back(context, i, it);
    return PL_OK;
}

static inline pl_status tensors_over(void *context, const pl_place *place,
                                     const pli_layout *layout, pl_grad **out)
{
    rank_tensors *self = tensors_of(context);
    pl_grad *it = tensor_bare(self, layout);
    it->data = place->memory;
    it->seen = self->gpu.comm->device_owner;
    device_memory_hold(it->seen);
    *out = it;
    return PL_OK;
}

static inline pl_status tensors_empty_like(void *context, pl_grad *like, pl_grad **out)
{
    *out = tensor_new(tensors_of(context), &like->layout);
    return PL_OK;
}

static inline pl_status tensors_clone(void *context, pl_grad *from, pl_grad **out)
{
    *out = tensor_new(tensors_of(context), &from->layout);
    tensor_write(*out, from, 0);
    return PL_OK;
}

static inline pl_status tensors_copy(void *context, pl_grad *to, pl_grad *from)
{
    CHECK(to->owner == tensors_of(context));
    tensor_write(to, from, 0);
    return PL_OK;
}

static inline pl_status tensors_add(void *context, pl_grad *to, pl_grad *from)
{
    CHECK(to->owner == tensors_of(context));
    tensor_write(to, from, 1);
    return PL_OK;
}

static inline pl_status tensors_note_write(void *context, pl_grad *it)
{
    CHECK(it->owner == tensors_of(context));
    ++*it->n_writes;
    return PL_OK;
}

static inline pl_status tensors_n_writes(void *context, pl_grad *it, long *out)
{
    CHECK(it->owner == tensors_of(context));
    *out = *it->n_writes;
    return PL_OK;
}

static inline pl_status tensors_find_buffer(void *context, size_t b, pl_grad **out)
{
    *out = hold_maybe(tensors_of(context)->buffers[b].tensor);
    return PL_OK;
}

static inline pl_status tensors_await_end(void *context, pl_end_origin origin)
{
    CHECK(origin != PL_END_OF_LOCAL_OUTPUT);
    tensors_of(context)->settings.n_ends = 1;
    return PL_OK;
}

static inline pl_status tensors_is_recorded(void *context, int *out)
{
    *out = tensors_of(context)->is_recorded;
    return PL_OK;
}

/* The same parameters on each rank. */
static inline int param_has_hooks(const rank_tensors *self, size_t i)
{
    return step_percent(&self->world->it, 0, 0, i, 5) < self->world->percent_hooks;
}

static inline int tensors_has_hooks(void *context, size_t i)
{
    return param_has_hooks(tensors_of(context), i);
}

static inline void *tensors_let_go(void *context)
{
    rank_tensors *self = tensors_of(context);
    self->is_let_go = 1;
    return self;
}

static inline void tensors_take_back(void *lock)
{
    rank_tensors *self = lock;
    if (self != NULL && CHECK(self->is_let_go))
        self->is_let_go = 0;
}

static inline pl_status tensors_do_nothing(void *context)
{
    (void)tensors_of(context);
    return PL_OK;
}

static inline pl_status tensors_current_stream(void *context, pl_stream **out)
{
    const rank_tensors *self = tensors_of(context);
    *out = stream_of(&self->gpu, self->current);
    return PL_OK;
}

static const pl_grad_ops tensors_ops = {.find = tensors_find,
                                        .read_arrived = tensors_read_arrived,
                                        .read = tensors_read,
                                        .hold = tensor_hold,
                                        .drop = tensor_drop,
                                        .put = tensors_put,
                                        .put_back = tensors_put_back,
                                        .over = tensors_over,
                                        .empty_like = tensors_empty_like,
                                        .clone = tensors_clone,
                                        .copy = tensors_copy,
                                        .add = tensors_add,
                                        .note_write = tensors_note_write,
                                        .n_writes = tensors_n_writes,
                                        .find_buffer = tensors_find_buffer};

static const pl_step_host tensors_host = {.await_end = tensors_await_end,
                                          .is_recorded = tensors_is_recorded,
                                          .has_hooks = tensors_has_hooks,
                                          .let_go = tensors_let_go,
                                          .take_back = tensors_take_back,
                                          .check_signals = tensors_do_nothing,
                                          .current_stream = tensors_current_stream,
                                          .finished = tensors_do_nothing};

/* ---- a rank begins and ends ----------------------------------------------------- */

typedef struct tensors_spec {
    pl_step_spec spec;
    pli_layout layouts[N_PARAMS];
    pli_layout *refs[N_PARAMS];
    pl_buffer_spec buffers[N_BUFFERS];
} tensors_spec;

static inline void tensors_make_spec(int world_size, tensors_spec *out)
{
    out->spec = (pl_step_spec){.layouts = out->refs,
                               .n_params = N_PARAMS,
                               .buffers = out->buffers,
                               .n_buffers = N_BUFFERS,
                               .view_bytes = VIEW_BYTES,
                               .world_size = world_size,
                               .caps = {.bucket_bytes = 600, .last_bytes = 200},
                               .grads = &tensors_ops,
                               .host = &tensors_host};
    for (size_t i = 0; i < N_PARAMS; i++) {
        out->layouts[i] = param_layout(i, 0);
        out->refs[i] = &out->layouts[i];
    }
    for (size_t b = 0; b < N_BUFFERS; b++)
        out->buffers[b].n_bytes = BUFFER_COLS * sizeof(float);
}

/* Makes a step in a new world, which owns `base`. */
static inline int tensors_join(rank_tensors *self, pl_comm *base)
{
    tensor_world *world = self->world;
    tensors_spec make;
    const pli_gpu_comm_options options = {
        .base = base,
        .backend = self->gpu.backend,
        .nccl = world->it.world_size > 1 ? world->nccl : NULL,
        .host_bytes = world->size.header_bytes,
        .device_bytes = world->size.arena_bytes - world->size.header_bytes,
        .allocator = device_allocator(self->gpu.backend),
        .n_ops = world->size.n_ops,
        .deadline_ns = RANKS_DEADLINE_NS,
    };
    tensors_make_spec(world->it.world_size, &make);
    make.spec.settings = &self->settings;
    make.spec.context = self;
    self->current = 0;
    return CHECK_OK(pli_gpu_comm_create(&options, &self->gpu.comm)) &&
           CHECK_OK(pl_step_create(&make.spec, self->gpu.comm, self->gpu.backend,
                                   &self->step)) &&
           CHECK_OK(pl_step_prepare(self->step));
}

static inline int tensors_create(rank_tensors *self, rank_job *job)
{
    device_rank *gpu = &self->gpu;
    const pli_layout layout = layout_of(1, BUFFER_COLS, 0);
    self->world = job->context;
    self->settings =
        (pl_step_settings){.is_on = 1, .keeps_grads = (char)self->world->keeps_grads};
    if (!device_rank_create(job->rank, &job->random, gpu) ||
        !CHECK(cuModuleGetFunction(&self->write, gpu->module, "plt_write_tensor") == 0))
        return 0;
    CHECK(cuModuleGetFunction(&self->check, gpu->module, "plt_check_tensor") == 0);
    for (size_t b = 0; b < N_BUFFERS; b++) {
        self->buffers[b].tensor = tensor_new(self, &layout);
        tensor_fill(self->buffers[b].tensor, 0);
    }
    self->buffers[0].tensor->n_writes = &self->shared_writes;
    self->buffers[1].tensor->n_writes = &self->shared_writes;
    return tensors_join(self, job->comm);
}

/* Leaves a failed world for the next, while the failed step may still be under way on
 * the device. */
static inline int tensors_renew(rank_tensors *self)
{
    pl_comm *failed_comm = self->gpu.comm;
    pl_step *failed = self->step;
    pl_comm *base =
        succession_meet(&self->world->worlds, &self->world->it, self->gpu.rank);
    if (base == NULL || !tensors_join(self, base))
        return 0;
    CHECK_OK(pl_step_check_failure(failed));
    pl_step_follow(self->step, failed);
    pl_step_destroy(failed);
    pl_comm_destroy(failed_comm);
    return 1;
}

/* Whether steps write a tensor that was kept: a view of the world's memory. */
static inline int is_overwritten(const rank_tensors *self, const pl_grad *it)
{
    return it != NULL && it->seen != NULL && it->seen == self->gpu.comm->device_owner;
}

/* All streams wait for what the main one does: memory that it reads may be freed. */
static inline void tensors_zero(rank_tensors *self)
{
    streams_behind(&self->gpu);
    for (size_t i = 0; i < N_PARAMS; i++)
        tensor_replace(&self->grads[i], NULL);
}

static inline void tensors_destroy(rank_tensors *self)
{
    if (self->step != NULL)
        pl_step_drop(self->step);
    self->current = 0;
    tensors_zero(self);
    for (size_t k = 0; k < N_KEPT; k++)
        if (!is_overwritten(self, self->kept[k].tensor))
            tensor_check(&self->kept[k]);
    for (size_t b = 0; b < N_BUFFERS; b++)
        tensor_replace(&self->buffers[b], NULL);
    pl_step_destroy(self->step);
    CHECK(cuStreamSynchronize(self->gpu.streams[0]) == 0);
    for (size_t k = 0; k < N_KEPT; k++)
        tensor_replace(&self->kept[k], NULL);
    CHECK(self->n_alive == 0 && !self->is_let_go);
    device_rank_destroy(&self->gpu);
}

static inline void tensors_rank(rank_job *job)
{
    rank_tensors *self = calloc(1, sizeof *self);
    if (self == NULL)
        exit(2);
    if (tensors_create(self, job)) {
        self->world->train(self);
        tensors_destroy(self);
    }
    free(self);
}

static inline void tensors_run(tensor_world *world)
{
    static const fake_schedule schedules[] = {FAKE_LATE, FAKE_RANDOM, FAKE_EARLY,
                                              FAKE_RANDOM};
    static const size_t n_bytes = sizeof(tensor_args);
    tensors_spec make;
    fake_options options = fake_defaults();
    options.seed = world->it.seed;
    options.devices = world->it.world_size;
    options.schedule = schedules[world->it.seed % 4];
    options.pump = world->it.seed % 5 == 0;
    options.foreign = 1;
    fake_reset(&options);
    fake_register_kernel("plt_write_tensor", 1, &n_bytes, run_write_tensor);
    fake_register_kernel("plt_check_tensor", 1, &n_bytes, run_check_tensor);
    tensors_make_spec(world->it.world_size, &make);
    if (!CHECK_OK(pl_step_measure(&make.spec, &world->size)) ||
        !CHECK_OK(pli_nccl_library_open(fake_path(), &world->nccl)))
        return;
    world->worlds.n_bytes = world->size.header_bytes + PLI_GPU_BOARD_BYTES;
    succession_run(&world->worlds, &world->it, tensors_rank, world);
    pli_nccl_library_release(world->nccl);
    fake_torch_settle();
    if (!CHECK(fake_errors() == 0))
        for (int i = 0; fake_error(i) != NULL; i++)
            CHECK_MORE("seed %d: %s", (int)world->it.seed, fake_error(i));
    for (int i = 0; i < 5000 && fake_live_objects() > 0; i++)
        pli_sleep_ns(PLI_MS);
    CHECK(fake_live_objects() == 0);
}

#endif
