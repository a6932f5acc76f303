/* test_gpu_comm_order.c - the order between a user's streams and the world's own.
 *
 * The host does not wait between the first step and the last: copies on the user's
 * streams bring values into the ranges and out of them, so that only events order them.
 * The fake runs operations as late, as early and in as random an order as it can.
 *
 *     test_gpu_comm_order [seeds [first seed]]
 */
#include "gpu_ranks.h"
#include "seeds.h"

enum {
    N_STEPS = 4,
    N_OPS = 3,
    OP_ELEMS = 1000,
    OP_BYTES = OP_ELEMS * 4,
    N_SEEDS = IS_SANITIZED ? 4 : 8
};

/* How a test orders its results. */
typedef enum ordering { BY_ORDER, BY_DONE, N_ORDERINGS } ordering;

typedef struct plan {
    pl_dtype dtype;
    ordering by;
} plan;

/* A rank's own memory: inputs and results of each range. */
typedef struct sheets {
    char *in[N_STEPS][N_OPS];
    char *out[N_STEPS][N_OPS];
    pl_event *done[N_OPS];
    pl_event *here; /* orders other streams before the first */
    pl_stream *second;
} sheets;

static pl_op op_of(const plan *it, size_t k)
{
    static const pl_op_kind kinds[N_OPS] = {PL_ALL_REDUCE, PL_BROADCAST, PL_ALL_REDUCE};
    return (pl_op){.kind = kinds[k],
                   .reduction = k == 0 ? PL_MEAN : PL_SUM,
                   .dtype = it->dtype,
                   .offset_bytes = GPUS_HOST_BYTES + k * OP_BYTES,
                   .n_elems = OP_ELEMS};
}

static int put(gpu_rank *self, const pl_op *op, unsigned seed, char *to)
{
    char values[OP_BYTES];
    for (size_t i = 0; i < op->n_elems; i++)
        value_put(values, op->dtype, i,
                  ops_value(op, seed, self->comm->world_size, self->rank, i));
    return CHECK_OK(pli_cuda_write(self->backend, to, values,
                                   op->n_elems * pl_dtype_bytes(op->dtype),
                                   self->stream));
}

static void look(gpu_rank *self, const pl_op *op, unsigned seed, const char *at)
{
    char values[OP_BYTES];
    size_t n_wrong = 0;
    if (!CHECK_OK(pli_cuda_read(self->backend, values, at,
                                op->n_elems * pl_dtype_bytes(op->dtype), self->stream)))
        return;
    for (size_t i = 0; i < op->n_elems; i++)
        n_wrong +=
            !value_is(values, op->dtype, i,
                      ops_expected(op, seed, self->comm->world_size, self->rank, i));
    if (!CHECK(n_wrong == 0))
        CHECK_MORE("seed %d, schedule %d, step %u: %s of %s, rank %d of %d: %zu wrong",
                   (int)self->all->seed, (int)self->all->fake.schedule, seed / N_OPS,
                   pli_op_kind_text(op->kind), pl_dtype_text(op->dtype), self->rank,
                   self->comm->world_size, n_wrong);
}

static pl_stream *second_stream(gpu_rank *self)
{
    pli_cu_stream stream = NULL;
    pli_cuda_scope scope;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return NULL;
    const pli_driver *driver = pli_cuda_driver(self->backend);
    CHECK(driver->cuStreamCreateWithPriority(&stream, 1, 0) == 0);
    pli_cuda_leave(self->backend, &scope);
    return (pl_stream *)(void *)stream;
}

static int sheets_open(gpu_rank *self, sheets *out)
{
    const plan *const it = self->all->context;
    const pl_backend_ops *const ops = self->backend->ops;
    int is_well = CHECK_OK(ops->event_create(self->backend, &out->here));
    out->second = second_stream(self);
    for (size_t k = 0; is_well && k < N_OPS; k++) {
        const pl_op op = op_of(it, k);
        is_well = CHECK_OK(ops->event_create(self->backend, &out->done[k]));
        for (unsigned s = 0; is_well && s < N_STEPS; s++)
            is_well = CHECK_OK(ops->alloc(self->backend, OP_BYTES,
                                          (void **)&out->in[s][k])) &&
                      CHECK_OK(ops->alloc(self->backend, OP_BYTES,
                                          (void **)&out->out[s][k])) &&
                      put(self, &op, s * N_OPS + (unsigned)k, out->in[s][k]);
    }
    return is_well;
}

static void sheets_close(gpu_rank *self, sheets *it)
{
    const pl_backend_ops *const ops = self->backend->ops;
    pli_cuda_scope scope;
    CHECK_OK(ops->synchronize(self->backend, it->second));
    CHECK_OK(ops->synchronize(self->backend, self->stream));
    ops->event_destroy(self->backend, it->here);
    for (size_t k = 0; k < N_OPS; k++) {
        ops->event_destroy(self->backend, it->done[k]);
        for (size_t s = 0; s < N_STEPS; s++) {
            ops->free(self->backend, it->in[s][k]);
            ops->free(self->backend, it->out[s][k]);
        }
    }
    if (CHECK_OK(pli_cuda_enter(self->backend, &scope))) {
        (void)pli_cuda_driver(self->backend)
            ->cuStreamDestroy((pli_cu_stream)(void *)it->second);
        pli_cuda_leave(self->backend, &scope);
    }
}

static pl_status copy(gpu_rank *self, const pl_op *op, void *to, const void *from,
                      pl_stream *stream)
{
    const pl_move move = {
        .to = to, .from = from, .dtype = op->dtype, .n_elems = op->n_elems};
    return self->backend->ops->copy(self->backend, &move, 1, stream);
}

/* Makes `behind` wait for the work on `stream`. */
static pl_status put_behind(gpu_rank *self, pl_event *event, pl_stream *behind,
                            pl_stream *stream)
{
    pl_status st = PL_OK;
    PL_TRY(self->backend->ops->event_record(self->backend, event, stream));
    PL_TRY(self->backend->ops->event_wait(self->backend, event, behind));
done:
    return st;
}

static pl_status agree(gpu_rank *self)
{
    pl_status st = PL_OK;
    const pl_op op = {.kind = PL_BARRIER};
    PL_TRY(do_op(self->comm, &op));
done:
    return st;
}

/* Issues operations on ranges that copies fill. */
static pl_status begin(gpu_rank *self, const sheets *it, const plan *what, size_t s)
{
    pl_status st = PL_OK;
    pl_ticket ticket = 0;
    for (size_t k = 0; k < N_OPS; k++) {
        const pl_op op = op_of(what, k);
        const pli_order order = {.ready = self->ready,
                                 .done = what->by == BY_DONE ? it->done[k] : NULL};
        PL_TRY(copy(self, &op, pli_comm_memory(self->comm, op.offset_bytes),
                    it->in[s][k], self->stream));
        PL_TRY(
            self->backend->ops->event_record(self->backend, self->ready, self->stream));
        PL_TRY(pli_comm_issue_ordered(self->comm, &op, &order, &ticket));
    }
done:
    return st;
}

static pl_status step(gpu_rank *self, sheets *it, const plan *what, size_t s)
{
    pl_status st = PL_OK;
    pl_stream *const reader = what->by == BY_DONE ? it->second : self->stream;
    PL_TRY(begin(self, it, what, s));
    PL_TRY(agree(self));
    if (what->by == BY_ORDER)
        PL_TRY(pli_comm_order(self->comm, self->stream));
    for (size_t k = 0; k < N_OPS; k++) {
        const pl_op op = op_of(what, k);
        if (what->by == BY_DONE)
            PL_TRY(
                self->backend->ops->event_wait(self->backend, it->done[k], it->second));
        PL_TRY(copy(self, &op, it->out[s][k],
                    pli_comm_memory(self->comm, op.offset_bytes), reader));
    }
    if (what->by == BY_DONE)
        PL_TRY(put_behind(self, it->here, self->stream, it->second));
done:
    return st;
}

static void run_steps(gpu_rank *self)
{
    const plan *const what = self->all->context;
    sheets it = {.second = NULL};
    if (sheets_open(self, &it)) {
        int is_well = 1;
        for (size_t s = 0; is_well && s < N_STEPS; s++)
            is_well = CHECK_OK(step(self, &it, what, s));
        for (unsigned s = 0; is_well && s < N_STEPS; s++)
            for (unsigned k = 0; k < N_OPS; k++) {
                const pl_op op = op_of(what, k);
                look(self, &op, s * N_OPS + k, it.out[s][k]);
            }
    }
    sheets_close(self, &it);
}

TEST(results_reach_whoever_waits_for_them_in_any_order_of_things)
{
    static const pl_dtype dtypes[] = {PL_F32, PL_BF16, PL_F32, PL_F16};
    EACH_SEED (seed, N_SEEDS)
        for (int s = 0; s < N_SCHEDULES; s++)
            for (int by = 0; by < N_ORDERINGS; by++) {
                plan what = {.dtype = dtypes[seed % 4], .by = (ordering)by};
                gpu_ranks all = gpu_ranks_of(1 + (int)(seed % 3), seed, schedules[s]);
                all.accumulation =
                    seed % 4 == 0 ? PLI_ACCUMULATE_BY_NCCL : PLI_ACCUMULATE_IN_F32;
                all.context = &what;
                gpu_ranks_run_world(&all, run_steps);
            }
}

/* ---- a step after a failed one -------------------------------------------------- */

/* Begins a step on different values, until a rank gives up. */
static pl_status begin_and_fail(gpu_rank *self, const sheets *it, const plan *what)
{
    pl_status st = PL_OK;
    PL_TRY(begin(self, it, what, 1));
    if (self->rank == 0)
        pl_comm_abort(self->comm, "given up");
    PL_TRY(agree(self));
done:
    return st;
}

static void run_failing(gpu_rank *self)
{
    const plan *const what = self->all->context;
    sheets it = {.second = NULL};
    pl_recovery how = PL_NOTHING_FAILED;
    if (sheets_open(self, &it) && CHECK_OK(step(self, &it, what, 0))) {
        CHECK(begin_and_fail(self, &it, what) != PL_OK);
        if (CHECK_OK(recover_through(self->comm, &how)) &&
            CHECK_OK(step(self, &it, what, 2)) && CHECK_OK(step(self, &it, what, 3)))
            for (unsigned s = 0; s < N_STEPS; s++)
                for (unsigned k = 0; s != 1 && k < N_OPS; k++) {
                    const pl_op op = op_of(what, k);
                    look(self, &op, s * N_OPS + k, it.out[s][k]);
                }
        CHECK(how == PL_RECOVERED);
    }
    sheets_close(self, &it);
}

TEST(what_a_failed_step_has_left_does_not_touch_the_next)
{
    EACH_SEED (seed, N_SEEDS)
        for (int s = 0; s < N_SCHEDULES; s++) {
            plan what = {.dtype = seed % 2 == 0 ? PL_BF16 : PL_F32, .by = BY_ORDER};
            gpu_ranks all = gpu_ranks_of(2 + (int)(seed % 2), seed, schedules[s]);
            all.accumulation = PLI_ACCUMULATE_IN_F32;
            all.context = &what;
            gpu_ranks_run_world(&all, run_failing);
        }
}

/* ---- a captured step ------------------------------------------------------------ */

typedef struct graph {
    CUgraph graph;
    CUgraphExec exec;
} graph;

/* Captures a whole step, which reads in[1] and writes out[1]. */
static int capture(gpu_rank *self, sheets *it, const plan *what, graph *out)
{
    CUstream const stream = (CUstream)(void *)self->stream;
    pli_cuda_scope scope;
    int is_well = 0;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return 0;
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == 0);
    is_well = CHECK_OK(step(self, it, what, 1));
    is_well &= CHECK(cuStreamEndCapture(stream, &out->graph) == 0);
    is_well = is_well && CHECK(cuGraphInstantiate(&out->exec, out->graph, 0) == 0);
    pli_cuda_leave(self->backend, &scope);
    return is_well;
}

/* Replays the step with the values of step s, and copies the results to out[s]. */
static int replay(gpu_rank *self, sheets *it, const plan *what, const graph *of,
                  size_t s)
{
    pli_cuda_scope scope;
    int is_well = 1;
    for (size_t k = 0; is_well && k < N_OPS; k++) {
        const pl_op op = op_of(what, k);
        is_well = CHECK_OK(copy(self, &op, it->in[1][k], it->in[s][k], self->stream));
    }
    if (!is_well || !CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return 0;
    CHECK(cuGraphLaunch(of->exec, (CUstream)(void *)self->stream) == 0);
    pli_cuda_leave(self->backend, &scope);
    for (size_t k = 0; is_well && k < N_OPS; k++) {
        const pl_op op = op_of(what, k);
        is_well = CHECK_OK(copy(self, &op, it->out[s][k], it->out[1][k], self->stream));
    }
    return is_well;
}

static void run_captured(gpu_rank *self)
{
    const plan *const what = self->all->context;
    sheets it = {.second = NULL};
    graph of = {NULL, NULL};
    pli_cuda_scope scope;
    if (sheets_open(self, &it) && CHECK_OK(step(self, &it, what, 0)) &&
        capture(self, &it, what, &of) && replay(self, &it, what, &of, 2) &&
        CHECK_OK(step(self, &it, what, 3))) {
        for (unsigned s = 0; s < N_STEPS; s++)
            for (unsigned k = 0; s != 1 && k < N_OPS; k++) {
                const pl_op op = op_of(what, k);
                look(self, &op, s * N_OPS + k, it.out[s][k]);
            }
    }
    sheets_close(self, &it);
    if (CHECK_OK(pli_cuda_enter(self->backend, &scope))) {
        if (of.exec != NULL)
            CHECK(cuGraphExecDestroy(of.exec) == 0);
        if (of.graph != NULL)
            CHECK(cuGraphDestroy(of.graph) == 0);
        pli_cuda_leave(self->backend, &scope);
    }
}

TEST(a_step_is_captured_whole_and_replayed_between_others)
{
    EACH_SEED (seed, N_SEEDS)
        for (int s = 0; s < N_SCHEDULES; s++)
            for (int by = 0; by < N_ORDERINGS; by++) {
                plan what = {.dtype = PL_F32, .by = (ordering)by};
                gpu_ranks all = gpu_ranks_of(1 + (int)(seed % 3), seed, schedules[s]);
                all.context = &what;
                gpu_ranks_run_world(&all, run_captured);
            }
}
