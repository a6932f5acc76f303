/* torch_step.c - operations on torch's tensors for a step, and what else it needs of
 * Python.
 *
 * An operation that fails leaves its exception set, and returns a failure with the
 * exception's text; pli_check() keeps the exception.
 */
#include "autograd_hooks.h"

static PyObject *object_of(pl_grad *grad)
{
    return (PyObject *)grad;
}

/* Turns 0 or -1 into a status. */
static pl_status status_of(int status)
{
    return status == 0 ? PL_OK : pli_callback_failed();
}

/* Hands over a new reference, or NULL with an exception. */
static pl_status give(PyObject *object, pl_grad **out)
{
    if (object == NULL)
        return pli_callback_failed();
    *out = (pl_grad *)object;
    return PL_OK;
}

/* ---- a parameter's gradient ----------------------------------------------------- */

/* The object whose `.grad` is the gradient of parameter i; borrowed. */
static PyObject *home_of(const reducer_object *self, size_t i)
{
    return self->context.homes != NULL
               ? PyTuple_GET_ITEM(self->context.homes, (Py_ssize_t)i)
               : self->params[i].param;
}

static pl_status find(void *context, size_t i, pl_grad **out)
{
    const reducer_object *self = context;
    PyObject *grad =
        PyObject_GetAttr(home_of(self, i), state_of_reducer(self)->name_grad);
    if (grad != Py_None)
        return give(grad, out);
    Py_DECREF(grad);
    *out = NULL;
    return PL_OK;
}

static int set_grad(const reducer_object *self, size_t i, PyObject *grad)
{
    return PyObject_SetAttr(home_of(self, i), state_of_reducer(self)->name_grad, grad);
}

static pl_status put(void *context, size_t i, pl_grad *grad)
{
    return status_of(set_grad(context, i, grad != NULL ? object_of(grad) : Py_None));
}

static void put_back(void *context, size_t i, pl_grad *grad)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (set_grad(context, i, object_of(grad)) != 0)
        PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

static void hold(pl_grad *grad)
{
    Py_INCREF(object_of(grad));
}

static void drop(pl_grad *grad)
{
    Py_DECREF(object_of(grad));
}

/* ---- reading -------------------------------------------------------------------- */

static int densify(const module_state *state, PyObject **grad, unsigned *n_sparse_dims)
{
    PyObject *pair = PyObject_CallOneArg(state->sparse_densify, *grad);
    PyObject *dense = *grad;
    int n_dims = 0;
    if (pair == NULL)
        return -1;
    if (pair != Py_None && !PyArg_ParseTuple(pair, "Oi", &dense, &n_dims)) {
        Py_DECREF(pair);
        return -1;
    }
    Py_SETREF(*grad, Py_NewRef(dense));
    Py_DECREF(pair);
    *n_sparse_dims = (unsigned)n_dims;
    return 0;
}

/* If reading fails, the gradient is sparse; the next ones are then taken for sparse
 * until a dense one comes. */
static int read_dense(const reducer_object *self, PyObject **grad,
                      unsigned *n_sparse_dims, pli_tensor *out)
{
    static const char what[] = "a parameter's gradient";
    const module_state *state = state_of_reducer(self);
    if (*n_sparse_dims == 0) {
        if (pli_tensor_read_grad(state, self->device.place, *grad, what, out) == 0)
            return 0;
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return -1;
        PyErr_Clear();
    }
    if (densify(state, grad, n_sparse_dims) != 0)
        return -1;
    return pli_tensor_read_any(state, self->device.place, *grad, what, out);
}

static pl_status read_arrived(void *context, pl_grad **grad, unsigned *n_sparse_dims,
                              pli_tensor *out)
{
    PyObject *object = object_of(*grad);
    const int status = read_dense(context, &object, n_sparse_dims, out);
    *grad = (pl_grad *)object;
    return status_of(status);
}

static pl_status read_tensor(void *context, pl_reading how, const char *what,
                             pl_grad *grad, pli_tensor *out)
{
    static int (*const readers[])(const module_state *, dl_device, PyObject *,
                                  const char *, pli_tensor *) = {
        [PL_READ_GRAD] = pli_tensor_read_grad,
        [PL_READ_ANY] = pli_tensor_read_any,
        [PL_READ_PLAIN] = pli_tensor_read_on,
    };
    const reducer_object *self = context;
    return status_of(readers[how](state_of_reducer(self), self->device.place,
                                  object_of(grad), what, out));
}

static pl_status find_buffer(void *context, size_t b, pl_grad **out)
{
    const reducer_buffer *buffer = &((reducer_object *)context)->buffers[b];
    PyObject *object = pli_dict_get(buffer->owner, buffer->name);
    if (object == NULL && PyErr_Occurred())
        return pli_callback_failed();
    if (object == Py_None)
        Py_CLEAR(object);
    *out = (pl_grad *)object;
    return PL_OK;
}

/* ---- new tensors, and writing --------------------------------------------------- */

/* Of a part of the memory's tensor; each dimension is a size and a stride. */
static PyObject *make_view(const reducer_object *self, const pl_place *place,
                           const pli_layout *layout)
{
    const char *memory = place->memory;
    PyObject *args = PyTuple_New(3 + 2 * layout->n_dims);
    if (args == NULL)
        return NULL;
    PyTuple_SET_ITEM(args, 0, Py_NewRef((PyObject *)self->comm->device_owner));
    PyTuple_SET_ITEM(args, 1, PyLong_FromSsize_t(memory - self->comm->device_memory));
    PyTuple_SET_ITEM(args, 2, PyUnicode_FromString(pl_dtype_text(layout->dtype)));
    for (int d = 0; d < layout->n_dims; d++) {
        const pli_dim *dim = &layout->dims[d];
        PyTuple_SET_ITEM(args, 3 + 2 * d, PyLong_FromLongLong(dim->size));
        PyTuple_SET_ITEM(args, 4 + 2 * d, PyLong_FromLongLong(dim->stride));
    }
    PyObject *view = NULL;
    if (!PyErr_Occurred())
        view = PyObject_CallObject(state_of_reducer(self)->view_of, args);
    Py_DECREF(args);
    return view;
}

/* Whether a view is still as it was made; the user may change it as any tensor. */
static int is_view_of(const reducer_object *self, PyObject *view, const pl_place *place,
                      const pli_layout *layout)
{
    const module_state *state = state_of_reducer(self);
    pli_tensor tensor;
    if (pli_is_true(PyObject_GetAttr(view, state->name_requires_grad)) != 0 ||
        pli_tensor_read_any(state, self->device.place, view, "a gradient's view",
                            &tensor) != 0) {
        PyErr_Clear();
        return 0;
    }
    return tensor.data == place->memory && pli_layout_equal(&tensor.layout, layout);
}

/* A parameter's is the same tensor in each step, as with torch's class. */
static PyObject *view_on_device(reducer_object *self, const pl_place *place,
                                const pli_layout *layout)
{
    if (place->slot == SIZE_MAX)
        return make_view(self, place, layout);
    PyObject **view = &self->params[place->slot].view;
    if (self->device.viewed != self->comm->device_memory)
        for (size_t i = 0; i < self->n_params; i++)
            Py_CLEAR(self->params[i].view);
    self->device.viewed = self->comm->device_memory;
    if (*view != NULL && !is_view_of(self, *view, place, layout))
        Py_CLEAR(*view);
    if (*view == NULL)
        *view = make_view(self, place, layout);
    return Py_XNewRef(*view);
}

static pl_status over(void *context, const pl_place *place, const pli_layout *layout,
                      pl_grad **out)
{
    reducer_object *self = context;
    const module_state *state = state_of_reducer(self);
    const pli_view view = {
        .window = place->window, .slot = place->slot, .offset = place->offset};
    if (pli_is_on_device(self))
        return give(view_on_device(self, place, layout), out);
    return give(place->window != NULL ? pli_tensor_view(state, &view, layout)
                                      : pli_tensor_borrow(state, place->memory, layout),
                out);
}

static pl_status empty_like(void *context, pl_grad *grad, pl_grad **out)
{
    const reducer_object *self = context;
    return give(
        PyObject_CallOneArg(state_of_reducer(self)->empty_like, object_of(grad)), out);
}

static pl_status clone_tensor(void *context, pl_grad *grad, pl_grad **out)
{
    PyObject *detached = PyObject_CallMethod(object_of(grad), "detach", NULL);
    PyObject *copy =
        detached != NULL ? PyObject_CallMethod(detached, "clone", NULL) : NULL;
    (void)context;
    Py_XDECREF(detached);
    return give(copy, out);
}

static pl_status copy(void *context, pl_grad *to, pl_grad *from)
{
    (void)context;
    return status_of(pli_tensor_overwrite(object_of(to), object_of(from)));
}

static pl_status add(void *context, pl_grad *to, pl_grad *from)
{
    (void)context;
    return status_of(
        pli_drop(PyObject_CallMethod(object_of(to), "add_", "O", object_of(from))));
}

static int increment_version(const module_state *state, PyObject *tensor)
{
    PyObject *alone = PyTuple_Pack(1, tensor);
    const int status = alone != NULL ? pli_increment_versions(state, alone) : -1;
    Py_XDECREF(alone);
    return status;
}

static pl_status note_write(void *context, pl_grad *grad)
{
    const reducer_object *self = context;
    return status_of(increment_version(state_of_reducer(self), object_of(grad)));
}

static pl_status n_writes(void *context, pl_grad *grad, long *out)
{
    (void)context;
    *out = pli_tensor_version(object_of(grad));
    return status_of(*out < 0 ? -1 : 0);
}

/* ---- sparse gradients ----------------------------------------------------------- */

/* Reads a tuple of numbers and values, which owns the memory, and perhaps the tensor
 * made of them; -1 if they do not fit the table. */
static int read_tuple(const module_state *state, PyObject *tuple, const pl_table *table,
                      pl_sparse_rows *out)
{
    PyObject *numbers, *values, *mean;
    pli_tensor tensor;
    if (!PyArg_ParseTuple(tuple, "OO|O", &numbers, &values, &mean))
        return -1;
    *out = (pl_sparse_rows){.n_rows = table->n_rows};
    if (numbers != Py_None) {
        if (pli_tensor_read(state, numbers, "row numbers", &tensor) != 0)
            return -1;
        out->n_rows = tensor.layout.n_elems;
        out->indices = out->n_rows > 0 ? tensor.data : pl_no_indices();
        if (tensor.layout.dtype != PL_I64)
            goto misfit;
    }
    if (pli_tensor_read(state, values, "a gradient's rows", &tensor) != 0)
        return -1;
    out->values = tensor.data;
    if (tensor.layout.dtype == table->dtype &&
        tensor.layout.n_elems == out->n_rows * table->row_elems)
        return 0;
misfit:
    return pli_error(PyExc_RuntimeError,
                     "a sparse gradient does not fit its parameter: wrap the model "
                     "again after changing its parameters");
}

static pl_status read_rows(void *context, size_t i, const pl_table *table,
                           pl_sparse_rows *rows, pl_grad **out)
{
    const reducer_object *self = context;
    const module_state *state = state_of_reducer(self);
    PyObject *tuple = PyObject_CallOneArg(state->sparse_read, home_of(self, i));
    if (tuple != NULL && tuple != Py_None && read_tuple(state, tuple, table, rows) != 0)
        Py_CLEAR(tuple);
    if (tuple != Py_None)
        return give(tuple, out);
    Py_DECREF(tuple);
    *out = NULL;
    return PL_OK;
}

static pl_status make_rows(void *context, size_t i, const pl_table *table,
                           const pl_sparse_rows *all, pl_sparse_rows *rows,
                           pl_grad **out)
{
    const reducer_object *self = context;
    const module_state *state = state_of_reducer(self);
    PyObject *param = self->params[i].param;
    PyObject *room =
        all->indices != NULL
            ? PyObject_CallFunction(state->sparse_room, "On", param,
                                    (Py_ssize_t)all->n_rows)
            : PyObject_CallFunction(state->sparse_room, "OO", param, Py_None);
    PyObject *mean = NULL;
    if (room != NULL && read_tuple(state, room, table, rows) == 0) {
        if (all->indices != NULL && rows->indices != NULL)
            memcpy(rows->indices, all->indices, all->n_rows * sizeof *all->indices);
        mean = Py_NewRef(PyTuple_GET_ITEM(room, 2));
    }
    Py_XDECREF(room); /* the mean owns the memory, too */
    return give(mean, out);
}

static pl_status to_sparse(void *context, pl_grad *grad, unsigned n_dims, pl_grad **out)
{
    (void)context;
    return give(PyObject_CallMethod(object_of(grad), "to_sparse", "I", n_dims), out);
}

/* Returns 1 if both have the same layout, 0, or -1. */
static int has_layout_of(PyObject *tensor, PyObject *other)
{
    PyObject *layout = PyObject_GetAttrString(tensor, "layout");
    PyObject *others = layout != NULL ? PyObject_GetAttrString(other, "layout") : NULL;
    const int is_same =
        others != NULL ? PyObject_RichCompareBool(layout, others, Py_EQ) : -1;
    Py_XDECREF(layout);
    Py_XDECREF(others);
    return is_same;
}

/* The gradient stays the same object, as in torch; a dense one keeps its memory. */
static int overwrite(const module_state *state, PyObject *grad, PyObject *mean)
{
    PyObject *is_sparse = PyObject_GetAttrString(mean, "is_sparse");
    int status = -1;
    if (is_sparse == Py_True)
        status = PyObject_SetAttr(grad, state->name_data, mean);
    else if (is_sparse != NULL)
        status = pli_tensor_overwrite(grad, mean);
    Py_XDECREF(is_sparse);
    return status == 0 ? increment_version(state, grad) : -1;
}

static pl_status put_mean(void *context, size_t i, pl_grad *mean)
{
    const module_state *state = state_of_reducer(context);
    pl_grad *grad = NULL;
    const pl_status st = find(context, i, &grad);
    if (st != PL_OK)
        return st;
    const int is_same =
        grad != NULL ? has_layout_of(object_of(grad), object_of(mean)) : 0;
    int status = is_same;
    if (is_same > 0)
        status = overwrite(state, object_of(grad), object_of(mean));
    Py_XDECREF(object_of(grad));
    return is_same == 0 ? put(context, i, mean) : status_of(status);
}

const pl_grad_ops pli_torch_grads = {
    .find = find,
    .read_arrived = read_arrived,
    .read = read_tensor,
    .hold = hold,
    .drop = drop,
    .put = put,
    .put_back = put_back,
    .over = over,
    .empty_like = empty_like,
    .clone = clone_tensor,
    .copy = copy,
    .add = add,
    .note_write = note_write,
    .n_writes = n_writes,
    .find_buffer = find_buffer,
    .read_rows = read_rows,
    .make_rows = make_rows,
    .to_sparse = to_sparse,
    .put_mean = put_mean,
};

/* ---- the host ------------------------------------------------------------------- */

static pl_status await_end(void *context, pl_end_origin origin)
{
    return status_of(pli_backward_end_queue(context, origin));
}

static pl_status is_recorded(void *context, int *out)
{
    const reducer_object *self = context;
    *out = pli_is_true(PyObject_CallNoArgs(state_of_reducer(self)->is_grad_enabled));
    return status_of(*out < 0 ? -1 : 0);
}

static int has_hooks(void *context, size_t i)
{
    return pli_has_user_hooks(&((reducer_object *)context)->params[i]);
}

static void *let_go(void *context)
{
    (void)context;
    return PyEval_SaveThread();
}

static void take_back(void *lock)
{
    PyEval_RestoreThread(lock);
}

static pl_status check_signals(void *context)
{
    (void)context;
    return status_of(PyErr_CheckSignals());
}

static pl_status current_stream(void *context, pl_stream **out)
{
    const reducer_object *self = context;
    *out = NULL;
    return status_of(
        pli_is_on_device(self)
            ? pli_gpu_current_stream(state_of_reducer(self), self->device.gpu, out)
            : 0);
}

static pl_status finished(void *context)
{
    reducer_object *self = context;
    Py_CLEAR(self->context.homes);
    if (self->on_finish == NULL || self->on_finish == Py_None)
        return PL_OK;
    PyObject *call = Py_NewRef(self->on_finish); /* the call may set another one */
    PyObject *result = PyObject_CallNoArgs(call);
    Py_DECREF(call);
    return status_of(pli_drop(result));
}

const pl_step_host pli_torch_host = {
    .await_end = await_end,
    .is_recorded = is_recorded,
    .has_hooks = has_hooks,
    .let_go = let_go,
    .take_back = take_back,
    .check_signals = check_signals,
    .current_stream = current_stream,
    .finished = finished,
};
