/* step.c - one backward: from its first gradient to its reduced gradients; and the
 * shadow steps of a rank that ran out of batches. */
#include "step.h"

#include <unistd.h>

#include "backward_end_type.h"
#include "comm_hook.h"
#include "forwards.h"
#include "gpu_step.h"
#include "grads.h"
#include "module_buffers.h"
#include "sparse_grads.h"

/* Whether the engine's task, not the thread, identifies a backward.  A device has one
 * thread for all backwards; torch.distributed.autograd may use several for one. */
static int goes_by_task(const reducer_object *self)
{
    return pli_is_on_device(self) || self->context.task != NO_CONTEXT;
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

static pl_status wait_slice(void *reducer, int64_t slice_ns)
{
    return pl_reducer_wait(reducer, slice_ns);
}

/* Whether the backward itself is recorded (create_graph). */
static int read_recording(reducer_object *self)
{
    const int is_recorded =
        pli_is_true(PyObject_CallNoArgs(state_of_reducer(self)->is_grad_enabled));
    if (is_recorded < 0)
        return -1;
    self->recording = is_recorded ? RECORDING_ON : RECORDING_OFF;
    return 0;
}

int pli_step_check_process(const reducer_object *self)
{
    if (getpid() == self->owner_pid)
        return 0;
    return pli_error(
        PyExc_RuntimeError,
        "this process (%d) was forked from rank %d (process %d) and is not a rank "
        "itself: use the bare model (wrapper.module) here",
        (int)getpid(), pl_comm_rank(self->comm), self->owner_pid);
}

/* ---- views that are still in use ------------------------------------------------- */

/* Returns 1 if a view of slot i stays in use after the slot is written, 0, or -1. */
static int is_kept(reducer_object *self, size_t i)
{
    const grad_slot *slot = &self->slots[i];
    PyObject *grad = NULL;
    pli_tensor tensor;
    if (pli_slot_n_views(self, i) == 0)
        return 0;
    if (pli_slot_n_views(self, i) > 1 || self->recording == RECORDING_ON ||
        pli_has_user_hooks(slot) || self->role != PL_ACTIVE)
        return 1;
    const int has_grad = pli_grads_read(self, i, &grad, &tensor);
    if (has_grad <= 0)
        return has_grad < 0 ? -1 : 1;
    const int is_in_place = pli_slot_is_seen_by(self, i, &tensor);
    Py_DECREF(grad);
    return !is_in_place;
}

static int is_any_kept(reducer_object *self)
{
    int status = 0;
    if (self->generation != pl_reducer_generation(self->reducer))
        return 1;
    for (size_t i = 0; status == 0 && i < self->n_slots; i++)
        status = is_kept(self, i);
    return status;
}

/* On a GPU: if a view of any slot is still in use, moves to new memory. */
static int protect_views(reducer_object *self)
{
    int captures = 0;
    if (!pli_is_on_device(self))
        return 0;
    self->device.n_released = 0;
    if (self->window == NULL || pli_window_n_views(self->window) == 0)
        return 0;
    const int is_kept_anywhere = is_any_kept(self);
    if (is_kept_anywhere <= 0)
        return is_kept_anywhere;
    if (pli_gpu_step_is_capturing(self, &captures) != 0)
        return -1;
    if (!captures)
        return pli_grad_window_refresh(self);
    return pli_error(PyExc_RuntimeError,
                     "a CUDA graph captures a backward while gradients of an earlier "
                     "step are kept: drop them first, and call "
                     "zero_grad(set_to_none=True)");
}

/* ---- a step begins -------------------------------------------------------------- */

int pli_step_begin(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    if (pli_step_check_process(self) != 0 || read_recording(self) != 0 ||
        pli_gpu_step_check_capture(self) != 0 ||
        pli_check(state, pl_reducer_begin(self->reducer)) != 0)
        return -1;
    self->thread = PyThread_get_thread_ident();
    self->has_user_hooks = 0;
    if (protect_views(self) != 0)
        return -1;
    if (self->window != NULL &&
        self->generation == pl_reducer_generation(self->reducer))
        return 0;
    return pli_grad_window_refresh(self);
}

/* ---- gradients that torch.distributed.autograd keeps in a context ---------------- */

/* Gets the homes of the gradients in the backward's context, if any.  Before this only
 * arrivals are recorded; after it gradients are read and written at their homes. */
static int open_context(reducer_object *self)
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
        PyErr_Format(PyExc_ValueError, "contexts gave %R: give one per parameter (%zu)",
                     homes, self->n_slots);
        Py_DECREF(homes);
        return -1;
    }
    self->context.homes = homes;
    return 0;
}

static void close_context(reducer_object *self)
{
    self->context.task = NO_CONTEXT;
    Py_CLEAR(self->context.homes);
}

/* ---- a step ends --------------------------------------------------------------- */

static int close_reducer(reducer_object *self)
{
    return pli_is_on_device(self)
               ? pli_call_reducer(self, pl_reducer_close)
               : pli_check(state_of_reducer(self), pl_reducer_close(self->reducer));
}

/* Takes a deferred gradient, or marks a parameter without one. */
static int complete(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    if (slot->is_deferred) {
        slot->is_deferred = 0;
        return pli_grads_mark_ready(self, i);
    }
    return pl_reducer_ready_count(self->reducer, i) == 0
               ? pli_grads_mark_unused(self, i)
               : 0;
}

/* Completes all parameters, and posts the rest of the step. */
static int close_step(reducer_object *self)
{
    if (pli_gpu_step_read_stream(self) != 0 || open_context(self) != 0)
        return -1;
    for (size_t i = 0; self->role == PL_ACTIVE && i < self->n_slots; i++)
        if (complete(self, i) != 0)
            return -1;
    pli_forwards_send(self);
    if (pli_buffers_pack(self) != 0 || close_reducer(self) != 0)
        return -1;
    if (pli_is_on_device(self))
        pli_gpu_step_release_posted(self);
    return 0;
}

/* Waits for the peers' part; makes a GPU's stream wait for the results. */
static int wait_step(reducer_object *self)
{
    if (pli_wait_in_slices(state_of_reducer(self), wait_slice, self->reducer) != 0)
        return -1;
    return pli_is_on_device(self) ? pli_call_reducer(self, pl_reducer_order) : 0;
}

/* Runs the second all-reduce: for parameters that, on any rank, got a gradient after
 * their bucket was posted. */
static int reduce_late(reducer_object *self)
{
    if (pl_reducer_n_late(self->reducer) == 0)
        return 0;
    if (pli_comm_hook_check_late(self) != 0)
        return -1;
    for (size_t i = 0; i < self->n_slots; i++)
        if (pl_reducer_is_late(self->reducer, i) && pli_grads_write_late(self, i) != 0)
            return -1;
    return close_reducer(self) != 0 ? -1 : wait_step(self);
}

/* Gives up the step's gradients. */
static void drop_gradients(reducer_object *self)
{
    for (size_t i = 0; i < self->n_slots; i++) {
        const grad_slot *slot = &self->slots[i];
        /* Give back a view that was taken from `.grad`. */
        if (slot->mode == GRAD_VIEW && slot->target != NULL &&
            pli_set_grad(self, i, slot->target) != 0)
            PyErr_Clear();
        pli_results_drop(self, i);
    }
    self->device.n_copies = 0;
    pli_buffers_forget(self);
    close_context(self);
}

/* Returns -1, with MismatchError, if the ranks are not in the same step.  Every rank
 * detects this itself, so none sends a failure: the step ends without results. */
static int check_is_same_step(reducer_object *self)
{
    PyObject *type, *value, *traceback;
    if (pli_check(state_of_reducer(self), pl_reducer_check_forwards(self->reducer)) ==
        0)
        return 0;
    PyErr_Fetch(&type, &value, &traceback);
    if (pli_comm_hook_finish(self) != 0)
        PyErr_Clear();
    drop_gradients(self);
    pl_reducer_discard(self->reducer);
    pli_forwards_end_step(self, 0);
    PyErr_Restore(type, value, traceback);
    return -1;
}

static int bind_results(reducer_object *self)
{
    int status = 0;
    for (size_t i = 0; status == 0 && i < self->n_slots; i++)
        status = pli_results_bind(self, i);
    return status == 0 ? pli_results_finish(self) : -1;
}

/* The end of a step, in this order:
 *
 *  1. close_step: marks parameters without a gradient, packs the root's buffers, and
 *     posts the rest of the step
 *  2. wait_step: waits for every rank's part, and so for results and flags
 *  3. check_is_same_step: compares the flags; if ranks are in different steps, raises
 *  4. reduce_late: runs a second all-reduce for late gradients
 *  5. pli_comm_hook_finish: writes a communication hook's results to the slots
 *  6. rescale: if a join context requires it, means are over the active ranks only
 *  7. pli_sparse_finish: averages rows of sparse gradients into new tensors
 *  8. pli_comm_hook_confirm: waits for all ranks to get here, or all give up the step
 *  9. pl_reducer_complete: peers now keep the step, so this rank must keep it too; none
 *     of our Python code runs after this, so Ctrl-C cannot raise in it
 * 10. bind_results: makes the reduced gradients `.grad`
 * 11. pli_buffers_receive: notes rank 0's buffers, to take them over later
 */
static int try_finish(reducer_object *self)
{
    if (pl_reducer_is_open(self->reducer) && close_step(self) != 0)
        return -1;
    if (pli_gpu_step_read_stream(self) != 0 || wait_step(self) != 0 ||
        check_is_same_step(self) != 0 || reduce_late(self) != 0 ||
        pli_comm_hook_finish(self) != 0 ||
        (pli_is_to_rescale(self) && pli_call_reducer(self, pl_reducer_rescale) != 0) ||
        pli_sparse_finish(self) != 0 || pli_comm_hook_confirm(self) != 0 ||
        pli_check(state_of_reducer(self), pl_reducer_complete(self->reducer)) != 0 ||
        bind_results(self) != 0 || pli_buffers_receive(self) != 0)
        return -1;
    close_context(self);
    pli_forwards_end_step(self, 1);
    return pli_check(state_of_reducer(self), pl_reducer_end(self->reducer));
}

void pli_step_fail_with_exception(reducer_object *self)
{
    pli_comm_hook_raise_refusal(self);
    PyObject *text = pli_exception_words();
    pli_step_fail(self, text != NULL ? PyUnicode_AsUTF8(text)
                                     : "its backward could not be finished");
    Py_XDECREF(text);
}

/* Called when all gradients are set. */
static int call_on_finish(reducer_object *self)
{
    if (self->on_finish == NULL || self->on_finish == Py_None)
        return 0;
    PyObject *call = Py_NewRef(self->on_finish); /* the call may set another one */
    PyObject *result = PyObject_CallNoArgs(call);
    Py_DECREF(call);
    return pli_drop(result);
}

/* Returns -1, with torch's exception, if a rank has run out of batches and the join
 * context must end then. */
static int check_join_end(const reducer_object *self)
{
    if (self->join.end == JOIN_GOES_ON || self->role != PL_ACTIVE ||
        !pli_is_anyone_missing(self))
        return 0;
    return pli_error(
        PyExc_RuntimeError,
        "Detected at least one rank that exhausted inputs. Throwing across "
        "all ranks.");
}

int pli_step_finish(reducer_object *self)
{
    if (try_finish(self) == 0)
        return call_on_finish(self) != 0 ? -1 : check_join_end(self);
    if (pl_reducer_is_active(self->reducer))
        pli_step_fail_with_exception(self);
    return -1;
}

/* ---- the steps of one backward -------------------------------------------------- */

static int close_if_open(reducer_object *self)
{
    if (!pl_reducer_is_open(self->reducer) || close_step(self) == 0)
        return 0;
    pli_step_fail_with_exception(self);
    return -1;
}

static int finish_if_active(reducer_object *self)
{
    return pl_reducer_is_active(self->reducer) ? pli_step_finish(self) : 0;
}

/* The live reducer after `at`, a reference that it takes over; the list may have
 * changed since. */
static reducer_object *next_after(reducer_object *at)
{
    reducer_object *next = pli_reducers_first(at->next);
    Py_DECREF(at);
    return next;
}

/* Visits every reducer whose step ends with `self`'s, in the order of the list, until a
 * visit fails.  The list may change meanwhile. */
static int visit_backward(reducer_object *self, int (*visit)(reducer_object *))
{
    int status = 0;
    reducer_object *other = pli_reducers_first(state_of_reducer(self)->reducers);
    for (; other != NULL; other = next_after(other))
        if (status == 0 && is_same_backward(self, other))
            status = visit(other);
    return status;
}

int pli_step_finish_all(reducer_object *self)
{
    int status = visit_backward(self, close_if_open);
    if (status == 0)
        status = visit_backward(self, finish_if_active);
    /* Other steps fail as the engine drops their callbacks.  It has called `self`'s. */
    if (status != 0 && pl_reducer_is_active(self->reducer))
        pli_step_fail(self, NULL);
    return status;
}

/* An error that ends one wrapper's step has told of all worlds that have failed by then
 * (those of wrappers that wait for one another): their next forwards meet the ranks. */
static void notice_failures(const module_state *state)
{
    reducer_object *other = pli_reducers_first(state->reducers);
    for (; other != NULL; other = next_after(other))
        if (other->reducer != NULL && other->owner_pid == getpid() &&
            !pl_reducer_is_active(other->reducer) &&
            !pl_reducer_has_failed(other->reducer))
            (void)!pl_reducer_notice_failure(other->reducer);
}

void pli_step_fail(reducer_object *self, const char *text)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    /* On a device this aborts the communicator, which may take a while. */
    PyThreadState *thread = pli_let_go(self->device.gpu);
    pl_reducer_fail(self->reducer, text);
    pli_take_back(thread);
    pli_forwards_fail_step(self);
    pli_comm_hook_abandon(self);
    drop_gradients(self);
    notice_failures(state_of_reducer(self));
    PyErr_Restore(type, value, traceback);
}

/* ---- ranks that ran out of batches ---------------------------------------------- */

/* Such a rank takes shadow steps: whole steps with zeros and without a backward, until
 * a step's participation shows that no rank has gradients any more.  The others take
 * ordinary steps, and read from the participation which ranks were missing. */
static int begin_shadow(reducer_object *self, pl_role role)
{
    /* Move gradients that are views of their slots before all slots are written: they
     * keep their values.  On a device pli_step_begin() does that. */
    if (pli_step_check_process(self) != 0 || pli_backward_end_await(self) != 0 ||
        pli_buffers_apply(self) != 0 ||
        (!pli_is_on_device(self) && pli_grad_window_refresh(self) != 0))
        return -1;
    self->role = role;
    int status = pli_step_begin(self);
    if (status == 0) {
        PyThreadState *thread = PyEval_SaveThread();
        const pl_status st = pl_reducer_shadow_step(self->reducer, role);
        PyEval_RestoreThread(thread);
        status = pli_check(state_of_reducer(self), st);
    }
    if (status != 0 && pl_reducer_is_active(self->reducer))
        pli_step_fail(self, NULL);
    return status;
}

PyObject *pli_join_shadow_step(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    int is_first = 0, binds_results = 0;
    if (!PyArg_ParseTuple(args, "pp:shadow_step", &is_first, &binds_results))
        return NULL;
    const pl_role role = is_first ? PL_JOINING : PL_SHADOWING;
    int status = begin_shadow(self, role);
    self->join.grads = binds_results ? JOIN_BINDS_RESULTS : JOIN_LEAVES_GRADS;
    if (status == 0)
        status = pli_step_finish(self);
    self->role = PL_ACTIVE;
    if (status != 0)
        return NULL;
    const pl_participation last = pl_reducer_participation(self->reducer);
    return Py_BuildValue("ii", last.n_active, last.last_joining);
}

PyObject *pli_join_set(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    int divides_by_active = 0, raises = 0;
    if (!PyArg_ParseTuple(args, "pp:set_join", &divides_by_active, &raises))
        return NULL;
    self->join.divisor = divides_by_active ? DIVIDE_BY_N_ACTIVE : DIVIDE_BY_WORLD_SIZE;
    pl_reducer_reset_participation(self->reducer);
    pli_forwards_forget_failed(self);
    self->join.end = raises ? JOIN_RAISES : JOIN_GOES_ON;
    Py_RETURN_NONE;
}

PyObject *pli_join_abandon(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    const char *text = pli_text_of(argument);
    if (text == NULL || pli_step_check_process(self) != 0)
        return NULL;
    if (!pl_reducer_has_failed(self->reducer))
        pli_step_fail(self, text);
    Py_RETURN_NONE;
}
