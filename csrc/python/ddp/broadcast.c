/* broadcast.c - World.broadcast: one rank's tensors to every rank, through the arena.
 */
#include "comm/broadcast_many.h"
#include "core/alloc.h"
#include "python/tensor.h"
#include "world.h"

/* Reads all tensors; *place is the device of the first. */
static int read_tensors(const module_state *state, const world_object *world,
                        PyObject *fast, pli_byte_range *out, dl_device *place)
{
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    *place = (dl_device){.type = DL_CPU};
    if (world->gpu != NULL && n > 0 &&
        pli_tensor_place(state, PySequence_Fast_GET_ITEM(fast, 0),
                         "a tensor to broadcast", place) != 0)
        return -1;
    if (place->type != DL_CPU)
        *place = world->gpu->place;
    for (Py_ssize_t i = 0; i < n; i++) {
        pli_tensor tensor;
        if (pli_tensor_read_on(state, *place, PySequence_Fast_GET_ITEM(fast, i),
                               "a tensor to broadcast", &tensor) != 0)
            return -1;
        if (!pli_layout_is_dense(&tensor.layout) || tensor.layout.is_lazy)
            return pli_error(
                PyExc_ValueError,
                "tensors[%zd] has holes or overlaps, or is a lazy conjugate: "
                "give a contiguous copy",
                i);
        out[i] = (pli_byte_range){tensor.data, pli_layout_bytes(&tensor.layout)};
    }
    return 0;
}

/* Sends all loads, and waits for each; -1 with an exception. */
static int carry(const module_state *state, const world_object *world,
                 pli_broadcast_many *all)
{
    PyThreadState *thread;
    pl_status st;
    pl_ticket ticket = 0;
    while (all->n_left > 0) {
        thread = pli_let_go(world->gpu);
        st = pli_broadcast_many_issue(all, &ticket);
        pli_take_back(thread);
        if (pli_check(state, st) != 0 ||
            pli_wait_for_ticket(state, all->comm, ticket) != 0)
            return -1;
        thread = pli_let_go(world->gpu);
        st = pli_broadcast_many_receive(all);
        pli_take_back(thread);
        if (pli_check(state, st) != 0)
            return -1;
    }
    return 0;
}

static int broadcast(const module_state *state, const world_object *world,
                     PyObject *fast, int root)
{
    const size_t n = (size_t)PySequence_Fast_GET_SIZE(fast);
    dl_device place;
    pli_byte_range *ranges = NULL;
    int status = -1;
    if (pli_check(state, pli_calloc(n, sizeof *ranges, "tensors", &ranges)) != 0 ||
        read_tensors(state, world, fast, ranges, &place) != 0)
        goto done;
    pli_broadcast_many all = {
        .comm = world->comm, .root = root, .ranges = ranges, .n_ranges = n};
    /* Tensors of a fake device report the CPU: their world's device decides. */
    all.is_on_device = world->gpu != NULL && place.type == world->gpu->place.type;
    if (all.is_on_device && pli_gpu_current_stream(state, world->gpu, &all.stream) != 0)
        goto done;
    if (pli_check(state, pli_broadcast_many_begin(&all)) == 0)
        status = carry(state, world, &all);
    pli_broadcast_many_end(&all);
done:
    pli_free(ranges);
    return status;
}

PyObject *pli_world_broadcast(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    PyObject *tensors = NULL;
    int root = 0;
    if (!PyArg_ParseTuple(args, "O|i:broadcast", &tensors, &root))
        return NULL;
    PyObject *fast = PySequence_Fast(tensors, "tensors: give a sequence of tensors");
    if (fast == NULL)
        return NULL;
    const int status = broadcast(state_of(object), (world_object *)object, fast, root);
    Py_DECREF(fast);
    return pli_none(status);
}
