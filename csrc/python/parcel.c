/* parcel.c - DLPack for tensors, the buffer protocol for arrays, pickle for the rest.
 */
#include "parcel.h"

#include <string.h>

#include "tensor.h"

/* ---- what an object is ---------------------------------------------------------- */

static int describe_by_capsule(PyObject *tensor, dl_tensor *out, PyObject **owner)
{
    PyObject *detached = PyObject_CallMethod(tensor, "detach", NULL);
    PyObject *capsule =
        detached != NULL ? PyObject_CallMethod(detached, "__dlpack__", NULL) : NULL;
    Py_XDECREF(detached);
    if (capsule == NULL)
        return -1;
    const dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    if (managed == NULL) {
        Py_DECREF(capsule);
        return -1;
    }
    *out = managed->tensor;
    *owner = capsule;
    return 0;
}

enum { FOREIGN = -2 }; /* no strided tensor: torch's own exception is set */

static int describe(const module_state *state, PyObject *tensor, dl_tensor *out,
                    PyObject **owner)
{
    *owner = NULL;
    const int failed = state->exchange != NULL
                           ? state->exchange->tensor_from_object(tensor, out)
                           : describe_by_capsule(tensor, out, owner);
    if (failed != 0)
        return FOREIGN;
    int is_empty = 0;
    for (int d = 0; d < out->ndim; d++)
        is_empty |= out->shape[d] == 0;
    if (out->device.type != DL_CPU)
        PyErr_Format(PyExc_NotImplementedError,
                     "a tensor is not in CPU memory (DLPack device type %d): this "
                     "version of paceline shares the work of CPUs",
                     (int)out->device.type);
    else if (out->ndim > PLI_MAX_DIMS)
        PyErr_Format(PyExc_NotImplementedError, "a tensor of %d dimensions", out->ndim);
    else if (out->data == NULL && !is_empty)
        PyErr_SetString(PyExc_TypeError,
                        "a tensor has no memory (a fake tensor, or one being traced)");
    else
        return 0;
    Py_CLEAR(*owner);
    return -1;
}

int pli_tensor_describe(const module_state *state, PyObject *tensor, dl_tensor *out,
                        PyObject **owner)
{
    return describe(state, tensor, out, owner) == 0 ? 0 : -1;
}

/* Non-zero where a tensor's method `name`, without arguments, says so; -1: failed. */
static int ask(PyObject *tensor, PyObject *name)
{
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, name);
    const int is_so = answer != NULL ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return is_so;
}

/* Replaces a tensor whose bits are to be read negated or conjugated by one of plain
 * bits. */
static int resolve(const module_state *state, pli_parcel *out)
{
    if (out->dtype.code != DL_COMPLEX && out->dtype.code != DL_FLOAT)
        return 0;
    int is_lazy = ask(out->object, state->str_is_neg);
    if (is_lazy == 0 && out->dtype.code == DL_COMPLEX)
        is_lazy = ask(out->object, state->str_is_conj);
    if (is_lazy <= 0)
        return is_lazy;
    PyObject *detached = PyObject_CallMethod(out->object, "detach", NULL);
    PyObject *half =
        detached != NULL ? PyObject_CallMethod(detached, "resolve_conj", NULL) : NULL;
    PyObject *plain =
        half != NULL ? PyObject_CallMethod(half, "resolve_neg", NULL) : NULL;
    Py_XDECREF(half);
    Py_XDECREF(detached);
    if (plain == NULL)
        return -1;
    Py_SETREF(out->object, plain);
    return 1;
}

static int take_dl(const module_state *state, pli_parcel *out)
{
    dl_tensor dl;
    const int failed = describe(state, out->object, &dl, &out->owner);
    if (failed != 0)
        return failed;
    out->form = PLI_FORM_TENSOR;
    out->dtype = dl.dtype;
    out->n_dims = dl.ndim;
    out->sizes = dl.shape;
    out->strides = dl.strides;
    out->item_bytes = (size_t)dl.dtype.bits * dl.dtype.lanes / 8;
    out->stride_bytes = (int64_t)out->item_bytes;
    out->data = (const char *)dl.data + dl.byte_offset;
    return 0;
}

static int take_pickle(const module_state *state, pli_parcel *out)
{
    PyObject *bytes = PyObject_CallOneArg(state->pickle, out->object);
    if (bytes == NULL || !PyBytes_Check(bytes)) {
        Py_XDECREF(bytes);
        return -1;
    }
    Py_XSETREF(out->owner, bytes);
    out->form = PLI_FORM_PICKLE;
    out->n_dims = 0;
    out->n_bytes = (size_t)PyBytes_GET_SIZE(bytes);
    out->data = PyBytes_AS_STRING(bytes);
    return 0;
}

static int take_tensor(const module_state *state, pli_parcel *out)
{
    PyObject *requires_grad = PyObject_GetAttr(out->object, state->str_requires_grad);
    if (requires_grad == NULL) {
        PyErr_Format(PyExc_TypeError,
                     "%R cannot be sent to a replica: give tensors, arrays and None",
                     Py_TYPE(out->object));
        return -1;
    }
    out->flags = requires_grad == Py_True;
    Py_DECREF(requires_grad);
    const int failed = take_dl(state, out);
    if (failed == FOREIGN) {
        PyErr_Clear(); /* sparse, nested, quantised: pickle knows what to do */
        PyObject *detached = PyObject_CallMethod(out->object, "detach", NULL);
        if (detached == NULL)
            return -1;
        Py_SETREF(out->object, detached);
        return take_pickle(state, out);
    }
    if (failed != 0)
        return -1;
    const int is_changed = resolve(state, out);
    if (is_changed <= 0)
        return is_changed;
    Py_CLEAR(out->owner);
    return take_dl(state, out) == 0 ? 0 : -1;
}

/* The dtype that a format of the buffer protocol means; -1 where it is none of ours. */
static int read_format(const char *format, Py_ssize_t item_bytes, dl_dtype *out)
{
    static const struct {
        const char *formats;
        uint8_t code;
    } table[] = {
        {"?", DL_BOOL}, {"bhilq", DL_INT}, {"BHILQ", DL_UINT}, {"efd", DL_FLOAT}};
    if (format == NULL || *format == '>' || *format == '!')
        return -1;
    if (*format == '<' || *format == '=' || *format == '@')
        format++;
    out->bits = (uint8_t)(8 * item_bytes);
    out->lanes = 1;
    if (strcmp(format, "Zf") == 0 || strcmp(format, "Zd") == 0) {
        out->code = DL_COMPLEX;
        return 0;
    }
    if (strlen(format) != 1)
        return -1;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (strchr(table[i].formats, *format) != NULL) {
            out->code = table[i].code;
            return 0;
        }
    return -1;
}

/* NumPy's arrays, and its other kinds (masked arrays), which travel pickled. */
static int is_array(PyObject *object)
{
    return PyObject_CheckBuffer(object) &&
           PyObject_HasAttrString(object, "__array_interface__");
}

static int take_array(const module_state *state, pli_parcel *out)
{
    _Static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "sizes are 64 bits wide");
    Py_buffer *buffer = &out->buffer;
    if (strcmp(Py_TYPE(out->object)->tp_name, "numpy.ndarray") != 0)
        return take_pickle(state, out);
    if (PyObject_GetBuffer(out->object, buffer, PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) {
        PyErr_Clear(); /* dates, say, which the protocol does not know */
        buffer->obj = NULL;
        return take_pickle(state, out);
    }
    if (read_format(buffer->format, buffer->itemsize, &out->dtype) != 0)
        return take_pickle(state, out);
    out->form = PLI_FORM_ARRAY;
    out->n_dims = buffer->ndim;
    out->sizes = (const int64_t *)buffer->shape;
    out->strides = (const int64_t *)buffer->strides;
    out->stride_bytes = 1;
    out->item_bytes = (size_t)buffer->itemsize;
    out->data = buffer->buf;
    return 0;
}

/* ---- how its bytes lie ---------------------------------------------------------- */

static int is_dense(const pli_parcel *self)
{
    pli_layout layout = {.n_dims = self->n_dims, .n_elems = self->n_bytes};
    for (int d = 0; d < self->n_dims; d++) {
        const int64_t bytes = self->strides[d] * self->stride_bytes;
        if (bytes % (int64_t)self->item_bytes != 0)
            return 0;
        layout.dims[d] = (pli_dim){self->sizes[d], bytes / (int64_t)self->item_bytes};
    }
    return pli_layout_is_dense(&layout);
}

/* Fills in n_bytes, and into how many pieces the object is cut. */
static void measure(pli_parcel *self)
{
    size_t block = self->item_bytes;
    int n_rows = self->n_dims;
    self->n_bytes = self->item_bytes;
    for (int d = 0; d < self->n_dims; d++)
        self->n_bytes *= (size_t)self->sizes[d];
    for (; n_rows > 0; n_rows--) {
        const int d = n_rows - 1;
        if (self->strides != NULL && self->sizes[d] != 1 && self->n_bytes > 0 &&
            self->strides[d] * self->stride_bytes != (int64_t)block)
            break;
        block *= (size_t)self->sizes[d];
    }
    if (n_rows == 0)
        self->strides = NULL; /* row-major: nothing to keep */
    self->n_rows = n_rows > 0 && is_dense(self) ? 0 : n_rows;
}

int pli_tensor_is_dense(const dl_tensor *tensor, size_t *n_bytes, int64_t *strides)
{
    pli_parcel self = {.n_dims = tensor->ndim, .sizes = tensor->shape};
    int64_t stride = 1;
    self.strides = tensor->strides;
    self.item_bytes = (size_t)tensor->dtype.bits * tensor->dtype.lanes / 8;
    self.stride_bytes = (int64_t)self.item_bytes;
    measure(&self);
    for (int d = tensor->ndim - 1; d >= 0; d--) {
        strides[d] = self.strides != NULL ? self.strides[d] : stride;
        stride *= tensor->shape[d];
    }
    *n_bytes = self.n_bytes;
    return self.n_rows == 0;
}

int pli_parcel_take(const module_state *state, PyObject *object, pli_parcel *out)
{
    out->object = Py_NewRef(object);
    if (object == Py_None)
        return 0;
    if ((is_array(object) ? take_array(state, out) : take_tensor(state, out)) != 0)
        return -1;
    if (out->form != PLI_FORM_PICKLE)
        measure(out);
    return 0;
}

void pli_parcel_fini(pli_parcel *self)
{
    Py_XDECREF(self->owner);
    if (self->buffer.obj != NULL)
        PyBuffer_Release(&self->buffer);
    Py_XDECREF(self->object);
}
