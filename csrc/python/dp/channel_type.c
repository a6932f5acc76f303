/* channel_type.c - paceline._native.Channel: one request at a time to one worker.
 *
 * The caller's end posts a request and waits for its answer; the worker's end takes the
 * next request and answers it.  An end is used by one thread at a time, which is
 * checked; close() is for any thread.  A wait that an exception ended (Ctrl-C) leaves
 * its answer outstanding: a later wait gets it, and a later post drops it.
 */
#include <malloc.h>
#include <stdatomic.h>

#include "message_leaves.h"

/* Between looks at signals, and at the peer: a worker's parent watch sees to that. */
enum { CALLER_SLICE_MS = 50, WORKER_SLICE_MS = 500 };

typedef enum channel_role { ROLE_CALLER, ROLE_WORKER } channel_role;

typedef struct channel_object {
    PyObject_HEAD
    pli_channel *channel; /* NULL: closed */
    channel_role role;
    int is_busy;           /* a request is not answered yet, or not waited for */
    atomic_int is_entered; /* a thread is in a call */
    atomic_int is_closing; /* ... and is to close when it leaves */
    struct channel_object *previous;
    struct channel_object *next;
} channel_object;

/* ---- life ----------------------------------------------------------------------- */

static PyObject *channel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"request_fd", "answer_fd", NULL};
    module_state *state = state_of_type(type);
    int request_fd = -1, answer_fd = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|ii:Channel", names, &request_fd,
                                     &answer_fd))
        return NULL;
    channel_object *self = (channel_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->role = request_fd < 0 ? ROLE_CALLER : ROLE_WORKER;
    const pl_status st = self->role == ROLE_CALLER
                             ? pli_channel_create(&self->channel)
                             : pli_channel_adopt(request_fd, answer_fd, &self->channel);
    if (st != PL_OK) {
        pli_raise(state, st);
        Py_DECREF(self);
        return NULL;
    }
    self->next = state->channels;
    if (self->next != NULL)
        self->next->previous = self;
    state->channels = self;
    return (PyObject *)self;
}

static void destroy(channel_object *self)
{
    pli_channel_destroy(self->channel);
    self->channel = NULL;
}

static void leave_list(channel_object *self)
{
    PLI_ENTER(self);
    module_state *state = state_of((PyObject *)self);
    if (self->previous != NULL)
        self->previous->next = self->next;
    else if (state != NULL && state->channels == self)
        state->channels = self->next;
    if (self->next != NULL)
        self->next->previous = self->previous;
}

static void channel_dealloc(PyObject *object)
{
    channel_object *self = (channel_object *)object;
    leave_list(self);
    destroy(self);
    pli_object_free(object);
}

void pli_channels_forget(module_state *state)
{
    for (channel_object *self = state->channels; self != NULL; self = self->next) {
        if (self->channel == NULL)
            continue;
        pli_channel_forget(self->channel);
        destroy(self);
        atomic_store(&self->is_entered, 0); /* that thread is the parent's */
    }
}

/* ---- one thread at a time ------------------------------------------------------- */

static int enter(channel_object *self, channel_role role)
{
    if (atomic_exchange(&self->is_entered, 1) != 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "another thread uses this channel: an end of it is for one "
                        "thread at a time");
        return -1;
    }
    if (self->channel == NULL)
        PyErr_SetString(PyExc_RuntimeError, "this channel is closed");
    else if (self->role != role)
        PyErr_SetString(PyExc_RuntimeError,
                        role == ROLE_CALLER ? "this is a worker's end of a channel"
                                            : "this is a caller's end of a channel");
    else
        return 0;
    atomic_store(&self->is_entered, 0);
    return -1;
}

static void leave(channel_object *self)
{
    if (atomic_exchange(&self->is_closing, 0) != 0)
        destroy(self);
    atomic_store(&self->is_entered, 0);
}

static int await(channel_object *self)
{
    const module_state *state = state_of((PyObject *)self);
    const int64_t slice_ns =
        INT64_C(1000000) *
        (self->role == ROLE_CALLER ? CALLER_SLICE_MS : WORKER_SLICE_MS);
    int has_come = pli_channel_has_message(self->channel);
    if (!has_come) {
        Py_BEGIN_ALLOW_THREADS;
        has_come = pli_channel_spin(self->channel);
        Py_END_ALLOW_THREADS;
    }
    while (!has_come) {
        pl_status st = PL_OK;
        Py_BEGIN_ALLOW_THREADS;
        st = pli_channel_sleep(self->channel, slice_ns);
        Py_END_ALLOW_THREADS;
        has_come = st == PL_OK;
        if (!has_come && st != PL_EAGAIN)
            return pli_check(state, st);
        if (!has_come && PyErr_CheckSignals() != 0)
            return -1;
        if (!has_come && atomic_load(&self->is_closing) != 0) {
            PyErr_SetString(PyExc_RuntimeError, "this channel was closed meanwhile");
            return -1;
        }
    }
    return 0;
}

/* ---- the caller's end ----------------------------------------------------------- */

/* (kind, payload, tensors) of a call; -1 with TypeError. */
static int read_message(PyObject *const *args, Py_ssize_t n_args, uint32_t *kind)
{
    if (n_args != 3) {
        PyErr_Format(PyExc_TypeError,
                     "give kind, payload and tensors, not %zd arguments", n_args);
        return -1;
    }
    const unsigned long number = PyLong_AsUnsignedLong(args[0]);
    if (number == (unsigned long)-1 && PyErr_Occurred())
        return -1;
    if (number > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "kind %lu is too large", number);
        return -1;
    }
    *kind = (uint32_t)number;
    return 0;
}

static PyObject *channel_post(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    PLI_ENTER(object);
    channel_object *self = (channel_object *)object;
    uint32_t kind = 0;
    int result = 0;
    if (read_message(args, n, &kind) != 0 || enter(self, ROLE_CALLER) != 0)
        return NULL;
    if (self->is_busy) {
        result = await(self); /* an answer that an interrupted wait left behind */
        if (result == 0) {
            const char *dropped = NULL;
            size_t n_bytes = 0;
            (void)!pli_channel_receive(self->channel, &dropped, &n_bytes);
            self->is_busy = 0;
        }
    }
    if (result == 0)
        result =
            pli_message_send(state_of(object), self->channel, kind, args[1], args[2]);
    if (result == 0)
        self->is_busy = 1;
    leave(self);
    if (result != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *channel_wait(PyObject *object, PyObject *const *args, Py_ssize_t n,
                              PyObject *names)
{
    PLI_ENTER(object);
    channel_object *self = (channel_object *)object;
    PyObject *answer = NULL;
    if (n != 0 || names == NULL || PyTuple_GET_SIZE(names) != 1 ||
        PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "copy") != 0) {
        PyErr_SetString(PyExc_TypeError, "wait takes one keyword: copy");
        return NULL;
    }
    const int copies = PyObject_IsTrue(args[0]);
    if (copies < 0 || enter(self, ROLE_CALLER) != 0)
        return NULL;
    if (!self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "nothing was posted to be waited for");
    } else if (await(self) == 0) {
        self->is_busy = 0;
        answer = pli_message_receive(state_of(object), self->channel,
                                     copies ? PLI_RECEIVED_COPIES : PLI_RECEIVED_VIEWS);
    }
    leave(self);
    return answer;
}

/* ---- the worker's end ----------------------------------------------------------- */

static PyObject *channel_next(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    channel_object *self = (channel_object *)object;
    PyObject *request = NULL;
    (void)ignored;
    if (enter(self, ROLE_WORKER) != 0)
        return NULL;
    if (self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "the last request is not answered yet");
    } else if (await(self) == 0) {
        self->is_busy = 1;
        request =
            pli_message_receive(state_of(object), self->channel, PLI_RECEIVED_COPIES);
    }
    leave(self);
    return request;
}

/* A worker's malloc keeps what large batches took, for the next one: see
 * _workers/spawn.py. */
static void give_memory_back(void)
{
#ifdef __GLIBC__
    Py_BEGIN_ALLOW_THREADS;
    (void)malloc_trim(0);
    Py_END_ALLOW_THREADS;
#endif
}

static PyObject *channel_answer(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
    PLI_ENTER(object);
    channel_object *self = (channel_object *)object;
    uint32_t kind = 0;
    int result = -1;
    if (read_message(args, n, &kind) != 0 || enter(self, ROLE_WORKER) != 0)
        return NULL;
    if (!self->is_busy)
        PyErr_SetString(PyExc_RuntimeError, "there is no request to answer");
    else
        result =
            pli_message_send(state_of(object), self->channel, kind, args[1], args[2]);
    if (result == 0)
        self->is_busy = 0;
    const int has_calmed = result == 0 && pli_channel_has_calmed(self->channel);
    leave(self);
    if (result != 0)
        return NULL;
    if (has_calmed)
        give_memory_back();
    Py_RETURN_NONE;
}

/* ---- both ----------------------------------------------------------------------- */

static PyObject *channel_close(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    channel_object *self = (channel_object *)object;
    (void)ignored;
    atomic_store(&self->is_closing, 1);
    if (atomic_exchange(&self->is_entered, 1) == 0)
        leave(self); /* nobody is in a call: closes it */
    Py_RETURN_NONE;
}

static PyObject *channel_watch(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    channel_object *self = (channel_object *)object;
    int pid;
    const char *name;
    if (!PyArg_ParseTuple(args, "is:watch", &pid, &name) ||
        enter(self, ROLE_CALLER) != 0)
        return NULL;
    const int result =
        pli_check(state_of(object), pli_channel_watch(self->channel, pid, name));
    leave(self);
    if (result != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *channel_avoid(PyObject *object, PyObject *cores)
{
    PLI_ENTER(object);
    channel_object *self = (channel_object *)object;
    pli_cores others = {.n = 0};
    CPU_ZERO(&others.set);
    PyObject *items = PySequence_Fast(cores, "give the numbers of cores");
    if (items == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); i++) {
        const long core = PyLong_AsLong(PySequence_Fast_GET_ITEM(items, i));
        if (core >= 0 && core < CPU_SETSIZE)
            CPU_SET((size_t)core, &others.set);
    }
    Py_DECREF(items);
    others.n = CPU_COUNT(&others.set);
    if (PyErr_Occurred() || enter(self, ROLE_CALLER) != 0)
        return NULL;
    self->channel->others = others;
    leave(self);
    Py_RETURN_NONE;
}

static PyObject *get_is_busy(PyObject *object, void *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    return PyBool_FromLong(((channel_object *)object)->is_busy);
}

static PyObject *get_fds(PyObject *object, void *ignored)
{
    PLI_ENTER(object);
    const channel_object *self = (channel_object *)object;
    (void)ignored;
    if (self->channel == NULL)
        return Py_BuildValue("()");
    return Py_BuildValue("ii", self->channel->out->fd, self->channel->in->fd);
}

static PyObject *get_spin_us(PyObject *object, void *ignored)
{
    PLI_ENTER(object);
    const channel_object *self = (channel_object *)object;
    (void)ignored;
    return PyFloat_FromDouble(
        self->channel != NULL ? (double)self->channel->spin_ns / 1e3 : 0.0);
}

static int set_spin_us(PyObject *object, PyObject *value, void *ignored)
{
    PLI_ENTER(object);
    const channel_object *self = (channel_object *)object;
    const double spin_us = value != NULL ? PyFloat_AsDouble(value) : -1.0;
    (void)ignored;
    if (PyErr_Occurred())
        return -1;
    if (!(spin_us >= 0.0 && spin_us <= 1e6)) {
        PyErr_SetString(PyExc_ValueError, "spin_us: give 0 to 1000000 microseconds");
        return -1;
    }
    if (self->channel != NULL)
        self->channel->spin_ns = (int64_t)(spin_us * 1e3);
    return 0;
}

static PyGetSetDef channel_getset[] = {
    {"is_busy", get_is_busy, NULL, "Is there a request without its answer?", NULL},
    {"fds", get_fds, NULL, "What a worker's end is made of; () when closed.", NULL},
    {"spin_us", get_spin_us, set_spin_us, "Microseconds of spinning in a wait.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define FAST(function) (PyCFunction)(void (*)(void))(function)

static PyMethodDef channel_methods[] = {
    {"post", FAST(channel_post), METH_FASTCALL,
     "post($self, kind, payload, tensors, /)\n--\n\n"
     "Send a request; an answer that nobody waited for is waited for and dropped."},
    {"wait", FAST(channel_wait), METH_FASTCALL | METH_KEYWORDS,
     "wait($self, /, *, copy)\n--\n\nReturn the answer: (kind, payload, tensors, "
     "flags)."},
    {"next", channel_next, METH_NOARGS,
     "next($self, /)\n--\n\nReturn the next request: (kind, payload, tensors, flags)."},
    {"answer", FAST(channel_answer), METH_FASTCALL,
     "answer($self, kind, payload, tensors, /)\n--\n\nAnswer the last request."},
    {"watch", channel_watch, METH_VARARGS,
     "watch($self, pid, name, /)\n--\n\nHave waits fail when that process has ended."},
    {"avoid", channel_avoid, METH_O,
     "avoid($self, cores, /)\n--\n\nLeave these cores to workers around a hand-over."},
    {"close", channel_close, METH_NOARGS,
     "close($self, /)\n--\n\nGive up the memory, at once or when the call in it "
     "returns."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot channel_slots[] = {
    {Py_tp_new, channel_new},
    {Py_tp_dealloc, channel_dealloc},
    {Py_tp_methods, channel_methods},
    {Py_tp_getset, channel_getset},
    {Py_tp_doc, "Channel(request_fd=-1, answer_fd=-1)\n--\n\n"
                "One request at a time; with descriptors, the worker's end."},
    {0, NULL},
};

PyType_Spec pli_channel_spec = {
    .name = "paceline._native.Channel",
    .basicsize = sizeof(channel_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = channel_slots,
};
