/* arena_type.c - paceline._native.Arena: memory that a process and its workers share.
 *
 * Its pages exist from the beginning, so that a lack of memory is an exception here and
 * no SIGBUS later.  A view keeps the memory mapped, also after the arena is gone.
 */
#include "../comm/room.h"
#include "parcel.h"
#include "tensor.h"

typedef struct arena_object {
    PyObject_HEAD
    pli_room *room;
    size_t n_bytes;
} arena_object;

static pl_status open_room(Py_ssize_t n_bytes, int fd, pli_room **out)
{
    pl_status st = PL_OK;
    pli_room *room = NULL;
    if (n_bytes <= 0)
        PL_FAIL(PL_EINVAL, "an arena of %zd bytes: give a positive number", n_bytes);
    if (fd < 0)
        PL_TRY(pli_room_create(PLI_ROOM_FIXED, (size_t)n_bytes, &room));
    else
        PL_TRY(pli_room_adopt(PLI_ROOM_FIXED, fd, &room));
    if (room->n_bytes < (size_t)n_bytes)
        PL_FAIL(PL_EINVAL, "an arena of %zd bytes over a descriptor of %zu", n_bytes,
                room->n_bytes);
    *out = room;
    room = NULL;
done:
    pli_room_release(room);
    return st;
}

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"n_bytes", "fd", NULL};
    Py_ssize_t n_bytes;
    int fd = -1;
    pl_status st = PL_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|i:Arena", names, &n_bytes, &fd))
        return NULL;
    arena_object *self = (arena_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    st = open_room(n_bytes, fd, &self->room);
    Py_END_ALLOW_THREADS;
    if (st != PL_OK) {
        pli_raise(state_of_type(type), st);
        Py_DECREF(self);
        return NULL;
    }
    self->n_bytes = (size_t)n_bytes;
    return (PyObject *)self;
}

static PyObject *arena_view(PyObject *object, PyObject *args)
{
    const arena_object *self = (arena_object *)object;
    const module_state *state = state_of(object);
    Py_ssize_t offset;
    PyObject *like, *owner = NULL, *view = NULL;
    dl_tensor dl;
    size_t n_bytes = 0;
    int64_t strides[PLI_MAX_DIMS];
    if (!PyArg_ParseTuple(args, "nO:view", &offset, &like) ||
        pli_tensor_describe(state, like, &dl, &owner) != 0)
        return NULL;
    if (!pli_tensor_is_dense(&dl, &n_bytes, strides))
        PyErr_SetString(PyExc_ValueError, "view: give a tensor whose elements fill one "
                                          "block of memory, each once");
    else if (offset < 0 || (size_t)offset > self->n_bytes ||
             n_bytes > self->n_bytes - (size_t)offset)
        PyErr_Format(PyExc_ValueError,
                     "view: %zu bytes at %zd are beyond this arena of %zu bytes",
                     n_bytes, offset, self->n_bytes);
    else if (offset % 16 != 0)
        PyErr_Format(PyExc_ValueError, "view: offset %zd is no multiple of 16", offset);
    else {
        dl.data = self->room->base + offset;
        dl.byte_offset = 0;
        dl.strides = strides;
        view = pli_tensor_in_room(state, self->room, &dl);
    }
    Py_XDECREF(owner);
    return view;
}

static void arena_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    pli_room_release(((arena_object *)object)->room);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *get_fd(PyObject *object, void *ignored)
{
    (void)ignored;
    return PyLong_FromLong(((arena_object *)object)->room->fd);
}

static PyObject *get_n_bytes(PyObject *object, void *ignored)
{
    (void)ignored;
    return PyLong_FromSize_t(((arena_object *)object)->n_bytes);
}

static PyObject *get_address(PyObject *object, void *ignored)
{
    (void)ignored;
    return PyLong_FromVoidPtr(((arena_object *)object)->room->base);
}

static PyGetSetDef arena_getset[] = {
    {"fd", get_fd, NULL, "Descriptor to open the same arena by in a worker.", NULL},
    {"n_bytes", get_n_bytes, NULL, "Size, as asked for.", NULL},
    {"address", get_address, NULL, "Where the memory begins in this process.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef arena_methods[] = {
    {"view", arena_view, METH_VARARGS,
     "view($self, offset, like, /)\n--\n\n"
     "Return a tensor of the dtype, shape and strides of `like`, in this memory."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot arena_slots[] = {
    {Py_tp_new, arena_new},
    {Py_tp_dealloc, arena_dealloc},
    {Py_tp_methods, arena_methods},
    {Py_tp_getset, arena_getset},
    {Py_tp_doc, "Arena(n_bytes, fd=-1)\n--\n\n"
                "Memory that processes share; with fd, that of another arena."},
    {0, NULL},
};

PyType_Spec pli_arena_spec = {
    .name = "paceline._native.Arena",
    .basicsize = sizeof(arena_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = arena_slots,
};
