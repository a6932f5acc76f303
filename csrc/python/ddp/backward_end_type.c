/* backward_end_type.c - an object in the autograd engine's list of final callbacks.
 * The engine calls it when the backward ends.  If the backward failed or was compiled,
 * the engine drops it without a call.
 *
 *     QUEUED -------- called ----> CALLED   the step finishes; or, inside another
 *       |                                   backward (reentrant checkpointing), a
 *       |                                   second object is made: ON_OUTER_NODE
 *       +------------ dropped              the step fails, or compiled autograd has
 *                                           ended it
 *     ON_OUTER_NODE - called ----> CALLED   a new one is QUEUED in the outer backward
 *       +------------ dropped              the step fails
 *
 * If the backward is not synchronised, the object only resets sync.backward, either
 * way.
 *
 * Queueing asks torch whether compiled autograd runs the backward: that drops callbacks
 * at its end without a call.  It also asks for the backward's number, by which step.c
 * finds the steps of other reducers that end with it.
 *
 * If the backward failed, the peers learn of it at once, while the exception still
 * travels through Python.  A pending call sends its traceback later.  It looks where an
 * `except` or `finally` holds the exception, or where the interpreter stores an
 * uncaught one.
 *
 * After a compiled backward a pending call runs before Python continues behind
 * `backward()`.  If no new exception is in sight, it finishes the step.
 */
#include "backward_end_type.h"

#include "core/clock.h"
#include "step.h"

enum { MOST_SLEEPS = 1000 }; /* sleeps of 1 ms, for a thread that is about to end */
enum { MOST_POLLS = 64 };    /* after that the peers get no exception text */

typedef enum backward_end_phase {
    END_QUEUED,        /* in the engine's list */
    END_ON_OUTER_NODE, /* of an inner backward */
    END_CALLED,
} backward_end_phase;

typedef struct backward_end_object {
    PyObject_HEAD
    reducer_object *reducer; /* owned */
    backward_end_origin origin;
    backward_end_phase phase;
    const void *handled; /* compiled: the exception in sight at creation */
    uint64_t step;       /* the reducer's step number at creation */
} backward_end_object;

/* ---- the exception in sight ----------------------------------------------------- */

/* The exception in sight, as a new reference, or NULL: one that an `except` or
 * `finally` holds, or the last uncaught one. */
static PyObject *find_exception(void)
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

/* ---- queued --------------------------------------------------------------------- */

static PyObject *backward_end_new(const module_state *state, reducer_object *reducer,
                                  backward_end_origin origin)
{
    backward_end_object *self =
        PyObject_New(backward_end_object, state->backward_end_type);
    if (self == NULL)
        return NULL;
    self->reducer = (reducer_object *)Py_NewRef((PyObject *)reducer);
    self->origin = origin;
    self->phase = END_QUEUED;
    self->step = pl_reducer_step(reducer->reducer);
    self->handled = NULL;
    if (reducer->engine == ENGINE_COMPILED) {
        PyObject *handled = find_exception();
        self->handled = handled; /* compared, never read */
        Py_XDECREF(handled);
    }
    return (PyObject *)self;
}

/* Asks torch which engine runs this backward, and for its number: this thread may also
 * run backwards that other threads started. */
static int read_backward(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    const int is_compiled = pli_is_true(PyObject_CallNoArgs(state->is_compiled));
    PyObject *task = is_compiled >= 0 ? PyObject_CallNoArgs(state->current_task) : NULL;
    const long number = task != NULL ? PyLong_AsLong(task) : -1;
    Py_XDECREF(task);
    if (PyErr_Occurred() != NULL)
        return -1;
    self->engine = is_compiled ? ENGINE_COMPILED : ENGINE_CALLS_BACK;
    self->task = number;
    return 0;
}

static int queue(reducer_object *self, backward_end_origin origin)
{
    const module_state *state = state_of_reducer(self);
    PyObject *callback = backward_end_new(state, self, origin);
    PyObject *result =
        callback != NULL ? PyObject_CallOneArg(state->queue_callback, callback) : NULL;
    Py_XDECREF(callback);
    return pli_drop(result);
}

int pli_backward_end_queue(reducer_object *self, backward_end_origin origin)
{
    if (self->n_backward_ends > 0)
        return 0;
    if (read_backward(self) != 0 || queue(self, origin) != 0)
        return -1;
    self->n_backward_ends++; /* only now: a refused object must not report a failure */
    return 0;
}

int pli_backward_end_queue_local(reducer_object *self)
{
    /* If the backward also reaches a synchronised output, all of it is synchronised. */
    if (self->n_backward_ends > 0 || self->sync.backward == SYNC_OFF)
        return 0;
    if (queue(self, QUEUED_BY_LOCAL_OUTPUT) != 0)
        return -1;
    self->sync.backward = SYNC_OFF;
    return 0;
}

int pli_backward_end_await(const reducer_object *self)
{
    const int is_threaded = pli_is_on_device(self) || self->context.all != NULL;
    for (int n = 0; is_threaded && self->n_backward_ends > 0 && n < MOST_SLEEPS; n++) {
        Py_BEGIN_ALLOW_THREADS
        pli_sleep_ns(PLI_MS);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() != 0)
            return -1;
    }
    return 0;
}

/* ---- called --------------------------------------------------------------------- */

/* The backward that ends runs inside the evaluation of `node`: registers an object that
 * is called after that evaluation. */
static int requeue_outside(reducer_object *reducer, PyObject *node)
{
    const module_state *state = state_of_reducer(reducer);
    backward_end_object *outer =
        (backward_end_object *)backward_end_new(state, reducer, QUEUED_BY_PARAMETER);
    if (outer == NULL)
        return -1;
    outer->phase = END_ON_OUTER_NODE;
    PyObject *result =
        PyObject_CallFunctionObjArgs(state->after_node, node, (PyObject *)outer, NULL);
    if (result == NULL)
        outer->phase = END_CALLED;
    Py_XDECREF(result);
    Py_DECREF(outer);
    return result != NULL ? 0 : -1;
}

static int on_backward_end(const backward_end_object *self)
{
    reducer_object *reducer = self->reducer;
    reducer->n_backward_ends--;
    if (!pl_reducer_is_active(reducer->reducer))
        return 0;
    PyObject *node = PyObject_CallNoArgs(state_of((PyObject *)self)->current_node);
    if (node == NULL)
        return -1;
    /* An output's object is in the backward that holds the whole graph of its forward,
     * even inside another backward (if the wrapper itself is checkpointed). */
    int status = 0;
    if (node == Py_None)
        status = pli_step_finish_all(reducer);
    else if (self->origin == QUEUED_BY_OUTPUT)
        status = pli_step_finish(reducer);
    else
        status = requeue_outside(reducer, node);
    Py_DECREF(node);
    return status;
}

static int on_node_end(const backward_end_object *self)
{
    reducer_object *reducer = self->reducer;
    if (!pl_reducer_is_active(reducer->reducer))
        return 0;
    return pli_backward_end_queue(reducer, QUEUED_BY_PARAMETER);
}

static PyObject *backward_end_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(object);
    backward_end_object *self = (backward_end_object *)object;
    const backward_end_phase phase = self->phase;
    (void)args; /* torch passes gradients to a node's hook */
    (void)kwargs;
    self->phase = END_CALLED;
    if (self->origin == QUEUED_BY_LOCAL_OUTPUT) {
        self->reducer->sync.backward = SYNC_ON;
        Py_RETURN_NONE;
    }
    if ((phase == END_QUEUED && on_backward_end(self) != 0) ||
        (phase == END_ON_OUTER_NODE && on_node_end(self) != 0))
        return NULL;
    Py_RETURN_NONE;
}

/* ---- dropped -------------------------------------------------------------------- */

/* The context of a pending call, which frees it. */
typedef struct pending_call {
    reducer_object *reducer; /* owned */
    const void *handled;     /* an exception to compare with, never read */
    int n_polls;
} pending_call;

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
    PyObject *exception = find_exception();
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

/* Fails the step at once; sends the traceback when the exception is in sight. */
static void report_failure(reducer_object *reducer)
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
    PyObject *exception = find_exception();
    const int has_failed = exception != NULL && exception != self->handled;
    int status = 0;
    Py_XDECREF(exception);
    if (has_failed)
        report_failure(reducer);
    else if (pl_reducer_is_active(reducer->reducer))
        status = pli_step_finish_all(reducer);
    free_pending(self);
    return status;
}

/* The engine dropped its callbacks: the compiled backward has ended or failed. */
static void end_compiled(const backward_end_object *self)
{
    reducer_object *reducer = self->reducer;
    if (!pl_reducer_is_active(reducer->reducer) &&
        pl_reducer_step(reducer->reducer) != self->step)
        return; /* the last hook has finished that step */
    if (is_main_thread() && call_soon(finish_compiled, reducer, self->handled) == 0)
        return;
    /* Nothing can be raised from here: the next forward raises. */
    reducer->unseen = FAILURE_UNSEEN;
    report_failure(reducer);
}

static void drop(const backward_end_object *self)
{
    PLI_ENTER(self);
    if (self->origin == QUEUED_BY_LOCAL_OUTPUT) {
        /* If called, it did that; another thread may run the next forward by now. */
        if (self->phase == END_QUEUED)
            self->reducer->sync.backward = SYNC_ON;
    } else if (self->phase == END_QUEUED && self->reducer->n_backward_ends > 0) {
        if (self->reducer->engine == ENGINE_COMPILED)
            end_compiled(self);
        else
            report_failure(self->reducer);
        /* Last: the next forward waits for this, and the report may let it run. */
        self->reducer->n_backward_ends--;
    } else if (self->phase == END_ON_OUTER_NODE &&
               pl_reducer_is_active(self->reducer->reducer)) {
        report_failure(self->reducer);
    }
}

static void backward_end_dealloc(PyObject *object)
{
    backward_end_object *self = (backward_end_object *)object;
    drop(self);
    Py_DECREF(self->reducer);
    pli_object_free(object);
}

static PyType_Slot backward_end_slots[] = {
    {Py_tp_dealloc, backward_end_dealloc},
    {Py_tp_call, backward_end_call},
    {Py_tp_doc, "A step's end, waiting in the autograd engine; made by Reducer alone."},
    {0, NULL},
};

PLI_TYPE(backward_end, BackwardEnd, Py_TPFLAGS_DISALLOW_INSTANTIATION);
