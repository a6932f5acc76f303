/* shared_memory_type.c - paceline._native.SharedMemory: memory that a process and its
 * workers share.
 *
 * Its pages exist from the beginning, so that a lack of memory is an exception here and
 * no SIGBUS later.  A view keeps the memory mapped, also after the object is gone.
 */
#include <unistd.h>

#include "ipc/shared_memory.h"
#include "python/tensor.h"

typedef struct shared_memory_object {
    PyObject_HEAD
    pli_shared_memory *memory;
    size_t n_bytes;
    int sharing_pid; /* the process in which it counts among the mapping's sharers */
} shared_memory_object;

/* ---- life ----------------------------------------------------------------------- */

static pl_status open_memory(Py_ssize_t n_bytes, int fd, pli_shared_memory_kind kind,
                             pli_shared_memory **out)
{
    pl_status st = PL_OK;
    pli_shared_memory *memory = NULL;
    if (n_bytes <= 0)
        PL_FAIL(PL_EINVAL, "shared memory of %zd bytes: give a positive number",
                n_bytes);
    if (fd < 0 && kind == PLI_MEMORY_COPIED)
        PL_FAIL(PL_EINVAL, "copy_on_write is for a descriptor of shared memory");
    if (fd < 0)
        PL_TRY(pli_shared_memory_create(kind, (size_t)n_bytes, &memory));
    else
        PL_TRY(pli_shared_memory_adopt(kind, fd, &memory));
    if (memory->n_bytes < (size_t)n_bytes)
        PL_FAIL(PL_EINVAL, "shared memory of %zd bytes over a descriptor of %zu",
                n_bytes, memory->n_bytes);
    *out = memory;
    memory = NULL;
done:
    pli_shared_memory_release(memory);
    return st;
}

static pl_status share(shared_memory_object *self)
{
    pl_status st = PL_OK;
    if (self->sharing_pid == getpid())
        return st;
    Py_BEGIN_ALLOW_THREADS;
    st = pli_shared_memory_share(self->memory);
    Py_END_ALLOW_THREADS;
    if (st == PL_OK)
        self->sharing_pid = getpid();
    return st;
}

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"n_bytes", "fd", "copy_on_write", NULL};
    Py_ssize_t n_bytes;
    int fd = -1, is_copied = 0;
    pl_status st = PL_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|ip:SharedMemory", names, &n_bytes,
                                     &fd, &is_copied))
        return NULL;
    shared_memory_object *self = (shared_memory_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    st = open_memory(n_bytes, fd, is_copied ? PLI_MEMORY_COPIED : PLI_MEMORY_FIXED,
                     &self->memory);
    Py_END_ALLOW_THREADS;
    if (st != PL_OK) {
        pli_raise(state_of_type(type), st);
        Py_DECREF(self);
        return NULL;
    }
    self->n_bytes = (size_t)n_bytes;
    if (fd < 0 && pli_check(state_of_type(type), share(self)) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void memory_dealloc(PyObject *object)
{
    const shared_memory_object *self = (shared_memory_object *)object;
    if (self->memory != NULL && self->sharing_pid == getpid())
        pli_shared_memory_share_ends(self->memory);
    pli_shared_memory_release(self->memory);
    pli_object_free(object);
}

static PyObject *memory_holding(PyObject *class, PyObject *arg)
{
    PLI_ENTER(class);
    PyTypeObject *type = (PyTypeObject *)class;
    const void *address = PyLong_AsVoidPtr(arg);
    if (address == NULL && PyErr_Occurred())
        return NULL;
    pli_shared_memory *memory = pli_shared_memory_find(address);
    if (memory == NULL)
        Py_RETURN_NONE;
    shared_memory_object *self = (shared_memory_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        pli_shared_memory_release(memory);
        return NULL;
    }
    self->memory = memory;
    self->n_bytes = memory->n_bytes;
    return (PyObject *)self;
}

/* ---- what it is for ------------------------------------------------------------- */

/* Non-zero where the elements fill one block of memory, each once: *n_bytes, which has
 * an element's, gets the block's, and `strides` one stride a dimension, in elements. */
static int is_dense(const dl_tensor *tensor, size_t *n_bytes, int64_t *strides)
{
    pli_dim dims[PLI_MAX_DIMS];
    const pli_strided elems = {dims, tensor->ndim, *n_bytes};
    int64_t row_major = 1;
    for (int d = tensor->ndim - 1; d >= 0; d--) {
        strides[d] = tensor->strides != NULL ? tensor->strides[d] : row_major;
        dims[d] = (pli_dim){tensor->shape[d], strides[d] * (int64_t)elems.elem_bytes};
        row_major *= tensor->shape[d];
    }
    *n_bytes = pli_strided_bytes(&elems);
    return pli_strided_density(&elems) != PLI_NOT_DENSE;
}

static PyObject *memory_view(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    const shared_memory_object *self = (shared_memory_object *)object;
    const module_state *state = state_of(object);
    Py_ssize_t offset;
    PyObject *like, *owner = NULL, *view = NULL;
    dl_tensor dl;
    int64_t strides[PLI_MAX_DIMS];
    if (!PyArg_ParseTuple(args, "nO:view", &offset, &like) ||
        pli_tensor_describe(state, like, "view: the tensor", &dl, &owner) != 0)
        return NULL;
    size_t n_bytes = (size_t)dl.dtype.bits * dl.dtype.lanes / 8;
    if (!is_dense(&dl, &n_bytes, strides))
        PyErr_SetString(PyExc_ValueError, "view: give a tensor whose elements fill one "
                                          "block of memory, each once");
    else if (offset < 0 || (size_t)offset > self->n_bytes ||
             n_bytes > self->n_bytes - (size_t)offset)
        PyErr_Format(PyExc_ValueError,
                     "view: %zu bytes at %zd are beyond this memory of %zu bytes",
                     n_bytes, offset, self->n_bytes);
    else if (offset % 16 != 0)
        PyErr_Format(PyExc_ValueError, "view: offset %zd is no multiple of 16", offset);
    else {
        dl.data = self->memory->base + offset;
        dl.byte_offset = 0;
        dl.strides = strides;
        view = pli_tensor_in_shared_memory(state, self->memory, &dl);
    }
    Py_XDECREF(owner);
    return view;
}

static PyObject *memory_reload(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    const pli_shared_memory *memory = ((shared_memory_object *)object)->memory;
    Py_BEGIN_ALLOW_THREADS;
    pli_shared_memory_reload(memory);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *memory_share(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    if (pli_check(state_of(object), share((shared_memory_object *)object)) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *memory_unshare(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    shared_memory_object *self = (shared_memory_object *)object;
    pl_status st = PL_OK;
    (void)ignored;
    if (self->sharing_pid != getpid())
        Py_RETURN_NONE;
    self->sharing_pid = 0;
    Py_BEGIN_ALLOW_THREADS;
    st = pli_shared_memory_unshare(self->memory);
    Py_END_ALLOW_THREADS;
    if (pli_check(state_of(object), st) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *get_fd(PyObject *object, void *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    return PyLong_FromLong(((shared_memory_object *)object)->memory->fd);
}

static PyObject *get_n_bytes(PyObject *object, void *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    return PyLong_FromSize_t(((shared_memory_object *)object)->n_bytes);
}

static PyObject *get_address(PyObject *object, void *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    return PyLong_FromVoidPtr(((shared_memory_object *)object)->memory->base);
}

static PyGetSetDef memory_getset[] = {
    {"fd", get_fd, NULL,
     "Descriptor to open the same memory by in a worker; -1: it is not shared.", NULL},
    {"n_bytes", get_n_bytes, NULL, "Size, as asked for.", NULL},
    {"address", get_address, NULL, "Where the memory begins in this process.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef memory_methods[] = {
    {"view", memory_view, METH_VARARGS,
     "view($self, offset, like, /)\n--\n\n"
     "Return a tensor of the dtype, shape and strides of `like`, in this memory."},
    {"holding", memory_holding, METH_O | METH_CLASS,
     "holding($type, address, /)\n--\n\n"
     "Return the shared memory that an address of this process is in, or None."},
    {"share", memory_share, METH_NOARGS,
     "share($self, /)\n--\n\n"
     "Have processes share this memory: once more, after a fork or unshare()."},
    {"unshare", memory_unshare, METH_NOARGS,
     "unshare($self, /)\n--\n\n"
     "Make it ordinary memory, at its address, when nobody else shares it."},
    {"reload", memory_reload, METH_NOARGS,
     "reload($self, /)\n--\n\nDrop what this process has written by copy_on_write."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot memory_slots[] = {
    {Py_tp_new, memory_new},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_methods, memory_methods},
    {Py_tp_getset, memory_getset},
    {Py_tp_doc,
     "SharedMemory(n_bytes, fd=-1, copy_on_write=False)\n--\n\n"
     "Memory that processes share; with fd, that of another process: by copy_on_write\n"
     "what is written here reaches nobody, and its pages no longer follow the "
     "other's."},
    {0, NULL},
};

PyType_Spec pli_shared_memory_spec = {
    .name = "paceline._native.SharedMemory",
    .basicsize = sizeof(shared_memory_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = memory_slots,
};
