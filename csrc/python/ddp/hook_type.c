/* hook_type.c - the callable behind each parameter's post-accumulate-grad hook.
 *
 * It runs after all hooks of the user, whenever they were registered, and takes the
 * gradient as they left it.  torch's wrapper does so too: its hook is on the node,
 * whose hooks run after the parameter's.
 *
 * It does not own its reducer: the parameter owns the hook, the reducer owns the
 * parameter, and Python could not collect a cycle through torch's C++.  The reducer
 * clears the link when it goes.
 */
#include "hook_type.h"

#include <unistd.h>

#include "backward_end_type.h"
#include "comm_hook.h"
#include "core/clock.h"
#include "forwards.h"
#include "gpu_step.h"
#include "grads.h"
#include "step.h"

typedef struct hook_object {
    PyObject_HEAD
    reducer_object *reducer; /* borrowed; NULL after the reducer is gone */
    size_t index;
} hook_object;

/* Under `strict`, raises torch's error for a second gradient in one backward. */
static int check_is_first(const reducer_object *self, size_t i)
{
    if (!self->options.is_strict)
        return 0;
    if (self->slots[i].is_unused)
        return pli_error(
            PyExc_RuntimeError,
            "Expected to mark a variable ready only once. Parameter at index %zu (of "
            "those that require gradients) got a gradient, and no output of the last "
            "forward shows that it is used: it is used in a reentrant checkpoint, for "
            "an output that hides its tensors, or outside of forward. Leave out "
            "find_unused_parameters, or strict: paceline averages such gradients too.",
            i);
    if (pl_reducer_ready_count(self->reducer, i) == 0)
        return 0;
    return pli_error(
        PyExc_RuntimeError,
        "Expected to mark a variable ready only once. Parameter at index %zu (of those "
        "that require gradients) got a second gradient in one backward: it is used in "
        "several reentrant checkpoints, or outside of forward. Checkpoint with "
        "use_reentrant=False, or leave out strict: paceline averages such gradients "
        "too.",
        i);
}

static char *field_of(reducer_object *self, size_t i, const void *offset)
{
    return (char *)&self->slots[i] + (size_t)offset;
}

PyObject *pli_hook_get_flags(PyObject *object, void *offset)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    PyObject *flags = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->n_slots);
    for (size_t i = 0; flags != NULL && i < self->n_slots; i++)
        PyBytes_AS_STRING(flags)[i] = *field_of(self, i, offset);
    return flags;
}

int pli_hook_set_flags(PyObject *object, PyObject *flags, void *offset)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    if (flags == NULL || !PyBytes_Check(flags) ||
        PyBytes_GET_SIZE(flags) != (Py_ssize_t)self->n_slots)
        return pli_error(PyExc_ValueError, "give %zu bytes, one a parameter",
                         self->n_slots);
    for (size_t i = 0; i < self->n_slots; i++)
        *field_of(self, i, offset) = PyBytes_AS_STRING(flags)[i];
    return 0;
}

static PyObject *hook_call(PyObject *object, PyObject *param);

/* The hook object behind a function, or NULL for a function of the user; borrowed. */
static PyObject *hook_behind(PyObject *function)
{
    return PyCFunction_Check(function) &&
                   PyCFunction_GET_FUNCTION(function) == hook_call
               ? PyCFunction_GET_SELF(function)
               : NULL;
}

/* Returns 1 if no other hook of the parameter runs after ours.  Else returns 0, and
 * makes ours the last from the next gradient on; or -1. */
static int become_last(const grad_slot *slot)
{
    PyObject *key, *value;
    PyObject *our_key = NULL;
    int is_last = 1; /* ignoring hooks of other wrappers, which change nothing */
    Py_ssize_t at = 0;
    while (PyDict_Next(slot->hooks, &at, &key, &value)) {
        const PyObject *hook = hook_behind(value);
        if (hook == slot->hook)
            our_key = key;
        else if (our_key != NULL && hook == NULL)
            is_last = 0;
    }
    if (our_key == NULL || is_last)
        return 1;
    /* torch calls them in the order of the dict. */
    Py_INCREF(our_key);
    PyObject *function = PyObject_GetItem(slot->hooks, our_key);
    const int status = function != NULL &&
                               PyObject_DelItem(slot->hooks, our_key) == 0 &&
                               PyObject_SetItem(slot->hooks, our_key, function) == 0
                           ? 0
                           : -1;
    Py_XDECREF(function);
    Py_DECREF(our_key);
    return status;
}

/* Whether to take the gradient now: 1, 0 or -1.  If the user registered hooks after
 * ours, they have yet to run for this gradient. */
static int is_final(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    if (!pli_has_user_hooks(slot))
        return 1;
    self->has_user_hooks = 1;
    const int is_last = become_last(slot);
    slot->is_deferred = (char)(is_last == 0);
    return is_last;
}

/* A gradient came for slot i: in the context of backward `task`, or, with NO_CONTEXT,
 * as `.grad`.  Returns 1 if it belongs to a step, which may begin with it; 0 if it is
 * local; or -1. */
static int enter_step(reducer_object *self, size_t i, long task)
{
    if (!pl_reducer_is_active(self->reducer)) {
        if (getpid() != self->owner_pid)
            return 0; /* a forked child trains the bare model on its own */
        if (!pli_forwards_begin_step(self, i)) {
            if (task == NO_CONTEXT)
                self->slots[i].is_unseen = 1;
            return 0;
        }
        /* Queue the callback first: if this backward fails, it reports that. */
        if (pli_backward_end_queue(self, QUEUED_BY_PARAMETER) != 0 ||
            pli_step_begin(self) != 0 ||
            (task == NO_CONTEXT && pli_grads_note(self, i) != 0))
            return -1;
        self->context.task = task;
    } else if (self->context.task != task) {
        return pli_error(
            PyExc_RuntimeError,
            "a model got gradients from two backwards at once, one of them "
            "through torch.distributed.autograd: run one after the other");
    }
    /* An inner backward's callback may have run: the outer backward needs its own. */
    if (self->n_backward_ends == 0 && self->engine == ENGINE_CALLS_BACK &&
        pli_backward_end_queue(self, QUEUED_BY_PARAMETER) != 0)
        return -1;
    return 1;
}

/* After each gradient: ends the step here if the engine will not call back. */
static int finish_inline(reducer_object *self)
{
    if (self->engine == ENGINE_CALLS_BACK || pl_reducer_n_not_ready(self->reducer) > 0)
        return 0;
    return pli_step_finish(self);
}

static int on_gradient(reducer_object *self, size_t i)
{
    const int is_in_step = enter_step(self, i, NO_CONTEXT);
    if (is_in_step <= 0)
        return is_in_step;
    if (self->options.notes_arrivals)
        self->slots[i].arrived_ns = pli_now_ns();
    const int takes_it = is_final(self, i);
    if (takes_it <= 0)
        return takes_it;
    if (check_is_first(self, i) != 0 ||
        (pli_is_on_device(self) && pli_gpu_step_read_stream(self) != 0))
        return -1;
    return pli_grads_mark_ready(self, i) != 0 ? -1 : finish_inline(self);
}

static int refuse_device(const reducer_object *self)
{
    if (!pli_is_on_device(self))
        return 0;
    return pli_error(PyExc_NotImplementedError,
                     "this version of paceline averages gradients in contexts of "
                     "torch.distributed.autograd for models on the CPU only: wrap a "
                     "model on GPUs with torch's own DistributedDataParallel");
}

PyObject *pli_hook_arrive_in_context(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    Py_ssize_t i;
    long task;
    if (!PyArg_ParseTuple(args, "nl:arrive_in_context", &i, &task))
        return NULL;
    if (i < 0 || (size_t)i >= self->n_slots || task < 0 || self->context.all == NULL)
        return PyErr_Format(PyExc_ValueError, "no parameter %zd, or no backward %ld", i,
                            task);
    if (self->attachment == DETACHED)
        Py_RETURN_NONE;
    if (refuse_device(self) != 0)
        return NULL;
    const int is_in_step = enter_step(self, (size_t)i, task);
    if (is_in_step < 0)
        return NULL;
    if (is_in_step > 0)
        self->slots[i].is_deferred = 1;
    Py_RETURN_NONE;
}

static PyObject *hook_call(PyObject *object, PyObject *param)
{
    PLI_ENTER(object);
    const hook_object *self = (hook_object *)object;
    (void)param;
    reducer_object *reducer =
        self->reducer != NULL ? pli_reducer_ref(self->reducer) : NULL;
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
