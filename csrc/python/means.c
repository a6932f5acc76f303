/* means.c - a step's end: means become gradients, and views of their slots. */
#include <string.h>

#include "../core/alloc.h"
#include "sparse.h"

static const module_state *state_of_reducer(reducer_object *self)
{
    return state_of((PyObject *)self);
}

static int set_grad(reducer_object *self, size_t i, PyObject *grad)
{
    return PyObject_SetAttr(self->slots[i].param, state_of_reducer(self)->str_grad,
                            grad);
}

/* ---- the window ------------------------------------------------------------------ */

int pli_means_refresh_window(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    size_t offset, n_bytes;
    if (self->window != NULL && pli_window_n_views(self->window) > 0) {
        if (pli_check(state, pli_window_retire(self->window)) != 0)
            return -1;
        pli_window_release(self->window);
        self->window = NULL;
    }
    self->generation = pl_reducer_generation(self->reducer);
    if (self->window != NULL)
        return 0;
    pl_reducer_buckets(self->reducer, &offset, &n_bytes);
    if (n_bytes == 0) /* all are sparse, or empty: there is nothing to see */
        return 0;
    return pli_check(state, pli_window_create(self->comm, offset, n_bytes,
                                              self->n_slots, &self->window));
}

/* ---- the mean ----------------------------------------------------------------------
 */

/* At once, or with all others where that is a launch. */
static void copy(reducer_object *self, void *to, const void *from,
                 const pli_layout *layout)
{
    if (pli_is_on_device(self))
        pli_launch_note(self, to, from, layout);
    else
        memcpy(to, from, pli_layout_bytes(layout));
}

/* Writes the mean where the user's gradient is. */
static int copy_back(reducer_object *self, size_t i, PyObject *grad)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    void *memory = pli_slot_memory(self, i);
    pli_tensor tensor;
    if (pli_tensor_read_on(state, self->place, grad, "a parameter's gradient",
                           &tensor) != 0)
        return -1;
    if (pli_layout_equal(&tensor.layout, slot->layout)) {
        copy(self, tensor.data, memory, slot->layout);
    } else {
        PyObject *mean = pli_tensor_borrow(state, self->place, memory, slot->layout);
        PyObject *target =
            mean != NULL ? PyObject_CallMethod(grad, "detach", NULL) : NULL;
        PyObject *result =
            target != NULL ? PyObject_CallMethod(target, "copy_", "O", mean) : NULL;
        Py_XDECREF(mean);
        Py_XDECREF(target);
        Py_XDECREF(result);
        if (result == NULL)
            return -1;
    }
    if (self->recording == RECORDING_OFF)
        return 0;
    /* Somebody may have saved it for the second backward: let autograd find out. */
    PyObject *result = PyObject_CallOneArg(state->increment_version, grad);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* A gradient for a parameter that only other ranks used. */
static int bind_new(reducer_object *self, size_t i)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    PyObject *grad = NULL;
    if (slot->policy == POLICY_VIEW) {
        const pli_view view = {.window = self->window,
                               .place = self->place,
                               .slot = i,
                               .offset = pli_slot_in_window(self, i)};
        grad = pli_tensor_view(state, &view, slot->layout);
    } else {
        PyObject *detached = PyObject_CallMethod(slot->param, "detach", NULL);
        grad =
            detached != NULL ? PyObject_CallOneArg(state->empty_like, detached) : NULL;
        Py_XDECREF(detached);
        if (grad != NULL && copy_back(self, i, grad) != 0)
            Py_CLEAR(grad);
    }
    const int status = grad != NULL ? set_grad(self, i, grad) : -1;
    Py_XDECREF(grad);
    return status;
}

static int bind_used(reducer_object *self, size_t i)
{
    const grad_slot *slot = &self->slots[i];
    pli_tensor tensor;
    if (slot->policy == POLICY_SPARSE)
        return 0; /* pli_sparse_finish() has */
    if (pl_reducer_sparse_dims(self->reducer, i) > 0 ||
        (slot->n_sparse_dims > 0 && slot->mode == GRAD_COPY))
        return pli_sparse_put_mean(self, i);
    switch (slot->mode) {
    case GRAD_COPY:
        return copy_back(self, i, slot->held);
    case GRAD_VIEW:
        if (slot->held == NULL)
            break;
        if (pli_tensor_read_on(state_of_reducer(self), self->place, slot->held,
                               "a gradient's view", &tensor) != 0)
            return -1;
        /* Its window may have been retired meanwhile. */
        if (!pli_slot_is_seen_by(self, i, &tensor))
            break;
        return set_grad(self, i, slot->held);
    case GRAD_UNTOUCHED:
        break;
    }
    return bind_new(self, i);
}

/* No rank had one: it is as it was before the reduction. */
static int restore(reducer_object *self, size_t i)
{
    const grad_slot *slot = &self->slots[i];
    pli_tensor saved;
    if (slot->backup != NULL)
        copy(self, pli_slot_memory(self, i), slot->backup, slot->layout);
    if (slot->saved == NULL)
        return 0;
    if (pli_tensor_read_on(state_of_reducer(self), self->place, slot->saved,
                           "an unused gradient", &saved) != 0)
        return -1;
    copy(self, pli_slot_memory(self, i), saved.data, slot->layout);
    return 0;
}

int pli_means_bind(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    int status = 0;
    if (pl_reducer_is_used(self->reducer, i)) {
        status = bind_used(self, i);
        slot->sync = GRAD_SYNCED;
    } else {
        status = restore(self, i);
    }
    if (!pli_is_on_device(self))
        pli_means_drop(self, i);
    return status;
}

void pli_means_drop(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    slot->mode = GRAD_UNTOUCHED;
    Py_CLEAR(slot->held);
    Py_CLEAR(slot->late);
    Py_CLEAR(slot->kept);
    Py_CLEAR(slot->saved);
    pli_free(slot->backup);
    slot->backup = NULL;
}
