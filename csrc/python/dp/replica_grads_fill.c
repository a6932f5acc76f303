/* replica_grads_fill.c - a replica's side of slots: how gradients get into its row.
 *
 * A hook, the hook of a large parameter, copies while the gradient is in the
 * processor's cache, and drops the tensor at once, so that malloc gives the same memory
 * to the next; a sweep at the end takes the small ones together, which no hook has
 * slowed down.  What no slot can hold (a sparse gradient) stays in .grad: a fallback.
 */
#include "replica_grads.h"

/* 1 where the gradient is in the slot now, 0 where no slot can hold it, or -1. */
static int put(const replica_grads_object *self, grad_slot *slot, PyObject *grad)
{
    pli_tensor read;
    if (pli_tensor_read(self->state, grad, "a gradient", &read) != 0) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    if (!pli_layout_equal(&read.layout, slot->layout)) {
        if (read.layout.dtype != slot->layout->dtype)
            return 0;
        return pli_call_method(slot->views[0], slot->is_used ? "add_" : "copy_",
                               grad) != 0
                   ? -1
                   : 1;
    }
    const pl_move move = {slot->at[0], read.data, read.layout.dtype,
                          read.layout.n_elems};
    const pl_backend_ops *ops = self->backend->ops;
    const pl_status st = slot->is_used ? ops->add(self->backend, &move, 1, NULL)
                                       : ops->copy(self->backend, &move, 1, NULL);
    return pli_check(self->state, st) != 0 ? -1 : 1;
}

typedef enum grad_place { GRAD_ABSENT, GRAD_IN_SLOT, GRAD_IS_FALLBACK } grad_place;

/* Moves `grad`, the parameter's .grad or None, into the slot; one that no slot can hold
 * stays.  A grad_place, or -1. */
static int take_grad(const replica_grads_object *self, grad_slot *slot, PyObject *grad)
{
    if (grad == Py_None)
        return GRAD_ABSENT;
    const int has_put = put(self, slot, grad);
    if (has_put < 1)
        return has_put < 0 ? -1 : GRAD_IS_FALLBACK;
    slot->is_used = 1;
    if (PyObject_SetAttr(slot->param, self->state->str_grad, Py_None) != 0)
        return -1;
    return GRAD_IN_SLOT;
}

static PyObject *grad_hook_call(PyObject *object, PyObject *param)
{
    PLI_ENTER(object);
    const grad_hook_object *hook = (const grad_hook_object *)object;
    if (hook->slots == NULL || hook->slots->is_shut)
        Py_RETURN_NONE;
    PyObject *grad = PyObject_GetAttr(param, hook->slots->state->str_grad);
    const int status =
        grad == NULL ? -1
                     : take_grad(hook->slots, &hook->slots->slots[hook->index], grad);
    Py_XDECREF(grad);
    if (status < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef grad_hook_call_def = {
    "paceline_grad_hook", grad_hook_call, METH_O,
    "paceline_grad_hook($self, param, /)\n--\n\nTake the "
    "gradient that backward has produced."};

PyObject *pli_replica_grads_hooks(PyObject *object, PyObject *arg)
{
    PLI_ENTER(object);
    replica_grads_object *self = (replica_grads_object *)object;
    const module_state *state = state_of(object);
    const size_t least = PyLong_AsSize_t(arg);
    if (least == (size_t)-1 && PyErr_Occurred())
        return NULL;
    PyObject *hooks = PyList_New((Py_ssize_t)self->n_slots);
    for (size_t i = 0; hooks != NULL && i < self->n_slots; i++) {
        grad_slot *slot = &self->slots[i];
        if (pli_layout_bytes(slot->layout) < least) {
            PyList_SET_ITEM(hooks, (Py_ssize_t)i, Py_NewRef(Py_None));
            continue;
        }
        if (slot->hook == NULL)
            slot->hook = PyObject_New(grad_hook_object, state->grad_hook_type);
        if (slot->hook == NULL) {
            Py_CLEAR(hooks);
            break;
        }
        slot->hook->slots = self;
        slot->hook->index = i;
        PyObject *function =
            PyCFunction_New(&grad_hook_call_def, (PyObject *)slot->hook);
        if (function == NULL) {
            Py_CLEAR(hooks);
            break;
        }
        PyList_SET_ITEM(hooks, (Py_ssize_t)i, function);
    }
    return hooks;
}

PyObject *pli_replica_grads_open(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const replica_grads_object *self = (replica_grads_object *)object;
    (void)ignored;
    for (size_t i = 0; i < self->n_slots; i++)
        self->slots[i].is_used = 0;
    Py_RETURN_NONE;
}

PyObject *pli_replica_grads_shut(PyObject *object, PyObject *is_shut)
{
    PLI_ENTER(object);
    const int value = PyObject_IsTrue(is_shut);
    if (value < 0)
        return NULL;
    ((replica_grads_object *)object)->is_shut = value;
    Py_RETURN_NONE;
}

PyObject *pli_replica_grads_sweep(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const replica_grads_object *self = (replica_grads_object *)object;
    PyObject *mask = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->n_slots);
    int has_fallbacks = 0;
    (void)ignored;
    for (size_t i = 0; mask != NULL && i < self->n_slots; i++) {
        grad_slot *slot = &self->slots[i];
        PyObject *grad = PyObject_GetAttr(slot->param, self->state->str_grad);
        const int status = grad == NULL ? -1 : take_grad(self, slot, grad);
        Py_XDECREF(grad);
        if (status < 0)
            Py_CLEAR(mask);
        else
            PyBytes_AS_STRING(mask)[i] = (char)slot->is_used;
        has_fallbacks |= status == GRAD_IS_FALLBACK;
    }
    PyObject *result =
        mask != NULL ? PyTuple_Pack(2, mask, has_fallbacks ? Py_True : Py_False) : NULL;
    Py_XDECREF(mask);
    return result;
}

PyObject *pli_replica_grads_fallbacks(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const replica_grads_object *self = (replica_grads_object *)object;
    PyObject *fallbacks = PyList_New(0);
    (void)ignored;
    for (size_t i = 0; fallbacks != NULL && i < self->n_slots; i++) {
        PyObject *param = self->slots[i].param;
        PyObject *grad = PyObject_GetAttr(param, self->state->str_grad);
        int status = grad != NULL ? 0 : -1;
        if (grad != NULL && grad != Py_None) {
            PyObject *pair = Py_BuildValue("nO", (Py_ssize_t)i, grad);
            if (pair == NULL || PyList_Append(fallbacks, pair) != 0 ||
                PyObject_SetAttr(param, self->state->str_grad, Py_None) != 0)
                status = -1;
            Py_XDECREF(pair);
        }
        Py_XDECREF(grad);
        if (status != 0)
            Py_CLEAR(fallbacks);
    }
    return fallbacks;
}

/* ---- life ----------------------------------------------------------------------- */

static PyType_Slot grad_hook_slots[] = {
    {Py_tp_dealloc, pli_object_free},
    {Py_tp_doc, "A parameter's hook in a replica; made by ReplicaGrads alone."},
    {0, NULL},
};

PyType_Spec pli_grad_hook_spec = {
    .name = "paceline._native.ReplicaGradHook",
    .basicsize = sizeof(grad_hook_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = grad_hook_slots,
};
