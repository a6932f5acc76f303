/* tree.c - the kinds of leaves and containers, the walk through nested ones, and
 * paceline._native.Tree.
 *
 * The most frequent types are found by comparing pointers; all others cost a few looks
 * at the type.  Constructors of user classes do not run, except for tuples and for
 * types in torch's registry.  A dataclass's __init__ may need arguments that are not
 * fields.  Its __post_init__ ran on the whole, and must not run again on each chunk.
 */
#include "tree.h"

#include "python/array.h"

/* ---- shapes --------------------------------------------------------------------- */

static int too_many_dims(int n_dims)
{
    if (n_dims <= PLI_MAX_DIMS)
        return 0;
    return pli_error(PyExc_ValueError, "a tensor or array of %d dimensions: at most %d",
                     n_dims, PLI_MAX_DIMS);
}

static int shape_of_array(PyObject *array, pli_shape *out)
{
    out->n_dims = pli_array_n_dims(array);
    out->is_strided = 1;
    if (too_many_dims(out->n_dims) != 0)
        return -1;
    for (int d = 0; d < out->n_dims; d++)
        out->sizes[d] = pli_array_size(array, d);
    return 0;
}

/* For subclasses and tensors that DLPack refuses: sparse, nested, meta, quantized. */
static int shape_by_attributes(const module_state *state, PyObject *tensor,
                               pli_shape *out)
{
    PyObject *sizes;
    PyObject *answer = PyObject_CallOneArg(state->layout_of, tensor);
    int status = -1;
    if (answer != NULL && PyArg_ParseTuple(answer, "pO", &out->is_strided, &sizes)) {
        out->n_dims =
            sizes == Py_None ? PLI_SHAPE_UNKNOWN : (int)PyTuple_GET_SIZE(sizes);
        status = too_many_dims(out->n_dims);
        for (int d = 0; status == 0 && d < out->n_dims; d++)
            out->sizes[d] =
                PyNumber_AsSsize_t(PyTuple_GET_ITEM(sizes, d), PyExc_OverflowError);
        if (PyErr_Occurred())
            status = -1;
    }
    Py_XDECREF(answer);
    return status;
}

int pli_leaf_shape(const module_state *state, PyObject *leaf, pli_shape *out)
{
    dl_tensor dl;
    const int is_exact = (PyObject *)Py_TYPE(leaf) == state->tensor_type;
    if (!is_exact &&
        !PyType_IsSubtype(Py_TYPE(leaf), (PyTypeObject *)state->tensor_type))
        return shape_of_array(leaf, out);
    if (!is_exact || state->exchange == NULL)
        return shape_by_attributes(state, leaf, out);
    if (state->exchange->tensor_from_object(leaf, &dl) != 0) {
        PyErr_Clear();
        return shape_by_attributes(state, leaf, out);
    }
    if (too_many_dims(dl.ndim) != 0)
        return -1;
    out->n_dims = dl.ndim;
    out->is_strided = 1;
    for (int d = 0; d < dl.ndim; d++)
        out->sizes[d] = dl.shape[d];
    return 0;
}

PyObject *pli_shape_text(const pli_shape *shape)
{
    if (shape->n_dims < 0)
        return PyUnicode_FromString("(nested)");
    PyObject *sizes = PyTuple_New(shape->n_dims);
    for (int d = 0; sizes != NULL && d < shape->n_dims; d++)
        pli_tuple_put(&sizes, d, PyLong_FromLongLong(shape->sizes[d]));
    PyObject *text = sizes != NULL ? PyObject_Repr(sizes) : NULL;
    Py_XDECREF(sizes);
    return text;
}

int pli_shape_dim(const pli_shape *shape, Py_ssize_t dim)
{
    const Py_ssize_t counted = dim < 0 ? dim + shape->n_dims : dim;
    return counted >= 0 && counted < shape->n_dims ? (int)counted : -1;
}

/* ---- kinds ---------------------------------------------------------------------- */

static int type_has(PyTypeObject *type, PyObject *name)
{
    return PyObject_HasAttr((PyObject *)type, name);
}

static int is_named(const module_state *state, PyTypeObject *type)
{
    return type_has(type, state->name__fields) && type_has(type, state->name__make);
}

static int kind_of_other(const module_state *state, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    if (PyType_IsSubtype(type, (PyTypeObject *)state->tensor_type))
        return PLI_TENSOR;
    const int is_array = pli_array_check(value);
    if (is_array != 0)
        return is_array < 0 ? -1 : PLI_ARRAY;
    if ((PyObject *)type == state->marker_type)
        return PLI_MARK;
    if ((PyObject *)type == state->packed_type)
        return PLI_PACKED;
    if ((PyObject *)type == state->size_type)
        return PLI_CONSTANT; /* a shape is not split */
    if (PyDict_GetItemWithError(state->registry, (PyObject *)type) != NULL)
        return PLI_REGISTERED;
    if (PyErr_Occurred())
        return -1;
    if (PyTuple_Check(value))
        return is_named(state, type) ? PLI_NAMED : PLI_TUPLE;
    if (PyList_Check(value))
        return PLI_LIST;
    if (PyDict_Check(value))
        return PLI_DICT;
    if (PyType_Check(value) || PyFunction_Check(value) || PyCFunction_Check(value))
        return PLI_CONSTANT;
    return type_has(type, state->name___dataclass_fields__) ? PLI_DATACLASS
                                                            : PLI_CONSTANT;
}

int pli_kind_of(const module_state *state, PyObject *value)
{
    const PyTypeObject *type = Py_TYPE(value);
    if ((const PyObject *)type == state->tensor_type)
        return PLI_TENSOR;
    if (type == &PyTuple_Type)
        return PLI_TUPLE;
    if (type == &PyDict_Type)
        return PLI_DICT;
    if (type == &PyList_Type)
        return PLI_LIST;
    if (value == Py_None || type == &PyBool_Type || type == &PyLong_Type ||
        type == &PyFloat_Type || type == &PyUnicode_Type || type == &PyBytes_Type)
        return PLI_CONSTANT;
    return kind_of_other(state, value);
}

/* ---- opening: fills keys and children ------------------------------------------- */

static void open_tuple(const module_state *state, pli_container *self)
{
    (void)state;
    self->children = PyTuple_GetSlice(self->value, 0, PyTuple_GET_SIZE(self->value));
}

/* A class may make tuples whose length differs from its number of names. */
static void open_named(const module_state *state, pli_container *self)
{
    PyObject *names =
        PyObject_GetAttr((PyObject *)Py_TYPE(self->value), state->name__fields);
    if (names != NULL)
        open_tuple(state, self);
    if (names != NULL && PyTuple_Check(names) &&
        PyTuple_GET_SIZE(names) == PyTuple_GET_SIZE(self->value))
        self->keys = Py_NewRef(names);
    Py_XDECREF(names);
}

static void open_list(const module_state *state, pli_container *self)
{
    (void)state;
    self->children = PyList_AsTuple(self->value);
}

/* Reads the entries of a dict; a subclass may have its own order. */
static void read_entries(pli_container *self, PyObject *dict)
{
    self->keys = PySequence_Tuple(dict);
    const Py_ssize_t n = self->keys != NULL ? PyTuple_GET_SIZE(self->keys) : 0;
    PyObject *children = self->keys != NULL ? PyTuple_New(n) : NULL;
    for (Py_ssize_t i = 0; children != NULL && i < n; i++) {
        PyObject *key = PyTuple_GET_ITEM(self->keys, i);
        PyObject *child = pli_dict_get(dict, key);
        if (child == NULL && !PyErr_Occurred())
            child = PyObject_GetItem(dict, key); /* a subclass computes it */
        pli_tuple_put(&children, i, child);
    }
    self->children = children;
}

static void open_dict(const module_state *state, pli_container *self)
{
    (void)state;
    read_entries(self, self->value);
}

/* The fields that this instance has. */
static void open_dataclass(const module_state *state, pli_container *self)
{
    PyObject *fields = PyObject_CallOneArg(state->dataclass_fields, self->value);
    PyObject *held = fields != NULL ? PyDict_New() : NULL;
    for (Py_ssize_t i = 0; held != NULL && i < PyTuple_GET_SIZE(fields); i++) {
        PyObject *name =
            PyObject_GetAttr(PyTuple_GET_ITEM(fields, i), state->name_name);
        PyObject *child = name != NULL ? PyObject_GetAttr(self->value, name) : NULL;
        if (child == NULL && PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Clear();
        else if (child == NULL || PyDict_SetItem(held, name, child) != 0)
            Py_CLEAR(held);
        Py_XDECREF(child);
        Py_XDECREF(name);
    }
    if (held != NULL)
        read_entries(self, held);
    Py_XDECREF(held);
    Py_XDECREF(fields);
}

/* If the children of a registered dict are its values, in order, sets their keys. */
static int find_keys(pli_container *self)
{
    PyObject *keys = PySequence_Tuple(self->value);
    const Py_ssize_t n = PyTuple_GET_SIZE(self->children);
    int are_same = keys != NULL && PyTuple_GET_SIZE(keys) == n;
    for (Py_ssize_t i = 0; are_same && i < n; i++)
        are_same = PyDict_GetItemWithError(self->value, PyTuple_GET_ITEM(keys, i)) ==
                   PyTuple_GET_ITEM(self->children, i);
    if (are_same)
        self->keys = Py_NewRef(keys);
    Py_XDECREF(keys);
    return PyErr_Occurred() ? -1 : 0;
}

/* Uses torch's registry: flatten(value) returns (children, context). */
static void open_registered(const module_state *state, pli_container *self)
{
    PyObject *parts = NULL;
    PyObject *definition =
        PyObject_GetItem(state->registry, (PyObject *)Py_TYPE(self->value));
    PyObject *flatten = definition != NULL
                            ? PyObject_GetAttr(definition, state->name_flatten_fn)
                            : NULL;
    if (flatten != NULL)
        self->maker = PyObject_GetAttr(definition, state->name_unflatten_fn);
    if (self->maker != NULL)
        parts = PyObject_CallOneArg(flatten, self->value);
    if (parts != NULL && (!PyTuple_Check(parts) || PyTuple_GET_SIZE(parts) != 2)) {
        PyErr_Format(PyExc_TypeError,
                     "the flatten function of %.200s in torch.utils._pytree returned "
                     "%R: it must return (children, context)",
                     Py_TYPE(self->value)->tp_name, parts);
    } else if (parts != NULL) {
        self->context = Py_NewRef(PyTuple_GET_ITEM(parts, 1));
        self->children = PySequence_Tuple(PyTuple_GET_ITEM(parts, 0));
        if (self->children != NULL && PyDict_Check(self->value) && find_keys(self) != 0)
            Py_CLEAR(self->children);
    }
    Py_XDECREF(parts);
    Py_XDECREF(flatten);
    Py_XDECREF(definition);
}

static void open_mark(const module_state *state, pli_container *self)
{
    PyObject *value = PyObject_GetAttr(self->value, state->name_value);
    self->children = value != NULL ? PyTuple_Pack(1, value) : NULL;
    Py_XDECREF(value);
}

/* ---- making again --------------------------------------------------------------- */

/* Copies the container's attributes to `made`, and returns it; NULL if it is NULL. */
static PyObject *with_attributes(const module_state *state, const pli_container *self,
                                 PyObject *made)
{
    PyObject *keys = self->kind == PLI_DATACLASS ? self->keys : Py_None;
    PyObject *args[] = {self->value, made, keys};
    PyObject *done = made != NULL
                         ? PyObject_Vectorcall(state->copy_attributes, args, 3, NULL)
                         : NULL;
    if (done == NULL)
        Py_CLEAR(made);
    Py_XDECREF(done);
    return made;
}

static PyObject *close_tuple(const module_state *state, const pli_container *self,
                             PyObject *items)
{
    PyObject *type = (PyObject *)Py_TYPE(self->value);
    if (type == (PyObject *)&PyTuple_Type)
        return Py_NewRef(items);
    PyObject *made = self->kind == PLI_TUPLE
                         ? PyObject_CallOneArg(type, items)
                         : PyObject_CallMethodOneArg(type, state->name__make, items);
    return with_attributes(state, self, made);
}

/* An instance made by type.__new__(type), without its __init__. */
static PyObject *blank(const module_state *state, const pli_container *self)
{
    PyTypeObject *type = Py_TYPE(self->value);
    if (type == &PyList_Type)
        return PyList_New(0);
    if (type == &PyDict_Type)
        return PyDict_New();
    PyObject *made = PyObject_CallMethodOneArg((PyObject *)type, state->name___new__,
                                               (PyObject *)type);
    if (made != NULL && !PyObject_TypeCheck(made, type)) {
        PyErr_Format(PyExc_TypeError, "%.200s.__new__ made a %.200s", type->tp_name,
                     Py_TYPE(made)->tp_name);
        Py_CLEAR(made);
    }
    return with_attributes(state, self, made);
}

static PyObject *close_object(const module_state *state, const pli_container *self,
                              PyObject *items)
{
    PyObject *made = self->made != NULL ? Py_NewRef(self->made) : blank(state, self);
    int status = made != NULL ? 0 : -1;
    if (status == 0 && self->kind == PLI_LIST)
        status = PyList_SetSlice(made, 0, PY_SSIZE_T_MAX, items);
    const int has_fields = status == 0 && self->kind != PLI_LIST &&
                           !PyDict_CheckExact(made) &&
                           type_has(Py_TYPE(made), state->name___dataclass_fields__);
    const Py_ssize_t n = self->keys != NULL ? PyTuple_GET_SIZE(items) : 0;
    for (Py_ssize_t i = 0; status == 0 && i < n; i++) {
        PyObject *key = PyTuple_GET_ITEM(self->keys, i);
        PyObject *item = PyTuple_GET_ITEM(items, i);
        if (has_fields)
            status = PyObject_GenericSetAttr(made, key, item);
        if (status == 0 && self->kind == PLI_DICT)
            status = PyObject_SetItem(made, key, item);
    }
    if (status != 0)
        Py_CLEAR(made);
    return made;
}

static PyObject *close_registered(const module_state *state, const pli_container *self,
                                  PyObject *items)
{
    (void)state;
    PyObject *list = PySequence_List(items);
    PyObject *args[] = {list, self->context};
    PyObject *made =
        list != NULL ? PyObject_Vectorcall(self->maker, args, 2, NULL) : NULL;
    Py_XDECREF(list);
    return made;
}

static PyObject *close_mark(const module_state *state, const pli_container *self,
                            PyObject *items)
{
    (void)self;
    return PyObject_Call(state->marker_type, items, NULL);
}

/* ---- the table ------------------------------------------------------------------ */

static const struct {
    void (*open)(const module_state *, pli_container *);
    PyObject *(*close)(const module_state *, const pli_container *, PyObject *);
} kinds[PLI_N_KINDS] = {
    [PLI_TUPLE] = {open_tuple, close_tuple},
    [PLI_LIST] = {open_list, close_object},
    [PLI_DICT] = {open_dict, close_object},
    [PLI_NAMED] = {open_named, close_tuple},
    [PLI_PACKED] = {open_named, close_tuple},
    [PLI_DATACLASS] = {open_dataclass, close_object},
    [PLI_REGISTERED] = {open_registered, close_registered},
    [PLI_MARK] = {open_mark, close_mark},
};

/* Opens a container of kind `kind`, or fails if that is -1.  Drop `out` even after a
 * failure. */
static int open_as(const module_state *state, PyObject *value, int kind,
                   pli_container *out)
{
    *out = (pli_container){.value = value};
    if (kind < 0 || kinds[kind].open == NULL) /* an error, or no container */
        return -1;
    out->kind = (pli_kind)kind;
    kinds[kind].open(state, out);
    return out->children != NULL ? 0 : -1;
}

static void container_drop(pli_container *self)
{
    Py_CLEAR(self->children);
    Py_CLEAR(self->keys);
    Py_CLEAR(self->maker);
    Py_CLEAR(self->context);
    Py_CLEAR(self->made);
}

/* Makes a list, dict or dataclass before its children, which may lead back to it. */
static int begin(const module_state *state, pli_container *self)
{
    if (kinds[self->kind].close != close_object)
        return 0;
    self->made = blank(state, self);
    return self->made != NULL ? 0 : -1;
}

PyObject *pli_list_like(const module_state *state, PyObject *list, PyObject *items)
{
    pli_container self = {.kind = PLI_LIST, .value = list};
    return close_object(state, &self, items);
}

/* ---- what is inside ------------------------------------------------------------- */

/* Appends a container to `pending` when it is first met. */
static int add_pending(PyObject *container, PyObject **met, PyObject *pending)
{
    if (*met == NULL && (*met = PySet_New(NULL)) == NULL)
        return -1;
    const Py_ssize_t n_met = PySet_GET_SIZE(*met);
    PyObject *address = PyLong_FromVoidPtr(container);
    int status = address != NULL ? PySet_Add(*met, address) : -1;
    if (status == 0 && PySet_GET_SIZE(*met) > n_met)
        status = PyList_Append(pending, container);
    Py_XDECREF(address);
    return status;
}

static int is_enough(const pli_contents *contents)
{
    return contents->has_leaf && contents->leaves == NULL;
}

/* Opens a container that is only looked at.  The values of a dict are those that its
 * class names, as in torch: a subclass may iterate over something else than keys. */
static int open_to_look(const module_state *state, PyObject *container,
                        pli_container *out)
{
    const int kind = pli_kind_of(state, container);
    if (kind != PLI_DICT)
        return open_as(state, container, kind, out);
    PyObject *values = PyMapping_Values(container);
    *out = (pli_container){.value = container, .kind = PLI_DICT};
    out->children = values != NULL ? PySequence_Tuple(values) : NULL;
    Py_XDECREF(values);
    return out->children != NULL ? 0 : -1;
}

/* Notes what a container holds; containers in it become pending. */
static int look_at(const module_state *state, PyObject *container, PyObject **met,
                   PyObject *pending, pli_contents *contents)
{
    pli_container self;
    int status = open_to_look(state, container, &self);
    const Py_ssize_t n = status == 0 ? PyTuple_GET_SIZE(self.children) : 0;
    for (Py_ssize_t i = 0; status == 0 && !is_enough(contents) && i < n; i++) {
        PyObject *value = PyTuple_GET_ITEM(self.children, i);
        const int kind = pli_kind_of(state, value);
        const int is_leaf = kind >= 0 && kind < PLI_CONSTANT;
        contents->has_leaf |= is_leaf;
        contents->has_value |= kind == PLI_CONSTANT && value != Py_None;
        contents->has_mark |= kind == PLI_MARK;
        status = kind < 0 ? -1 : 0;
        if (kind > PLI_CONSTANT)
            status = add_pending(value, met, pending);
        else if (is_leaf && contents->leaves != NULL)
            status = PyList_Append(contents->leaves, value);
    }
    container_drop(&self);
    return status;
}

/* Without recursion: any number of objects may be linked. */
int pli_look_inside(const module_state *state, PyObject *container,
                    pli_contents *contents)
{
    PyObject *met = NULL, *pending = PyList_New(0);
    int status = pending != NULL ? PyList_Append(pending, container) : -1;
    for (Py_ssize_t i = 0;
         status == 0 && !is_enough(contents) && i < PyList_GET_SIZE(pending); i++)
        status = look_at(state, PyList_GET_ITEM(pending, i), &met, pending, contents);
    Py_XDECREF(pending);
    Py_XDECREF(met);
    return status;
}

PyObject *pli_leaves(PyObject *module, PyObject *value)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    pli_contents found = {.leaves = PyList_New(0)};
    PyObject *outer = PyTuple_Pack(1, value), *result = NULL;
    if (found.leaves != NULL && outer != NULL && pli_needs_torch(state) == 0 &&
        pli_look_inside(state, outer, &found) == 0)
        result = PyTuple_Pack(2, found.leaves, found.has_mark ? Py_True : Py_False);
    Py_XDECREF(outer);
    Py_XDECREF(found.leaves);
    return result;
}

/* ---- the walk ------------------------------------------------------------------- */

/* Whether a walk opens a container whatever it holds.  Each replica has another tuple
 * of arguments and dict of keywords; a tree of flatten() makes new lists and dicts,
 * because paceline.check calls two models with them. */
static int is_always_opened(const pli_walk *walk, int kind, const pli_step *at)
{
    if (walk->align != NULL || kind == PLI_MARK)
        return 1;
    return walk->mode == PLI_REBUILD ? kind != PLI_DATACLASS
                                     : at == NULL || at->parent == NULL;
}

/* Whether a container without leaf and mark is a constant.  As with torch, replicas get
 * copies of others, so that what one writes does not reach the next. */
static int may_go_whole(PyObject *container, int kind)
{
    const Py_ssize_t n = kind == PLI_DATACLASS ? 0 : PyObject_Size(container);
    PyErr_Clear(); /* a registered type may have no length */
    return n == 0;
}

/* The kind by which a walk meets a value, or -1. */
static int kind_in_walk(const pli_walk *walk, PyObject *value, const pli_step *at)
{
    const int kind = pli_kind_of(walk->state, value);
    pli_contents contents = {0};
    if (kind <= PLI_CONSTANT || is_always_opened(walk, kind, at) ||
        !may_go_whole(value, kind))
        return kind;
    if (pli_look_inside(walk->state, value, &contents) != 0)
        return -1;
    return contents.has_leaf || contents.has_mark ? kind : PLI_CONSTANT;
}

/* Fills `out` with what the walk keeps about containers, a list: themselves, because
 * another object may get the address of one that dies, and their replacement, which is
 * NotImplemented until there is one.  Returns whether they were met before, or -1. */
static int remember(pli_walk *walk, PyObject *const *values, PyObject **out)
{
    const Py_ssize_t n = walk->n;
    PyObject **known = &walk->met[walk->is_marked];
    *out = NULL;
    if (*known == NULL && (*known = PyDict_New()) == NULL)
        return -1;
    PyObject *key = PyBytes_FromStringAndSize((const char *)values,
                                              n * (Py_ssize_t)sizeof(PyObject *));
    PyObject *fresh = PyList_New(n + 1), *entry = NULL;
    for (Py_ssize_t k = 0; fresh != NULL && k < n; k++)
        /* NOLINTNEXTLINE(clang-analyzer-security.ArrayBound): n are there */
        PyList_SET_ITEM(fresh, k, Py_NewRef(values[k]));
    if (fresh != NULL)
        PyList_SET_ITEM(fresh, n, Py_NewRef(Py_NotImplemented));
    if (key != NULL && fresh != NULL)
        entry = PyDict_SetDefault(*known, key, fresh);
    const int was_met = entry != fresh;
    *out = Py_XNewRef(entry);
    Py_XDECREF(fresh);
    Py_XDECREF(key);
    return entry != NULL ? was_met : -1;
}

static PyObject *replacement(const pli_walk *walk, PyObject *entry)
{
    PyObject *made = PyList_GET_ITEM(entry, walk->n);
    if (made != Py_NotImplemented || walk->mode == PLI_LOOK)
        return Py_NewRef(made);
    return PyErr_Format(PyExc_ValueError,
                        "a %.200s contains itself: only a list, a dict or a dataclass "
                        "may lead back to itself",
                        Py_TYPE(PyList_GET_ITEM(entry, 0))->tp_name);
}

static PyObject *close_with(const pli_walk *walk, const pli_container *part,
                            PyObject *items)
{
    if (walk->mode == PLI_LOOK)
        return Py_NewRef(Py_None);
    if (walk->mode == PLI_UNMARK && part->kind == PLI_MARK)
        return Py_NewRef(PyTuple_GET_ITEM(items, 0));
    return kinds[part->kind].close(walk->state, part, items);
}

#define IN_CONTAINERS " while looking for tensors in nested containers"

static PyObject *walk_values(pli_walk *walk, PyObject *const *values,
                             const pli_step *at);

/* Walks the children of opened parts; `column` has room for one child of each part. */
static PyObject *walk_children(pli_walk *walk, /* NOLINT(misc-no-recursion) */
                               const pli_container *parts, PyObject **column,
                               const pli_step *at)
{
    const Py_ssize_t n_children = PyTuple_GET_SIZE(parts[0].children);
    const int was_marked = walk->is_marked;
    PyObject *items = PyTuple_New(n_children);
    walk->is_marked |= parts[0].kind == PLI_MARK;
    for (Py_ssize_t i = 0; items != NULL && i < n_children; i++) {
        const pli_step below = {.parent = at, .container = parts, .child = i};
        for (Py_ssize_t k = 0; k < walk->n; k++)
            column[k] = PyTuple_GET_ITEM(parts[k].children, i);
        pli_tuple_put(&items, i, walk_values(walk, column, &below));
    }
    walk->is_marked = was_marked;
    PyObject *made = items != NULL ? close_with(walk, parts, items) : NULL;
    Py_XDECREF(items);
    return made;
}

static PyObject *walk_containers(pli_walk *walk, /* NOLINT(misc-no-recursion) */
                                 int kind, PyObject *const *values, PyObject *entry,
                                 const pli_step *at)
{
    pli_container *parts =
        PyMem_Calloc((size_t)walk->n, sizeof *parts + sizeof *values);
    if (parts == NULL)
        return PyErr_NoMemory();
    int status = 0;
    for (Py_ssize_t k = 0; status == 0 && k < walk->n; k++) {
        status = open_as(walk->state, values[k], kind, &parts[k]);
        if (status == 0 && k > 0)
            status = walk->align(parts, k, at);
    }
    if (status == 0 && walk->mode != PLI_LOOK)
        status = begin(walk->state, parts);
    if (status == 0 && parts[0].made != NULL)
        status = PyList_SetItem(entry, walk->n, Py_NewRef(parts[0].made));
    PyObject *made = NULL;
    if (status == 0)
        made = walk_children(walk, parts, (PyObject **)(parts + walk->n), at);
    if (made != NULL && PyList_SetItem(entry, walk->n, Py_NewRef(made)) != 0)
        Py_CLEAR(made);
    for (Py_ssize_t k = 0; k < walk->n; k++)
        container_drop(&parts[k]);
    PyMem_Free(parts);
    return made;
}

static PyObject *walk_values(pli_walk *walk, /* NOLINT(misc-no-recursion) */
                             PyObject *const *values, const pli_step *at)
{
    PyObject *made = NULL, *entry = NULL;
    const int kind = kind_in_walk(walk, values[0], at);
    const int met = kind >= 0 ? walk->meet(walk, kind, values, at, &made) : -1;
    if (met != 0)
        return met > 0 && made == NULL ? Py_NewRef(Py_None) : made;
    const int was_met = remember(walk, values, &entry);
    if (was_met == 1) {
        made = replacement(walk, entry);
    } else if (was_met == 0 && !Py_EnterRecursiveCall(IN_CONTAINERS)) {
        made = walk_containers(walk, kind, values, entry, at);
        Py_LeaveRecursiveCall();
    }
    Py_XDECREF(entry);
    return made;
}

PyObject *pli_walk_values(pli_walk *walk, PyObject *const *values)
{
    PyObject *made = walk_values(walk, values, NULL);
    Py_CLEAR(walk->met[0]);
    Py_CLEAR(walk->met[1]);
    return made;
}

int pli_look(pli_walk *walk, PyObject *value)
{
    return pli_drop(pli_walk_values(walk, &value));
}

/* ---- paths ---------------------------------------------------------------------- */

PyObject *pli_path(const pli_step *at,
                   const char *start) /* NOLINT(misc-no-recursion) */
{
    if (at == NULL)
        return PyUnicode_FromString(start);
    if (at->parent == NULL && start == NULL)
        return PyUnicode_FromString(at->child == 0 ? "args" : "kwargs");
    PyObject *path = pli_path(at->parent, start);
    const pli_container *from = at->container;
    if (path == NULL || from->kind == PLI_MARK)
        return path;
    const int has_items = from->kind == PLI_DICT || from->kind == PLI_REGISTERED;
    PyObject *longer =
        from->keys == NULL
            ? PyUnicode_FromFormat("%U[%zd]", path, at->child)
            : PyUnicode_FromFormat(has_items ? "%U[%R]" : "%U.%S", path,
                                   PyTuple_GET_ITEM(from->keys, at->child));
    Py_DECREF(path);
    return longer;
}

/* A walk that finds one leaf. */
typedef struct finding {
    pli_walk walk;
    Py_ssize_t to_go;
    const char *start;
    PyObject *path;
} finding;

static int find(pli_walk *walk, int kind, PyObject *const *values, const pli_step *at,
                PyObject **out)
{
    finding *self = (finding *)walk;
    (void)values;
    (void)out;
    if (kind < PLI_CONSTANT && self->to_go-- == 0 &&
        (self->path = pli_path(at, self->start)) == NULL)
        return -1;
    return kind <= PLI_CONSTANT;
}

PyObject *pli_path_of_leaf(const module_state *state, PyObject *value, Py_ssize_t leaf,
                           const char *start)
{
    finding self = {
        .walk = {.state = state, .n = 1, .meet = find}, .to_go = leaf, .start = start};
    if (pli_look(&self.walk, value) != 0)
        Py_CLEAR(self.path);
    else if (self.path == NULL)
        PyErr_Format(PyExc_IndexError, "path(%zd) of a tree of %zd leaves", leaf,
                     leaf - self.to_go);
    return self.path;
}

/* ---- other leaves --------------------------------------------------------------- */

typedef struct replacing {
    pli_walk walk;
    PyObject *leaves;
    Py_ssize_t n_met;
} replacing;

static int replace(pli_walk *walk, int kind, PyObject *const *values,
                   const pli_step *at, PyObject **out)
{
    replacing *self = (replacing *)walk;
    (void)at;
    if (kind == PLI_CONSTANT)
        *out = Py_NewRef(values[0]);
    if (kind >= PLI_CONSTANT)
        return kind == PLI_CONSTANT;
    if (self->n_met < PySequence_Fast_GET_SIZE(self->leaves))
        *out = Py_NewRef(PySequence_Fast_GET_ITEM(self->leaves, self->n_met));
    self->n_met++; /* too few are an error at the end */
    return 1;
}

/* ---- Tree ----------------------------------------------------------------------- */

typedef struct tree_object {
    PyObject_HEAD
    PyObject *value; /* what was flattened */
    int keeps_marks;
} tree_object;

PyObject *pli_tree_new(const module_state *state, PyObject *value, int keeps_marks)
{
    tree_object *self = (tree_object *)state->tree_type->tp_alloc(state->tree_type, 0);
    if (self == NULL)
        return NULL;
    self->value = Py_NewRef(value);
    self->keeps_marks = keeps_marks;
    return (PyObject *)self;
}

static PyObject *tree_path(PyObject *object, PyObject *number)
{
    PLI_ENTER(object);
    const Py_ssize_t leaf = PyNumber_AsSsize_t(number, PyExc_IndexError);
    if (leaf == -1 && PyErr_Occurred())
        return NULL;
    return pli_path_of_leaf(state_of(object), ((const tree_object *)object)->value,
                            leaf, "");
}

static PyObject *tree_unflatten(PyObject *object, PyObject *leaves)
{
    PLI_ENTER(object);
    const tree_object *self = (const tree_object *)object;
    PyObject *all = PySequence_Fast(leaves, "unflatten takes a sequence of leaves");
    if (all == NULL)
        return NULL;
    replacing of = {.walk = {.state = state_of(object),
                             .n = 1,
                             .mode = self->keeps_marks ? PLI_REBUILD : PLI_UNMARK,
                             .meet = replace},
                    .leaves = all};
    PyObject *made = pli_walk_values(&of.walk, &self->value);
    if (made != NULL && of.n_met != PySequence_Fast_GET_SIZE(all)) {
        PyErr_Format(PyExc_ValueError, "unflatten: %zd leaves for a tree of %zd",
                     PySequence_Fast_GET_SIZE(all), of.n_met);
        Py_CLEAR(made);
    }
    Py_DECREF(all);
    return made;
}

static int tree_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((const tree_object *)object)->value);
    return 0;
}

/* No tp_clear: a tree is as immutable as a tuple.  Its cycles go through the objects
 * that it holds, and those can be cleared. */
static void tree_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    Py_XDECREF(((tree_object *)object)->value);
    pli_object_free(object);
}

static PyMethodDef tree_methods[] = {
    {"unflatten", tree_unflatten, METH_O,
     "unflatten($self, leaves, /)\n--\n\nReturn the value with these leaves."},
    {"path", tree_path, METH_O,
     "path($self, index, /)\n--\n\nReturn the path of a leaf: \"[0]['mask'].logits\"."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tree_slots[] = {
    {Py_tp_dealloc, tree_dealloc},
    {Py_tp_traverse, tree_traverse},
    {Py_tp_methods, tree_methods},
    {Py_tp_doc, "The nesting of a value; made by flatten()."},
    {0, NULL},
};

PLI_TYPE(tree, Tree, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION);

/* ---- flatten() ------------------------------------------------------------------ */

typedef struct collecting {
    pli_walk walk;
    PyObject *leaves;
} collecting;

static int collect(pli_walk *walk, int kind, PyObject *const *values,
                   const pli_step *at, PyObject **out)
{
    (void)at;
    (void)out;
    if (kind < PLI_CONSTANT &&
        PyList_Append(((collecting *)walk)->leaves, values[0]) != 0)
        return -1;
    return kind <= PLI_CONSTANT;
}

PyObject *pli_flatten(PyObject *module, PyObject *value)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    if (pli_needs_torch(state) != 0)
        return NULL;
    collecting self = {.walk = {.state = state, .n = 1, .meet = collect},
                       .leaves = PyList_New(0)};
    PyObject *tree = NULL;
    if (self.leaves != NULL && pli_look(&self.walk, value) == 0)
        tree = pli_tree_new(state, value, 1);
    PyObject *result = tree != NULL ? PyTuple_Pack(2, tree, self.leaves) : NULL;
    Py_XDECREF(tree);
    Py_XDECREF(self.leaves);
    return result;
}
