/* step.c - one backward: from its first gradient to its means. */
#include "sparse.h"

#include <unistd.h>

#include "../core/clock.h"

enum { MOST_NAPS = 1000 }; /* of a millisecond, for a thread that is about to end */

static const module_state *state_of_reducer(reducer_object *self)
{
    return state_of((PyObject *)self);
}

static pl_status recover_slice(void *reducer, int64_t slice_ns)
{
    return pl_reducer_recover(reducer, slice_ns);
}

/* Asks for the backward that runs: other threads may run theirs through this one. */
static int read_task(reducer_object *self)
{
    PyObject *task = PyObject_CallNoArgs(state_of_reducer(self)->current_task);
    self->task = task != NULL ? PyLong_AsLong(task) : -1;
    Py_XDECREF(task);
    return self->task == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Whether both reducers' steps are of the backward that ends in this thread with
 * `self`'s.  On the CPU a backward stays in its thread, nested ones with it; a device
 * has one thread, for everybody's. */
static int is_same_backward(const reducer_object *self, const reducer_object *other)
{
    if (other == self)
        return 1;
    if ((pli_is_on_device(self) || pli_is_on_device(other)) && self->task != -1)
        return other->task == self->task;
    return other->thread == PyThread_get_thread_ident();
}

static pl_status wait_slice(void *reducer, int64_t slice_ns)
{
    return pl_reducer_wait(reducer, slice_ns);
}

/* 1 or 0 as `question()` answers, or -1. */
static int ask(PyObject *question)
{
    PyObject *answer = PyObject_CallNoArgs(question);
    const int is_true = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return is_true;
}

/* Whether the backward is recorded itself (create_graph). */
static int read_recording(reducer_object *self)
{
    const int is_recorded = ask(state_of_reducer(self)->is_grad_enabled);
    if (is_recorded < 0)
        return -1;
    self->recording = is_recorded ? RECORDING_ON : RECORDING_OFF;
    return 0;
}

/* Who runs the backward. */
static int read_engine(reducer_object *self)
{
    const int is_compiled = ask(state_of_reducer(self)->is_compiled);
    if (is_compiled < 0)
        return -1;
    self->engine = is_compiled ? ENGINE_COMPILED : ENGINE_CALLS_BACK;
    return 0;
}

int pli_step_check_process(const reducer_object *self)
{
    if (getpid() == self->owner_pid)
        return 0;
    PyErr_Format(
        PyExc_RuntimeError,
        "this process (%d) was forked from rank %d (process %d) and is no rank "
        "itself: use the bare model (wrapper.module) here",
        (int)getpid(), pl_comm_rank(self->comm), self->owner_pid);
    return -1;
}

int pli_step_recover(reducer_object *self)
{
    return pli_wait_in_slices(state_of_reducer(self), recover_slice, self->reducer);
}

int pli_step_begin(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    if (pli_step_check_process(self) != 0 || read_recording(self) != 0 ||
        pli_step_recover(self) != 0 || pli_launch_check(self) != 0 ||
        pli_check(state, pl_reducer_begin(self->reducer)) != 0)
        return -1;
    self->thread = PyThread_get_thread_ident();
    pli_retention_begin_step(&self->retention);
    if (pli_launch_begin(self) != 0)
        return -1;
    if (self->window != NULL &&
        self->generation == pl_reducer_generation(self->reducer))
        return 0;
    return pli_means_refresh_window(self);
}

int pli_step_begin_local(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    /* Together with an output that is to be synchronised, all is. */
    if (self->n_guards > 0 || self->sync_forward == SYNC_OFF)
        return 0;
    PyObject *guard = pli_guard_new(state, self, GUARD_OF_LOCAL);
    PyObject *result =
        guard != NULL ? PyObject_CallOneArg(state->queue_callback, guard) : NULL;
    if (result != NULL)
        self->sync_forward = SYNC_OFF;
    Py_XDECREF(result);
    Py_XDECREF(guard);
    return result != NULL ? 0 : -1;
}

int pli_step_queue_guard(reducer_object *self, guard_origin origin)
{
    const module_state *state = state_of_reducer(self);
    if (self->n_guards > 0)
        return 0;
    if (read_engine(self) != 0 || read_task(self) != 0)
        return -1;
    PyObject *guard = pli_guard_new(state, self, origin);
    if (guard == NULL)
        return -1;
    PyObject *result = PyObject_CallOneArg(state->queue_callback, guard);
    /* The guard of a refused callback must not report a failed backward: it counts only
     * from here on. */
    if (result != NULL)
        self->n_guards++;
    Py_XDECREF(result);
    Py_DECREF(guard);
    return result != NULL ? 0 : -1;
}

int pli_step_await_guards(const reducer_object *self)
{
    for (int n = 0; pli_is_on_device(self) && self->n_guards > 0 && n < MOST_NAPS;
         n++) {
        Py_BEGIN_ALLOW_THREADS pli_sleep_ns(PLI_MS);
        Py_END_ALLOW_THREADS if (PyErr_CheckSignals() != 0) return -1;
    }
    return 0;
}

int pli_step_finish_inline(reducer_object *self)
{
    if (self->engine == ENGINE_CALLS_BACK || pl_reducer_n_unfired(self->reducer) > 0)
        return 0;
    return pli_step_finish(self);
}

static int close_reducer(reducer_object *self)
{
    pl_status st;
    if (!pli_is_on_device(self))
        return pli_check(state_of_reducer(self), pl_reducer_close(self->reducer));
    Py_BEGIN_ALLOW_THREADS st = pl_reducer_close(self->reducer);
    Py_END_ALLOW_THREADS return pli_check(state_of_reducer(self), st);
}

/* Speaks for what no gradient came for, and posts the rest of the step. */
static int close_step(reducer_object *self)
{
    if (pli_launch_look(self) != 0)
        return -1;
    for (size_t i = 0; self->part == PL_ACTIVE && i < self->n_slots; i++)
        if (pl_reducer_fires(self->reducer, i) == 0 && pli_grads_settle(self, i) != 0)
            return -1;
    if (pli_buffers_pack(self) != 0 || close_reducer(self) != 0)
        return -1;
    if (pli_is_on_device(self))
        pli_launch_let_go(self);
    return 0;
}

/* The peers have done their part; what the stream does next comes behind the means. */
static int wait_step(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    pl_status st;
    if (pli_wait_in_slices(state, wait_slice, self->reducer) != 0)
        return -1;
    if (!pli_is_on_device(self))
        return 0;
    Py_BEGIN_ALLOW_THREADS st = pl_reducer_order(self->reducer);
    Py_END_ALLOW_THREADS return pli_check(state, st);
}

static int amend_late(reducer_object *self)
{
    if (pl_reducer_n_late(self->reducer) == 0)
        return 0;
    if (pli_carrier_check_late(self) != 0)
        return -1;
    for (size_t i = 0; i < self->n_slots; i++)
        if (pl_reducer_is_late(self->reducer, i) && pli_grads_amend(self, i) != 0)
            return -1;
    return close_reducer(self) != 0 ? -1 : wait_step(self);
}

static int try_finish(reducer_object *self)
{
    if (pl_reducer_is_open(self->reducer) && close_step(self) != 0)
        return -1;
    if (pli_launch_look(self) != 0 || wait_step(self) != 0 || amend_late(self) != 0 ||
        pli_carrier_finish(self) != 0 || pli_join_rescale(self) != 0 ||
        pli_sparse_finish(self) != 0 || pli_carrier_confirm(self) != 0)
        return -1;
    for (size_t i = 0; i < self->n_slots; i++)
        if ((self->part == PL_ACTIVE ? pli_means_bind : pli_join_bind)(self, i) != 0)
            return -1;
    if (pli_launch_finish(self) != 0 || pli_buffers_receive(self) != 0)
        return -1;
    return pli_check(state_of_reducer(self), pl_reducer_end(self->reducer));
}

/* The peers are told why: in the words of the exception that is set. */
static void fail_with_exception(reducer_object *self)
{
    PyObject *words = pli_exception_words();
    pli_step_fail(self, words != NULL ? PyUnicode_AsUTF8(words)
                                      : "its backward could not be finished");
    Py_XDECREF(words);
}

int pli_step_close_all(reducer_object *self)
{
    int status = 0;
    reducer_object *other = state_of_reducer(self)->reducers;
    Py_XINCREF(other);
    while (other != NULL) {
        if (status == 0 && is_same_backward(self, other) &&
            pl_reducer_is_open(other->reducer)) {
            status = close_step(other);
            if (status != 0)
                fail_with_exception(other);
        }
        reducer_object *next = other->next;
        Py_XINCREF(next);
        Py_DECREF(other);
        other = next;
    }
    return status;
}

/* All gradients are there: tells whoever asked to be told. */
static int tell_finish(reducer_object *self)
{
    if (self->on_finish == NULL || self->on_finish == Py_None)
        return 0;
    PyObject *call = Py_NewRef(self->on_finish); /* it may be set anew meanwhile */
    PyObject *result = PyObject_CallNoArgs(call);
    Py_DECREF(call);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

int pli_step_finish(reducer_object *self)
{
    if (try_finish(self) == 0)
        return tell_finish(self) != 0 ? -1 : pli_join_check_end(self);
    fail_with_exception(self);
    return -1;
}

int pli_step_finish_all(reducer_object *self)
{
    int status = pli_step_close_all(self);
    reducer_object *other = state_of_reducer(self)->reducers; /* may have changed */
    Py_XINCREF(other);
    while (other != NULL) {
        if (status == 0 && is_same_backward(self, other) &&
            pl_reducer_is_active(other->reducer))
            status = pli_step_finish(other);
        reducer_object *next = other->next;
        Py_XINCREF(next);
        Py_DECREF(other);
        other = next;
    }
    /* The others' guards are dropped uncalled; this one's has been called. */
    if (status != 0 && pl_reducer_is_active(self->reducer))
        pli_step_fail(self, NULL);
    return status;
}

/* On a device the communicator is aborted, which may take a while. */
static void fail_reducer(reducer_object *self, const char *words)
{
    PyThreadState *thread = pli_is_on_device(self) ? PyEval_SaveThread() : NULL;
    pl_reducer_fail(self->reducer, words);
    if (thread != NULL)
        PyEval_RestoreThread(thread);
}

void pli_step_fail(reducer_object *self, const char *words)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    fail_reducer(self, words);
    pli_carrier_abandon(self);
    for (size_t i = 0; i < self->n_slots; i++) {
        const grad_slot *slot = &self->slots[i];
        /* A view that was taken away is given back; its values are no means. */
        if (slot->mode == GRAD_VIEW && slot->held != NULL &&
            PyObject_SetAttr(slot->param, state_of_reducer(self)->str_grad,
                             slot->held) != 0)
            PyErr_Clear();
        pli_means_drop(self, i);
    }
    self->buffers_state = BUFFERS_CURRENT;
    PyErr_Restore(type, value, traceback);
}
