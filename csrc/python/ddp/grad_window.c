/* grad_window.c - the window follows the plan. */
#include "grad_window.h"

int pli_grad_window_retire(reducer_object *self)
{
    if (self->window == NULL || pli_window_n_views(self->window) == 0)
        return 0;
    if (pli_check(state_of_reducer(self), pli_window_retire(self->window)) != 0)
        return -1;
    pli_window_release(self->window);
    self->window = NULL;
    return 0;
}

int pli_grad_window_refresh(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    size_t offset, n_bytes;
    if (pli_grad_window_retire(self) != 0)
        return -1;
    self->generation = pl_reducer_generation(self->reducer);
    if (self->window != NULL)
        return 0;
    pl_reducer_buckets(self->reducer, &offset, &n_bytes);
    if (n_bytes == 0) /* all are sparse or empty: the window has no bytes */
        return 0;
    return pli_check(state, pli_window_create(self->comm, offset, n_bytes,
                                              self->n_slots, &self->window));
}
