/* gpu_comm_trial.c - tries the operations of steps before the first step.
 *
 * NCCL connects two ranks in the first operation that uses a path between them; kind,
 * size and memory decide which.  The host then waits for the peers, and device memory
 * is allocated.  And some machines whose GPUs cannot reach each other's memory give
 * wrong numbers without an error.  So each kind of operation runs here, from the
 * smallest size to the largest, with values that show whether each element of the
 * result is right:
 *
 *     a sum         element i: i / n % 5 + 1 from rank i % n, 0 from all others
 *     a broadcast   element i: i / n % 5 + 1 from the root, 6 on all others
 *
 * A helper thread runs the trial, because NCCL may block it to wait for a peer.  The
 * rank's thread checks its peers and signals, and aborts the communicator if it gives
 * up.  If the helper does not return even then, the world is never freed.
 */
#include <math.h>
#include <string.h>

#include "backend/cpu_scale.h"
#include "backend/cuda.h"
#include "core/alloc.h"
#include "gpu_comm_state.h"
#include "helper_thread.h"

enum {
    STEP_FACTOR = 16, /* between one size and the next */
    PIECE_BYTES = 1 << 20,
    LEFT_MS = 10000, /* for the helper to return from an aborted communicator */
    MOST_BROADCAST_BYTES = 32 << 20,
    N_VALUES = 5,
    WRONG_VALUE, /* no rank may receive it */
    MOST_ELEM_BYTES = 8
};

static const char doing[] = "the first operations on the device";

enum { MOST_RANGES = PL_N_DTYPES }; /* one per dtype, or a few of ours */

typedef struct trial {
    pli_gpu_comm *self;
    char *scratch; /* instead of the world's memory; NULL: use that */
    pli_op_range ranges[MOST_RANGES];
    size_t n_ranges;
    pl_event *ready; /* then the memory may be written; NULL: now */
    atomic_int is_given_up;
    char *piece; /* PIECE_BYTES of host memory */
} trial;

/* ---- values --------------------------------------------------------------------- */

/* Complex numbers are two floats. */
static pl_dtype real_type(pl_dtype dtype)
{
    return dtype == PL_C64 ? PL_F32 : dtype == PL_C128 ? PL_F64 : dtype;
}

static size_t n_reals(const pl_op *op)
{
    return op->n_elems * (real_type(op->dtype) == op->dtype ? 1 : 2);
}

/* 0 .. 6, exact in every type. */
static void put_value(pl_dtype dtype, unsigned value, char out[MOST_ELEM_BYTES])
{
    const int is_half = dtype == PL_F16 || dtype == PL_BF16;
    const uint16_t half = is_half ? pli_cpu_round(value, dtype) : 0;
    const float f32 = (float)value;
    const double f64 = value;
    const uint64_t whole = value; /* the low bytes first, as on all CUDA hosts */
    const void *from = is_half           ? (const void *)&half
                       : dtype == PL_F32 ? (const void *)&f32
                       : dtype == PL_F64 ? (const void *)&f64
                                         : (const void *)&whole;
    memcpy(out, from, pl_dtype_bytes(dtype));
}

static double get_value(pl_dtype dtype, const char *at)
{
    uint16_t half = 0;
    uint64_t whole = 0;
    float f32 = 0;
    double f64 = 0;
    switch (dtype) {
    case PL_F16:
    case PL_BF16:
        memcpy(&half, at, sizeof half);
        return pli_cpu_widen(half, dtype);
    case PL_F32:
        memcpy(&f32, at, sizeof f32);
        return (double)f32;
    case PL_F64:
        memcpy(&f64, at, sizeof f64);
        return f64;
    default:
        memcpy(&whole, at, pl_dtype_bytes(dtype));
        return (double)whole;
    }
}

/* An element's value, and the rank that adds it to a sum. */
typedef struct element {
    unsigned value;
    int owner;
    int n_ranks;
} element;

static element element_at(const pli_gpu_comm *self, size_t i)
{
    const size_t n_ranks = (size_t)self->super.world_size;
    return (element){.value = (unsigned)(i / n_ranks % N_VALUES) + 1,
                     .owner = (int)(i % n_ranks),
                     .n_ranks = (int)n_ranks};
}

static void next_element(element *at)
{
    if (++at->owner < at->n_ranks)
        return;
    at->owner = 0;
    at->value = at->value % N_VALUES + 1;
}

static unsigned own_value(const pli_gpu_comm *self, const pl_op *op, const element *at)
{
    if (op->kind == PL_BROADCAST)
        return op->root == self->super.rank ? at->value : WRONG_VALUE;
    return at->owner == self->super.rank ? at->value : 0;
}

/* A mean is rounded once or twice, in its own type. */
static int is_right(const pl_op *op, const element *at, double found)
{
    if (op->kind == PL_BROADCAST || op->reduction == PL_SUM)
        return found == at->value;
    const double expected = (double)at->value / at->n_ranks;
    return fabs(found - expected) <= expected / 64;
}

/* ---- one operation -------------------------------------------------------------- */

static char *memory_of(const trial *run, const pl_op *op)
{
    const size_t at = op->offset_bytes;
    return run->scratch != NULL ? run->scratch + (at - run->self->super.host_bytes)
                                : pli_comm_memory(&run->self->super, at);
}

/* Calls `each` for the operation's memory, piece by piece. */
static pl_status for_pieces(const trial *self, const pl_op *op,
                            pl_status (*each)(const trial *self, const pl_op *op,
                                              size_t first, size_t n, char *device))
{
    pl_status st = PL_OK;
    const size_t width = pl_dtype_bytes(real_type(op->dtype));
    char *memory = memory_of(self, op);
    const size_t n = n_reals(op);
    const size_t n_most = PIECE_BYTES / width;
    for (size_t i = 0; i < n; i += n_most)
        PL_TRY(each(self, op, i, n - i < n_most ? n - i : n_most, memory + i * width));
done:
    return st;
}

static pl_status fill_piece(const trial *run, const pl_op *op, size_t first, size_t n,
                            char *device)
{
    const pl_dtype dtype = real_type(op->dtype);
    const size_t width = pl_dtype_bytes(dtype);
    char values[WRONG_VALUE + 1][MOST_ELEM_BYTES];
    element at = element_at(run->self, first);
    for (unsigned value = 0; value <= WRONG_VALUE; value++)
        put_value(dtype, value, values[value]);
    for (size_t i = 0; i < n; i++, next_element(&at))
        memcpy(run->piece + i * width, values[own_value(run->self, op, &at)], width);
    return pli_cuda_write(run->self->backend, device, run->piece, n * width,
                          run->self->side);
}

static pl_status check_piece(const trial *run, const pl_op *op, size_t first, size_t n,
                             char *device)
{
    pl_status st = PL_OK;
    const pl_dtype dtype = real_type(op->dtype);
    const size_t width = pl_dtype_bytes(dtype);
    element at = element_at(run->self, first);
    PL_TRY(pli_cuda_read(run->self->backend, run->piece, device, n * width,
                         run->self->side));
    for (size_t i = 0; i < n; i++, next_element(&at)) {
        const double found = get_value(dtype, run->piece + i * width);
        if (!is_right(op, &at, found))
            PL_FAIL(PL_ESYS,
                    "rank %d: NCCL gives wrong numbers on this machine: it returned %g "
                    "in the %s of %zu %s, at element %zu. If the GPUs cannot reach "
                    "each other's memory, NCCL_P2P_DISABLE=1 may help",
                    run->self->super.rank, found, pli_op_kind_text(op->kind),
                    op->n_elems, pl_dtype_text(op->dtype), first + i);
    }
done:
    return st;
}

static pl_status poll_trial(void *context)
{
    pl_status st = PL_OK;
    const trial *self = context;
    if (atomic_load(&self->is_given_up))
        PL_FAIL(PL_EPEER, "given up");
done:
    return st;
}

static pl_status try_op(trial *run, const pl_op *op)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = run->self;
    pli_backoff waiting = pli_backoff_begin(self->deadline_ns, poll_trial, run);
    PL_TRY(for_pieces(run, op, fill_piece));
    PL_TRY(pli_nccl_enqueue(self->nccl, op, memory_of(run, op), self->side));
    PL_TRY(self->backend->ops->event_record(self->backend, self->drained, self->side));
    PL_TRY(pli_backend_await(self->backend, self->drained, &waiting, doing));
    PL_TRY(for_pieces(run, op, check_piece));
done:
    return st;
}

/* Clears the memory at the end: steps do not write all of it. */
static pl_status try_range(trial *self, const pli_op_range *range)
{
    pl_status st = PL_OK;
    pl_op op = range->op;
    for (size_t n = range->n_least; n < range->op.n_elems; n *= STEP_FACTOR) {
        op.n_elems = n;
        PL_TRY(try_op(self, &op));
    }
    op.n_elems = range->op.n_elems;
    PL_TRY(try_op(self, &op));
    PL_TRY(pli_cuda_clear(self->self->backend, memory_of(self, &op),
                          op.n_elems * pl_dtype_bytes(op.dtype)));
done:
    return st;
}

static pl_status run_trial(void *context)
{
    pl_status st = PL_OK;
    trial *run = context;
    pl_backend *backend = run->self->backend;
    PL_TRY(pli_calloc(1, PIECE_BYTES, "trial values", &run->piece));
    if (run->ready != NULL)
        PL_TRY(backend->ops->event_wait(backend, run->ready, run->self->side));
    for (size_t k = 0; k < run->n_ranges; k++)
        PL_TRY(try_range(run, &run->ranges[k]));
done:
    pli_free(run->piece);
    run->piece = NULL;
    return st;
}

/* ---- in a helper thread --------------------------------------------------------- */

/* Ends a trial whose outcome is not needed any more. */
static void give_up(trial *run, const pli_helper *helper)
{
    pli_gpu_comm *self = run->self;
    pli_backoff waiting = pli_backoff_begin(LEFT_MS * PLI_MS, NULL, NULL);
    atomic_store(&run->is_given_up, 1);
    (void)pthread_mutex_lock(&self->lock);
    self->is_given_up = 1; /* the watchdog must not report the abort */
    (void)pthread_mutex_unlock(&self->lock);
    pli_nccl_abort(self->nccl);
    (void)!pli_helper_wait(helper, &waiting, doing);
}

static pl_status try_aside(const trial *what)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = what->self;
    trial *run = NULL;
    char message[PLI_GPU_MESSAGE_BYTES];
    pli_helper *helper = NULL;
    pli_backoff waiting =
        pli_backoff_begin(self->deadline_ns, pli_gpu_comm_poll_base, self);
    PL_TRY(pli_calloc(1, sizeof *run, "a trial", &run));
    *run = *what;
    PL_TRY(pli_helper_start(
        &(pli_helper_job){
            .run = run_trial, .drop = pli_free, .context = run, .name = "tries NCCL"},
        &helper));
    st = pli_helper_wait(helper, &waiting, doing);
    if (st == PL_OK) {
        st = pli_helper_result(helper);
    } else {
        pli_text_print(message, sizeof message, "%s", pl_error_message());
        give_up(run, helper);
        (void)pli_fail(st, "%s", message);
    }
    if (pli_helper_end(helper) == PLI_HELPER_LEFT) {
        self->is_left = 1;
        run = NULL;
    }
done:
    pli_free(run);
    return st;
}

/* A new world's memory has no readers yet.  Later it may have some: then the trial uses
 * a few bytes beside it. */
pl_status pli_gpu_comm_try(pli_gpu_comm *self)
{
    enum { FEW_BYTES = 64 };
    pl_status st = PL_OK;
    void *scratch = NULL;
    const size_t at = self->super.host_bytes;
    size_t n_bytes = self->super.arena_bytes - at;
    const int is_new =
        atomic_load(&self->phase) == PLI_GPU_RUNNING; /* no step failed */
    const size_t n_most = is_new ? MOST_BROADCAST_BYTES : FEW_BYTES;
    n_bytes = n_bytes < n_most ? n_bytes : n_most;
    if (n_bytes == 0)
        goto done;
    if (!is_new)
        PL_TRY(self->backend->ops->alloc(self->backend, n_bytes, &scratch));
    const pl_op sum = {.kind = PL_ALL_REDUCE,
                       .dtype = PL_U8,
                       .offset_bytes = at,
                       .n_elems = n_bytes < FEW_BYTES ? n_bytes : FEW_BYTES};
    const pl_op broadcast = {.kind = PL_BROADCAST,
                             .dtype = PL_F64,
                             .offset_bytes = at,
                             .n_elems = n_bytes / sizeof(double)};
    PL_TRY(try_aside(&(trial){.self = self,
                              .scratch = scratch,
                              .ranges = {{sum, 1}, {broadcast, 1}},
                              .n_ranges = broadcast.n_elems > 0 ? 2 : 1}));
done:
    if (!self->is_left)
        self->backend->ops->free(self->backend, scratch);
    return st;
}

pl_status pli_gpu_comm_check_ranges(const pli_op_range *ranges, size_t n_ranges)
{
    pl_status st = PL_OK;
    if (n_ranges > MOST_RANGES)
        PL_FAIL(PL_EINVAL, "%zu kinds of operations are too many to be tried",
                n_ranges);
    for (size_t k = 0; k < n_ranges; k++) {
        const pl_op *op = &ranges[k].op;
        if (ranges[k].n_least == 0 || ranges[k].n_least > op->n_elems ||
            (op->kind != PL_ALL_REDUCE && op->kind != PL_BROADCAST))
            PL_FAIL(PL_EINVAL, "%s of %zu to %zu elements cannot be tried",
                    pli_op_kind_text(op->kind), ranges[k].n_least, op->n_elems);
        PL_TRY(pli_nccl_can(op));
    }
done:
    return st;
}

pl_status pli_gpu_comm_try_ranges(pli_gpu_comm *self, const pli_op_range *ranges,
                                  size_t n_ranges, pl_event *ready)
{
    pl_status st = PL_OK;
    trial run = {.self = self, .n_ranges = n_ranges, .ready = ready};
    if (pli_block_is_shared(self->block))
        PL_TRY(self->super.device->renew(&self->super));
    memcpy(run.ranges, ranges, n_ranges * sizeof *ranges);
    PL_TRY(try_aside(&run));
done:
    return st;
}
