/* hierarchy_failure.c - how a leader reports failures, and how it gives up a step.
 *
 * A leader whose host gives up a step completes the message that it has begun, then
 * sends a mark on every stream to every host: no more of this epoch will come.  A host
 * that needs more gives up the step too; one that does not has seen the step's end.
 *
 * A host may be interrupted after it sent its part of a step's last operation and
 * before it saw the step's end.  It cannot know whether other hosts will see the end.
 * Weights may then differ between hosts, so the world ends.
 */
#include "hierarchy_state.h"

enum { INSIDE_MESSAGE_BYTES = 8192 };

/* ---- failing -------------------------------------------------------------------- */

void pli_hierarchy_send_failure(hierarchy *self)
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

pl_status pli_hierarchy_check(hierarchy *self)
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

static void fail(hierarchy *self, failure_kind kind, failure_words whose,
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
        pli_hierarchy_send_failure(self);
    fail_inside(self, kind, message);
}

void pli_hierarchy_fail(hierarchy *self, failure_kind kind, const char *message)
{
    fail(self, kind, WHOLE_WORDS, message);
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

int pli_hierarchy_is_finished(const hierarchy *self, uint64_t number)
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
            return !pli_hierarchy_is_finished(self, end_of_round(self, n));
    return 0;
}

static pl_status send_mark(hierarchy *self, int host, pli_link_stream link)
{
    pl_status st = PL_OK;
    message_flow *flow = &self->peers[host].out[link - PLI_LINK_DATA];
    const uint64_t mark = first_number_of(self->epoch + 1);
    while (!flow->is_reset) {
        if (flow->at == 0)
            flow->head = pli_hierarchy_head(mark, 0, 0);
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
    /* Send the notice first: a host that meets the mark needs the reason. */
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
        pli_hierarchy_fail(self, WORLD_FAILED, message);
        return;
    }
    pli_hierarchy_send_failure(self);
    atomic_store(&self->given_up, GIVEN_UP_HERE);
    for (int h = 0; h < self->n_hosts && st == PL_OK; h++)
        if (h != self->host)
            st = send_marks(self, h);
    if (st != PL_OK)
        pli_hierarchy_fail(self, WORLD_FAILED, pl_error_message());
}

/* ---- other threads -------------------------------------------------------------- */

static void give_up_locking(hierarchy *self)
{
    pli_spin_lock(&self->busy);
    pli_hierarchy_give_up(self);
    pli_spin_unlock(&self->busy);
}

void pli_hierarchy_give_up_unless_words_follow(hierarchy *self)
{
    if (!atomic_load(&self->is_unsent))
        give_up_locking(self);
}

void pli_hierarchy_abort(pl_comm *comm, const char *message)
{
    hierarchy *self = hierarchy_of(comm);
    fail(self, STEP_FAILED, OWN_WORDS, message);
    pli_hierarchy_give_up_unless_words_follow(self);
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
    const int is_step = atomic_load(&self->given_up) != GIVEN_UP_NOWHERE;
    pli_hierarchy_fail(self, is_step ? STEP_FAILED : WORLD_FAILED, pl_error_message());
}

pl_status pli_hierarchy_check_hosts(hierarchy *self)
{
    const pl_status st = pli_links_check(self->links);
    if (st != PL_OK)
        pli_hierarchy_fail(self, WORLD_FAILED, pl_error_message());
    return st;
}

/* Sets the message of a failure to come, or of one that has none yet. */
void pli_hierarchy_set_failure_message(pl_comm *comm, const char *message)
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
