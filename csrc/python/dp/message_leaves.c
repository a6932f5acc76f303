/* message_leaves.c - DLPack for tensors, the buffer protocol for arrays, pickle for the
 * rest.
 */
#include "message_leaves.h"

#include <string.h>

#include "ipc/message.h"
#include "python/array.h"
#include "python/tensor.h"

enum { FEW = 16, BIG_BYTES = 1 << 17 /* to copy without the GIL */ };

typedef enum leaf_form { FORM_NONE, FORM_TENSOR, FORM_ARRAY, FORM_PICKLE } leaf_form;

/* An object on its way out: what keeps the memory that its leaf names. */
typedef struct source {
    PyObject *object; /* owned, as all that follows */
    PyObject *owner;  /* of the description: a capsule; or the pickled bytes */
    Py_buffer buffer; /* of an array: buffer.obj is NULL where there is none */
    dl_dtype dtype;
    pli_message_leaf *leaf; /* borrowed */
    pli_dim dims[PLI_MAX_DIMS];
} source;

/* ---- what an object is ---------------------------------------------------------- */

/* Replaces a tensor whose bits are to be read negated or conjugated by one of plain
 * bits. */
static int resolve(const module_state *state, source *self)
{
    if (self->dtype.code != DL_COMPLEX && self->dtype.code != DL_FLOAT)
        return 0;
    int is_lazy =
        pli_is_true(PyObject_CallMethodNoArgs(self->object, state->str_is_neg));
    if (is_lazy == 0 && self->dtype.code == DL_COMPLEX)
        is_lazy =
            pli_is_true(PyObject_CallMethodNoArgs(self->object, state->str_is_conj));
    if (is_lazy <= 0)
        return is_lazy;
    PyObject *detached = PyObject_CallMethod(self->object, "detach", NULL);
    PyObject *half =
        detached != NULL ? PyObject_CallMethod(detached, "resolve_conj", NULL) : NULL;
    PyObject *plain =
        half != NULL ? PyObject_CallMethod(half, "resolve_neg", NULL) : NULL;
    Py_XDECREF(half);
    Py_XDECREF(detached);
    if (plain == NULL)
        return -1;
    Py_SETREF(self->object, plain);
    return 1;
}

/* The leaf is a tensor or an array whose sizes and strides, in units of stride_bytes,
 * these are. */
static void fill_leaf(source *self, leaf_form form, int n_dims, const int64_t *sizes,
                      const int64_t *strides, int64_t stride_bytes)
{
    const size_t elem_bytes = (size_t)self->dtype.bits * self->dtype.lanes / 8;
    int64_t row_major = (int64_t)elem_bytes;
    for (int d = n_dims - 1; d >= 0; d--) {
        self->dims[d] = (pli_dim){sizes[d], strides != NULL ? strides[d] * stride_bytes
                                                            : row_major};
        row_major *= sizes[d];
    }
    self->leaf->form = (uint8_t)form;
    self->leaf->elems = (pli_strided){self->dims, n_dims, elem_bytes};
    memcpy(&self->leaf->dtype, &self->dtype, sizeof self->dtype);
}

static int take_dl(const module_state *state, source *self)
{
    dl_tensor dl;
    const int status =
        pli_tensor_describe(state, self->object, "a tensor", &dl, &self->owner);
    if (status != 0)
        return status;
    self->dtype = dl.dtype;
    fill_leaf(self, FORM_TENSOR, dl.ndim, dl.shape, dl.strides,
              (int64_t)dl.dtype.bits * dl.dtype.lanes / 8);
    self->leaf->data = (const char *)dl.data + dl.byte_offset;
    return 0;
}

static int take_pickle(const module_state *state, source *self)
{
    PyObject *bytes = PyObject_CallOneArg(state->pickle, self->object);
    if (bytes == NULL || !PyBytes_Check(bytes)) {
        Py_XDECREF(bytes);
        return -1;
    }
    Py_XSETREF(self->owner, bytes);
    self->leaf->form = FORM_PICKLE;
    self->leaf->elems = (pli_strided){NULL, 0, (size_t)PyBytes_GET_SIZE(bytes)};
    self->leaf->data = PyBytes_AS_STRING(bytes);
    return 0;
}

static int take_tensor(const module_state *state, source *self)
{
    PyObject *requires_grad = PyObject_GetAttr(self->object, state->str_requires_grad);
    if (requires_grad == NULL) {
        PyErr_Format(PyExc_TypeError,
                     "%R cannot be sent to a replica: give tensors, arrays and None",
                     Py_TYPE(self->object));
        return -1;
    }
    self->leaf->flags = requires_grad == Py_True;
    Py_DECREF(requires_grad);
    const int failed = take_dl(state, self);
    if (failed == PLI_TENSOR_FOREIGN) {
        PyErr_Clear(); /* sparse, nested, quantised: pickle knows what to do */
        PyObject *detached = PyObject_CallMethod(self->object, "detach", NULL);
        if (detached == NULL)
            return -1;
        Py_SETREF(self->object, detached);
        return take_pickle(state, self);
    }
    if (failed != 0)
        return -1;
    const int is_changed = resolve(state, self);
    if (is_changed <= 0)
        return is_changed;
    Py_CLEAR(self->owner);
    return take_dl(state, self) == 0 ? 0 : -1;
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

/* Subclasses of NumPy's arrays (masked ones) are sent pickled. */
static int take_array(const module_state *state, source *self)
{
    _Static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "sizes are 64 bits wide");
    Py_buffer *buffer = &self->buffer;
    if (!pli_array_is_plain(self->object))
        return take_pickle(state, self);
    if (PyObject_GetBuffer(self->object, buffer, PyBUF_STRIDED_RO | PyBUF_FORMAT) !=
        0) {
        PyErr_Clear(); /* dates, say, which the protocol does not know */
        buffer->obj = NULL;
        return take_pickle(state, self);
    }
    if (read_format(buffer->format, buffer->itemsize, &self->dtype) != 0)
        return take_pickle(state, self);
    fill_leaf(self, FORM_ARRAY, buffer->ndim, (const int64_t *)buffer->shape,
              (const int64_t *)buffer->strides, 1);
    self->leaf->data = buffer->buf;
    return 0;
}

/* Fills an empty source and its leaf; -1 with an exception set.  Either way the source
 * is to be dropped. */
static int take(const module_state *state, PyObject *object, source *self)
{
    self->object = Py_NewRef(object);
    if (object == Py_None)
        return 0;
    const int is_array = pli_array_check(object);
    if (is_array < 0)
        return -1;
    return is_array ? take_array(state, self) : take_tensor(state, self);
}

static void drop(source *self)
{
    Py_XDECREF(self->owner);
    if (self->buffer.obj != NULL)
        PyBuffer_Release(&self->buffer);
    Py_XDECREF(self->object);
}

/* ---- sending -------------------------------------------------------------------- */

static int send(const module_state *state, pli_channel *channel,
                const pli_message *message)
{
    char *memory = NULL;
    const size_t n_bytes = pli_message_lay_out(message);
    if (pli_check(state, pli_channel_reserve(channel, n_bytes, &memory)) != 0)
        return -1;
    if (n_bytes > BIG_BYTES) {
        Py_BEGIN_ALLOW_THREADS;
        pli_message_write(message, memory);
        Py_END_ALLOW_THREADS;
    } else {
        pli_message_write(message, memory);
    }
    pli_channel_send(channel);
    return 0;
}

/* Sends a message whose leaves are filled here from objects, of which each has a
 * source.
 */
static int send_objects(const module_state *state, pli_channel *channel,
                        const pli_message *message, PyObject *objects, source *sources)
{
    int status = 0;
    uint32_t n_taken = 0;
    for (; n_taken < message->n_leaves && status == 0; n_taken++) {
        source *self = &sources[n_taken];
        self->object = self->owner = self->buffer.obj = NULL;
        self->leaf = &message->leaves[n_taken];
        *self->leaf = (pli_message_leaf){.form = FORM_NONE};
        if (n_taken < PyList_GET_SIZE(objects)) /* reading may run Python code */
            status = take(state, PyList_GET_ITEM(objects, n_taken), self);
    }
    if (status == 0)
        status = send(state, channel, message);
    while (n_taken > 0)
        drop(&sources[--n_taken]);
    return status;
}

int pli_message_send(const module_state *state, pli_channel *channel, uint32_t kind,
                     PyObject *payload, PyObject *objects)
{
    source few_sources[FEW];
    pli_message_leaf few_leaves[FEW];
    if (!PyBytes_Check(payload) || !PyList_Check(objects)) {
        PyErr_SetString(PyExc_TypeError,
                        "give the payload as bytes, and tensors as a list");
        return -1;
    }
    const size_t n = (size_t)PyList_GET_SIZE(objects);
    pli_message message = {.kind = kind,
                           .n_leaves = (uint32_t)n,
                           .leaves = few_leaves,
                           .payload = PyBytes_AS_STRING(payload),
                           .payload_bytes = (size_t)PyBytes_GET_SIZE(payload)};
    if (n <= FEW)
        return send_objects(state, channel, &message, objects, few_sources);
    int status = -1;
    source *sources = PyMem_Malloc(n * sizeof *sources);
    message.leaves = PyMem_Malloc(n * sizeof *message.leaves);
    if (sources != NULL && message.leaves != NULL)
        status = send_objects(state, channel, &message, objects, sources);
    else
        PyErr_NoMemory();
    PyMem_Free(message.leaves);
    PyMem_Free(sources);
    return status;
}

/* ---- receiving ------------------------------------------------------------------ */

static PyObject *read_pickle(const char *bytes, size_t n_bytes)
{
    PyObject *pickle = PyImport_ImportModule("pickle");
    PyObject *object = pickle != NULL ? PyObject_CallMethod(pickle, "loads", "y#",
                                                            bytes, (Py_ssize_t)n_bytes)
                                      : NULL;
    Py_XDECREF(pickle);
    return object;
}

static PyObject *read_leaf(const module_state *state, pli_shared_memory *memory,
                           const pli_message_entry *entry, const char *message,
                           pli_received how)
{
    if (entry->form == FORM_NONE)
        Py_RETURN_NONE;
    if (entry->form == FORM_PICKLE)
        return read_pickle(message + entry->offset, entry->n_bytes);
    const size_t n_elems = pli_message_elems(entry);
    dl_tensor like = {.data = (char *)message + entry->offset,
                      .ndim = (int32_t)entry->n_dims,
                      .shape = (int64_t *)entry->dims,
                      .strides = (int64_t *)entry->dims + entry->n_dims};
    memcpy(&like.dtype, &entry->dtype, sizeof like.dtype);
    if ((uint64_t)like.dtype.bits * like.dtype.lanes * n_elems != entry->n_bytes * 8) {
        PyErr_SetString(state->mismatch_error,
                        "a tensor from another process has bytes of another dtype: "
                        "they were overwritten, or are another version's");
        return NULL;
    }
    PyObject *object = pli_tensor_in_shared_memory(state, memory, &like);
    if (object != NULL && how == PLI_RECEIVED_COPIES)
        Py_SETREF(object, PyObject_CallMethodNoArgs(object, state->str_clone));
    if (object != NULL && entry->form == FORM_ARRAY)
        Py_SETREF(object, PyObject_CallMethod(object, "numpy", NULL));
    return object;
}

PyObject *pli_message_receive(const module_state *state, pli_channel *channel,
                              pli_received how)
{
    const char *message = NULL;
    const pli_message_header *header = NULL;
    size_t n_bytes = 0;
    if (pli_check(state, pli_channel_receive(channel, &message, &n_bytes)) != 0 ||
        pli_check(state, pli_message_open(message, n_bytes, &header)) != 0)
        return NULL;
    const pli_message_entry *entry = pli_message_first(header);
    PyObject *result = NULL;
    PyObject *payload = PyBytes_FromStringAndSize(message + header->payload_offset,
                                                  (Py_ssize_t)header->payload_bytes);
    PyObject *flags = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)header->n_leaves);
    PyObject *objects = PyList_New((Py_ssize_t)header->n_leaves);
    if (payload == NULL || flags == NULL || objects == NULL)
        goto done;
    for (uint32_t i = 0; i < header->n_leaves; i++) {
        PyObject *object = read_leaf(state, channel->in, entry, message, how);
        if (object == NULL)
            goto done;
        PyList_SET_ITEM(objects, (Py_ssize_t)i, object);
        PyBytes_AS_STRING(flags)[i] = (char)entry->flags;
        entry = pli_message_next(entry);
    }
    result = Py_BuildValue("IOOO", header->kind, payload, objects, flags);
done:
    Py_XDECREF(objects);
    Py_XDECREF(flags);
    Py_XDECREF(payload);
    return result;
}
