/* scatter.c - paceline._native.Scattered: a call's arguments, by replica.
 *
 * scatter() walks the arguments once and decides for each leaf whether it is split.
 * leaves() cuts the parts of a replica, with the arithmetic of replicas/split.h.
 */
#include "tree.h"

#include <stddef.h>

#include <structmember.h>

/* How a leaf goes to the replicas. */
typedef struct leaf_way {
    enum {
        PLI_SPLIT,
        PLI_PACK_FIRST, /* the first leaf of a PackedSequence, which is split */
        PLI_PACK_MORE,
        PLI_WHOLE,
        PLI_EACH /* the same number for each replica */
    } way;
    Py_ssize_t n_rows; /* if it is split */
} leaf_way;

typedef struct scattered_object {
    PyObject_HEAD
    PyObject *call;   /* (inputs, kwargs), as passed */
    PyObject *tree;   /* of the call, without marks */
    PyObject *leaves; /* a list */
    leaf_way *ways;   /* by leaf */
    Py_ssize_t n_ways_allocated;
    PyObject *packs; /* a list: each PackedSequence, later the list of its parts */
    PyObject *sizes; /* a tuple of int */
    Py_ssize_t dim;
    Py_ssize_t n_rows;     /* the fewest of a leaf that is split */
    Py_ssize_t n_replicas; /* the maximum */
    Py_ssize_t n_parts;
    int has_each; /* some leaf has one row for each replica */
} scattered_object;

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

static int refuse_rows(const scattered_object *self, Py_ssize_t one, Py_ssize_t other)
{
    const Py_ssize_t first = one < other ? one : other, second = one + other - first;
    PyObject *path = path_of(self, second);
    if (path != NULL)
        (void)refuse(self, first,
                     "has %zd rows along dimension %zd, but %U has %zd: all tensors "
                     "are split by rows, and must have the same number of rows, or "
                     "multiples of the smallest; if each replica needs one whole, pass "
                     "paceline.replicate(x)",
                     self->ways[first].n_rows, self->dim, path,
                     self->ways[second].n_rows);
    Py_XDECREF(path);
    return -1;
}

/* A split must show: a codebook may by chance have a multiple of the rows. */
static int warn_of_multiple(const scattered_object *self, Py_ssize_t leaf)
{
    PyObject *path = path_of(self, leaf);
    const int status =
        path == NULL ? -1
                     : PyErr_WarnFormat(
                           PyExc_UserWarning, 1,
                           "%U has %zd rows for each row of the batch: each replica "
                           "gets those that belong to its rows; if each needs all "
                           "of them, pass paceline.replicate(x)",
                           path, self->ways[leaf].n_rows / self->n_rows);
    Py_XDECREF(path);
    return status;
}

/* Reads the rows of a leaf that will be split; a leaf without dimensions goes whole. */
static int read_rows(const module_state *state, const scattered_object *self,
                     Py_ssize_t leaf)
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
        self->ways[leaf].way = PLI_WHOLE;
        return 0;
    }
    const int dim = pli_shape_dim(&shape, self->dim);
    if (dim < 0)
        return refuse_dims(self, leaf, &shape);
    self->ways[leaf].n_rows = shape.sizes[dim];
    return 0;
}

static int is_batch(const scattered_object *self, Py_ssize_t leaf)
{
    return self->ways[leaf].way <= PLI_PACK_FIRST;
}

/* Finds out whether leaves repeat one number for each replica.  Programs written for
 * torch's class, which splits every tensor separately, pass a number to each replica
 * like this: `n.expand(n_replicas, -1)`.  If one with as many rows has more numbers, or
 * different ones, they are split by rows: else replicas and the plain module would
 * differ. */
static int find_each(const module_state *state, scattered_object *self)
{
    PyObject *dim = PyLong_FromSsize_t(self->dim);
    int is_each = dim != NULL ? 1 : -1;
    for (Py_ssize_t i = 0; is_each == 1 && i < PyList_GET_SIZE(self->leaves); i++) {
        PyObject *args[] = {PyList_GET_ITEM(self->leaves, i), dim};
        if (is_batch(self, i) && self->ways[i].n_rows == self->n_replicas)
            is_each = self->ways[i].way == PLI_SPLIT
                          ? pli_is_true(
                                PyObject_Vectorcall(state->repeats_row, args, 2, NULL))
                          : 0;
    }
    Py_XDECREF(dim);
    for (Py_ssize_t i = 0; is_each == 1 && i < PyList_GET_SIZE(self->leaves); i++)
        if (is_batch(self, i) && self->ways[i].n_rows == self->n_replicas) {
            self->ways[i].way = PLI_EACH;
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

static int read_all_rows(const module_state *state, scattered_object *self)
{
    Py_ssize_t n_packs = 0;
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_GET_SIZE(self->leaves); i++) {
        if (self->ways[i].way == PLI_SPLIT)
            status = read_rows(state, self, i);
        else if (self->ways[i].way == PLI_PACK_FIRST)
            status = read_packed(state, PyList_GET_ITEM(self->packs, n_packs++),
                                 &self->ways[i].n_rows);
    }
    return status;
}

/* Sets n_rows, and returns the first leaf with so few; -1 if no leaf is split. */
static Py_ssize_t find_fewest(scattered_object *self)
{
    Py_ssize_t fewest = -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->leaves); i++)
        if (is_batch(self, i) &&
            (fewest < 0 || self->ways[i].n_rows < self->ways[fewest].n_rows))
            fewest = i;
    self->n_rows = fewest >= 0 ? self->ways[fewest].n_rows : 0;
    return fewest;
}

/* Finds the first leaf that is split and whose rows are no multiple of n_rows, or, if
 * `is_strict`, are not n_rows; returns -1 if no leaf is so. */
static Py_ssize_t find_other(const scattered_object *self, int is_strict)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->leaves); i++) {
        const Py_ssize_t n = self->ways[i].n_rows;
        if (is_batch(self, i) && n != self->n_rows &&
            (is_strict || self->n_rows == 0 || n % self->n_rows != 0))
            return i;
    }
    return -1;
}

static int count_rows(const module_state *state, scattered_object *self)
{
    if (read_all_rows(state, self) != 0)
        return -1;
    (void)find_fewest(self);
    if (find_other(self, 1) < 0)
        return 0;
    if (find_each(state, self) != 0)
        return -1;
    const Py_ssize_t fewest = find_fewest(self);
    Py_ssize_t other = find_other(self, 0);
    if (other >= 0)
        return refuse_rows(self, fewest, other);
    other = find_other(self, 1);
    return other >= 0 ? warn_of_multiple(self, other) : 0;
}

/* ---- chunks --------------------------------------------------------------------- */

/* The rows of replica k among `n_rows`, a multiple of the fewest. */
static pli_rows rows_of(const scattered_object *self, Py_ssize_t n_rows, Py_ssize_t k)
{
    pli_rows rows = pli_split_rows(self->n_rows, self->n_parts, k);
    const Py_ssize_t times = self->n_rows > 0 ? n_rows / self->n_rows : 1;
    return (pli_rows){.begin = rows.begin * times, .n = rows.n * times};
}

static PyObject *sizes_of(const scattered_object *self, Py_ssize_t n_rows)
{
    PyObject *sizes = PyTuple_New(self->n_parts);
    for (Py_ssize_t k = 0; sizes != NULL && k < self->n_parts; k++)
        pli_tuple_put(&sizes, k, PyLong_FromLongLong(rows_of(self, n_rows, k).n));
    return sizes;
}

static int split_packs(const module_state *state, const scattered_object *self)
{
    Py_ssize_t n_packs = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->leaves); i++) {
        if (self->ways[i].way != PLI_PACK_FIRST)
            continue;
        PyObject *sizes = sizes_of(self, self->ways[i].n_rows), *parts = NULL;
        PyObject *args[] = {PyList_GET_ITEM(self->packs, n_packs), sizes};
        if (sizes != NULL)
            parts = PyObject_Vectorcall(state->split_packed, args, 2, NULL);
        Py_XDECREF(sizes);
        if (parts == NULL || PyList_SetItem(self->packs, n_packs++, parts) != 0)
            return -1;
    }
    return 0;
}

static int divide(const module_state *state, scattered_object *self)
{
    /* A single replica takes whatever the module takes. */
    if (self->n_replicas > 1 && count_rows(state, self) != 0)
        return -1;
    self->n_parts = pli_split_parts(self->n_rows, self->n_replicas);
    self->sizes = sizes_of(self, self->n_rows);
    if (self->sizes == NULL)
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
            (i == 0 || (at < n && self->ways[at].way == PLI_PACK_MORE)))
            PyList_SET_ITEM(leaves, at++, Py_NewRef(tensor));
    }
    return at;
}

static PyObject *leaves_of(const scattered_object *self, Py_ssize_t k)
{
    const Py_ssize_t n = PyList_GET_SIZE(self->leaves);
    if (self->n_parts == 1 && !self->has_each)
        return PyList_GetSlice(self->leaves, 0, n);
    PyObject *leaves = PyList_New(n);
    Py_ssize_t n_packs = 0;
    for (Py_ssize_t i = 0; leaves != NULL && i < n;) {
        PyObject *leaf = PyList_GET_ITEM(self->leaves, i);
        const int way = self->ways[i].way;
        if (way == PLI_PACK_FIRST) {
            PyObject *parts = PyList_GET_ITEM(self->packs, n_packs++);
            i = put_packed(self, leaves, i, PyList_GET_ITEM(parts, k));
            continue;
        }
        pli_rows rows = {.begin = k, .n = 1};
        if (way == PLI_SPLIT)
            rows = rows_of(self, self->ways[i].n_rows, k);
        pli_list_put(&leaves, i,
                     way == PLI_WHOLE
                         ? Py_NewRef(leaf)
                         : pli_leaf_narrow(leaf, self->dim, rows.begin, rows.n));
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
        const size_t n = 2 * (size_t)i + 16;
        leaf_way *ways = PyMem_Realloc(self->ways, n * sizeof *ways);
        if (ways == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->ways = ways;
        self->n_ways_allocated = (Py_ssize_t)n;
    }
    const pli_container *pack = NULL;
    leaf_way *way = &self->ways[i];
    for (*way = (leaf_way){0}; at != NULL && way->way != PLI_WHOLE; at = at->parent) {
        if (at->container->kind == PLI_MARK) {
            way->way = PLI_WHOLE;
        } else if (at->container->kind == PLI_PACKED) {
            way->way = at->child == 0 ? PLI_PACK_FIRST : PLI_PACK_MORE;
            pack = at->container;
        }
    }
    return pack != NULL && way->way == PLI_PACK_FIRST
               ? PyList_Append(self->packs, pack->value)
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
