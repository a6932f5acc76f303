/* hierarchy_progress.c - moves operations up, between hosts, and down, in order; reads
 * what other hosts report meanwhile.
 *
 * A thread that waits for other hosts reads their notices.  If the leader's own thread
 * sleeps in a call by the user, such as for a GPU that waits for a peer, another
 * thread's query reads them, and tells the other hosts what has failed here.
 */
#include "hierarchy_state.h"

/* ---- inside the host ------------------------------------------------------------ */

/* The part of `op` that the host's own world does first; 0 if it does none. */
static int op_up(const hierarchy *self, const pl_op *op, pl_op *out)
{
    const peer *here = &self->peers[self->host];
    *out = *op;
    switch (op->kind) {
    case PL_ALL_REDUCE:
        out->kind = PL_REDUCE;
        out->root = 0;
        return 1;
    case PL_BROADCAST:
        out->root = op->root - here->first_rank;
        return host_of_rank(self, op->root) == self->host;
    case PL_ALL_GATHER: {
        const size_t block = op->n_elems / (size_t)self->super.world_size;
        out->offset_bytes +=
            (size_t)here->first_rank * block * pl_dtype_bytes(op->dtype);
        out->n_elems = (size_t)here->n_ranks * block;
        return 1;
    }
    case PL_BARRIER:
        return 1;
    case PL_REDUCE:
    case PL_N_OP_KINDS:
        break;
    }
    return 0;
}

/* ... and the part that it does last. */
static int op_down(const hierarchy *self, const pl_op *op, pl_op *out)
{
    *out = *op;
    out->root = 0;
    if (op->kind == PL_BARRIER)
        return 1;
    out->kind = PL_BROADCAST;
    return op->kind != PL_BROADCAST || host_of_rank(self, op->root) != self->host;
}

static pl_status issue_inside(hierarchy *self, const pl_op *op)
{
    const pl_status st = pl_comm_issue(self->super.base, op, &self->last_inner);
    return st == PL_OK ? st : pli_hierarchy_fail_as_inside(self, st);
}

static pl_status go_up(hierarchy *self, operation *entry)
{
    pl_status st = PL_OK;
    pl_op op;
    entry->up = 0;
    if (!is_alone_on_host(self) && op_up(self, &entry->op, &op)) {
        PL_TRY(issue_inside(self, &op));
        entry->up = self->last_inner;
    }
    self->n_up++;
done:
    return st;
}

static pl_status go_down(hierarchy *self, operation *entry)
{
    pl_status st = PL_OK;
    pl_op op;
    if (!is_alone_on_host(self) && op_down(self, &entry->op, &op))
        PL_TRY(issue_inside(self, &op));
    entry->whole = self->last_inner;
    self->n_down++;
done:
    return st;
}

/* ---- progress ------------------------------------------------------------------- */

static pl_status exchange(hierarchy *self)
{
    const pl_status st = pli_hierarchy_exchange(self);
    if (st != PL_OK)
        pli_hierarchy_fail_between(self);
    return st;
}

/* Passes operations to the host's own world in its order: of operations that follow one
 * another, all go up before the first goes down. */
static pl_status advance(hierarchy *self)
{
    pl_status st = PL_OK;
    uint64_t before;
    do {
        before = self->n_up + self->n_down;
        while (self->n_up < self->n_issued &&
               (is_alone_on_host(self) || self->n_down == self->n_up ||
                operation_at(self, self->n_up)->op.is_followed))
            PL_TRY(go_up(self, operation_at(self, self->n_up + 1)));
        if (self->links != NULL)
            PL_TRY(exchange(self));
        while (self->n_down < self->n_up &&
               (is_alone_on_host(self) || self->n_down < self->n_whole) &&
               (self->links == NULL || self->n_down < self->n_exchanged))
            PL_TRY(go_down(self, operation_at(self, self->n_down + 1)));
    } while (self->n_up + self->n_down != before);
done:
    return st;
}

pl_status pli_hierarchy_advance(hierarchy *self)
{
    pl_status st = pli_hierarchy_check(self);
    if (st == PL_OK)
        st = advance(self);
    pli_hierarchy_give_up(self);
    return st;
}

pl_status pli_hierarchy_advance_unless_busy(hierarchy *self)
{
    pl_status st = PL_OK;
    if (!pli_spin_try_lock(&self->busy))
        return PL_OK; /* another thread is doing so */
    if (self->n_down < self->n_issued || atomic_load(&self->given_up) == GIVEN_UP_HERE)
        st = pli_hierarchy_advance(self);
    pli_spin_unlock(&self->busy);
    return st;
}

/* ---- notices of other hosts ---------------------------------------------------- */

/* Another host may have finished an operation before its step failed, while this host
 * has not.  What the other has sent decides: a mark follows its last message
 * (hierarchy_failure.c).  So the notice alone counts only when this host has finished
 * all that it has issued; before that, this receives what has come. */
static pl_status follow_hosts(hierarchy *self)
{
    const pl_status st = pli_links_check_step(self->links);
    if (st == PL_OK)
        return PL_OK;
    if (!pli_hierarchy_is_finished(self, self->n_whole)) {
        pli_base_work(&self->super);
        return pli_hierarchy_advance(self);
    }
    atomic_store(&self->given_up, GIVEN_UP_ELSEWHERE);
    pli_hierarchy_fail(self, STEP_FAILED, pl_error_message());
    pli_hierarchy_give_up(self);
    return st;
}

pl_status pli_hierarchy_query_hosts(hierarchy *self, pli_query what)
{
    pl_status st = PL_OK;
    pli_spin_lock(&self->busy);
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
    pli_spin_unlock(&self->busy);
    return st;
}

pl_status pli_hierarchy_query(pl_comm *comm, pli_query what)
{
    pl_status st = PL_OK;
    hierarchy *self = hierarchy_of(comm);
    if (atomic_load(&self->phase) == HIERARCHY_ENDED)
        PL_TRY(pli_hierarchy_check(self));
    st = pli_base_query(&self->super, what);
    if (self->links == NULL)
        return st;
    if (st != PL_OK && what != PLI_QUERY_GONE) {
        st = pli_hierarchy_fail_as_inside(self, st);
        pli_hierarchy_give_up_unless_words_follow(self);
    }
    PL_TRY(st);
    PL_TRY(pli_hierarchy_query_hosts(self, what));
done:
    return st;
}
