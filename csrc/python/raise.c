/* raise.c - turns a status into the exception that PL_STATUS_MAP names, and back. */
#include <string.h>

#include "state.h"

static const char *exception_name(pl_status st)
{
    switch (st) {
#define EXCEPTION_NAME(name, number, text, exception)                                  \
    case name:                                                                         \
        return exception;
        PL_STATUS_MAP(EXCEPTION_NAME)
#undef EXCEPTION_NAME
    }
    return "RuntimeError";
}

/* A new reference; NULL with an exception set. */
static PyObject *exception_of(const module_state *state, pl_status st)
{
    const char *name = exception_name(st);
    PyObject *builtin = PyDict_GetItemString(PyEval_GetBuiltins(), name); /* borrowed */
    return builtin != NULL ? Py_NewRef(builtin)
                           : PyObject_GetAttrString(state->errors, name);
}

PyObject *pli_raise(const module_state *state, pl_status st)
{
    if (st == PL_OK || PyErr_Occurred())
        return NULL;
    /* The message may quote a file name, which need not be UTF-8. */
    const char *words = pl_error_message();
    PyObject *text = PyUnicode_DecodeUTF8(words, (Py_ssize_t)strlen(words), "replace");
    PyObject *type = text != NULL ? exception_of(state, st) : NULL;
    if (type != NULL)
        PyErr_SetObject(type, text);
    Py_XDECREF(type);
    Py_XDECREF(text);
    return NULL;
}

int pli_error(PyObject *type, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    PyErr_FormatV(type, format, args);
    va_end(args);
    return -1;
}

int pli_needs_torch(const module_state *state)
{
    if (state->tensor_type != NULL)
        return 0;
    return pli_error(
        PyExc_RuntimeError,
        "torch is not attached: call paceline._compat.torch_core.attach() first");
}

PyObject *pli_exception_words(void)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback); /* so that %S prints it */
    PyObject *words = PyUnicode_FromFormat(
        "%s: %S", type != NULL ? ((PyTypeObject *)type)->tp_name : "",
        value != NULL ? value : Py_None);
    if (words != NULL && PyUnicode_AsUTF8(words) == NULL)
        Py_CLEAR(words);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return words;
}

int pli_raise_at(PyObject *type, PyObject *path, const char *format, ...)
{
    int status = -1;
    va_list args;
    va_start(args, format);
    PyObject *words = path != NULL ? PyUnicode_FromFormatV(format, args) : NULL;
    va_end(args);
    if (words != NULL && type == PyExc_UserWarning)
        status = PyErr_WarnFormat(type, 1, "%U %U", path, words);
    else if (words != NULL)
        PyErr_Format(type, "%U %U", path, words);
    Py_XDECREF(words);
    Py_XDECREF(path);
    return status;
}

pl_status pli_callback_failed(void)
{
    PyObject *words = pli_exception_words();
    const pl_status st =
        pli_fail(PL_ESTATE, "%s",
                 words != NULL ? PyUnicode_AsUTF8(words) : "a callback has raised");
    Py_XDECREF(words);
    return st;
}
