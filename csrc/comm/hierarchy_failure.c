/* hierarchy_failure.c - what a leader knows of failures, and says of them. */
#include "hierarchy_state.h"

enum { INSIDE_MESSAGE_BYTES = 8192 };

void pli_hierarchy_tell(hierarchy *self)
{
    if (self->links == NULL || !atomic_exchange(&self->is_untold, 0))
        return;
    if (atomic_load(&self->phase) == HIERARCHY_ENDED)
        pli_links_end(self->links, self->message);
    else
        pli_links_tell(self->links, self->message, self->has_met_mark);
}

pl_status pli_hierarchy_check(hierarchy *self)
{
    pl_status st = PL_OK;
    const int phase = atomic_load(&self->phase);
    if (phase == HIERARCHY_RUNNING)
        goto done;
    pli_hierarchy_tell(self);
    if (phase == HIERARCHY_ENDED)
        PL_FAIL(PL_EPEER,
                "rank %d: the world has failed (%s): wrap the model anew on every rank",
                self->super.rank, self->message);
    PL_FAIL(PL_EPEER, "rank %d: the step has failed (%s)", self->super.rank,
            self->message);
done:
    return st;
}

/* Whether a failure of that kind is news; the caller then writes its words. */
static int begin_failure(hierarchy *self, failure_kind kind)
{
    for (;;) {
        int phase = atomic_load(&self->phase);
        if (phase == HIERARCHY_ENDED ||
            (phase == HIERARCHY_FAILED && kind == STEP_FAILED))
            return 0;
        if (phase != HIERARCHY_FAILING &&
            atomic_compare_exchange_strong(&self->phase, &phase, HIERARCHY_FAILING))
            return 1;
        pli_cpu_relax();
    }
}

static void fail_inside(hierarchy *self, failure_kind kind, const char *message)
{
    if (kind == STEP_FAILED)
        pl_comm_abort(self->inner, message);
    else
        self->inner->ops->end(self->inner, message);
}

void pli_hierarchy_fail(hierarchy *self, failure_kind kind, const char *message)
{
    if (self->links == NULL) {
        fail_inside(self, kind, message);
        return;
    }
    if (!begin_failure(self, kind))
        return;
    const int has_words = message != NULL || self->message[0] != '\0';
    if (message != NULL)
        pli_text_print(self->message, sizeof self->message, "%s", message);
    else if (!has_words)
        pli_text_print(self->message, sizeof self->message, "%s",
                       "an exception in its backward");
    atomic_store(&self->is_untold, 1);
    atomic_store(&self->phase,
                 kind == STEP_FAILED ? HIERARCHY_FAILED : HIERARCHY_ENDED);
    if (has_words)
        pli_hierarchy_tell(self);
    fail_inside(self, kind, message);
}

pl_status pli_hierarchy_fail_as_inside(hierarchy *self, pl_status st)
{
    char message[INSIDE_MESSAGE_BYTES];
    if (self->links == NULL)
        return st;
    pli_text_print(message, sizeof message, "%s", pl_error_message());
    const int is_final = pli_comm_query(self->inner, PLI_QUERY_WORLD) != PL_OK;
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

/* Words that come before a failure, or behind one that has none. */
void pli_hierarchy_set_failure_message(pl_comm *comm, const char *message)
{
    hierarchy *self = hierarchy_of(comm);
    const int is_running = atomic_load(&self->phase) == HIERARCHY_RUNNING;
    pli_comm_set_failure_message(self->inner, message);
    if (self->links == NULL || (!is_running && !atomic_load(&self->is_untold)))
        return;
    pli_text_print(self->message, sizeof self->message, "%s",
                   message != NULL ? pli_text_tail(message, sizeof self->message - 1)
                                   : "");
    if (message != NULL && !is_running)
        pli_hierarchy_give_up_locking(self);
}
