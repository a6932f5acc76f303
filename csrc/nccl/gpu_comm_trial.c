/* gpu_comm_trial.c - tries the operations of steps before the first step.
 *
 * NCCL connects two ranks in the first operation that uses a path between them; kind,
 * size and memory decide which, not the dtype.  The host then waits for the peers, and
 * device memory is allocated.  And some machines whose GPUs cannot reach each other's
 * memory give wrong numbers without an error.  So each kind of operation runs here on
 * float32, from the smallest size to the largest, with values that show whether each
 * element of the result is right:
 *
 *     a sum         element i: i / n % 5 + 1 from rank i % n, 0 from all others
 *     a broadcast   element i: i / n % 5 + 1 from the root, 6 on all others
 *
 * A helper thread runs the trial, because NCCL may block it to wait for a peer.  The
 * rank's thread checks its peers and signals, and aborts the communicator if it gives
 * up.  If the helper does not return even then, the world is never freed.
 */
#include <math.h>

#include "backend/cuda.h"
#include "core/alloc.h"
#include "gpu_comm_state.h"
#include "helper_thread.h"

enum {
    STEP_FACTOR = 16, /* between one size and the next */
    PIECE_ELEMS = 1 << 18,
    ELEM_BYTES = sizeof(float),
    LEFT_MS = 10000, /* for the helper to return from an aborted communicator */
    MOST_BROADCAST_BYTES = 32 << 20,
    N_VALUES = 5,
    WRONG_VALUE /* no rank may receive it */
};

static const char doing[] = "the first operations on the device";

/* Operations of one kind, from n_least elements to those of `op`. */
typedef struct op_range {
    pl_op op;
    size_t n_least;
} op_range;

typedef struct trial {
    pli_gpu_comm *self;
    op_range ranges[2];
    size_t n_ranges;
    pl_event *ready; /* then the memory may be written; NULL: now */
    atomic_int is_given_up;
    float *piece; /* PIECE_ELEMS of host memory */
} trial;

/* ---- values --------------------------------------------------------------------- */

/* An element's value, and the rank that adds it to a sum. */
typedef struct element {
    int value;
    int owner;
} element;

static const element first_element = {.value = 1, .owner = 0};

static void next_element(element *at, int n_ranks)
{
    if (++at->owner < n_ranks)
        return;
    at->owner = 0;
    at->value = at->value % N_VALUES + 1;
}

static int own_value(const pl_op *op, const element *at, int rank)
{
    if (op->kind == PL_BROADCAST)
        return op->root == rank ? at->value : WRONG_VALUE;
    return at->owner == rank ? at->value : 0;
}

/* A mean is rounded once or twice. */
static int is_right(const pl_op *op, const element *at, int n_ranks, float found)
{
    const float value = (float)at->value;
    if (op->kind == PL_BROADCAST || op->reduction == PL_SUM)
        return found == value;
    return fabsf(found * (float)n_ranks - value) <= value / 64;
}

/* ---- one operation -------------------------------------------------------------- */

static char *memory_of(const trial *run, const pl_op *op)
{
    return pli_comm_memory(&run->self->super, op->offset_bytes);
}

/* Elements of the piece that begins at element i. */
static size_t n_of_piece(const pl_op *op, size_t i)
{
    return op->n_elems - i < PIECE_ELEMS ? op->n_elems - i : PIECE_ELEMS;
}

static pl_status fill(const trial *run, const pl_op *op)
{
    pl_status st = PL_OK;
    const pli_gpu_comm *self = run->self;
    const int n_ranks = self->super.world_size;
    char *memory = memory_of(run, op);
    element at = first_element;
    for (size_t i = 0; i < op->n_elems; i += PIECE_ELEMS) {
        const size_t n = n_of_piece(op, i);
        for (size_t k = 0; k < n; k++, next_element(&at, n_ranks))
            run->piece[k] = (float)own_value(op, &at, self->super.rank);
        PL_TRY(pli_cuda_write(self->backend, memory + i * ELEM_BYTES, run->piece,
                              n * ELEM_BYTES, self->side));
    }
done:
    return st;
}

static pl_status check(const trial *run, const pl_op *op)
{
    pl_status st = PL_OK;
    const pli_gpu_comm *self = run->self;
    const int n_ranks = self->super.world_size;
    const char *memory = memory_of(run, op);
    element at = first_element;
    for (size_t i = 0; i < op->n_elems; i += PIECE_ELEMS) {
        const size_t n = n_of_piece(op, i);
        PL_TRY(pli_cuda_read(self->backend, run->piece, memory + i * ELEM_BYTES,
                             n * ELEM_BYTES, self->side));
        for (size_t k = 0; k < n; k++, next_element(&at, n_ranks))
            if (!is_right(op, &at, n_ranks, run->piece[k]))
                PL_FAIL(PL_ESYS,
                        "rank %d: NCCL gives wrong numbers on this machine: it "
                        "returned %g in the %s of %zu %s, at element %zu. If the GPUs "
                        "cannot reach each other's memory, NCCL_P2P_DISABLE=1 may help",
                        self->super.rank, (double)run->piece[k],
                        pli_op_kind_text(op->kind), op->n_elems,
                        pl_dtype_text(op->dtype), i + k);
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
    PL_TRY(fill(run, op));
    PL_TRY(pli_nccl_enqueue(self->nccl, op, memory_of(run, op), self->side));
    PL_TRY(self->backend->ops->event_record(self->backend, self->drained, self->side));
    PL_TRY(pli_backend_await(self->backend, self->drained, &waiting, doing));
    PL_TRY(check(run, op));
done:
    return st;
}

/* Clears the memory at the end: steps do not write all of it. */
static pl_status try_range(trial *run, const op_range *range)
{
    pl_status st = PL_OK;
    pl_op op = range->op;
    for (size_t n = range->n_least; n < range->op.n_elems; n *= STEP_FACTOR) {
        op.n_elems = n;
        PL_TRY(try_op(run, &op));
    }
    op.n_elems = range->op.n_elems;
    PL_TRY(try_op(run, &op));
    PL_TRY(pli_cuda_clear(run->self->backend, memory_of(run, &op),
                          op.n_elems * ELEM_BYTES));
done:
    return st;
}

static pl_status run_trial(void *context)
{
    pl_status st = PL_OK;
    trial *run = context;
    pl_backend *backend = run->self->backend;
    PL_TRY(pli_calloc(PIECE_ELEMS, ELEM_BYTES, "trial values", &run->piece));
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

pl_status pli_gpu_comm_try(pli_gpu_comm *self)
{
    enum { FEW_BYTES = 64 };
    pl_status st = PL_OK;
    const size_t at = self->super.host_bytes;
    size_t n_bytes = self->super.arena_bytes - at;
    n_bytes = n_bytes < MOST_BROADCAST_BYTES ? n_bytes : MOST_BROADCAST_BYTES;
    if (n_bytes < ELEM_BYTES)
        goto done;
    const pl_op sum = {.kind = PL_ALL_REDUCE,
                       .dtype = PL_F32,
                       .offset_bytes = at,
                       .n_elems =
                           (n_bytes < FEW_BYTES ? n_bytes : FEW_BYTES) / ELEM_BYTES};
    const pl_op broadcast = {.kind = PL_BROADCAST,
                             .dtype = PL_F32,
                             .offset_bytes = at,
                             .n_elems = n_bytes / ELEM_BYTES};
    PL_TRY(try_aside(
        &(trial){.self = self, .ranges = {{sum, 1}, {broadcast, 1}}, .n_ranges = 2}));
done:
    return st;
}

pl_status pli_gpu_comm_try_means(pli_gpu_comm *self, const pli_reduced_range *range,
                                 pl_event *ready)
{
    pl_status st = PL_OK;
    const pl_op op = {.kind = PL_ALL_REDUCE,
                      .reduction = PL_MEAN,
                      .dtype = PL_F32,
                      .offset_bytes = range->offset_bytes,
                      .n_elems = (range->most_bytes + ELEM_BYTES - 1) / ELEM_BYTES};
    const size_t n_least = (range->least_bytes + ELEM_BYTES - 1) / ELEM_BYTES;
    PL_TRY(try_aside(&(trial){.self = self,
                              .ranges = {{op, n_least}},
                              .n_ranges = op.n_elems > 0 ? 1 : 0,
                              .ready = ready}));
done:
    return st;
}
