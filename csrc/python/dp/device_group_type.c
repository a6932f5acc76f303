/* device_group_type.c - paceline._native.DeviceGroup and GradientSum: copy tensors
 * between the devices of one process, and sum gradients.
 *
 * Streams are passed as numbers, by member, as streams() returns them: a backward runs
 * on the streams of its forward, whatever stream is current in its thread.
 */
#include "replicas/device_group.h"

#include <limits.h>

#include "core/alloc.h"
#include "python/gpu.h"
#include "python/tensor.h"

typedef struct device_group_object {
    PyObject_HEAD
    pli_device_group *group;
    PyObject *devices; /* a tuple */
} device_group_object;

static device_group_object *group_of(PyObject *object)
{
    return (device_group_object *)object;
}

static Py_ssize_t n_members(const device_group_object *self)
{
    return PyTuple_GET_SIZE(self->devices);
}

static const gpu_object *device_of(const device_group_object *self, Py_ssize_t member)
{
    return (const gpu_object *)PyTuple_GET_ITEM(self->devices, member);
}

/* ---- arguments ------------------------------------------------------------------ */

static int read_stream(PyObject *number, pl_stream **out)
{
    *out = PyLong_AsVoidPtr(number);
    return *out == NULL && PyErr_Occurred() ? -1 : 0;
}

static int read_streams(const device_group_object *self, PyObject *numbers,
                        pl_stream **out)
{
    if (!PyTuple_Check(numbers) || PyTuple_GET_SIZE(numbers) != n_members(self))
        return pli_error(PyExc_TypeError, "streams is %R: give a tuple of %zd numbers",
                         numbers, n_members(self));
    for (Py_ssize_t k = 0; k < n_members(self); k++)
        if (read_stream(PyTuple_GET_ITEM(numbers, k), &out[k]) != 0)
            return -1;
    return 0;
}

static int check_member(const device_group_object *self, Py_ssize_t member)
{
    if (member >= 0 && member < n_members(self))
        return 0;
    PyErr_Format(PyExc_IndexError, "no member %zd of %zd", member, n_members(self));
    return -1;
}

/* A tensor of a member; it must be one block of memory. */
static int read_block(const device_group_object *self, Py_ssize_t member,
                      PyObject *tensor, pli_tensor *out)
{
    const module_state *state = state_of((PyObject *)self);
    if (check_member(self, member) != 0 ||
        pli_tensor_read_on(state, device_of(self, member)->place, tensor, "a tensor",
                           out) != 0)
        return -1;
    if (pli_layout_is_dense(&out->layout) && !out->layout.is_lazy)
        return 0;
    return pli_error(PyExc_ValueError, "a tensor is not one block of memory");
}

/* Such a tensor that holds a segment of n_bytes. */
static int read_whole(const device_group_object *self, Py_ssize_t member,
                      PyObject *tensor, size_t n_bytes, pli_tensor *out)
{
    if (read_block(self, member, tensor, out) != 0)
        return -1;
    if (pli_layout_bytes(&out->layout) == n_bytes)
        return 0;
    return pli_error(PyExc_ValueError, "a block of %zu bytes, of a segment of %zu",
                     pli_layout_bytes(&out->layout), n_bytes);
}

typedef struct block_part {
    pli_tensor tensor;
    size_t offset; /* in bytes, in the block */
} block_part;

/* Such a tensor that fits at an offset into a block of n_bytes. */
static int read_part(const device_group_object *self, Py_ssize_t member,
                     PyObject *tensor, PyObject *offset, size_t n_bytes,
                     block_part *out)
{
    out->offset = PyLong_AsSize_t(offset);
    if (PyErr_Occurred() || read_block(self, member, tensor, &out->tensor) != 0)
        return -1;
    if (out->offset <= n_bytes &&
        pli_layout_bytes(&out->tensor.layout) <= n_bytes - out->offset)
        return 0;
    return pli_error(PyExc_ValueError, "a tensor reaches beyond its block");
}

static int read_ring(const device_group_object *self, PyObject *tensor, pli_ring *out)
{
    pli_tensor memory;
    if (read_block(self, 0, tensor, &memory) != 0)
        return -1;
    const size_t slot_bytes = pli_layout_bytes(&memory.layout) / PLI_RING_SLOTS;
    *out = (pli_ring){.memory = memory.data,
                      .slot_bytes = slot_bytes / PL_CACHE_LINE * PL_CACHE_LINE};
    return 0;
}

/* A list with a tensor of each member, or None. */
static int read_rooms(const device_group_object *self, PyObject *items, pli_room *out)
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
        if (read_block(self, k, tensor, &room) != 0)
            return -1;
        out[k].memory = room.data;
        out[k].n_bytes = pli_layout_bytes(&room.layout);
    }
    return 0;
}

static int check_lists(PyObject *one, PyObject *other)
{
    if (PyList_GET_SIZE(one) == PyList_GET_SIZE(other))
        return 0;
    return pli_error(PyExc_ValueError, "lists of %zd and %zd: give equal lengths",
                     PyList_GET_SIZE(one), PyList_GET_SIZE(other));
}

static pl_move move_of(void *to, const pli_tensor *from)
{
    return (pl_move){.to = to,
                     .from = from->data,
                     .dtype = from->layout.dtype,
                     .n_elems = from->layout.n_elems};
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
        if (read_block(self, source, PyList_GET_ITEM(from_list, i), &from) != 0 ||
            read_block(self, target, PyList_GET_ITEM(to_list, i), &to) != 0)
            return -1;
        if (!pli_layout_equal(&from.layout, &to.layout))
            return pli_error(
                PyExc_ValueError,
                "a tensor and its destination are not alike: give the same "
                "dtype, shape and strides");
        out[i] = move_of(to.data, &from);
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
    pl_stream *streams[PLI_MOST_MEMBERS];
    pl_status st;
    if (!PyArg_ParseTuple(args, "OnO!nO!:copy", &numbers, &source, &PyList_Type,
                          &from_list, &target, &PyList_Type, &to_list) ||
        read_streams(self, numbers, streams) != 0 || check_member(self, source) != 0 ||
        check_member(self, target) != 0 || check_lists(from_list, to_list) != 0)
        return NULL;
    const size_t n = (size_t)PyList_GET_SIZE(to_list);
    if (pli_check(state_of(object),
                  pli_calloc(n + 1, sizeof *moves, "copies", &moves)) != 0)
        return NULL;
    if (read_pairs(self, source, from_list, target, to_list, moves) == 0) {
        Py_BEGIN_ALLOW_THREADS
        st = pli_device_group_copy(self->group, streams, (int)source, (int)target,
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
        if (read_part(self, 0, PyList_GET_ITEM(sources, i), PyList_GET_ITEM(offsets, i),
                      n_bytes, &from) != 0)
            return -1;
        void *to = (void *)(uintptr_t)from.offset; /* NOLINT: an offset */
        out[i] = move_of(to, &from.tensor);
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
        if (read_whole(self, k, target, n_bytes, &block) != 0)
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
        check_lists(sources, offsets) != 0)
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
    pl_stream *streams[PLI_MOST_MEMBERS];
    pli_ring ring;
    pl_status st;
    if (!PyArg_ParseTuple(args, "OOO!|O:broadcast", &numbers, &memory, &PyList_Type,
                          &items, &rooms) ||
        read_streams(self, numbers, streams) != 0 ||
        read_ring(self, memory, &ring) != 0 ||
        (rooms != Py_None && read_rooms(self, rooms, sums) != 0))
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
        st = pli_device_group_broadcast(self->group, streams, all, n, ring,
                                        rooms != Py_None ? sums : NULL);
        Py_END_ALLOW_THREADS
        result = pli_none(pli_check(state_of(object), st));
    }
    for (size_t i = 0; i < n; i++)
        pli_free((void *)all[i].moves);
    pli_free(all);
    return result;
}

/* ---- order of streams ----------------------------------------------------------- */

static PyObject *order_streams(PyObject *object, PyObject *numbers,
                               pl_status (*order)(pli_device_group *,
                                                  pl_stream *const *))
{
    const device_group_object *self = group_of(object);
    pl_stream *streams[PLI_MOST_MEMBERS];
    pl_status st;
    if (read_streams(self, numbers, streams) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = order(self->group, streams);
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

/* ---- GradientSum ---------------------------------------------------------------- */

typedef struct slot {
    pli_layout *layout;
    size_t offset; /* in bytes, in the block */
} slot;

/* Adds up, for member 0, the gradients of one segment that the other members pack.  The
 * caller keeps the blocks and the sum until settle(): streams may read and write them
 * until then, even after a failed backward. */
typedef struct gradient_sum_object {
    PyObject_HEAD
    device_group_object *group;
    pli_gradient_sum *sum;
    slot *slots;
    size_t n_slots, n_bytes;
} gradient_sum_object;

static gradient_sum_object *sum_of(PyObject *object)
{
    return (gradient_sum_object *)object;
}

/* Reads a gradient into *out; returns 1 if it is not laid out like its slot, or has no
 * memory of its own (sparse, or a batch under vmap). */
static int read_grad(const gradient_sum_object *self, dl_device place, PyObject *grad,
                     const slot *to, char *block, pl_move *out)
{
    pli_tensor found;
    *out = (pl_move){.to = block + to->offset,
                     .dtype = to->layout->dtype,
                     .n_elems = to->layout->n_elems};
    if (grad == Py_None)
        return 0;
    if (pli_tensor_read_grad(state_of((PyObject *)self), place, grad, "a gradient",
                             &found) != 0) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return -1;
        PyErr_Clear();
        return 1;
    }
    out->from = found.data;
    return found.layout.is_lazy || !pli_layout_equal(&found.layout, to->layout);
}

/* Reads all gradients; returns a list of the numbers of those not laid out like their
 * slots. */
static PyObject *read_grads(const gradient_sum_object *self, Py_ssize_t member,
                            PyObject *grads, char *block, pl_move *out)
{
    const dl_device place = device_of(self->group, member)->place;
    PyObject *others = PyList_New(0);
    for (size_t i = 0; others != NULL && i < self->n_slots; i++) {
        PyObject *const grad = PyList_GET_ITEM(grads, (Py_ssize_t)i);
        const int status =
            read_grad(self, place, grad, &self->slots[i], block, &out[i]);
        if (status == 0)
            continue;
        PyObject *number = status == 1 ? PyLong_FromSize_t(i) : NULL;
        if (number == NULL || PyList_Append(others, number) != 0)
            Py_CLEAR(others);
        Py_XDECREF(number);
    }
    return others;
}

static PyObject *sum_pack(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    const gradient_sum_object *self = sum_of(object);
    PyObject *number, *grads, *tensor;
    Py_ssize_t member;
    pl_stream *stream;
    pl_move *moves = NULL;
    pli_tensor block;
    pl_status st;
    if (!PyArg_ParseTuple(args, "OnO!O:pack", &number, &member, &PyList_Type, &grads,
                          &tensor) ||
        read_stream(number, &stream) != 0 || check_member(self->group, member) != 0 ||
        read_whole(self->group, member, tensor, self->n_bytes, &block) != 0)
        return NULL;
    if (member == 0 || (size_t)PyList_GET_SIZE(grads) != self->n_slots)
        return PyErr_Format(PyExc_ValueError,
                            "member %zd packs %zd gradients of %zu tensors: give one "
                            "for each, and a member other than 0",
                            member, PyList_GET_SIZE(grads), self->n_slots);
    if (pli_check(state_of(object), pli_calloc(self->n_slots + 1, sizeof *moves,
                                               "gradients", &moves)) != 0)
        return NULL;
    PyObject *others = read_grads(self, member, grads, block.data, moves);
    if (others != NULL && PyList_GET_SIZE(others) == 0) {
        Py_BEGIN_ALLOW_THREADS
        st = pli_gradient_sum_pack(self->sum, (int)member, stream, moves, self->n_slots,
                                   block.data);
        Py_END_ALLOW_THREADS
        if (pli_check(state_of(object), st) != 0)
            Py_CLEAR(others);
    }
    pli_free(moves);
    return others;
}

static PyObject *sum_begin(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    gradient_sum_object *self = sum_of(object);
    PyObject *memory, *tensor;
    pli_room rooms[PLI_MOST_MEMBERS];
    pli_tensor to;
    pl_status st;
    if (!PyArg_ParseTuple(args, "OO:begin", &memory, &tensor) ||
        read_rooms(self->group, memory, rooms) != 0 ||
        read_whole(self->group, 0, tensor, self->n_bytes, &to) != 0)
        return NULL;
    const pl_move sum = move_of(to.data, &to);
    Py_BEGIN_ALLOW_THREADS
    st = pli_gradient_sum_begin(self->sum, &sum, rooms);
    Py_END_ALLOW_THREADS
    return pli_none(pli_check(state_of(object), st));
}

static PyObject *sum_end(PyObject *object, PyObject *number)
{
    PLI_ENTER(object);
    const gradient_sum_object *self = sum_of(object);
    pl_stream *stream;
    pl_status st;
    if (read_stream(number, &stream) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = pli_gradient_sum_end(self->sum, stream);
    Py_END_ALLOW_THREADS
    return pli_none(pli_check(state_of(object), st));
}

static int read_slots(gradient_sum_object *self, Py_ssize_t member, PyObject *tensors,
                      PyObject *offsets)
{
    const module_state *state = state_of((PyObject *)self);
    const size_t n = (size_t)PyList_GET_SIZE(tensors);
    block_part found;
    if (check_lists(tensors, offsets) != 0 ||
        pli_check(state,
                  pli_calloc(n + 1, sizeof *self->slots, "gradients", &self->slots)))
        return -1;
    self->n_slots = n;
    for (Py_ssize_t i = 0; i < (Py_ssize_t)n; i++) {
        slot *const place = &self->slots[i];
        if (read_part(self->group, member, PyList_GET_ITEM(tensors, i),
                      PyList_GET_ITEM(offsets, i), self->n_bytes, &found) != 0 ||
            pli_check(state, pli_layout_copy(&found.tensor.layout, &place->layout)) !=
                0)
            return -1;
        place->offset = found.offset;
    }
    return 0;
}

static PyObject *group_gradient_sum(PyObject *group, PyObject *args)
{
    PLI_ENTER(group);
    const module_state *state = state_of(group);
    PyTypeObject *const type = state->gradient_sum_type;
    PyObject *tensors, *offsets;
    Py_ssize_t member, n_bytes;
    if (!PyArg_ParseTuple(args, "nO!O!n:gradient_sum", &member, &PyList_Type, &tensors,
                          &PyList_Type, &offsets, &n_bytes) ||
        check_member(group_of(group), member) != 0)
        return NULL;
    gradient_sum_object *self = (gradient_sum_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->group = group_of(Py_NewRef(group));
    self->n_bytes = n_bytes > 0 ? (size_t)n_bytes : 0;
    if (read_slots(self, member, tensors, offsets) != 0 ||
        pli_check(state, pli_gradient_sum_create(self->group->group, &self->sum)) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void sum_dealloc(PyObject *object)
{
    gradient_sum_object *self = sum_of(object);
    pli_gradient_sum_destroy(self->sum);
    for (size_t i = 0; i < self->n_slots; i++)
        pli_free(self->slots[i].layout);
    pli_free(self->slots);
    Py_XDECREF(self->group);
    pli_object_free(object);
}

static PyMethodDef sum_methods[] = {
    {"pack", sum_pack, METH_VARARGS,
     "pack($self, stream, member, gradients, block, /)\n--\n\n"
     "Copy a member's gradients into a block on its compute stream, zeros for None. "
     "Return the numbers of gradients of another layout, or without plain memory; if "
     "there are any, copy nothing."},
    {"begin", sum_begin, METH_VARARGS,
     "begin($self, rooms, to, /)\n--\n\n"
     "Add up the gradients packed since the last sum into a tensor of member 0; rooms "
     "holds, by member, working memory or None."},
    {"end", sum_end, METH_O,
     "end($self, stream, /)\n--\n\n"
     "Make a stream of member 0 wait for the sum."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot gradient_sum_slots[] = {
    {Py_tp_dealloc, sum_dealloc},
    {Py_tp_methods, sum_methods},
    {Py_tp_doc, "A sum of gradients; made by DeviceGroup.gradient_sum()."},
    {0, NULL},
};

PLI_TYPE(gradient_sum, GradientSum, Py_TPFLAGS_DISALLOW_INSTANTIATION);

/* ---- DeviceGroup ---------------------------------------------------------------- */

static int read_devices(const device_group_object *self, pl_backend **out)
{
    const module_state *state = state_of((PyObject *)self);
    for (Py_ssize_t k = 0; k < n_members(self) && k < PLI_MOST_MEMBERS; k++) {
        PyObject *device = PyTuple_GET_ITEM(self->devices, k);
        if (!Py_IS_TYPE(device, state->gpu_type))
            return pli_error(PyExc_TypeError, "devices[%zd] is %R: give a Device", k,
                             device);
        out[k] = device_of(self, k)->backend;
    }
    return 0;
}

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"devices", NULL};
    pl_backend *members[PLI_MOST_MEMBERS];
    PyObject *given;
    pl_status st;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:DeviceGroup", names, &given))
        return NULL;
    device_group_object *self = (device_group_object *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->devices = PySequence_Tuple(given);
    if (self == NULL || self->devices == NULL || read_devices(self, members) != 0) {
        Py_XDECREF(self);
        return NULL;
    }
    const Py_ssize_t n = n_members(self);
    Py_BEGIN_ALLOW_THREADS
    st =
        pli_device_group_create(members, n <= INT_MAX ? (int)n : INT_MAX, &self->group);
    Py_END_ALLOW_THREADS
    if (pli_check(state_of((PyObject *)self), st) != 0)
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
    {"gradient_sum", group_gradient_sum, METH_VARARGS,
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
