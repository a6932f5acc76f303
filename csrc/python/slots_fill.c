/* slots_fill.c - a replica's side of slots: how gradients get into its row.
 *
 * A tap, the hook of a large parameter, copies while the gradient is in the processor's
 * cache, and drops the tensor at once, so that malloc gives the same memory to the
 * next; a sweep at the end takes the small ones together, which no hook has slowed
 * down.  What no slot can hold (a sparse gradient) stays in .grad: a stray.
 */
#include "slots.h"

#include <string.h>

/* 1 where the gradient is in the slot now, 0 where no slot can hold it, or -1. */
static int put(const slots_object *self, slot *one, PyObject *grad)
{
    pli_tensor read;
    if (pli_tensor_read(self->state, grad, "a gradient", &read) != 0) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    if (!pli_layout_equal(&read.layout, one->layout)) {
        if (read.layout.dtype != one->layout->dtype)
            return 0;
        return pli_slots_call(one->views[0], one->is_used ? "add_" : "copy_", grad) != 0
                   ? -1
                   : 1;
    }
    const void *in[2] = {one->at[0], read.data};
    if (one->is_used)
        pli_slots_sum(self, one, in, 2, one->at[0]);
    else if (read.layout.n_elems > 0)
        memcpy(one->at[0], read.data, pli_layout_bytes(one->layout));
    return 1;
}

typedef enum grad_place { GRAD_ABSENT, GRAD_IN_SLOT, GRAD_STRAYS } grad_place;

/* Moves `grad`, the parameter's .grad or None, into the slot; one that no slot can hold
 * stays.  A grad_place, or -1. */
static int take_grad(const slots_object *self, slot *one, PyObject *grad)
{
    if (grad == Py_None)
        return GRAD_ABSENT;
    const int has_put = put(self, one, grad);
    if (has_put < 1)
        return has_put < 0 ? -1 : GRAD_STRAYS;
    one->is_used = 1;
    if (PyObject_SetAttr(one->param, self->state->str_grad, Py_None) != 0)
        return -1;
    return GRAD_IN_SLOT;
}

static PyObject *tap_call(PyObject *object, PyObject *param)
{
    const tap_object *tap = (const tap_object *)object;
    if (tap->slots == NULL)
        Py_RETURN_NONE;
    PyObject *grad = PyObject_GetAttr(param, tap->slots->state->str_grad);
    const int status =
        grad == NULL ? -1 : take_grad(tap->slots, &tap->slots->slots[tap->index], grad);
    Py_XDECREF(grad);
    if (status < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef tap_call_def = {"paceline_tap", tap_call, METH_O,
                                   "paceline_tap($self, param, /)\n--\n\nTake the "
                                   "gradient that backward has produced."};

PyObject *pli_slots_taps(PyObject *object, PyObject *arg)
{
    slots_object *self = (slots_object *)object;
    const module_state *state = state_of(object);
    const size_t least = PyLong_AsSize_t(arg);
    if (least == (size_t)-1 && PyErr_Occurred())
        return NULL;
    PyObject *taps = PyList_New((Py_ssize_t)self->n_slots);
    for (size_t i = 0; taps != NULL && i < self->n_slots; i++) {
        slot *one = &self->slots[i];
        if (pli_layout_bytes(one->layout) < least) {
            PyList_SET_ITEM(taps, (Py_ssize_t)i, Py_NewRef(Py_None));
            continue;
        }
        if (one->tap == NULL)
            one->tap = PyObject_New(tap_object, state->tap_type);
        if (one->tap == NULL) {
            Py_CLEAR(taps);
            break;
        }
        one->tap->slots = self;
        one->tap->index = i;
        PyObject *function = PyCFunction_New(&tap_call_def, (PyObject *)one->tap);
        if (function == NULL) {
            Py_CLEAR(taps);
            break;
        }
        PyList_SET_ITEM(taps, (Py_ssize_t)i, function);
    }
    return taps;
}

PyObject *pli_slots_open(PyObject *object, PyObject *ignored)
{
    const slots_object *self = (slots_object *)object;
    (void)ignored;
    for (size_t i = 0; i < self->n_slots; i++)
        self->slots[i].is_used = 0;
    Py_RETURN_NONE;
}

PyObject *pli_slots_sweep(PyObject *object, PyObject *ignored)
{
    const slots_object *self = (slots_object *)object;
    PyObject *mask = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->n_slots);
    int has_strays = 0;
    (void)ignored;
    for (size_t i = 0; mask != NULL && i < self->n_slots; i++) {
        slot *one = &self->slots[i];
        PyObject *grad = PyObject_GetAttr(one->param, self->state->str_grad);
        const int status = grad == NULL ? -1 : take_grad(self, one, grad);
        Py_XDECREF(grad);
        if (status < 0)
            Py_CLEAR(mask);
        else
            PyBytes_AS_STRING(mask)[i] = (char)one->is_used;
        has_strays |= status == GRAD_STRAYS;
    }
    PyObject *result =
        mask != NULL ? PyTuple_Pack(2, mask, has_strays ? Py_True : Py_False) : NULL;
    Py_XDECREF(mask);
    return result;
}

PyObject *pli_slots_strays(PyObject *object, PyObject *ignored)
{
    const slots_object *self = (slots_object *)object;
    PyObject *strays = PyList_New(0);
    (void)ignored;
    for (size_t i = 0; strays != NULL && i < self->n_slots; i++) {
        PyObject *param = self->slots[i].param;
        PyObject *grad = PyObject_GetAttr(param, self->state->str_grad);
        int status = grad != NULL ? 0 : -1;
        if (grad != NULL && grad != Py_None) {
            PyObject *pair = Py_BuildValue("nO", (Py_ssize_t)i, grad);
            if (pair == NULL || PyList_Append(strays, pair) != 0 ||
                PyObject_SetAttr(param, self->state->str_grad, Py_None) != 0)
                status = -1;
            Py_XDECREF(pair);
        }
        Py_XDECREF(grad);
        if (status != 0)
            Py_CLEAR(strays);
    }
    return strays;
}

/* ---- life ----------------------------------------------------------------------- */

static void tap_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyType_Slot tap_slots[] = {
    {Py_tp_dealloc, tap_dealloc},
    {Py_tp_doc, "A parameter's hook in a replica; made by Slots alone."},
    {0, NULL},
};

PyType_Spec pli_tap_spec = {
    .name = "paceline._native.Tap",
    .basicsize = sizeof(tap_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = tap_slots,
};
