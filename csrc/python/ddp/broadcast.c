/* broadcast.c - World.broadcast: one rank's tensors to every rank, through the arena.
 *
 * Tensors are packed one after another into the arena, as many bytes as fit, and each
 * load is one operation; a tensor may span loads.  Tensors on a device go through the
 * device's part of the arena, a launch a load, those on the CPU through the host's.
 */
#include "broadcast.h"

#include <string.h>

#include "comm/comm.h"
#include "core/alloc.h"
#include "python/tensor.h"
#include "world.h"

/* A run through all tensors' bytes, in loads of the arena's size. */
typedef struct cursor {
    pl_move *moves; /* room for one a tensor; NULL: moved at once */
    size_t n_moves;
    pli_tensor *tensors;
    Py_ssize_t n_tensors;
    Py_ssize_t at; /* tensor */
    size_t offset; /* in it */
} cursor;

typedef enum direction { TO_ARENA, FROM_ARENA } direction;

static void move(cursor *self, char *to, const char *from, size_t n_bytes)
{
    if (self->moves == NULL)
        memcpy(to, from, n_bytes);
    else
        self->moves[self->n_moves++] =
            (pl_move){.to = to, .from = from, .dtype = PL_U8, .n_elems = n_bytes};
}

/* Moves the next bytes, up to `room`, or notes how; returns how many. */
static size_t move_load(cursor *self, char *arena, size_t room, direction way)
{
    size_t n_moved = 0;
    self->n_moves = 0;
    while (self->at < self->n_tensors && n_moved < room) {
        const pli_tensor *tensor = &self->tensors[self->at];
        const size_t left = pli_layout_bytes(&tensor->layout) - self->offset;
        const size_t n = left < room - n_moved ? left : room - n_moved;
        char *data = (char *)tensor->data + self->offset;
        char *at = arena + n_moved;
        if (n > 0)
            move(self, way == TO_ARENA ? at : data, way == TO_ARENA ? data : at, n);
        n_moved += n;
        self->offset += n;
        if (n == left) {
            self->at++;
            self->offset = 0;
        }
    }
    return n_moved;
}

static size_t count_bytes(const cursor *reader)
{
    size_t n_total = 0;
    for (Py_ssize_t i = 0; i < reader->n_tensors; i++)
        n_total += pli_layout_bytes(&reader->tensors[i].layout);
    return n_total;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static int send_loads(const module_state *state, pl_comm *comm, int root,
                      cursor *reader)
{
    const direction way = pl_comm_rank(comm) == root ? TO_ARENA : FROM_ARENA;
    const size_t room = comm->host_bytes;
    const size_t n_total = count_bytes(reader);
    char *arena = pli_comm_arena(comm);
    for (size_t n_done = 0; n_done < n_total;) {
        const size_t n = least(n_total - n_done, room);
        const pl_op op = {
            .kind = PL_BROADCAST, .dtype = PL_U8, .root = root, .n_elems = n};
        pl_ticket ticket;
        cursor packer = *reader;
        /* A group whose collectives do nothing leaves each rank what it has. */
        if (way == TO_ARENA || pli_comm_is_group_comm(comm))
            (void)move_load(&packer, arena, n, TO_ARENA);
        if (pli_check(state, pl_comm_issue(comm, &op, &ticket)) != 0 ||
            pli_wait_for_ticket(state, comm, ticket) != 0)
            return -1;
        if (way == FROM_ARENA)
            (void)move_load(reader, arena, n, way);
        else
            *reader = packer;
        n_done += n;
    }
    return 0;
}

/* ---- a device ------------------------------------------------------------------- */

/* Each load, on the stream that is current: packed, broadcast behind that, unpacked. */
typedef struct device_load {
    pl_comm *comm;
    pl_stream *stream;
    pl_event *ready;
    pl_op op;
} device_load;

static pl_status pack(const device_load *self, const cursor *reader)
{
    pl_backend *backend = self->comm->backend;
    pl_status st = PL_OK;
    if (reader->n_moves > 0)
        PL_TRY(
            backend->ops->copy(backend, reader->moves, reader->n_moves, self->stream));
    PL_TRY(backend->ops->event_record(backend, self->ready, self->stream));
done:
    return st;
}

static pl_status issue(const device_load *self, pl_ticket *out)
{
    const pli_order order = {.ready = self->ready};
    return pli_comm_issue_ordered(self->comm, &self->op, &order, out);
}

static pl_status unpack(const device_load *self, const cursor *reader)
{
    pl_backend *backend = self->comm->backend;
    pl_status st = PL_OK;
    PL_TRY(pli_comm_order(self->comm, self->stream));
    if (reader->n_moves > 0)
        PL_TRY(
            backend->ops->copy(backend, reader->moves, reader->n_moves, self->stream));
done:
    return st;
}

/* One load; -1 with an exception. */
static int send_device_load(const module_state *state, const device_load *self,
                            cursor *reader)
{
    pl_comm *comm = self->comm;
    const int is_root = pl_comm_rank(comm) == self->op.root;
    char *memory = pli_comm_memory(comm, self->op.offset_bytes);
    pl_ticket ticket = 0;
    cursor packer = *reader;
    cursor none = {0};
    pl_status st = PL_OK;
    (void)move_load(&packer, memory, self->op.n_elems, TO_ARENA);
    Py_BEGIN_ALLOW_THREADS
    st = pack(self, is_root || pli_comm_is_group_comm(comm) ? &packer : &none);
    if (st == PL_OK)
        st = issue(self, &ticket);
    Py_END_ALLOW_THREADS
    if (pli_check(state, st) != 0 || pli_wait_for_ticket(state, comm, ticket) != 0)
        return -1;
    (void)move_load(reader, memory, self->op.n_elems, FROM_ARENA);
    Py_BEGIN_ALLOW_THREADS
    st = unpack(self, is_root ? &none : reader);
    Py_END_ALLOW_THREADS
    return pli_check(state, st);
}

static int send_device_loads(const module_state *state, const world_object *world,
                             int root, cursor *reader)
{
    pl_comm *comm = world->comm;
    pl_backend *backend = comm->backend;
    const size_t room = pl_comm_arena_bytes(comm) - comm->host_bytes;
    const size_t n_total = count_bytes(reader);
    device_load load = {.comm = comm,
                        .op = {.kind = PL_BROADCAST,
                               .dtype = PL_U8,
                               .root = root,
                               .offset_bytes = comm->host_bytes}};
    int status = pli_gpu_current_stream(state, world->gpu, &load.stream);
    if (status != 0 ||
        pli_check(state, backend->ops->event_create(backend, &load.ready)) != 0)
        return -1;
    for (size_t n_done = 0; status == 0 && n_done < n_total;) {
        load.op.n_elems = least(n_total - n_done, room);
        status = send_device_load(state, &load, reader);
        n_done += load.op.n_elems;
    }
    backend->ops->event_destroy(backend, load.ready);
    return status;
}

/* ---- what Python calls ---------------------------------------------------------- */

/* Reads all of them; *place is where the first is. */
static int read_tensors(const module_state *state, const world_object *world,
                        PyObject *fast, cursor *reader, dl_device *place)
{
    *place = (dl_device){.type = DL_CPU};
    if (world->gpu != NULL && reader->n_tensors > 0 &&
        pli_tensor_place(state, PySequence_Fast_GET_ITEM(fast, 0),
                         "a tensor to broadcast", place) != 0)
        return -1;
    if (place->type != DL_CPU)
        *place = world->gpu->place;
    for (Py_ssize_t i = 0; i < reader->n_tensors; i++) {
        pli_tensor *tensor = &reader->tensors[i];
        if (pli_tensor_read_on(state, *place, PySequence_Fast_GET_ITEM(fast, i),
                               "a tensor to broadcast", tensor) != 0)
            return -1;
        if (pli_layout_is_dense(&tensor->layout) && !tensor->layout.is_lazy)
            continue;
        PyErr_Format(PyExc_ValueError,
                     "tensors[%zd] has holes or overlaps, or is a lazy conjugate: give "
                     "a contiguous copy",
                     i);
        return -1;
    }
    return 0;
}

static int broadcast(const module_state *state, const world_object *world,
                     PyObject *fast, int root)
{
    const size_t n = (size_t)PySequence_Fast_GET_SIZE(fast);
    dl_device place;
    cursor reader = {.n_tensors = (Py_ssize_t)n};
    int status = -1;
    if (pli_check(state, pli_calloc(n, sizeof *reader.tensors, "tensors",
                                    &reader.tensors)) != 0 ||
        read_tensors(state, world, fast, &reader, &place) != 0)
        goto done;
    /* A fake device's tensors say that they are on the CPU: they go by the device. */
    if (world->gpu == NULL || place.type != world->gpu->place.type) {
        status = send_loads(state, world->comm, root, &reader);
        goto done;
    }
    if (pli_check(state, pli_calloc(n, sizeof *reader.moves, "moves", &reader.moves)) ==
        0)
        status = send_device_loads(state, world, root, &reader);
done:
    pli_free(reader.moves);
    pli_free(reader.tensors);
    return status;
}

PyObject *pli_world_broadcast(PyObject *object, PyObject *args)
{
    PyObject *tensors = NULL;
    int root = 0;
    if (!PyArg_ParseTuple(args, "O|i:broadcast", &tensors, &root))
        return NULL;
    PyObject *fast = PySequence_Fast(tensors, "tensors: give a sequence of tensors");
    if (fast == NULL)
        return NULL;
    const int status = broadcast(state_of(object), (world_object *)object, fast, root);
    Py_DECREF(fast);
    if (status != 0)
        return NULL;
    Py_RETURN_NONE;
}
