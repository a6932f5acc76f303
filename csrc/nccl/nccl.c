/* nccl.c - a communicator: makes it, calls into NCCL one at a time, and ends it.
 *
 * begin_call() enters the device's context and takes the lock; end_call() undoes both.
 * After an abort `comm` is NULL.  A call must have ended when it returns, because the
 * next work is put on the stream then: ncclInProgress is a failure.
 *
 * A call may block inside NCCL while it holds the lock: for a connection, for a peer's
 * proxy, for room in the device's queue.  So an abort waits for the lock only a limited
 * time, and a check does not wait for it at all.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "backend/cuda.h"
#include "core/alloc.h"
#include "core/clock.h"
#include "helper_thread.h"
#include "nccl.h"

enum {
    BLOCKED_MS = 1000, /* an abort waits for a thread inside NCCL */
    ABORT_MS = 10000,  /* an abort may take */
    GRAPHS_MS = 200,   /* ... if graphs may keep NCCL from ending */
    BEGUN_MS = 100     /* a helper about to call NCCL is inside by then */
};

struct pli_nccl {
    const pli_nccl_library *library;
    pl_backend *backend;
    int rank;
    int world_size;
    int64_t deadline_ns;
    pid_t owner_pid;
    pthread_mutex_t lock;        /* held during each call */
    _Atomic(pli_nccl_comm) comm; /* NULL: not made, or aborted; an abort may not have
                                    the lock */
    _Atomic uint64_t n_calls;    /* begun */
    uint64_t n_checked;          /* pli_nccl_check()'s: the call that it last saw */
    pli_stopwatch inside;        /* ... since it saw that call begun */
    atomic_int is_captured;      /* a graph may hold its operations */
};

/* ---- errors --------------------------------------------------------------------- */

static pl_status code_of(pli_nccl_result result, const char *text)
{
    if (strstr(text, "out of memory") != NULL)
        return PL_ENOMEM;
    switch (result) {
    case PLI_NCCL_REMOTE_ERROR:
        return PL_EPEER;
    case PLI_NCCL_TIMEOUT:
        return PL_ETIMEOUT;
    case PLI_NCCL_INVALID_ARGUMENT:
    case PLI_NCCL_INVALID_USAGE:
        return PL_EINVAL;
    default:
        return PL_ESYS;
    }
}

static pl_status fail(const pli_nccl_library *library, pli_nccl_comm comm,
                      pli_nccl_result result, const char *doing)
{
    const char *last = library->GetLastError(comm);
    if (last == NULL)
        last = "";
    if (result == PLI_NCCL_IN_PROGRESS)
        return pli_fail(PL_EUNSUPPORTED,
                        "NCCL %s: the call has returned before its end, as with "
                        "NCCL_COMM_BLOCKING=0, which Paceline does not support: unset "
                        "it, also in nccl.conf",
                        doing);
    if (strstr(last, "Duplicate GPU") != NULL ||    /* up to 2.29 */
        strstr(last, "using the same GPU") != NULL) /* since */
        return pli_fail(PL_EINVAL,
                        "two ranks use the same GPU (NCCL: %s): give each rank its own "
                        "GPU, for example with torch.cuda.set_device(local_rank), "
                        "before you move and wrap the model",
                        last);
    return pli_fail(code_of(result, last), "NCCL %s: %s%s%s", doing,
                    library->GetErrorString(result), last[0] != '\0' ? ": " : "", last);
}

/* Judges the result of a call, and the communicator's state. */
static pl_status judge_locked(const pli_nccl *self, pli_nccl_result result,
                              const char *doing)
{
    pl_status st = PL_OK;
    pli_nccl_result state = PLI_NCCL_SUCCESS;
    const pli_nccl_comm comm = self->comm;
    if (comm == NULL)
        PL_FAIL(PL_EPEER, "the communicator was aborted during %s", doing);
    if (result == PLI_NCCL_SUCCESS)
        result = self->library->CommGetAsyncError(comm, &state);
    if (result == PLI_NCCL_SUCCESS)
        result = state;
    if (result != PLI_NCCL_SUCCESS)
        PL_TRY(fail(self->library, comm, result, doing));
done:
    return st;
}

/* ---- calls ---------------------------------------------------------------------- */

static pl_status begin_call(pli_nccl *self, pli_cuda_scope *scope)
{
    pl_status st = PL_OK;
    PL_TRY(pli_cuda_enter(self->backend, scope));
    atomic_fetch_add(&self->n_calls, 1); /* before a check sees it locked */
    (void)pthread_mutex_lock(&self->lock);
    if (self->comm != NULL)
        goto done;
    (void)pthread_mutex_unlock(&self->lock);
    pli_cuda_leave(self->backend, scope);
    PL_FAIL(PL_EPEER, "the communicator was aborted");
done:
    return st;
}

static pl_status end_call(pli_nccl *self, const pli_cuda_scope *scope,
                          pli_nccl_result result, const char *doing)
{
    const pl_status st = judge_locked(self, result, doing);
    (void)pthread_mutex_unlock(&self->lock);
    pli_cuda_leave(self->backend, scope);
    return st;
}

/* ---- making --------------------------------------------------------------------- */

pl_status pli_nccl_new_id(const pli_nccl_library *library, pl_backend *backend,
                          char id[PLI_NCCL_ID_BYTES])
{
    pl_status st = PL_OK;
    pli_nccl_id made;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_nccl_result result = library->GetUniqueId(&made);
    pli_cuda_leave(backend, &scope);
    if (result != PLI_NCCL_SUCCESS)
        PL_TRY(fail(library, NULL, result, "making an id"));
    memcpy(id, &made, PLI_NCCL_ID_BYTES);
done:
    return st;
}

static const char joining[] = "meeting the other ranks";

/* NCCL's call waits for the other ranks, and never returns if one does not come.  So a
 * helper thread makes it, while the rank's thread checks its peers and signals.  If the
 * rank gives up, it leaves the helper behind; the helper then aborts any communicator
 * that it still gets. */
typedef struct meeting {
    pli_nccl_library *library; /* retained */
    pl_backend *backend;       /* retained */
    int rank;
    int world_size;
    pli_nccl_id id;
    pli_nccl_comm comm;
} meeting;

static void free_meeting(meeting *self)
{
    if (self == NULL)
        return;
    pli_backend_destroy(self->backend);
    pli_nccl_library_release(self->library);
    pli_free(self);
}

static void drop_meeting(void *context)
{
    meeting *self = context;
    pli_cuda_scope scope;
    if (self->comm != NULL && pli_cuda_enter(self->backend, &scope) == PL_OK) {
        (void)self->library->CommAbort(self->comm);
        pli_cuda_leave(self->backend, &scope);
    }
    free_meeting(self);
}

static pl_status meet(void *context)
{
    pl_status st = PL_OK;
    meeting *self = context;
    const pli_nccl_library *lib = self->library;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(self->backend, &scope));
    const pli_nccl_result result =
        lib->CommInitRank(&self->comm, self->world_size, self->id, self->rank);
    if (result != PLI_NCCL_SUCCESS)
        st = fail(lib, NULL, result, joining);
    if (result != PLI_NCCL_SUCCESS && result != PLI_NCCL_IN_PROGRESS)
        self->comm = NULL; /* no function may be called on it */
    pli_cuda_leave(self->backend, &scope);
done:
    return st;
}

static pl_status meet_aside(pli_nccl *self, const pli_nccl_options *options)
{
    pl_status st = PL_OK;
    meeting *met = NULL;
    pli_helper *helper = NULL;
    pli_backoff waiting =
        pli_backoff_begin(options->deadline_ns, options->poll, options->context);
    PL_TRY(pli_calloc(1, sizeof *met, "ranks that meet", &met));
    *met = (meeting){.library = options->library,
                     .backend = options->backend,
                     .rank = options->rank,
                     .world_size = options->world_size};
    memcpy(&met->id, options->id, sizeof met->id);
    pli_nccl_library_retain(met->library);
    pli_cuda_backend_retain(met->backend);
    PL_TRY(pli_helper_start(&(pli_helper_job){.run = meet,
                                              .drop = drop_meeting,
                                              .context = met,
                                              .name = "meets the other ranks"},
                            &helper));
    st = pli_helper_wait(helper, &waiting, joining);
    if (st == PL_OK)
        st = pli_helper_result(helper);
    if (pli_helper_end(helper) == PLI_HELPER_LEFT) {
        met = NULL;
        goto done;
    }
    /* No other thread has it yet.  There may be one even if this rank gave up, when the
     * ranks met at that moment: then destroying `self` aborts it. */
    self->comm = met->comm;
done:
    free_meeting(met);
    return st;
}

pl_status pli_nccl_create(const pli_nccl_options *options, pli_nccl **out)
{
    pl_status st = PL_OK;
    pli_nccl *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self, "a communicator", &self));
    *self = (pli_nccl){.library = options->library,
                       .backend = options->backend,
                       .rank = options->rank,
                       .world_size = options->world_size,
                       .deadline_ns = options->deadline_ns,
                       .owner_pid = getpid()};
    (void)pthread_mutex_init(&self->lock, NULL); /* cannot fail on Linux */
    PL_TRY(meet_aside(self, options));
    *out = self;
    self = NULL;
done:
    pli_nccl_destroy(self);
    return st;
}

/* ---- operations ----------------------------------------------------------------- */

/* NCCL's type for a dtype: a complex number is two floats. */
typedef struct wire {
    pli_nccl_dtype dtype;
    int n_each; /* 0: NCCL cannot add these */
} wire;

static wire wire_of(pl_dtype dtype)
{
    static const wire wires[PL_N_DTYPES] = {
        [PL_U8] = {PLI_NCCL_U8, 1},     [PL_I8] = {PLI_NCCL_I8, 1},
        [PL_I16] = {PLI_NCCL_I8, 0},    [PL_I32] = {PLI_NCCL_I32, 1},
        [PL_I64] = {PLI_NCCL_I64, 1},   [PL_F16] = {PLI_NCCL_F16, 1},
        [PL_BF16] = {PLI_NCCL_BF16, 1}, [PL_F32] = {PLI_NCCL_F32, 1},
        [PL_F64] = {PLI_NCCL_F64, 1},   [PL_C64] = {PLI_NCCL_F32, 2},
        [PL_C128] = {PLI_NCCL_F64, 2},
    };
    return wires[dtype];
}

static int is_integer(pl_dtype dtype)
{
    return dtype <= PL_I64;
}

pl_status pli_nccl_can(const pl_op *op)
{
    pl_status st = PL_OK;
    if (op->kind == PL_BARRIER)
        PL_FAIL(PL_EINVAL, "a device cannot run a barrier");
    if (op->kind > PL_REDUCE)
        goto done;
    if (op->reduction == PL_MAX || (op->reduction == PL_MEAN && is_integer(op->dtype)))
        PL_FAIL(PL_EINVAL,
                "%s on a device cannot be reduced that way: sums take all types, the "
                "mean takes floating point types, and maxima need host memory",
                pl_dtype_text(op->dtype));
    if (wire_of(op->dtype).n_each == 0)
        PL_FAIL(PL_EINVAL, "NCCL cannot add %s", pl_dtype_text(op->dtype));
done:
    return st;
}

static pli_nccl_result call_reducing(const pli_nccl *self, const pl_op *op,
                                     char *memory, pli_nccl_stream stream)
{
    const pli_nccl_library *lib = self->library;
    const wire as = wire_of(op->dtype);
    const pli_nccl_reduction how =
        op->reduction == PL_MEAN ? PLI_NCCL_AVG : PLI_NCCL_SUM;
    const size_t n = op->n_elems * (size_t)as.n_each;
    if (op->kind == PL_ALL_REDUCE)
        return lib->AllReduce(memory, memory, n, as.dtype, how, self->comm, stream);
    return lib->Reduce(memory, memory, n, as.dtype, how, op->root, self->comm, stream);
}

/* Operations that only move data move bytes. */
static pli_nccl_result call_moving(const pli_nccl *self, const pl_op *op, char *memory,
                                   pli_nccl_stream stream)
{
    const size_t n_bytes = op->n_elems * pl_dtype_bytes(op->dtype);
    const size_t block_bytes = n_bytes / (size_t)self->world_size;
    if (op->kind == PL_BROADCAST)
        return self->library->Broadcast(memory, memory, n_bytes, PLI_NCCL_I8, op->root,
                                        self->comm, stream);
    return self->library->AllGather(memory + (size_t)self->rank * block_bytes, memory,
                                    block_bytes, PLI_NCCL_I8, self->comm, stream);
}

pl_status pli_nccl_enqueue(pli_nccl *self, const pl_op *op, void *memory,
                           pl_stream *stream)
{
    pl_status st = PL_OK;
    const int is_reducing = op->kind <= PL_REDUCE;
    const pli_nccl_stream on = (pli_nccl_stream)(void *)stream;
    pli_cuda_scope scope;
    PL_TRY(pli_nccl_can(op));
    if (op->n_elems == 0)
        goto done;
    PL_TRY(begin_call(self, &scope));
    const pli_nccl_result result = is_reducing ? call_reducing(self, op, memory, on)
                                               : call_moving(self, op, memory, on);
    PL_TRY(end_call(self, &scope, result, pli_op_kind_text(op->kind)));
done:
    return st;
}

void pli_nccl_record_captured(pli_nccl *self)
{
    if (self != NULL)
        atomic_store(&self->is_captured, 1);
}

pl_status pli_nccl_check(pli_nccl *self)
{
    pl_status st = PL_OK;
    if (pthread_mutex_trylock(&self->lock) == 0) {
        st = judge_locked(self, PLI_NCCL_SUCCESS, "work on the device");
        (void)pthread_mutex_unlock(&self->lock);
        goto done;
    }
    /* A thread is inside, and gets NCCL's errors when its call returns, if ever. */
    const uint64_t n_calls = atomic_load(&self->n_calls);
    if (n_calls != self->n_checked)
        self->inside = (pli_stopwatch){0};
    self->n_checked = n_calls;
    if (pli_elapsed_ns(&self->inside) > self->deadline_ns + self->deadline_ns / 4)
        PL_FAIL(PL_ETIMEOUT,
                "rank %d: a call into NCCL has not returned within the deadline",
                self->rank);
done:
    return st;
}

/* ---- ending --------------------------------------------------------------------- */

/* Each of these calls may wait for peers, graphs or the device.  So a helper thread
 * makes the call, and the caller waits a limited time.  CommDestroy frees the
 * communicator, so nothing may be called on it beside or after that.  CommFinalize
 * flushes before: only the flush is given up, and the communicator is then aborted; a
 * helper that has not yet begun the flush must not begin it any more. */
typedef pli_nccl_result (*ending)(pli_nccl_comm comm);

typedef enum farewell_phase {
    FAREWELL_AHEAD,
    FAREWELL_BEGUN,
    FAREWELL_REVOKED /* the call will not be made */
} farewell_phase;

/* One call and its data. */
typedef struct farewell {
    ending end;
    pli_nccl_comm comm;
    pl_backend *backend; /* retained by the copy on the heap */
    pli_nccl_result result;
    int is_revocable;
    atomic_int phase;         /* farewell_phase */
    _Atomic int64_t begun_ns; /* set just before the call begins */
} farewell;

static void drop_farewell(void *context)
{
    farewell *self = context;
    pli_backend_destroy(self->backend);
    pli_free(self);
}

static pl_status run_farewell(void *context)
{
    farewell *self = context;
    pli_cuda_scope scope;
    int ahead = FAREWELL_AHEAD;
    const int is_inside = pli_cuda_enter(self->backend, &scope) == PL_OK;
    atomic_store(&self->begun_ns, pli_now_ns());
    if (atomic_compare_exchange_strong(&self->phase, &ahead, FAREWELL_BEGUN))
        self->result = self->end(self->comm);
    if (is_inside)
        pli_cuda_leave(self->backend, &scope);
    return PL_OK;
}

/* Waits most_ns for the call.  If a revocable call has not begun by then, revokes it;
 * if it has begun, waits for most_ns from its beginning. */
static void wait_for(farewell *self, const pli_helper *helper, int64_t most_ns)
{
    static const char what[] = "a communicator's end";
    int ahead = FAREWELL_AHEAD;
    pli_backoff waiting = pli_backoff_begin(most_ns, NULL, NULL);
    if (pli_helper_wait(helper, &waiting, what) == PL_OK || !self->is_revocable ||
        atomic_compare_exchange_strong(&self->phase, &ahead, FAREWELL_REVOKED))
        return;
    const int64_t least_ns = most_ns > BEGUN_MS * PLI_MS ? most_ns : BEGUN_MS * PLI_MS;
    waiting = pli_backoff_begin(atomic_load(&self->begun_ns) + least_ns - pli_now_ns(),
                                NULL, NULL);
    (void)!pli_helper_wait(helper, &waiting, what);
}

/* Returns 0 if the call did not return in time; else sets *out to its result. */
static int call_for(const farewell *what, int64_t most_ns, pli_nccl_result *out)
{
    farewell here = *what;
    farewell *self = NULL;
    pli_helper *helper = NULL;
    if (pli_calloc(1, sizeof *self, "a communicator's end", &self) == PL_OK) {
        *self = *what;
        pli_cuda_backend_retain(self->backend);
    }
    if (self != NULL &&
        pli_helper_start(&(pli_helper_job){.run = run_farewell,
                                           .drop = drop_farewell,
                                           .context = self,
                                           .name = "ends a communicator"},
                         &helper) == PL_OK) {
        wait_for(self, helper, most_ns);
        if (pli_helper_end(helper) == PLI_HELPER_LEFT)
            return 0;
        here.result = self->result;
    } else {
        (void)run_farewell(&here); /* no memory */
    }
    if (self != NULL)
        drop_farewell(self);
    *out = here.result;
    return 1;
}

/* Takes the communicator: no other thread gets it from now on.  Waits a limited time
 * for a thread inside NCCL, because only the abort may release it. */
static pli_nccl_comm take_comm(pli_nccl *self)
{
    pli_backoff waiting = pli_backoff_begin(BLOCKED_MS * PLI_MS, NULL, NULL);
    int is_locked = 0;
    do {
        is_locked = pthread_mutex_trylock(&self->lock) == 0;
    } while (!is_locked && pli_backoff_pause(&waiting, "a call into NCCL") == PL_OK);
    const pli_nccl_comm comm = atomic_exchange(&self->comm, NULL);
    if (is_locked)
        (void)pthread_mutex_unlock(&self->lock);
    return comm;
}

static void end_comm(pli_nccl *self, ending end, int64_t most_ns)
{
    pli_nccl_result ignored = PLI_NCCL_SUCCESS;
    const pli_nccl_comm comm = take_comm(self);
    const farewell what = {.end = end, .comm = comm, .backend = self->backend};
    if (comm != NULL)
        (void)call_for(&what, most_ns, &ignored);
}

void pli_nccl_abort(pli_nccl *self)
{
    if (self == NULL || self->owner_pid != getpid())
        return;
    const int64_t most_ms = atomic_load(&self->is_captured) ? GRAPHS_MS : ABORT_MS;
    end_comm(self, self->library->CommAbort, most_ms * PLI_MS);
}

/* Whether NCCL has flushed all data. */
static int flush(const pli_nccl *self, int64_t most_ns)
{
    pli_nccl_result result = PLI_NCCL_SUCCESS;
    const farewell what = {.end = self->library->CommFinalize,
                           .comm = self->comm,
                           .backend = self->backend,
                           .is_revocable = 1};
    return what.comm != NULL && call_for(&what, most_ns, &result) &&
           result == PLI_NCCL_SUCCESS;
}

void pli_nccl_finish(pli_nccl *self, int64_t most_ns)
{
    if (self == NULL || self->owner_pid != getpid())
        return;
    const ending destroy = self->library->CommDestroy;
    if (atomic_load(&self->is_captured))
        end_comm(self, destroy, GRAPHS_MS * PLI_MS);
    else if (flush(self, most_ns))
        end_comm(self, destroy, ABORT_MS * PLI_MS);
    pli_nccl_abort(self);
}

void pli_nccl_destroy(pli_nccl *self)
{
    if (self == NULL)
        return;
    pli_nccl_abort(self);
    if (self->owner_pid == getpid())
        (void)pthread_mutex_destroy(&self->lock);
    pli_free(self);
}
