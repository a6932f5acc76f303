/* mirror_item.c - see mirror.h.
 *
 * Asked at every forward about a model's some thousand dictionaries, of which next to
 * none has changed: Python's count of a dictionary's versions, where it has one, spares
 * the look at its entries, and the members of a list are compared as a block of memory.
 */
#include "mirror.h"

#include <string.h>

#include "tensor.h"

/* Up to here the bytes of a tensor, whose version may miss a change (`.data`), and of
 * an array, which counts no versions, are compared. */
#define TENSOR_BYTES ((size_t)1 << 14)
#define ARRAY_BYTES ((Py_ssize_t)1 << 20)

/* ---- values --------------------------------------------------------------------- */

/* By their bits: NaN is itself, and 0.0 is not -0.0. */
static int is_equal_float(PyObject *left, PyObject *right)
{
    const double values[] = {PyFloat_AS_DOUBLE(left), PyFloat_AS_DOUBLE(right)};
    uint64_t bits[2];
    memcpy(bits, values, sizeof bits);
    return bits[0] == bits[1];
}

/* Whether two members are as good as one. */
static int is_same_value(PyObject *left, PyObject *right)
{
    if (left == right)
        return 1;
    if (Py_TYPE(left) != Py_TYPE(right))
        return 0;
    if (PyFloat_CheckExact(left))
        return is_equal_float(left, right);
    if (!PyLong_CheckExact(left) && !PyUnicode_CheckExact(left))
        return 0;
    const int is_equal = PyObject_RichCompareBool(left, right, Py_EQ);
    if (is_equal < 0)
        PyErr_Clear();
    return is_equal == 1;
}

/* The version of a dictionary: two of the same number have the same entries.  0: Python
 * does not count. */
static uint64_t tag_of(PyObject *dict)
{
#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED) && !defined(PYPY_VERSION)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return ((PyDictObject *)dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
    (void)dict;
    return 0;
#endif
}

/* ---- room for members -------------------------------------------------------------
 */

/* Forgets the members from `begin` on.  They are dropped last: their own code may ask
 * the mirror. */
static void forget(pli_mirrored *item, Py_ssize_t begin)
{
    while (item->n_seen > begin) {
        const Py_ssize_t last = --item->n_seen;
        PyObject *key = item->keys != NULL ? item->keys[last] : NULL;
        PyObject *value = item->values[last];
        Py_XDECREF(key);
        Py_DECREF(value);
    }
}

static int make_room(pli_mirrored *item, Py_ssize_t n)
{
    if (n <= item->n_room)
        return 0;
    const size_t n_bytes = (size_t)(n + n / 8) * sizeof(PyObject *);
    PyObject **values = PyMem_Realloc(item->values, n_bytes);
    if (values != NULL)
        item->values = values;
    PyObject **keys =
        item->kind == PLI_MIRROR_DICT ? PyMem_Realloc(item->keys, n_bytes) : NULL;
    if (keys != NULL)
        item->keys = keys;
    if (values == NULL || (keys == NULL && item->kind == PLI_MIRROR_DICT)) {
        PyErr_NoMemory();
        return -1;
    }
    item->n_room = n + n / 8;
    return 0;
}

/* ---- dictionaries -----------------------------------------------------------------
 */

/* How many entries from the first on are as they were. */
static Py_ssize_t same_entries(pli_mirrored *item)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    Py_ssize_t n = 0;
    while (n < item->n_seen && PyDict_Next(item->live, &at, &key, &value) &&
           key == item->keys[n] && is_same_value(item->values[n], value))
        n++;
    return n;
}

static int is_same_dict(pli_mirrored *item)
{
    const uint64_t tag = tag_of(item->live);
    if (tag != 0 && tag == item->tag)
        return 1;
    if (PyDict_Size(item->live) != item->n_seen || same_entries(item) != item->n_seen)
        return 0;
    item->tag = tag;
    return 1;
}

static int take_dict(pli_mirrored *item)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    const Py_ssize_t n = PyDict_Size(item->live);
    forget(item, 0);
    if (make_room(item, n) != 0)
        return -1;
    while (item->n_seen < n && PyDict_Next(item->live, &at, &key, &value)) {
        item->keys[item->n_seen] = Py_NewRef(key);
        item->values[item->n_seen++] = Py_NewRef(value);
    }
    item->tag = tag_of(item->live);
    return 0;
}

static PyObject *delta_of_dict(pli_mirrored *item)
{
    PyObject *before = PyDict_New();
    PyObject *after = PyDict_New();
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int status = before != NULL && after != NULL ? 0 : -1;
    for (Py_ssize_t n = 0; status == 0; n++) {
        const int is_more = PyDict_Next(item->live, &at, &key, &value);
        const int was_more = n < item->n_seen;
        if (!is_more && !was_more)
            break;
        if (is_more && was_more && key == item->keys[n] &&
            is_same_value(item->values[n], value))
            continue;
        if (was_more)
            status = PyDict_SetItem(before, item->keys[n], item->values[n]);
        if (is_more && status == 0)
            status = PyDict_SetItem(after, key, value);
    }
    PyObject *delta = status == 0 ? Py_BuildValue("(iOO)", 0, before, after) : NULL;
    Py_XDECREF(before);
    Py_XDECREF(after);
    return delta;
}

/* ---- sequences --------------------------------------------------------------------
 */

/* A list of the members as they are now: `live` itself where it is one. */
static PyObject *members_of(const pli_mirrored *item)
{
    if (item->kind == PLI_MIRROR_LIST)
        return Py_NewRef(item->live);
    if (!PySet_Check(item->live))
        return PySequence_List(item->live);
    PyObject *members = PySet_Type.tp_iter(item->live);
    PyObject *list = members != NULL ? PySequence_List(members) : NULL;
    Py_XDECREF(members);
    return list;
}

/* Whether a set has the very members that it had, in their order: a look at its table,
 * since to touch each member would cost more than all else where there are many. */
static int is_same_set(const pli_mirrored *item)
{
#ifndef Py_GIL_DISABLED
    const PySetObject *set = (const PySetObject *)item->live;
    Py_ssize_t n = 0;
    for (Py_ssize_t i = 0; i <= set->mask; i++) {
        const setentry *entry = &set->table[i];
        if (entry->key == NULL || entry->hash == -1) /* a dummy's */
            continue;
        if (n == item->n_seen || entry->key != item->values[n])
            return 0;
        n++;
    }
    return n == item->n_seen;
#else
    (void)item;
    return 0;
#endif
}

static Py_ssize_t same_members(const pli_mirrored *item, PyObject *list)
{
    const Py_ssize_t n_now = PyList_GET_SIZE(list);
    const Py_ssize_t most = n_now < item->n_seen ? n_now : item->n_seen;
    PyObject **now = ((PyListObject *)list)->ob_item;
    Py_ssize_t n = 0;
    if (most > 0 && memcmp(now, item->values, (size_t)most * sizeof *now) == 0)
        return most;
    while (n < most && is_same_value(item->values[n], now[n]))
        n++;
    return n;
}

static int is_same_sequence(const pli_mirrored *item)
{
    if (PySet_Check(item->live) && is_same_set(item))
        return 1;
    PyObject *list = members_of(item);
    const int is_same = list != NULL && PyList_GET_SIZE(list) == item->n_seen &&
                        same_members(item, list) == item->n_seen;
    if (list == NULL)
        PyErr_Clear();
    Py_XDECREF(list);
    return is_same;
}

static int take_sequence(pli_mirrored *item)
{
    PyObject *list = members_of(item);
    if (list == NULL)
        return -1;
    const Py_ssize_t n = PyList_GET_SIZE(list);
    const Py_ssize_t n_same = same_members(item, list);
    const Py_ssize_t n_gone = item->n_seen - n_same;
    PyObject **gone = PyMem_Malloc((size_t)n_gone * sizeof *gone + 1);
    const int status = gone != NULL ? make_room(item, n) : -1;
    if (gone == NULL)
        PyErr_NoMemory();
    if (status == 0) {
        memcpy(gone, item->values + n_same, (size_t)n_gone * sizeof *gone);
        for (item->n_seen = n_same; item->n_seen < n; item->n_seen++)
            item->values[item->n_seen] = Py_NewRef(PyList_GET_ITEM(list, item->n_seen));
    }
    Py_DECREF(list);
    /* Last: their code may ask the mirror, which may move the item. */
    for (Py_ssize_t i = 0; status == 0 && i < n_gone; i++)
        Py_DECREF(gone[i]);
    PyMem_Free(gone);
    return status;
}

static PyObject *delta_of_sequence(const pli_mirrored *item)
{
    PyObject *delta = NULL;
    PyObject *list = members_of(item);
    const Py_ssize_t begin = list != NULL ? same_members(item, list) : 0;
    PyObject *before = list != NULL ? PyList_New(item->n_seen - begin) : NULL;
    if (before != NULL) {
        for (Py_ssize_t i = begin; i < item->n_seen; i++)
            PyList_SET_ITEM(before, i - begin, Py_NewRef(item->values[i]));
        PyObject *after = PyList_GetSlice(list, begin, PyList_GET_SIZE(list));
        if (after != NULL)
            delta = Py_BuildValue("(nON)", begin, before, after);
    }
    Py_XDECREF(before);
    Py_XDECREF(list);
    return delta;
}

/* ---- tensors and arrays -----------------------------------------------------------
 */

static int reserve_bytes(pli_mirrored *item, Py_ssize_t n_bytes)
{
    char *bytes = PyMem_Realloc(item->bytes, (size_t)n_bytes + 1);
    if (bytes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    item->bytes = bytes;
    item->n_bytes = n_bytes;
    return 0;
}

/* Reads a tensor that is small and dense; 0 where it is not. */
static int read_small(const module_state *state, PyObject *tensor, pli_tensor *out)
{
    if (pli_tensor_read(state, tensor, "a tensor", out) != 0) {
        PyErr_Clear();
        return 0;
    }
    return out->data != NULL && pli_layout_bytes(&out->layout) <= TENSOR_BYTES &&
           pli_layout_is_dense(&out->layout);
}

static int take_tensor(const module_state *state, pli_mirrored *item)
{
    pli_tensor read;
    PyObject *version = PyObject_GetAttr(item->live, state->name__version);
    if (version == NULL)
        return -1;
    Py_XSETREF(item->version, version);
    item->n_bytes = 0;
    if (!read_small(state, item->live, &read))
        return 0;
    const size_t n_bytes = pli_layout_bytes(&read.layout);
    const int status = reserve_bytes(item, (Py_ssize_t)n_bytes);
    if (status == 0)
        memcpy(item->bytes, read.data, n_bytes);
    return status;
}

static int is_same_tensor(const module_state *state, const pli_mirrored *item)
{
    pli_tensor read;
    PyObject *version = PyObject_GetAttr(item->live, state->name__version);
    const int is_same = version != NULL && is_same_value(item->version, version);
    Py_XDECREF(version);
    PyErr_Clear();
    if (!is_same || item->n_bytes == 0)
        return is_same;
    return read_small(state, item->live, &read) &&
           pli_layout_bytes(&read.layout) == (size_t)item->n_bytes &&
           memcmp(read.data, item->bytes, (size_t)item->n_bytes) == 0;
}

/* An array's memory, with its gaps. */
static int get_memory(const pli_mirrored *item, Py_buffer *out)
{
    return PyObject_GetBuffer(item->live, out, PyBUF_STRIDED_RO);
}

static int take_bytes(pli_mirrored *item)
{
    Py_buffer view;
    if (get_memory(item, &view) != 0)
        return -1;
    const Py_ssize_t n_bytes = view.len <= ARRAY_BYTES ? view.len : 0;
    int status = reserve_bytes(item, n_bytes);
    if (status == 0 && n_bytes > 0)
        status = PyBuffer_ToContiguous(item->bytes, &view, n_bytes, 'C');
    PyBuffer_Release(&view);
    return status;
}

/* The same, where the memory has gaps, or is in another order. */
static int is_same_copy(const pli_mirrored *item, const Py_buffer *view)
{
    char *copy = PyMem_Malloc((size_t)view->len);
    const int is_same = copy != NULL &&
                        PyBuffer_ToContiguous(copy, view, view->len, 'C') == 0 &&
                        memcmp(copy, item->bytes, (size_t)view->len) == 0;
    PyMem_Free(copy);
    PyErr_Clear();
    return is_same;
}

static int is_same_bytes(const pli_mirrored *item)
{
    Py_buffer view;
    if (get_memory(item, &view) != 0) {
        PyErr_Clear();
        return 0;
    }
    int is_same = view.len == item->n_bytes;
    if (view.len > ARRAY_BYTES)
        is_same = item->n_bytes == 0;
    else if (is_same && PyBuffer_IsContiguous(&view, 'C'))
        is_same = memcmp(view.buf, item->bytes, (size_t)view.len) == 0;
    else if (is_same && view.len > 0)
        is_same = is_same_copy(item, &view);
    PyBuffer_Release(&view);
    return is_same;
}

/* ---- any of them ------------------------------------------------------------------
 */

static pli_mirror_kind kind_of(const module_state *state, PyObject *live)
{
    if (PyDict_Check(live))
        return PLI_MIRROR_DICT;
    if (PyList_Check(live))
        return PLI_MIRROR_LIST;
    if (state->tensor_type != NULL &&
        PyObject_TypeCheck(live, (PyTypeObject *)state->tensor_type))
        return PLI_MIRROR_TENSOR;
    return PyObject_CheckBuffer(live) ? PLI_MIRROR_BYTES : PLI_MIRROR_ITERABLE;
}

int pli_mirrored_take(const module_state *state, pli_mirrored *item)
{
    if (item->owner != NULL)
        Py_XSETREF(item->type, (PyTypeObject *)Py_NewRef(Py_TYPE(item->owner)));
    switch (item->kind) {
    case PLI_MIRROR_DICT:
        return take_dict(item);
    case PLI_MIRROR_TENSOR:
        return take_tensor(state, item);
    case PLI_MIRROR_BYTES:
        return take_bytes(item);
    default:
        return take_sequence(item);
    }
}

int pli_mirrored_init(const module_state *state, PyObject *live, PyObject *owner,
                      pli_mirrored *out)
{
    *out = (pli_mirrored){.kind = kind_of(state, live),
                          .live = Py_NewRef(live),
                          .owner = Py_XNewRef(owner)};
    return pli_mirrored_take(state, out);
}

void pli_mirrored_drop(pli_mirrored *item)
{
    pli_mirrored gone = *item;
    *item = (pli_mirrored){.kind = gone.kind};
    forget(&gone, 0);
    PyMem_Free(gone.values);
    PyMem_Free(gone.keys);
    PyMem_Free(gone.bytes);
    Py_XDECREF(gone.version);
    Py_XDECREF(gone.type);
    Py_XDECREF(gone.owner);
    Py_XDECREF(gone.live);
}

int pli_mirrored_visit(const pli_mirrored *item, visitproc visit, void *arg)
{
    Py_VISIT(item->live);
    Py_VISIT(item->owner);
    Py_VISIT(item->type);
    for (Py_ssize_t n = 0; n < item->n_seen; n++) {
        Py_VISIT(item->values[n]);
        if (item->keys != NULL)
            Py_VISIT(item->keys[n]);
    }
    return 0;
}

int pli_mirrored_is_same(const module_state *state, pli_mirrored *item)
{
    if (item->owner != NULL && Py_TYPE(item->owner) != item->type)
        return 0;
    switch (item->kind) {
    case PLI_MIRROR_DICT:
        return is_same_dict(item);
    case PLI_MIRROR_TENSOR:
        return is_same_tensor(state, item);
    case PLI_MIRROR_BYTES:
        return is_same_bytes(item);
    default:
        return is_same_sequence(item);
    }
}

PyObject *pli_mirrored_delta(pli_mirrored *item)
{
    if (item->kind == PLI_MIRROR_DICT)
        return delta_of_dict(item);
    if (item->kind == PLI_MIRROR_LIST || item->kind == PLI_MIRROR_ITERABLE)
        return delta_of_sequence(item);
    return Py_BuildValue("(iOO)", 0, Py_None, Py_None);
}
