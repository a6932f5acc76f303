/* hierarchy.c - a world of hosts: issuing, waiting, failure and lifetime.
 *
 * A thread that waits for other hosts reads their notices.  If the leader's own thread
 * sleeps in a call by the user, such as for a GPU that waits for a peer, another
 * thread's query reads them, and tells the other hosts what has failed here.
 *
 * A host that fails sends a notice with the number k of the last operation that all of
 * its ranks have finished: a rank may have taken a step that ended with it.  The notice
 * may overtake data.  So another host goes on until it has finished k, too, or the
 * least such k of several, and only then fails.  It can: the failed host has sent all
 * its data up to k, and received all of the others', which therefore have it, and send
 * it to one another before they fail.  What comes after k, no host needs.
 */
#include <unistd.h>

#include "core/alloc.h"
#include "hierarchy_state.h"

enum { INSIDE_MESSAGE_BYTES = 8192 };

/* ---- failing -------------------------------------------------------------------- */

/* PL_EPEER on a leader whose world has failed. */
static pl_status check_phase(hierarchy *self)
{
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == HIERARCHY_RUNNING)
        return PL_OK;
    pli_spin_lock(&self->message_lock);
    st = pli_fail(PL_EPEER, "rank %d: the step has failed (%s)", self->super.rank,
                  self->message);
    pli_spin_unlock(&self->message_lock);
    return st;
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

/* Fails this rank's world; NULL: the message follows, unless it has been set.  The call
 * that has failed tells the other hosts at its end.  An earlier failure stands. */
static void fail(hierarchy *self, failure_words whose, const char *message)
{
    if (self->links == NULL) {
        pl_comm_abort(self->super.base, message);
        return;
    }
    pli_spin_lock(&self->message_lock);
    const int is_first = atomic_load(&self->phase) == HIERARCHY_RUNNING;
    if (is_first) {
        const int is_silent = message == NULL && self->message[0] == '\0';
        if (is_silent)
            put_own_words(self, "an exception in its backward");
        else if (message != NULL && whose == OWN_WORDS)
            put_own_words(self, message);
        else if (message != NULL)
            pli_text_print(self->message, sizeof self->message, "%s", message);
        atomic_store(&self->phase, is_silent ? HIERARCHY_SILENT : HIERARCHY_FAILED);
    }
    pli_spin_unlock(&self->message_lock);
    if (is_first)
        pl_comm_abort(self->super.base, message);
}

pl_status pli_hierarchy_fail_as_inside(hierarchy *self, pl_status st)
{
    char message[INSIDE_MESSAGE_BYTES];
    if (self->links == NULL)
        return st;
    pli_text_print(message, sizeof message, "%s", pl_error_message());
    if (pli_base_query(&self->super, PLI_QUERY_GONE) != PL_OK)
        atomic_store(&self->has_lost, 1);
    fail(self, WHOLE_WORDS, message);
    return pli_fail(st, "%s", message);
}

void pli_hierarchy_fail_between(hierarchy *self)
{
    char message[INSIDE_MESSAGE_BYTES];
    pli_text_print(message, sizeof message, "%s", pl_error_message());
    fail(self, WHOLE_WORDS, message);
    /* Ranks of this host that failed by themselves see no other host. */
    if (pli_links_check_present(self->links, 1) != PL_OK)
        pli_base_leave(&self->super);
    (void)!pli_fail(PL_EPEER, "%s", message);
}

/* ---- what is finished ----------------------------------------------------------- */

/* Whether all ranks of this host have the result of an operation. */
static int is_finished(const hierarchy *self, uint64_t number)
{
    return number <= atomic_load(&self->n_done) ||
           (number <= self->n_down &&
            (is_alone_on_host(self) ||
             self->super.base->ops->is_done(self->super.base,
                                            operation_at(self, number)->whole)));
}

/* Tells the other hosts of a failure, once, but not before its message is set. */
static void tell_hosts(hierarchy *self)
{
    if (self->links == NULL || getpid() != self->owner_pid ||
        atomic_load(&self->phase) != HIERARCHY_FAILED)
        return;
    pli_spin_lock(&self->busy);
    uint64_t n_finished = self->n_down;
    while (!is_finished(self, n_finished))
        n_finished--;
    pli_spin_lock(&self->message_lock);
    if (atomic_exchange(&self->phase, HIERARCHY_TOLD) == HIERARCHY_FAILED)
        pli_links_send_failure(self->links, self->message, n_finished,
                               atomic_load(&self->has_lost));
    pli_spin_unlock(&self->message_lock);
    pli_spin_unlock(&self->busy);
}

/* No message has followed until now: the other hosts need wait no longer. */
static void end_silence(hierarchy *self)
{
    int silent = HIERARCHY_SILENT;
    (void)atomic_compare_exchange_strong(&self->phase, &silent, HIERARCHY_FAILED);
    tell_hosts(self);
}

/* How each call of the rank's own thread ends. */
static pl_status end_call(hierarchy *self, pl_status st)
{
    if (st != PL_OK)
        end_silence(self);
    return st;
}

static void hierarchy_abort(pl_comm *comm, const char *message)
{
    hierarchy *self = hierarchy_of(comm);
    fail(self, OWN_WORDS, message);
    tell_hosts(self);
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
    if (phase <= HIERARCHY_SILENT && message != NULL)
        put_own_words(self, message);
    else if (phase == HIERARCHY_RUNNING)
        self->message[0] = '\0';
    pli_spin_unlock(&self->message_lock);
    end_silence(self);
}

/* ---- progress ------------------------------------------------------------------- */

/* Advances the issued operations as far as possible, or fails if the world has; call it
 * with the lock held. */
static pl_status advance(hierarchy *self)
{
    const pl_status st = check_phase(self);
    return st == PL_OK ? pli_hierarchy_pass_on(self) : st;
}

/* Likewise, unless another thread is doing so or there is nothing to do. */
static pl_status advance_unless_busy(hierarchy *self)
{
    pl_status st = PL_OK;
    if (!pli_spin_try_lock(&self->busy))
        return PL_OK; /* another thread is doing so */
    if (self->n_down < self->n_issued)
        st = advance(self);
    pli_spin_unlock(&self->busy);
    return st;
}

/* Fails if another host has, once this one has finished what that one had: a rank there
 * may have taken the step that it ended. */
static pl_status follow_hosts(hierarchy *self)
{
    pl_status st = pli_links_check(self->links);
    if (st == PL_OK && is_finished(self, pli_links_least_finished(self->links)))
        st = pli_links_report_failure(self->links);
    if (st != PL_OK)
        pli_hierarchy_fail_between(self);
    return st;
}

/* On a leader: what `hierarchy_query` asks, about the other hosts. */
static pl_status query_hosts(hierarchy *self, pli_query what)
{
    pl_status st = PL_OK;
    pli_spin_lock(&self->busy);
    if (what == PLI_QUERY_STEP) {
        PL_TRY(advance(self));
        PL_TRY(follow_hosts(self));
        goto done;
    }
    st = pli_links_check_present(self->links,
                                 atomic_load(&self->phase) != HIERARCHY_RUNNING);
    if (st != PL_OK && what == PLI_QUERY_WORLD)
        pli_hierarchy_fail_between(self);
done:
    pli_spin_unlock(&self->busy);
    return st;
}

static pl_status hierarchy_query(pl_comm *comm, pli_query what)
{
    pl_status st = PL_OK;
    hierarchy *self = hierarchy_of(comm);
    if (what == PLI_QUERY_STEP) {
        PL_TRY(check_phase(self));
        /* The rank's own thread may sleep while others need its part to finish. */
        pli_base_work(&self->super);
    }
    st = pli_base_query(&self->super, what);
    if (st != PL_OK && what != PLI_QUERY_GONE)
        st = pli_hierarchy_fail_as_inside(self, st);
    PL_TRY(st);
    if (self->links != NULL)
        PL_TRY(query_hosts(self, what));
done:
    tell_hosts(self);
    return st;
}

static void hierarchy_work(pl_comm *comm)
{
    hierarchy *self = hierarchy_of(comm);
    pli_base_work(&self->super);
    (void)!advance_unless_busy(self); /* the next wait meets a failure */
    tell_hosts(self);
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
    return end_call(self, st);
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
    return end_call(self, st);
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
    return end_call(self, st);
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
    PL_TRY(follow_hosts(self));
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
                (unsigned long long)ticket, (unsigned long long)self->n_issued);
    if (ticket > self->n_whole)
        PL_FAIL(PL_EINVAL,
                "operation %llu: issue the operations that follow it before you wait",
                (unsigned long long)ticket);
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
    return end_call(self, st);
}

/* ---- the rest ------------------------------------------------------------------- */

static void hierarchy_leave(pl_comm *comm)
{
    hierarchy *self = hierarchy_of(comm);
    if (self->links != NULL) {
        /* For hosts that still wait for this one. */
        pli_spin_lock(&self->message_lock);
        if (atomic_load(&self->phase) == HIERARCHY_RUNNING && self->message[0] != '\0')
            atomic_store(&self->phase, HIERARCHY_FAILED);
        pli_spin_unlock(&self->message_lock);
        end_silence(self);
        pli_links_end(self->links);
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
    self->owner_pid = getpid();
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
