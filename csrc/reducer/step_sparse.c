/* step_sparse.c - gradients of parameters that are declared sparse.
 *
 * A parameter *declared* sparse has no place in the buckets.  Its gradient is counted
 * when it comes and stays where it is.  At the end of the step, the rows that any rank
 * has are averaged over all ranks (sparse_exchange.h).  If any rank's gradient is
 * dense, the mean is dense on every rank.
 */
#include "core/alloc.h"
#include "step_state.h"

/* One parameter's part. */
typedef struct sparse_part {
    size_t slot;
    pl_grad *local; /* this rank's rows, or NULL without a gradient */
    pl_grad *mean;
    pl_move values; /* of the mean */
} sparse_part;

typedef struct sparse_step {
    pl_step *step;
    size_t n_parts;
    sparse_part *parts;
    pl_table *tables;
    pl_sparse_rows *rows;
    pl_exchange *exchange;
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

static pl_status read_part(sparse_step *self, size_t t, size_t slot)
{
    pl_status st = PL_OK;
    pl_step *step = self->step;
    pl_sparse_rows *rows = &self->rows[t];
    self->parts[t].slot = slot;
    self->tables[t] = table_of(step->slots[slot].layout);
    *rows = (pl_sparse_rows){.indices = pl_no_indices()};
    if (step->role !=
        PL_ACTIVE) /* the gradient is that of an earlier step: ignore it */
        goto done;
    PL_TRY(step->grads->read_rows(step->context, slot, &self->tables[t], rows,
                                  &self->parts[t].local));
done:
    return st;
}

static pl_status begin(sparse_step *self)
{
    pl_status st = PL_OK;
    pl_step *step = self->step;
    const size_t n = self->n_parts;
    size_t t = 0;
    PL_TRY(pli_calloc(n, sizeof *self->parts, "rows", &self->parts));
    PL_TRY(pli_calloc(n, sizeof *self->tables, "rows", &self->tables));
    PL_TRY(pli_calloc(n, sizeof *self->rows, "rows", &self->rows));
    for (size_t i = 0; i < step->n_slots; i++)
        if (is_used_sparse(step, i))
            PL_TRY(read_part(self, t++, i));
    const pl_exchange_spec spec = {
        .comm = step->comm,
        .offset_bytes = step->reducer->at.staging,
        .staging_bytes = PLI_EXCHANGE_BYTES,
        .tables = self->tables,
        .rows = self->rows,
        .n_tables = n,
    };
    PL_TRY(pl_exchange_create(&spec, &self->exchange));
done:
    return st;
}

/* Makes the tensor that receives a mean. */
static pl_status make_room(sparse_step *self, size_t t)
{
    pl_status st = PL_OK;
    pl_step *step = self->step;
    const pl_sparse_rows all = pl_exchange_union(self->exchange, t);
    sparse_part *part = &self->parts[t];
    pl_sparse_rows room;
    PL_TRY(step->grads->make_rows(step->context, part->slot, &self->tables[t], &all,
                                  &room, &part->mean));
    part->values = (pl_move){.to = room.values,
                             .dtype = self->tables[t].dtype,
                             .n_elems = room.n_rows * self->tables[t].row_elems};
    pl_exchange_set_room(self->exchange, t, room.values);
done:
    return st;
}

static pl_status find_slice(void *exchange, int64_t slice_ns)
{
    return pl_exchange_find(exchange, slice_ns);
}

static pl_status mean_slice(void *exchange, int64_t slice_ns)
{
    return pl_exchange_mean(exchange, slice_ns);
}

static pl_status run(sparse_step *self)
{
    pl_status st = PL_OK;
    pl_step *step = self->step;
    PL_TRY(begin(self));
    PL_TRY(pli_step_wait(step, find_slice, self->exchange));
    for (size_t t = 0; t < self->n_parts; t++)
        PL_TRY(make_room(self, t));
    PL_TRY(pli_step_wait(step, mean_slice, self->exchange));
    for (size_t t = 0; t < self->n_parts; t++) {
        sparse_part *part = &self->parts[t];
        if (is_to_rescale(step))
            PL_TRY(pl_reducer_rescale_mean(step->reducer, &part->values));
        if (binds_results(step))
            replace_grad(step, &step->slots[part->slot].target,
                         hold_grad(step, part->mean));
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
    for (size_t t = 0; sparse.parts != NULL && t < sparse.n_parts; t++) {
        drop_grad(self, sparse.parts[t].local);
        drop_grad(self, sparse.parts[t].mean);
    }
    pl_exchange_destroy(sparse.exchange);
    pli_free(sparse.parts);
    pli_free(sparse.tables);
    pli_free(sparse.rows);
    return st;
}
