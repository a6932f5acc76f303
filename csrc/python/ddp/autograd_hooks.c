/* autograd_hooks.c - what autograd calls: the hook of each parameter, and an object at
 * the end of a backward.
 *
 * A parameter's hook runs after all hooks of the user, whenever they were registered,
 * and takes the gradient as they left it.  torch's wrapper does so too: its hook is on
 * the node, whose hooks run after the parameter's.
 *
 * An object in the autograd engine's list of final callbacks stands for each step.  The
 * engine calls it when the backward ends.  If the backward failed or was compiled, the
 * engine drops it without a call.
 *
 *     QUEUED -------- called ----> CALLED   the step finishes; or, inside another
 *       |                                   backward (reentrant checkpointing), a
 *       |                                   second object is made: ON_OUTER_NODE
 *       +------------ dropped              the step fails, or compiled autograd has
 *                                           ended it
 *     ON_OUTER_NODE - called ----> CALLED   a new one is QUEUED in the outer backward
 *       +------------ dropped              the step fails
 *
 * If the backward is not synchronised, the object only tells the step, either way.
 *
 * Queueing asks torch whether compiled autograd runs the backward: that drops callbacks
 * at its end without a call.  It also asks for the backward's number, by which
 * is_same_backward() finds the steps of other reducers that end with it.
 *
 * If the backward failed, the peers learn of it at once, while the exception still
 * travels through Python.  A pending call sends its traceback later.  It looks where an
 * `except` or `finally` holds the exception, or where the interpreter stores an
 * uncaught one.
 *
 * After a compiled backward a pending call runs before Python continues behind
 * `backward()`.  If no new exception is in sight, it finishes the step.
 */
#include "autograd_hooks.h"

#include <unistd.h>

#include "comm_hook.h"
#include "core/clock.h"

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
    pl_end_origin origin;
    backward_end_phase phase;
    /* Of a compiled backward, at creation: the exception in sight, the step's number.
     */
    const void *handled;
    uint64_t step;
} backward_end_object;

/* ---- the list of live reducers -------------------------------------------------- */

/* Reducers enter the module's list when they are made, and leave it when they end; it
 * owns none.  The order of construction is that in which the steps of one backward
 * finish, and in which most ranks take the shadow steps of several wrappers.
 *
 * With a GIL no thread finds a reducer that has lost its last reference.  Without a GIL
 * a thread may; the weak reference that each reducer has to itself then shows the loss.
 */

int pli_reducers_enter(module_state *state, reducer_object *self)
{
    reducer_object **link = &state->reducers;
#ifdef Py_GIL_DISABLED
    self->weak_self = PyWeakref_NewRef((PyObject *)self, NULL);
    if (self->weak_self == NULL)
        return -1;
#endif
    while (*link != NULL)
        link = &(*link)->next;
    *link = self;
    return 0;
}

void pli_reducers_leave(module_state *state, reducer_object *self)
{
    PLI_ENTER(self);
    reducer_object **link = &state->reducers;
    while (*link != NULL && *link != self)
        link = &(*link)->next;
    if (*link != NULL)
        *link = self->next;
}

/* A new reference to a reducer found by a borrowed pointer; NULL if another thread
 * dropped its last reference and now waits for the lock to leave. */
static reducer_object *reducer_ref(reducer_object *self)
{
#ifdef Py_GIL_DISABLED
    PyObject *object = NULL;
    if (PyWeakref_GetRef(self->weak_self, &object) < 0)
        PyErr_Clear(); /* set only if weak_self is no weak reference */
    return (reducer_object *)object;
#else
    return (reducer_object *)Py_NewRef((PyObject *)self);
#endif
}

/* A new reference to the first reducer of a list that still lives, or NULL. */
static reducer_object *first_of(reducer_object *list)
{
    reducer_object *found = NULL;
    for (; list != NULL && found == NULL; list = list->next)
        found = reducer_ref(list);
    return found;
}

/* The live reducer after `at`, a reference that it takes over; the list may have
 * changed since. */
static reducer_object *next_after(reducer_object *at)
{
    reducer_object *next = first_of(at->next);
    Py_DECREF(at);
    return next;
}

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
                                  pl_end_origin origin)
{
    backward_end_object *self =
        PyObject_New(backward_end_object, state->backward_end_type);
    if (self == NULL)
        return NULL;
    self->reducer = (reducer_object *)Py_NewRef((PyObject *)reducer);
    self->origin = origin;
    self->phase = END_QUEUED;
    self->step = 0;
    self->handled = NULL;
    if (reducer->settings.is_compiled) {
        self->step = pl_step_look(reducer->step).number;
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
    self->settings.is_compiled = (char)is_compiled;
    self->task = number;
    return 0;
}

static int queue(reducer_object *self, pl_end_origin origin)
{
    const module_state *state = state_of_reducer(self);
    PyObject *callback = backward_end_new(state, self, origin);
    PyObject *result =
        callback != NULL ? PyObject_CallOneArg(state->queue_callback, callback) : NULL;
    Py_XDECREF(callback);
    return pli_drop(result);
}

int pli_backward_end_queue(reducer_object *self, pl_end_origin origin)
{
    const int is_local = origin == PL_END_OF_LOCAL_OUTPUT;
    if (!is_local)
        self->thread = PyThread_get_thread_ident();
    if (self->settings.n_ends > 0)
        return 0;
    if ((!is_local && read_backward(self) != 0) || queue(self, origin) != 0)
        return -1;
    self->settings.n_ends += !is_local; /* only now: a refused object reports nothing */
    return 0;
}

int pli_backward_end_await(const reducer_object *self)
{
    const int is_threaded = (pli_is_on_device(self) || self->context.all != NULL) &&
                            ((world_object *)self->world)->owner_pid == getpid();
    for (int n = 0; is_threaded && self->settings.n_ends > 0 && n < MOST_SLEEPS; n++) {
        Py_BEGIN_ALLOW_THREADS
        pli_sleep_ns(PLI_MS);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() != 0)
            return -1;
        pli_free_dropped(n);
    }
    return 0;
}

/* ---- steps end ------------------------------------------------------------------ */

static int is_active(const reducer_object *self)
{
    return self->step != NULL && pl_step_look(self->step).is_active;
}

/* The error just raised stands for every world that has failed by now, of wrappers that
 * wait for one another.  Marks each, so that its next forward makes a new world and
 * does not raise again. */
static void notice_failures(const module_state *state)
{
    reducer_object *other = first_of(state->reducers);
    for (; other != NULL; other = next_after(other))
        if (other->step != NULL)
            (void)!pl_step_notice_failure(other->step);
}

void pli_step_fail(reducer_object *self, const char *text)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    pl_step_fail(self->step, text);
    Py_CLEAR(self->context.homes);
    notice_failures(state_of_reducer(self));
    PyErr_Restore(type, value, traceback);
}

void pli_step_fail_with_exception(reducer_object *self)
{
    pli_comm_hook_raise_refusal(self);
    PyObject *text = pli_exception_words();
    pli_step_fail(self, text != NULL ? PyUnicode_AsUTF8(text)
                                     : "its backward could not be finished");
    Py_XDECREF(text);
}

int pli_step_check(reducer_object *self, pl_status st)
{
    if (pli_check(state_of_reducer(self), st) == 0)
        return 0;
    if (is_active(self))
        pli_step_fail_with_exception(self);
    return -1;
}

static long context_of(const reducer_object *self)
{
    return self->context.all != NULL ? pl_step_look(self->step).context : PL_NO_CONTEXT;
}

/* Gets the homes of the gradients in the backward's context, if any.  Before this only
 * arrivals are recorded; after it gradients are read and written at their homes. */
static pl_status open_context(reducer_object *self)
{
    const long number = context_of(self);
    if (number == PL_NO_CONTEXT || self->context.homes != NULL)
        return PL_OK;
    PyObject *sequence = PyObject_CallFunction(self->context.all, "l", number);
    PyObject *homes = sequence != NULL ? PySequence_Tuple(sequence) : NULL;
    Py_XDECREF(sequence);
    if (homes != NULL && PyTuple_GET_SIZE(homes) != (Py_ssize_t)self->n_params) {
        PyErr_Format(PyExc_ValueError, "contexts gave %R: give one per parameter (%zu)",
                     homes, self->n_params);
        Py_CLEAR(homes);
    }
    self->context.homes = homes;
    return homes != NULL ? PL_OK : pli_callback_failed();
}

int pli_step_finish(reducer_object *self)
{
    pl_status st = open_context(self);
    if (st == PL_OK)
        st = pl_step_finish(self->step);
    const int status = pli_step_check(self, st);
    Py_CLEAR(self->context.homes);
    return status;
}

static int close_step(reducer_object *self)
{
    const pl_status st = open_context(self);
    return pli_step_check(self, st == PL_OK ? pl_step_close(self->step) : st);
}

static int end_step(reducer_object *self)
{
    return self->settings.is_manual ? close_step(self) : pli_step_finish(self);
}

/* Whether the engine's task, not the thread, identifies a backward.  A device has one
 * thread for all backwards; torch.distributed.autograd may use several for one. */
static int goes_by_task(const reducer_object *self)
{
    return pli_is_on_device(self) || context_of(self) != PL_NO_CONTEXT;
}

/* Whether `other`'s step belongs to the same backward as `self`'s, which ends in this
 * thread.  On the CPU a backward and those nested in it run in one thread. */
static int is_same_backward(const reducer_object *self, const reducer_object *other)
{
    if (other == self)
        return 1;
    if ((goes_by_task(self) || goes_by_task(other)) && self->task != -1)
        return other->task == self->task;
    return other->thread == PyThread_get_thread_ident();
}

/* Visits every reducer whose step, if it has one, ends with `self`'s, in the order of
 * the list, until a visit fails.  The list may change meanwhile. */
static int visit_backward(reducer_object *self, int (*visit)(reducer_object *))
{
    int status = 0;
    reducer_object *other = first_of(state_of_reducer(self)->reducers);
    for (; other != NULL; other = next_after(other))
        if (status == 0 && other->step != NULL && is_same_backward(self, other))
            status = visit(other);
    return status;
}

/* Ends this thread's outermost backward.  First posts the rest of all its steps, since
 * another rank may wait for them in another order.  Then finishes the steps in the
 * order in which their reducers were made, so that all ranks issue later operations
 * (second all-reduces, sparse rows) in one order. */
static int finish_all(reducer_object *self)
{
    int status = 0;
    if (state_of_reducer(self)->reducers->next !=
        NULL) /* a lone one closes as it ends */
        status = visit_backward(self, close_step);
    if (status == 0)
        status = visit_backward(self, end_step);
    /* Other steps fail as the engine drops their callbacks.  It has called `self`'s. */
    if (status != 0 && is_active(self))
        pli_step_fail(self, NULL);
    return status;
}

/* ---- called --------------------------------------------------------------------- */

/* The backward that ends runs inside the evaluation of `node`: registers an object that
 * is called after that evaluation. */
static int requeue_outside(reducer_object *reducer, PyObject *node)
{
    const module_state *state = state_of_reducer(reducer);
    backward_end_object *outer =
        (backward_end_object *)backward_end_new(state, reducer, PL_END_OF_PARAMETER);
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
    reducer->settings.n_ends--;
    PyObject *node = PyObject_CallNoArgs(state_of((PyObject *)self)->current_node);
    if (node == NULL)
        return -1;
    /* An output's object is in the backward that holds the whole graph of its forward,
     * even inside another backward (if the wrapper itself is checkpointed). */
    int status = 0;
    if (node == Py_None)
        status = finish_all(reducer);
    else if (self->origin == PL_END_OF_OUTPUT)
        status = end_step(reducer);
    else if (is_active(reducer))
        status = requeue_outside(reducer, node);
    Py_DECREF(node);
    return status;
}

static int on_node_end(const backward_end_object *self)
{
    reducer_object *reducer = self->reducer;
    if (!is_active(reducer))
        return 0;
    return pli_backward_end_queue(reducer, PL_END_OF_PARAMETER);
}

static PyObject *backward_end_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(object);
    backward_end_object *self = (backward_end_object *)object;
    const backward_end_phase phase = self->phase;
    (void)args; /* torch passes gradients to a node's hook */
    (void)kwargs;
    self->phase = END_CALLED;
    if (self->origin == PL_END_OF_LOCAL_OUTPUT) {
        pl_step_end_local(self->reducer->step);
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
    else if (is_active(reducer))
        status = finish_all(reducer);
    free_pending(self);
    return status;
}

/* The engine dropped its callbacks: the compiled backward has ended or failed. */
static void end_compiled(const backward_end_object *self)
{
    reducer_object *reducer = self->reducer;
    if (!is_active(reducer) && pl_step_look(reducer->step).number != self->step)
        return; /* the last hook has finished that step */
    if (is_main_thread() && call_soon(finish_compiled, reducer, self->handled) == 0)
        return;
    /* Nothing can be raised from here: the next forward raises. */
    reducer->report = FAILURE_UNREPORTED;
    report_failure(reducer);
}

static void drop(const backward_end_object *self)
{
    PLI_ENTER(self);
    if (self->origin == PL_END_OF_LOCAL_OUTPUT) {
        /* If called, it did that; another thread may run the next forward by now. */
        if (self->phase == END_QUEUED)
            pl_step_end_local(self->reducer->step);
    } else if (self->phase == END_QUEUED && self->reducer->settings.n_ends > 0) {
        if (self->reducer->settings.is_compiled)
            end_compiled(self);
        else
            report_failure(self->reducer);
        /* Last: the next forward waits for this, and the report may let it run. */
        self->reducer->settings.n_ends--;
    } else if (self->phase == END_ON_OUTER_NODE && is_active(self->reducer)) {
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

/* ---- the hook of a parameter ---------------------------------------------------- */

/* A hook does not own its reducer: the parameter owns the hook, the reducer owns the
 * parameter, and Python could not collect a cycle through torch's C++.  The reducer
 * clears the link when it goes. */
typedef struct hook_object {
    PyObject_HEAD
    reducer_object *reducer; /* borrowed; NULL after the reducer is gone */
    size_t index;
} hook_object;

static PyObject *hook_call(PyObject *object, PyObject *param);

/* The hook object behind a function, or NULL for a function of the user; borrowed. */
static PyObject *hook_behind(PyObject *function)
{
    return PyCFunction_Check(function) &&
                   PyCFunction_GET_FUNCTION(function) == hook_call
               ? PyCFunction_GET_SELF(function)
               : NULL;
}

/* Whether no other hook of the parameter runs after ours; if one does, fills the key of
 * ours. */
static int is_last(const reducer_param *param, PyObject **our_key)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int is_followed = 0; /* ignoring hooks of other wrappers, which change nothing */
    PLI_HOLD(param->hooks);
    *our_key = NULL;
    while (PyDict_Next(param->hooks, &at, &key, &value)) {
        const PyObject *hook = hook_behind(value);
        if (hook == param->hook)
            *our_key = key;
        else if (*our_key != NULL && hook == NULL)
            is_followed = 1;
    }
    if (is_followed)
        Py_INCREF(*our_key);
    return !is_followed;
}

/* Returns 1 if no other hook of the parameter runs after ours.  Else returns 0, and
 * makes ours the last from the next gradient on; or -1.  Hooks registered after ours
 * have yet to run for this gradient. */
static int become_last(const reducer_param *param)
{
    PyObject *our_key;
    if (is_last(param, &our_key))
        return 1;
    /* torch calls them in the order of the dict. */
    PyObject *function = PyObject_GetItem(param->hooks, our_key);
    const int status = function != NULL &&
                               PyObject_DelItem(param->hooks, our_key) == 0 &&
                               PyObject_SetItem(param->hooks, our_key, function) == 0
                           ? 0
                           : -1;
    Py_XDECREF(function);
    Py_DECREF(our_key);
    return status;
}

static int on_gradient(reducer_object *self, size_t i)
{
    pl_arrival arrival = PL_ARRIVES_ALONE;
    int is_due = 0;
    if (pli_has_user_hooks(&self->params[i])) {
        const int was_last = become_last(&self->params[i]);
        if (was_last < 0)
            return -1;
        arrival = was_last ? PL_ARRIVES_AFTER_HOOKS : PL_ARRIVES_BEFORE_HOOKS;
    }
    /* If it fails, so does the backward, and its end reports that. */
    if (pli_check(state_of_reducer(self),
                  pl_step_take(self->step, i, arrival, &is_due)) != 0)
        return -1;
    return is_due ? end_step(self) : 0;
}

static PyObject *hook_call(PyObject *object, PyObject *param)
{
    PLI_ENTER(object);
    const hook_object *self = (hook_object *)object;
    (void)param;
    reducer_object *reducer = self->reducer != NULL ? reducer_ref(self->reducer) : NULL;
    const int status = reducer != NULL ? on_gradient(reducer, self->index) : 0;
    if (status != 0)
        pli_comm_hook_raise_refusal(reducer);
    Py_XDECREF(reducer);
    return pli_none(status);
}

static PyMethodDef hook_call_def = {"paceline_hook", hook_call, METH_O,
                                    "paceline_hook($self, param, /)\n--\n\nTake the "
                                    "gradient that backward produced."};

PyObject *pli_hook_new(const module_state *state, reducer_object *reducer, size_t index)
{
    hook_object *self = PyObject_New(hook_object, state->hook_type);
    if (self == NULL)
        return NULL;
    self->reducer = reducer;
    self->index = index;
    return (PyObject *)self;
}

void pli_hook_detach(PyObject *hook)
{
    ((hook_object *)hook)->reducer = NULL;
}

PyObject *pli_hook_function(PyObject *hook)
{
    return PyCFunction_New(&hook_call_def, hook);
}

static void hook_dealloc(PyObject *object)
{
    pli_object_free(object);
}

static PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_doc, "A parameter's hook; made by Reducer alone."},
    {0, NULL},
};

PLI_TYPE(hook, Hook, Py_TPFLAGS_DISALLOW_INSTANTIATION);
