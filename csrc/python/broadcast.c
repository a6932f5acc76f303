/* broadcast.c - World.broadcast: one rank's tensors to every rank, through the arena.
 *
 * Tensors are packed one after another into the arena, as many bytes as fit, and each
 * load is one operation; a tensor may span loads.
 */
#include "broadcast.h"

#include <string.h>

#include "../comm/comm.h"
#include "tensor.h"
#include "world.h"

/* A run through all tensors' bytes, in loads of the arena's size. */
typedef struct cursor {
    pli_tensor *tensors;
    Py_ssize_t n_tensors;
    Py_ssize_t at; /* tensor */
    size_t offset; /* in it */
} cursor;

typedef enum direction { TO_ARENA, FROM_ARENA } direction;

/* Moves the next bytes, up to `room`; returns how many. */
static size_t move_load(cursor *self, char *arena, size_t room, direction way)
{
    size_t n_moved = 0;
    while (self->at < self->n_tensors && n_moved < room) {
        const pli_tensor *tensor = &self->tensors[self->at];
        const size_t left = pli_layout_bytes(&tensor->layout) - self->offset;
        const size_t n = left < room - n_moved ? left : room - n_moved;
        char *data = (char *)tensor->data + self->offset;
        if (n > 0 && way == TO_ARENA)
            memcpy(arena + n_moved, data, n);
        else if (n > 0)
            memcpy(data, arena + n_moved, n);
        n_moved += n;
        self->offset += n;
        if (n == left) {
            self->at++;
            self->offset = 0;
        }
    }
    return n_moved;
}

typedef struct load {
    pl_comm *comm;
    pl_ticket ticket;
} load;

static pl_status wait_slice(void *context, int64_t slice_ns)
{
    const load *self = context;
    return pl_comm_wait(self->comm, self->ticket, slice_ns);
}

static int send_loads(const module_state *state, pl_comm *comm, int root,
                      cursor *reader)
{
    const direction way = pl_comm_rank(comm) == root ? TO_ARENA : FROM_ARENA;
    const size_t room = pl_comm_arena_bytes(comm);
    char *arena = pli_comm_arena(comm);
    size_t n_total = 0;
    for (Py_ssize_t i = 0; i < reader->n_tensors; i++)
        n_total += pli_layout_bytes(&reader->tensors[i].layout);
    for (size_t n_done = 0; n_done < n_total;) {
        const size_t n = n_total - n_done < room ? n_total - n_done : room;
        const pl_op op = {
            .kind = PL_BROADCAST, .dtype = PL_U8, .root = root, .n_elems = n};
        load one = {.comm = comm};
        cursor own = *reader;
        /* A group whose collectives do nothing leaves each rank what it has. */
        if (way == TO_ARENA || pli_comm_is_relayed(comm))
            (void)move_load(&own, arena, n, TO_ARENA);
        if (pli_check(state, pl_comm_issue(comm, &op, &one.ticket)) != 0 ||
            pli_wait_in_slices(state, wait_slice, &one) != 0)
            return -1;
        if (way == FROM_ARENA)
            (void)move_load(reader, arena, n, way);
        else
            *reader = own;
        n_done += n;
    }
    return 0;
}

PyObject *pli_world_broadcast(PyObject *object, PyObject *args)
{
    const module_state *state = state_of(object);
    PyObject *tensors = NULL;
    PyObject *result = NULL;
    cursor reader = {0};
    int root = 0;
    if (!PyArg_ParseTuple(args, "O|i:broadcast", &tensors, &root))
        return NULL;
    PyObject *fast = PySequence_Fast(tensors, "tensors: give a sequence of tensors");
    if (fast == NULL)
        return NULL;
    reader.n_tensors = PySequence_Fast_GET_SIZE(fast);
    reader.tensors = PyMem_Calloc((size_t)reader.n_tensors + 1, sizeof *reader.tensors);
    if (reader.tensors == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < reader.n_tensors; i++) {
        pli_tensor *tensor = &reader.tensors[i];
        if (pli_tensor_read(state, PySequence_Fast_GET_ITEM(fast, i),
                            "a tensor to broadcast", tensor) != 0)
            goto done;
        if (!pli_layout_is_dense(&tensor->layout)) {
            PyErr_Format(PyExc_ValueError,
                         "tensors[%zd] has holes or overlaps: give a "
                         "contiguous copy",
                         i);
            goto done;
        }
    }
    if (send_loads(state, ((world_object *)object)->comm, root, &reader) == 0)
        result = Py_NewRef(Py_None);
done:
    PyMem_Free(reader.tensors);
    Py_DECREF(fast);
    return result;
}
