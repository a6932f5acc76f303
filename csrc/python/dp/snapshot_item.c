/* snapshot_item.c - see snapshot.h.
 *
 * Asked at every forward about a model's some thousand dictionaries, of which next to
 * none has changed.  walk() goes through the members of any kind of object; to record
 * and to compare are two visitors of it.
 */
#include "snapshot.h"

/* ---- values --------------------------------------------------------------------- */

/* Whether two members are as good as one. */
static int is_same_value(PyObject *left, PyObject *right)
{
    if (left == right)
        return 1;
    if (left == NULL || right == NULL || Py_TYPE(left) != Py_TYPE(right))
        return 0;
    if (PyFloat_CheckExact(left))
        return pli_is_same_double(PyFloat_AS_DOUBLE(left), PyFloat_AS_DOUBLE(right));
    if (!PyLong_CheckExact(left) && !PyUnicode_CheckExact(left))
        return 0;
    const int is_equal = PyObject_RichCompareBool(left, right, Py_EQ);
    if (is_equal < 0)
        PyErr_Clear();
    return is_equal == 1;
}

/* ---- members -------------------------------------------------------------------- */

/* Called with each member, borrowed; the key is NULL where there is none.  Anything but
 * 0 ends the walk, which returns it. */
typedef int (*visitor)(void *context, PyObject *key, PyObject *value);

static int walk_dict(PyObject *dict, visitor visit, void *context)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    int status = 0;
    while (status == 0 && PyDict_Next(dict, &at, &key, &value))
        status = visit(context, key, value);
    return status;
}

static int walk_ordered(PyObject *dict, visitor visit, void *context)
{
    /* Its own order: a subclass may yield what it does not hold. */
    PyObject *keys = PyODict_Type.tp_iter(dict);
    PyObject *key;
    int status = keys != NULL ? 0 : -1;
    while (status == 0 && (key = PyIter_Next(keys)) != NULL) {
        PyObject *value = PyDict_GetItemWithError(dict, key);
        status = PyErr_Occurred() != NULL ? -1 : visit(context, key, value);
        Py_DECREF(key);
    }
    Py_XDECREF(keys);
    return status != 0 ? status : PyErr_Occurred() != NULL ? -1 : 0;
}

static int walk_list(PyObject *list, visitor visit, void *context)
{
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_GET_SIZE(list); i++)
        status = visit(context, NULL, PyList_GET_ITEM(list, i));
    return status;
}

static int walk_iterable(PyObject *live, visitor visit, void *context)
{
    /* A set's own order, whatever a subclass makes of it. */
    PyObject *members =
        PyAnySet_Check(live) ? PySet_Type.tp_iter(live) : PyObject_GetIter(live);
    PyObject *member;
    int status = members != NULL ? 0 : -1;
    while (status == 0 && (member = PyIter_Next(members)) != NULL) {
        status = visit(context, NULL, member);
        Py_DECREF(member);
    }
    Py_XDECREF(members);
    return status != 0 ? status : PyErr_Occurred() != NULL ? -1 : 0;
}

static int walk_class(PyObject *live, visitor visit, void *context)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *dict = PyType_GetDict((PyTypeObject *)live);
#else
    PyObject *dict = Py_XNewRef(((PyTypeObject *)live)->tp_dict);
#endif
    int status = visit(context, NULL, ((PyTypeObject *)live)->tp_bases);
    if (status == 0 && dict != NULL)
        status = walk_dict(dict, visit, context);
    Py_XDECREF(dict);
    return status;
}

static int walk_function(PyObject *live, visitor visit, void *context)
{
    PyObject *parts[] = {PyFunction_GET_CODE(live), PyFunction_GET_DEFAULTS(live),
                         PyFunction_GET_KW_DEFAULTS(live)};
    int status = 0;
    for (size_t i = 0; status == 0 && i < sizeof parts / sizeof *parts; i++)
        status = visit(context, NULL, parts[i]);
    return status;
}

static int walk_entry(const pli_watched *item, visitor visit, void *context)
{
    PyObject *value = PyDict_GetItemWithError(item->live, item->owner);
    if (value == NULL && PyErr_Occurred() != NULL)
        return -1;
    return visit(context, NULL, value);
}

/* What a tensor is asked that its memory does not show; of an array the dtype. */
typedef enum asked {
    ASKED_DTYPE, /* torch.bool and torch.uint8 are one to DLPack */
    ASKED_VERSION,
    ASKED_REQUIRES_GRAD,
    ASKED_IS_CONJ,
    ASKED_IS_NEG,
    N_ASKED,
} asked;

/* NULL with an exception where an object has no answer: an inference tensor has no
 * version, a bytearray no dtype. */
static PyObject *ask(const module_state *state, PyObject *live, asked what)
{
    switch (what) {
    case ASKED_DTYPE:
        return PyObject_GetAttr(live, state->name_dtype);
    case ASKED_VERSION:
        return PyObject_GetAttr(live, state->name__version);
    case ASKED_REQUIRES_GRAD:
        return PyObject_GetAttr(live, state->str_requires_grad);
    case ASKED_IS_CONJ:
        return PyObject_CallMethodNoArgs(live, state->str_is_conj);
    default:
        return PyObject_CallMethodNoArgs(live, state->str_is_neg);
    }
}

static int walk_answers(const module_state *state, const pli_watched *item,
                        visitor visit, void *context)
{
    const int n = item->kind == PLI_WATCHED_TENSOR ? N_ASKED : ASKED_DTYPE + 1;
    int status = 0;
    for (int what = 0; status == 0 && what < n; what++) {
        PyObject *answer = ask(state, item->live, (asked)what);
        if (answer == NULL)
            PyErr_Clear();
        status = visit(context, NULL, answer);
        Py_XDECREF(answer);
    }
    return status;
}

/* 0, what a visitor returned, or -1 with an exception. */
static int walk(const pli_watched *item, visitor visit, void *context)
{
    switch (item->kind) {
    case PLI_WATCHED_DICT:
        return walk_dict(item->live, visit, context);
    case PLI_WATCHED_ORDERED:
        return walk_ordered(item->live, visit, context);
    case PLI_WATCHED_LIST:
        return walk_list(item->live, visit, context);
    case PLI_WATCHED_ITERABLE:
        return walk_iterable(item->live, visit, context);
    case PLI_WATCHED_CLASS:
        return walk_class(item->live, visit, context);
    case PLI_WATCHED_FUNCTION:
        return walk_function(item->live, visit, context);
    case PLI_WATCHED_CELL:
        return visit(context, NULL, PyCell_GET(item->live));
    case PLI_WATCHED_ENTRY:
        return walk_entry(item, visit, context);
    default:
        return 0;
    }
}

/* ---- recording ------------------------------------------------------------------ */

static int reserve(pli_watched *item, Py_ssize_t n)
{
    const Py_ssize_t n_more = n + n / 2 + 4;
    if (n < item->n_allocated)
        return 0;
    PyObject **keys = PyMem_Realloc(item->keys, (size_t)n_more * sizeof(PyObject *));
    if (keys != NULL)
        item->keys = keys;
    PyObject **values =
        PyMem_Realloc(item->values, (size_t)n_more * sizeof(PyObject *));
    if (values != NULL)
        item->values = values;
    if (keys == NULL || values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    item->n_allocated = n_more;
    return 0;
}

static int record(void *context, PyObject *key, PyObject *value)
{
    pli_watched *item = context;
    if (reserve(item, item->n_seen) != 0)
        return -1;
    item->keys[item->n_seen] = Py_XNewRef(key);
    item->values[item->n_seen++] = Py_XNewRef(value);
    return 0;
}

static pli_watched_kind kind_of(const module_state *state, PyObject *live)
{
    if (PyODict_Check(live))
        return PLI_WATCHED_ORDERED;
    if (PyDict_Check(live))
        return PLI_WATCHED_DICT;
    if (PyList_Check(live))
        return PLI_WATCHED_LIST;
    if (PyFunction_Check(live))
        return PLI_WATCHED_FUNCTION;
    if (PyCell_Check(live))
        return PLI_WATCHED_CELL;
    if (PyType_Check(live))
        return PLI_WATCHED_CLASS;
    if (state->tensor_type != NULL &&
        PyObject_TypeCheck(live, (PyTypeObject *)state->tensor_type))
        return PLI_WATCHED_TENSOR;
    return PyObject_CheckBuffer(live) ? PLI_WATCHED_BYTES : PLI_WATCHED_ITERABLE;
}

/* Tensors and arrays have; the others have members. */
static int has_memory(const pli_watched *item)
{
    return item->kind == PLI_WATCHED_TENSOR || item->kind == PLI_WATCHED_BYTES;
}

static int record_memory(const module_state *state, pli_watched *item)
{
    if (walk_answers(state, item, record, item) != 0)
        return -1;
    if (item->kind == PLI_WATCHED_TENSOR)
        item->is_whole |= item->values[ASKED_VERSION] == NULL;
    return pli_watched_hash(state, item, &item->hash);
}

int pli_watched_init(const module_state *state, PyObject *live, PyObject *owner,
                     int is_whole, pli_watched *out)
{
    const int is_entry = owner != NULL && PyUnicode_Check(owner);
    *out = (pli_watched){.live = Py_NewRef(live),
                         .owner = Py_XNewRef(owner),
                         .is_whole = is_whole,
                         .kind = is_entry ? PLI_WATCHED_ENTRY : kind_of(state, live)};
    if (is_entry && !PyDict_Check(live)) {
        PyErr_Format(PyExc_TypeError, "add: %R is a name, but %.100s is no dict", owner,
                     Py_TYPE(live)->tp_name);
        return -1;
    }
    if (owner != NULL && !is_entry)
        out->type = (PyTypeObject *)Py_NewRef(Py_TYPE(owner));
    return has_memory(out) ? record_memory(state, out) : walk(out, record, out);
}

void pli_watched_drop(pli_watched *item)
{
    const pli_watched gone = *item;
    *item = (pli_watched){.live = NULL};
    for (Py_ssize_t i = 0; i < gone.n_seen; i++) {
        Py_XDECREF(gone.keys[i]);
        Py_XDECREF(gone.values[i]);
    }
    PyMem_Free(gone.keys);
    PyMem_Free(gone.values);
    Py_XDECREF(gone.type);
    Py_XDECREF(gone.owner);
    Py_XDECREF(gone.live);
}

int pli_watched_visit(const pli_watched *item, visitproc visit, void *arg)
{
    Py_VISIT(item->live);
    Py_VISIT(item->owner);
    Py_VISIT(item->type);
    for (Py_ssize_t i = 0; i < item->n_seen; i++) {
        Py_VISIT(item->keys[i]);
        Py_VISIT(item->values[i]);
    }
    return 0;
}

/* ---- comparing ------------------------------------------------------------------ */

typedef struct comparison {
    const pli_watched *item;
    Py_ssize_t n;
} comparison;

static int compare(void *context, PyObject *key, PyObject *value)
{
    comparison *with = context;
    const pli_watched *item = with->item;
    if (with->n >= item->n_seen || key != item->keys[with->n] ||
        !is_same_value(item->values[with->n], value))
        return 1;
    with->n++;
    return 0;
}

/* compare() for all entries of a dictionary: what nearly all of the time goes into. */
static int has_same_entries(const pli_watched *item)
{
    PyObject *key, *value;
    Py_ssize_t at = 0, n = 0;
    while (PyDict_Next(item->live, &at, &key, &value)) {
        if (key != item->keys[n] || !is_same_value(item->values[n], value))
            return 0;
        n++;
    }
    return 1;
}

static int has_same_members(const pli_watched *item)
{
    if (item->kind == PLI_WATCHED_DICT || item->kind == PLI_WATCHED_ORDERED) {
        if (PyDict_GET_SIZE(item->live) != item->n_seen)
            return 0;
        if (item->n_seen == 0 || item->kind == PLI_WATCHED_DICT)
            return has_same_entries(item);
    }
    comparison with = {.item = item};
    const int status = walk(item, compare, &with);
    if (status < 0)
        PyErr_Clear();
    return status == 0 && with.n == item->n_seen;
}

static int is_same_memory(const module_state *state, const pli_watched *item)
{
    comparison with = {.item = item};
    uint64_t hash = 0;
    if (walk_answers(state, item, compare, &with) != 0)
        return 0;
    if (pli_watched_hash(state, item, &hash) == 0)
        return hash == item->hash;
    PyErr_Clear();
    return 0;
}

int pli_watched_is_same(const module_state *state, const pli_watched *item)
{
    if (item->type != NULL && Py_TYPE(item->owner) != item->type)
        return 0;
    return has_memory(item) ? is_same_memory(state, item) : has_same_members(item);
}

typedef struct difference {
    const pli_watched *item;
    Py_ssize_t n;
    PyObject *before;
    PyObject *after;
} difference;

static int record_difference(void *context, PyObject *key, PyObject *value)
{
    difference *found = context;
    const pli_watched *item = found->item;
    const Py_ssize_t n = found->n++;
    const int was_more = n < item->n_seen;
    if (was_more && key == item->keys[n] && is_same_value(item->values[n], value))
        return 0;
    if (was_more && PyDict_SetItem(found->before, item->keys[n], item->values[n]) != 0)
        return -1;
    return PyDict_SetItem(found->after, key, value);
}

PyObject *pli_watched_delta(const pli_watched *item)
{
    difference found = {.item = item, .before = PyDict_New(), .after = PyDict_New()};
    PyObject *delta = NULL;
    int status = -1;
    if (item->kind != PLI_WATCHED_DICT && item->kind != PLI_WATCHED_ORDERED)
        PyErr_SetString(PyExc_TypeError, "delta: only dictionaries have one");
    else if (found.before != NULL && found.after != NULL)
        status = walk(item, record_difference, &found);
    for (Py_ssize_t n = found.n; status == 0 && n < item->n_seen; n++)
        status = PyDict_SetItem(found.before, item->keys[n], item->values[n]);
    if (status == 0)
        delta = PyTuple_Pack(2, found.before, found.after);
    Py_XDECREF(found.before);
    Py_XDECREF(found.after);
    return delta;
}
