/* reducer_join.c - steps for which some ranks have no gradients.
 *
 * Each rank has a byte of the flags for its role in the step, and the all-reduce of the
 * flags shows all roles to all ranks.  They are known only at the step's end, but the
 * broadcasts of the step need their root before: so the root is the lowest rank that
 * was active in the step before.  If the root takes its first shadow step itself, its
 * values are out of date, and every rank ignores them; the next step has a different
 * root.
 */
#include "reducer.h"
#include "reducer_state.h"

pl_status pl_reducer_shadow_step(pl_reducer *self, pl_role role)
{
    pl_status st = PL_OK;
    if (self->n_ready > 0)
        PL_FAIL(PL_ESTATE, "a shadow step cannot have gradients");
    for (size_t i = 0; i < self->spec.n_params; i++)
        PL_TRY(pl_reducer_mark_unused(self, i, NULL, PL_REPLACE, PL_UNUSED));
    flags_of(self, pl_comm_rank(self->comm))->role = (unsigned char)role;
done:
    return st;
}

static int is_rescaled(const pl_reducer *self)
{
    const int n_active = self->participation.n_active;
    return n_active != pl_comm_world_size(self->comm) && n_active != 0;
}

pl_status pl_reducer_rescale_mean(pl_reducer *self, const pl_move *mean)
{
    const int world_size = pl_comm_world_size(self->comm);
    const int n_active = self->participation.n_active;
    if (!is_rescaled(self))
        return PL_OK;
    return self->backend->ops->scale(self->backend, mean, 1, world_size, n_active,
                                     self->stream);
}

/* Rescales all means by one launch. */
static pl_status rescale_together(pl_reducer *self)
{
    const int n_active = self->participation.n_active;
    pl_move *means = self->deferred.batch;
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
        PL_FAIL(PL_ESTATE, "cannot rescale means that are not in place");
    if (!is_rescaled(self))
        goto done;
    if (pli_reducer_defers(&self->deferred)) {
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
