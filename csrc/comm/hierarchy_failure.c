/* hierarchy_failure.c - what a leader knows of failures, and says of them.
 *
 * Other hosts are heard by whoever waits for them.  Where the leader's own thread is
 * asleep in a call of the user's, for a GPU that waits for a peer, another thread's
 * query hears them, and tells them what has failed here.
 */
#include "hierarchy_state.h"

enum { INSIDE_MESSAGE_BYTES = 8192 };

/* ---- the message ---------------------------------------------------------------- */

int pli_hierarchy_phase(const hierarchy *self)
{
    int phase;
    while ((phase = atomic_load(&self->phase)) == HIERARCHY_HELD)
        pli_cpu_relax();
    return phase;
}

int pli_hierarchy_take_message(hierarchy *self)
{
    int phase;
    do {
        phase = pli_hierarchy_phase(self);
    } while (!atomic_compare_exchange_strong(&self->phase, &phase, HIERARCHY_HELD));
    return phase;
}

void pli_hierarchy_return_message(hierarchy *self, int phase)
{
    atomic_store(&self->phase, phase);
}

void pli_hierarchy_send_failure(hierarchy *self)
{
    if (self->links == NULL || !atomic_exchange(&self->is_unsent, 0))
        return;
    const int phase = pli_hierarchy_take_message(self);
    if (phase == HIERARCHY_ENDED)
        pli_links_end(self->links, self->message);
    else
        pli_links_send_failure(self->links, self->message, self->has_met_mark);
    pli_hierarchy_return_message(self, phase);
}

/* ---- failing -------------------------------------------------------------------- */

pl_status pli_hierarchy_check(hierarchy *self)
{
    pl_status st = PL_OK;
    if (pli_hierarchy_phase(self) == HIERARCHY_RUNNING)
        return PL_OK;
    const int phase = pli_hierarchy_take_message(self);
    if (phase == HIERARCHY_ENDED)
        st =
            pli_fail(PL_EPEER,
                     "rank %d: the world has failed (%s): wrap the model anew on every "
                     "rank",
                     self->super.rank, self->message);
    else if (phase == HIERARCHY_FAILED)
        st = pli_fail(PL_EPEER, "rank %d: the step has failed (%s)", self->super.rank,
                      self->message);
    pli_hierarchy_return_message(self, phase);
    return st;
}

static void fail_inside(hierarchy *self, failure_kind kind, const char *message)
{
    if (kind == STEP_FAILED)
        pl_comm_abort(self->super.base, message);
    else
        self->super.base->host->end(self->super.base, message);
}

/* What this rank has to say itself: other hosts know by which host alone it is said. */
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

/* Whose words these are: a rank's own, or what it was told or has found out. */
typedef enum failure_words { OWN_WORDS, WHOLE_WORDS } failure_words;

static void fail(hierarchy *self, failure_kind kind, failure_words whose,
                 const char *message)
{
    if (self->links == NULL) {
        fail_inside(self, kind, message);
        return;
    }
    const int phase = pli_hierarchy_take_message(self);
    const int is_news = phase == HIERARCHY_RUNNING ||
                        (phase == HIERARCHY_FAILED && kind == WORLD_FAILED);
    if (!is_news) {
        pli_hierarchy_return_message(self, phase);
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
    pli_hierarchy_return_message(self, kind == STEP_FAILED ? HIERARCHY_FAILED
                                                           : HIERARCHY_ENDED);
    if (has_words)
        pli_hierarchy_send_failure(self);
    fail_inside(self, kind, message);
}

void pli_hierarchy_fail(hierarchy *self, failure_kind kind, const char *message)
{
    fail(self, kind, WHOLE_WORDS, message);
}

static void give_up_locking(hierarchy *self)
{
    hierarchy_lock(self);
    pli_hierarchy_give_up(self);
    hierarchy_unlock(self);
}

static void give_up_unless_words_follow(hierarchy *self)
{
    if (!atomic_load(&self->is_unsent))
        give_up_locking(self);
}

void pli_hierarchy_abort(pl_comm *comm, const char *message)
{
    hierarchy *self = hierarchy_of(comm);
    fail(self, STEP_FAILED, OWN_WORDS, message);
    give_up_unless_words_follow(self);
}

pl_status pli_hierarchy_fail_as_inside(hierarchy *self, pl_status st)
{
    char message[INSIDE_MESSAGE_BYTES];
    if (self->links == NULL)
        return st;
    pli_text_print(message, sizeof message, "%s", pl_error_message());
    const int is_final = pli_base_query(&self->super, PLI_QUERY_WORLD) != PL_OK;
    pli_hierarchy_fail(self, is_final ? WORLD_FAILED : STEP_FAILED, message);
    return pli_fail(st, "%s", message);
}

void pli_hierarchy_fail_between(hierarchy *self)
{
    pli_hierarchy_fail(self, self->has_met_mark ? STEP_FAILED : WORLD_FAILED,
                       pl_error_message());
}

pl_status pli_hierarchy_check_hosts(hierarchy *self)
{
    const pl_status st = pli_links_check(self->links);
    if (st != PL_OK)
        pli_hierarchy_fail(self, WORLD_FAILED, pl_error_message());
    return st;
}

/* Another host may have finished an operation before its step failed, and this host may
 * still be at it.  What the other has sent decides: a mark follows its last message
 * (hierarchy_recover.c).  So the notice alone counts only when this host has finished
 * all that it has issued; before that, this takes in what has come. */
static pl_status follow_hosts(hierarchy *self)
{
    const pl_status st = pli_links_check_step(self->links);
    if (st == PL_OK)
        return PL_OK;
    if (!pli_hierarchy_is_finished(self, self->n_whole)) {
        pli_base_work(&self->super);
        return pli_hierarchy_advance(self);
    }
    self->has_met_mark = 1; /* or will */
    pli_hierarchy_fail(self, STEP_FAILED, pl_error_message());
    pli_hierarchy_give_up(self);
    return st;
}

static pl_status query_hosts_locked(hierarchy *self, pli_query what)
{
    pl_status st = PL_OK;
    if (what != PLI_QUERY_GONE)
        PL_TRY(pli_hierarchy_check_hosts(self));
    if (what == PLI_QUERY_STEP) {
        PL_TRY(pli_hierarchy_check(self));
        PL_TRY(follow_hosts(self));
        goto done;
    }
    st = pli_links_check_present(self->links);
    if (st != PL_OK && what == PLI_QUERY_WORLD)
        pli_hierarchy_fail(self, WORLD_FAILED, pl_error_message());
done:
    return st;
}

pl_status pli_hierarchy_query_hosts(hierarchy *self, pli_query what)
{
    hierarchy_lock(self);
    const pl_status st = query_hosts_locked(self, what);
    hierarchy_unlock(self);
    return st;
}

pl_status pli_hierarchy_query(pl_comm *comm, pli_query what)
{
    pl_status st = PL_OK;
    hierarchy *self = hierarchy_of(comm);
    if (pli_hierarchy_phase(self) == HIERARCHY_ENDED)
        PL_TRY(pli_hierarchy_check(self));
    st = pli_base_query(&self->super, what);
    if (self->links == NULL)
        return st;
    if (st != PL_OK && what != PLI_QUERY_GONE) {
        st = pli_hierarchy_fail_as_inside(self, st);
        give_up_unless_words_follow(self);
    }
    PL_TRY(st);
    PL_TRY(pli_hierarchy_query_hosts(self, what));
done:
    return st;
}

/* Words that come before a failure, or behind one that has none. */
void pli_hierarchy_set_failure_message(pl_comm *comm, const char *message)
{
    hierarchy *self = hierarchy_of(comm);
    pli_base_set_failure_message(comm, message);
    if (self->links == NULL)
        return;
    const int phase = pli_hierarchy_take_message(self);
    const int may_change = phase == HIERARCHY_RUNNING || atomic_load(&self->is_unsent);
    if (may_change && message != NULL)
        put_own_words(self, message);
    else if (phase == HIERARCHY_RUNNING)
        self->message[0] = '\0';
    pli_hierarchy_return_message(self, phase);
    if (may_change && phase != HIERARCHY_RUNNING)
        give_up_locking(self);
}
