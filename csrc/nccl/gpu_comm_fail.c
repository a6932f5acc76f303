/* gpu_comm_fail.c - ends a step that failed, and recovers from it.
 *
 * The communicator is aborted, so that no kernel spins on the device.  But the host is
 * ahead of the device: the device may still run a step that every rank has finished,
 * and whose means the user's optimizer is about to use.  All devices have those
 * operations in their queues, so the abort first waits for them, for a limited time.
 * If one does not finish, the ranks may hold different parameters, and no step can
 * follow.
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

pl_status pli_gpu_comm_check_means(pli_gpu_comm *self)
{
    if (atomic_load(&self->phase) == PLI_GPU_RUNNING)
        return PL_OK;
    (void)pthread_mutex_lock(&self->lock);
    const int is_there = !self->is_lost && self->inflight.n_recorded <= self->n_agreed;
    (void)pthread_mutex_unlock(&self->lock);
    return is_there ? PL_OK : pli_gpu_comm_check(self);
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
        PL_TRY(pli_gpu_comm_check(self)); /* the watchdog may have failed the step */
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

void pli_gpu_comm_fail(pli_gpu_comm *self, uint64_t generation, pl_status st)
{
    char message[PLI_GPU_MESSAGE_BYTES];
    int is_first = 0;
    pli_text_print(message, sizeof message, "%s", pl_error_message());
    (void)pthread_mutex_lock(&self->lock);
    if (self->generation == generation &&
        atomic_load(&self->phase) == PLI_GPU_RUNNING) {
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
    pli_gpu_comm_fail(self, self->generation, PL_OK); /* only this thread changes it */
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
    const uint64_t generation = self->generation;
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == PLI_GPU_RUNNING)
        st = check_device(self, &is_base);
    (void)pthread_mutex_unlock(&self->lock);
    if (st != PL_OK)
        pli_gpu_comm_fail(self, generation, is_base ? PL_OK : st);
}

/* ---- recovering ----------------------------------------------------------------- */

/* Waits until the device has finished the failed step, and makes a communicator. */
static pl_status renew_communicator(pli_gpu_comm *self)
{
    pl_status st = PL_OK;
    pli_backoff waiting =
        pli_backoff_begin(self->deadline_ns, pli_gpu_comm_poll_base, self);
    (void)pthread_mutex_lock(&self->lock);
    pli_nccl *old = self->nccl;
    self->nccl = NULL;
    (void)pthread_mutex_unlock(&self->lock);
    pli_nccl_destroy(old);
    pli_pool_deregister(self->pool, NULL);
    st = self->backend->ops->event_record(self->backend, self->drained, self->side);
    if (st == PL_OK)
        st = pli_backend_await(self->backend, self->drained, &waiting,
                               "the failed step's work on the device");
    PL_TRY(pli_gpu_comm_agree(self, st));
    PL_TRY(pli_gpu_comm_meet(self));
done:
    return st;
}

/* If no step can follow, fails with the cause, and sends it to the waiting ranks. */
static pl_status check_lost(pli_gpu_comm *self)
{
    pl_status st = PL_OK;
    char cause[PLI_GPU_MESSAGE_BYTES] = "";
    if (!self->is_lost && !self->is_left)
        goto done;
    if (pli_gpu_comm_check(self) != PL_OK)
        pli_text_print(cause, sizeof cause, "%s", pl_error_message());
    st = pli_fail(PL_EPEER, "rank %d: %s: start again from what was saved (%s)",
                  self->super.rank,
                  self->is_lost ? "means of a finished step were lost on the device, "
                                  "so the ranks may differ"
                                : "NCCL keeps a thread of this process",
                  cause);
    pli_base_set_failure_message(&self->super, pl_error_message());
    pli_base_leave(&self->super);
done:
    return st;
}

static void begin_anew(pli_gpu_comm *self)
{
    pli_inflight_forget(&self->inflight);
    self->last = NULL;
    self->capture = PLI_GPU_CAPTURE_VARIES;
    self->hash = 0;
    (void)pthread_mutex_lock(&self->lock);
    self->base_ticket = 0;
    self->generation++;
    self->failure = PL_OK;
    self->n_agreed = self->n_at_ticket = self->inflight.n_recorded;
    atomic_store(&self->phase, PLI_GPU_RUNNING);
    (void)pthread_mutex_unlock(&self->lock);
}

pl_status pli_gpu_comm_recover(pl_comm *comm, int64_t slice_ns, pl_recovery *out)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = (pli_gpu_comm *)(void *)comm;
    pl_recovery found = PL_NOTHING_FAILED;
    if (atomic_load(&self->phase) == PLI_GPU_RUNNING &&
        pli_base_query(&self->super, PLI_QUERY_STEP) == PL_OK) {
        *out = PL_NOTHING_FAILED;
        goto done;
    }
    pli_gpu_comm_fail(self, self->generation, PL_OK);
    PL_TRY(check_lost(self));
    PL_TRY(pl_comm_recover(self->super.base, slice_ns, &found));
    if (found == PL_NOTHING_FAILED) {
        pl_comm_abort(self->super.base, NULL);
        PL_FAIL(PL_EAGAIN, "not done yet");
    }
    st = renew_communicator(self);
    if (st != PL_OK) {
        char message[PLI_GPU_MESSAGE_BYTES];
        pli_text_print(message, sizeof message, "%s", pl_error_message());
        pl_comm_abort(self->super.base, message); /* so that all ranks recover again */
        PL_FAIL(st, "%s", message);
    }
    begin_anew(self);
    *out = PL_RECOVERED;
done:
    return st;
}
