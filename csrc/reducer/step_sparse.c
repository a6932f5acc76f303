/* step_sparse.c - gradients of parameters that are declared sparse.
 *
 * A parameter *declared* sparse has no place in the buckets.  Its gradient is counted
 * when it comes and stays where it is.  At the end of the step, the rows that any rank
 * has are averaged over all ranks (sparse_exchange.h).  If any rank's gradient is
 * dense, the mean is dense on every rank.
 */
#include "core/alloc.h"
#include "step_state.h"

/* What owns the memory of a parameter's part. */
typedef struct part_owners {
    size_t slot;
    pl_grad *local; /* NULL without a gradient */
    pl_grad *mean;
} part_owners;

typedef struct sparse_step {
    pl_step *step;
    size_t n_parts;
    pl_exchange_part *parts;
    part_owners *owners;
    int64_t *indices; /* of the unions */
    void *lock;       /* while other threads may use the caller */
} sparse_step;

/* Whether slot i is declared sparse, and some rank used it in this step. */
static int is_used_sparse(const pl_step *self, size_t i)
{
    return self->slots[i].policy == POLICY_SPARSE &&
           pl_reducer_is_used(self->reducer, i);
}

static size_t count_parts(const pl_step *self)
{
    size_t n_parts = 0;
    for (size_t i = 0; i < self->n_slots; i++)
        n_parts += is_used_sparse(self, i) != 0;
    return n_parts;
}

static pl_table table_of(const pli_layout *layout)
{
    pl_table table = {
        .n_rows = (size_t)layout->dims[0].size, .row_elems = 1, .dtype = layout->dtype};
    for (int d = 1; d < layout->n_dims; d++)
        table.row_elems *= (size_t)layout->dims[d].size;
    return table;
}

static pl_status read_part(sparse_step *self, size_t k, size_t slot)
{
    const pl_step *step = self->step;
    pl_exchange_part *part = &self->parts[k];
    part->table = table_of(step->slots[slot].layout);
    part->local = (pl_sparse_rows){.indices = pl_no_indices()};
    self->owners[k].slot = slot;
    if (step->role != PL_ACTIVE)
        return PL_OK; /* the gradient is that of an earlier step: ignore it */
    return step->grads->read_rows(step->context, slot, &part->table, &part->local,
                                  &self->owners[k].local);
}

static pl_status read_parts(sparse_step *self)
{
    pl_status st = PL_OK;
    const size_t n = self->n_parts;
    size_t n_read = 0;
    PL_TRY(pli_calloc(n, sizeof *self->owners, "rows", &self->owners));
    PL_TRY(pli_calloc(n, sizeof *self->parts, "rows", &self->parts));
    for (size_t i = 0; i < self->step->n_slots; i++)
        if (is_used_sparse(self->step, i))
            PL_TRY(read_part(self, n_read++, i));
done:
    return st;
}

/* Makes the tensor that receives a mean. */
static pl_status make_room(sparse_step *self, size_t k)
{
    pl_status st = PL_OK;
    const pl_step *step = self->step;
    pl_exchange_part *part = &self->parts[k];
    pl_sparse_rows room;
    PL_TRY(step->grads->make_rows(step->context, self->owners[k].slot, &part->table,
                                  &part->all, &room, &self->owners[k].mean));
    part->all.values = room.values;
done:
    return st;
}

/* Waits without the lock, which it takes only to handle signals. */
static pl_status wait_for(void *context, pl_ticket ticket)
{
    sparse_step *self = context;
    const pl_step *step = self->step;
    for (;;) {
        pl_status st = pl_comm_wait(step->comm, ticket, PLI_SLICE_NS);
        if (st != PL_EAGAIN)
            return st;
        step->host->take_back(self->lock);
        st = step->host->check_signals(step->context);
        self->lock = step->host->let_go(step->context);
        if (st != PL_OK)
            return st;
    }
}

static pl_status exchange_rows(sparse_step *self)
{
    const pl_step *step = self->step;
    const pl_exchange exchange = {.comm = step->comm,
                                  .offset_bytes = step->reducer->at.staging,
                                  .staging_bytes = PLI_EXCHANGE_BYTES,
                                  .parts = self->parts,
                                  .n_parts = self->n_parts,
                                  .wait = wait_for,
                                  .context = self};
    self->lock = step->host->let_go(step->context);
    pl_status st = pl_exchange_find(&exchange, &self->indices);
    step->host->take_back(self->lock);
    for (size_t k = 0; st == PL_OK && k < self->n_parts; k++)
        st = make_room(self, k);
    if (st != PL_OK)
        return st;
    self->lock = step->host->let_go(step->context);
    st = pl_exchange_mean(&exchange);
    step->host->take_back(self->lock);
    return st;
}

static pl_status run(sparse_step *self)
{
    pl_status st = PL_OK;
    pl_step *step = self->step;
    PL_TRY(read_parts(self));
    PL_TRY(exchange_rows(self));
    for (size_t k = 0; k < self->n_parts; k++) {
        const pl_exchange_part *part = &self->parts[k];
        const pl_move mean = {.to = part->all.values,
                              .dtype = part->table.dtype,
                              .n_elems = part->all.n_rows * part->table.row_elems};
        if (is_to_rescale(step))
            PL_TRY(pl_reducer_rescale_mean(step->reducer, &mean));
        if (binds_results(step))
            replace_grad(step, &step->slots[self->owners[k].slot].target,
                         hold_grad(step, self->owners[k].mean));
    }
done:
    return st;
}

/* The hook averages them in place of the exchange. */
static pl_status finish_by_hook(pl_step *self, size_t n)
{
    pl_status st = PL_OK;
    size_t *params = NULL;
    size_t n_found = 0;
    PL_TRY(pli_calloc(n, sizeof *params, "sparse parameters", &params));
    for (size_t i = 0; i < self->n_slots; i++)
        if (is_used_sparse(self, i))
            params[n_found++] = i;
    PL_TRY(self->hook->finish_sparse(self->context, params, n_found,
                                     self->role == PL_ACTIVE, binds_results(self)));
    for (size_t k = 0; k < n_found; k++)
        self->unseen[params[k]] = 0;
done:
    pli_free(params);
    return st;
}

pl_status pli_sparse_finish(pl_step *self)
{
    sparse_step sparse = {.step = self, .n_parts = count_parts(self)};
    if (sparse.n_parts == 0)
        return PL_OK;
    if (self->hook != NULL)
        return finish_by_hook(self, sparse.n_parts);
    const pl_status st = run(&sparse);
    for (size_t k = 0; sparse.owners != NULL && k < sparse.n_parts; k++) {
        drop_grad(self, sparse.owners[k].local);
        drop_grad(self, sparse.owners[k].mean);
    }
    pli_free(sparse.owners);
    pli_free(sparse.parts);
    pli_free(sparse.indices);
    return st;
}
