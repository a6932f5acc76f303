/* autograd_context.c - a step whose gradients torch.distributed.autograd keeps in a
 * context, and not in `.grad`.
 *
 * That a gradient has come is all that is recorded in the backward; at its end, all are
 * read from the context, and the results are written to them in place.
 */
#include "autograd_context.h"

int pli_context_open(reducer_object *self)
{
    if (self->context.task == NO_CONTEXT || self->context.homes != NULL)
        return 0;
    PyObject *sequence =
        PyObject_CallFunction(self->context.all, "l", self->context.task);
    PyObject *homes = sequence != NULL ? PySequence_Tuple(sequence) : NULL;
    Py_XDECREF(sequence);
    if (homes == NULL)
        return -1;
    if (PyTuple_GET_SIZE(homes) != (Py_ssize_t)self->n_slots) {
        PyErr_Format(PyExc_ValueError, "contexts returned %R: give one for each of %zu",
                     homes, self->n_slots);
        Py_DECREF(homes);
        return -1;
    }
    self->context.homes = homes;
    return 0;
}

void pli_context_close(reducer_object *self)
{
    self->context.task = NO_CONTEXT;
    Py_CLEAR(self->context.homes);
}
