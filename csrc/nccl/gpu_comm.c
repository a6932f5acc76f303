/* gpu_comm.c - operations on a device's memory, in program order on its side stream.
 *
 * To agree, each rank sends one word to all others, through the base.  If a rank has
 * failed, no rank enters NCCL or goes on, and every rank gets the failed rank's
 * message.
 *
 * So the ranks make their communicator:
 *
 *     every rank   makes its own objects; all agree
 *     rank 0       makes NCCL's id; all agree, and rank 0 broadcasts it
 *     every rank   joins the communicator; all agree
 *     every rank   tries what steps will do (gpu_comm_trial.c); all agree
 *
 * To report a failure while ranks are inside NCCL, a rank aborts the base, which every
 * rank polls.
 *
 * A world fails permanently.  Its communicator is aborted, so that no kernel spins on
 * the device.  But the host is ahead of the device: the device may still run a step
 * that every rank has finished, and whose means the user's optimizer is about to use.
 * All devices have those operations in their queues, so the abort first waits for them,
 * for a limited time.  If one does not finish, the ranks may hold different parameters:
 * gpu_check_means() tells the caller, so that no new world goes on with these.
 */
#include "gpu_comm.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/cuda.h"
#include "core/alloc.h"
#include "core/backoff.h"
#include "core/clock.h"
#include "core/hash.h"
#include "gpu_comm_state.h"

enum {
    SLICE_MS = 100,
    DRAIN_MS = 10000,   /* for each operation of finished steps, after a failure */
    GONE_MS = 2000,     /* for the part that a gone rank has done */
    HEARSAY_MS = 200,   /* for the base to see what NCCL reports; at most ... */
    HEARSAY_PART = 100, /* ... deadline / 100 */
    FLUSH_MS = 500      /* destroy waits while NCCL flushes */
};
_Static_assert((int)PLI_NCCL_ID_BYTES <= (int)PLI_GPU_BOARD_BYTES,
               "the id has its place");

static pli_gpu_comm *gpu_comm_of(pl_comm *comm)
{
    return (pli_gpu_comm *)(void *)comm;
}

/* ---- agreeing ------------------------------------------------------------------- */

size_t pli_gpu_board_bytes(int world_size)
{
    const size_t n_bytes = (size_t)world_size * sizeof(uint32_t);
    return n_bytes < PLI_GPU_BOARD_BYTES ? PLI_GPU_BOARD_BYTES : n_bytes;
}

/* The board, on which talk() operates. */
static char *board_of(const pli_gpu_comm *self)
{
    return self->super.arena + self->super.host_bytes;
}

static pl_status check_signals(const pli_gpu_comm *self)
{
    pl_status st = PL_OK;
    if (self->is_interrupted != NULL && self->is_interrupted(self->context))
        PL_FAIL(PL_ESTATE, "interrupted");
done:
    return st;
}

pl_status pli_gpu_comm_poll_base(void *context)
{
    const pli_gpu_comm *self = context;
    const pl_status st = check_signals(self);
    return st == PL_OK ? pli_comm_check_peers(self->super.base) : st;
}

/* Does one operation of the base on the board's first n_bytes. */
static pl_status talk(const pli_gpu_comm *self, pl_op_kind kind, int root,
                      size_t n_bytes)
{
    pl_status st = PL_OK;
    pl_ticket ticket = 0;
    const pl_op op = {.kind = kind,
                      .dtype = PL_U8,
                      .root = root,
                      .offset_bytes = self->super.host_bytes,
                      .n_elems = n_bytes};
    PL_TRY(pl_comm_issue(self->super.base, &op, &ticket));
    while ((st = pl_comm_wait(self->super.base, ticket, SLICE_MS * PLI_MS)) ==
           PL_EAGAIN)
        PL_TRY(check_signals(self));
done:
    return st;
}

/* A rank's word: its status, and a hash of its sizes. */
static uint32_t state_of_rank(const pli_gpu_comm *self, pl_status st)
{
    const uint64_t sizes =
        pli_hash_with(self->super.host_bytes, self->super.arena_bytes);
    return (uint32_t)(sizes & 0xffffff) << 8 | (uint32_t)st;
}

/* Sends the failed rank's message to every rank, and fails with it. */
static pl_status report(pli_gpu_comm *self, int culprit, const char *own)
{
    pl_status st = PL_OK;
    char *board = board_of(self);
    if (culprit == self->super.rank)
        (void)snprintf(board, PLI_GPU_BOARD_BYTES, "%.*s", PLI_GPU_BOARD_BYTES - 1,
                       own);
    PL_TRY(talk(self, PL_BROADCAST, culprit, PLI_GPU_BOARD_BYTES));
    board[PLI_GPU_BOARD_BYTES - 1] = '\0';
    PL_FAIL(PL_EPEER, "rank %d: rank %d could not go on: %s", self->super.rank, culprit,
            board);
done:
    return st;
}

static pl_status compare(const pli_gpu_comm *self, const uint32_t *states)
{
    pl_status st = PL_OK;
    for (int r = 0; r < self->super.world_size; r++)
        if (states[r] >> 8 != states[self->super.rank] >> 8)
            PL_FAIL(PL_EMISMATCH,
                    "rank %d: rank %d has a world of different sizes: all ranks must "
                    "wrap the same model with the same options",
                    self->super.rank, r);
done:
    return st;
}

pl_status pli_gpu_comm_agree(pli_gpu_comm *self, pl_status own)
{
    pl_status st = PL_OK;
    char own_message[PLI_GPU_MESSAGE_BYTES];
    uint32_t *states = (uint32_t *)(void *)board_of(self);
    const size_t n_bytes = (size_t)self->super.world_size * sizeof *states;
    int culprit = -1;
    pli_text_print(own_message, sizeof own_message, "%s",
                   own != PL_OK ? pl_error_message() : "");
    if (self->super.world_size == 1)
        return own;
    states[self->super.rank] = state_of_rank(self, own);
    PL_TRY(talk(self, PL_ALL_GATHER, 0, n_bytes));
    for (int r = 0; r < self->super.world_size && culprit < 0; r++)
        if ((states[r] & 0xff) != PL_OK)
            culprit = r;
    PL_TRY(culprit >= 0 ? report(self, culprit, own_message) : compare(self, states));
done:
    return own != PL_OK ? pli_fail(own, "%s", own_message) : st;
}

/* Returns another rank's failure, which explains more than `st`; PL_OK if none. */
static pl_status query_base(const pli_gpu_comm *self, pl_status st)
{
    /* NCCL may report a peer's end shortly before this process can see it. */
    const int is_of_network = st == PL_ESYS || st == PL_EPEER;
    const int64_t most_ns = self->deadline_ns / HEARSAY_PART;
    pli_backoff waiting = pli_backoff_begin(
        most_ns < HEARSAY_MS * PLI_MS ? most_ns : HEARSAY_MS * PLI_MS, NULL, NULL);
    pl_status found = PL_OK;
    if (pli_comm_is_group_comm(self->super.base))
        return PL_OK;
    do {
        found = pli_comm_query(self->super.base, PLI_QUERY_WORLD);
        if (found == PL_OK)
            found = pli_comm_query(self->super.base, PLI_QUERY_STEP);
    } while (found == PL_OK && is_of_network &&
             pli_backoff_pause(&waiting, "a check of the peers") == PL_OK);
    return found;
}

/* Collective: agrees on the result `st` of what all ranks do in NCCL.  If this rank has
 * failed, aborts the base, so that ranks in NCCL stop waiting for it. */
static pl_status agree_on(pli_gpu_comm *self, pl_status st)
{
    char message[PLI_GPU_MESSAGE_BYTES];
    if (st != PL_OK && !pli_comm_is_group_comm(self->super.base)) {
        pli_text_print(message, sizeof message, "%s", pl_error_message());
        const pl_status theirs = query_base(self, st);
        if (theirs == PL_OK) {
            pl_comm_abort(self->super.base, message);
            (void)pli_fail(st, "%s", message);
        } else {
            st = theirs;
        }
    }
    return pli_gpu_comm_agree(self, st);
}

/* ---- failing -------------------------------------------------------------------- */

/* Every rank has done the base's latest operation: the step is over. */
static void note_agreed_locked(pli_gpu_comm *self)
{
    if (self->n_at_ticket <= self->n_agreed)
        return;
    /* A failure at the same moment may have cut it short. */
    if (atomic_load(&self->phase) == PLI_GPU_FAILED)
        self->is_lost = 1;
    else
        self->n_agreed = self->n_at_ticket;
}

/* PL_OK, or the world's failure. */
static pl_status check_world(pli_gpu_comm *self)
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

/* PL_OK, or the reason why means of operations issued so far will never arrive. */
static pl_status check_issued(pli_gpu_comm *self)
{
    if (atomic_load(&self->phase) == PLI_GPU_RUNNING)
        return PL_OK;
    (void)pthread_mutex_lock(&self->lock);
    const int is_there = !self->is_lost && self->inflight.n_recorded <= self->n_agreed;
    (void)pthread_mutex_unlock(&self->lock);
    return is_there ? PL_OK : check_world(self);
}

static pl_status gpu_check_means(pl_comm *comm)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = gpu_comm_of(comm);
    (void)pthread_mutex_lock(&self->lock);
    const int is_lost = self->is_lost;
    (void)pthread_mutex_unlock(&self->lock);
    if (is_lost) {
        char cause[PLI_GPU_MESSAGE_BYTES];
        (void)!check_world(self);
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

/* Waits for the operations of finished steps, most_ns for each, or gone_ns once a rank
 * is gone; a failure if one does not finish. */
static pl_status drain(pli_gpu_comm *self, int64_t most_ns, int64_t gone_ns)
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
        PL_TRY(check_world(self)); /* the watchdog may have failed the world */
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
        note_agreed_locked(self);
    self->is_lost = self->is_lost || drain(self, DRAIN_MS * PLI_MS, 0) != PL_OK;
    pli_nccl_abort(self->nccl);
    atomic_store(&self->phase, PLI_GPU_FAILED);
}

/* Fails the world, unless it has failed: here at once, and through the base on the
 * other ranks.  Any thread may call.  `st` comes with this thread's error message;
 * PL_OK: the base has failed already and has the reason. */
static void fail_world(pli_gpu_comm *self, pl_status st)
{
    char message[PLI_GPU_MESSAGE_BYTES];
    int is_first = 0;
    pli_text_print(message, sizeof message, "%s", pl_error_message());
    (void)pthread_mutex_lock(&self->lock);
    if (atomic_load(&self->phase) == PLI_GPU_RUNNING) {
        if (st != PL_OK && query_base(self, st) != PL_OK)
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

/* If the base has failed with `st`: fails the world here too, returns why. */
static pl_status after_base(pli_gpu_comm *self, pl_status st)
{
    if (st == PL_OK || st == PL_EAGAIN || st == PL_EINVAL || st == PL_ESTATE)
        return st;
    fail_world(self, PL_OK);
    return check_world(self);
}

/* ---- the watchdog's check ------------------------------------------------------- */

/* This device may wait for a rank that is gone, and the host may do nothing with other
 * ranks in the meantime.  Once GONE_MS have passed since that rank left, this
 * device has done all to which the rank contributed.  Replays of a graph are not
 * tracked, so one may be waiting. */
static pl_status check_gone(pli_gpu_comm *self, int is_waiting)
{
    if ((!is_waiting && !atomic_load(&self->is_captured)) ||
        pli_base_query(&self->super, PLI_QUERY_GONE) == PL_OK)
        self->gone = (pli_stopwatch){0};
    else if (pli_elapsed_ns(&self->gone) > GONE_MS * PLI_MS)
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
        fail_world(self, is_base ? PL_OK : st);
}

/* ---- operations ----------------------------------------------------------------- */

static int is_of_host(const pli_gpu_comm *self, const pl_op *op)
{
    return op->kind == PL_BARRIER || op->offset_bytes < self->super.host_bytes;
}

/* The watchdog asks whether the base has finished its last operation, so it must not
 * look before that operation's ticket is stored.  A group comm has no answer, and its
 * callbacks may take locks of the caller. */
static pl_status issue_on_base(pli_gpu_comm *self, const pl_op *op, pl_ticket *out)
{
    const int is_group_comm = pli_comm_is_group_comm(self->super.base);
    if (!is_group_comm)
        (void)pthread_mutex_lock(&self->lock);
    const pl_status st = pl_comm_issue(self->super.base, op, out);
    if (is_group_comm)
        (void)pthread_mutex_lock(&self->lock);
    if (st == PL_OK) {
        self->base_ticket = *out;
        self->n_at_ticket = self->inflight.n_recorded;
    }
    (void)pthread_mutex_unlock(&self->lock);
    return st;
}

static pl_status issue_on_host(pli_gpu_comm *self, const pl_op *op, pl_ticket *out)
{
    pl_status st = PL_OK;
    pl_op marked = *op;
    const size_t n_bytes = op->n_elems * pl_dtype_bytes(op->dtype);
    if (op->kind != PL_BARRIER && n_bytes > self->super.host_bytes - op->offset_bytes)
        PL_FAIL(PL_EINVAL,
                "%zu bytes at byte %zu are partly on the host, partly on the device",
                n_bytes, op->offset_bytes);
    /* The base compares the marks, and so the device operations, which NCCL cannot. */
    marked.mark = (unsigned)self->hash;
    PL_TRY(after_base(self, issue_on_base(self, &marked, out)));
done:
    return st;
}

/* Call after an operation: it has brought the side stream into the capture. */
static pl_status read_capture(pli_gpu_comm *self, int *is_captured)
{
    pl_status st = PL_OK;
    if (self->capture == PLI_GPU_CAPTURE_OFF || self->capture == PLI_GPU_CAPTURE_ON) {
        *is_captured = self->capture == PLI_GPU_CAPTURE_ON;
        goto done;
    }
    PL_TRY(pli_cuda_is_capturing(self->backend, self->side, is_captured));
    if (self->capture == PLI_GPU_CAPTURE_UNKNOWN)
        self->capture = *is_captured ? PLI_GPU_CAPTURE_ON : PLI_GPU_CAPTURE_OFF;
done:
    return st;
}

/* Records an event after the operation, to track it by. */
static pl_status record_op(pli_gpu_comm *self, const pl_op *op)
{
    pl_status st = PL_OK;
    int is_captured = 0;
    PL_TRY(read_capture(self, &is_captured));
    if (is_captured) {
        pli_nccl_record_captured(self->nccl);
        atomic_store(&self->is_captured, 1);
        self->is_replayed = 1;
        PL_TRY(self->backend->ops->event_record(self->backend, self->captured,
                                                self->side));
        self->last = self->captured;
    } else {
        PL_TRY(pli_inflight_record(&self->inflight, op, atomic_load(&self->step),
                                   self->side, &self->last));
    }
done:
    return st;
}

static pl_status enqueue(pli_gpu_comm *self, const pl_op *op, const pli_order *order)
{
    pl_status st = PL_OK;
    if (order->ready != NULL)
        PL_TRY(self->backend->ops->event_wait(self->backend, order->ready, self->side));
    if (self->super.world_size > 1) /* else the data is its own sum and mean */
        PL_TRY(pli_nccl_enqueue(self->nccl, op,
                                pli_comm_memory(&self->super, op->offset_bytes),
                                self->side));
    PL_TRY(record_op(self, op));
done:
    return st;
}

static pl_status gpu_issue(pl_comm *comm, const pl_op *op, const pli_order *order,
                           pl_ticket *out)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = gpu_comm_of(comm);
    PL_TRY(check_world(self));
    if (is_of_host(self, op)) {
        PL_TRY(issue_on_host(self, op, out));
        goto done;
    }
    PL_TRY(pli_nccl_can(op));
    st = enqueue(self, op, order);
    if (st != PL_OK) {
        fail_world(self, st);
        PL_TRY(check_world(self));
    }
    self->hash = pli_hash_with(self->hash, pli_op_hash(op));
    *out = self->base_ticket;
done:
    return st;
}

/* ---- memory --------------------------------------------------------------------- */

/* Whether the allocator has yet to learn of a stream; it is known from now on. */
static int is_new(pli_gpu_comm *self, pl_stream *stream)
{
    int is_known = 0;
    (void)pthread_mutex_lock(&self->lock);
    for (size_t k = 0; k < PLI_GPU_STREAMS && k < self->n_recorded; k++)
        is_known |= self->recorded[k] == stream;
    if (!is_known)
        self->recorded[self->n_recorded++ % PLI_GPU_STREAMS] = stream;
    (void)pthread_mutex_unlock(&self->lock);
    return !is_known;
}

static pl_status record_stream(pli_gpu_comm *self, pl_stream *stream)
{
    const pli_device_allocator *allocator = &self->allocator;
    return self->owner_pid == getpid() && is_new(self, stream)
               ? allocator->record_stream(allocator->context, self->super.device_owner,
                                          stream)
               : PL_OK;
}

static void release(const pli_gpu_comm *self, void *owner)
{
    if (owner != NULL)
        self->allocator.release(self->allocator.context, owner);
}

/* Gives the world zeroed memory, in place of what it has. */
static pl_status take_memory(pli_gpu_comm *self)
{
    pl_status st = PL_OK;
    const pli_device_allocator *allocator = &self->allocator;
    const size_t n_wanted = self->super.arena_bytes - self->super.host_bytes;
    const size_t n_bytes = n_wanted > 0 ? n_wanted : PL_CACHE_LINE;
    pli_device_memory fresh = {.owner = NULL};
    pli_replayed *replayed = NULL;
    if (self->is_replayed)
        PL_TRY(pli_calloc(1, sizeof *replayed, "a graph's memory", &replayed));
    PL_TRY(allocator->alloc(allocator->context, n_bytes, &fresh));
    PL_TRY(allocator->record_stream(allocator->context, fresh.owner, self->side));
    PL_TRY(pli_cuda_clear(self->backend, fresh.address, n_bytes));
    if (self->is_replayed) {
        *replayed = (pli_replayed){self->replayed, self->super.device_owner};
        self->replayed = replayed;
        replayed = NULL;
    } else {
        release(self, self->super.device_owner);
    }
    self->is_replayed = 0;
    self->super.device_memory = fresh.address;
    self->super.device_owner = fresh.owner;
    self->recorded[0] = self->side;
    self->n_recorded = 1;
    fresh.owner = NULL;
done:
    release(self, fresh.owner);
    pli_free(replayed);
    return st;
}

static void release_all(pli_gpu_comm *self)
{
    release(self, self->super.device_owner);
    while (self->replayed != NULL) {
        pli_replayed *next = self->replayed->next;
        release(self, self->replayed->owner);
        pli_free(self->replayed);
        self->replayed = next;
    }
}

static pl_status gpu_renew(pl_comm *comm)
{
    pli_gpu_comm *self = gpu_comm_of(comm);
    const pl_status st = check_world(self);
    return st != PL_OK ? st : take_memory(self);
}

/* ---- waiting -------------------------------------------------------------------- */

static pl_status gpu_progress(pl_comm *comm)
{
    pli_gpu_comm *self = gpu_comm_of(comm);
    const pl_status st = check_world(self);
    return st != PL_OK ? st : after_base(self, pl_comm_progress(comm->base));
}

static pl_status gpu_check_peers(pl_comm *comm)
{
    pli_gpu_comm *self = gpu_comm_of(comm);
    const pl_status st = check_world(self);
    return st != PL_OK ? st : after_base(self, pli_comm_check_peers(comm->base));
}

/* If every rank has done its part of the step's host operations, the step is over on
 * all ranks, even if one has failed in the next step by now. */
static pl_status gpu_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = gpu_comm_of(comm);
    PL_TRY(after_base(self, pl_comm_wait(self->super.base, ticket, slice_ns)));
    (void)pthread_mutex_lock(&self->lock);
    if (ticket == self->base_ticket) {
        note_agreed_locked(self);
        self->capture = PLI_GPU_CAPTURE_VARIES; /* the step is over */
    }
    (void)pthread_mutex_unlock(&self->lock);
done:
    return st;
}

static pl_status gpu_order(pl_comm *comm, pl_stream *stream)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = gpu_comm_of(comm);
    int is_captured = 0;
    PL_TRY(check_issued(self));
    PL_TRY(record_stream(self, stream));
    if (self->last == NULL)
        goto done;
    /* Captured work waits for captured work only, other work for other work only. */
    PL_TRY(pli_cuda_is_capturing(self->backend, stream, &is_captured));
    if ((is_captured != 0) == (self->last == self->captured))
        PL_TRY(self->backend->ops->event_wait(self->backend, self->last, stream));
done:
    return st;
}

static pl_status gpu_outlive(pl_comm *comm, pl_stream *stream)
{
    return record_stream(gpu_comm_of(comm), stream);
}

/* ---- messages and trials -------------------------------------------------------- */

static void gpu_abort(pl_comm *comm, const char *message)
{
    pli_gpu_comm *self = gpu_comm_of(comm);
    if (self->owner_pid != getpid())
        return;
    pl_comm_abort(self->super.base, message);
    fail_world(self, PL_OK);
}

static void gpu_record_activity(pl_comm *comm, pl_activity activity, uint64_t step)
{
    pli_gpu_comm *self = gpu_comm_of(comm);
    atomic_store_explicit(&self->step, step, memory_order_relaxed);
    if (activity == PL_BACKWARD)
        self->capture = PLI_GPU_CAPTURE_UNKNOWN;
    pli_base_record_activity(comm, activity, step);
}

static pl_status gpu_prepare(pl_comm *comm, const pli_reduced_range *range,
                             const pli_order *order)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = gpu_comm_of(comm);
    if (comm->world_size == 1)
        goto done;
    PL_TRY(check_world(self));
    st = agree_on(self, pli_gpu_comm_try_means(self, range, order->ready));
    if (st != PL_OK)
        fail_world(self, PL_OK);
done:
    return st;
}

/* ---- making the communicator ---------------------------------------------------- */

static pl_status meet_in_nccl(pli_gpu_comm *self, const char *id, pli_nccl **out)
{
    const pli_nccl_options options = {.library = self->library,
                                      .backend = self->backend,
                                      .rank = self->super.rank,
                                      .world_size = self->super.world_size,
                                      .id = id,
                                      .deadline_ns = self->deadline_ns,
                                      .poll = pli_gpu_comm_poll_base,
                                      .context = self};
    return pli_nccl_create(&options, out);
}

/* Collective: makes the communicator, and tries it. */
static pl_status meet(pli_gpu_comm *self)
{
    pl_status st = PL_OK;
    char *board = board_of(self);
    char id[PLI_NCCL_ID_BYTES] = {0};
    pli_nccl *nccl = NULL; /* given to the world at once, which ends it */
    if (self->super.world_size == 1)
        return PL_OK;
    if (self->super.rank == 0)
        st = pli_nccl_new_id(self->library, self->backend, id);
    PL_TRY(pli_gpu_comm_agree(self, st));
    memcpy(board, id, self->super.rank == 0 ? sizeof id : 0);
    PL_TRY(talk(self, PL_BROADCAST, 0, sizeof id));
    memcpy(id, board, sizeof id);
    st = meet_in_nccl(self, id, &nccl);
    (void)pthread_mutex_lock(&self->lock);
    self->nccl = nccl;
    (void)pthread_mutex_unlock(&self->lock);
    PL_TRY(agree_on(self, st));
    PL_TRY(agree_on(self, pli_gpu_comm_try(self)));
done:
    return st;
}

/* ---- life ----------------------------------------------------------------------- */

static void end_watch(pli_gpu_comm *self)
{
    if (self->watchdog != NULL)
        pli_watchdog_leave(self->watchdog, self);
    self->watchdog = NULL;
}

/* If all is well, first finishes the device's work, which the peers need. */
static void end_well(pli_gpu_comm *self)
{
    pli_inflight_op oldest = {.n = 0};
    if (atomic_load(&self->phase) != PLI_GPU_RUNNING)
        return;
    if (drain(self, self->deadline_ns, GONE_MS * PLI_MS) !=
        PL_OK) { /* means of a finished step are lost */
        char message[PLI_GPU_MESSAGE_BYTES];
        pli_text_print(message, sizeof message, "%s", pl_error_message());
        pl_comm_abort(self->super.base, message);
        if (self->report_loss != NULL)
            self->report_loss(self->context, message);
    } else if (pli_inflight_oldest(&self->inflight, &oldest) == PL_OK &&
               oldest.n == 0) {
        /* The watchdog would take an ended communicator for an aborted one. */
        end_watch(self);
        pli_nccl_finish(self->nccl, FLUSH_MS * PLI_MS);
    }
}

/* Frees all but the base. */
static void tear_down(pli_gpu_comm *self)
{
    end_watch(self);
    if (self->is_left)
        return; /* the helper thread may still write to all of it */
    pli_nccl_destroy(self->nccl);
    pli_inflight_fini(&self->inflight);
    self->backend->ops->event_destroy(self->backend, self->captured);
    self->backend->ops->event_destroy(self->backend, self->drained);
    release_all(self);
    pli_nccl_library_release(self->library);
    pli_backend_destroy(self->backend);
    (void)pthread_mutex_destroy(&self->lock);
    pli_free(self);
}

static void gpu_destroy(pl_comm *comm)
{
    pli_gpu_comm *self = gpu_comm_of(comm);
    pl_comm *base = comm->base;
    /* In a forked child the device and all threads belong to the parent. */
    if (self->owner_pid == getpid()) {
        end_well(self);
        tear_down(self);
    }
    pl_comm_destroy(base);
}

static const pl_comm_ops gpu_ops = {
    .name = "gpu",
    .issue = gpu_issue,
    .work = pli_base_work,
    .progress = gpu_progress,
    .check_peers = gpu_check_peers,
    .query = pli_base_query,
    .is_done = pli_base_is_done,
    .wait = gpu_wait,
    .abort = gpu_abort,
    .record_activity = gpu_record_activity,
    .set_failure_message = pli_base_set_failure_message,
    .forget = pli_base_forget,
    .leave = pli_base_leave,
    .destroy = gpu_destroy,
};

static const pli_device_ops gpu_device_ops = {
    .order = gpu_order,
    .outlive = gpu_outlive,
    .check_means = gpu_check_means,
    .renew = gpu_renew,
    .prepare = gpu_prepare,
};

static pl_status check_options(const pli_gpu_comm_options *options)
{
    pl_status st = PL_OK;
    const size_t room = pl_comm_arena_bytes(options->base);
    const size_t board_bytes = pli_gpu_board_bytes(pl_comm_world_size(options->base));
    if (options->host_bytes % PL_CACHE_LINE != 0 || room < board_bytes ||
        options->host_bytes > room - board_bytes)
        PL_FAIL(PL_EINVAL,
                "a GPU world has %zu bytes of host memory, and its base %zu: use whole "
                "cache lines, and give the base %zu more bytes",
                options->host_bytes, room, board_bytes);
done:
    return st;
}

/* Makes this rank's own objects, without the other ranks. */
static pl_status furnish(pli_gpu_comm *self, const pli_gpu_comm_options *options)
{
    pl_status st = PL_OK;
    if (self->library == NULL && self->super.world_size > 1)
        PL_FAIL(PL_EUNSUPPORTED, "a world of several GPUs needs NCCL");
    PL_TRY(pli_inflight_init(&self->inflight, self->backend, options->n_ops));
    PL_TRY(self->backend->ops->event_create(self->backend, &self->captured));
    PL_TRY(self->backend->ops->event_create(self->backend, &self->drained));
    PL_TRY(take_memory(self));
    if (options->watchdog != NULL)
        PL_TRY(pli_watchdog_join(options->watchdog, pli_gpu_comm_watch, self));
    self->watchdog = options->watchdog;
done:
    return st;
}

static pl_comm super_of(const pli_gpu_comm_options *options)
{
    return (pl_comm){.ops = &gpu_ops,
                     .device = &gpu_device_ops,
                     .base = options->base,
                     .arena = options->base->arena,
                     .rank = pl_comm_rank(options->base),
                     .world_size = pl_comm_world_size(options->base),
                     .arena_bytes = options->host_bytes + options->device_bytes,
                     .host_bytes = options->host_bytes,
                     .backend = options->backend,
                     .chunk_bytes = SIZE_MAX,
                     .is_group_comm = pli_comm_is_group_comm(options->base)};
}

static pl_status make(const pli_gpu_comm_options *options, pli_gpu_comm **out)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self, "a world of GPUs", &self));
    *self = (pli_gpu_comm){.super = super_of(options),
                           .backend = options->backend,
                           .side = pli_cuda_side_stream(options->backend),
                           .allocator = options->allocator,
                           .deadline_ns = options->deadline_ns,
                           .is_interrupted = options->is_interrupted,
                           .report_loss = options->report_loss,
                           .context = options->context,
                           .owner_pid = getpid()};
    self->library = self->super.world_size > 1 ? options->nccl : NULL;
    pli_cuda_backend_retain(self->backend);
    pli_nccl_library_retain(self->library);
    (void)pthread_mutex_init(&self->lock, NULL); /* cannot fail on Linux */
    *out = self;
done:
    return st;
}

/* Even a rank that could not allocate its world tells the others. */
static pl_status give_up(const pli_gpu_comm_options *options, pl_status st)
{
    pli_gpu_comm nothing = {.super = super_of(options)};
    return pli_gpu_comm_agree(&nothing, st);
}

pl_status pli_gpu_comm_create(const pli_gpu_comm_options *options, pl_comm **out)
{
    pl_status st = PL_OK;
    pli_gpu_comm *self = NULL;
    PL_TRY(check_options(options)); /* the same on every rank */
    st = make(options, &self);
    if (self == NULL)
        return give_up(options, st);
    PL_TRY(pli_gpu_comm_agree(self, furnish(self, options)));
    PL_TRY(meet(self));
    *out = &self->super;
    self = NULL;
done:
    if (self != NULL)
        tear_down(self);
    return st;
}
