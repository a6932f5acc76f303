/* hierarchy_recover.c - hosts leave a failed step behind, together.
 *
 * A leader whose host gives a step up ends the message that it has begun, and sends a
 * mark behind it, on every stream to every host: no more of this epoch will come.  Who
 * needs more gives the step up too; who does not has seen its end, as had the other.
 * Each throws away what comes before the others' marks, and when all marks have come
 * nothing of the step is left anywhere.
 *
 * A host that is interrupted when it has sent its part of a step's last operation, and
 * has not seen its end, cannot know whether others will: weights may then differ from
 * host to host, so the world ends.
 */
#include "hierarchy_state.h"

enum { RECOVER_POLL_MS = 10 };

/* ---- giving up ------------------------------------------------------------------ */

/* Whether anything of an operation has been sent to anybody. */
static int is_begun(const hierarchy *self, uint64_t number)
{
    for (int h = 0; h < self->n_hosts; h++) {
        const stream *out = &self->peers[h].out[0];
        if (h != self->host &&
            (out->n_done >= number || (out->n_done == number - 1 && out->at > 0)))
            return 1;
    }
    return 0;
}

int pli_hierarchy_is_finished(const hierarchy *self, uint64_t number)
{
    if (number <= first_number_of(self->epoch))
        return 1; /* nothing of an earlier epoch is left */
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

/* Whether other hosts may see the end of a step of which this one does not. */
static int may_end_elsewhere(const hierarchy *self)
{
    const uint64_t first = first_number_of(self->epoch);
    for (uint64_t n = self->n_reduced; n > first && n + self->ring_ops > self->n_issued;
         n--)
        if (operation_at(self, n)->op.ends_step && is_begun(self, n))
            return !pli_hierarchy_is_finished(self, end_of_round(self, n));
    return 0;
}

static pl_status send_mark(hierarchy *self, int host, pli_link_stream link)
{
    pl_status st = PL_OK;
    stream *flow = &self->peers[host].out[link - PLI_LINK_DATA];
    const uint64_t mark = first_number_of(self->epoch + 1);
    while (!flow->is_reset) {
        if (flow->at == 0)
            flow->head = (head){.number = mark};
        PL_TRY(pli_hierarchy_send(self, host, link));
        if (!is_whole(flow))
            goto done;
        flow->is_reset = flow->head.number == mark;
        flow->at = 0;
    }
done:
    return st;
}

static pl_status send_marks(hierarchy *self, int host)
{
    pl_status st = PL_OK;
    /* The notice first: whoever meets the mark is to hear why. */
    if (!pli_links_has_sent_failure(self->links, host))
        goto done;
    PL_TRY(send_mark(self, host, PLI_LINK_DATA));
    PL_TRY(send_mark(self, host, PLI_LINK_BACK));
done:
    return st;
}

void pli_hierarchy_give_up(hierarchy *self)
{
    pl_status st = PL_OK;
    if (pli_hierarchy_phase(self) != HIERARCHY_FAILED)
        return;
    if (!self->is_given_up && !self->has_met_mark && may_end_elsewhere(self)) {
        char message[HIERARCHY_MESSAGE_BYTES];
        const int phase = pli_hierarchy_take_message(self);
        pli_text_print(message, sizeof message,
                       "a step failed on this host as it came to its end, and may have "
                       "ended on others, so weights may differ: load them from a "
                       "checkpoint: %s",
                       self->message);
        pli_hierarchy_return_message(self, phase);
        pli_hierarchy_fail(self, WORLD_FAILED, message);
        return;
    }
    self->is_given_up = 1;
    pli_hierarchy_send_failure(self);
    for (int h = 0; h < self->n_hosts && st == PL_OK; h++)
        if (h != self->host)
            st = send_marks(self, h);
    if (st != PL_OK)
        pli_hierarchy_fail(self, WORLD_FAILED, pl_error_message());
}

/* ---- going on ------------------------------------------------------------------- */

/* A host may be ahead by what it can have in flight, and sends no more at once than an
 * arena has: anything else is not to be waited for. */
static pl_status check_skipped(const hierarchy *self, int host, const stream *flow)
{
    pl_status st = PL_OK;
    const int is_mark = flow->head.number == first_number_of(self->epoch + 1);
    const int is_operation = flow->head.number > flow->n_done &&
                             flow->head.number <= self->n_issued + self->ring_ops;
    if ((!is_mark && !is_operation) || flow->head.n_bytes > self->super.arena_bytes)
        PL_FAIL(PL_EMISMATCH,
                "rank %d: %s sent what no rank sends (operation %llu, %llu bytes): the "
                "connection carries other data, or another version of paceline's",
                self->super.rank, pli_links_name(self->links, host),
                count_of(flow->head.number), (unsigned long long)flow->head.n_bytes);
done:
    return st;
}

static pl_status skip_to_mark(hierarchy *self, int host, pli_link_stream link)
{
    pl_status st = PL_OK;
    char skipped[1 << 14] = {0};
    stream *flow = &self->peers[host].in[link - PLI_LINK_DATA];
    while (!flow->is_reset) {
        const int is_head = flow->at < sizeof flow->head;
        const size_t n_left =
            (is_head ? sizeof flow->head : sizeof flow->head + flow->head.n_bytes) -
            flow->at;
        const struct iovec piece = {
            .iov_base = is_head ? (char *)&flow->head + flow->at : skipped,
            .iov_len = n_left < sizeof skipped ? n_left : sizeof skipped};
        size_t n = 0;
        PL_TRY(pli_links_receive(self->links, host, link, &piece, 1, &n));
        if (n == 0)
            goto done;
        self->last_sign_ns = 0;
        flow->at += n;
        if (flow->at == sizeof flow->head)
            PL_TRY(check_skipped(self, host, flow));
        if (flow->at < sizeof flow->head || !is_whole(flow))
            continue;
        flow->is_reset = flow->head.number == first_number_of(self->epoch + 1);
        flow->n_done = flow->is_reset ? flow->n_done : flow->head.number;
        flow->at = 0;
    }
done:
    return st;
}

/* Does what can be done; *late: a host that is waited for, or -1. */
static pl_status meet_hosts(hierarchy *self, pli_links_waited *waited, int *late)
{
    pl_status st = PL_OK;
    *late = -1;
    pli_links_poll_init(self->links, waited);
    for (int h = 0; h < self->n_hosts; h++) {
        const peer *other = &self->peers[h];
        for (int s = 0; h != self->host && s < HIERARCHY_N_STREAMS; s++) {
            const pli_link_stream link = (pli_link_stream)(PLI_LINK_DATA + s);
            PL_TRY(skip_to_mark(self, h, link));
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
        hierarchy_lock(self);
        /* What has ended this host's world comes before what others made of it. */
        if (pli_hierarchy_phase(self) != HIERARCHY_ENDED)
            st = pli_hierarchy_check_hosts(self);
        pli_hierarchy_give_up(self);
        if (st == PL_OK && pli_hierarchy_phase(self) == HIERARCHY_ENDED)
            st = pli_hierarchy_check(self);
        if (st == PL_OK) {
            st = meet_hosts(self, &waited, &late);
            if (st != PL_OK)
                pli_hierarchy_fail(self, WORLD_FAILED, pl_error_message());
        }
        hierarchy_unlock(self);
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
    hierarchy_lock(self);
    const uint64_t first = first_number_of(++self->epoch);
    self->n_issued = self->n_up = self->n_reduced = first;
    self->n_exchanged = self->n_down = self->n_whole = first;
    atomic_store(&self->n_done, first);
    self->last_inner = 0;
    self->is_added_up = self->has_met_mark = self->is_given_up = 0;
    self->last_sign_ns = 0;
    for (int h = 0; h < self->n_hosts; h++)
        for (int s = 0; s < HIERARCHY_N_STREAMS; s++)
            self->peers[h].out[s] = self->peers[h].in[s] = (stream){.n_done = first};
    if (self->links != NULL) {
        const int phase = pli_hierarchy_take_message(self);
        self->message[0] = '\0';
        pli_links_begin_epoch(self->links, self->epoch);
        pli_hierarchy_return_message(self, phase == HIERARCHY_FAILED ? HIERARCHY_RUNNING
                                                                     : phase);
    }
    hierarchy_unlock(self);
}

/* Whether a leader has anything to leave behind; where a rank of its host has failed,
 * the others are told. */
static int has_failed(hierarchy *self)
{
    pl_status st = PL_OK;
    if (pli_hierarchy_phase(self) == HIERARCHY_RUNNING)
        st = pl_comm_progress(self->super.base);
    if (st != PL_OK)
        st = pli_hierarchy_fail_as_inside(self, st);
    return st != PL_OK || pli_hierarchy_phase(self) != HIERARCHY_RUNNING;
}

pl_status pli_hierarchy_recover(pl_comm *comm, int64_t slice_ns, pl_recovery *out)
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
                         out); /* the others wait for a leader */
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
