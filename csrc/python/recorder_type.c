/* recorder_type.c - paceline._native.Recorder.  A World writes to it directly from C, a
 * DataParallel by the methods here. */
#include "recorder_object.h"

#include <stddef.h>

#include <structmember.h>

static pli_recorder *recorder_of(PyObject *object)
{
    return ((recorder_object *)object)->recorder;
}

static PyObject *recorder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"name", "who", NULL};
    PyObject *name = NULL;
    const char *who = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&s:Recorder", names,
                                     PyUnicode_FSConverter, &name, &who))
        return NULL;
    recorder_object *self = (recorder_object *)type->tp_alloc(type, 0);
    if (self != NULL &&
        pli_check(state_of_type(type), pli_recorder_create(PyBytes_AS_STRING(name), who,
                                                           &self->recorder)) != 0)
        Py_CLEAR(self);
    Py_DECREF(name);
    return (PyObject *)self;
}

static void recorder_dealloc(PyObject *object)
{
    recorder_object *self = (recorder_object *)object;
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs(object);
    pli_recorder_destroy(self->recorder);
    pli_object_free(object);
}

static PyObject *recorder_record(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    unsigned activity = PL_IDLE;
    unsigned long long step = 0;
    if (!PyArg_ParseTuple(args, "IK:record", &activity, &step))
        return NULL;
    if (activity >= PL_N_ACTIVITIES)
        return PyErr_Format(PyExc_ValueError, "activity is %u: give 0 to %d", activity,
                            PL_N_ACTIVITIES - 1);
    pli_recorder_activity(recorder_of(object), (pl_activity)activity, step);
    Py_RETURN_NONE;
}

static PyObject *recorder_read(PyObject *object, PyObject *number)
{
    PLI_ENTER(object);
    const unsigned long long step = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    const pli_record *record = pli_recorder_look(recorder_of(object), step);
    return PyBytes_FromStringAndSize((const char *)record,
                                     record != NULL ? sizeof *record : 0);
}

static PyObject *recorder_close(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    pli_recorder_hide(recorder_of(object));
    Py_RETURN_NONE;
}

static PyMethodDef recorder_methods[] = {
    {"record", recorder_record, METH_VARARGS,
     "record($self, activity, step, /)\n--\n\nRecord what the process does now."},
    {"read", recorder_read, METH_O,
     "read($self, step, /)\n--\n\nReturn the record in which a step is or was; empty "
     "in a forked child."},
    {"close", recorder_close, METH_NOARGS,
     "close($self, /)\n--\n\nHide the file from readers; may be called twice."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef recorder_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(recorder_object, weak_references),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot recorder_slots[] = {
    {Py_tp_new, recorder_new},
    {Py_tp_dealloc, recorder_dealloc},
    {Py_tp_methods, recorder_methods},
    {Py_tp_members, recorder_members},
    {Py_tp_doc, "Recorder(name, who)\n--\n\n"
                "A new memfd that records the last steps; `who` is a JSON object."},
    {0, NULL},
};

PLI_TYPE(recorder, Recorder, 0);
