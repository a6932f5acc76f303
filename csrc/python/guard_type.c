/* guard_type.c - an object in the engine's list of final callbacks: called when a
 * backward ends, and dropped without a call when it failed.
 *
 * Called, it finishes the step, unless the backward that ends is one inside another
 * (reentrant checkpointing).  Dropped uncalled, it declares the step failed to the
 * peers at once, and has the traceback follow: by then the exception is on its way
 * through Python, so a pending call looks for it where an `except` or `finally` holds
 * it, or where the interpreter leaves what nobody caught.
 */
#include "grads.h"

enum { MOST_LOOKS = 64 }; /* for the exception, before the peers get none */

typedef enum guard_phase { GUARD_QUEUED, GUARD_CALLED } guard_phase;

typedef struct guard_object {
    PyObject_HEAD reducer_object *reducer; /* owned */
    guard_origin origin;
    guard_phase phase;
} guard_object;

/* ---- called --------------------------------------------------------------------- */

/* 1 inside the evaluation of a node, 0 at the end of the outermost backward, -1. */
static int is_nested(const module_state *state)
{
    PyObject *node = PyObject_CallNoArgs(state->current_node);
    if (node == NULL)
        return -1;
    const int is_inside = node != Py_None;
    Py_DECREF(node);
    return is_inside;
}

static PyObject *guard_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    guard_object *self = (guard_object *)object;
    reducer_object *reducer = self->reducer;
    (void)args;
    (void)kwargs;
    if (self->phase == GUARD_CALLED)
        Py_RETURN_NONE;
    self->phase = GUARD_CALLED;
    reducer->n_guards--;
    if (!pl_reducer_is_active(reducer->reducer))
        Py_RETURN_NONE;
    const int nested = is_nested(state_of(object));
    if (nested < 0)
        return NULL;
    /* The end of an inner backward ends the step only if all of the forward's graph is
     * in it (the wrapper itself is checkpointed), or nothing more is expected;
     * otherwise the next hook queues a guard of its own. */
    if (nested && self->origin == GUARD_OF_PARAMETER &&
        !pl_reducer_is_complete(reducer->reducer))
        Py_RETURN_NONE;
    if (pli_step_finish(reducer) != 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- dropped -------------------------------------------------------------------- */

/* The exception on its way, as a new reference, or NULL. */
static PyObject *find_exception(void)
{
    PyObject *type, *value, *traceback;
    PyErr_GetExcInfo(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    if (value != NULL && value != Py_None)
        return value;
    Py_XDECREF(value);
    value = PySys_GetObject("last_value"); /* what nobody caught; borrowed */
    return value != NULL && value != Py_None ? Py_NewRef(value) : NULL;
}

static void send_traceback(reducer_object *reducer, PyObject *exception)
{
    PyObject *module = PyImport_ImportModule("traceback");
    PyObject *lines =
        module != NULL ? PyObject_CallMethod(module, "format_exception", "O", exception)
                       : NULL;
    PyObject *empty = lines != NULL ? PyUnicode_FromString("") : NULL;
    PyObject *text = empty != NULL ? PyUnicode_Join(empty, lines) : NULL;
    const char *words = text != NULL ? PyUnicode_AsUTF8(text) : NULL;
    if (words != NULL)
        pli_comm_last_words(reducer->comm, words);
    Py_XDECREF(text);
    Py_XDECREF(empty);
    Py_XDECREF(lines);
    Py_XDECREF(module);
}

typedef struct search {
    reducer_object *reducer; /* owned */
    int n_looks;
} search;

static int look_for_exception(void *context)
{
    search *self = context;
    PyObject *exception = find_exception();
    if (exception == NULL && self->n_looks++ < MOST_LOOKS &&
        Py_AddPendingCall(look_for_exception, self) == 0)
        return 0;
    if (exception != NULL)
        send_traceback(self->reducer, exception);
    PyErr_Clear();
    Py_XDECREF(exception);
    Py_DECREF(self->reducer);
    PyMem_Free(self);
    return 0;
}

static void report_failed_backward(reducer_object *reducer)
{
    search *self = PyMem_Calloc(1, sizeof *self);
    reducer->n_guards--;
    /* Also where no gradient had come yet: the peers cannot finish without this rank.
     */
    pli_step_fail(reducer, NULL);
    if (self == NULL)
        return;
    self->reducer = (reducer_object *)Py_NewRef((PyObject *)reducer);
    if (Py_AddPendingCall(look_for_exception, self) == 0)
        return;
    Py_DECREF(self->reducer);
    PyMem_Free(self);
}

static void guard_dealloc(PyObject *object)
{
    guard_object *self = (guard_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->phase == GUARD_QUEUED && self->reducer->n_guards > 0)
        report_failed_backward(self->reducer);
    Py_DECREF(self->reducer);
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject *pli_guard_new(const module_state *state, reducer_object *reducer,
                        guard_origin origin)
{
    guard_object *self = PyObject_New(guard_object, state->guard_type);
    if (self == NULL)
        return NULL;
    self->reducer = (reducer_object *)Py_NewRef((PyObject *)reducer);
    self->origin = origin;
    self->phase = GUARD_QUEUED;
    return (PyObject *)self;
}

static PyType_Slot guard_slots[] = {
    {Py_tp_dealloc, guard_dealloc},
    {Py_tp_call, guard_call},
    {Py_tp_doc, "A step's end, waiting in the autograd engine; made by Reducer alone."},
    {0, NULL},
};

PyType_Spec pli_guard_spec = {
    .name = "paceline._native.Guard",
    .basicsize = sizeof(guard_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = guard_slots,
};
