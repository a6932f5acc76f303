/* buffers.c - one rank's buffers travel with each step, in the round of the gradients.
 *
 * That rank is the step's root: rank 0, unless it has joined (reducer_join.c).  The
 * other ranks take them over at the end of backward.  Where more forwards await
 * their backward, whose graphs may have saved the buffers, that is put off until the
 * next forward or state_dict(), and a buffer that somebody else has written or replaced
 * meanwhile (a checkpoint was loaded) is left as it is.
 *
 * On a device it is always put off: no value can be looked at without waiting for the
 * device, so every buffer is overwritten, and a graph that saved one could not be run
 * backward again.  The next forward is where torch does it, too.
 */
#include "grads.h"

#include <string.h>

#include "../core/alloc.h"

typedef enum direction { TO_DENSE, FROM_DENSE } direction;

/* Copies a tensor's elements, in the order of their indices, to or from one block. */
static void move_elements(const pli_tensor *tensor, char *dense, direction way)
{
    const pli_layout *layout = &tensor->layout;
    const size_t elem_bytes = pl_dtype_bytes(layout->dtype);
    int64_t index[PLI_MAX_DIMS] = {0};
    char *data = tensor->data;
    for (size_t e = 0; e < layout->n_elems; e++, dense += elem_bytes) {
        memcpy(way == TO_DENSE ? dense : data, way == TO_DENSE ? data : dense,
               elem_bytes);
        for (int d = layout->n_dims - 1; d >= 0; d--) {
            data += layout->dims[d].stride * (int64_t)elem_bytes;
            if (++index[d] < layout->dims[d].size)
                break;
            data -= layout->dims[d].stride * layout->dims[d].size * (int64_t)elem_bytes;
            index[d] = 0;
        }
    }
}

/* A dense one as it lies in memory: the strides are every rank's. */
static void copy_out(const pli_tensor *tensor, char *block)
{
    if (pli_layout_is_dense(&tensor->layout))
        memcpy(block, tensor->data, pli_layout_bytes(&tensor->layout));
    else
        move_elements(tensor, block, TO_DENSE);
}

static void copy_in(const pli_tensor *tensor, char *block)
{
    if (pli_layout_is_dense(&tensor->layout))
        memcpy(tensor->data, block, pli_layout_bytes(&tensor->layout));
    else
        move_elements(tensor, block, FROM_DENSE);
}

static int read_buffer(reducer_object *self, const grad_buffer *buffer, PyObject **out,
                       pli_tensor *tensor)
{
    const module_state *state = state_of((PyObject *)self);
    PyObject *object = PyDict_GetItemWithError(buffer->owner, buffer->name);
    if (object == NULL) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_RuntimeError,
                         "buffer '%U' was removed after wrapping: wrap the model again",
                         buffer->name);
        return -1;
    }
    if (pli_tensor_read_on(state, self->place, object, "a buffer", tensor) != 0)
        return -1;
    if (pli_layout_bytes(&tensor->layout) != buffer->n_bytes) {
        PyErr_Format(PyExc_RuntimeError,
                     "buffer '%U' changed its size or type after wrapping: wrap the "
                     "model again, or wrap it with broadcast_buffers=False",
                     buffer->name);
        return -1;
    }
    *out = Py_NewRef(object);
    return 0;
}

/* ---- a device --------------------------------------------------------------------
 */

/* A tensor that is not dense goes by torch's own copy, elements in row-major order. */
static int launch_with_holes(reducer_object *self, PyObject *object,
                             const pli_tensor *tensor, char *block, direction way)
{
    pli_layout layout = tensor->layout;
    pli_layout_make_row_major(&layout);
    PyObject *dense =
        pli_tensor_borrow(state_of((PyObject *)self), self->place, block, &layout);
    PyObject *detached = PyObject_CallMethod(object, "detach", NULL);
    PyObject *result = NULL;
    if (dense != NULL && detached != NULL)
        result = way == TO_DENSE ? PyObject_CallMethod(dense, "copy_", "O", detached)
                                 : PyObject_CallMethod(detached, "copy_", "O", dense);
    Py_XDECREF(result);
    Py_XDECREF(detached);
    Py_XDECREF(dense);
    return result != NULL ? 0 : -1;
}

static int launch_one(reducer_object *self, PyObject *object, const pli_tensor *tensor,
                      const grad_buffer *buffer, direction way)
{
    char *block = (char *)pl_reducer_extra(self->reducer) + buffer->offset;
    if (!pli_layout_is_dense(&tensor->layout))
        return launch_with_holes(self, object, tensor, block, way);
    pli_launch_note(self, way == TO_DENSE ? block : tensor->data,
                    way == TO_DENSE ? tensor->data : block, &tensor->layout);
    return 0;
}

/* All of them, in one launch. */
static int launch_out(reducer_object *self)
{
    for (size_t b = 0; b < self->n_buffers; b++) {
        PyObject *object = NULL;
        pli_tensor tensor;
        if (read_buffer(self, &self->buffers[b], &object, &tensor) != 0)
            return -1;
        /* The module has it, whose dict nobody changes before the launch. */
        Py_DECREF(object);
        if (launch_one(self, object, &tensor, &self->buffers[b], TO_DENSE) != 0)
            return -1;
    }
    return pli_launch_copies(self, self->stream);
}

/* ---- packing -----------------------------------------------------------------------
 */

int pli_buffers_pack(reducer_object *self)
{
    char *extra = pl_reducer_extra(self->reducer);
    /* A group whose collectives do nothing leaves each rank what it has. */
    if (pl_comm_rank(self->comm) != pl_reducer_root(self->reducer) &&
        !pli_comm_is_relayed(self->comm))
        return 0;
    if (pli_is_on_device(self))
        return launch_out(self);
    for (size_t b = 0; b < self->n_buffers; b++) {
        const grad_buffer *buffer = &self->buffers[b];
        PyObject *object = NULL;
        pli_tensor tensor;
        if (read_buffer(self, buffer, &object, &tensor) != 0)
            return -1;
        copy_out(&tensor, extra + buffer->offset);
        Py_DECREF(object);
    }
    return 0;
}

/* A tensor's version counter, or -1 with an exception. */
static long version_of(PyObject *tensor)
{
    PyObject *version = PyObject_GetAttrString(tensor, "_version");
    const long number = version != NULL ? PyLong_AsLong(version) : -1;
    Py_XDECREF(version);
    return number;
}

/* 1 or 0, or -1. */
static int has_values(const module_state *state, const pli_tensor *tensor,
                      const char *values)
{
    const size_t n_bytes = pli_layout_bytes(&tensor->layout);
    char *mine = NULL;
    if (n_bytes == 0)
        return 1;
    if (pli_layout_is_dense(&tensor->layout))
        return memcmp(tensor->data, values, n_bytes) == 0;
    if (pli_check(state, pli_calloc(n_bytes, 1, "a buffer's copy", &mine)) != 0)
        return -1;
    copy_out(tensor, mine);
    const int is_same = memcmp(mine, values, n_bytes) == 0;
    pli_free(mine);
    return is_same;
}

/* Overwrites one buffer, unless it has the values already: then no graph that saved it
 * need be told of a change. */
static int overwrite(reducer_object *self, const pli_tensor *tensor, PyObject *object,
                     const grad_buffer *buffer)
{
    const module_state *state = state_of((PyObject *)self);
    char *values = (char *)pl_reducer_extra(self->reducer) + buffer->offset;
    const int is_same = has_values(state, tensor, values);
    if (is_same != 0)
        return is_same < 0 ? -1 : 0;
    copy_in(tensor, values);
    PyObject *result = PyObject_CallOneArg(state->increment_version, object);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* Remembers each buffer as it is, to take it over later. */
static int put_off(reducer_object *self)
{
    for (size_t b = 0; b < self->n_buffers; b++) {
        grad_buffer *buffer = &self->buffers[b];
        PyObject *object = NULL;
        pli_tensor tensor;
        if (read_buffer(self, buffer, &object, &tensor) != 0)
            return -1;
        Py_XSETREF(buffer->seen, object);
        buffer->version = version_of(object);
        if (buffer->version < 0)
            return -1;
    }
    self->buffers_state = BUFFERS_RECEIVED;
    return 0;
}

int pli_buffers_receive(reducer_object *self)
{
    if (self->n_buffers == 0 ||
        pl_comm_rank(self->comm) == pl_reducer_root(self->reducer))
        return 0;
    if (!pl_reducer_root_is_active(self->reducer)) {
        self->buffers_state = BUFFERS_CURRENT; /* what was put off is overwritten */
        return 0;
    }
    if (self->n_pending_forwards > 0 || pli_is_on_device(self))
        return put_off(self);
    for (size_t b = 0; b < self->n_buffers; b++) {
        PyObject *object = NULL;
        pli_tensor tensor;
        if (read_buffer(self, &self->buffers[b], &object, &tensor) != 0)
            return -1;
        const int status = overwrite(self, &tensor, object, &self->buffers[b]);
        Py_DECREF(object);
        if (status != 0)
            return -1;
    }
    self->buffers_state = BUFFERS_CURRENT;
    return 0;
}

/* 1 where what was put off still holds for a buffer, which is read then; 0 where
 * somebody has written or replaced it; -1. */
static int is_as_seen(reducer_object *self, const grad_buffer *buffer, PyObject **out,
                      pli_tensor *tensor)
{
    if (PyDict_GetItem(buffer->owner, buffer->name) != buffer->seen)
        return 0;
    if (read_buffer(self, buffer, out, tensor) != 0)
        return -1;
    const long version = version_of(*out);
    return version < 0 ? -1 : version == buffer->version;
}

static int launch_in(reducer_object *self)
{
    const module_state *state = state_of((PyObject *)self);
    PyObject *written = PyList_New(0);
    int status = written != NULL ? pli_launch_look(self) : -1;
    for (size_t b = 0; b < self->n_buffers; b++) {
        grad_buffer *buffer = &self->buffers[b];
        PyObject *object = NULL;
        pli_tensor tensor;
        const int is_to = status == 0 ? is_as_seen(self, buffer, &object, &tensor) : 0;
        if (is_to < 0)
            status = -1;
        else if (is_to && (launch_one(self, object, &tensor, buffer, FROM_DENSE) != 0 ||
                           PyList_Append(written, object) != 0))
            status = -1;
        Py_XDECREF(object);
    }
    if (status == 0)
        status = pli_launch_copies(self, self->stream);
    if (status == 0 && PyList_GET_SIZE(written) > 0) {
        PyObject *result = PyObject_CallOneArg(state->increment_version, written);
        Py_XDECREF(result);
        status = result != NULL ? 0 : -1;
    }
    self->n_moves = 0;
    Py_XDECREF(written);
    return status;
}

static int write_in(reducer_object *self)
{
    int status = 0;
    for (size_t b = 0; status == 0 && b < self->n_buffers; b++) {
        PyObject *object = NULL;
        pli_tensor tensor;
        const int is_to = is_as_seen(self, &self->buffers[b], &object, &tensor);
        status = is_to < 0 ? -1 : 0;
        if (is_to > 0)
            status = overwrite(self, &tensor, object, &self->buffers[b]);
        Py_XDECREF(object);
    }
    return status;
}

int pli_buffers_apply(reducer_object *self)
{
    if (self->buffers_state == BUFFERS_CURRENT)
        return 0;
    self->buffers_state = BUFFERS_CURRENT;
    const int status = pli_is_on_device(self) ? launch_in(self) : write_in(self);
    for (size_t b = 0; b < self->n_buffers; b++)
        Py_CLEAR(self->buffers[b].seen);
    /* Replays of a captured step bring new values, and nobody tells. */
    return status == 0 && self->captured != NULL ? put_off(self) : status;
}
