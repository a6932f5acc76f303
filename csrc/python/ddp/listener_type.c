/* listener_type.c - paceline._native.Listener, through which rank 0 makes a world. */
#include <stddef.h>

#include "world.h"

#include <structmember.h>

static PyObject *listener_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Listener", names))
        return NULL;
    listener_object *self = (listener_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (pli_check(state_of_type(type),
                  pli_listener_create(self->address, &self->listener)) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void listener_dealloc(PyObject *object)
{
    pli_listener_destroy(((listener_object *)object)->listener);
    pli_object_free(object);
}

static PyMemberDef listener_members[] = {
    {"address", T_STRING_INPLACE, offsetof(listener_object, address), READONLY,
     "Name that the other ranks connect to."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot listener_slots[] = {
    {Py_tp_new, listener_new},
    {Py_tp_dealloc, listener_dealloc},
    {Py_tp_members, listener_members},
    {Py_tp_doc, "Listener()\n--\n\nSocket over which rank 0 gathers a world."},
    {0, NULL},
};

PLI_TYPE(listener, Listener, 0);
