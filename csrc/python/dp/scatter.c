/* scatter.c - paceline._native.Scattered: a call's arguments, by replica.
 *
 * scatter() walks the arguments once and decides for each leaf whether it is split.
 * leaves() cuts the parts of a replica, with the arithmetic of replicas/split.h.
 */
#include "tree.h"

#include <stddef.h>

#include <structmember.h>

typedef struct scattered_object {
    PyObject_HEAD
    PyObject *call;   /* (inputs, kwargs), as passed */
    PyObject *tree;   /* of the call, without marks */
    PyObject *leaves; /* a list */
    char *ways;       /* by leaf, as in the enum below */
    Py_ssize_t n_ways_allocated;
    PyObject *packs; /* a list: each PackedSequence, later the list of its parts */
    PyObject *sizes; /* a tuple of int */
    Py_ssize_t dim;
    Py_ssize_t n_rows;
    Py_ssize_t n_replicas; /* the maximum */
    Py_ssize_t n_parts;
    int has_each; /* some leaf has one row for each replica */
} scattered_object;

/* How a leaf goes to the replicas. */
enum {
    PLI_SPLIT,
    PLI_WHOLE,
    PLI_PACK_FIRST, /* the first leaf of a PackedSequence */
    PLI_PACK_MORE,
    PLI_EACH /* the same number for each replica */
};

/* A leaf that is split, and its rows. */
typedef struct batch {
    Py_ssize_t leaf; /* -1: none */
    Py_ssize_t n_rows;
} batch;

/* ---- how many rows -------------------------------------------------------------- */

static PyObject *path_of(const scattered_object *self, Py_ssize_t leaf)
{
    const module_state *state = state_of_type(Py_TYPE((const PyObject *)self));
    return pli_path_of_leaf(state, self->call, leaf, NULL);
}

/* Raises ValueError: the path of a leaf, then the message. */
static int refuse(const scattered_object *self, Py_ssize_t leaf, const char *format,
                  ...)
{
    va_list args;
    va_start(args, format);
    PyObject *path = path_of(self, leaf);
    pli_raise_at(PyExc_ValueError, path, format, args);
    va_end(args);
    return -1;
}

static int refuse_dims(const scattered_object *self, Py_ssize_t leaf,
                       const pli_shape *shape)
{
    PyObject *text = pli_shape_text(shape);
    if (text != NULL)
        (void)refuse(self, leaf,
                     "has shape %U and no dimension %zd to split it along: if each "
                     "replica needs it whole, pass paceline.replicate(x)",
                     text, self->dim);
    Py_XDECREF(text);
    return -1;
}

static int refuse_rows(const scattered_object *self, const batch *first,
                       const batch *other)
{
    PyObject *path = path_of(self, other->leaf);
    if (path != NULL)
        (void)refuse(self, first->leaf,
                     "has %zd rows along dimension %zd, but %U has %zd: all tensors "
                     "are split by rows and must have the same number of rows; if each "
                     "replica needs one whole, pass paceline.replicate(x)",
                     first->n_rows, self->dim, path, other->n_rows);
    Py_XDECREF(path);
    return -1;
}

/* Reads the rows of a leaf that will be split; a leaf without dimensions goes whole. */
static int read_rows(const module_state *state, const scattered_object *self,
                     Py_ssize_t leaf, Py_ssize_t *n_rows)
{
    pli_shape shape;
    if (pli_leaf_shape(state, PyList_GET_ITEM(self->leaves, leaf), &shape) != 0)
        return -1;
    if (!shape.is_strided)
        return refuse(self, leaf,
                      "is a sparse or nested tensor, which cannot be split by rows: "
                      "make it dense, or pass paceline.replicate(x) if each replica "
                      "needs it whole");
    if (shape.n_dims == 0) {
        self->ways[leaf] = PLI_WHOLE;
        return 0;
    }
    const int dim = pli_shape_dim(&shape, self->dim);
    if (dim < 0)
        return refuse_dims(self, leaf, &shape);
    *n_rows = shape.sizes[dim];
    return 0;
}

/* Finds out whether a leaf repeats one number for each replica.  Programs written for
 * torch's class, which splits every tensor separately, pass a number to each replica
 * like this: `n.expand(n_replicas, -1)`.  A leaf with more numbers, or different ones,
 * is split by rows: else replicas and the plain module would differ. */
static int take_each(const module_state *state, scattered_object *self,
                     const batch *rows)
{
    if (rows->n_rows != self->n_replicas || self->ways[rows->leaf] != PLI_SPLIT)
        return 0;
    PyObject *dim = PyLong_FromSsize_t(self->dim);
    PyObject *args[] = {PyList_GET_ITEM(self->leaves, rows->leaf), dim};
    const int is_each = pli_is_true(
        dim != NULL ? PyObject_Vectorcall(state->repeats_row, args, 2, NULL) : NULL);
    Py_XDECREF(dim);
    if (is_each == 1) {
        self->ways[rows->leaf] = PLI_EACH;
        self->has_each = 1;
    }
    return is_each < 0 ? -1 : 0;
}

static int read_packed(const module_state *state, PyObject *packed, Py_ssize_t *n_rows)
{
    PyObject *number = PyObject_CallOneArg(state->packed_rows, packed);
    *n_rows = number != NULL ? PyLong_AsSsize_t(number) : -1;
    Py_XDECREF(number);
    return *n_rows < 0 ? -1 : 0;
}

/* Fills `first` with the first leaf that is split, and `other` with the next one whose
 * number of rows differs.  With `takes_each`, leaves with one number for each replica
 * are set apart. */
static int read_batch(const module_state *state, scattered_object *self, int takes_each,
                      batch *first, batch *other)
{
    Py_ssize_t n_packs = 0;
    *first = *other = (batch){.leaf = -1};
    for (batch at = {.leaf = 0}; at.leaf < PyList_GET_SIZE(self->leaves); at.leaf++) {
        const char *way = &self->ways[at.leaf];
        int status = 0;
        if (*way == PLI_PACK_FIRST)
            status =
                read_packed(state, PyList_GET_ITEM(self->packs, n_packs++), &at.n_rows);
        else if (*way == PLI_SPLIT)
            status = read_rows(state, self, at.leaf, &at.n_rows);
        if (status == 0 && takes_each)
            status = take_each(state, self, &at);
        if (status != 0)
            return -1;
        if (*way != PLI_SPLIT && *way != PLI_PACK_FIRST)
            continue;
        if (first->leaf < 0)
            *first = at;
        else if (other->leaf < 0 && at.n_rows != first->n_rows)
            *other = at;
    }
    return 0;
}

static int count_rows(const module_state *state, scattered_object *self, batch *first)
{
    batch other;
    if (read_batch(state, self, 0, first, &other) != 0)
        return -1;
    if (other.leaf >= 0 && read_batch(state, self, 1, first, &other) != 0)
        return -1;
    return other.leaf >= 0 ? refuse_rows(self, first, &other) : 0;
}

/* ---- chunks --------------------------------------------------------------------- */

static int fill_sizes(scattered_object *self)
{
    self->sizes = PyTuple_New(self->n_parts);
    for (Py_ssize_t k = 0; self->sizes != NULL && k < self->n_parts; k++) {
        const pli_rows rows = pli_split_rows(self->n_rows, self->n_parts, k);
        pli_tuple_put(&self->sizes, k, PyLong_FromLongLong(rows.n));
    }
    return self->sizes != NULL ? 0 : -1;
}

static int split_packs(const module_state *state, const scattered_object *self)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->packs); i++) {
        PyObject *args[] = {PyList_GET_ITEM(self->packs, i), self->sizes};
        PyObject *parts = PyObject_Vectorcall(state->split_packed, args, 2, NULL);
        if (parts == NULL || PyList_SetItem(self->packs, i, parts) != 0)
            return -1;
    }
    return 0;
}

static int divide(const module_state *state, scattered_object *self)
{
    batch first = {.leaf = -1};
    /* A single replica takes whatever the module takes. */
    if (self->n_replicas > 1 && count_rows(state, self, &first) != 0)
        return -1;
    self->n_rows = first.n_rows;
    self->n_parts = pli_split_parts(first.n_rows, self->n_replicas);
    if (fill_sizes(self) != 0)
        return -1;
    return self->n_parts > 1 || self->has_each ? split_packs(state, self) : 0;
}

/* ---- a replica's leaves --------------------------------------------------------- */

/* Puts the tensors of a PackedSequence's part into `leaves` from `at` on.  Puts as many
 * as the whole has, which may lack the unsorted indices. */
static Py_ssize_t put_packed(const scattered_object *self, PyObject *leaves,
                             Py_ssize_t at, PyObject *part)
{
    const Py_ssize_t n = PyList_GET_SIZE(leaves);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part); i++) {
        PyObject *tensor = PyTuple_GET_ITEM(part, i);
        if (tensor != Py_None &&
            (i == 0 || (at < n && self->ways[at] == PLI_PACK_MORE)))
            PyList_SET_ITEM(leaves, at++, Py_NewRef(tensor));
    }
    return at;
}

static PyObject *leaves_of(const scattered_object *self, Py_ssize_t k)
{
    const Py_ssize_t n = PyList_GET_SIZE(self->leaves);
    const pli_rows rows = pli_split_rows(self->n_rows, self->n_parts, k);
    if (self->n_parts == 1 && !self->has_each)
        return PyList_GetSlice(self->leaves, 0, n);
    PyObject *leaves = PyList_New(n);
    Py_ssize_t n_packs = 0;
    for (Py_ssize_t i = 0; leaves != NULL && i < n;) {
        PyObject *leaf = PyList_GET_ITEM(self->leaves, i);
        if (self->ways[i] == PLI_PACK_FIRST) {
            PyObject *parts = PyList_GET_ITEM(self->packs, n_packs++);
            i = put_packed(self, leaves, i, PyList_GET_ITEM(parts, k));
            continue;
        }
        const int is_each = self->ways[i] == PLI_EACH;
        pli_list_put(&leaves, i,
                     self->ways[i] == PLI_WHOLE
                         ? Py_NewRef(leaf)
                         : pli_leaf_narrow(leaf, self->dim, is_each ? k : rows.begin,
                                           is_each ? 1 : rows.n));
        i++;
    }
    return leaves;
}

static PyObject *scattered_leaves(PyObject *object, PyObject *number)
{
    PLI_ENTER(object);
    const scattered_object *self = (const scattered_object *)object;
    const Py_ssize_t k = PyNumber_AsSsize_t(number, PyExc_IndexError);
    if (k == -1 && PyErr_Occurred())
        return NULL;
    if (k < 0 || k >= self->n_parts)
        return PyErr_Format(PyExc_IndexError, "replica %zd: %zd take part", k,
                            self->n_parts);
    return leaves_of(self, k);
}

/* ---- scatter() ------------------------------------------------------------------ */

typedef struct sorting {
    pli_walk walk;
    scattered_object *scattered;
} sorting;

/* Stores how a leaf goes to the replicas, by the containers around it. */
static int keep_way(scattered_object *self, const pli_step *at)
{
    const Py_ssize_t i = PyList_GET_SIZE(self->leaves);
    if (i == self->n_ways_allocated) {
        char *ways = PyMem_Realloc(self->ways, 2 * (size_t)i + 16);
        if (ways == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->ways = ways;
        self->n_ways_allocated = 2 * i + 16;
    }
    const pli_container *pack = NULL;
    self->ways[i] = PLI_SPLIT;
    for (; at != NULL && self->ways[i] != PLI_WHOLE; at = at->parent) {
        if (at->container->kind == PLI_MARK) {
            self->ways[i] = PLI_WHOLE;
        } else if (at->container->kind == PLI_PACKED) {
            self->ways[i] = at->child == 0 ? PLI_PACK_FIRST : PLI_PACK_MORE;
            pack = at->container;
        }
    }
    return self->ways[i] == PLI_PACK_FIRST ? PyList_Append(self->packs, pack->value)
                                           : 0;
}

static int sort_value(pli_walk *walk, int kind, PyObject *const *values,
                      const pli_step *at, PyObject **out)
{
    scattered_object *self = ((sorting *)walk)->scattered;
    (void)out;
    if (kind < PLI_CONSTANT &&
        (keep_way(self, at) != 0 || PyList_Append(self->leaves, values[0]) != 0))
        return -1;
    return kind <= PLI_CONSTANT;
}

static int walk_call(const module_state *state, scattered_object *self)
{
    sorting all = {.walk = {.state = state, .n = 1, .meet = sort_value},
                   .scattered = self};
    self->leaves = PyList_New(0);
    self->packs = PyList_New(0);
    if (self->leaves == NULL || self->packs == NULL)
        return -1;
    return pli_look(&all.walk, self->call);
}

PyObject *pli_scatter(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    if (n_args != 4 || !PyTuple_CheckExact(args[0]) || !PyDict_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError,
                            "scatter(inputs: tuple, kwargs: dict, n: int, dim: int)");
    const Py_ssize_t n = PyLong_AsSsize_t(args[2]);
    const Py_ssize_t dim = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred() || pli_needs_torch(state) != 0)
        return NULL;
    if (n < 1)
        return PyErr_Format(PyExc_ValueError, "scatter over %zd replicas", n);
    PyTypeObject *type = state->scattered_type;
    scattered_object *self = (scattered_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->dim = dim;
    self->n_replicas = n;
    self->call = PyTuple_Pack(2, args[0], args[1]);
    self->tree = self->call != NULL ? pli_tree_new(state, self->call, 0) : NULL;
    if (self->tree == NULL || walk_call(state, self) != 0 || divide(state, self) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* ---- life ----------------------------------------------------------------------- */

static int scattered_traverse(PyObject *object, visitproc visit, void *arg)
{
    const scattered_object *self = (const scattered_object *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->call);
    Py_VISIT(self->tree);
    Py_VISIT(self->leaves);
    Py_VISIT(self->packs);
    return 0;
}

/* No tp_clear, as in Tree: nothing here changes after scatter(). */
static void scattered_dealloc(PyObject *object)
{
    scattered_object *self = (scattered_object *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->call);
    Py_XDECREF(self->tree);
    Py_XDECREF(self->leaves);
    Py_XDECREF(self->packs);
    Py_XDECREF(self->sizes);
    PyMem_Free(self->ways);
    pli_object_free(object);
}

static PyMethodDef scattered_methods[] = {
    {"leaves", scattered_leaves, METH_O,
     "leaves($self, k, /)\n--\n\nReturn the tensors and arrays of replica k."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef scattered_members[] = {
    {"tree", T_OBJECT_EX, offsetof(scattered_object, tree), READONLY,
     "The nesting of (inputs, kwargs), without marks."},
    {"sizes", T_OBJECT_EX, offsetof(scattered_object, sizes), READONLY,
     "The rows of each replica that takes part."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot scattered_slots[] = {
    {Py_tp_dealloc, scattered_dealloc},
    {Py_tp_traverse, scattered_traverse},
    {Py_tp_methods, scattered_methods},
    {Py_tp_members, scattered_members},
    {Py_tp_doc, "A call's arguments by replica; made by scatter()."},
    {0, NULL},
};

PLI_TYPE(scattered, Scattered, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION);
