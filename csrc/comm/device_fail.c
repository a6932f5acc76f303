/* device_fail.c - the end of a step that fails, and what comes behind.
 *
 * The communicator is aborted, so that nothing spins on the device.  But the host is
 * ahead of it: the device may still be at a step that every rank has ended well, whose
 * means the user's optimizer is about to use.  Those operations are in the queues of
 * all devices, so they are waited for first, for a while; where one is not done by
 * then, the ranks may hold different parameters, and no step can follow.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../core/clock.h"
#include "device_state.h"
#include "patience.h"

enum {
    HEARSAY_MS = 200,   /* for the base to know what NCCL has met; at most ... */
    HEARSAY_PART = 100, /* ... this part of the deadline */
    DRAIN_MS = 10000,   /* for the operations of steps that are over */
    GONE_MS = 2000      /* a rank that is gone may have done its part before */
};

/* ---- failing --------------------------------------------------------------------- */

void pli_device_agreed_locked(pli_device *self)
{
    if (self->n_at_ticket <= self->n_agreed)
        return;
    /* What has failed in the same moment may have cut it short. */
    if (atomic_load(&self->phase) == PLI_DEVICE_FAILED)
        self->is_lost = 1;
    else
        self->n_agreed = self->n_at_ticket;
}

pl_status pli_device_check_means(pli_device *self)
{
    if (atomic_load(&self->phase) == PLI_DEVICE_RUNNING)
        return PL_OK;
    (void)pthread_mutex_lock(&self->lock);
    const int is_there = !self->is_lost && self->follow.n_noted <= self->n_agreed;
    (void)pthread_mutex_unlock(&self->lock);
    return is_there ? PL_OK : pli_device_check(self);
}

int pli_device_drain(pli_device *self)
{
    const uint64_t n_agreed = self->n_agreed;
    pli_patience waiting = pli_patience_for(DRAIN_MS * PLI_MS, NULL, NULL);
    pli_followed oldest = {.n = 0};
    while (pli_follow_oldest(&self->follow, &oldest) == PL_OK) {
        if (oldest.n == 0 || oldest.n > n_agreed)
            return 1;
        /* A relay tells of steps that have failed, and of no rank that is gone. */
        if ((!pli_comm_is_relayed(self->base) &&
             pli_comm_survey(self->base, PLI_SURVEY_WORLD) != PL_OK) ||
            pli_patience_pass(&waiting, "a step that is over") != PL_OK)
            break;
    }
    return 0;
}

/* `words`: NULL where the base has failed already, and knows why. */
static void fail_locked(pli_device *self, pl_status st, const char *words)
{
    self->failure = words != NULL ? st : PL_OK;
    (void)snprintf(self->words, sizeof self->words, "%s", words != NULL ? words : "");
    if (words != NULL && !pli_comm_is_relayed(self->base))
        pl_comm_abort(self->base, self->words);
    if (self->base->ops->is_done != NULL &&
        self->base->ops->is_done(self->base, self->base_ticket))
        pli_device_agreed_locked(self);
    self->is_lost = self->is_lost || !pli_device_drain(self);
    pli_nccl_abort(self->nccl);
    atomic_store(&self->phase, PLI_DEVICE_FAILED);
}

pl_status pli_device_ask_base(const pli_device *self, pl_status st)
{
    /* NCCL may hear of a peer's end a moment before this process can see it. */
    const int is_of_network = st == PL_ESYS || st == PL_EPEER;
    const int64_t most_ns = self->deadline_ns / HEARSAY_PART;
    pli_patience waiting = pli_patience_for(
        most_ns < HEARSAY_MS * PLI_MS ? most_ns : HEARSAY_MS * PLI_MS, NULL, NULL);
    pl_status found = PL_OK;
    if (pli_comm_is_relayed(self->base))
        return PL_OK;
    do {
        found = pli_comm_survey(self->base, PLI_SURVEY_WORLD);
        if (found == PL_OK)
            found = pli_comm_survey(self->base, PLI_SURVEY_STEP);
    } while (found == PL_OK && is_of_network &&
             pli_patience_pass(&waiting, "a look at the peers") == PL_OK);
    return found;
}

void pli_device_fail(pli_device *self, uint64_t generation, pl_status st)
{
    char words[PLI_DEVICE_TEXT_BYTES];
    int is_first = 0;
    (void)snprintf(words, sizeof words, "%.*s", (int)sizeof words - 1,
                   pl_error_message());
    (void)pthread_mutex_lock(&self->lock);
    if (self->generation == generation &&
        atomic_load(&self->phase) == PLI_DEVICE_RUNNING) {
        if (st != PL_OK && pli_device_ask_base(self, st) != PL_OK)
            st = PL_OK;
        fail_locked(self, st, st != PL_OK ? words : NULL);
        is_first = st != PL_OK;
    }
    (void)pthread_mutex_unlock(&self->lock);
    /* A carrier may want locks of its caller's. */
    if (is_first && pli_comm_is_relayed(self->base))
        pl_comm_abort(self->base, words);
    (void)pli_fail(st, "%s", words);
}

pl_status pli_device_check(pli_device *self)
{
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == PLI_DEVICE_RUNNING)
        return PL_OK;
    (void)pthread_mutex_lock(&self->lock);
    if (self->failure != PL_OK)
        st = pli_fail(self->failure, "%s", self->words);
    (void)pthread_mutex_unlock(&self->lock);
    if (st == PL_OK)
        st = pl_comm_progress(self->base);
    if (st == PL_OK)
        st = pli_fail(PL_EPEER, "rank %d: the step was aborted", self->super.rank);
    return st;
}

pl_status pli_device_after(pli_device *self, pl_status st)
{
    if (st == PL_OK || st == PL_EAGAIN || st == PL_EINVAL || st == PL_ESTATE)
        return st;
    pli_device_fail(self, self->generation, PL_OK); /* this thread alone changes it */
    return pli_device_check(self);
}

/* ---- the watchdog's look --------------------------------------------------------- */

static void describe(const pli_device *self, const pli_followed *it, char *out,
                     size_t out_bytes)
{
    const pl_op *op = &it->op;
    (void)snprintf(out, out_bytes,
                   "the %s of %zu %s at byte %zu of the device's (operation %llu, step "
                   "%llu)",
                   pli_op_kind_text(op->kind), op->n_elems, pl_dtype_text(op->dtype),
                   op->offset_bytes - self->super.host_bytes, (unsigned long long)it->n,
                   (unsigned long long)it->step);
}

/* A graph's replays are not followed, and their host may never speak with the others:
 * where a rank is gone, the device may wait for it in one.  What that rank had done
 * before its end is done here by then. */
static pl_status check_replays(pli_device *self)
{
    const int64_t now = pli_now_ns();
    if (!atomic_load(&self->is_captured) ||
        pli_comm_survey(self->base, PLI_SURVEY_GONE) == PL_OK) {
        self->gone_since_ns = 0;
        return PL_OK;
    }
    if (self->gone_since_ns == 0)
        self->gone_since_ns = now;
    if (now - self->gone_since_ns <= GONE_MS * PLI_MS)
        return PL_OK;
    return pli_comm_survey(self->base, PLI_SURVEY_WORLD);
}

static pl_status check_device(pli_device *self, int *is_base)
{
    pl_status st = PL_OK;
    pli_followed oldest = {.n = 0};
    char what[256];
    *is_base = 1;
    PL_TRY(pli_comm_survey(self->base, PLI_SURVEY_STEP));
    *is_base = 0;
    if (self->nccl != NULL)
        PL_TRY(pli_nccl_check(self->nccl));
    PL_TRY(pli_follow_oldest(&self->follow, &oldest));
    *is_base = 1;
    if (oldest.n == 0) {
        PL_TRY(check_replays(self));
        goto done;
    }
    const int64_t age_ns = pli_now_ns() - oldest.since_ns;
    if (age_ns > GONE_MS * PLI_MS)
        PL_TRY(pli_comm_survey(self->base, PLI_SURVEY_WORLD));
    *is_base = 0;
    /* Where the host waits for the same rank, it can name it: it comes first. */
    if (age_ns <= self->deadline_ns + self->deadline_ns / 4)
        goto done;
    self->is_lost |= oldest.n <= self->n_agreed;
    describe(self, &oldest, what, sizeof what);
    PL_FAIL(PL_ETIMEOUT,
            "rank %d: %s has not come to its end on the device within the deadline",
            self->super.rank, what);
done:
    return st;
}

void pli_device_watch(void *context)
{
    pli_device *self = context;
    int is_base = 0;
    (void)pthread_mutex_lock(&self->lock);
    const uint64_t generation = self->generation;
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == PLI_DEVICE_RUNNING)
        st = check_device(self, &is_base);
    (void)pthread_mutex_unlock(&self->lock);
    if (st != PL_OK)
        pli_device_fail(self, generation, is_base ? PL_OK : st);
}

/* ---- going on -------------------------------------------------------------------- */

static pl_status look(void *context)
{
    const pli_device *self = context;
    return pli_comm_look(self->base);
}

/* Waits until the device is through with the failed step, and meets the others anew. */
static pl_status renew_communicator(pli_device *self)
{
    pl_status st = PL_OK;
    pli_patience waiting = pli_patience_for(self->deadline_ns, look, self);
    (void)pthread_mutex_lock(&self->lock);
    pli_nccl *old = self->nccl;
    self->nccl = NULL;
    (void)pthread_mutex_unlock(&self->lock);
    pli_nccl_destroy(old);
    self->staging_handle = NULL;
    pli_pool_deregister(self->pool, NULL);
    st = self->backend->ops->event_record(self->backend, self->drained, self->side);
    if (st == PL_OK)
        st = pli_patience_await(&waiting, self->backend, self->drained,
                                "the failed step's work on the device");
    PL_TRY(pli_device_agree(self, st));
    PL_TRY(pli_device_meet(self));
done:
    return st;
}

/* Where no step can follow: whoever waits for this rank is told. */
static pl_status check_lost(pli_device *self)
{
    pl_status st = PL_OK;
    if (self->is_lost) {
        st =
            pli_fail(PL_EPEER,
                     "rank %d: means of a step that had ended well were lost on the "
                     "device, so the ranks may differ: start again from what was saved",
                     self->super.rank);
        pli_comm_last_words(self->base, pl_error_message());
        pl_comm_leave(self->base);
    }
    return st;
}

static void begin_anew(pli_device *self)
{
    pli_follow_forget(&self->follow);
    self->last = NULL;
    self->hash = 0;
    (void)pthread_mutex_lock(&self->lock);
    self->base_ticket = 0;
    self->generation++;
    self->failure = PL_OK;
    self->n_agreed = self->n_at_ticket = self->follow.n_noted;
    atomic_store(&self->phase, PLI_DEVICE_RUNNING);
    (void)pthread_mutex_unlock(&self->lock);
}

pl_status pli_device_recover(pl_comm *comm, int64_t slice_ns, pl_recovery *out)
{
    pl_status st = PL_OK;
    pli_device *self = (pli_device *)(void *)comm;
    pl_recovery found = PL_NOTHING_FAILED;
    if (atomic_load(&self->phase) == PLI_DEVICE_RUNNING &&
        pli_comm_survey(self->base, PLI_SURVEY_STEP) == PL_OK) {
        *out = PL_NOTHING_FAILED;
        goto done;
    }
    pli_device_fail(self, self->generation, PL_OK);
    PL_TRY(check_lost(self));
    PL_TRY(pl_comm_recover(self->base, slice_ns, &found));
    if (found == PL_NOTHING_FAILED) {
        pl_comm_abort(self->base, NULL);
        PL_FAIL(PL_EAGAIN, "not done yet");
    }
    st = renew_communicator(self);
    if (st != PL_OK) {
        char words[PLI_DEVICE_TEXT_BYTES];
        (void)snprintf(words, sizeof words, "%.*s", (int)sizeof words - 1,
                       pl_error_message());
        pl_comm_abort(self->base, words); /* so that all come back here */
        PL_FAIL(st, "%s", words);
    }
    begin_anew(self);
    *out = PL_RECOVERED;
done:
    return st;
}
