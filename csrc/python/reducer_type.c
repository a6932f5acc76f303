/* reducer_type.c - paceline._native.Reducer: construction, and what Python may ask. */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "../core/alloc.h"
#include "reducer_build.h"

#include <structmember.h>

static reducer_object *reducer_of(PyObject *object)
{
    return (reducer_object *)object;
}

/* ---- construction and end ------------------------------------------------------ */

/* In the order in which they were made: the steps of one backward are finished so, and
 * most ranks that stand in for several wrappers go through them in this order too. */
static void enter_list(reducer_object *self, module_state *state)
{
    reducer_object **link = &state->reducers;
    while (*link != NULL)
        link = &(*link)->next;
    *link = self;
}

static PyObject *reducer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"world",        "params",     "buffers",
                            "bucket_bytes", "last_bytes", "view_bytes",
                            "sparse",       "caps",       NULL};
    module_state *state = state_of_type(type);
    pli_reducer_arguments given = {0};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!OOnnn|OO:Reducer", names, state->world_type, &given.world,
            &given.params, &given.buffers, &given.bucket_bytes, &given.last_bytes,
            &given.view_bytes, &given.sparse, &given.caps))
        return NULL;
    if (state->queue_callback == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "attach_torch() was not called");
        return NULL;
    }
    reducer_object *self = (reducer_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    enter_list(self, state);
    self->world = Py_NewRef(given.world);
    self->comm = ((world_object *)given.world)->comm;
    self->gpu = ((world_object *)given.world)->gpu;
    self->place =
        pli_is_on_device(self) ? self->gpu->place : (dl_device){.type = DL_CPU};
    self->task = -1;
    self->sync_now = self->sync_forward = SYNC_ON;
    self->part = PL_ACTIVE;
    self->owner_pid = getpid();
    if (pli_reducer_build(state, self, &given) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void remove_hooks(reducer_object *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (size_t i = 0; self->slots != NULL && i < self->n_slots; i++) {
        if (self->slots[i].hook != NULL)
            pli_hook_forget(self->slots[i].hook);
        if (self->slots[i].handle == NULL)
            continue;
        PyObject *result = PyObject_CallMethod(self->slots[i].handle, "remove", NULL);
        if (result == NULL)
            PyErr_Clear(); /* at interpreter exit: the hook does nothing anyway */
        Py_XDECREF(result);
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
    Py_VISIT(self->carrier);
    for (size_t i = 0; self->slots != NULL && i < self->n_slots; i++) {
        Py_VISIT(self->slots[i].param);
        Py_VISIT(self->slots[i].handle);
        Py_VISIT(self->slots[i].held);
        Py_VISIT(self->slots[i].late);
        Py_VISIT(self->slots[i].kept);
        Py_VISIT(self->slots[i].saved);
    }
    for (size_t b = 0; self->buffers != NULL && b < self->n_buffers; b++)
        Py_VISIT(self->buffers[b].owner);
    return 0;
}

static int reducer_clear(PyObject *object)
{
    reducer_object *self = reducer_of(object);
    remove_hooks(self);
    pli_free_slots(self->slots, self->n_slots);
    self->slots = NULL;
    self->n_slots = 0;
    pli_free_buffers(self->buffers, self->n_buffers);
    self->buffers = NULL;
    self->n_buffers = 0;
    Py_CLEAR(self->on_finish);
    Py_CLEAR(self->carrier);
    return 0;
}

static void leave_list(reducer_object *self, module_state *state)
{
    reducer_object **link = &state->reducers;
    while (*link != NULL && *link != self)
        link = &(*link)->next;
    if (*link == self)
        *link = self->next;
}

static void reducer_dealloc(PyObject *object)
{
    reducer_object *self = reducer_of(object);
    PyTypeObject *type = Py_TYPE(object);
    leave_list(self, state_of(object));
    PyObject_GC_UnTrack(object);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs(object);
    (void)reducer_clear(object);
    pl_reducer_destroy(self->reducer);
    pli_window_release(self->window);
    if (self->captured != NULL)
        self->captured->release(self->captured);
    pli_backend_destroy(self->backend);
    pli_free(self->moves);
    Py_CLEAR(self->world); /* last: all of the above lives in its memory */
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- methods
 * ------------------------------------------------------------------------- */

static int is_in_backward(const module_state *state)
{
    PyObject *node = PyObject_CallNoArgs(state->current_node);
    const int is_inside = node != NULL && node != Py_None;
    PyErr_Clear();
    Py_XDECREF(node);
    return is_inside;
}

static PyObject *reducer_forward_begins(PyObject *object, PyObject *ignored)
{
    reducer_object *self = reducer_of(object);
    const module_state *state = state_of(object);
    (void)ignored;
    /* A forward inside a backward is a checkpoint's recomputation: it changes nothing.
     */
    if (is_in_backward(state))
        Py_RETURN_NONE;
    if (pli_step_check_process(self) != 0 || pli_step_await_guards(self) != 0)
        return NULL;
    if (self->unseen == FAILURE_UNSEEN) {
        self->unseen = NO_FAILURE_UNSEEN;
        PyErr_SetString(PyExc_RuntimeError,
                        "the last backward's gradients were not averaged: compiled "
                        "autograd ran it outside of the main thread and left "
                        "parameters unused; run it in the main thread");
        return NULL;
    }
    if (pl_reducer_is_active(self->reducer)) {
        /* The optimizer has run since, on gradients that were no means. */
        pli_step_fail(self, "the end of the last backward was never seen");
        PyErr_SetString(
            PyExc_RuntimeError,
            "the last backward's gradients were not averaged, since its end "
            "was never seen: run the model's forward through the wrapper");
        return NULL;
    }
    self->sync_forward = self->sync_now;
    if (self->sync_now == SYNC_ON && pli_step_recover(self) != 0)
        return NULL;
    if (pli_buffers_apply(self) != 0)
        return NULL;
    self->n_pending_forwards++;
    pli_comm_last_words(self->comm, NULL); /* an exception of before was overcome */
    pli_comm_note(self->comm, PL_FORWARD, pl_reducer_step(self->reducer) + 1);
    Py_RETURN_NONE;
}

static PyObject *reducer_forward_ends(PyObject *object, PyObject *is_watched)
{
    reducer_object *self = reducer_of(object);
    const int can_tell = PyObject_IsTrue(is_watched);
    if (can_tell < 0)
        return NULL;
    if (can_tell && !is_in_backward(state_of(object)))
        self->sync_forward = SYNC_ON;
    if (!pl_reducer_is_active(self->reducer))
        pli_comm_note(self->comm, PL_IDLE, pl_reducer_step(self->reducer) + 1);
    Py_RETURN_NONE;
}

static PyObject *reducer_forward_fails(PyObject *object, PyObject *ignored)
{
    reducer_object *self = reducer_of(object);
    (void)ignored;
    if (self->n_pending_forwards > 0 && !is_in_backward(state_of(object)))
        self->n_pending_forwards--;
    Py_RETURN_NONE;
}

static PyObject *reducer_apply_buffers(PyObject *object, PyObject *ignored)
{
    (void)ignored;
    if (pli_buffers_apply(reducer_of(object)) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *reducer_detach(PyObject *object, PyObject *ignored)
{
    reducer_object *self = reducer_of(object);
    (void)ignored;
    self->attachment = DETACHED;
    remove_hooks(self);
    Py_RETURN_NONE;
}

static PyObject *reducer_on_output(PyObject *object, PyObject *args)
{
    reducer_object *self = reducer_of(object);
    int is_synchronised, is_first;
    if (!PyArg_ParseTuple(args, "pp:on_output", &is_synchronised, &is_first))
        return NULL;
    if (self->attachment == DETACHED)
        Py_RETURN_NONE;
    if (is_first && self->n_pending_forwards > 0)
        self->n_pending_forwards--;
    if (!is_synchronised) {
        if (pli_step_begin_local(self) != 0)
            return NULL;
        Py_RETURN_NONE;
    }
    self->sync_forward = SYNC_ON;
    if (self->sync_now == SYNC_ON && pli_step_queue_guard(self, GUARD_OF_OUTPUT) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *reducer_get_sync(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(reducer_of(object)->sync_now == SYNC_ON);
}

static int reducer_set_sync(PyObject *object, PyObject *value, void *closure)
{
    (void)closure;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "sync cannot be deleted");
        return -1;
    }
    const int is_on = PyObject_IsTrue(value);
    if (is_on < 0)
        return -1;
    reducer_of(object)->sync_now = is_on ? SYNC_ON : SYNC_OFF;
    return 0;
}

static PyObject *reducer_get_step(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(pl_reducer_step(reducer_of(object)->reducer));
}

static PyObject *reducer_get_n_active(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromLong(pl_reducer_roll(reducer_of(object)->reducer).n_active);
}

static PyObject *reducer_get_is_active(PyObject *object, void *closure)
{
    (void)closure;
    return PyBool_FromLong(pl_reducer_is_active(reducer_of(object)->reducer));
}

/* [[parameter, ...], ...]: the buckets in their order, as the plan has them now. */
static PyObject *reducer_get_buckets(PyObject *object, void *closure)
{
    const pl_plan *plan = pl_reducer_plan(reducer_of(object)->reducer);
    PyObject *buckets = PyList_New((Py_ssize_t)plan->n_buckets);
    (void)closure;
    for (size_t b = 0; buckets != NULL && b < plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &plan->buckets[b];
        PyObject *members = PyList_New((Py_ssize_t)bucket->n_params);
        for (size_t m = 0; members != NULL && m < bucket->n_params; m++) {
            PyObject *index = PyLong_FromUnsignedLong(bucket->params[m]);
            if (index == NULL)
                Py_CLEAR(members);
            else
                PyList_SET_ITEM(members, (Py_ssize_t)m, index);
        }
        if (members == NULL)
            Py_CLEAR(buckets);
        else
            PyList_SET_ITEM(buckets, (Py_ssize_t)b, members);
    }
    return buckets;
}

/* How often each parameter got a gradient in the step begun last. */
static PyObject *reducer_get_fires(PyObject *object, void *closure)
{
    const reducer_object *self = reducer_of(object);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->n_slots);
    (void)closure;
    for (size_t i = 0; bytes != NULL && i < self->n_slots; i++) {
        const unsigned n = pl_reducer_fires(self->reducer, i);
        PyBytes_AS_STRING(bytes)[i] = (char)(n < UINT8_MAX ? n : UINT8_MAX);
    }
    return bytes;
}

static PyMethodDef reducer_methods[] = {
    {"forward_begins", reducer_forward_begins, METH_NOARGS,
     "forward_begins($self, /)\n--\n\nTake over buffers, leave a failed step behind, "
     "and "
     "remember whether the backward to come synchronises."},
    {"forward_ends", reducer_forward_ends, METH_O,
     "forward_ends($self, is_watched, /)\n--\n\nSay so to the peers; whether "
     "on_output will be called when its backward begins."},
    {"forward_fails", reducer_forward_fails, METH_NOARGS,
     "forward_fails($self, /)\n--\n\nNo backward comes of the forward begun last."},
    {"apply_buffers", reducer_apply_buffers, METH_NOARGS,
     "apply_buffers($self, /)\n--\n\nTake over what rank 0 sent with the last step."},
    {"on_output", reducer_on_output, METH_VARARGS,
     "on_output($self, is_synchronised, is_first, /)\n--\n\nThe backward of a "
     "forward begins: whether that one was to be synchronised, and whether this is "
     "the first of its outputs."},
    {"detach", reducer_detach, METH_NOARGS,
     "detach($self, /)\n--\n\nTake the hooks off the parameters: another reducer has "
     "them from now on, also for outputs of forwards before."},
    {"stand_in", pli_join_stand_in, METH_VARARGS,
     "stand_in($self, is_first, binds_means, /)\n--\n\nTake part in one step without "
     "gradients; return the number of ranks that had some, and the highest rank that "
     "stood in for the first time, or -1."},
    {"set_join", pli_join_set, METH_VARARGS,
     "set_join($self, divides_by_active, raises, /)\n--\n\nForget who stood in; say "
     "whether means are over the active ranks, and whether backward raises where one "
     "stands in."},
    {"abandon", pli_join_abandon, METH_O,
     "abandon($self, words, /)\n--\n\nTell the peers, unless they know, that this "
     "rank will not take the next step, for a reason in words."},
    {"carry", (PyCFunction)(void (*)(void))pli_carrier_set,
     METH_VARARGS | METH_KEYWORDS,
     "carry($self, carrier, bucket_bytes, last_bytes, caps=())\n--\n\nHave a carrier "
     "average the buckets from now on, laid out anew under these caps: its "
     "post(bucket) "
     "is called with each that is full, its finish() when all are, abandon() when a "
     "step fails, and "
     "finish_sparse(params, is_active, binds) with what is declared sparse."},
    {"look", pli_carrier_look, METH_NOARGS,
     "look($self, /)\n--\n\nRaise where a rank has failed or is gone."},
    {"read_bucket", pli_carrier_read, METH_VARARGS,
     "read_bucket($self, bucket, tensor, /)\n--\n\nCopy a bucket's gradients, one "
     "after "
     "another, to a tensor."},
    {"write_bucket", pli_carrier_write, METH_VARARGS,
     "write_bucket($self, bucket, tensor, /)\n--\n\nThe reverse of read_bucket()."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reducer_getset[] = {
    {"sync", reducer_get_sync, reducer_set_sync, "Whether gradients are synchronised.",
     NULL},
    {"step", reducer_get_step, NULL, "Number of synchronised backwards begun.", NULL},
    {"is_active", reducer_get_is_active, NULL, "Whether a step is under way.", NULL},
    {"n_active", reducer_get_n_active, NULL,
     "Number of ranks that had gradients in the last step.", NULL},
    {"buckets", reducer_get_buckets, NULL, "Parameters' indices, by bucket.", NULL},
    {"fires", reducer_get_fires, NULL,
     "How often each parameter got a gradient in the last step; 255: or more.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef reducer_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(reducer_object, weak_references),
     READONLY, NULL},
    {"on_finish", T_OBJECT, offsetof(reducer_object, on_finish), 0,
     "Called without arguments after each step, inside the backward; None: nothing."},
    {"strict", T_BOOL, offsetof(reducer_object, is_strict), 0,
     "Whether a second gradient of a parameter in one backward is torch's error."},
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
                "sparse=(), caps=())\n--\n\n"
                "Means of gradients over the ranks of a world, taken during backward."},
    {0, NULL},
};

PyType_Spec pli_reducer_spec = {
    .name = "paceline._native.Reducer",
    .basicsize = sizeof(reducer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = reducer_slots,
};
