/* wire.c - the two passes of a message: what each object is, then its bytes. */
#include "wire.h"

#include <string.h>

#include "parcel.h"
#include "tensor.h"

enum { FEW = 16, BIG_BYTES = 1 << 17 /* to copy without the GIL */ };

typedef struct wire_head {
    uint32_t kind;
    uint32_t n_items;
    uint64_t words_bytes;
    uint64_t words_at; /* from the message's beginning */
} wire_head;

typedef struct wire_item {
    uint8_t form;
    uint8_t flags;
    dl_dtype dtype;
    uint32_t n_dims;
    uint64_t n_bytes;
    uint64_t at;    /* its data, from the message's beginning */
    int64_t dims[]; /* sizes, then strides in elements */
} wire_item;

/* ---- writing -------------------------------------------------------------------- */

static size_t align(size_t at)
{
    return (at + PL_CACHE_LINE - 1) & ~(size_t)(PL_CACHE_LINE - 1);
}

static size_t item_size(int n_dims)
{
    return sizeof(wire_item) + 2 * (size_t)n_dims * sizeof(int64_t);
}

/* Gives each part of the message its place; returns the message's size. */
static size_t place(wire_head *head, pli_parcel *parcels)
{
    size_t at = sizeof *head;
    for (uint32_t i = 0; i < head->n_items; i++)
        at += item_size(parcels[i].n_dims);
    head->words_at = at;
    at = align(at + head->words_bytes);
    for (uint32_t i = 0; i < head->n_items; i++) {
        parcels[i].at = at;
        at = align(at + parcels[i].n_bytes);
    }
    return at;
}

static char *write_item(const pli_parcel *self, char *to)
{
    wire_item *item = (wire_item *)(void *)to;
    *item = (wire_item){.form = (uint8_t)self->form,
                        .flags = self->flags,
                        .dtype = self->dtype,
                        .n_dims = (uint32_t)self->n_dims,
                        .n_bytes = self->n_bytes,
                        .at = self->at};
    int64_t stride = 1;
    for (int d = self->n_dims - 1; d >= 0; d--) {
        item->dims[d] = self->sizes[d];
        /* Cut into pieces, it is packed row-major. */
        if (self->strides != NULL && self->n_rows == 0)
            item->dims[self->n_dims + d] =
                self->strides[d] * self->stride_bytes / (int64_t)self->item_bytes;
        else
            item->dims[self->n_dims + d] = stride;
        stride *= self->sizes[d];
    }
    return to + item_size(self->n_dims);
}

static char *copy_column(const pli_parcel *self, const char *from, int64_t step,
                         char *to)
{
    const int64_t n = self->sizes[self->n_dims - 1];
#define COPY_COLUMN(bytes)                                                             \
    case bytes:                                                                        \
        for (int64_t i = 0; i < n; i++, from += step, to += (bytes))                   \
            memcpy(to, from, (bytes));                                                 \
        return to;
    switch (self->item_bytes) {
        COPY_COLUMN(1)
        COPY_COLUMN(2)
        COPY_COLUMN(4)
        COPY_COLUMN(8)
        COPY_COLUMN(16)
    default:
        for (int64_t i = 0; i < n; i++, from += step, to += self->item_bytes)
            memcpy(to, from, self->item_bytes);
        return to;
    }
#undef COPY_COLUMN
}

/* Packs what lies behind the first `d` dimensions; returns where the next goes. */
static char *copy_rows(const pli_parcel *self, int d, size_t n_bytes, const char *from,
                       char *to)
{
    if (d == self->n_rows || n_bytes == 0) {
        memcpy(to, from, n_bytes);
        return to + n_bytes;
    }
    const int64_t step = self->strides[d] * self->stride_bytes;
    if (d == self->n_dims - 1)
        return copy_column(self, from, step, to);
    const size_t row_bytes = n_bytes / (size_t)self->sizes[d];
    for (int64_t i = 0; i < self->sizes[d]; i++, from += step)
        to = copy_rows(self, d + 1, row_bytes, from, to);
    return to;
}

static void write_message(const wire_head *head, const pli_parcel *parcels,
                          const char *words, char *message)
{
    char *to = message + sizeof *head;
    memcpy(message, head, sizeof *head);
    for (uint32_t i = 0; i < head->n_items; i++)
        to = write_item(&parcels[i], to);
    memcpy(to, words, head->words_bytes);
    for (uint32_t i = 0; i < head->n_items; i++)
        if (parcels[i].n_bytes > 0)
            (void)copy_rows(&parcels[i], 0, parcels[i].n_bytes, parcels[i].data,
                            message + parcels[i].at);
}

static int send(const module_state *state, pli_channel *channel, wire_head head,
                pli_parcel *parcels, const char *words)
{
    char *message = NULL;
    const size_t n_bytes = place(&head, parcels);
    if (pli_check(state, pli_channel_room(channel, n_bytes, &message)) != 0)
        return -1;
    if (n_bytes > BIG_BYTES) {
        Py_BEGIN_ALLOW_THREADS;
        write_message(&head, parcels, words, message);
        Py_END_ALLOW_THREADS;
    } else {
        write_message(&head, parcels, words, message);
    }
    pli_channel_send(channel);
    return 0;
}

int pli_wire_send(const module_state *state, pli_channel *channel, uint32_t kind,
                  PyObject *words, PyObject *objects)
{
    pli_parcel few[FEW];
    if (!PyBytes_Check(words) || !PyList_Check(objects)) {
        PyErr_SetString(PyExc_TypeError, "give words as bytes, and tensors as a list");
        return -1;
    }
    const Py_ssize_t n = PyList_GET_SIZE(objects);
    pli_parcel *parcels = n <= FEW ? few : PyMem_Malloc((size_t)n * sizeof *parcels);
    if (parcels == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int result = 0;
    Py_ssize_t i = 0;
    for (; i < n && result == 0; i++) {
        parcels[i] = (pli_parcel){.form = PLI_FORM_NONE};
        if (i < PyList_GET_SIZE(objects)) /* reading may run Python code */
            result = pli_parcel_take(state, PyList_GET_ITEM(objects, i), &parcels[i]);
    }
    const wire_head head = {.kind = kind,
                            .n_items = (uint32_t)n,
                            .words_bytes = (uint64_t)PyBytes_GET_SIZE(words)};
    if (result == 0)
        result = send(state, channel, head, parcels, PyBytes_AS_STRING(words));
    while (i > 0)
        pli_parcel_fini(&parcels[--i]);
    if (parcels != few)
        PyMem_Free(parcels);
    return result;
}

/* ---- reading -------------------------------------------------------------------- */

static PyObject *read_pickle(const wire_item *item, const char *message)
{
    PyObject *pickle = PyImport_ImportModule("pickle");
    PyObject *object =
        pickle != NULL ? PyObject_CallMethod(pickle, "loads", "y#", message + item->at,
                                             (Py_ssize_t)item->n_bytes)
                       : NULL;
    Py_XDECREF(pickle);
    return object;
}

static PyObject *read_item(const module_state *state, pli_room *room,
                           const wire_item *item, char *message, pli_wire_hold hold)
{
    if (item->form == PLI_FORM_NONE)
        Py_RETURN_NONE;
    if (item->form == PLI_FORM_PICKLE)
        return read_pickle(item, message);
    const dl_tensor like = {.data = message + item->at,
                            .ndim = (int32_t)item->n_dims,
                            .dtype = item->dtype,
                            .shape = (int64_t *)item->dims,
                            .strides = (int64_t *)item->dims + item->n_dims};
    PyObject *object = pli_tensor_in_room(state, room, &like);
    if (object != NULL && hold == PLI_WIRE_COPIES)
        Py_SETREF(object, PyObject_CallMethodNoArgs(object, state->str_clone));
    if (object != NULL && item->form == PLI_FORM_ARRAY)
        Py_SETREF(object, PyObject_CallMethod(object, "numpy", NULL));
    return object;
}

PyObject *pli_wire_receive(const module_state *state, pli_channel *channel,
                           pli_wire_hold hold)
{
    char *message = (char *)pli_channel_receive(channel);
    const wire_head *head = (const wire_head *)(void *)message;
    PyObject *result = NULL;
    PyObject *words = PyBytes_FromStringAndSize(message + head->words_at,
                                                (Py_ssize_t)head->words_bytes);
    PyObject *flags = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)head->n_items);
    PyObject *objects = PyList_New((Py_ssize_t)head->n_items);
    if (words == NULL || flags == NULL || objects == NULL)
        goto done;
    char *at = message + sizeof *head;
    for (uint32_t i = 0; i < head->n_items; i++) {
        const wire_item *item = (const wire_item *)(void *)at;
        PyObject *object = read_item(state, channel->in, item, message, hold);
        if (object == NULL)
            goto done;
        PyList_SET_ITEM(objects, (Py_ssize_t)i, object);
        PyBytes_AS_STRING(flags)[i] = (char)item->flags;
        at += item_size((int)item->n_dims);
    }
    result = Py_BuildValue("IOOO", head->kind, words, objects, flags);
done:
    Py_XDECREF(objects);
    Py_XDECREF(flags);
    Py_XDECREF(words);
    return result;
}
