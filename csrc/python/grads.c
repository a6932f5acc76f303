/* grads.c - one gradient: into its slot, and back as a mean. */
#include "grads.h"

#include <string.h>

#include "../core/alloc.h"
#include "sparse.h"

enum { RELEASE_GIL_BYTES = 65536 }; /* copies larger than this let others run */

static const module_state *state_of_reducer(reducer_object *self)
{
    return state_of((PyObject *)self);
}

/* ---- reading -------------------------------------------------------------------- */

int pli_grads_read(reducer_object *self, size_t i, PyObject **out, pli_tensor *tensor)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    PyObject *grad = PyObject_GetAttr(slot->param, state->str_grad);
    if (grad == NULL)
        return -1;
    if (grad == Py_None) {
        Py_DECREF(grad);
        return 0;
    }
    if (pli_sparse_read(self, i, &grad, tensor) != 0) {
        Py_DECREF(grad);
        return -1;
    }
    if (tensor->layout.dtype != slot->layout->dtype ||
        tensor->layout.n_elems != slot->layout->n_elems) {
        PyErr_Format(
            PyExc_RuntimeError,
            "parameter %zu was %zu x %s when it was wrapped, and its gradient is "
            "%zu x %s: wrap the model again after changing its parameters",
            i, slot->layout->n_elems, pl_dtype_text(slot->layout->dtype),
            tensor->layout.n_elems, pl_dtype_text(tensor->layout.dtype));
        Py_DECREF(grad);
        return -1;
    }
    *out = grad;
    return 1;
}

static int set_grad(reducer_object *self, size_t i, PyObject *grad)
{
    return PyObject_SetAttr(self->slots[i].param, state_of_reducer(self)->str_grad,
                            grad);
}

int pli_grads_is_watched(const grad_slot *slot)
{
    return slot->hooks != NULL && PyDict_Size(slot->hooks) > 1;
}

/* ---- a gradient arrives ------------------------------------------------------------
 */

/* Before a slot is written anew: whoever keeps a view of its last gradient keeps the
 * values. */
static int protect_kept(reducer_object *self, size_t i, pl_delivery delivery)
{
    if (delivery == PL_IN_PLACE || self->slots[i].mode != GRAD_UNTOUCHED ||
        pli_slot_n_views(self, i) == 0)
        return 0;
    if (!pli_is_on_device(self))
        return pli_means_refresh_window(self);
    PyErr_Format(PyExc_RuntimeError,
                 "the gradient of parameter %zu was exchanged while backward ran, and "
                 "is still in use: on a GPU that can be done before backward alone",
                 i);
    return -1;
}

/* Whether others should run meanwhile: a large copy, or calls of the device's. */
static int takes_long(const reducer_object *self, size_t i, pl_delivery delivery)
{
    if (pli_is_on_device(self))
        return delivery == PL_ADD || pl_reducer_may_post(self->reducer, i);
    return pli_layout_bytes(self->slots[i].layout) >= RELEASE_GIL_BYTES;
}

static int deliver(reducer_object *self, size_t i, const void *data,
                   pl_delivery delivery, pl_verdict *out)
{
    pl_status st;
    if (protect_kept(self, i, delivery) != 0)
        return -1;
    if (!takes_long(self, i, delivery)) {
        st = pl_reducer_deliver(self->reducer, i, data, delivery, self->stream, out);
    } else {
        Py_BEGIN_ALLOW_THREADS st =
            pl_reducer_deliver(self->reducer, i, data, delivery, self->stream, out);
        Py_END_ALLOW_THREADS
    }
    return pli_check(state_of_reducer(self), st);
}

typedef enum dim_part { DIM_SIZE, DIM_STRIDE } dim_part;

/* A tuple of what a layout has for each dimension. */
static PyObject *dims_tuple(const pli_layout *layout, dim_part part)
{
    PyObject *tuple = PyTuple_New(layout->n_dims);
    for (int d = 0; tuple != NULL && d < layout->n_dims; d++) {
        const pli_dim *dim = &layout->dims[d];
        PyObject *number =
            PyLong_FromLongLong(part == DIM_SIZE ? dim->size : dim->stride);
        if (number == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, d, number);
    }
    return tuple;
}

/* A tensor of torch's own in the slot's layout: the parameter's may be another now. */
static PyObject *empty_in_slot_layout(const grad_slot *slot)
{
    PyObject *shape = dims_tuple(slot->layout, DIM_SIZE);
    PyObject *strides = dims_tuple(slot->layout, DIM_STRIDE);
    PyObject *empty = shape != NULL && strides != NULL
                          ? PyObject_CallMethod(slot->param, "new_empty_strided", "OO",
                                                shape, strides)
                          : NULL;
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return empty;
}

/* The gradient in the slot's layout: *out is `grad` itself where it has that, else a
 * copy made by torch. */
static int in_slot_layout(reducer_object *self, size_t i, PyObject *grad,
                          pli_tensor *tensor, PyObject **out)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    if (pli_layout_equal(&tensor->layout, slot->layout)) {
        *out = Py_NewRef(grad);
        return 0;
    }
    PyObject *copy = empty_in_slot_layout(slot);
    PyObject *source = copy != NULL ? PyObject_CallMethod(grad, "detach", NULL) : NULL;
    PyObject *result =
        source != NULL ? PyObject_CallMethod(copy, "copy_", "O", source) : NULL;
    int status = -1;
    if (result != NULL && pli_tensor_read_on(state, self->place, copy,
                                             "a gradient's copy", tensor) == 0) {
        *out = Py_NewRef(copy);
        status = 0;
        if (!pli_layout_equal(&tensor->layout, slot->layout)) {
            PyErr_Format(PyExc_RuntimeError,
                         "the shape of parameter %zu changed after wrapping: wrap the "
                         "model again",
                         i);
            Py_CLEAR(*out);
            status = -1;
        }
    }
    Py_XDECREF(result);
    Py_XDECREF(source);
    Py_XDECREF(copy);
    return status;
}

/* The slot was filled with a dense copy of a sparse gradient. */
static void note_sparse(reducer_object *self, size_t i)
{
    if (self->slots[i].n_sparse_dims > 0)
        pl_reducer_note_sparse(self->reducer, i, self->slots[i].n_sparse_dims);
}

/* One more that lives until its bucket is posted. */
static int keep(grad_slot *slot, PyObject *object)
{
    PyObject *kept =
        slot->kept == NULL ? Py_NewRef(object) : PyTuple_Pack(2, slot->kept, object);
    if (kept == NULL)
        return -1;
    Py_XSETREF(slot->kept, kept);
    return 0;
}

/* `data` is copied later, from what the user has as gradient or from a copy of that. */
static int keep_until_copied(reducer_object *self, size_t i, PyObject *grad,
                             PyObject *data)
{
    grad_slot *slot = &self->slots[i];
    if (pli_grads_is_watched(slot)) { /* somebody may change it before */
        PyThreadState *thread = PyEval_SaveThread();
        const pl_status st = pl_reducer_flush(self->reducer, i);
        PyEval_RestoreThread(thread);
        return pli_check(state_of_reducer(self), st);
    }
    return data != grad ? keep(slot, data) : 0;
}

static int arrive_by_copy(reducer_object *self, size_t i, PyObject *grad,
                          pli_tensor *tensor)
{
    grad_slot *slot = &self->slots[i];
    PyObject *dense = NULL;
    pl_verdict verdict;
    if (in_slot_layout(self, i, grad, tensor, &dense) != 0)
        return -1;
    /* What a peer's amendment adds must be what this rank's adds: a large gradient that
     * stays whole here can only come before its bucket is posted. */
    if (slot->policy == POLICY_VIEW && slot->mode == GRAD_UNTOUCHED)
        pl_reducer_hold(self->reducer, i);
    int status = deliver(self, i, tensor->data, PL_REPLACE, &verdict);
    if (status == 0 && verdict == PL_HELD)
        status = keep_until_copied(self, i, grad, dense);
    Py_DECREF(dense);
    if (status == 0) {
        Py_XSETREF(slot->held, Py_NewRef(grad));
        slot->mode = GRAD_COPY;
        note_sparse(self, i);
    }
    return status;
}

static int keep_late(grad_slot *slot, PyObject *grad)
{
    if (slot->late == NULL) {
        slot->late = Py_NewRef(grad);
        return 0;
    }
    PyObject *sum = PyObject_CallMethod(slot->late, "add_", "O", grad);
    Py_XDECREF(sum);
    return sum != NULL ? 0 : -1;
}

static int arrive_by_view(reducer_object *self, size_t i, PyObject *grad,
                          pli_tensor *tensor)
{
    grad_slot *slot = &self->slots[i];
    const int is_in_place = pli_slot_is_seen_by(self, i, tensor);
    const int is_first = slot->mode == GRAD_UNTOUCHED;
    PyObject *dense = NULL;
    pl_verdict verdict;
    if (in_slot_layout(self, i, grad, tensor, &dense) != 0)
        return -1;
    const pl_delivery delivery =
        is_in_place ? PL_IN_PLACE : (is_first ? PL_REPLACE : PL_ADD);
    int status = deliver(self, i, tensor->data, delivery, &verdict);
    if (status == 0 && verdict == PL_HELD && !is_in_place)
        status = keep(slot, dense);
    Py_DECREF(dense);
    if (status != 0)
        return -1;
    slot->mode = GRAD_VIEW;
    if (verdict == PL_LATE) {
        if (keep_late(slot, grad) != 0)
            return -1;
    } else if (is_in_place) {
        Py_XSETREF(slot->held, Py_NewRef(grad));
    } else if (self->retention.release == RELEASE_AT_END) {
        Py_XSETREF(slot->kept, Py_NewRef(grad));
    }
    return set_grad(self, i, Py_None);
}

int pli_grads_arrive(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    PyObject *grad = NULL;
    pli_tensor tensor;
    pl_verdict verdict;
    if (slot->policy == POLICY_SPARSE)
        return pli_sparse_arrive(self, i);
    const int has_grad = pli_grads_read(self, i, &grad, &tensor);
    if (has_grad < 0)
        return -1;
    if (has_grad == 0) /* an undefined gradient: nothing to add, nothing to wait for */
        return deliver(self, i, NULL,
                       slot->mode == GRAD_UNTOUCHED ? PL_REPLACE : PL_ADD, &verdict);
    const int is_view =
        slot->mode == GRAD_VIEW ||
        (slot->mode == GRAD_UNTOUCHED && slot->policy == POLICY_VIEW &&
         self->recording == RECORDING_OFF && !pli_grads_is_watched(slot) &&
         slot->n_sparse_dims == 0 && pli_layout_equal(&tensor.layout, slot->layout));
    const int status = is_view ? arrive_by_view(self, i, grad, &tensor)
                               : arrive_by_copy(self, i, grad, &tensor);
    Py_DECREF(grad);
    if (pli_is_on_device(self))
        pli_launch_let_go(self);
    return status;
}

/* ---- no gradient arrived ------------------------------------------------------------
 */

static int settle(reducer_object *self, size_t i, const void *data,
                  pl_delivery delivery)
{
    const pl_use use = self->slots[i].sync == GRAD_UNSYNCED ? PL_USED : PL_UNUSED;
    if (protect_kept(self, i, delivery) != 0)
        return -1;
    return pli_check(state_of_reducer(self),
                     pl_reducer_settle(self->reducer, i, data, delivery, use));
}

/* One that is declared sparse has nothing in its slot. */
static int settle_declared(reducer_object *self, size_t i)
{
    const int has_grad = pli_sparse_has_grad(self, i);
    if (has_grad < 0)
        return -1;
    if (has_grad == 0)
        self->slots[i].sync = GRAD_SYNCED; /* what had accumulated was reset */
    return settle(self, i, NULL, PL_IN_PLACE);
}

/* If no rank used it, it must come out of the reduction as it went in. */
static int save(reducer_object *self, size_t i, PyObject *grad,
                const pli_tensor *tensor)
{
    grad_slot *slot = &self->slots[i];
    const size_t n_bytes = pli_layout_bytes(slot->layout);
    if (pli_is_on_device(self)) {
        PyObject *detached = PyObject_CallMethod(grad, "detach", NULL);
        slot->saved =
            detached != NULL ? PyObject_CallMethod(detached, "clone", NULL) : NULL;
        Py_XDECREF(detached);
        return slot->saved != NULL ? 0 : -1;
    }
    if (pli_check(state_of_reducer(self),
                  pli_calloc(n_bytes, 1, "an unused gradient", &slot->backup)) != 0)
        return -1;
    memcpy(slot->backup, tensor->data, n_bytes);
    return 0;
}

int pli_grads_settle(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    PyObject *grad = NULL;
    PyObject *dense = NULL;
    pli_tensor tensor;
    if (slot->policy == POLICY_SPARSE)
        return settle_declared(self, i);
    const int has_grad = pli_grads_read(self, i, &grad, &tensor);
    int status = -1;
    if (has_grad < 0)
        return -1;
    if (has_grad == 0) {
        slot->sync = GRAD_SYNCED; /* what had accumulated was reset */
        return settle(self, i, NULL, PL_REPLACE);
    }
    if (pli_slot_is_seen_by(self, i, &tensor)) {
        if (save(self, i, grad, &tensor) != 0)
            goto done;
        status = settle(self, i, NULL, PL_IN_PLACE);
        slot->mode = GRAD_VIEW;
    } else if (in_slot_layout(self, i, grad, &tensor, &dense) == 0) {
        status = settle(self, i, tensor.data, PL_REPLACE);
        if (status == 0 && dense != grad && pli_is_on_device(self))
            status = keep(slot, dense);
        slot->mode = GRAD_COPY;
        note_sparse(self, i);
    }
    if (status == 0)
        slot->held = Py_NewRef(grad);
done:
    Py_XDECREF(dense);
    Py_DECREF(grad);
    return status;
}

/* ---- the round of the late
 * ------------------------------------------------------------ */

static int amend(reducer_object *self, size_t i, const void *data, pl_delivery delivery)
{
    PyThreadState *thread = PyEval_SaveThread();
    const pl_status st = pl_reducer_amend(self->reducer, i, data, delivery);
    PyEval_RestoreThread(thread);
    return pli_check(state_of_reducer(self), st);
}

int pli_grads_amend(reducer_object *self, size_t i)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    PyObject *dense = NULL;
    pli_tensor tensor;
    PyObject *given = slot->policy == POLICY_VIEW ? slot->late : slot->held;
    const pl_delivery delivery = slot->policy == POLICY_VIEW ? PL_ADD : PL_REPLACE;
    if (given == NULL)
        return amend(self, i, NULL, delivery);
    if (pli_tensor_read_on(state, self->place, given, "a parameter's gradient",
                           &tensor) != 0 ||
        in_slot_layout(self, i, given, &tensor, &dense) != 0)
        return -1;
    const int status = amend(self, i, tensor.data, delivery);
    Py_DECREF(dense);
    return status;
}
