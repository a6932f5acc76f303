/* reducer_type.c - paceline._native.Reducer: construction, methods and attributes. */
#include <stddef.h>
#include <unistd.h>

#include "backward_end_type.h"
#include "comm_hook.h"
#include "core/alloc.h"
#include "forwards.h"
#include "hook_type.h"
#include "module_buffers.h"
#include "reducer_args.h"
#include "reducer_list.h"
#include "step.h"
#include "uneven_inputs.h"
#include <structmember.h>

static reducer_object *reducer_of(PyObject *object)
{
    return (reducer_object *)object;
}

/* ---- construction and end ------------------------------------------------------- */

static PyObject *reducer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"world",        "params",     "buffers",
                            "bucket_bytes", "last_bytes", "view_bytes",
                            "sparse",       "caps",       NULL};
    module_state *state = state_of_type(type);
    pli_reducer_args read = {0};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!O!nnn|O!O!:Reducer", names, state->world_type,
            &read.world, &PyList_Type, &read.params, &PyList_Type, &read.buffers,
            &read.bucket_bytes, &read.last_bytes, &read.view_bytes, &PyList_Type,
            &read.sparse, &PyTuple_Type, &read.caps) ||
        pli_needs_torch(state) != 0)
        return NULL;
    reducer_object *self = (reducer_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (pli_reducers_enter(state, self) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->world = Py_NewRef(read.world);
    self->comm = ((world_object *)read.world)->comm;
    read.world_size = pl_comm_world_size(self->comm);
    self->device.gpu = ((world_object *)read.world)->gpu;
    self->device.place =
        pli_is_on_device(self) ? self->device.gpu->place : (dl_device){.type = DL_CPU};
    self->task = -1;
    self->context.task = NO_CONTEXT;
    self->sync.is_on = 1;
    self->sync.backward = SYNC_ON;
    self->role = PL_ACTIVE;
    self->owner_pid = getpid();
    read.is_on_device = pli_is_on_device(self);
    if (pli_reducer_build(state, self, &read) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void remove_hooks(reducer_object *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (size_t i = 0; self->slots != NULL && i < self->n_slots; i++) {
        if (self->slots[i].hook != NULL)
            pli_hook_detach(self->slots[i].hook);
        if (self->slots[i].handle == NULL)
            continue;
        if (pli_drop(PyObject_CallMethod(self->slots[i].handle, "remove", NULL)) != 0)
            PyErr_Clear(); /* at interpreter exit: the hook does nothing anyway */
        Py_CLEAR(self->slots[i].handle);
    }
    PyErr_Restore(type, value, traceback);
}

static int reducer_traverse(PyObject *object, visitproc visit, void *arg)
{
    const reducer_object *self = reducer_of(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->world);
    Py_VISIT(self->on_finish);
    Py_VISIT(self->comm_hook);
    Py_VISIT(self->context.all);
    Py_VISIT(self->context.homes);
    for (size_t i = 0; self->slots != NULL && i < self->n_slots; i++) {
        Py_VISIT(self->slots[i].param);
        Py_VISIT(self->slots[i].hooks);
        Py_VISIT(self->slots[i].handle);
        Py_VISIT(self->slots[i].target);
        Py_VISIT(self->slots[i].late);
        Py_VISIT(self->slots[i].retained);
        Py_VISIT(self->slots[i].saved);
    }
    for (size_t b = 0; self->buffers.all != NULL && b < self->buffers.n; b++) {
        Py_VISIT(self->buffers.all[b].owner);
        Py_VISIT(self->buffers.all[b].seen);
    }
    return 0;
}

static int reducer_clear(PyObject *object)
{
    reducer_object *self = reducer_of(object);
    remove_hooks(self);
    pli_free_slots(self->slots, self->n_slots);
    self->slots = NULL;
    self->n_slots = 0;
    pli_free_buffers(self->buffers.all, self->buffers.n);
    self->buffers.all = NULL;
    self->buffers.n = 0;
    Py_CLEAR(self->on_finish);
    Py_CLEAR(self->comm_hook);
    Py_CLEAR(self->context.all);
    Py_CLEAR(self->context.homes);
    return 0;
}

/* Before members are freed: stops hooks in other threads from leading here. */
static void detach_hooks(const reducer_object *self)
{
    PLI_ENTER(self);
    for (size_t i = 0; self->slots != NULL && i < self->n_slots; i++)
        if (self->slots[i].hook != NULL)
            pli_hook_detach(self->slots[i].hook);
}

static void reducer_dealloc(PyObject *object)
{
    reducer_object *self = reducer_of(object);
    detach_hooks(self);
    pli_reducers_leave(state_of(object), self);
    PyObject_GC_UnTrack(object);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs(object);
    Py_CLEAR(self->weak_self);
    (void)reducer_clear(object);
    pl_reducer_destroy(self->reducer);
    pli_window_release(self->window);
    if (self->device.captured != NULL)
        self->device.captured->release(self->device.captured);
    pli_backend_destroy(self->backend);
    pli_free(self->device.copies);
    Py_CLEAR(self->world); /* last: the rest lives in its memory */
    pli_object_free(object);
}

/* ---- methods -------------------------------------------------------------------- */

static int is_in_backward(const module_state *state)
{
    PyObject *node = PyObject_CallNoArgs(state->current_node);
    const int is_inside = node != NULL && node != Py_None;
    PyErr_Clear();
    Py_XDECREF(node);
    return is_inside;
}

/* Before a synchronised forward: leaves a failed step behind.  If only a peer failed,
 * this rank meets that when it waits for peers, so that its own errors come first. */
static int leave_failure(reducer_object *self)
{
    if (!self->sync.is_on || !pl_reducer_has_failed(self->reducer))
        return 0;
    if (pli_step_recover(self) != 0)
        return -1;
    pli_forwards_restart(self, 0);
    return 0;
}

static PyObject *reducer_forward_begins(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    const module_state *state = state_of(object);
    (void)ignored;
    /* A forward inside a backward is a checkpoint's recomputation: ignore it. */
    if (is_in_backward(state))
        Py_RETURN_NONE;
    if (pli_step_check_process(self) != 0 || pli_backward_end_await(self) != 0)
        return NULL;
    if (self->unseen == FAILURE_UNSEEN) {
        self->unseen = NO_FAILURE_UNSEEN;
        return PyErr_Format(PyExc_RuntimeError,
                            "the last backward's gradients were not averaged: compiled "
                            "autograd ran it outside of the main thread and left "
                            "parameters unused; run it in the main thread");
    }
    if (pl_reducer_is_active(self->reducer)) {
        /* The optimizer has run since, on gradients that were not averaged. */
        pli_step_fail(self, "the end of the last backward was never seen");
        return PyErr_Format(
            PyExc_RuntimeError,
            "the last backward's gradients were not averaged, since its end "
            "was never seen: run the model's forward through the wrapper");
    }
    self->sync.backward = SYNC_ON;
    if (leave_failure(self) != 0 ||
        (pli_is_on_device(self) && pli_buffers_apply(self) != 0))
        return NULL;
    /* Drop an old exception, unless it failed a step: peers must still read it. */
    if (!pl_reducer_has_failed(self->reducer))
        pli_comm_set_failure_message(self->comm, NULL);
    pli_comm_record_activity(self->comm, PL_FORWARD,
                             pl_reducer_step(self->reducer) + 1);
    Py_RETURN_NONE;
}

static PyObject *reducer_forward_ends(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    uint64_t token = 0;
    int is_watched, is_training;
    if (!PyArg_ParseTuple(args, "pp:forward_ends", &is_watched, &is_training))
        return NULL;
    if (!is_in_backward(state_of(object))) {
        if (self->sync.is_on)
            token =
                pli_forwards_end(self, is_watched ? OUTPUTS_WATCHED : OUTPUTS_UNWATCHED,
                                 is_training ? MODE_TRAINING : MODE_EVALUATION);
        else if (!is_watched) /* no backward of it can be seen: await none */
            self->forwards.n_over = self->forwards.n;
    }
    if (!pl_reducer_is_active(self->reducer))
        pli_comm_record_activity(self->comm, PL_IDLE,
                                 pl_reducer_step(self->reducer) + 1);
    return PyLong_FromUnsignedLongLong(token);
}

static PyObject *reducer_await_backward(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    (void)pli_forwards_end(reducer_of(object), OUTPUTS_UNWATCHED, MODE_TRAINING);
    Py_RETURN_NONE;
}

static PyObject *reducer_forward_fails(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    /* If a peer has failed, it was in the same step, which this rank gave up too. */
    if (self->sync.is_on && !is_in_backward(state_of(object)))
        pl_reducer_skip(self->reducer);
    Py_RETURN_NONE;
}

static PyObject *reducer_apply_buffers(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    return pli_none(pli_buffers_apply(reducer_of(object)));
}

static PyObject *reducer_sync_buffers(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    if (pli_is_on_device(self) || is_in_backward(state_of(object)))
        Py_RETURN_NONE;
    if (pli_buffers_sync(self) == 0)
        Py_RETURN_NONE;
    if (!pl_reducer_has_failed(self->reducer))
        pli_step_fail_with_exception(self);
    return NULL;
}

static PyObject *reducer_detach(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    self->attachment = DETACHED;
    remove_hooks(self);
    Py_RETURN_NONE;
}

static PyObject *reducer_on_output(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    int is_synchronised;
    unsigned long long token;
    if (!PyArg_ParseTuple(args, "pK:on_output", &is_synchronised, &token))
        return NULL;
    if (self->attachment == DETACHED)
        Py_RETURN_FALSE;
    if (token > 0)
        pli_forwards_answer(self, token);
    if (!is_synchronised) {
        if (pli_backward_end_queue_local(self) != 0)
            return NULL;
        Py_RETURN_TRUE;
    }
    self->sync.backward = SYNC_ON;
    if (!self->sync.is_in_no_sync &&
        pli_backward_end_queue(self, QUEUED_BY_OUTPUT) != 0)
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *reducer_get_step(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromUnsignedLongLong(pl_reducer_step(reducer_of(object)->reducer));
}

static PyObject *reducer_get_n_active(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromLong(
        pl_reducer_participation(reducer_of(object)->reducer).n_active);
}

static PyObject *reducer_get_is_active(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyBool_FromLong(pl_reducer_is_active(reducer_of(object)->reducer));
}

/* [[parameter, ...], ...]: the current plan's buckets, in order. */
static PyObject *reducer_get_buckets(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    const pl_plan *plan = pl_reducer_plan(reducer_of(object)->reducer);
    PyObject *buckets = PyList_New((Py_ssize_t)plan->n_buckets);
    (void)closure;
    for (size_t b = 0; buckets != NULL && b < plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &plan->buckets[b];
        PyObject *members = PyList_New((Py_ssize_t)bucket->n_params);
        for (size_t m = 0; members != NULL && m < bucket->n_params; m++)
            pli_list_put(&members, (Py_ssize_t)m,
                         PyLong_FromUnsignedLong(bucket->params[m]));
        pli_list_put(&buckets, (Py_ssize_t)b, members);
    }
    return buckets;
}

/* How often each parameter got a gradient in the last step begun. */
static PyObject *reducer_get_ready_counts(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->n_slots);
    (void)closure;
    for (size_t i = 0; bytes != NULL && i < self->n_slots; i++) {
        const unsigned n = pl_reducer_ready_count(self->reducer, i);
        PyBytes_AS_STRING(bytes)[i] = (char)(n < UINT8_MAX ? n : UINT8_MAX);
    }
    return bytes;
}

static PyObject *reducer_note_arrivals(PyObject *object, PyObject *is_on)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    PyObject *times = PyList_New((Py_ssize_t)self->n_slots);
    for (size_t i = 0; times != NULL && i < self->n_slots; i++) {
        pli_list_put(&times, (Py_ssize_t)i,
                     PyLong_FromLongLong(self->slots[i].arrived_ns));
        self->slots[i].arrived_ns = 0;
    }
    self->options.notes_arrivals = (char)(is_on == Py_True);
    return times;
}

static PyMethodDef reducer_methods[] = {
    {"forward_begins", reducer_forward_begins, METH_NOARGS,
     "forward_begins($self, /)\n--\n\nTake over buffers, and leave a failed step "
     "behind."},
    {"forward_ends", reducer_forward_ends, METH_VARARGS,
     "forward_ends($self, is_watched, is_training, /)\n--\n\nIf is_watched, return "
     "a token for the on_output() call when its backward begins; else return 0."},
    {"await_backward", reducer_await_backward, METH_NOARGS,
     "await_backward($self, /)\n--\n\nTreat the next backward as that of a "
     "synchronised forward."},
    {"forward_fails", reducer_forward_fails, METH_NOARGS,
     "forward_fails($self, /)\n--\n\nThe forward begun last will have no backward."},
    {"sync_buffers", reducer_sync_buffers, METH_NOARGS,
     "sync_buffers($self, /)\n--\n\nIn a training forward on the CPU: take over rank "
     "0's current buffers."},
    {"apply_buffers", reducer_apply_buffers, METH_NOARGS,
     "apply_buffers($self, /)\n--\n\nTake over rank 0's buffers of the last step."},
    {"on_output", reducer_on_output, METH_VARARGS,
     "on_output($self, is_synchronised, token, /)\n--\n\nThe backward of a forward "
     "begins. is_synchronised is that of the forward; token is its token the first "
     "time, 0 later. Return False if another reducer has the parameters."},
    {"arrive_in_context", pli_hook_arrive_in_context, METH_VARARGS,
     "arrive_in_context($self, index, task, /)\n--\n\nIn backward number "
     "task, a parameter got a gradient in a context of torch.distributed.autograd, "
     "not as its `grad`."},
    {"note_arrivals", reducer_note_arrivals, METH_O,
     "note_arrivals($self, is_on, /)\n--\n\nReturn when a step last took each "
     "parameter's gradient since the call before, in nanoseconds of the monotonic "
     "clock, or 0; note the times from now on, or stop."},
    {"detach", reducer_detach, METH_NOARGS,
     "detach($self, /)\n--\n\nRemove the hooks from the parameters: another reducer "
     "has them from now on, also for outputs of earlier forwards."},
    {"shadow_step", pli_join_shadow_step, METH_VARARGS,
     "shadow_step($self, is_first, binds_results, /)\n--\n\nTake part in one step "
     "without gradients; return the number of ranks that had gradients, and the "
     "highest rank that took its first shadow step, or -1."},
    {"set_join", pli_join_set, METH_VARARGS,
     "set_join($self, divides_by_active, raises, /)\n--\n\nForget which ranks were "
     "missing; set whether means are over the active ranks, and whether backward "
     "raises if a rank is missing."},
    {"abandon", pli_join_abandon, METH_O,
     "abandon($self, text, /)\n--\n\nTell the peers, unless they were told, that this "
     "rank will not take the next step, and why."},
    {"set_comm_hook", (PyCFunction)(void (*)(void))pli_comm_hook_set,
     METH_VARARGS | METH_KEYWORDS,
     "set_comm_hook($self, hook, bucket_bytes, last_bytes, caps=())\n--\n\nLet a hook "
     "average the buckets from now on, laid out anew with these caps. The reducer "
     "calls its post(bucket) for each full bucket, finish() when all are full, "
     "abandon() when a step fails, and finish_sparse(params, is_active, binds) for "
     "parameters declared sparse."},
    {"poll", pli_comm_hook_poll, METH_NOARGS,
     "poll($self, /)\n--\n\nRaise if a rank has failed or left."},
    {"read_bucket", pli_comm_hook_read_bucket, METH_VARARGS,
     "read_bucket($self, bucket, tensor, /)\n--\n\nCopy a bucket's gradients, one "
     "after another, to a tensor."},
    {"write_bucket", pli_comm_hook_write_bucket, METH_VARARGS,
     "write_bucket($self, bucket, tensor, /)\n--\n\nThe reverse of read_bucket()."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reducer_getset[] = {
    {"step", reducer_get_step, NULL, "Number of synchronised backwards begun.", NULL},
    {"is_active", reducer_get_is_active, NULL, "Whether a step is in progress.", NULL},
    {"n_active", reducer_get_n_active, NULL, "Ranks with gradients, last step.", NULL},
    {"buckets", reducer_get_buckets, NULL, "Parameters' indices, by bucket.", NULL},
    {"ready_counts", reducer_get_ready_counts, NULL,
     "How often each parameter got a gradient in the last step; 255: or more.", NULL},
    {"has_other_buffers", pli_buffers_get_are_others, NULL,
     "Whether a buffer is gone, or has changed its size.", NULL},
    {"unused", NULL, pli_hook_set_flags,
     "A byte a parameter: whether a gradient for it raises, as in torch, under strict.",
     (void *)offsetof(grad_slot, is_unused)}, /* NOLINT: an offset */
    {"unseen", pli_hook_get_flags, pli_hook_set_flags,
     "A byte a parameter: whether its gradient holds values that no step averaged.",
     (void *)offsetof(grad_slot, is_unseen)}, /* NOLINT: an offset */
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef reducer_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(reducer_object, weak_references),
     READONLY, NULL},
    {"on_finish", T_OBJECT, offsetof(reducer_object, on_finish), 0,
     "Called without arguments after each step, inside the backward; or None."},
    {"contexts", T_OBJECT, offsetof(reducer_object, context.all), 0,
     "Called with a backward's number at its end, if arrive_in_context() was called in "
     "it; returns the objects that have the gradients as their `grad`."},
    {"sync", T_BOOL, offsetof(reducer_object, sync.is_on), 0,
     "Whether the backwards of later forwards are synchronised."},
    {"in_no_sync", T_BOOL, offsetof(reducer_object, sync.is_in_no_sync), 0,
     "Whether all backwards are local now, whatever their forward was."},
    {"keeps_grads", T_BOOL, offsetof(reducer_object, options.keeps_grads), 0,
     "Whether a .grad that a step finds stays the same tensor."},
    {"binds_new", T_BOOL, offsetof(reducer_object, options.binds_new), 0,
     "Whether a reduced gradient is set as a new .grad, not written to the old one."},
    {"strict", T_BOOL, offsetof(reducer_object, options.is_strict), 0,
     "Whether a second gradient of a parameter in one backward raises, as in torch."},
    {"follows_forwards", T_BOOL, offsetof(reducer_object, options.follows_forwards), 0,
     "Whether a backward without a forward of the wrapper is local; else all are "
     "steps."},
    {"ends_with_step", T_BOOL, offsetof(reducer_object, options.ends_with_step), 0,
     "Whether parameters without a gradient in a step stop awaiting one after it."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot reducer_slots[] = {
    {Py_tp_new, reducer_new},
    {Py_tp_dealloc, reducer_dealloc},
    {Py_tp_traverse, reducer_traverse},
    {Py_tp_clear, reducer_clear},
    {Py_tp_methods, reducer_methods},
    {Py_tp_getset, reducer_getset},
    {Py_tp_members, reducer_members},
    {Py_tp_doc, "Reducer(world, params, buffers, bucket_bytes, last_bytes, view_bytes, "
                "sparse=[], caps=())\n--\n\n"
                "Means of gradients over the ranks of a world, taken during backward."},
    {0, NULL},
};

PLI_TYPE(reducer, Reducer, Py_TPFLAGS_HAVE_GC);
