/* reducer_finish.c - the end of a step: the rest posted, the late amended, the next
 * step's plan learned; and the end of a step that failed. */
#include <string.h>

#include "alloc.h"
#include "reducer.h"
#include "reducer_state.h"

pl_status pl_reducer_settle(pl_reducer *self, size_t param, const void *data,
                            pl_delivery delivery, pl_use use)
{
    pl_status st = PL_OK;
    const size_t b = self->plan->slots[param].bucket;
    pl_verdict verdict;
    if (self->phase != REDUCER_FILLING || self->buckets[b].phase == PL_BUCKET_POSTED)
        PL_FAIL(PL_ESTATE, "parameter %zu is settled when its bucket is gone", param);
    if (reducer_defers(&self->moves)) {
        PL_TRY(reducer_note(self, param, data, delivery, self->stream, &verdict));
    } else if (delivery != PL_IN_PLACE) {
        const pl_move move = slot_move(self, param, data);
        PL_TRY(self->backend->ops->copy(self->backend, &move, 1, self->stream));
    }
    if (use == PL_USED)
        used_of(self)[param] = USED_DENSE;
done:
    return st;
}

void pl_reducer_note_sparse(pl_reducer *self, size_t param, unsigned n_dims)
{
    if (used_of(self)[param] != USED_BY_NONE)
        used_of(self)[param] = (unsigned char)n_dims;
}

static pl_status issue_bytes(pl_reducer *self, pl_op_kind kind, size_t offset_bytes,
                             size_t n_bytes, pl_event *ready)
{
    const pli_order order = {.ready = ready};
    const pl_op op = {.kind = kind,
                      .reduction = kind == PL_BROADCAST ? PL_SUM : PL_MAX,
                      .dtype = PL_U8,
                      .root = self->root,
                      .offset_bytes = offset_bytes,
                      .n_elems = n_bytes};
    return pli_comm_issue_ordered(self->comm, &op, &order, &self->last_ticket);
}

/* What the device carries comes before what the host's words do: when these are all
 * there, every rank has enqueued its part of the step. */
static pl_status issue_extra(pl_reducer *self)
{
    pl_status st = PL_OK;
    pl_event *ready = NULL;
    if (self->spec.extra_bytes == 0)
        goto done;
    PL_TRY(reducer_record_aside(self, self->stream, &ready));
    PL_TRY(
        issue_bytes(self, PL_BROADCAST, self->extra_at, self->spec.extra_bytes, ready));
done:
    return st;
}

/* The parameters by their latest fire, then those that did not fire: the root's view of
 * this becomes every rank's plan. */
static pl_status write_order(pl_reducer *self)
{
    pl_status st = PL_OK;
    const size_t n = self->spec.n_params;
    uint32_t *order = (uint32_t *)(void *)(self->arena + self->order_at);
    uint32_t *param_of_fire = NULL;
    size_t n_written = 0;
    PL_TRY(pli_calloc(self->n_fires, sizeof *param_of_fire, "order", &param_of_fire));
    for (size_t i = 0; i < n; i++)
        if (self->slots[i].n_fires > 0)
            param_of_fire[self->slots[i].fired_at] = (uint32_t)i + 1;
    for (size_t f = 0; f < self->n_fires; f++)
        if (param_of_fire[f] != 0)
            order[n_written++] = param_of_fire[f] - 1;
    for (size_t i = n; i-- > 0;)
        if (self->slots[i].n_fires == 0)
            order[n_written++] = (uint32_t)i;
done:
    pli_free(param_of_fire);
    return st;
}

static pl_status close_step(pl_reducer *self)
{
    pl_status st = PL_OK;
    for (size_t b = self->n_posted; b < self->plan->n_buckets; b++)
        if (self->buckets[b].phase == PL_BUCKET_FILLING)
            PL_TRY(pl_bucket_move(&self->buckets[b].phase, PL_BUCKET_READY, b));
    PL_TRY(reducer_post_ready(self, self->stream));
    self->moves.n_stale = 0;
    PL_TRY(issue_extra(self));
    PL_TRY(issue_bytes(self, PL_ALL_REDUCE, 0, n_flag_bytes(self), NULL));
    if (self->learning == LEARNING_NOTHING) {
        PL_TRY(write_order(self));
        PL_TRY(issue_bytes(self, PL_BROADCAST, self->order_at,
                           self->spec.n_params * sizeof(uint32_t), NULL));
    }
done:
    return st;
}

static pl_status close_amendments(pl_reducer *self)
{
    pl_status st = PL_OK;
    pli_order order = {.ready = NULL};
    PL_TRY(reducer_record_aside(self, self->stream, &order.ready));
    for (size_t i = 0; i < self->spec.n_params; i++) {
        if (!pl_reducer_is_late(self, i))
            continue;
        const pl_op op = {.kind = PL_ALL_REDUCE,
                          .reduction = PL_MEAN,
                          .dtype = self->params[i].dtype,
                          .offset_bytes = pl_reducer_slot_offset(self, i),
                          .n_elems = self->params[i].n_elems};
        PL_TRY(pli_comm_issue_ordered(self->comm, &op, &order, &self->last_ticket));
    }
    if (self->comm->backend != NULL) { /* see issue_extra() */
        const pl_op barrier = {.kind = PL_BARRIER};
        PL_TRY(pl_comm_issue(self->comm, &barrier, &self->last_ticket));
    }
done:
    return st;
}

pl_status pl_reducer_close(pl_reducer *self)
{
    pl_status st = PL_OK;
    if (self->phase == REDUCER_FILLING) {
        PL_TRY(close_step(self));
        self->phase = REDUCER_WAITING;
    } else if (self->phase == REDUCER_AMENDING) {
        PL_TRY(close_amendments(self));
        self->phase = REDUCER_WAITING_AGAIN;
    } else {
        PL_FAIL(PL_ESTATE, "a step is closed that is not open");
    }
    self->is_ordered = 0;
    pli_comm_note(self->comm, reducer_is_active_rank(self) ? PL_FINISHING : PL_JOINED,
                  self->step);
done:
    return st;
}

/* The stream comes behind all that was issued. */
static pl_status order(pl_reducer *self)
{
    pl_status st = PL_OK;
    if (self->is_ordered)
        goto done;
    PL_TRY(pli_comm_order(self->comm, self->stream));
    self->is_ordered = 1;
done:
    return st;
}

pl_status pl_reducer_order(pl_reducer *self)
{
    pl_status st = PL_OK;
    if (self->phase != REDUCER_REDUCED)
        PL_FAIL(PL_ESTATE, "a stream is ordered behind means that are not in place");
    PL_TRY(order(self));
done:
    return st;
}

/* ---- amendments ------------------------------------------------------------------ */

static void free_backup(pl_reducer *self, backup *it)
{
    if (it->memory != NULL && reducer_defers(&self->moves))
        self->backend->ops->free(self->backend, it->memory);
    else
        pli_free(it->memory);
    *it = (backup){.memory = NULL};
}

void reducer_drop_backups(pl_reducer *self)
{
    for (size_t i = 0; self->backups != NULL && i < self->spec.n_params; i++)
        free_backup(self, &self->backups[i]);
}

/* Copies a mean to where an amendment does not reach it. */
static pl_status put_aside(pl_reducer *self, size_t param)
{
    pl_status st = PL_OK;
    backup *it = &self->backups[param];
    const size_t n_bytes =
        self->params[param].n_elems * pl_dtype_bytes(self->params[param].dtype);
    if (it->memory == NULL && reducer_defers(&self->moves))
        PL_TRY(self->backend->ops->alloc(self->backend, n_bytes, &it->memory));
    else if (it->memory == NULL)
        PL_TRY(pli_calloc(n_bytes, 1, "an amended mean", &it->memory));
    pl_move move = slot_move(self, param, NULL);
    move.from = move.to;
    move.to = it->memory;
    PL_TRY(self->backend->ops->copy(self->backend, &move, 1, self->stream));
    it->is_taken = 1;
done:
    return st;
}

/* Adds each amended mean to the one put aside for it. */
static pl_status merge_backups(pl_reducer *self)
{
    pl_status st = PL_OK;
    PL_TRY(order(self));
    for (size_t i = 0; i < self->spec.n_params; i++) {
        backup *it = &self->backups[i];
        if (!it->is_taken)
            continue;
        const pl_move move = slot_move(self, i, it->memory);
        PL_TRY(self->backend->ops->add(self->backend, &move, 1, self->stream));
        it->is_taken = 0;
        if (!reducer_defers(&self->moves))
            free_backup(self, it);
    }
done:
    return st;
}

pl_status pl_reducer_wait(pl_reducer *self, int64_t slice_ns)
{
    pl_status st = PL_OK;
    if (self->phase != REDUCER_WAITING && self->phase != REDUCER_WAITING_AGAIN)
        PL_FAIL(PL_ESTATE, "a step is waited for that is not closed");
    PL_TRY(pl_comm_wait(self->comm, self->last_ticket, slice_ns));
    if (self->phase == REDUCER_WAITING_AGAIN) {
        PL_TRY(merge_backups(self));
        memset(late_of(self), 0, self->spec.n_params);
    } else {
        for (size_t b = 0; b < self->plan->n_buckets; b++)
            PL_TRY(pl_bucket_move(&self->buckets[b].phase, PL_BUCKET_REDUCED, b));
        reducer_read_roll(self);
    }
    self->phase = REDUCER_REDUCED;
done:
    return st;
}

int pl_reducer_is_late(const pl_reducer *self, size_t param)
{
    return late_of(self)[param] != 0;
}

size_t pl_reducer_n_late(const pl_reducer *self)
{
    size_t n_late = 0;
    for (size_t i = 0; i < self->spec.n_params; i++)
        n_late += late_of(self)[i] != 0;
    return n_late;
}

pl_status pl_reducer_amend(pl_reducer *self, size_t param, const void *data,
                           pl_delivery delivery)
{
    pl_status st = PL_OK;
    if ((self->phase != REDUCER_REDUCED && self->phase != REDUCER_AMENDING) ||
        !pl_reducer_is_late(self, param))
        PL_FAIL(PL_ESTATE, "parameter %zu is amended but not late", param);
    PL_TRY(order(self));
    if (delivery == PL_ADD && !self->backups[param].is_taken)
        PL_TRY(put_aside(self, param));
    PL_TRY(reducer_move_late(self, param, data));
    self->phase = REDUCER_AMENDING;
done:
    return st;
}

pl_status pl_reducer_end(pl_reducer *self)
{
    pl_status st = PL_OK;
    if (self->phase != REDUCER_REDUCED)
        PL_FAIL(PL_ESTATE, "a step ends whose means are not in place");
    if (pl_reducer_n_late(self) > 0)
        PL_FAIL(PL_ESTATE, "a step ends whose late gradients were not amended");
    /* A step without gradients teaches nothing. */
    for (size_t i = 0; reducer_is_active_rank(self) && i < self->spec.n_params; i++)
        self->slots[i].n_expected = self->slots[i].n_fires;
    if (self->learning == LEARNING_NOTHING && pl_reducer_root_is_active(self))
        self->learning = LEARNING_ORDER_KNOWN;
    self->phase = REDUCER_IDLE;
    pli_comm_note(self->comm, PL_IDLE, self->step);
done:
    return st;
}

void pl_reducer_fail(pl_reducer *self, const char *words)
{
    pl_comm_abort(self->comm, words);
    if (pl_reducer_is_active(self))
        reducer_moves_abandon(self);
    self->phase = REDUCER_FAILED;
}

/* Ranks may have failed on either side of a step's end, so nothing that was learned
 * can be trusted to be the same everywhere: all start again from the first plan. */
static pl_status forget(pl_reducer *self)
{
    pl_status st = PL_OK;
    PL_TRY(reducer_lay_out(self, NULL, &self->spec.caps));
    self->learning = LEARNING_NOTHING;
    self->roll = reducer_full_roll(self);
    for (size_t i = 0; i < self->spec.n_params; i++) {
        self->slots[i] = (slot_state){0};
        self->backups[i].is_taken = 0;
    }
done:
    return st;
}

pl_status pl_reducer_recover(pl_reducer *self, int64_t slice_ns)
{
    pl_status st = PL_OK;
    pl_recovery recovery = PL_NOTHING_FAILED;
    if (self->phase != REDUCER_FAILED) {
        st = pl_comm_progress(self->comm);
        if (st != PL_OK)
            self->phase = REDUCER_FAILED;
        goto done;
    }
    PL_TRY(pl_comm_recover(self->comm, slice_ns, &recovery));
    PL_TRY(forget(self));
    self->phase = REDUCER_IDLE;
done:
    return st;
}
