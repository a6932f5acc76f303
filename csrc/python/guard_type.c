/* guard_type.c - an object in the engine's list of final callbacks: called when a
 * backward ends, and dropped without a call when it failed, or when it was compiled.
 *
 * Called, it finishes the step; where the backward that ends is one inside another
 * (reentrant checkpointing), it climbs out first.  Dropped uncalled, it declares the
 * step failed to the peers at once, and has the traceback follow: by then the exception
 * is on its way through Python, so a pending call looks for it where an `except` or
 * `finally` holds it, or where the interpreter leaves what nobody caught.
 *
 * Compiled autograd calls nobody back, but drops the list at its end.  A pending call
 * follows at once, before Python goes on behind `backward()`: where no new exception is
 * in sight, it finishes the step.
 *
 * One of a backward that is not synchronised says, either way, that it is over.
 */
#include "grads.h"

enum { MOST_LOOKS = 64 }; /* for the exception, before the peers get none */

typedef enum guard_phase {
    GUARD_QUEUED,   /* in the engine's list */
    GUARD_CLIMBING, /* on the node around an inner backward */
    GUARD_CALLED,
} guard_phase;

typedef struct guard_object {
    PyObject_HEAD
    reducer_object *reducer; /* owned */
    guard_origin origin;
    guard_phase phase;
    const void *handled; /* compiled: the exception in sight when it was made */
    uint64_t step;       /* the reducer's, when it was made */
} guard_object;

/* ---- called --------------------------------------------------------------------- */

/* The backward that ends is inside the evaluation of `node`.  Has the guard called once
 * more when that is over: from there it queues a guard in the backward around, and so
 * climbs to the outermost. */
static int climb(reducer_object *reducer, PyObject *node)
{
    guard_object *climber = (guard_object *)pli_guard_new(state_of((PyObject *)reducer),
                                                          reducer, GUARD_OF_PARAMETER);
    if (climber == NULL)
        return -1;
    climber->phase = GUARD_CLIMBING;
    PyObject *result = PyObject_CallFunctionObjArgs(
        state_of((PyObject *)reducer)->after_node, node, (PyObject *)climber, NULL);
    if (result == NULL)
        climber->phase = GUARD_CALLED;
    Py_XDECREF(result);
    Py_DECREF(climber);
    return result != NULL ? 0 : -1;
}

static int on_backward_end(const guard_object *self)
{
    reducer_object *reducer = self->reducer;
    reducer->n_guards--;
    if (!pl_reducer_is_active(reducer->reducer))
        return 0;
    PyObject *node = PyObject_CallNoArgs(state_of((PyObject *)self)->current_node);
    if (node == NULL)
        return -1;
    /* An output's guard is in the backward that holds all of its forward's graph, be it
     * inside another one (the wrapper itself is checkpointed). */
    int status = 0;
    if (node == Py_None)
        status = pli_step_finish_all(reducer);
    else if (self->origin == GUARD_OF_OUTPUT)
        status = pli_step_finish(reducer);
    else
        status = climb(reducer, node);
    Py_DECREF(node);
    return status;
}

static int on_node_end(const guard_object *self)
{
    reducer_object *reducer = self->reducer;
    if (!pl_reducer_is_active(reducer->reducer))
        return 0;
    return pli_step_queue_guard(reducer, GUARD_OF_PARAMETER);
}

static PyObject *guard_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    guard_object *self = (guard_object *)object;
    const guard_phase phase = self->phase;
    (void)args; /* a node's hook is given gradients */
    (void)kwargs;
    self->phase = GUARD_CALLED;
    if (self->origin == GUARD_OF_LOCAL) {
        self->reducer->sync_forward = SYNC_ON;
        Py_RETURN_NONE;
    }
    if ((phase == GUARD_QUEUED && on_backward_end(self) != 0) ||
        (phase == GUARD_CLIMBING && on_node_end(self) != 0))
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

/* What a pending call is given, and frees. */
typedef struct pending {
    reducer_object *reducer; /* owned */
    const void *handled;     /* the guard's */
    int n_looks;
} pending;

static void free_pending(pending *self)
{
    Py_DECREF(self->reducer);
    PyMem_Free(self);
}

/* Has `call` called by the main thread, before it goes on with Python code; -1, without
 * an exception, where that cannot be. */
static int call_soon(int (*call)(void *context), reducer_object *reducer,
                     const void *handled)
{
    pending *context = PyMem_Calloc(1, sizeof *context);
    if (context == NULL)
        return -1;
    context->reducer = (reducer_object *)Py_NewRef((PyObject *)reducer);
    context->handled = handled;
    if (Py_AddPendingCall(call, context) == 0)
        return 0;
    free_pending(context);
    return -1;
}

static int look_for_exception(void *context)
{
    pending *self = context;
    PyObject *exception = find_exception();
    if (exception == NULL && self->n_looks++ < MOST_LOOKS &&
        Py_AddPendingCall(look_for_exception, self) == 0)
        return 0;
    if (exception != NULL)
        send_traceback(self->reducer, exception);
    PyErr_Clear();
    Py_XDECREF(exception);
    free_pending(self);
    return 0;
}

static void report_failed_backward(reducer_object *reducer)
{
    /* Also where no gradient had come yet: the peers cannot finish without this rank.
     */
    pli_step_fail(reducer, NULL);
    (void)call_soon(look_for_exception, reducer, NULL); /* else without a traceback */
}

static int finish_compiled(void *context)
{
    pending *self = context;
    reducer_object *reducer = self->reducer;
    PyObject *exception = find_exception();
    const int has_failed = exception != NULL && exception != self->handled;
    int status = 0;
    Py_XDECREF(exception);
    if (has_failed)
        report_failed_backward(reducer);
    else if (pl_reducer_is_active(reducer->reducer))
        status = pli_step_finish_all(reducer);
    free_pending(self);
    return status;
}

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

/* A compiled backward is over; nothing tells whether it failed, yet. */
static void end_compiled(const guard_object *guard)
{
    reducer_object *reducer = guard->reducer;
    if (!pl_reducer_is_active(reducer->reducer) &&
        pl_reducer_step(reducer->reducer) != guard->step)
        return; /* the last hook has finished the step that it was made for */
    if (is_main_thread() && call_soon(finish_compiled, reducer, guard->handled) == 0)
        return;
    /* Nothing can be raised from here: the next forward does it. */
    reducer->unseen = FAILURE_UNSEEN;
    report_failed_backward(reducer);
}

static void guard_dealloc(PyObject *object)
{
    guard_object *self = (guard_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->origin == GUARD_OF_LOCAL) {
        /* Called, it has said so; the next forward may have begun in another thread. */
        if (self->phase == GUARD_QUEUED)
            self->reducer->sync_forward = SYNC_ON;
    } else if (self->phase == GUARD_QUEUED && self->reducer->n_guards > 0) {
        self->reducer->n_guards--;
        if (self->reducer->engine == ENGINE_COMPILED)
            end_compiled(self);
        else
            report_failed_backward(self->reducer);
    } else if (self->phase == GUARD_CLIMBING &&
               pl_reducer_is_active(self->reducer->reducer)) {
        report_failed_backward(self->reducer);
    }
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
    self->step = pl_reducer_step(reducer->reducer);
    self->handled = NULL;
    if (reducer->engine == ENGINE_COMPILED) {
        PyObject *handled = find_exception();
        self->handled = handled; /* compared, never read */
        Py_XDECREF(handled);
    }
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
