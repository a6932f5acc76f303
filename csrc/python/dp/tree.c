/* tree.c - the walk through nested containers, and paceline._native.Tree. */
#include "tree.h"

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

/* Notes what a container holds; containers in it become pending. */
static int look_at(const module_state *state, PyObject *container, PyObject **met,
                   PyObject *pending, pli_contents *contents)
{
    pli_container self;
    int status =
        pli_open(state, container, (pli_kind)pli_kind_of(state, container), &self);
    const Py_ssize_t n = status == 0 ? PyTuple_GET_SIZE(self.children) : 0;
    for (Py_ssize_t i = 0; status == 0 && !contents->has_leaf && i < n; i++) {
        PyObject *value = PyTuple_GET_ITEM(self.children, i);
        const int kind = pli_kind_of(state, value);
        contents->has_leaf |= kind >= 0 && kind < PLI_CONSTANT;
        contents->has_value |= kind == PLI_CONSTANT && value != Py_None;
        contents->has_mark |= kind == PLI_MARK;
        status = kind < 0 ? -1 : 0;
        if (kind > PLI_CONSTANT)
            status = add_pending(value, met, pending);
    }
    pli_container_drop(&self);
    return status;
}

/* Without recursion: any number of objects may be linked. */
int pli_look_inside(const module_state *state, PyObject *container,
                    pli_contents *contents)
{
    PyObject *met = NULL, *pending = PyList_New(0);
    int status = pending != NULL ? PyList_Append(pending, container) : -1;
    for (Py_ssize_t i = 0;
         status == 0 && !contents->has_leaf && i < PyList_GET_SIZE(pending); i++)
        status = look_at(state, PyList_GET_ITEM(pending, i), &met, pending, contents);
    Py_XDECREF(pending);
    Py_XDECREF(met);
    return status;
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
    return pli_close(walk->state, part, items);
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
                                 pli_kind kind, PyObject *const *values,
                                 PyObject *entry, const pli_step *at)
{
    pli_container *parts =
        PyMem_Calloc((size_t)walk->n, sizeof *parts + sizeof *values);
    if (parts == NULL)
        return PyErr_NoMemory();
    int status = 0;
    for (Py_ssize_t k = 0; status == 0 && k < walk->n; k++) {
        status = pli_open(walk->state, values[k], kind, &parts[k]);
        if (status == 0 && k > 0)
            status = walk->align(parts, k, at);
    }
    if (status == 0 && walk->mode != PLI_LOOK)
        status = pli_begin(walk->state, parts);
    if (status == 0 && parts[0].made != NULL)
        status = PyList_SetItem(entry, walk->n, Py_NewRef(parts[0].made));
    PyObject *made = NULL;
    if (status == 0)
        made = walk_children(walk, parts, (PyObject **)(parts + walk->n), at);
    if (made != NULL && PyList_SetItem(entry, walk->n, Py_NewRef(made)) != 0)
        Py_CLEAR(made);
    for (Py_ssize_t k = 0; k < walk->n; k++)
        pli_container_drop(&parts[k]);
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
        made = walk_containers(walk, (pli_kind)kind, values, entry, at);
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

/* `value` with its leaves, in order, replaced by those of a list or tuple. */
static PyObject *with_leaves(const module_state *state, PyObject *value,
                             PyObject *leaves, int keeps_marks)
{
    replacing self = {.walk = {.state = state,
                               .n = 1,
                               .mode = keeps_marks ? PLI_REBUILD : PLI_UNMARK,
                               .meet = replace},
                      .leaves = leaves};
    PyObject *made = pli_walk_values(&self.walk, &value);
    if (made != NULL && self.n_met != PySequence_Fast_GET_SIZE(leaves)) {
        PyErr_Format(PyExc_ValueError, "unflatten: %zd leaves for a tree of %zd",
                     PySequence_Fast_GET_SIZE(leaves), self.n_met);
        Py_CLEAR(made);
    }
    return made;
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
    PyObject *value = NULL;
    if (all != NULL)
        value = with_leaves(state_of(object), self->value, all, self->keeps_marks);
    Py_XDECREF(all);
    return value;
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
