/* gpu_comm_fail.c - fails a world permanently.
 *
 * The communicator is aborted, so that no kernel spins on the device.  But the host is
 * ahead of the device: the device may still run a step that every rank has finished,
 * and whose means the user's optimizer is about to use.  All devices have those
 * operations in their queues, so the abort first waits for them, for a limited time.
 * If one does not finish, the ranks may hold different parameters: check_means() tells
 * the caller, so that no new world goes on with these.
 */
#include <stdio.h>
#include <unistd.h>

#include "core/backoff.h"
#include "core/clock.h"
#include "gpu_comm_state.h"

enum { DRAIN_MS = 10000 }; /* for each operation of finished steps, after a failure */

/* ---- failing -------------------------------------------------------------------- */

void pli_gpu_comm_agreed_locked(pli_gpu_comm *self)
{
    if (self->n_at_ticket <= self->n_agreed)
        return;
    /* A failure at the same moment may have cut it short. */
    if (atomic_load(&self->phase) == PLI_GPU_FAILED)
        self->is_lost = 1;
    else
        self->n_agreed = self->n_at_ticket;
}

pl_status pli_gpu_comm_check_issued(pli_gpu_comm *self)
{
    if (atomic_load(&self->phase) == PLI_GPU_RUNNING)
        return PL_OK;
    (void)pthread_mutex_lock(&self->lock);
    const int is_there = !self->is_lost && self->inflight.n_recorded <= self->n_agreed;
    (void)pthread_mutex_unlock(&self->lock);
    return is_there ? PL_OK : pli_gpu_comm_check(self);
}

pl_status pli_gpu_comm_check_means(pl_comm *comm)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = (pli_gpu_comm *)(void *)comm;
    (void)pthread_mutex_lock(&self->lock);
    const int is_lost = self->is_lost;
    (void)pthread_mutex_unlock(&self->lock);
    if (is_lost) {
        char cause[PLI_GPU_MESSAGE_BYTES];
        (void)!pli_gpu_comm_check(self);
        pli_text_print(cause, sizeof cause, "%s", pl_error_message());
        st = pli_fail(PL_EPEER,
                      "rank %d: means of a finished step were lost on the device, so "
                      "the ranks may differ: start again from what was saved (%s)",
                      comm->rank, cause);
        pli_base_set_failure_message(comm, pl_error_message());
        pli_base_leave(comm);
    }
    return st;
}

static pl_status fail_late(const pli_gpu_comm *self, const pli_inflight_op *inflight)
{
    const pl_op *op = &inflight->op;
    return pli_fail(PL_ETIMEOUT,
                    "rank %d: the %s of %zu %s at byte %zu of device memory (operation "
                    "%llu, step %llu) has not finished on the device within the "
                    "deadline",
                    self->super.rank, pli_op_kind_text(op->kind), op->n_elems,
                    pl_dtype_text(op->dtype), op->offset_bytes - self->super.host_bytes,
                    (unsigned long long)inflight->n,
                    (unsigned long long)inflight->step);
}

pl_status pli_gpu_comm_drain(pli_gpu_comm *self, int64_t most_ns, int64_t gone_ns)
{
    pl_status st = PL_OK;
    int is_gone = 0;
    const uint64_t n_agreed = self->n_agreed;
    uint64_t n_awaited = 0;
    pli_backoff waiting = {0};
    pli_inflight_op oldest = {.n = 0};
    for (;;) {
        PL_TRY(pli_inflight_oldest(&self->inflight, &oldest));
        if (oldest.n == 0 || oldest.n > n_agreed)
            goto done;
        /* Start the limit anew for each operation: a busy device may have many left. */
        if (oldest.n != n_awaited)
            waiting = pli_backoff_begin(is_gone ? gone_ns : most_ns, NULL, NULL);
        n_awaited = oldest.n;
        /* A group comm reports failed steps, but not ranks that are gone. */
        if (!is_gone && !pli_comm_is_group_comm(self->super.base) &&
            pli_base_query(&self->super, PLI_QUERY_WORLD) != PL_OK) {
            is_gone = 1;
            waiting = pli_backoff_begin(gone_ns, NULL, NULL);
        }
        PL_TRY(pli_gpu_comm_check(self)); /* the watchdog may have failed the world */
        if (pli_backoff_pause(&waiting, "a step that is over") == PL_OK)
            continue;
        if (is_gone)
            PL_TRY(pli_base_query(&self->super, PLI_QUERY_WORLD));
        PL_TRY(fail_late(self, &oldest));
    }
done:
    return st;
}

/* `message`: NULL if the base has failed already, and has the reason. */
static void fail_locked(pli_gpu_comm *self, pl_status st, const char *message)
{
    self->failure = message != NULL ? st : PL_OK;
    (void)snprintf(self->message, sizeof self->message, "%s",
                   message != NULL ? message : "");
    if (message != NULL && !pli_comm_is_group_comm(self->super.base))
        pl_comm_abort(self->super.base, self->message);
    if (pli_base_is_done(&self->super, self->base_ticket))
        pli_gpu_comm_agreed_locked(self);
    self->is_lost =
        self->is_lost || pli_gpu_comm_drain(self, DRAIN_MS * PLI_MS, 0) != PL_OK;
    pli_nccl_abort(self->nccl);
    atomic_store(&self->phase, PLI_GPU_FAILED);
}

void pli_gpu_comm_fail(pli_gpu_comm *self, pl_status st)
{
    char message[PLI_GPU_MESSAGE_BYTES];
    int is_first = 0;
    pli_text_print(message, sizeof message, "%s", pl_error_message());
    (void)pthread_mutex_lock(&self->lock);
    if (atomic_load(&self->phase) == PLI_GPU_RUNNING) {
        if (st != PL_OK && pli_gpu_comm_query_base(self, st) != PL_OK)
            st = PL_OK;
        fail_locked(self, st, st != PL_OK ? message : NULL);
        is_first = st != PL_OK;
    }
    (void)pthread_mutex_unlock(&self->lock);
    /* A group comm's callbacks may take locks of the caller. */
    if (is_first && pli_comm_is_group_comm(self->super.base))
        pl_comm_abort(self->super.base, message);
    (void)pli_fail(st, "%s", message);
}

pl_status pli_gpu_comm_check(pli_gpu_comm *self)
{
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == PLI_GPU_RUNNING)
        return PL_OK;
    (void)pthread_mutex_lock(&self->lock);
    if (self->failure != PL_OK)
        st = pli_fail(self->failure, "%s", self->message);
    (void)pthread_mutex_unlock(&self->lock);
    if (st == PL_OK)
        st = pl_comm_progress(self->super.base);
    if (st == PL_OK)
        st = pli_fail(PL_EPEER, "rank %d: the step was aborted", self->super.rank);
    return st;
}

pl_status pli_gpu_comm_after(pli_gpu_comm *self, pl_status st)
{
    if (st == PL_OK || st == PL_EAGAIN || st == PL_EINVAL || st == PL_ESTATE)
        return st;
    pli_gpu_comm_fail(self, PL_OK);
    return pli_gpu_comm_check(self);
}

/* ---- the watchdog's check ------------------------------------------------------- */

/* This device may wait for a rank that is gone, and the host may do nothing with other
 * ranks in the meantime.  Once PLI_GPU_GONE_MS have passed since that rank left, this
 * device has done all to which the rank contributed.  Replays of a graph are not
 * tracked, so one may be waiting. */
static pl_status check_gone(pli_gpu_comm *self, int is_waiting)
{
    if ((!is_waiting && !atomic_load(&self->is_captured)) ||
        pli_base_query(&self->super, PLI_QUERY_GONE) == PL_OK)
        self->gone = (pli_stopwatch){0};
    else if (pli_elapsed_ns(&self->gone) > PLI_GPU_GONE_MS * PLI_MS)
        return pli_base_query(&self->super, PLI_QUERY_WORLD);
    return PL_OK;
}

static pl_status check_device(pli_gpu_comm *self, int *is_base)
{
    pl_status st = PL_OK;
    pli_inflight_op oldest = {.n = 0};
    *is_base = 1;
    PL_TRY(pli_base_query(&self->super, PLI_QUERY_STEP));
    *is_base = 0;
    if (self->nccl != NULL && !self->is_given_up)
        PL_TRY(pli_nccl_check(self->nccl));
    PL_TRY(pli_inflight_oldest(&self->inflight, &oldest));
    *is_base = 1;
    PL_TRY(check_gone(self, oldest.n != 0));
    *is_base = 0;
    /* If the host waits for the same rank, it can name that rank, so it fails first. */
    if (oldest.n == 0 || oldest.age_ns <= self->deadline_ns + self->deadline_ns / 4)
        goto done;
    self->is_lost |= oldest.n <= self->n_agreed;
    st = fail_late(self, &oldest);
done:
    return st;
}

void pli_gpu_comm_watch(void *context)
{
    pli_gpu_comm *self = context;
    int is_base = 0;
    (void)pthread_mutex_lock(&self->lock);
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == PLI_GPU_RUNNING)
        st = check_device(self, &is_base);
    (void)pthread_mutex_unlock(&self->lock);
    if (st != PL_OK)
        pli_gpu_comm_fail(self, is_base ? PL_OK : st);
}
