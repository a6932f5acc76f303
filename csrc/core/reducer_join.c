/* reducer_join.c - steps that not every rank has gradients for.
 *
 * In each step every rank says in a byte of its own what it is to the step, and the
 * all-reduce of the flags shows all bytes to all.  That is known only at the step's
 * end, and the broadcasts of the step need their root before: so the root is the lowest
 * rank that was active in the step before.  Where it stands in itself for the first
 * time, its values are out of date, and every rank leaves them; the next step has
 * another root.
 */
#include "reducer.h"
#include "reducer_state.h"

pl_roll reducer_full_roll(const pl_reducer *self)
{
    return (pl_roll){.n_active = pl_comm_world_size(self->comm), .last_joining = -1};
}

void reducer_open_roll(pl_reducer *self)
{
    roll_of(self)[pl_comm_rank(self->comm)] = PL_ACTIVE;
    self->root = self->roll.first_active >= 0 ? self->roll.first_active : 0;
}

void reducer_read_roll(pl_reducer *self)
{
    pl_roll roll = {.first_active = -1, .last_joining = -1};
    for (int r = pl_comm_world_size(self->comm); r-- > 0;) {
        const unsigned char part = roll_of(self)[r];
        if (part == PL_ACTIVE) {
            roll.n_active++;
            roll.first_active = r;
        } else if (part == PL_JOINING && roll.last_joining < 0) {
            roll.last_joining = r;
        }
    }
    self->roll = roll;
}

pl_roll pl_reducer_roll(const pl_reducer *self)
{
    return self->roll;
}

void pl_reducer_forget_roll(pl_reducer *self)
{
    self->roll = reducer_full_roll(self);
}

int pl_reducer_root(const pl_reducer *self)
{
    return self->root;
}

int pl_reducer_root_is_active(const pl_reducer *self)
{
    return roll_of(self)[self->root] == PL_ACTIVE;
}

pl_status pl_reducer_stand_in(pl_reducer *self, pl_part part)
{
    pl_status st = PL_OK;
    if (self->n_fires > 0)
        PL_FAIL(PL_ESTATE, "a rank stands in for a step that it has gradients of");
    for (size_t i = 0; i < self->spec.n_params; i++)
        PL_TRY(pl_reducer_settle(self, i, NULL, PL_REPLACE, PL_UNUSED));
    roll_of(self)[pl_comm_rank(self->comm)] = (unsigned char)part;
done:
    return st;
}

static int is_rescaled(const pl_reducer *self)
{
    const int n_active = self->roll.n_active;
    return n_active != pl_comm_world_size(self->comm) && n_active != 0;
}

pl_status pl_reducer_rescale_mean(pl_reducer *self, const pl_move *mean)
{
    const int world_size = pl_comm_world_size(self->comm);
    const int n_active = self->roll.n_active;
    if (!is_rescaled(self))
        return PL_OK;
    return self->backend->ops->scale(self->backend, mean, 1, world_size, n_active,
                                     self->stream);
}

/* All of them by one launch. */
static pl_status rescale_together(pl_reducer *self)
{
    const int n_active = self->roll.n_active;
    pl_move *means = self->moves.moves;
    size_t n = 0;
    for (size_t i = 0; i < self->spec.n_params; i++)
        if (pl_reducer_is_used(self, i) && self->params[i].n_elems > 0)
            means[n++] = slot_move(self, i, NULL);
    return n > 0 ? self->backend->ops->scale(self->backend, means, n,
                                             pl_comm_world_size(self->comm), n_active,
                                             self->stream)
                 : PL_OK;
}

pl_status pl_reducer_rescale(pl_reducer *self)
{
    pl_status st = PL_OK;
    if (self->phase != REDUCER_REDUCED)
        PL_FAIL(PL_ESTATE, "means are rescaled that are not in place");
    if (!is_rescaled(self))
        goto done;
    if (reducer_defers(&self->moves)) {
        PL_TRY(pl_reducer_order(self));
        PL_TRY(rescale_together(self));
        goto done;
    }
    for (size_t i = 0; i < self->spec.n_params; i++) {
        const pl_move mean = slot_move(self, i, NULL);
        if (pl_reducer_is_used(self, i))
            PL_TRY(pl_reducer_rescale_mean(self, &mean));
    }
done:
    return st;
}
