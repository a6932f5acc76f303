/* device_group_grads.c - gradients of replicas: packed by each member, added up for
 * member 0.
 */
#include "device_group_object.h"

#include "core/alloc.h"

/* ---- sums ----------------------------------------------------------------------- */

static int read_rows(const device_group_object *self, PyObject *items,
                     const pli_tensor *to, pli_row *out)
{
    for (Py_ssize_t r = 0; r < PyList_GET_SIZE(items); r++) {
        Py_ssize_t member;
        PyObject *tensor;
        pli_tensor row;
        PyObject *item = PyList_GET_ITEM(items, r);
        if (!PyTuple_Check(item)) {
            PyErr_Format(PyExc_TypeError, "rows[%zd] is %R: give (member, tensor)", r,
                         item);
            return -1;
        }
        if (!PyArg_ParseTuple(item, "nO;a row is (member, tensor)", &member, &tensor) ||
            pli_group_read_block(self, member, tensor, &row) != 0)
            return -1;
        if (!pli_layout_equal(&row.layout, &to->layout)) {
            PyErr_SetString(PyExc_ValueError, "a row of gradients is not like the sum");
            return -1;
        }
        out[r] = (pli_row){.member = (int)member, .memory = row.data};
    }
    return 0;
}

PyObject *pli_group_sum(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    const device_group_object *self = group_of(object);
    PyObject *numbers, *memory, *items, *tensor;
    pli_row rows[PL_MAX_RANKS];
    pli_tensor to;
    pli_group_streams of;
    pli_room rooms[PL_MAX_RANKS];
    pl_status st;
    if (!PyArg_ParseTuple(args, "OO!O!O:sum", &numbers, &PyList_Type, &memory,
                          &PyList_Type, &items, &tensor) ||
        pli_group_read_streams(self, numbers, &of) != 0 ||
        pli_group_read_rooms(self, memory, rooms) != 0 ||
        pli_group_read_block(self, 0, tensor, &to) != 0)
        return NULL;
    const Py_ssize_t n_rows = PyList_GET_SIZE(items);
    if (n_rows >= n_members(self)) {
        PyErr_Format(PyExc_ValueError, "%zd rows of gradients, of %zd members", n_rows,
                     n_members(self));
        return NULL;
    }
    if (read_rows(self, items, &to, rows) != 0)
        return NULL;
    const pl_move sum = pli_group_move_of(to.data, &to);
    Py_BEGIN_ALLOW_THREADS
    st =
        pli_device_group_sum(self->group, of.by_member, rows, (int)n_rows, &sum, rooms);
    Py_END_ALLOW_THREADS
    return none_or_raise(self, st);
}

/* ---- blocks --------------------------------------------------------------------- */

/* Reads a gradient into *out; 1 where it is not laid out as its slot is. */
static int read_grad(const device_group_object *self, Py_ssize_t member, PyObject *grad,
                     const pli_tensor *slot, pl_move *out)
{
    const module_state *state = state_of((PyObject *)self);
    pli_tensor found;
    if (grad == Py_None) {
        out->from = NULL;
        return 0;
    }
    if (pli_tensor_read_on(state, device_of(self, member)->place, grad, "a gradient",
                           &found) != 0)
        return -1;
    out->from = found.data;
    return found.layout.is_lazy || !pli_layout_equal(&found.layout, &slot->layout);
}

/* Gradients, what lies in their slots, and where the slots are in the block. */
typedef struct packing {
    PyObject *grads, *slots, *offsets, *block;
} packing;

static int check_range(size_t offset, const pli_tensor *slot, size_t n_bytes)
{
    if (offset <= n_bytes && pli_layout_bytes(&slot->layout) <= n_bytes - offset)
        return 0;
    PyErr_SetString(PyExc_ValueError, "a slot reaches beyond its block");
    return -1;
}

/* Reads gradients and their slots; returns a list of the numbers of those that are laid
 * out in another way. */
static PyObject *read_grads(const device_group_object *self, Py_ssize_t member,
                            const packing *it, pl_move *out)
{
    PyObject *others = PyList_New(0);
    pli_tensor slot, block;
    if (pli_group_read_block(self, member, it->block, &block) != 0)
        Py_CLEAR(others);
    const size_t n_bytes = others != NULL ? pli_layout_bytes(&block.layout) : 0;
    for (Py_ssize_t i = 0; others != NULL && i < PyList_GET_SIZE(it->grads); i++) {
        const size_t offset = PyLong_AsSize_t(PyList_GET_ITEM(it->offsets, i));
        int status = PyErr_Occurred() != NULL ? -1 : 0;
        if (status == 0)
            status = pli_group_read_block(self, member, PyList_GET_ITEM(it->slots, i),
                                          &slot);
        if (status == 0)
            status = check_range(offset, &slot, n_bytes);
        if (status == 0) {
            out[i] = pli_group_move_of((char *)block.data + offset, &slot);
            status =
                read_grad(self, member, PyList_GET_ITEM(it->grads, i), &slot, &out[i]);
        }
        PyObject *number = status == 1 ? PyLong_FromSsize_t(i) : NULL;
        if (status != 0 && (number == NULL || PyList_Append(others, number) != 0))
            Py_CLEAR(others);
        Py_XDECREF(number);
    }
    return others;
}

PyObject *pli_group_pack(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    const device_group_object *self = group_of(object);
    PyObject *numbers;
    packing it;
    Py_ssize_t member;
    pl_move *moves = NULL;
    pli_group_streams of;
    if (!PyArg_ParseTuple(args, "OnO!O!O!O:pack", &numbers, &member, &PyList_Type,
                          &it.grads, &PyList_Type, &it.slots, &PyList_Type, &it.offsets,
                          &it.block) ||
        pli_group_read_streams(self, numbers, &of) != 0 ||
        pli_group_check_lists(it.grads, it.slots) != 0 ||
        pli_group_check_lists(it.grads, it.offsets) != 0 ||
        pli_group_check_member(self, member) != 0)
        return NULL;
    const size_t n = (size_t)PyList_GET_SIZE(it.grads);
    if (pli_check(state_of(object),
                  pli_calloc(n + 1, sizeof *moves, "gradients", &moves)) != 0)
        return NULL;
    PyObject *others = read_grads(self, member, &it, moves);
    if (others != NULL && PyList_GET_SIZE(others) == 0) {
        pl_backend *backend = device_of(self, member)->backend;
        pl_status st;
        Py_BEGIN_ALLOW_THREADS
        st = backend->ops->copy(backend, moves, n, of.by_member[member]);
        Py_END_ALLOW_THREADS
        if (pli_check(state_of(object), st) != 0)
            Py_CLEAR(others);
    }
    pli_free(moves);
    return others;
}
