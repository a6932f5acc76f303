/* launch.c - a step on a device: streams, copies in one launch, what must live how
 * long.
 *
 * Nothing is moved as it comes.  A gradient is kept until its bucket is posted, that is
 * until the copy of it is enqueued: from there on the order of the stream protects its
 * memory.  Means that go back to gradients of the user's are noted, and copied in one
 * launch at the end of the step.
 *
 * What the user sees as a gradient may be a view of its slot.  If somebody keeps such a
 * view when the slot is to be written anew, the world takes other memory (window.h);
 * that can only be done when a step begins, so all parameters are looked at then.
 */
#include "grads.h"

static const module_state *state_of_reducer(const reducer_object *self)
{
    return state_of((PyObject *)self);
}

/* ---- streams ----------------------------------------------------------------------
 */

int pli_launch_look(reducer_object *self)
{
    if (!pli_is_on_device(self))
        return 0;
    if (pli_gpu_current_stream(state_of_reducer(self), self->gpu, &self->stream) != 0)
        return -1;
    pl_reducer_set_stream(self->reducer, self->stream);
    return 0;
}

static int is_capturing(const reducer_object *self, int *out)
{
    return pli_check(state_of_reducer(self),
                     pli_cuda_is_capturing(self->backend, self->stream, out));
}

int pli_launch_check(reducer_object *self)
{
    int captures = 0;
    if (!pli_is_on_device(self))
        return 0;
    if (pli_launch_look(self) != 0 || is_capturing(self, &captures) != 0)
        return -1;
    if (!captures)
        return 0;
    if (!pl_reducer_is_learned(self->reducer)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a CUDA graph captures a backward before its buckets are in "
                        "their final order: run 3 whole steps (forward, backward, "
                        "optimizer) on the capture's stream first");
        return -1;
    }
    /* A replay writes to today's memory, whatever becomes of it here. */
    if (self->captured == NULL && self->comm->ops->hold_memory != NULL)
        self->captured = self->comm->ops->hold_memory(self->comm);
    return 0;
}

/* ---- views that somebody keeps ----------------------------------------------------
 */

/* 1 where a view of slot i will still be seen when the slot is written, 0, or -1. */
static int is_kept(reducer_object *self, size_t i)
{
    const grad_slot *slot = &self->slots[i];
    PyObject *grad = NULL;
    pli_tensor tensor;
    if (pli_slot_n_views(self, i) == 0)
        return 0;
    if (pli_slot_n_views(self, i) > 1 || self->recording == RECORDING_ON ||
        pli_grads_is_watched(slot) || self->part != PL_ACTIVE)
        return 1;
    const int has_grad = pli_grads_read(self, i, &grad, &tensor);
    if (has_grad <= 0)
        return has_grad < 0 ? -1 : 1;
    const int is_in_place = pli_slot_is_seen_by(self, i, &tensor);
    Py_DECREF(grad);
    return !is_in_place;
}

static int is_any_kept(reducer_object *self)
{
    int status = 0;
    if (self->generation != pl_reducer_generation(self->reducer))
        return 1;
    for (size_t i = 0; status == 0 && i < self->n_slots; i++)
        status = is_kept(self, i);
    return status;
}

int pli_launch_begin(reducer_object *self)
{
    int captures = 0;
    if (!pli_is_on_device(self))
        return 0;
    self->n_let_go = 0;
    self->n_moves = 0;
    if (self->window == NULL || pli_window_n_views(self->window) == 0)
        return 0;
    const int is_one = is_any_kept(self);
    if (is_one <= 0)
        return is_one;
    if (is_capturing(self, &captures) != 0)
        return -1;
    if (!captures)
        return pli_means_refresh_window(self);
    PyErr_SetString(PyExc_RuntimeError,
                    "a CUDA graph captures a backward while gradients of an earlier "
                    "step are kept: drop them first, and call "
                    "zero_grad(set_to_none=True)");
    return -1;
}

/* ---- copies -------------------------------------------------------------------------
 */

void pli_launch_note(reducer_object *self, void *to, const void *from,
                     const pli_layout *layout)
{
    if (layout->n_elems > 0)
        self->moves[self->n_moves++] = (pl_move){
            .to = to, .from = from, .dtype = layout->dtype, .n_elems = layout->n_elems};
}

int pli_launch_copies(reducer_object *self, pl_stream *stream)
{
    pl_backend *backend = self->backend;
    const size_t n_moves = self->n_moves;
    pl_status st;
    self->n_moves = 0;
    if (n_moves == 0)
        return 0;
    Py_BEGIN_ALLOW_THREADS st =
        backend->ops->copy(backend, self->moves, n_moves, stream);
    Py_END_ALLOW_THREADS return pli_check(state_of_reducer(self), st);
}

/* ---- what the step holds ------------------------------------------------------------
 */

void pli_launch_let_go(reducer_object *self)
{
    const size_t n_posted = pl_reducer_n_posted(self->reducer);
    while (self->n_let_go < n_posted) {
        const pl_bucket_plan *bucket =
            &pl_reducer_plan(self->reducer)->buckets[self->n_let_go++];
        for (size_t m = 0; m < bucket->n_params; m++)
            Py_CLEAR(self->slots[bucket->params[m]].kept);
    }
}

int pli_launch_finish(reducer_object *self)
{
    if (!pli_is_on_device(self))
        return 0;
    const int status = pli_launch_copies(self, self->stream);
    for (size_t i = 0; i < self->n_slots; i++)
        pli_means_drop(self, i);
    return status;
}
