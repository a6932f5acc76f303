/* grad_results.c - the end of a step: reduced gradients become `.grad`, or views of
 * their slots. */
#include "grad_results.h"

#include "gpu_step.h"
#include "grad_window.h"
#include "grads.h"
#include "sparse_grads.h"

static int bind_new(reducer_object *self, size_t i);

/* Writes the reduced gradient to the user's gradient.  A lazy one is replaced instead,
 * as torch does with gradient_as_bucket_view.  is_lazy: -1 if not known. */
static int copy_back(reducer_object *self, size_t i, PyObject *grad, int is_lazy)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    void *memory = pli_slot_memory(self, i);
    const dl_device place = self->device.place;
    static const char what[] = "a parameter's gradient";
    pli_tensor tensor;
    if ((is_lazy < 0 ? pli_tensor_read_grad(state, place, grad, what, &tensor)
                     : pli_tensor_read_any(state, place, grad, what, &tensor)) != 0)
        return -1;
    tensor.layout.is_lazy |= is_lazy == 1;
    if (tensor.layout.is_lazy && !self->options.keeps_grads)
        return bind_new(self, i);
    if (pli_layout_equal(&tensor.layout, slot->layout)) {
        pli_step_defer_copy(self, tensor.data, memory, slot->layout);
    } else {
        PyObject *reduced =
            pli_tensor_borrow(state, self->device.place, memory, slot->layout);
        const int status = reduced != NULL ? pli_tensor_overwrite(grad, reduced) : -1;
        Py_XDECREF(reduced);
        if (status != 0)
            return -1;
    }
    if (self->recording == RECORDING_OFF)
        return 0;
    /* The graph of the second backward may hold it: let autograd notice the change. */
    return pli_increment_version(state, grad);
}

/* Sets a new gradient: only other ranks used the parameter, or its gradient is lazy. */
static int bind_new(reducer_object *self, size_t i)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    PyObject *grad = NULL;
    if (slot->policy == POLICY_VIEW) {
        if (self->window == NULL && pli_grad_window_refresh(self) != 0)
            return -1; /* no window: the process forked in this backward */
        const pli_view view = {.window = self->window,
                               .place = self->device.place,
                               .slot = i,
                               .offset = pli_slot_in_window(self, i)};
        grad = pli_tensor_view(state, &view, slot->layout);
    } else {
        grad = pli_grads_make_empty(self, i);
        if (grad != NULL && copy_back(self, i, grad, 0) != 0)
            Py_CLEAR(grad);
    }
    const int status = grad != NULL ? pli_set_grad(self, i, grad) : -1;
    Py_XDECREF(grad);
    return status;
}

/* The user's hooks may have replaced a gradient since it was read.  As in torch, the
 * result goes to the parameter's current gradient. */
static int copy_to_current(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    PyObject *grad = PyObject_GetAttr(slot->param, state_of_reducer(self)->name_grad);
    if (grad == NULL)
        return -1;
    if (grad == Py_None) {
        Py_DECREF(grad);
        return bind_new(self, i);
    }
    Py_XSETREF(slot->target, grad);
    return copy_back(self, i, grad, -1);
}

static int bind_used(reducer_object *self, size_t i)
{
    const grad_slot *slot = &self->slots[i];
    pli_tensor tensor;
    if (slot->policy == POLICY_SPARSE)
        return slot->target != NULL ? pli_sparse_put(self, i, slot->target) : 0;
    if (pl_reducer_sparse_dims(self->reducer, i) > 0 ||
        (slot->n_sparse_dims > 0 && slot->mode == GRAD_COPY))
        return pli_sparse_put_mean(self, i);
    switch (slot->mode) {
    case GRAD_COPY:
        if (self->options.binds_new)
            break;
        return self->has_user_hooks ? copy_to_current(self, i)
                                    : copy_back(self, i, slot->target, slot->is_lazy);
    case GRAD_VIEW:
        if (slot->target == NULL)
            break;
        if (pli_tensor_read_on(state_of_reducer(self), self->device.place, slot->target,
                               "a gradient's view", &tensor) != 0)
            return -1;
        if (!pli_slot_is_seen_by(self, i, &tensor)) {
            if (!slot->had_grad) /* a view; its window was retired meanwhile */
                break;
            if (copy_back(self, i, slot->target, -1) != 0)
                return -1;
        }
        return pli_set_grad(self, i, slot->target);
    case GRAD_UNTOUCHED:
        break;
    }
    return bind_new(self, i);
}

/* No rank had a gradient: it gets back its value from before the reduction. */
static int restore(reducer_object *self, size_t i)
{
    const grad_slot *slot = &self->slots[i];
    pli_tensor saved;
    if (slot->saved == NULL)
        return 0;
    if (pli_tensor_read_on(state_of_reducer(self), self->device.place, slot->saved,
                           "an unused gradient", &saved) != 0)
        return -1;
    pli_step_defer_copy(self, pli_slot_memory(self, i), saved.data, slot->layout);
    return 0;
}

int pli_results_bind(reducer_object *self, size_t i)
{
    if (!pli_binds_results(self))
        return 0;
    if (!pl_reducer_is_used(self->reducer, i))
        /* In a shadow step `.grad` holds the gradient of an earlier step: the optimizer
         * must not apply it again. */
        return self->role == PL_ACTIVE ? restore(self, i)
                                       : pli_set_grad(self, i, Py_None);
    const int status = bind_used(self, i);
    if (self->context.homes == NULL)
        self->slots[i].is_unseen = 0;
    return status;
}

void pli_results_drop(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    slot->mode = GRAD_UNTOUCHED;
    slot->is_deferred = 0;
    Py_CLEAR(slot->target);
    Py_CLEAR(slot->late);
    Py_CLEAR(slot->retained);
    Py_CLEAR(slot->saved);
}

int pli_results_finish(reducer_object *self)
{
    const int status = pli_step_copy(self, self->device.stream);
    for (size_t i = 0; i < self->n_slots; i++)
        pli_results_drop(self, i);
    return status;
}
