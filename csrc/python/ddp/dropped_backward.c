/* dropped_backward.c - a backward that ends without a call: it raised, or compiled
 * autograd ran it.
 *
 * The peers learn of a failure at once, while the exception still travels through
 * Python.  A pending call sends its traceback later.  It looks where an `except` or
 * `finally` holds the exception, or where the interpreter stores an uncaught one.
 *
 * Compiled autograd calls no callbacks, but drops them at its end.  A pending call runs
 * right after, before Python continues behind `backward()`.  If no new exception is in
 * sight, it finishes the step.
 */
#include "dropped_backward.h"

#include "step.h"

enum { MOST_POLLS = 64 }; /* after that the peers get no exception text */

/* The context of a pending call, which frees it. */
typedef struct pending_call {
    reducer_object *reducer; /* owned */
    const void *handled;     /* an exception to compare with, never read */
    int n_polls;
} pending_call;

PyObject *pli_find_exception(void)
{
    PyObject *type, *value, *traceback;
    PyErr_GetExcInfo(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    if (value != NULL && value != Py_None)
        return value;
    Py_XDECREF(value);
    value = PySys_GetObject("last_value"); /* the uncaught one; borrowed */
    return value != NULL && value != Py_None ? Py_NewRef(value) : NULL;
}

/* In C: Python code would let pending calls run before the exception is in sight. */
static PyObject *keep_unwound(PyObject *kept, PyObject *const *args, Py_ssize_t n_args)
{
    PLI_ENTER(kept);
    if (n_args == 3 && args[0] == PyList_GET_ITEM(kept, 0) &&
        PyList_SetItem(kept, 1, Py_NewRef(args[2])) != 0)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *pli_unwound_keeper(PyObject *module, PyObject *kept)
{
    static PyMethodDef method = {
        "keep_unwound", (PyCFunction)(void (*)(void))keep_unwound, METH_FASTCALL, NULL};
    (void)module;
    if (PyList_Check(kept) && PyList_GET_SIZE(kept) == 2)
        return PyCFunction_New(&method, kept);
    return PyErr_Format(PyExc_TypeError,
                        "unwound_keeper() takes a list of code and None");
}

/* Leaves an exception that is set unchanged. */
static int is_main_thread(void)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *module = PyImport_ImportModule("threading");
    PyObject *thread =
        module != NULL ? PyObject_CallMethod(module, "main_thread", NULL) : NULL;
    PyObject *ident = thread != NULL ? PyObject_GetAttrString(thread, "ident") : NULL;
    const int is_main =
        ident != NULL && PyLong_AsUnsignedLong(ident) == PyThread_get_thread_ident();
    Py_XDECREF(ident);
    Py_XDECREF(thread);
    Py_XDECREF(module);
    PyErr_Restore(type, value, traceback);
    return is_main;
}

static void send_traceback(reducer_object *reducer, PyObject *exception)
{
    PyObject *module = PyImport_ImportModule("traceback");
    PyObject *lines =
        module != NULL ? PyObject_CallMethod(module, "format_exception", "O", exception)
                       : NULL;
    PyObject *empty = lines != NULL ? PyUnicode_FromString("") : NULL;
    PyObject *text = empty != NULL ? PyUnicode_Join(empty, lines) : NULL;
    const char *message = text != NULL ? PyUnicode_AsUTF8(text) : NULL;
    if (message != NULL)
        pli_comm_set_failure_message(reducer->comm, message);
    Py_XDECREF(text);
    Py_XDECREF(empty);
    Py_XDECREF(lines);
    Py_XDECREF(module);
}

static void free_pending(pending_call *self)
{
    Py_DECREF(self->reducer);
    PyMem_Free(self);
}

/* Makes the main thread call `call` before it runs more Python code.  If that cannot
 * be, returns -1 without an exception. */
static int call_soon(int (*call)(void *context), reducer_object *reducer,
                     const void *handled)
{
    pending_call *context = PyMem_Calloc(1, sizeof *context);
    if (context == NULL)
        return -1;
    context->reducer = (reducer_object *)Py_NewRef((PyObject *)reducer);
    context->handled = handled;
    if (Py_AddPendingCall(call, context) == 0)
        return 0;
    free_pending(context);
    return -1;
}

static int poll_for_exception(void *context)
{
    pending_call *self = context;
    PLI_ENTER(self->reducer);
    PyObject *exception = pli_find_exception();
    if (exception == NULL && self->n_polls++ < MOST_POLLS &&
        Py_AddPendingCall(poll_for_exception, self) == 0)
        return 0;
    if (exception != NULL)
        send_traceback(self->reducer, exception);
    else
        pli_comm_set_failure_message(self->reducer->comm, NULL); /* none follows */
    PyErr_Clear();
    Py_XDECREF(exception);
    free_pending(self);
    return 0;
}

void pli_failed_backward_report(reducer_object *reducer)
{
    /* Even if no gradient had come yet: the peers cannot finish without this rank. */
    pli_step_fail(reducer, NULL);
    /* The main thread never sees an exception of another thread, but it does see that
     * of a GPU's thread: autograd raises it where backward was called. */
    if ((!pli_is_on_device(reducer) && !is_main_thread()) ||
        call_soon(poll_for_exception, reducer, NULL) != 0)
        pli_comm_set_failure_message(reducer->comm, NULL);
}

static int finish_compiled(void *context)
{
    pending_call *self = context;
    reducer_object *reducer = self->reducer;
    PLI_ENTER(reducer);
    PyObject *exception = pli_find_exception();
    const int has_failed = exception != NULL && exception != self->handled;
    int status = 0;
    Py_XDECREF(exception);
    if (has_failed)
        pli_failed_backward_report(reducer);
    else if (pl_reducer_is_active(reducer->reducer))
        status = pli_step_finish_all(reducer);
    free_pending(self);
    return status;
}

void pli_compiled_backward_ends(reducer_object *reducer, uint64_t step,
                                const void *handled)
{
    if (!pl_reducer_is_active(reducer->reducer) &&
        pl_reducer_step(reducer->reducer) != step)
        return; /* the last hook has finished that step */
    if (is_main_thread() && call_soon(finish_compiled, reducer, handled) == 0)
        return;
    /* Nothing can be raised from here: the next forward raises. */
    reducer->unseen = FAILURE_UNSEEN;
    pli_failed_backward_report(reducer);
}
