/* hierarchy_recover.c - hosts leave a failed step behind, together.
 *
 * Each host discards what comes before the others' marks (hierarchy_failure.c).  When
 * all marks have come, nothing of the step is left anywhere.
 */
#include "hierarchy_state.h"

enum { RECOVER_POLL_MS = 10 };

/* A host may be ahead by its operations in flight, and sends at most an arena at once.
 * Fail on anything else instead of waiting for it. */
static pl_status check_skipped(const hierarchy *self, int host,
                               const message_flow *flow)
{
    pl_status st = PL_OK;
    PL_TRY(pli_hierarchy_check_head_crc(self, host, flow));
    const int is_mark = flow->head.number == first_number_of(self->epoch + 1);
    const int is_operation = flow->head.number > flow->n_done &&
                             flow->head.number <= self->n_issued + self->ring_ops;
    if ((!is_mark && !is_operation) || flow->head.n_bytes > self->super.arena_bytes)
        PL_FAIL(PL_EMISMATCH,
                "rank %d: %s sent an invalid message (operation %llu, %llu bytes): the "
                "connection carries other data, or that of another version of paceline",
                self->super.rank, pli_links_name(self->links, host),
                count_of(flow->head.number), (unsigned long long)flow->head.n_bytes);
done:
    return st;
}

static pl_status skip_to_mark(hierarchy *self, int host, pli_link_stream link)
{
    pl_status st = PL_OK;
    char skipped[1 << 14] = {0};
    message_flow *flow = &self->peers[host].in[link - PLI_LINK_DATA];
    while (!flow->is_reset) {
        const int is_head = flow->at < sizeof flow->head;
        const size_t n_left =
            (is_head ? sizeof flow->head : message_bytes(flow)) - flow->at;
        const struct iovec piece = {
            .iov_base = is_head ? (char *)&flow->head + flow->at : skipped,
            .iov_len = n_left < sizeof skipped ? n_left : sizeof skipped};
        size_t n = 0;
        PL_TRY(pli_links_receive(self->links, host, link, &piece, 1, &n));
        if (n == 0)
            goto done;
        self->silence = (pli_stopwatch){0};
        flow->at += n;
        if (flow->at == sizeof flow->head)
            PL_TRY(check_skipped(self, host, flow));
        if (flow->at < sizeof flow->head || !is_whole(flow))
            continue;
        flow->is_reset = flow->head.number == first_number_of(self->epoch + 1);
        flow->n_done = flow->is_reset ? flow->n_done : flow->head.number;
        flow->at = flow->n_summed = 0;
    }
done:
    return st;
}

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
        pli_spin_lock(&self->busy);
        /* Report what ended this host's world rather than what others made of it. */
        if (atomic_load(&self->phase) != HIERARCHY_ENDED)
            st = pli_hierarchy_check_hosts(self);
        pli_hierarchy_give_up(self);
        if (st == PL_OK && atomic_load(&self->phase) == HIERARCHY_ENDED)
            st = pli_hierarchy_check(self);
        if (st == PL_OK) {
            st = meet_hosts(self, &waited, &late);
            if (st != PL_OK)
                pli_hierarchy_fail(self, WORLD_FAILED, pl_error_message());
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
