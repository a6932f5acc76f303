/* device_group_type.c - paceline._native.DeviceGroup: copies tensors between the
 * devices of one process.
 *
 * Streams are passed as numbers, by member, as streams() returns them: a backward runs
 * on the streams of its forward, whatever stream is current in its thread.
 */
#include "device_group_object.h"

#include <limits.h>

#include "core/alloc.h"

/* ---- arguments ------------------------------------------------------------------ */

int pli_group_read_stream(PyObject *number, pl_stream **out)
{
    *out = PyLong_AsVoidPtr(number);
    return *out == NULL && PyErr_Occurred() ? -1 : 0;
}

int pli_group_read_streams(const device_group_object *self, PyObject *numbers,
                           pli_group_streams *out)
{
    if (!PyTuple_Check(numbers) || PyTuple_GET_SIZE(numbers) != n_members(self))
        return pli_error(PyExc_TypeError, "streams is %R: give a tuple of %zd numbers",
                         numbers, n_members(self));
    for (Py_ssize_t k = 0; k < n_members(self); k++)
        if (pli_group_read_stream(PyTuple_GET_ITEM(numbers, k), &out->by_member[k]) !=
            0)
            return -1;
    return 0;
}

int pli_group_check_member(const device_group_object *self, Py_ssize_t member)
{
    if (member >= 0 && member < n_members(self))
        return 0;
    PyErr_Format(PyExc_IndexError, "no member %zd of %zd", member, n_members(self));
    return -1;
}

int pli_group_read_block(const device_group_object *self, Py_ssize_t member,
                         PyObject *tensor, pli_tensor *out)
{
    const module_state *state = state_of((PyObject *)self);
    if (pli_group_check_member(self, member) != 0 ||
        pli_tensor_read_on(state, device_of(self, member)->place, tensor, "a tensor",
                           out) != 0)
        return -1;
    if (pli_layout_is_dense(&out->layout) && !out->layout.is_lazy)
        return 0;
    return pli_error(PyExc_ValueError, "a tensor is not one block of memory");
}

int pli_group_read_whole(const device_group_object *self, Py_ssize_t member,
                         PyObject *tensor, size_t n_bytes, pli_tensor *out)
{
    if (pli_group_read_block(self, member, tensor, out) != 0)
        return -1;
    if (pli_layout_bytes(&out->layout) == n_bytes)
        return 0;
    return pli_error(PyExc_ValueError, "a block of %zu bytes, of a segment of %zu",
                     pli_layout_bytes(&out->layout), n_bytes);
}

int pli_group_read_part(const device_group_object *self, Py_ssize_t member,
                        PyObject *tensor, PyObject *offset, size_t n_bytes,
                        block_part *out)
{
    out->offset = PyLong_AsSize_t(offset);
    if (PyErr_Occurred() ||
        pli_group_read_block(self, member, tensor, &out->tensor) != 0)
        return -1;
    if (out->offset <= n_bytes &&
        pli_layout_bytes(&out->tensor.layout) <= n_bytes - out->offset)
        return 0;
    return pli_error(PyExc_ValueError, "a tensor reaches beyond its block");
}

static int read_ring(const device_group_object *self, PyObject *tensor, pli_ring *out)
{
    pli_tensor memory;
    if (pli_group_read_block(self, 0, tensor, &memory) != 0)
        return -1;
    const size_t slot_bytes = pli_layout_bytes(&memory.layout) / PLI_RING_SLOTS;
    *out = (pli_ring){.memory = memory.data,
                      .slot_bytes = slot_bytes / PL_CACHE_LINE * PL_CACHE_LINE};
    return 0;
}

int pli_group_read_rooms(const device_group_object *self, PyObject *items,
                         pli_room *out)
{
    pli_tensor room;
    if (!PyList_Check(items))
        return pli_error(PyExc_TypeError,
                         "memory is a %.200s: give a list, one a member",
                         Py_TYPE(items)->tp_name);
    if (PyList_GET_SIZE(items) != n_members(self))
        return pli_error(PyExc_ValueError, "memory of %zd members, of %zd",
                         PyList_GET_SIZE(items), n_members(self));
    for (Py_ssize_t k = 0; k < n_members(self); k++) {
        PyObject *tensor = PyList_GET_ITEM(items, k);
        out[k] = (pli_room){0};
        if (tensor == Py_None)
            continue;
        if (pli_group_read_block(self, k, tensor, &room) != 0)
            return -1;
        out[k].memory = room.data;
        out[k].n_bytes = pli_layout_bytes(&room.layout);
    }
    return 0;
}

int pli_group_check_lists(PyObject *one, PyObject *other)
{
    if (PyList_GET_SIZE(one) == PyList_GET_SIZE(other))
        return 0;
    return pli_error(PyExc_ValueError, "lists of %zd and %zd: give equal lengths",
                     PyList_GET_SIZE(one), PyList_GET_SIZE(other));
}

/* ---- streams -------------------------------------------------------------------- */

static PyObject *group_streams(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const device_group_object *self = group_of(object);
    const module_state *state = state_of(object);
    PyObject *numbers = PyTuple_New(n_members(self));
    (void)ignored;
    for (Py_ssize_t k = 0; numbers != NULL && k < n_members(self); k++) {
        pl_stream *stream = NULL;
        PyObject *number =
            pli_gpu_current_stream(state, device_of(self, k), &stream) == 0
                ? PyLong_FromVoidPtr(stream)
                : NULL;
        pli_tuple_put(&numbers, k, number);
    }
    return numbers;
}

/* ---- copies --------------------------------------------------------------------- */

static int read_pairs(const device_group_object *self, Py_ssize_t source,
                      PyObject *from_list, Py_ssize_t target, PyObject *to_list,
                      pl_move *out)
{
    pli_tensor from, to;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(to_list); i++) {
        if (pli_group_read_block(self, source, PyList_GET_ITEM(from_list, i), &from) !=
                0 ||
            pli_group_read_block(self, target, PyList_GET_ITEM(to_list, i), &to) != 0)
            return -1;
        if (!pli_layout_equal(&from.layout, &to.layout))
            return pli_error(
                PyExc_ValueError,
                "a tensor and its destination are not alike: give the same "
                "dtype, shape and strides");
        out[i] = pli_group_move_of(to.data, &from);
    }
    return 0;
}

static PyObject *group_copy(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    const device_group_object *self = group_of(object);
    PyObject *numbers, *from_list, *to_list, *result = NULL;
    Py_ssize_t source, target;
    pl_move *moves = NULL;
    pli_group_streams of;
    pl_status st;
    if (!PyArg_ParseTuple(args, "OnO!nO!:copy", &numbers, &source, &PyList_Type,
                          &from_list, &target, &PyList_Type, &to_list) ||
        pli_group_read_streams(self, numbers, &of) != 0 ||
        pli_group_check_member(self, source) != 0 ||
        pli_group_check_member(self, target) != 0 ||
        pli_group_check_lists(from_list, to_list) != 0)
        return NULL;
    const size_t n = (size_t)PyList_GET_SIZE(to_list);
    if (pli_check(state_of(object),
                  pli_calloc(n + 1, sizeof *moves, "copies", &moves)) != 0)
        return NULL;
    if (read_pairs(self, source, from_list, target, to_list, moves) == 0) {
        Py_BEGIN_ALLOW_THREADS
        st = pli_device_group_copy(self->group, of.by_member, (int)source, (int)target,
                                   moves, n);
        Py_END_ALLOW_THREADS
        result = pli_none(pli_check(state_of(object), st));
    }
    pli_free(moves);
    return result;
}

/* ---- broadcasts ----------------------------------------------------------------- */

static int read_moves(const device_group_object *self, PyObject *sources,
                      PyObject *offsets, size_t n_bytes, pl_move *out)
{
    block_part from;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sources); i++) {
        if (pli_group_read_part(self, 0, PyList_GET_ITEM(sources, i),
                                PyList_GET_ITEM(offsets, i), n_bytes, &from) != 0)
            return -1;
        void *to = (void *)(uintptr_t)from.offset; /* NOLINT: an offset */
        out[i] = pli_group_move_of(to, &from.tensor);
    }
    return 0;
}

static int read_targets(const device_group_object *self, PyObject *blocks,
                        size_t n_bytes, void **out)
{
    pli_tensor block;
    for (Py_ssize_t k = 1; k < n_members(self); k++) {
        PyObject *target = PyList_GET_ITEM(blocks, k);
        if (target == Py_None)
            continue;
        if (pli_group_read_whole(self, k, target, n_bytes, &block) != 0)
            return -1;
        out[k] = block.data;
    }
    return 0;
}

#define A_SEGMENT                                                                      \
    "a segment is (sources: list, offsets: list, n_bytes: int, blocks: list)"

/* Fills *out.  Free out->moves with pli_free(); `targets` lies in the same memory. */
static int read_segment(const device_group_object *self, PyObject *item,
                        pli_segment *out)
{
    PyObject *sources, *offsets, *blocks;
    Py_ssize_t n_bytes;
    pl_move *moves;
    if (!PyTuple_Check(item))
        return pli_error(PyExc_TypeError, A_SEGMENT);
    if (!PyArg_ParseTuple(item, "O!O!nO!;" A_SEGMENT, &PyList_Type, &sources,
                          &PyList_Type, &offsets, &n_bytes, &PyList_Type, &blocks) ||
        pli_group_check_lists(sources, offsets) != 0)
        return -1;
    if (n_bytes < 0 || PyList_GET_SIZE(blocks) != n_members(self))
        return pli_error(PyExc_ValueError,
                         "a segment of %zd bytes with %zd blocks: give one for each of "
                         "%zd members",
                         n_bytes, PyList_GET_SIZE(blocks), n_members(self));
    const size_t n_moves = (size_t)PyList_GET_SIZE(sources);
    if (pli_check(state_of((PyObject *)self),
                  pli_calloc(1,
                             n_moves * sizeof *moves +
                                 (size_t)n_members(self) * sizeof *out->targets,
                             "a segment", &moves)) != 0)
        return -1;
    void **const targets = (void **)(moves + n_moves);
    *out = (pli_segment){moves, n_moves, (size_t)n_bytes, targets};
    if (read_moves(self, sources, offsets, out->n_bytes, moves) != 0)
        return -1;
    return read_targets(self, blocks, out->n_bytes, targets);
}

static PyObject *group_broadcast(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    const device_group_object *self = group_of(object);
    PyObject *numbers, *memory, *items, *rooms = Py_None, *result = NULL;
    pli_room sums[PLI_MOST_MEMBERS];
    pli_segment *all = NULL;
    pli_group_streams of;
    pli_ring ring;
    pl_status st;
    if (!PyArg_ParseTuple(args, "OOO!|O:broadcast", &numbers, &memory, &PyList_Type,
                          &items, &rooms) ||
        pli_group_read_streams(self, numbers, &of) != 0 ||
        read_ring(self, memory, &ring) != 0 ||
        (rooms != Py_None && pli_group_read_rooms(self, rooms, sums) != 0))
        return NULL;
    const size_t n = (size_t)PyList_GET_SIZE(items);
    if (pli_check(state_of((PyObject *)self),
                  pli_calloc(n + 1, sizeof *all, "segments", &all)) != 0)
        return NULL;
    size_t n_read = 0;
    while (n_read < n &&
           read_segment(self, PyList_GET_ITEM(items, n_read), &all[n_read]) == 0)
        n_read++;
    if (n_read == n) {
        Py_BEGIN_ALLOW_THREADS
        st = pli_device_group_broadcast(self->group, of.by_member, all, n, ring,
                                        rooms != Py_None ? sums : NULL);
        Py_END_ALLOW_THREADS
        result = pli_none(pli_check(state_of(object), st));
    }
    for (size_t i = 0; i < n; i++)
        pli_free((void *)all[i].moves);
    pli_free(all);
    return result;
}

/* ---- sums of gradients ---------------------------------------------------------- */

typedef pl_status (*order_of_streams)(pli_device_group *group,
                                      pl_stream *const *streams);

static PyObject *order_streams(PyObject *object, PyObject *numbers,
                               order_of_streams order)
{
    const device_group_object *self = group_of(object);
    pli_group_streams of;
    pl_status st;
    if (pli_group_read_streams(self, numbers, &of) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = order(self->group, of.by_member);
    Py_END_ALLOW_THREADS
    return pli_none(pli_check(state_of(object), st));
}

static PyObject *group_fence(PyObject *object, PyObject *numbers)
{
    PLI_ENTER(object);
    return order_streams(object, numbers, pli_device_group_fence);
}

static PyObject *group_settle(PyObject *object, PyObject *numbers)
{
    PLI_ENTER(object);
    return order_streams(object, numbers, pli_device_group_settle);
}

/* ---- life ----------------------------------------------------------------------- */

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"devices", NULL};
    const module_state *state = state_of_type(type);
    pl_backend *members[PLI_MOST_MEMBERS];
    PyObject *given;
    pl_status st;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:DeviceGroup", names, &given))
        return NULL;
    PyObject *devices = PySequence_Tuple(given);
    if (devices == NULL)
        return NULL;
    const Py_ssize_t n = PyTuple_GET_SIZE(devices);
    for (Py_ssize_t k = 0; k < n && n <= PLI_MOST_MEMBERS; k++) {
        PyObject *device = PyTuple_GET_ITEM(devices, k);
        if (!Py_IS_TYPE(device, state->gpu_type)) {
            PyErr_Format(PyExc_TypeError, "devices[%zd] is %R: give a Device", k,
                         device);
            Py_DECREF(devices);
            return NULL;
        }
        members[k] = ((const gpu_object *)device)->backend;
    }
    device_group_object *self = (device_group_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(devices);
        return NULL;
    }
    self->devices = devices;
    Py_BEGIN_ALLOW_THREADS
    st =
        pli_device_group_create(members, n <= INT_MAX ? (int)n : INT_MAX, &self->group);
    Py_END_ALLOW_THREADS
    if (pli_check(state, st) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void group_dealloc(PyObject *object)
{
    device_group_object *self = group_of(object);
    pli_device_group_destroy(self->group);
    Py_XDECREF(self->devices);
    pli_object_free(object);
}

static PyObject *group_readers(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    const device_group_object *self = group_of(object);
    PyObject *all = PyTuple_New(n_members(self));
    (void)ignored;
    for (Py_ssize_t k = 0; all != NULL && k < n_members(self); k++)
        pli_tuple_put(
            &all, k,
            PyBool_FromLong(pli_device_group_reads_first(self->group, (int)k)));
    return all;
}

static PyMethodDef group_methods[] = {
    {"readers", group_readers, METH_NOARGS,
     "readers($self, /)\n--\n\n"
     "Return, by member, whether its kernels can read member 0's memory."},
    {"streams", group_streams, METH_NOARGS,
     "streams($self, /)\n--\n\nReturn the current streams of this thread as numbers, "
     "one for each member."},
    {"copy", group_copy, METH_VARARGS,
     "copy($self, streams, source, tensors, target, places, /)\n--\n\n"
     "Copy tensors of the source member to places, tensors of the target member."},
    {"broadcast", group_broadcast, METH_VARARGS,
     "broadcast($self, streams, ring, segments, sums=None, /)\n--\n\n"
     "Copy segments of member 0's tensors, each (sources, offsets, n_bytes, blocks), "
     "to the blocks of other members. With sums, copy only segments that differ; sums "
     "holds, by member, memory for two 64-bit numbers a segment."},
    {"gradient_sum", pli_group_gradient_sum, METH_VARARGS,
     "gradient_sum($self, member, tensors, offsets, n_bytes, /)\n--\n\n"
     "Return a GradientSum for gradients laid out like tensors of a member, at offsets "
     "of a block."},
    {"fence", group_fence, METH_O,
     "fence($self, streams, /)\n--\n\n"
     "Make later sums of gradients wait for the work that member 0's stream holds."},
    {"settle", group_settle, METH_O,
     "settle($self, streams, /)\n--\n\n"
     "Make streams wait for all sums of gradients begun so far."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot device_group_slots[] = {
    {Py_tp_new, group_new},
    {Py_tp_dealloc, group_dealloc},
    {Py_tp_methods, group_methods},
    {Py_tp_doc,
     "DeviceGroup(devices)\n--\n\n"
     "Devices of one process: member 0 has a model, the others its replicas."},
    {0, NULL},
};

PLI_TYPE(device_group, DeviceGroup, 0);
