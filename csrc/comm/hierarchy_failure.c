/* hierarchy_failure.c - the end of a world of hosts, and what is said of it. */
#include "hierarchy_state.h"

void pli_hierarchy_tell(hierarchy *self)
{
    if (self->links != NULL && atomic_exchange(&self->is_untold, 0))
        pli_links_end(self->links, self->message);
}

pl_status pli_hierarchy_check(hierarchy *self)
{
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == HIERARCHY_FAILED) {
        pli_hierarchy_tell(self);
        PL_FAIL(PL_EPEER,
                "rank %d: a step has failed (%s), and ranks on several hosts cannot "
                "leave it behind: wrap the model anew on every rank",
                self->super.rank, self->message);
    }
done:
    return st;
}

void pli_hierarchy_fail(hierarchy *self, const char *message)
{
    int running = HIERARCHY_RUNNING;
    if (!atomic_compare_exchange_strong(&self->phase, &running, HIERARCHY_FAILING))
        return;
    const int has_words = message != NULL || self->message[0] != '\0';
    if (message != NULL)
        pli_text_print(self->message, sizeof self->message, "%s", message);
    else if (!has_words)
        pli_text_print(self->message, sizeof self->message, "%s",
                       "an exception in its backward");
    atomic_store(&self->is_untold, 1);
    atomic_store(&self->phase, HIERARCHY_FAILED);
    if (has_words)
        pli_hierarchy_tell(self);
    pl_comm_abort(self->inner, message);
}

/* Words that come before a failure, or behind one that has none. */
void pli_hierarchy_set_failure_message(pl_comm *comm, const char *message)
{
    hierarchy *self = hierarchy_of(comm);
    pli_comm_set_failure_message(self->inner, message);
    if (atomic_load(&self->phase) == HIERARCHY_FAILED && !atomic_load(&self->is_untold))
        return;
    pli_text_print(self->message, sizeof self->message, "%s",
                   message != NULL ? pli_text_tail(message, sizeof self->message - 1)
                                   : "");
    if (message != NULL && atomic_load(&self->phase) == HIERARCHY_FAILED)
        pli_hierarchy_tell(self);
}
