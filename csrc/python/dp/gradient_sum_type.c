/* gradient_sum_type.c - paceline._native.GradientSum: adds up, for member 0, the
 * gradients of one segment that the other members pack.
 *
 * The caller keeps the blocks and the sum until settle(): streams may read and write
 * them until then, even after a failed backward.
 */
#include "core/alloc.h"
#include "device_group_object.h"

typedef struct slot {
    pli_layout *layout;
    size_t offset; /* in bytes, in the block */
} slot;

typedef struct gradient_sum_object {
    PyObject_HEAD
    device_group_object *group;
    pli_gradient_sum *sum;
    slot *slots;
    size_t n_slots, n_bytes;
} gradient_sum_object;

static inline gradient_sum_object *sum_of(PyObject *object)
{
    return (gradient_sum_object *)object;
}

/* ---- packing -------------------------------------------------------------------- */

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
    const gradient_sum_object *self = (const gradient_sum_object *)object;
    PyObject *number, *grads, *tensor;
    Py_ssize_t member;
    pl_stream *stream;
    pl_move *moves = NULL;
    pli_tensor block;
    pl_status st;
    if (!PyArg_ParseTuple(args, "OnO!O:pack", &number, &member, &PyList_Type, &grads,
                          &tensor) ||
        pli_group_read_stream(number, &stream) != 0 ||
        pli_group_check_member(self->group, member) != 0 ||
        pli_group_read_whole(self->group, member, tensor, self->n_bytes, &block) != 0)
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

/* ---- adding up ------------------------------------------------------------------ */

static PyObject *sum_begin(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    gradient_sum_object *self = sum_of(object);
    PyObject *memory, *tensor;
    pli_room rooms[PLI_MOST_MEMBERS];
    pli_tensor to;
    pl_status st;
    if (!PyArg_ParseTuple(args, "OO:begin", &memory, &tensor) ||
        pli_group_read_rooms(self->group, memory, rooms) != 0 ||
        pli_group_read_whole(self->group, 0, tensor, self->n_bytes, &to) != 0)
        return NULL;
    const pl_move sum = pli_group_move_of(to.data, &to);
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
    if (pli_group_read_stream(number, &stream) != 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = pli_gradient_sum_end(self->sum, stream);
    Py_END_ALLOW_THREADS
    return pli_none(pli_check(state_of(object), st));
}

/* ---- life ----------------------------------------------------------------------- */

static int read_slots(gradient_sum_object *self, Py_ssize_t member, PyObject *tensors,
                      PyObject *offsets)
{
    const module_state *state = state_of((PyObject *)self);
    const size_t n = (size_t)PyList_GET_SIZE(tensors);
    block_part found;
    if (pli_group_check_lists(tensors, offsets) != 0 ||
        pli_check(state,
                  pli_calloc(n + 1, sizeof *self->slots, "gradients", &self->slots)))
        return -1;
    self->n_slots = n;
    for (Py_ssize_t i = 0; i < (Py_ssize_t)n; i++) {
        slot *const place = &self->slots[i];
        if (pli_group_read_part(self->group, member, PyList_GET_ITEM(tensors, i),
                                PyList_GET_ITEM(offsets, i), self->n_bytes,
                                &found) != 0 ||
            pli_check(state, pli_layout_copy(&found.tensor.layout, &place->layout)) !=
                0)
            return -1;
        place->offset = found.offset;
    }
    return 0;
}

PyObject *pli_group_gradient_sum(PyObject *group, PyObject *args)
{
    PLI_ENTER(group);
    const module_state *state = state_of(group);
    PyTypeObject *const type = state->gradient_sum_type;
    PyObject *tensors, *offsets;
    Py_ssize_t member, n_bytes;
    if (!PyArg_ParseTuple(args, "nO!O!n:gradient_sum", &member, &PyList_Type, &tensors,
                          &PyList_Type, &offsets, &n_bytes) ||
        pli_group_check_member(group_of(group), member) != 0)
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
