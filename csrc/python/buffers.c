/* buffers.c - rank 0's buffers travel with each step, and are taken over later.
 *
 * They are sent at the end of backward, in the same round as the gradients, so they
 * cost no waiting of their own.  They are written into the module's tensors at the next
 * forward only: between two forwards whose backwards are still to come nothing is sent,
 * so nothing that a graph has saved is overwritten.
 */
#include "grads.h"

#include <string.h>

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
    if (pli_tensor_read(state, object, "a buffer", tensor) != 0)
        return -1;
    if (pli_layout_bytes(&tensor->layout) != buffer->n_bytes ||
        !pli_layout_is_dense(&tensor->layout)) {
        PyErr_Format(
            PyExc_RuntimeError,
            "buffer '%U' changed its size, type or layout after wrapping: wrap "
            "the model again",
            buffer->name);
        return -1;
    }
    *out = Py_NewRef(object);
    return 0;
}

int pli_buffers_pack(reducer_object *self)
{
    char *extra = pl_reducer_extra(self->reducer);
    self->buffers_state = self->n_buffers > 0 ? BUFFERS_RECEIVED : BUFFERS_CURRENT;
    if (pl_comm_rank(self->comm) != 0)
        return 0;
    self->buffers_state = BUFFERS_CURRENT;
    for (size_t b = 0; b < self->n_buffers; b++) {
        const grad_buffer *buffer = &self->buffers[b];
        PyObject *object = NULL;
        pli_tensor tensor;
        if (read_buffer(self, buffer, &object, &tensor) != 0)
            return -1;
        memcpy(extra + buffer->offset, tensor.data, buffer->n_bytes);
        Py_DECREF(object);
    }
    return 0;
}

int pli_buffers_apply(reducer_object *self)
{
    const module_state *state = state_of((PyObject *)self);
    const char *extra = pl_reducer_extra(self->reducer);
    if (self->buffers_state == BUFFERS_CURRENT)
        return 0;
    self->buffers_state = BUFFERS_CURRENT;
    for (size_t b = 0; b < self->n_buffers; b++) {
        const grad_buffer *buffer = &self->buffers[b];
        PyObject *object = NULL;
        pli_tensor tensor;
        if (read_buffer(self, buffer, &object, &tensor) != 0)
            return -1;
        /* Equal already, most of the time for all but statistics: then no graph that
         * saved it need be told of a change. */
        PyObject *result = Py_None;
        if (memcmp(tensor.data, extra + buffer->offset, buffer->n_bytes) != 0) {
            memcpy(tensor.data, extra + buffer->offset, buffer->n_bytes);
            result = PyObject_CallOneArg(state->increment_version, object);
            Py_XDECREF(result);
        }
        Py_DECREF(object);
        if (result == NULL)
            return -1;
    }
    return 0;
}
