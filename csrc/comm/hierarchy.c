/* hierarchy.c - a world of hosts: issuing, waiting, failure, recovery and lifetime.
 *
 * A thread that waits for other hosts reads their notices.  If the leader's own thread
 * sleeps in a call by the user, such as for a GPU that waits for a peer, another
 * thread's query reads them, and tells the other hosts what has failed here.
 *
 * A leader whose host gives up a step completes the message that it has begun, then
 * sends a mark on every stream to every host: no more of this epoch will come.  A host
 * that needs more gives up the step too; one that does not has seen the step's end.
 * Each host discards what comes before the others' marks.  When all marks have come,
 * nothing of the step is left anywhere.
 *
 * A host may be interrupted after it sent its part of a step's last operation and
 * before it saw the step's end.  It cannot know whether other hosts will see the end.
 * Weights may then differ between hosts, so the world ends.
 */
#include "core/alloc.h"
#include "hierarchy_state.h"

enum { INSIDE_MESSAGE_BYTES = 8192, RECOVER_POLL_MS = 10 };

typedef enum failure_kind {
    STEP_FAILED, /* all hosts can leave it behind */
    WORLD_FAILED
} failure_kind;

/* ---- failing -------------------------------------------------------------------- */

/* Tells the other hosts of a failure, once. */
static void send_failure(hierarchy *self)
{
    if (self->links == NULL || !atomic_exchange(&self->is_unsent, 0))
        return;
    pli_spin_lock(&self->message_lock);
    if (atomic_load(&self->phase) == HIERARCHY_ENDED)
        pli_links_end(self->links, self->message);
    else
        pli_links_send_failure(self->links, self->message,
                               atomic_load(&self->given_up) == GIVEN_UP_ELSEWHERE);
    pli_spin_unlock(&self->message_lock);
}

/* PL_EPEER on a leader whose world has failed. */
static pl_status check_phase(hierarchy *self)
{
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == HIERARCHY_RUNNING)
        return PL_OK;
    pli_spin_lock(&self->message_lock);
    const int phase = atomic_load(&self->phase);
    if (phase == HIERARCHY_ENDED)
        st =
            pli_fail(PL_EPEER,
                     "rank %d: the world has failed (%s): wrap the model anew on every "
                     "rank",
                     self->super.rank, self->message);
    else if (phase == HIERARCHY_FAILED)
        st = pli_fail(PL_EPEER, "rank %d: the step has failed (%s)", self->super.rank,
                      self->message);
    pli_spin_unlock(&self->message_lock);
    return st;
}

static void fail_inside(hierarchy *self, failure_kind kind, const char *message)
{
    if (kind == STEP_FAILED)
        pl_comm_abort(self->super.base, message);
    else
        self->super.base->host->end(self->super.base, message);
}

/* Stores this rank's message, with its rank: other hosts know only the host. */
static void put_own_words(hierarchy *self, const char *message)
{
    enum { NAME_BYTES = 24 };
    const char *tail = pli_text_tail(message, sizeof self->message - NAME_BYTES);
    if (is_alone_on_host(self))
        pli_text_print(self->message, sizeof self->message, "%s", tail);
    else
        pli_text_print(self->message, sizeof self->message, "rank %d: %s",
                       self->super.rank, tail);
}

/* OWN_WORDS get this rank's number in front; WHOLE_WORDS are complete. */
typedef enum failure_words { OWN_WORDS, WHOLE_WORDS } failure_words;

/* Fails this rank's world, and tells all ranks of all hosts; NULL: the message follows.
 * An earlier failure stands. */
static void fail_with(hierarchy *self, failure_kind kind, failure_words whose,
                      const char *message)
{
    if (self->links == NULL) {
        fail_inside(self, kind, message);
        return;
    }
    pli_spin_lock(&self->message_lock);
    const int phase = atomic_load(&self->phase);
    if (phase == HIERARCHY_ENDED ||
        (phase == HIERARCHY_FAILED && kind == STEP_FAILED)) {
        pli_spin_unlock(&self->message_lock);
        return;
    }
    const int has_words = message != NULL || self->message[0] != '\0';
    if (!has_words)
        put_own_words(self, "an exception in its backward");
    else if (message != NULL && whose == OWN_WORDS)
        put_own_words(self, message);
    else if (message != NULL)
        pli_text_print(self->message, sizeof self->message, "%s", message);
    atomic_store(&self->is_unsent, 1);
    atomic_store(&self->phase,
                 kind == STEP_FAILED ? HIERARCHY_FAILED : HIERARCHY_ENDED);
    pli_spin_unlock(&self->message_lock);
    if (has_words)
        send_failure(self);
    fail_inside(self, kind, message);
}

static void fail(hierarchy *self, failure_kind kind, const char *message)
{
    fail_with(self, kind, WHOLE_WORDS, message);
}

/* ---- giving up ------------------------------------------------------------------ */

/* Whether any data of an operation has been sent to any host. */
static int is_begun(const hierarchy *self, uint64_t number)
{
    for (int h = 0; h < self->n_hosts; h++) {
        const message_flow *out = &self->peers[h].out[0];
        if (h != self->host &&
            (out->n_done >= number || (out->n_done == number - 1 && out->at > 0)))
            return 1;
    }
    return 0;
}

/* Whether all ranks of this host have the result of an operation. */
static int is_finished(const hierarchy *self, uint64_t number)
{
    if (number <= first_number_of(self->epoch))
        return 1; /* earlier epochs are finished */
    return number <= self->n_down &&
           (is_alone_on_host(self) ||
            self->super.base->ops->is_done(self->super.base,
                                           operation_at(self, number)->whole));
}

/* The last of the operations that follow one another. */
static uint64_t end_of_round(const hierarchy *self, uint64_t number)
{
    while (operation_at(self, number)->op.is_followed && number < self->n_issued)
        number++;
    return number;
}

/* Whether other hosts may see the end of a step that this one does not see. */
static int may_end_elsewhere(const hierarchy *self)
{
    const uint64_t first = first_number_of(self->epoch);
    for (uint64_t n = self->n_reduced; n > first && n + self->ring_ops > self->n_issued;
         n--)
        if (operation_at(self, n)->op.ends_step && is_begun(self, n))
            return !is_finished(self, end_of_round(self, n));
    return 0;
}

/* After a failure of the step here: sends each other host, after its data, the mark
 * that no more will come, as far as possible without waiting. */
static void give_up(hierarchy *self)
{
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) != HIERARCHY_FAILED)
        return;
    if (atomic_load(&self->given_up) == GIVEN_UP_NOWHERE && may_end_elsewhere(self)) {
        char message[HIERARCHY_MESSAGE_BYTES];
        pli_spin_lock(&self->message_lock);
        pli_text_print(message, sizeof message,
                       "a step failed on this host near its end, and may have finished "
                       "on others, so weights may differ: load them from a "
                       "checkpoint: %s",
                       self->message);
        pli_spin_unlock(&self->message_lock);
        fail(self, WORLD_FAILED, message);
        return;
    }
    send_failure(self);
    atomic_store(&self->given_up, GIVEN_UP_HERE);
    for (int h = 0; h < self->n_hosts && st == PL_OK; h++)
        if (h != self->host)
            st = pli_hierarchy_send_marks(self, h);
    if (st != PL_OK)
        fail(self, WORLD_FAILED, pl_error_message());
}

/* ---- other threads -------------------------------------------------------------- */

static void give_up_locking(hierarchy *self)
{
    pli_spin_lock(&self->busy);
    give_up(self);
    pli_spin_unlock(&self->busy);
}

/* For any thread: gives up, but not before the failure's message is sent. */
static void give_up_unless_words_follow(hierarchy *self)
{
    if (!atomic_load(&self->is_unsent))
        give_up_locking(self);
}

static void hierarchy_abort(pl_comm *comm, const char *message)
{
    hierarchy *self = hierarchy_of(comm);
    fail_with(self, STEP_FAILED, OWN_WORDS, message);
    give_up_unless_words_follow(self);
}

pl_status pli_hierarchy_fail_as_inside(hierarchy *self, pl_status st)
{
    char message[INSIDE_MESSAGE_BYTES];
    if (self->links == NULL)
        return st;
    pli_text_print(message, sizeof message, "%s", pl_error_message());
    const int is_final = pli_base_query(&self->super, PLI_QUERY_WORLD) != PL_OK;
    fail(self, is_final ? WORLD_FAILED : STEP_FAILED, message);
    return pli_fail(st, "%s", message);
}

void pli_hierarchy_fail_between(hierarchy *self)
{
    const int is_step = atomic_load(&self->given_up) != GIVEN_UP_NOWHERE;
    fail(self, is_step ? STEP_FAILED : WORLD_FAILED, pl_error_message());
}

/* PL_EPEER if another host has reported that it cannot go on. */
static pl_status check_hosts(hierarchy *self)
{
    const pl_status st = pli_links_check(self->links);
    if (st != PL_OK)
        fail(self, WORLD_FAILED, pl_error_message());
    return st;
}

/* Sets the message of a failure to come, or of one that has none yet. */
static void hierarchy_set_failure_message(pl_comm *comm, const char *message)
{
    hierarchy *self = hierarchy_of(comm);
    pli_base_set_failure_message(comm, message);
    if (self->links == NULL)
        return;
    pli_spin_lock(&self->message_lock);
    const int phase = atomic_load(&self->phase);
    const int may_change = phase == HIERARCHY_RUNNING || atomic_load(&self->is_unsent);
    if (may_change && message != NULL)
        put_own_words(self, message);
    else if (phase == HIERARCHY_RUNNING)
        self->message[0] = '\0';
    pli_spin_unlock(&self->message_lock);
    if (may_change && phase != HIERARCHY_RUNNING)
        give_up_locking(self);
}

/* ---- recovery ------------------------------------------------------------------- */

/* Does what can be done; *late is a host that this one waits for, or -1. */
static pl_status meet_hosts(hierarchy *self, pli_links_waited *waited, int *late)
{
    pl_status st = PL_OK;
    *late = -1;
    pli_links_poll_init(self->links, waited);
    for (int h = 0; h < self->n_hosts; h++) {
        const peer *other = &self->peers[h];
        for (int s = 0; h != self->host && s < HIERARCHY_N_STREAMS; s++) {
            const pli_link_stream link = (pli_link_stream)(PLI_LINK_DATA + s);
            PL_TRY(pli_hierarchy_skip_to_mark(self, h, link));
            const int events = (other->out[s].is_reset ? 0 : POLLOUT) |
                               (other->in[s].is_reset ? 0 : POLLIN);
            if (events != 0)
                pli_links_poll_add(self->links, waited, h, link, (short)events);
            *late = events != 0 ? h : *late;
        }
    }
    if (*late >= 0)
        PL_TRY(
            pli_hierarchy_check_silence(self, first_number_of(self->epoch + 1), *late));
done:
    return st;
}

static pl_status recover_between(hierarchy *self, int64_t slice_ns)
{
    pl_status st = PL_OK;
    const int64_t begin = pli_now_ns();
    int late = -1;
    do {
        pli_links_waited waited;
        pli_spin_lock(&self->busy);
        /* Report what ended this host's world rather than what others made of it. */
        if (atomic_load(&self->phase) != HIERARCHY_ENDED)
            st = check_hosts(self);
        give_up(self);
        if (st == PL_OK && atomic_load(&self->phase) == HIERARCHY_ENDED)
            st = check_phase(self);
        if (st == PL_OK) {
            st = meet_hosts(self, &waited, &late);
            if (st != PL_OK)
                fail(self, WORLD_FAILED, pl_error_message());
        }
        pli_spin_unlock(&self->busy);
        PL_TRY(st);
        if (late >= 0 && pli_now_ns() - begin > slice_ns)
            PL_FAIL(PL_EAGAIN, "not done yet");
        if (late >= 0) {
            pli_progress_others(self->progress, &self->super);
            pli_links_poll(&waited, RECOVER_POLL_MS * PLI_MS);
        }
    } while (late >= 0);
done:
    return st;
}

static void begin_epoch(hierarchy *self)
{
    pli_spin_lock(&self->busy);
    const uint64_t first = first_number_of(++self->epoch);
    self->n_issued = self->n_up = self->n_reduced = first;
    self->n_exchanged = self->n_added = self->n_down = self->n_whole = first;
    atomic_store(&self->n_done, first);
    self->last_inner = 0;
    atomic_store(&self->given_up, GIVEN_UP_NOWHERE);
    self->silence = (pli_stopwatch){0};
    for (int h = 0; h < self->n_hosts; h++)
        for (int s = 0; s < HIERARCHY_N_STREAMS; s++)
            self->peers[h].out[s] = self->peers[h].in[s] =
                (message_flow){.n_done = first};
    if (self->links != NULL) {
        int failed = HIERARCHY_FAILED;
        pli_spin_lock(&self->message_lock);
        self->message[0] = '\0';
        pli_links_begin_epoch(self->links, self->epoch);
        (void)atomic_compare_exchange_strong(&self->phase, &failed, HIERARCHY_RUNNING);
        pli_spin_unlock(&self->message_lock);
    }
    pli_spin_unlock(&self->busy);
}

/* Whether a leader has a step to leave behind.  If a rank of its host has failed, tells
 * the others. */
static int has_failed(hierarchy *self)
{
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == HIERARCHY_RUNNING)
        st = pl_comm_progress(self->super.base);
    if (st != PL_OK)
        st = pli_hierarchy_fail_as_inside(self, st);
    return st != PL_OK || atomic_load(&self->phase) != HIERARCHY_RUNNING;
}

static pl_status hierarchy_recover(pl_comm *comm, int64_t slice_ns, pl_recovery *out)
{
    pl_status st = PL_OK;
    hierarchy *self = hierarchy_of(comm);
    if (self->links != NULL && !has_failed(self)) {
        *out = PL_NOTHING_FAILED;
        goto done;
    }
    if (self->links != NULL)
        PL_TRY(recover_between(self, slice_ns));
    st = pl_comm_recover(self->super.base, slice_ns,
                         out); /* other ranks wait for their leader */
    if (st != PL_OK && st != PL_EAGAIN)
        st = pli_hierarchy_fail_as_inside(self, st);
    PL_TRY(st);
    if (self->links != NULL)
        *out = PL_RECOVERED;
    if (*out == PL_RECOVERED)
        begin_epoch(self);
done:
    return st;
}

/* ---- progress ------------------------------------------------------------------- */

/* Advances the issued operations as far as possible, or fails if the world has; call it
 * with the lock held. */
static pl_status advance(hierarchy *self)
{
    pl_status st = check_phase(self);
    if (st == PL_OK)
        st = pli_hierarchy_pass_on(self);
    give_up(self);
    return st;
}

/* Likewise, unless another thread is doing so or there is nothing to do. */
static pl_status advance_unless_busy(hierarchy *self)
{
    pl_status st = PL_OK;
    if (!pli_spin_try_lock(&self->busy))
        return PL_OK; /* another thread is doing so */
    if (self->n_down < self->n_issued || atomic_load(&self->given_up) == GIVEN_UP_HERE)
        st = advance(self);
    pli_spin_unlock(&self->busy);
    return st;
}

/* ---- notices of other hosts ----------------------------------------------------- */

/* Another host may have finished an operation before its step failed, while this host
 * has not.  What the other has sent decides: a mark follows its last message.
 * So the notice alone counts only when this host has finished all that it has issued;
 * before that, this receives what has come. */
static pl_status follow_hosts(hierarchy *self)
{
    const pl_status st = pli_links_check_step(self->links);
    if (st == PL_OK)
        return PL_OK;
    if (!is_finished(self, self->n_whole)) {
        pli_base_work(&self->super);
        return advance(self);
    }
    atomic_store(&self->given_up, GIVEN_UP_ELSEWHERE);
    fail(self, STEP_FAILED, pl_error_message());
    give_up(self);
    return st;
}

/* On a leader: what `hierarchy_query` asks, about the other hosts. */
static pl_status query_hosts(hierarchy *self, pli_query what)
{
    pl_status st = PL_OK;
    pli_spin_lock(&self->busy);
    if (what != PLI_QUERY_GONE)
        PL_TRY(check_hosts(self));
    if (what == PLI_QUERY_STEP) {
        PL_TRY(check_phase(self));
        PL_TRY(follow_hosts(self));
        goto done;
    }
    st = pli_links_check_present(self->links);
    if (st != PL_OK && what == PLI_QUERY_WORLD)
        fail(self, WORLD_FAILED, pl_error_message());
done:
    pli_spin_unlock(&self->busy);
    return st;
}

static pl_status hierarchy_query(pl_comm *comm, pli_query what)
{
    pl_status st = PL_OK;
    hierarchy *self = hierarchy_of(comm);
    if (atomic_load(&self->phase) == HIERARCHY_ENDED)
        PL_TRY(check_phase(self));
    st = pli_base_query(&self->super, what);
    if (self->links == NULL)
        return st;
    if (st != PL_OK && what != PLI_QUERY_GONE) {
        st = pli_hierarchy_fail_as_inside(self, st);
        give_up_unless_words_follow(self);
    }
    PL_TRY(st);
    PL_TRY(query_hosts(self, what));
done:
    return st;
}

static void hierarchy_work(pl_comm *comm)
{
    hierarchy *self = hierarchy_of(comm);
    pli_base_work(&self->super);
    (void)!advance_unless_busy(self); /* the next wait meets a failure */
}

static pl_status progress_inside(hierarchy *self)
{
    const pl_status st = pl_comm_progress(self->super.base);
    return st == PL_OK ? st : pli_hierarchy_fail_as_inside(self, st);
}

static pl_status hierarchy_progress(pl_comm *comm)
{
    pl_status st = PL_OK;
    hierarchy *self = hierarchy_of(comm);
    PL_TRY(check_phase(self));
    PL_TRY(progress_inside(self));
    PL_TRY(advance_unless_busy(self));
done:
    return st;
}

static pl_status hierarchy_check_peers(pl_comm *comm)
{
    pl_status st = PL_OK;
    hierarchy *self = hierarchy_of(comm);
    PL_TRY(check_phase(self));
    PL_TRY(advance_unless_busy(self));
    st = pli_comm_check_peers(self->super.base);
    if (st != PL_OK)
        PL_TRY(pli_hierarchy_fail_as_inside(self, st));
    if (self->links != NULL) {
        PL_TRY(query_hosts(self, PLI_QUERY_WORLD));
        PL_TRY(query_hosts(self, PLI_QUERY_STEP));
    }
done:
    return st;
}

/* ---- issuing -------------------------------------------------------------------- */

static pl_status check_op(const hierarchy *self, const pl_op *op)
{
    pl_status st = PL_OK;
    if (op->kind == PL_REDUCE)
        PL_FAIL(PL_EUNSUPPORTED, "a world of several hosts has no %s: use all-reduce",
                pli_op_kind_text(op->kind));
    if (op->kind == PL_ALL_REDUCE && self->sums->fn[op->dtype][op->reduction] == NULL)
        PL_FAIL(PL_EINVAL,
                "%s cannot be reduced that way: the mean takes floating point types, "
                "the maximum integers",
                pl_dtype_text(op->dtype));
    if (self->n_issued - atomic_load(&self->n_done) >= self->ring_ops)
        PL_FAIL(PL_ESTATE, "more than %zu operations in flight: wait for some",
                self->ring_ops);
done:
    return st;
}

static pl_status hierarchy_issue(pl_comm *comm, const pl_op *op, const pli_order *order,
                                 pl_ticket *out)
{
    pl_status st = PL_OK;
    hierarchy *self = hierarchy_of(comm);
    (void)order; /* host memory is ready when this is called */
    pli_spin_lock(&self->busy);
    PL_TRY(check_phase(self));
    PL_TRY(check_op(self, op));
    *operation_at(self, ++self->n_issued) = (operation){.op = *op};
    if (!op->is_followed)
        self->n_whole = self->n_issued;
    PL_TRY(advance(self));
    *out = self->n_issued;
done:
    pli_spin_unlock(&self->busy);
    return st;
}

/* ---- waiting -------------------------------------------------------------------- */

/* A leader waits for other hosts, or for its own host's ranks. */
static pl_status wait_as_leader(hierarchy *self)
{
    pl_status st = PL_OK;
    pl_ticket up = 0;
    int64_t most_ns = 0;
    pli_links_waited waited;
    pli_spin_lock(&self->busy);
    PL_TRY(advance(self));
    if (self->n_down == self->n_up)
        goto done;
    if (self->n_exchanged == self->n_reduced && self->n_reduced < self->n_up)
        up = operation_at(self, self->n_reduced + 1)->up;
    else
        most_ns = pli_hierarchy_list_waited(self, &waited);
    PL_TRY(progress_inside(self));
    PL_TRY(check_hosts(self));
    st = pli_hierarchy_check_deadline(self);
    if (st != PL_OK)
        pli_hierarchy_fail_between(self);
done:
    pli_spin_unlock(&self->busy);
    if (st == PL_OK && most_ns > 0) {
        pli_progress_others(self->progress, &self->super);
        pli_links_poll(&waited, most_ns);
    }
    if (st == PL_OK && up != 0) {
        st = pl_comm_wait(self->super.base, up, PLI_MS);
        if (st == PL_EAGAIN)
            st = PL_OK;
        else if (st != PL_OK)
            st = pli_hierarchy_fail_as_inside(self, st);
    }
    return st;
}

static pl_status wait_inside(hierarchy *self, pl_ticket ticket, int64_t slice_ns)
{
    pl_status st = PL_OK;
    if (!is_alone_on_host(self))
        st =
            pl_comm_wait(self->super.base, operation_at(self, ticket)->whole, slice_ns);
    return st == PL_OK || st == PL_EAGAIN ? st : pli_hierarchy_fail_as_inside(self, st);
}

static pl_status check_ticket(hierarchy *self, pl_ticket ticket)
{
    pl_status st = PL_OK;
    pli_spin_lock(&self->busy);
    if (ticket > self->n_issued)
        PL_FAIL(PL_EINVAL, "ticket %llu, but only %llu operations were issued",
                count_of(ticket), count_of(self->n_issued));
    if (ticket > self->n_whole)
        PL_FAIL(PL_EINVAL,
                "operation %llu: issue the operations that follow it before you wait",
                count_of(ticket));
done:
    pli_spin_unlock(&self->busy);
    return st;
}

/* On every rank: a host with an operation's result has every other host's part. */
static int hierarchy_is_done(pl_comm *comm, pl_ticket ticket)
{
    hierarchy *self = hierarchy_of(comm);
    if (ticket <= atomic_load(&self->n_done))
        return 1;
    pli_spin_lock(&self->busy);
    const int is_done = is_finished(self, ticket);
    pli_spin_unlock(&self->busy);
    return is_done;
}

static int has_gone_down(hierarchy *self, pl_ticket ticket)
{
    pli_spin_lock(&self->busy);
    const int has = self->n_down >= ticket;
    if (has)
        self->silence = (pli_stopwatch){0};
    pli_spin_unlock(&self->busy);
    return has;
}

static pl_status wait_for(hierarchy *self, pl_ticket ticket, int64_t slice_ns)
{
    pl_status st = PL_OK;
    const int64_t begin = pli_now_ns();
    PL_TRY(check_phase(self));
    if (ticket <= atomic_load(&self->n_done))
        goto done;
    while (self->links != NULL && !has_gone_down(self, ticket)) {
        PL_TRY(wait_as_leader(self));
        if (pli_now_ns() - begin > slice_ns && !has_gone_down(self, ticket))
            PL_FAIL(PL_EAGAIN, "not done yet");
    }
    PL_TRY(wait_inside(self, ticket, slice_ns));
done:
    return st;
}

static pl_status hierarchy_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    pl_status st = PL_OK;
    hierarchy *self = hierarchy_of(comm);
    PL_TRY(check_ticket(self, ticket));
    st = wait_for(self, ticket, slice_ns);
    /* The rank that failed may have seen the awaited end before. */
    if (st != PL_OK && st != PL_EAGAIN && hierarchy_is_done(comm, ticket))
        st = PL_OK;
    if (st == PL_OK)
        atomic_store(&self->n_done, ticket);
done:
    return st;
}

/* ---- the rest ------------------------------------------------------------------- */

static void hierarchy_leave(pl_comm *comm)
{
    hierarchy *self = hierarchy_of(comm);
    send_failure(self);
    if (self->links != NULL) {
        /* For hosts that still wait for data from this one. */
        pli_spin_lock(&self->message_lock);
        if (atomic_load(&self->phase) == HIERARCHY_RUNNING && self->message[0] != '\0')
            pli_links_send_failure(self->links, self->message, 0);
        pli_spin_unlock(&self->message_lock);
        pli_links_end(self->links, NULL);
    }
    pli_base_leave(comm);
}

static void hierarchy_forget(pl_comm *comm)
{
    hierarchy *self = hierarchy_of(comm);
    if (self->links != NULL)
        pli_links_forget(self->links);
}

static void hierarchy_destroy(pl_comm *comm)
{
    hierarchy *self = hierarchy_of(comm);
    pli_progress_leave(self->progress, comm);
    pli_links_destroy(self->links);
    pl_comm_destroy(self->super.base);
    for (int h = 0; h < self->n_hosts; h++)
        pli_free(self->peers[h].staging);
    pli_free(self->peers);
    pli_free(self->ring);
    pli_free(self);
}

static const pl_comm_ops hierarchy_ops = {
    .name = "hierarchy",
    .issue = hierarchy_issue,
    .work = hierarchy_work,
    .progress = hierarchy_progress,
    .check_peers = hierarchy_check_peers,
    .query = hierarchy_query,
    .is_done = hierarchy_is_done,
    .wait = hierarchy_wait,
    .recover = hierarchy_recover,
    .abort = hierarchy_abort,
    .record_activity = pli_base_record_activity,
    .set_failure_message = hierarchy_set_failure_message,
    .forget = hierarchy_forget,
    .leave = hierarchy_leave,
    .destroy = hierarchy_destroy,
};

int pli_hierarchy_host_of(const pl_comm *comm, int rank)
{
    const hierarchy *self = (const hierarchy *)(const void *)comm;
    return comm->ops == &hierarchy_ops ? host_of_rank(self, rank) : 0;
}

size_t pli_hierarchy_inner_ops(size_t n_ops)
{
    return 2 * n_ops;
}

static pl_status read_hosts(const pli_hierarchy_options *options, hierarchy *self)
{
    pl_status st = PL_OK;
    int first = 0;
    self->host = -1;
    self->is_even = 1;
    for (int h = 0; h < options->n_hosts; h++) {
        const int n = options->n_ranks[h];
        self->peers[h].first_rank = first;
        self->peers[h].n_ranks = n;
        self->is_even &= n == options->n_ranks[0];
        if (options->rank >= first && options->rank < first + n)
            self->host = h;
        if (n < 1 || n > PL_MAX_RANKS)
            PL_FAIL(PL_EINVAL, "host %d has %d ranks: a host has 1 to %d", h, n,
                    PL_MAX_RANKS);
        first += n;
    }
    if (first != options->world_size || self->host < 0)
        PL_FAIL(PL_EINVAL, "rank %d of %d ranks, but the hosts have %d", options->rank,
                options->world_size, first);
    const peer *here = &self->peers[self->host];
    if (pl_comm_world_size(options->inner) != here->n_ranks ||
        pl_comm_rank(options->inner) != options->rank - here->first_rank)
        PL_FAIL(PL_EINVAL, "rank %d is rank %d of the %d on its host", options->rank,
                pl_comm_rank(options->inner), pl_comm_world_size(options->inner));
    if ((options->links != NULL) != (pl_comm_rank(options->inner) == 0))
        PL_FAIL(PL_EINVAL,
                "the first rank of a host needs links; the others take none");
done:
    return st;
}

pl_status pli_hierarchy_create(const pli_hierarchy_options *options, pl_comm **out)
{
    pl_status st = PL_OK;
    hierarchy *self = NULL;
    const size_t n_hosts = (size_t)(options->n_hosts > 0 ? options->n_hosts : 0);
    if (options->n_hosts < 2 || options->n_hosts > PLI_MAX_HOSTS)
        PL_FAIL(PL_EINVAL, "%d hosts: give 2 to %d", options->n_hosts, PLI_MAX_HOSTS);
    PL_TRY(pli_calloc(1, sizeof *self, "a world of hosts", &self));
    PL_TRY(pli_calloc(n_hosts, sizeof *self->peers, "hosts", &self->peers));
    PL_TRY(pli_calloc(options->n_ops + 1, sizeof *self->ring, "operations in flight",
                      &self->ring));
    self->n_hosts = options->n_hosts;
    PL_TRY(read_hosts(options, self));
    PL_TRY(pli_cpu_sums(&self->sums));
    const size_t arena_bytes = pl_comm_arena_bytes(options->inner);
    self->super = (pl_comm){.ops = &hierarchy_ops,
                            .base = options->inner, /* before others can find this */
                            .arena = options->inner->arena,
                            .rank = options->rank,
                            .world_size = options->world_size,
                            .arena_bytes = arena_bytes,
                            .host_bytes = arena_bytes,
                            .chunk_bytes = PLI_SHM_CHUNK_BYTES};
    self->ring_ops = options->n_ops + 1;
    self->deadline_ns = options->deadline_ns;
    atomic_flag_clear(&self->busy);
    atomic_flag_clear(&self->message_lock);
    self->links = options->links;
    PL_TRY(pli_progress_join(options->progress, &self->super));
    self->progress = options->progress;
    *out = &self->super;
    self = NULL;
done:
    if (self != NULL) {
        pli_free(self->peers);
        pli_free(self->ring);
        pli_free(self);
    }
    return st;
}
