/* replica_grads_type.c - paceline._native.ReplicaGrads, and the caller's side: what
 * replicas have left is added to .grad, in the order of replicas, 16-bit floats in fp32
 * with one rounding. See replica_grads.h.
 */
#include "replica_grads.h"

#include <string.h>

#include "core/alloc.h"
#include "replicas/reduce_add.h"

/* ---- construction --------------------------------------------------------------- */

static int read_views(const module_state *state, replica_grads_object *self, size_t i,
                      PyObject *memory)
{
    grad_slot *slot = &self->slots[i];
    if (pli_check(state, pli_calloc((size_t)self->n_rows, sizeof *slot->views, "slots",
                                    &slot->views)) != 0 ||
        pli_check(state, pli_calloc((size_t)self->n_rows, sizeof *slot->at, "slots",
                                    &slot->at)) != 0)
        return -1;
    for (int row = 0; row < self->n_rows; row++) {
        PyObject *views = PyList_GET_ITEM(memory, row);
        pli_tensor read;
        if (!PyList_Check(views) || (size_t)PyList_GET_SIZE(views) != self->n_slots) {
            PyErr_Format(PyExc_ValueError, "memory[%d] is %R: give a list of %zu views",
                         row, views, self->n_slots);
            return -1;
        }
        PyObject *view = PyList_GET_ITEM(views, (Py_ssize_t)i);
        if (pli_tensor_read(state, view, "a slot", &read) != 0)
            return -1;
        if (!pli_layout_is_dense(&read.layout) ||
            (row > 0 && !pli_layout_equal(&read.layout, slot->layout))) {
            PyErr_Format(PyExc_ValueError,
                         "memory[%d][%zu]: give dense views of one layout", row, i);
            return -1;
        }
        if (row == 0 &&
            pli_check(state, pli_layout_copy(&read.layout, &slot->layout)) != 0)
            return -1;
        slot->views[row] = Py_NewRef(view);
        slot->at[row] = read.data;
    }
    return 0;
}

static int fill(const module_state *state, replica_grads_object *self, PyObject *params,
                PyObject *memory)
{
    self->state = state;
    const size_t n = (size_t)PyList_GET_SIZE(params);
    if (pli_check(state, pli_cpu_backend_create(&self->backend)) != 0 ||
        pli_check(state,
                  pli_calloc(n + 1, sizeof *self->slots, "slots", &self->slots)) != 0)
        return -1;
    self->n_slots = n;
    for (size_t i = 0; i < n; i++)
        self->slots[i].param = Py_NewRef(PyList_GET_ITEM(params, (Py_ssize_t)i));
    for (size_t i = 0; i < n; i++)
        if (read_views(state, self, i, memory) != 0)
            return -1;
    return 0;
}

static PyObject *replica_grads_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"params", "memory", NULL};
    const module_state *state = state_of_type(type);
    PyObject *params, *memory;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!:ReplicaGrads", names,
                                     &PyList_Type, &params, &PyList_Type, &memory))
        return NULL;
    const Py_ssize_t n_rows = PyList_GET_SIZE(memory);
    if (n_rows < 1 || n_rows >= PL_MAX_RANKS) {
        PyErr_Format(PyExc_ValueError, "memory has %zd rows: give 1 to %d", n_rows,
                     PL_MAX_RANKS - 1);
        return NULL;
    }
    replica_grads_object *self = (replica_grads_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->n_rows = (int)n_rows;
    if (fill(state, self, params, memory) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* ---- the caller's side ---------------------------------------------------------- */

int pli_call_method(PyObject *object, const char *name, PyObject *arg)
{
    PyObject *result = PyObject_CallMethod(object, name, "O", arg);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* Checks what says which slots hold a gradient: bytes of every row. */
static int check_masks(const replica_grads_object *self, PyObject *masks)
{
    if (!PyTuple_Check(masks)) {
        PyErr_Format(PyExc_TypeError, "masks is %R: give a tuple", masks);
        return -1;
    }
    if (PyTuple_GET_SIZE(masks) > self->n_rows) {
        PyErr_Format(PyExc_ValueError, "masks has %zd entries: there are %d rows",
                     PyTuple_GET_SIZE(masks), self->n_rows);
        return -1;
    }
    for (Py_ssize_t row = 0; row < PyTuple_GET_SIZE(masks); row++) {
        PyObject *mask = PyTuple_GET_ITEM(masks, row);
        if (PyBytes_Check(mask) && (size_t)PyBytes_GET_SIZE(mask) == self->n_slots)
            continue;
        PyErr_Format(PyExc_ValueError, "masks[%zd] is %R: give %zu bytes", row, mask,
                     self->n_slots);
        return -1;
    }
    return 0;
}

/* Which rows hold a gradient of parameter i. */
static int rows_of(const replica_grads_object *self, PyObject *masks, size_t i,
                   int *rows)
{
    int n = 0;
    for (int row = 0; row < (int)PyTuple_GET_SIZE(masks) && row < self->n_rows; row++)
        if (PyBytes_AS_STRING(PyTuple_GET_ITEM(masks, row))[i])
            rows[n++] = row;
    return n;
}

static int reduce(const replica_grads_object *self, const grad_slot *slot,
                  const void **rows, int n_rows, void *to)
{
    return pli_check(self->state,
                     pli_reduce_add(self->backend, rows, n_rows, to,
                                    slot->layout->dtype, slot->layout->n_elems));
}

/* A new tensor with the sum of some rows. */
static PyObject *sum_of(const replica_grads_object *self, const grad_slot *slot,
                        const int *rows, int n_rows)
{
    const module_state *state = self->state;
    const void *in[PL_MAX_RANKS];
    pli_tensor to;
    PyObject *sum = PyObject_CallOneArg(state->empty_like, slot->views[0]);
    for (int r = 0; r < n_rows; r++)
        in[r] = slot->at[rows[r]];
    if (sum != NULL && (pli_tensor_read(state, sum, "a gradient", &to) != 0 ||
                        reduce(self, slot, in, n_rows, to.data) != 0))
        Py_CLEAR(sum);
    return sum;
}

/* grad += rows, in place; 0 or -1. */
static int add_rows(const replica_grads_object *self, const grad_slot *slot,
                    PyObject *grad, const int *rows, int n_rows)
{
    const module_state *state = self->state;
    const void *in[PL_MAX_RANKS];
    pli_tensor to;
    if (pli_tensor_read(state, grad, "a gradient", &to) == 0 &&
        pli_layout_equal(&to.layout, slot->layout)) {
        in[0] = to.data;
        for (int r = 0; r < n_rows; r++)
            in[r + 1] = slot->at[rows[r]];
        return reduce(self, slot, in, n_rows + 1, to.data);
    }
    PyErr_Clear();
    for (int r = 0; r < n_rows; r++)
        if (pli_call_method(grad, "add_", slot->views[rows[r]]) != 0)
            return -1;
    return 0;
}

static int add_one(const replica_grads_object *self, const grad_slot *slot,
                   const int *rows, int n_rows, PyObject *touched)
{
    PyObject *wants = PyObject_GetAttr(slot->param, self->state->str_requires_grad);
    Py_XDECREF(wants); /* True and False live on */
    if (wants != Py_True)
        return wants == NULL ? -1 : 0; /* frozen since its forward */
    PyObject *grad = PyObject_GetAttr(slot->param, self->state->str_grad);
    int status = -1;
    if (grad == Py_None) {
        PyObject *sum = sum_of(self, slot, rows, n_rows);
        status = sum != NULL ? PyObject_SetAttr(slot->param, self->state->str_grad, sum)
                             : -1;
        Py_XDECREF(sum);
    } else if (grad != NULL) {
        status = add_rows(self, slot, grad, rows, n_rows);
        if (status == 0)
            status = PyList_Append(touched, grad);
    }
    Py_XDECREF(grad);
    return status;
}

static PyObject *replica_grads_add(PyObject *object, PyObject *masks)
{
    PLI_ENTER(object);
    const replica_grads_object *self = (replica_grads_object *)object;
    const module_state *state = state_of(object);
    int rows[PL_MAX_RANKS];
    if (check_masks(self, masks) != 0)
        return NULL;
    PyObject *touched = PyList_New(0);
    int status = touched != NULL ? 0 : -1;
    for (size_t i = 0; status == 0 && i < self->n_slots; i++) {
        const int n_rows = rows_of(self, masks, i, rows);
        if (n_rows > 0)
            status = add_one(self, &self->slots[i], rows, n_rows, touched);
    }
    if (status == 0 && PyList_GET_SIZE(touched) > 0)
        status = pli_increment_versions(state, touched);
    Py_XDECREF(touched);
    if (status != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *replica_grads_take(PyObject *object, PyObject *masks)
{
    PLI_ENTER(object);
    const replica_grads_object *self = (replica_grads_object *)object;
    int rows[PL_MAX_RANKS];
    if (check_masks(self, masks) != 0)
        return NULL;
    PyObject *sums = PyList_New((Py_ssize_t)self->n_slots);
    for (size_t i = 0; sums != NULL && i < self->n_slots; i++) {
        const int n_rows = rows_of(self, masks, i, rows);
        pli_list_put(&sums, (Py_ssize_t)i,
                     n_rows > 0 ? sum_of(self, &self->slots[i], rows, n_rows)
                                : Py_NewRef(Py_None));
    }
    return sums;
}

static PyObject *replica_grads_hooked(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const replica_grads_object *self = (replica_grads_object *)object;
    PyObject *mask = NULL;
    (void)ignored;
    for (size_t i = 0; i < self->n_slots; i++) {
        PyObject *param = self->slots[i].param;
        int is_hooked =
            pli_is_true(PyObject_GetAttr(param, self->state->name__backward_hooks));
        if (is_hooked == 0)
            is_hooked = pli_is_true(
                PyObject_GetAttr(param, self->state->name__post_accumulate_grad_hooks));
        if (is_hooked > 0 && mask == NULL) {
            mask = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->n_slots);
            if (mask != NULL)
                memset(PyBytes_AS_STRING(mask), 0, self->n_slots);
        }
        if (is_hooked < 0 || (is_hooked > 0 && mask == NULL)) {
            Py_XDECREF(mask);
            return NULL;
        }
        if (is_hooked)
            PyBytes_AS_STRING(mask)[i] = 1;
    }
    return mask != NULL ? mask : Py_NewRef(Py_None);
}

/* ---- life ----------------------------------------------------------------------- */

static int replica_grads_traverse(PyObject *object, visitproc visit, void *arg)
{
    const replica_grads_object *self = (replica_grads_object *)object;
    Py_VISIT(Py_TYPE(object));
    for (size_t i = 0; i < self->n_slots; i++) {
        Py_VISIT(self->slots[i].param);
        for (int row = 0; self->slots[i].views != NULL && row < self->n_rows; row++)
            Py_VISIT(self->slots[i].views[row]);
    }
    return 0;
}

static int replica_grads_clear(PyObject *object)
{
    replica_grads_object *self = (replica_grads_object *)object;
    const size_t n = self->n_slots;
    self->n_slots = 0;
    for (size_t i = 0; i < n; i++) {
        grad_slot *slot = &self->slots[i];
        if (slot->hook != NULL)
            slot->hook->slots = NULL;
        Py_CLEAR(slot->hook);
        Py_CLEAR(slot->param);
        for (int row = 0; slot->views != NULL && row < self->n_rows; row++)
            Py_CLEAR(slot->views[row]);
        pli_free(slot->views);
        pli_free(slot->at);
        pli_free(slot->layout);
        *slot = (grad_slot){0};
    }
    return 0;
}

static void replica_grads_dealloc(PyObject *object)
{
    replica_grads_object *self = (replica_grads_object *)object;
    PyObject_GC_UnTrack(object);
    (void)replica_grads_clear(object);
    pli_free(self->slots);
    pli_backend_destroy(self->backend);
    pli_object_free(object);
}

static PyMethodDef replica_grads_methods[] = {
    {"hooks", pli_replica_grads_hooks, METH_O,
     "hooks($self, least_bytes, /)\n--\n\nReturn a hook for each parameter of that "
     "size: "
     "it moves .grad into row 0."},
    {"open", pli_replica_grads_open, METH_NOARGS,
     "open($self, /)\n--\n\nForget what the slots hold: hooks overwrite it."},
    {"shut", pli_replica_grads_shut, METH_O,
     "shut($self, is_shut, /)\n--\n\nHave hooks leave .grad where it is, or take it."},
    {"sweep", pli_replica_grads_sweep, METH_NOARGS,
     "sweep($self, /)\n--\n\nMove every .grad that is left into row 0; return the mask "
     "of the slots in use, and whether there are fallbacks."},
    {"fallbacks", pli_replica_grads_fallbacks, METH_NOARGS,
     "fallbacks($self, /)\n--\n\nReturn (index, gradient) of what is in no slot, and "
     "drop it."},
    {"add", replica_grads_add, METH_O,
     "add($self, masks, /)\n--\n\nAdd every row's gradients to .grad of "
     "the parameters."},
    {"take", replica_grads_take, METH_O,
     "take($self, masks, /)\n--\n\nReturn each parameter's sum over rows, "
     "or None."},
    {"hooked", replica_grads_hooked, METH_NOARGS,
     "hooked($self, /)\n--\n\nReturn the mask of parameters with hooks; None: none "
     "has."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot replica_grads_slots[] = {
    {Py_tp_new, replica_grads_new},
    {Py_tp_dealloc, replica_grads_dealloc},
    {Py_tp_traverse, replica_grads_traverse},
    {Py_tp_clear, replica_grads_clear},
    {Py_tp_methods, replica_grads_methods},
    {Py_tp_doc,
     "ReplicaGrads(params, memory)\n--\n\nParameters, and rows of views where "
     "replicas leave their gradients."},
    {0, NULL},
};

PyType_Spec pli_replica_grads_spec = {
    .name = "paceline._native.ReplicaGrads",
    .basicsize = sizeof(replica_grads_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = replica_grads_slots,
};
