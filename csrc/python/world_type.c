/* world_type.c - paceline._native.World. */
#include <limits.h>
#include <stddef.h>
#include <string.h>

#include <unistd.h>

#include "../comm/device.h"
#include "../core/config.h"
#include "broadcast.h"
#include "world.h"

#include <structmember.h>

enum { SLICE_MS = 50 };
#define LONGEST_TIMEOUT 1e9 /* seconds: 31 years */

/* ---- World --------------------------------------------------------------------- */

int pli_wait_in_slices(const module_state *state, pli_slice_fn slice, void *self)
{
    for (;;) {
        pl_status st;
        Py_BEGIN_ALLOW_THREADS st = slice(self, SLICE_MS * INT64_C(1000000));
        Py_END_ALLOW_THREADS if (st != PL_EAGAIN) return pli_check(state, st);
        if (PyErr_CheckSignals() != 0)
            return -1;
    }
}

static int read_pid(PyObject *item, int rank, int *out)
{
    int overflow = 0;
    const long pid =
        PyLong_Check(item) ? PyLong_AsLongAndOverflow(item, &overflow) : -1;
    if (overflow != 0 || pid < 0 || pid > INT_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "pids[%d] is %R: give a process id, or 0 for none", rank, item);
        return -1;
    }
    *out = (int)pid;
    return 0;
}

static int read_pids(PyObject *sequence, int world_size, int *pids)
{
    int status = 0;
    PyObject *fast = PySequence_Fast(sequence, "pids: give a sequence of integers");
    if (fast == NULL)
        return -1;
    if (PySequence_Fast_GET_SIZE(fast) != world_size) {
        PyErr_Format(PyExc_ValueError, "pids has %zd entries for %d ranks",
                     PySequence_Fast_GET_SIZE(fast), world_size);
        status = -1;
    }
    for (int r = 0; status == 0 && r < world_size; r++)
        status = read_pid(PySequence_Fast_GET_ITEM(fast, r), r, &pids[r]);
    Py_DECREF(fast);
    return status;
}

int pli_is_interrupted(void *ignored)
{
    (void)ignored;
    const PyGILState_STATE gil = PyGILState_Ensure();
    const int is_set = PyErr_CheckSignals() != 0;
    PyGILState_Release(gil);
    return is_set;
}

typedef struct world_arguments {
    int rank;
    int world_size;
    Py_ssize_t arena_bytes;
    Py_ssize_t n_ops;
    double timeout;
    PyObject *pids;
    PyObject *meeting; /* Listener on rank 0, else its address */
    PyObject *relay;   /* None, or who carries the operations */
    PyObject *device;  /* None, or the Device that has the gradients */
    Py_ssize_t device_bytes;
    const char *nccl;
    const char *accumulate;
    int64_t deadline_ns;
} world_arguments;

static int is_relayed(const world_arguments *given)
{
    return given->relay != NULL && given->relay != Py_None;
}

static int has_device(const world_arguments *given)
{
    return given->device != NULL && given->device != Py_None;
}

static size_t base_bytes(const world_arguments *given)
{
    return (size_t)given->arena_bytes +
           (has_device(given) ? PLI_DEVICE_WORDS_BYTES : 0);
}

static pl_status join_world(const module_state *state, const world_arguments *given,
                            const int *pids, const char *address, pl_comm **out)
{
    pl_status st;
    const pli_shm_options options = {
        .rank = is_relayed(given) ? 0 : given->rank,
        .world_size = is_relayed(given) ? 1 : given->world_size,
        .arena_bytes = base_bytes(given),
        .n_ops = (size_t)given->n_ops,
        .pids = pids,
        .progress = state->progress,
        .is_interrupted = pli_is_interrupted,
        .deadline_ns = given->deadline_ns,
    };
    const pli_listener *listener =
        options.rank == 0 ? ((listener_object *)given->meeting)->listener : NULL;
    Py_BEGIN_ALLOW_THREADS st = pli_shm_create(&options, listener, address, out);
    Py_END_ALLOW_THREADS return st;
}

/* Has the relay's world take the place of the world of one that *comm is. */
static pl_status put_relay_before(const world_arguments *given, pl_comm **comm)
{
    const pli_relay_options options = {.rank = given->rank,
                                       .world_size = given->world_size,
                                       .base = *comm,
                                       .carrier = pli_relay_carrier_of(given->relay)};
    return pli_relay_create(&options, comm);
}

static int check_device(const module_state *state, const world_arguments *given)
{
    if (given->device != NULL && given->device != Py_None &&
        !Py_IS_TYPE(given->device, state->gpu_type)) {
        PyErr_Format(PyExc_TypeError, "device is %R: give a Device, or None",
                     given->device);
        return -1;
    }
    if (given->device_bytes < 0 || (given->device_bytes > 0 && !has_device(given))) {
        PyErr_Format(PyExc_ValueError,
                     "device_bytes is %zd: give 0 or more, and 0 without a device",
                     given->device_bytes);
        return -1;
    }
    return 0;
}

static int read_deadline(const module_state *state, world_arguments *given)
{
    const double timeout =
        given->timeout < LONGEST_TIMEOUT ? given->timeout : LONGEST_TIMEOUT;
    return pli_check(
        state, pli_config_timeout_ns((int64_t)(timeout * 1e9), &given->deadline_ns));
}

static int check_arguments(const module_state *state, const world_arguments *given)
{
    if (given->world_size < 1 || given->world_size > PL_MAX_RANKS || given->rank < 0 ||
        given->rank >= given->world_size) {
        PyErr_Format(PyExc_ValueError,
                     "rank %d of world_size %d: a world has 1 to %d ranks", given->rank,
                     given->world_size, PL_MAX_RANKS);
        return -1;
    }
    if (given->arena_bytes < 0 || given->n_ops < 1) {
        PyErr_Format(
            PyExc_ValueError,
            "arena_bytes is %zd and n_ops is %zd: give 0 or more, and 1 or more",
            given->arena_bytes, given->n_ops);
        return -1;
    }
    if (!(given->timeout > 0.0)) {
        PyObject *timeout = PyFloat_FromDouble(given->timeout);
        PyErr_Format(PyExc_ValueError, "timeout is %R: give more than 0 seconds",
                     timeout != NULL ? timeout : Py_None);
        Py_XDECREF(timeout);
        return -1;
    }
    if (given->rank == 0 || is_relayed(given)
            ? !Py_IS_TYPE(given->meeting, state->listener_type)
            : !PyUnicode_Check(given->meeting)) {
        PyErr_Format(PyExc_TypeError,
                     "meeting is %R: rank 0 gives its Listener, the others its address",
                     given->meeting);
        return -1;
    }
    return 0;
}

static int parse_arguments(const module_state *state, PyObject *args, PyObject *kwargs,
                           world_arguments *given)
{
    static char *names[] = {
        "rank",  "world_size", "arena_bytes",  "n_ops", "timeout",    "pids", "meeting",
        "relay", "device",     "device_bytes", "nccl",  "accumulate", NULL};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "iinndOO|OOnzs:World", names, &given->rank,
            &given->world_size, &given->arena_bytes, &given->n_ops, &given->timeout,
            &given->pids, &given->meeting, &given->relay, &given->device,
            &given->device_bytes, &given->nccl, &given->accumulate))
        return -1;
    if (check_arguments(state, given) != 0 || check_device(state, given) != 0)
        return -1;
    return read_deadline(state, given);
}

/* The relay is to carry what the ranks say while the rest of the world is made. */
static int serve(world_object *self)
{
    PyObject *result = PyObject_CallMethod(self->relay, "serve", "O", (PyObject *)self);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* Makes the world, layer by layer; what there is of it is the dealloc's to end. */
static int build_world(module_state *state, world_object *self,
                       const world_arguments *given, const int *pids,
                       const char *address)
{
    if (pli_check(state, join_world(state, given, pids, address, &self->comm)) != 0)
        return -1;
    if (is_relayed(given)) {
        self->relay = Py_NewRef(given->relay);
        if (pli_check(state, put_relay_before(given, &self->comm)) != 0)
            return -1;
    }
    if (!has_device(given))
        return 0;
    if (is_relayed(given) && serve(self) != 0)
        return -1;
    self->gpu = (gpu_object *)Py_NewRef(given->device);
    const pli_device_world device = {.gpu = self->gpu,
                                     .n_bytes = given->device_bytes,
                                     .nccl = given->nccl,
                                     .accumulate = given->accumulate,
                                     .host_bytes = (size_t)given->arena_bytes,
                                     .n_ops = (size_t)given->n_ops,
                                     .deadline_ns = given->deadline_ns};
    return pli_device_world_create(state, &device, &self->comm);
}

static PyObject *world_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    module_state *state = state_of_type(type);
    world_arguments given = {.accumulate = "nccl"};
    const char *address = NULL;
    int pids[PL_MAX_RANKS];
    if (parse_arguments(state, args, kwargs, &given) != 0 ||
        read_pids(given.pids, given.world_size, pids) != 0)
        return NULL;
    if (PyUnicode_Check(given.meeting) &&
        (address = PyUnicode_AsUTF8(given.meeting)) == NULL)
        return NULL;
    world_object *self = (world_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->owner_pid = getpid();
    if (build_world(state, self, &given, pids, address) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void world_dealloc(PyObject *object)
{
    world_object *self = (world_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs(object);
    if (self->gpu == NULL || self->owner_pid == getpid()) {
        PyThreadState *thread = pli_world_let_go(self);
        pl_comm_destroy(self->comm);
        pli_world_take_back(thread);
    }
    Py_XDECREF(self->gpu);
    Py_XDECREF(self->relay);
    type->tp_free(object);
    Py_DECREF(type);
}

static pl_comm *comm_of(PyObject *object)
{
    return ((world_object *)object)->comm;
}

static int parse_word(const char *what, const char *word, const char *const *words,
                      int n_words, int *out)
{
    for (int i = 0; i < n_words; i++) {
        if (strcmp(word, words[i]) != 0)
            continue;
        *out = i;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s: '%s' is not known", what, word);
    return -1;
}

static PyObject *world_issue(PyObject *object, PyObject *args)
{
    static const char *const reductions[] = {"sum", "mean", "max"};
    const char *kinds[PL_N_OP_KINDS];
    const char *dtypes[PL_N_DTYPES];
    const char *kind_word, *dtype_word, *reduction_word;
    Py_ssize_t offset, n_elems;
    int root = 0, kind = 0, dtype = 0, reduction = 0;
    pl_ticket ticket = 0;
    pl_comm *comm = comm_of(object);
    for (int i = 0; i < PL_N_OP_KINDS; i++)
        kinds[i] = pli_op_kind_text((pl_op_kind)i);
    for (int i = 0; i < PL_N_DTYPES; i++)
        dtypes[i] = pl_dtype_text((pl_dtype)i);
    if (!PyArg_ParseTuple(args, "sssnn|i:issue", &kind_word, &dtype_word,
                          &reduction_word, &offset, &n_elems, &root) ||
        parse_word("kind", kind_word, kinds, PL_N_OP_KINDS, &kind) != 0 ||
        parse_word("dtype", dtype_word, dtypes, PL_N_DTYPES, &dtype) != 0 ||
        parse_word("reduction", reduction_word, reductions, PL_N_REDUCTIONS,
                   &reduction) != 0)
        return NULL;
    if (offset < 0 || n_elems < 0) {
        PyErr_Format(PyExc_ValueError,
                     "offset_bytes is %zd and n_elems is %zd: neither can be negative",
                     offset, n_elems);
        return NULL;
    }
    const pl_op op = {.kind = (pl_op_kind)kind,
                      .reduction = (pl_reduction)reduction,
                      .dtype = (pl_dtype)dtype,
                      .root = root,
                      .offset_bytes = (size_t)offset,
                      .n_elems = (size_t)n_elems};
    PyThreadState *thread = pli_world_let_go((world_object *)object);
    const pl_status st = pl_comm_issue(comm, &op, &ticket);
    pli_world_take_back(thread);
    if (st != PL_OK)
        return pli_raise(state_of(object), st);
    return PyLong_FromUnsignedLongLong(ticket);
}

typedef struct wait_call {
    pl_comm *comm;
    pl_ticket ticket;
} wait_call;

static pl_status wait_slice(void *context, int64_t slice_ns)
{
    const wait_call *call = context;
    return pl_comm_wait(call->comm, call->ticket, slice_ns);
}

static PyObject *world_wait(PyObject *object, PyObject *ticket)
{
    wait_call call = {.comm = comm_of(object)};
    call.ticket = PyLong_AsUnsignedLongLong(ticket);
    if (PyErr_Occurred() != NULL ||
        pli_wait_in_slices(state_of(object), wait_slice, &call) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static pl_status recover_slice(void *context, int64_t slice_ns)
{
    pl_recovery recovery;
    return pl_comm_recover(context, slice_ns, &recovery);
}

static PyObject *world_recover(PyObject *object, PyObject *ignored)
{
    pl_comm *comm = comm_of(object);
    (void)ignored;
    if (pli_wait_in_slices(state_of(object), recover_slice, comm) != 0)
        return NULL;
    Py_RETURN_NONE;
}

const char *pli_words(PyObject *words)
{
    if (PyUnicode_Check(words))
        return PyUnicode_AsUTF8(words);
    PyErr_Format(PyExc_TypeError, "words is %R: give a string", words);
    return NULL;
}

static PyObject *world_abort(PyObject *object, PyObject *words)
{
    const char *text = pli_words(words);
    if (text == NULL)
        return NULL;
    PyThreadState *thread = pli_world_let_go((world_object *)object);
    pl_comm_abort(comm_of(object), text);
    pli_world_take_back(thread);
    Py_RETURN_NONE;
}

static PyObject *world_note_exception(PyObject *object, PyObject *words)
{
    const char *text = NULL;
    if (words != Py_None && (text = pli_words(words)) == NULL)
        return NULL;
    pli_comm_last_words(comm_of(object), text);
    Py_RETURN_NONE;
}

static PyObject *world_leave(PyObject *object, PyObject *ignored)
{
    (void)ignored;
    PyThreadState *thread = pli_world_let_go((world_object *)object);
    pl_comm_leave(comm_of(object));
    pli_world_take_back(thread);
    Py_RETURN_NONE;
}

static PyObject *world_buffer(PyObject *object, void *closure)
{
    pl_comm *comm = comm_of(object);
    (void)closure;
    return PyMemoryView_FromMemory(pli_comm_arena(comm), (Py_ssize_t)comm->host_bytes,
                                   PyBUF_WRITE);
}

/* The arena itself, which lives as long as whoever has such a buffer of it. */
static int world_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    pl_comm *comm = comm_of(object);
    return PyBuffer_FillInfo(view, object, pli_comm_arena(comm),
                             (Py_ssize_t)comm->host_bytes, 0, flags);
}

static PyObject *world_rank(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromLong(pl_comm_rank(comm_of(object)));
}

static PyObject *world_size(PyObject *object, void *closure)
{
    (void)closure;
    return PyLong_FromLong(pl_comm_world_size(comm_of(object)));
}

static PyMethodDef world_methods[] = {
    {"issue", world_issue, METH_VARARGS,
     "issue($self, kind, dtype, reduction, offset_bytes, n_elems, root=0, /)\n--\n\n"
     "Say that this rank's range is ready for one collective; return its ticket."},
    {"wait", world_wait, METH_O,
     "wait($self, ticket, /)\n--\n\nWait until every rank did its part up to ticket."},
    {"recover", world_recover, METH_NOARGS,
     "recover($self, /)\n--\n\nLeave a failed step behind, together with every rank."},
    {"broadcast", pli_world_broadcast, METH_VARARGS,
     "broadcast($self, tensors, root=0, /)\n--\n\nOverwrite every rank's tensors with "
     "one rank's."},
    {"abort", world_abort, METH_O,
     "abort($self, words, /)\n--\n\nFail this step on every rank, for a reason in "
     "words."},
    {"note_exception", world_note_exception, METH_O,
     "note_exception($self, words, /)\n--\n\nKeep words for peers that must name this "
     "rank; None forgets them."},
    {"leave", world_leave, METH_NOARGS,
     "leave($self, /)\n--\n\nSay goodbye to the peers; may be called twice."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef world_getset[] = {
    {"buffer", world_buffer, NULL, "This rank's own arena, writable; borrowed.", NULL},
    {"rank", world_rank, NULL, "This rank.", NULL},
    {"world_size", world_size, NULL, "Number of ranks.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef world_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(world_object, weak_references),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot world_slots[] = {
    {Py_tp_new, world_new},
    {Py_tp_dealloc, world_dealloc},
    {Py_tp_methods, world_methods},
    {Py_tp_getset, world_getset},
    {Py_tp_members, world_members},
    {Py_bf_getbuffer, world_getbuffer},
    {Py_tp_doc, "World(rank, world_size, arena_bytes, n_ops, timeout, pids, meeting, "
                "relay=None, device=None, device_bytes=0, nccl=None, "
                "accumulate='nccl')\n--\n\n"
                "A rank's end of a world of processes: of one host, or of any, where a "
                "relay carries what they say. Its buffer is this rank's arena. With a "
                "device, as many bytes more are that device's, and NCCL's to reduce: "
                "added up as it likes, or in 'float32'."},
    {0, NULL},
};

PyType_Spec pli_world_spec = {
    .name = "paceline._native.World",
    .basicsize = sizeof(world_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = world_slots,
};
