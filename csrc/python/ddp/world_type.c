/* world_type.c - paceline._native.RankWorld: a rank's end of a world, made layer by
 * layer from shared memory, a group comm, hosts and a device; and the Listener through
 * which rank 0 makes it. */
#include <limits.h>
#include <stddef.h>
#include <string.h>

#include <unistd.h>

#include "comm/hierarchy.h"
#include "core/config.h"
#include "python/recorder_object.h"
#include "world.h"

#include <structmember.h>

#define LONGEST_TIMEOUT 1e9 /* seconds: 31 years */

/* Ranks wait this much longer for their leader: it must first notice a late host. */
#define HOST_GRACE_NS (10 * INT64_C(1000000000))

typedef struct world_hosts {
    int n_hosts; /* 0: all ranks are on one host */
    int host;    /* this rank's */
    int first_rank;
    int inner_rank; /* this rank's number among the ranks that share memory with it */
    int inner_size; /* number of those ranks */
    int n_ranks[PLI_MAX_HOSTS];
    const char *names[PLI_MAX_HOSTS]; /* borrowed */
    int fds[PLI_MAX_HOSTS * PLI_N_LINK_STREAMS];
    int has_links;
} world_hosts;

typedef struct world_arguments {
    int rank;
    int world_size;
    Py_ssize_t arena_bytes;
    Py_ssize_t n_ops;
    double timeout;
    PyObject *pids;
    PyObject *meeting;    /* Listener on rank 0, else its address; None if alone */
    PyObject *group_comm; /* carries the operations; or NULL */
    PyObject *device;     /* the Device with the gradients, or NULL */
    Py_ssize_t device_bytes;
    const char *nccl;
    PyObject *hosts; /* None, or (n_ranks, names, fds) */
    PyObject *prove; /* (bytes) -> 32 bytes that need the job's secret; or None */
    int64_t deadline_ns;
    world_hosts by_host;
} world_arguments;

static const char *const reduction_texts[PL_N_REDUCTIONS] = {
    [PL_SUM] = "sum", [PL_MEAN] = "mean", [PL_MAX] = "max"};

static pl_comm *comm_of(PyObject *object)
{
    return ((world_object *)object)->comm;
}

/* ---- the Listener --------------------------------------------------------------- */

typedef struct listener_object {
    PyObject_HEAD
    pli_listener *listener;
    char address[PLI_ADDRESS_BYTES];
} listener_object;

static PyObject *listener_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Listener", names))
        return NULL;
    listener_object *self = (listener_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (pli_check(state_of_type(type),
                  pli_listener_create(self->address, &self->listener)) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void listener_dealloc(PyObject *object)
{
    pli_listener_destroy(((listener_object *)object)->listener);
    pli_object_free(object);
}

static PyMemberDef listener_members[] = {
    {"address", T_STRING_INPLACE, offsetof(listener_object, address), READONLY,
     "Name that the other ranks connect to."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot listener_slots[] = {
    {Py_tp_new, listener_new},
    {Py_tp_dealloc, listener_dealloc},
    {Py_tp_members, listener_members},
    {Py_tp_doc, "Listener()\n--\n\nSocket over which rank 0 gathers a world."},
    {0, NULL},
};

PLI_TYPE(listener, Listener, 0);

/* ---- arguments ------------------------------------------------------------------ */

/* Reads a sequence of integers, each at least `least`; returns their number, or -1. */
static int read_ints(PyObject *sequence, const char *what, int least, int *out,
                     Py_ssize_t n_most)
{
    PyObject *fast =
        PySequence_Fast(sequence, "pids, hosts: give sequences of integers");
    if (fast == NULL)
        return -1;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    int status = n <= n_most ? (int)n : -1;
    if (status < 0)
        PyErr_Format(PyExc_ValueError, "%s: %zd, at most %zd", what, n, n_most);
    for (Py_ssize_t k = 0; status >= 0 && k < n; k++) {
        int overflow = 0;
        PyObject *item = PySequence_Fast_GET_ITEM(fast, k);
        const long number =
            PyLong_Check(item) ? PyLong_AsLongAndOverflow(item, &overflow) : LONG_MIN;
        if (overflow != 0 || number < least || number > INT_MAX)
            status = pli_error(PyExc_ValueError,
                               "%s[%zd] is %R: give an integer from %d to %d", what, k,
                               item, least, INT_MAX);
        out[k] = (int)number;
    }
    Py_DECREF(fast);
    return status;
}

/* The tuple owns the strings. */
static int read_names(PyObject *names, world_hosts *out)
{
    if (!PyTuple_Check(names) || PyTuple_GET_SIZE(names) != out->n_hosts)
        return pli_error(PyExc_ValueError, "hosts: give a tuple of %d names",
                         out->n_hosts);
    for (int h = 0; h < out->n_hosts; h++)
        if ((out->names[h] = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, h))) == NULL)
            return -1;
    return 0;
}

/* Finds a rank's host, and its number there. */
static int find_rank(int rank, int world_size, world_hosts *out)
{
    int first = 0;
    out->host = -1;
    for (int h = 0; h < out->n_hosts; h++) {
        if (rank >= first && rank < first + out->n_ranks[h]) {
            out->host = h;
            out->first_rank = first;
            out->inner_rank = rank - first;
            out->inner_size = out->n_ranks[h];
        }
        first += out->n_ranks[h];
    }
    if (first == world_size && out->host >= 0)
        return 0;
    return pli_error(PyExc_ValueError, "hosts list %d ranks, but the world has %d",
                     first, world_size);
}

/* Reads (n_ranks, names, fds), or None. */
static int read_hosts(PyObject *hosts, int rank, int world_size, world_hosts *out)
{
    PyObject *n_ranks, *names, *fds;
    *out = (world_hosts){.inner_rank = rank, .inner_size = world_size};
    if (hosts == NULL || hosts == Py_None)
        return 0;
    if (!PyTuple_Check(hosts) ||
        !PyArg_ParseTuple(hosts, "OOO:hosts", &n_ranks, &names, &fds))
        return pli_error(PyExc_TypeError, "hosts is %R: give (n_ranks, names, fds)",
                         hosts);
    out->n_hosts = read_ints(n_ranks, "hosts: ranks", 1, out->n_ranks, PLI_MAX_HOSTS);
    if (out->n_hosts < 0 || read_names(names, out) != 0 ||
        find_rank(rank, world_size, out) != 0)
        return -1;
    const int n_fds = read_ints(fds, "hosts: sockets", -1, out->fds,
                                (Py_ssize_t)out->n_hosts * PLI_N_LINK_STREAMS);
    if (n_fds < 0)
        return -1;
    out->has_links = n_fds > 0;
    if (out->has_links != (out->inner_rank == 0) ||
        (out->has_links && n_fds != out->n_hosts * PLI_N_LINK_STREAMS))
        return pli_error(
            PyExc_ValueError,
            "hosts: %d sockets for rank %d of %d hosts: the first rank of a "
            "host gives %d a host, others none",
            n_fds, rank, out->n_hosts, PLI_N_LINK_STREAMS);
    return 0;
}

int pli_check_device(const module_state *state, PyObject *device)
{
    if (device == Py_None || Py_IS_TYPE(device, state->gpu_type))
        return 0;
    return pli_error(PyExc_TypeError, "device is %R: give a Device, or None", device);
}

static int check_device(const module_state *state, const world_arguments *arguments)
{
    if (arguments->device != NULL && pli_check_device(state, arguments->device) != 0)
        return -1;
    if (arguments->device_bytes < 0 ||
        (arguments->device_bytes > 0 && arguments->device == NULL))
        return pli_error(PyExc_ValueError,
                         "device_bytes is %zd: give 0 or more, and 0 without a device",
                         arguments->device_bytes);
    return 0;
}

static int read_deadline(const module_state *state, world_arguments *arguments)
{
    const double timeout =
        arguments->timeout < LONGEST_TIMEOUT ? arguments->timeout : LONGEST_TIMEOUT;
    return pli_check(state,
                     pli_config_timeout_ns("PACELINE_TIMEOUT", (int64_t)(timeout * 1e9),
                                           &arguments->deadline_ns));
}

static int check_arguments(const module_state *state, const world_arguments *arguments)
{
    const int is_large =
        arguments->group_comm != NULL || arguments->by_host.n_hosts > 0;
    const int most_ranks = is_large ? PLI_MAX_GROUP_RANKS : PL_MAX_RANKS;
    if (arguments->world_size < 1 || arguments->world_size > most_ranks ||
        arguments->rank < 0 || arguments->rank >= arguments->world_size)
        return pli_error(PyExc_ValueError,
                         "rank %d of world_size %d: a world has 1 to %d ranks",
                         arguments->rank, arguments->world_size, most_ranks);
    if (arguments->arena_bytes < 0 || arguments->n_ops < 1)
        return pli_error(
            PyExc_ValueError,
            "arena_bytes is %zd and n_ops is %zd: give 0 or more, and 1 or more",
            arguments->arena_bytes, arguments->n_ops);
    if (!(arguments->timeout > 0.0)) {
        PyObject *timeout = PyFloat_FromDouble(arguments->timeout);
        PyErr_Format(PyExc_ValueError, "timeout is %R: give more than 0 seconds",
                     timeout != NULL ? timeout : Py_None);
        Py_XDECREF(timeout);
        return -1;
    }
    const int is_alone =
        arguments->by_host.inner_size == 1 || arguments->group_comm != NULL;
    const int is_met = arguments->by_host.inner_rank == 0
                           ? Py_IS_TYPE(arguments->meeting, state->listener_type)
                           : PyUnicode_Check(arguments->meeting);
    if (!is_met && !(is_alone && arguments->meeting == Py_None))
        return pli_error(
            PyExc_TypeError,
            "meeting is %R: give rank 0's Listener on rank 0, its address on other "
            "ranks, or None if a rank shares no memory",
            arguments->meeting);
    if (!is_alone && !PyCallable_Check(arguments->prove))
        return pli_error(PyExc_TypeError,
                         "prove is %R: give a function of bytes that proves the job's "
                         "secret to the host's other ranks",
                         arguments->prove);
    return 0;
}

static int parse_arguments(const module_state *state, PyObject *args, PyObject *kwargs,
                           world_arguments *arguments)
{
    static char *names[] = {
        "rank", "world_size", "arena_bytes", "n_ops",  "timeout",
        "pids", "meeting",    "group_comm",  "device", "device_bytes",
        "nccl", "hosts",      "prove",       NULL};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "iinndOO|OOnzOO:RankWorld", names, &arguments->rank,
            &arguments->world_size, &arguments->arena_bytes, &arguments->n_ops,
            &arguments->timeout, &arguments->pids, &arguments->meeting,
            &arguments->group_comm, &arguments->device, &arguments->device_bytes,
            &arguments->nccl, &arguments->hosts, &arguments->prove) ||
        read_hosts(arguments->hosts, arguments->rank, arguments->world_size,
                   &arguments->by_host) != 0)
        return -1;
    if (arguments->group_comm == Py_None)
        arguments->group_comm = NULL;
    if (arguments->device == Py_None)
        arguments->device = NULL;
    if (check_arguments(state, arguments) != 0 || check_device(state, arguments) != 0)
        return -1;
    return read_deadline(state, arguments);
}

/* ---- calls of the group comm ---------------------------------------------------- */

/* Calls the Python object that carries the core's operations for a group comm:
 *
 *     group_comm.issue(kind, dtype, reduction, offset_bytes, n_elems, root, ticket)
 *     group_comm.wait(ticket)
 *     group_comm.drop()
 *
 * The core calls them where it issues, waits and fails, with or without the GIL. */

/* Takes over `result`, the outcome of a call; NULL is a failure. */
static pl_status status_of_call(PyObject *result)
{
    return pli_drop(result) == 0 ? PL_OK : pli_callback_failed();
}

static pl_status group_issue(void *context, const pl_op *op, pl_ticket ticket)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    const pl_status st = status_of_call(
        PyObject_CallMethod(context, "issue", "sssnniK", pli_op_kind_text(op->kind),
                            pl_dtype_text(op->dtype), reduction_texts[op->reduction],
                            (Py_ssize_t)op->offset_bytes, (Py_ssize_t)op->n_elems,
                            op->root, (unsigned long long)ticket));
    PyGILState_Release(gil);
    return st;
}

static pl_status group_wait(void *context, pl_ticket ticket)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    const pl_status st = status_of_call(
        PyObject_CallMethod(context, "wait", "K", (unsigned long long)ticket));
    PyGILState_Release(gil);
    return st;
}

/* Leaves an exception that is set unchanged. */
static void group_drop(void *context)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (pli_drop(PyObject_CallMethod(context, "drop", NULL)) != 0)
        PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
}

/* Callbacks that take the GIL and call methods of group_comm, which they borrow. */
static pli_group_callbacks group_callbacks_of(PyObject *group_comm)
{
    return (pli_group_callbacks){.context = group_comm,
                                 .issue = group_issue,
                                 .wait = group_wait,
                                 .drop = group_drop};
}

/* ---- making, layer by layer ----------------------------------------------------- */

/* Calls `prove`; takes the GIL. */
static pl_status prove(void *callable, const void *message, size_t n_bytes,
                       unsigned char out[PLI_PROOF_BYTES])
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *proof =
        PyObject_CallFunction(callable, "y#", message, (Py_ssize_t)n_bytes);
    const int is_whole = proof != NULL && PyBytes_Check(proof) &&
                         PyBytes_GET_SIZE(proof) == PLI_PROOF_BYTES;
    if (is_whole)
        memcpy(out, PyBytes_AS_STRING(proof), PLI_PROOF_BYTES);
    else if (proof != NULL)
        PyErr_Format(PyExc_TypeError, "prove has not returned %d bytes",
                     PLI_PROOF_BYTES);
    Py_XDECREF(proof);
    const pl_status st = is_whole ? PL_OK : pli_callback_failed();
    PyGILState_Release(gil);
    return st;
}

static pl_status join_world(const module_state *state, const world_arguments *arguments,
                            const int *pids, const char *address, pl_comm **out)
{
    pl_status st;
    const int has_hosts = arguments->by_host.n_hosts > 0;
    const size_t n_ops = (size_t)arguments->n_ops;
    const size_t board_bytes =
        arguments->device != NULL ? pli_gpu_board_bytes(arguments->world_size) : 0;
    const pli_shm_options options = {
        .rank = arguments->group_comm != NULL ? 0 : arguments->by_host.inner_rank,
        .world_size = arguments->group_comm != NULL ? 1 : arguments->by_host.inner_size,
        .first_rank = arguments->by_host.first_rank,
        .arena_bytes = (size_t)arguments->arena_bytes + board_bytes,
        .n_ops = has_hosts ? pli_hierarchy_inner_ops(n_ops) : n_ops,
        .pids = pids,
        .progress = state->progress,
        .processes = state->processes,
        .is_interrupted = pli_is_interrupted,
        .prove = prove,
        .context = arguments->prove,
        .deadline_ns = arguments->deadline_ns + (has_hosts ? HOST_GRACE_NS : 0),
    };
    pli_listener *listener = Py_IS_TYPE(arguments->meeting, state->listener_type)
                                 ? ((listener_object *)arguments->meeting)->listener
                                 : NULL;
    Py_BEGIN_ALLOW_THREADS
    st = pli_shm_create(&options, listener, address, out);
    Py_END_ALLOW_THREADS
    return st;
}

static pl_status put_group_comm_before(const world_arguments *arguments, pl_comm **comm)
{
    const pli_group_comm_options options = {
        .rank = arguments->rank,
        .world_size = arguments->world_size,
        .base = *comm,
        .callbacks = group_callbacks_of(arguments->group_comm)};
    return pli_group_comm_create(&options, comm);
}

static pl_status open_library(const char *path, pli_nccl_library **out)
{
    pl_status st;
    Py_BEGIN_ALLOW_THREADS
    st = pli_nccl_library_open(path, out);
    Py_END_ALLOW_THREADS
    return st;
}

/* A world may be destroyed while an exception is on its way. */
static void report_loss(void *state, const char *message)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    (void)state;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyErr_WarnFormat(PyExc_RuntimeWarning, 1,
                         "averages of the last steps were lost on the GPU: %s",
                         message) != 0)
        PyErr_WriteUnraisable(NULL);
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
}

/* Puts the device's world before the layers made so far. */
static int put_device_before(module_state *state, world_object *self,
                             const world_arguments *arguments)
{
    pl_status st = PL_OK;
    pli_nccl_library *library = NULL;
    if (state->watchdog == NULL)
        PL_TRY(pli_watchdog_create(&state->watchdog));
    if (arguments->world_size > 1)
        PL_TRY(open_library(arguments->nccl, &library));
    const pli_gpu_comm_options options = {.base = self->comm,
                                          .backend = self->gpu->backend,
                                          .nccl = library,
                                          .watchdog = state->watchdog,
                                          .host_bytes = (size_t)arguments->arena_bytes,
                                          .device_bytes =
                                              (size_t)arguments->device_bytes,
                                          .allocator = pli_gpu_allocator(self->gpu),
                                          .n_ops = (size_t)arguments->n_ops,
                                          .deadline_ns = arguments->deadline_ns,
                                          .is_interrupted = pli_is_interrupted,
                                          .report_loss = report_loss,
                                          .context = state};
    Py_BEGIN_ALLOW_THREADS
    st = pli_gpu_comm_create(&options, &self->comm);
    Py_END_ALLOW_THREADS
done:
    pli_nccl_library_release(library);
    return pli_check(state, st);
}

/* Replaces *comm, the world of this host's ranks, by one of all hosts. */
static pl_status join_hosts(const module_state *state, const world_arguments *arguments,
                            pl_comm **comm)
{
    pl_status st = PL_OK;
    const world_hosts *hosts = &arguments->by_host;
    pli_links *links = NULL;
    const pli_links_options of_links = {.n_hosts = hosts->n_hosts,
                                        .host = hosts->host,
                                        .rank = hosts->first_rank,
                                        .fds = hosts->fds,
                                        .names = hosts->names};
    if (hosts->has_links)
        PL_TRY(pli_links_create(&of_links, &links));
    const pli_hierarchy_options options = {.rank = arguments->rank,
                                           .world_size = arguments->world_size,
                                           .n_hosts = hosts->n_hosts,
                                           .n_ranks = hosts->n_ranks,
                                           .inner = *comm,
                                           .links = links,
                                           .progress = state->progress,
                                           .n_ops = (size_t)arguments->n_ops,
                                           .deadline_ns = arguments->deadline_ns};
    PL_TRY(pli_hierarchy_create(&options, comm));
    links = NULL;
done:
    pli_links_destroy(links);
    return st;
}

/* Lets the group comm carry the ranks' messages while the rest of the world is made. */
static int serve(world_object *self)
{
    return pli_drop(
        PyObject_CallMethod(self->group_comm, "serve", "O", (PyObject *)self));
}

/* Makes the world, layer by layer; after a failure the dealloc ends the layers made. */
static int build_world(module_state *state, world_object *self,
                       const world_arguments *arguments, const int *pids,
                       const char *address)
{
    if (pli_check(state, join_world(state, arguments, pids, address, &self->comm)) != 0)
        return -1;
    if (arguments->group_comm != NULL) {
        self->group_comm = Py_NewRef(arguments->group_comm);
        if (pli_check(state, put_group_comm_before(arguments, &self->comm)) != 0)
            return -1;
    }
    if (arguments->by_host.n_hosts > 0 &&
        pli_check(state, join_hosts(state, arguments, &self->comm)) != 0)
        return -1;
    if (arguments->device == NULL)
        return 0;
    if (arguments->group_comm != NULL && serve(self) != 0)
        return -1;
    self->gpu = (gpu_object *)Py_NewRef(arguments->device);
    return put_device_before(state, self, arguments);
}

/* ---- life ----------------------------------------------------------------------- */

static PyObject *world_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    module_state *state = state_of_type(type);
    world_arguments arguments = {.prove = Py_None};
    const char *address = NULL;
    int pids[PLI_MAX_GROUP_RANKS];
    if (parse_arguments(state, args, kwargs, &arguments) != 0)
        return NULL;
    const int n_ranks = arguments.by_host.inner_size;
    const int n_pids = read_ints(arguments.pids, "pids", 0, pids, PLI_MAX_GROUP_RANKS);
    if (n_pids < 0)
        return NULL;
    if (n_pids != n_ranks)
        return PyErr_Format(PyExc_ValueError, "pids has %d entries for %d ranks",
                            n_pids, n_ranks);
    if (PyUnicode_Check(arguments.meeting) &&
        (address = PyUnicode_AsUTF8(arguments.meeting)) == NULL)
        return NULL;
    world_object *self = (world_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->owner_pid = getpid();
    if (build_world(state, self, &arguments, pids, address) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void world_dealloc(PyObject *object)
{
    world_object *self = (world_object *)object;
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs(object);
    if (self->gpu == NULL || self->owner_pid == getpid()) {
        PyThreadState *thread = pli_let_go(self->gpu);
        pl_comm_destroy(self->comm);
        pli_take_back(thread);
    }
    Py_XDECREF(self->gpu);
    Py_XDECREF(self->group_comm);
    Py_XDECREF(self->recorder);
    pli_object_free(object);
}

/* ---- of the module -------------------------------------------------------------- */

PyObject *pli_nccl_version(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    pli_nccl_library *library = NULL;
    const char *path = NULL;
    if (!PyArg_ParseTuple(args, "z:nccl_version", &path))
        return NULL;
    const pl_status st = open_library(path, &library);
    if (st != PL_OK)
        return pli_raise(state, st);
    const int version = library->version;
    pli_nccl_library_release(library);
    return PyLong_FromLong(version);
}

/* ---- methods -------------------------------------------------------------------- */

static int parse_word(const char *what, const char *word, const char *const *words,
                      int n_words, int *out)
{
    for (int i = 0; i < n_words; i++) {
        if (strcmp(word, words[i]) != 0)
            continue;
        *out = i;
        return 0;
    }
    return pli_error(PyExc_ValueError, "%s: '%s' is not known", what, word);
}

static PyObject *world_issue(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
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
        parse_word("reduction", reduction_word, reduction_texts, PL_N_REDUCTIONS,
                   &reduction) != 0)
        return NULL;
    if (offset < 0 || n_elems < 0)
        return PyErr_Format(
            PyExc_ValueError,
            "offset_bytes is %zd and n_elems is %zd: neither can be negative", offset,
            n_elems);
    const pl_op op = {.kind = (pl_op_kind)kind,
                      .reduction = (pl_reduction)reduction,
                      .dtype = (pl_dtype)dtype,
                      .root = root,
                      .offset_bytes = (size_t)offset,
                      .n_elems = (size_t)n_elems};
    PyThreadState *thread = pli_let_go(((world_object *)object)->gpu);
    const pl_status st = pl_comm_issue(comm, &op, &ticket);
    pli_take_back(thread);
    if (st != PL_OK)
        return pli_raise(state_of(object), st);
    return PyLong_FromUnsignedLongLong(ticket);
}

static PyObject *world_wait(PyObject *object, PyObject *number)
{
    PLI_ENTER(object);
    const pl_ticket ticket = PyLong_AsUnsignedLongLong(number);
    return pli_none(PyErr_Occurred() != NULL ||
                    pli_wait_for_ticket(state_of(object), comm_of(object), ticket));
}

static PyObject *world_check_gone(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    return pli_none(
        pli_check(state_of(object), pli_comm_query(comm_of(object), PLI_QUERY_GONE)));
}

const char *pli_text_of(PyObject *argument)
{
    if (PyUnicode_Check(argument))
        return PyUnicode_AsUTF8(argument);
    PyErr_Format(PyExc_TypeError, "text is %R: give a string", argument);
    return NULL;
}

static PyObject *world_note_exception(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    const char *text = NULL;
    if (argument != Py_None && (text = pli_text_of(argument)) == NULL)
        return NULL;
    pli_comm_set_failure_message(comm_of(object), text);
    Py_RETURN_NONE;
}

static PyObject *world_fail(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    const char *text = pli_text_of(argument);
    if (text == NULL)
        return NULL;
    PyThreadState *thread = pli_let_go(((world_object *)object)->gpu);
    pl_comm_abort(comm_of(object), text);
    pli_take_back(thread);
    Py_RETURN_NONE;
}

static PyObject *world_record(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    world_object *self = (world_object *)object;
    pli_recorder *recorder = NULL;
    if (argument != Py_None) {
        if (!Py_IS_TYPE(argument, state_of(object)->recorder_type))
            return PyErr_Format(PyExc_TypeError, "recorder is %R: give a Recorder",
                                argument);
        recorder = ((recorder_object *)argument)->recorder;
    }
    pli_comm_set_recorder(self->comm, recorder);
    Py_XSETREF(self->recorder, recorder != NULL ? Py_NewRef(argument) : NULL);
    Py_RETURN_NONE;
}

static PyObject *world_leave(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    PyThreadState *thread = pli_let_go(((world_object *)object)->gpu);
    pli_recorder_hide(comm_of(object)->recorder);
    pl_comm_leave(comm_of(object));
    pli_take_back(thread);
    Py_RETURN_NONE;
}

/* The arena itself, which lives as long as any buffer of it.  On a GPU it includes the
 * ranks' board, which a group comm carries as well. */
static int world_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    PLI_ENTER(object);
    pl_comm *comm = comm_of(object);
    const size_t n_more = comm->host_bytes < comm->arena_bytes
                              ? pli_gpu_board_bytes(pl_comm_world_size(comm))
                              : 0;
    return PyBuffer_FillInfo(view, object, comm->arena,
                             (Py_ssize_t)(comm->host_bytes + n_more), 0, flags);
}

static PyObject *world_rank(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromLong(pl_comm_rank(comm_of(object)));
}

static PyObject *world_size(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromLong(pl_comm_world_size(comm_of(object)));
}

static PyObject *world_uses_group(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyBool_FromLong(pli_comm_is_group_comm(comm_of(object)));
}

static PyMethodDef world_methods[] = {
    {"issue", world_issue, METH_VARARGS,
     "issue($self, kind, dtype, reduction, offset_bytes, n_elems, root=0, /)\n--\n\n"
     "Declare this rank's range ready for one collective; return its ticket."},
    {"wait", world_wait, METH_O,
     "wait($self, ticket, /)\n--\n\nWait until every rank did its part up to ticket."},
    {"check_gone", world_check_gone, METH_NOARGS,
     "check_gone($self, /)\n--\n\nRaise PeerError if a rank has died or left."},
    {"broadcast", pli_world_broadcast, METH_VARARGS,
     "broadcast($self, tensors, root=0, /)\n--\n\nOverwrite every rank's tensors with "
     "those of rank root."},
    {"note_exception", world_note_exception, METH_O,
     "note_exception($self, text, /)\n--\n\nKeep a text for peers that must name this "
     "rank; None drops it."},
    {"record", world_record, METH_O,
     "record($self, recorder, /)\n--\n\nRecord this rank's steps. Call it between "
     "steps; the file is removed when the rank leaves. None ends the recording."},
    {"fail", world_fail, METH_O,
     "fail($self, text, /)\n--\n\nEnd the world for every rank; they get the text."},
    {"leave", world_leave, METH_NOARGS,
     "leave($self, /)\n--\n\nSay goodbye to the peers; may be called twice."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef world_getset[] = {
    {"rank", world_rank, NULL, "This rank.", NULL},
    {"world_size", world_size, NULL, "Number of ranks.", NULL},
    {"uses_group", world_uses_group, NULL,
     "Whether a process group carries its operations.", NULL},
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
    {Py_tp_doc,
     "RankWorld(rank, world_size, arena_bytes, n_ops, timeout, pids, meeting, "
     "group_comm=None, device=None, device_bytes=0, nccl=None, hosts=None, "
     "prove=None)\n--\n\n"
     "A rank's end of a world of processes: on one host; on several, with hosts = "
     "(n_ranks, names, fds); or on any, with a group_comm that carries their "
     "messages. With hosts, pids are those of this host's ranks. Its buffer is this "
     "rank's arena. Processes of one host prove to each other that they have the "
     "job's secret: prove(message) is its HMAC-SHA256. With a device, device_bytes "
     "more are in its memory, and NCCL reduces them."},
    {0, NULL},
};

PLI_TYPE(world, RankWorld, 0);
