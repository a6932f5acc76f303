/* nccl_end.c - ends a communicator: flushes and destroys it, or aborts it.
 *
 * Each of these calls may wait for peers, graphs or the device.  So a helper thread
 * makes the call, and the caller waits a limited time.  CommDestroy frees the
 * communicator, so nothing may be called on it beside or after that.  CommFinalize
 * flushes before: only the flush is given up, and the communicator is then aborted; a
 * helper that has not yet begun the flush must not begin it any more.
 */
#include <stdatomic.h>
#include <unistd.h>

#include "backend/cuda.h"
#include "core/alloc.h"
#include "core/clock.h"
#include "helper_thread.h"
#include "nccl_state.h"

enum {
    BLOCKED_MS = 1000, /* an abort waits for a thread inside NCCL */
    ABORT_MS = 10000,  /* an abort may take */
    GRAPHS_MS = 200,   /* ... if graphs may keep NCCL from ending */
    BEGUN_MS = 100     /* a helper about to call NCCL is inside by then */
};

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
