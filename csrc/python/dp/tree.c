/* tree.c - the walk through nested containers, and paceline._native.Tree. */
#include "tree.h"

/* ---- the walk ------------------------------------------------------------------- */

static PyObject *close_with(const pli_walk *walk, const pli_container *part,
                            PyObject *items)
{
    if (walk->mode == PLI_LOOK)
        return Py_NewRef(Py_None);
    if (walk->mode == PLI_UNMARK && part->kind == PLI_MARK)
        return Py_NewRef(PyTuple_GET_ITEM(items, 0));
    return pli_close(walk->state, part, items);
}

/* Walks the children of opened parts; `column` has room for one child of each part. */
static PyObject *walk_children(pli_walk *walk, /* NOLINT(misc-no-recursion) */
                               const pli_container *parts, PyObject **column,
                               const pli_step *at)
{
    const Py_ssize_t n_children = PyTuple_GET_SIZE(parts[0].children);
    PyObject *items = PyTuple_New(n_children);
    for (Py_ssize_t i = 0; items != NULL && i < n_children; i++) {
        const pli_step below = {.parent = at, .container = parts, .child = i};
        for (Py_ssize_t k = 0; k < walk->n; k++)
            column[k] = PyTuple_GET_ITEM(parts[k].children, i);
        pli_tuple_put(&items, i, pli_walk_values(walk, column, &below));
    }
    PyObject *made = items != NULL ? close_with(walk, parts, items) : NULL;
    Py_XDECREF(items);
    return made;
}

static PyObject *walk_containers(pli_walk *walk, /* NOLINT(misc-no-recursion) */
                                 pli_kind kind, PyObject *const *values,
                                 const pli_step *at)
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
    PyObject *made = NULL;
    if (status == 0)
        made = walk_children(walk, parts, (PyObject **)(parts + walk->n), at);
    for (Py_ssize_t k = 0; k < walk->n; k++)
        pli_container_drop(&parts[k]);
    PyMem_Free(parts);
    return made;
}

PyObject *pli_walk_values(pli_walk *walk, /* NOLINT(misc-no-recursion) */
                          PyObject *const *values, const pli_step *at)
{
    PyObject *made = NULL;
    const int kind = pli_kind_of(walk->state, values[0]);
    const int met = kind >= 0 ? walk->meet(walk, kind, values, at, &made) : -1;
    if (met != 0)
        return met > 0 && made == NULL ? Py_NewRef(Py_None) : made;
    if (Py_EnterRecursiveCall(" while looking for tensors in nested containers"))
        return NULL;
    made = walk_containers(walk, (pli_kind)kind, values, at);
    Py_LeaveRecursiveCall();
    return made;
}

int pli_look(pli_walk *walk, PyObject *value)
{
    PyObject *none = pli_walk_values(walk, &value, NULL);
    Py_XDECREF(none);
    return none != NULL ? 0 : -1;
}

typedef struct looking {
    pli_walk walk;
    pli_contents *contents;
} looking;

static int note(pli_walk *walk, int kind, PyObject *const *values, const pli_step *at,
                PyObject **out)
{
    pli_contents *contents = ((looking *)walk)->contents;
    (void)at;
    (void)out;
    contents->has_leaf |= kind < PLI_CONSTANT;
    contents->has_value |= kind == PLI_CONSTANT && values[0] != Py_None;
    contents->has_mark |= kind == PLI_MARK;
    return kind <= PLI_CONSTANT;
}

int pli_look_inside(const module_state *state, PyObject *value, pli_contents *contents)
{
    looking self = {.walk = {.state = state, .n = 1, .meet = note},
                    .contents = contents};
    return pli_look(&self.walk, value);
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

/* A dataclass without leaf or mark goes whole: the user's forward may write to it or
 * check its identity (an enumeration).  Returns 1, 0 or -1. */
static int is_object(const module_state *state, int kind, PyObject *value)
{
    pli_contents contents = {0};
    if (kind != PLI_DATACLASS)
        return kind == PLI_CONSTANT;
    if (pli_look_inside(state, value, &contents) != 0)
        return -1;
    return !contents.has_leaf && !contents.has_mark;
}

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
    const int is_whole = is_object(walk->state, kind, values[0]);
    if (kind > PLI_CONSTANT && is_whole <= 0)
        return is_whole;
    if (is_whole)
        *out = Py_NewRef(values[0]);
    else if (self->n_met < PySequence_Fast_GET_SIZE(self->leaves))
        *out = Py_NewRef(PySequence_Fast_GET_ITEM(self->leaves, self->n_met));
    self->n_met += !is_whole; /* too few are an error at the end */
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
    PyObject *made = pli_walk_values(&self.walk, &value, NULL);
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
