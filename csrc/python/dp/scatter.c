/* scatter.c - a call's arguments, by replica.
 *
 * scatter() walks the arguments once, decides for each leaf whether it is split, and
 * cuts the parts: whole rows, in order and as evenly as possible.
 *
 *     rows 0 .. 6 over 3 replicas:   0 1 2 | 3 4 | 5 6      the larger parts first
 */
#include "core/alloc.h"
#include "tree.h"

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
    int dim;           /* along which, counted from the front */
    PyObject *packed;  /* the PackedSequence of a PLI_PACK_FIRST; in `packs` */
} leaf_way;

typedef struct scattering {
    pli_walk walk;
    PyObject *call;   /* (inputs, kwargs), as passed */
    PyObject *leaves; /* a list */
    PyObject *packs;  /* a list that owns each PackedSequence that is split */
    leaf_way *ways;   /* by leaf */
    size_t capacity;  /* of `ways` */
    Py_ssize_t dim;
    Py_ssize_t n_rows;     /* the fewest of a leaf that is split */
    Py_ssize_t n_replicas; /* the maximum */
    Py_ssize_t n_parts;
    int has_each; /* some leaf has one row for each replica */
} scattering;

/* ---- how many rows -------------------------------------------------------------- */

static PyObject *path_of(const scattering *self, Py_ssize_t leaf)
{
    return pli_path_of_leaf(self->walk.state, self->call, leaf, NULL);
}

static int refuse_dims(const scattering *self, Py_ssize_t leaf, const pli_shape *shape)
{
    PyObject *text = pli_shape_text(shape);
    if (text != NULL)
        (void)pli_raise_at(PyExc_ValueError, path_of(self, leaf),
                           "has shape %U and no dimension %zd to split it along: if "
                           "each replica needs it whole, pass paceline.replicate(x)",
                           text, self->dim);
    Py_XDECREF(text);
    return -1;
}

static int refuse_rows(const scattering *self, Py_ssize_t one, Py_ssize_t other)
{
    const Py_ssize_t first = one < other ? one : other, second = one + other - first;
    PyObject *path = path_of(self, second);
    if (path != NULL)
        (void)pli_raise_at(
            PyExc_ValueError, path_of(self, first),
            "has %zd rows along dimension %zd, but %U has %zd: all tensors are split "
            "by rows, and must have the same number of rows, or multiples of the "
            "smallest; if each replica needs one whole, pass paceline.replicate(x)",
            self->ways[first].n_rows, self->dim, path, self->ways[second].n_rows);
    Py_XDECREF(path);
    return -1;
}

/* A split must show: a codebook may by chance have a multiple of the rows. */
static int warn_of_multiple(const scattering *self, Py_ssize_t leaf)
{
    return pli_raise_at(PyExc_UserWarning, path_of(self, leaf),
                        "has %zd rows for each row of the batch: each replica gets "
                        "those that belong to its rows; if each needs all of them, "
                        "pass paceline.replicate(x)",
                        self->ways[leaf].n_rows / self->n_rows);
}

/* Reads the rows of a leaf that will be split; a leaf without dimensions goes whole. */
static int read_rows(const scattering *self, Py_ssize_t leaf)
{
    pli_shape shape;
    if (pli_leaf_shape(self->walk.state, PyList_GET_ITEM(self->leaves, leaf), &shape) !=
        0)
        return -1;
    if (!shape.is_strided)
        return pli_raise_at(
            PyExc_ValueError, path_of(self, leaf),
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
    self->ways[leaf].dim = dim;
    self->ways[leaf].n_rows = shape.sizes[dim];
    return 0;
}

static int read_packed(const scattering *self, Py_ssize_t leaf)
{
    leaf_way *of = &self->ways[leaf];
    PyObject *number = PyObject_CallOneArg(self->walk.state->packed_rows, of->packed);
    of->n_rows = number != NULL ? PyLong_AsSsize_t(number) : -1;
    Py_XDECREF(number);
    return of->n_rows < 0 ? -1 : 0;
}

static int is_batch(const scattering *self, Py_ssize_t leaf)
{
    return self->ways[leaf].way <= PLI_PACK_FIRST;
}

/* Finds out whether leaves repeat one number for each replica.  Programs written for
 * torch's class, which splits every tensor separately, pass a number to each replica
 * like this: `n.expand(n_replicas, -1)`.  If one with as many rows has more numbers, or
 * different ones, they are split by rows: else replicas and the plain module would
 * differ. */
static int find_each(scattering *self)
{
    PyObject *dim = PyLong_FromSsize_t(self->dim);
    int is_each = dim != NULL ? 1 : -1;
    for (Py_ssize_t i = 0; is_each == 1 && i < PyList_GET_SIZE(self->leaves); i++) {
        PyObject *args[] = {PyList_GET_ITEM(self->leaves, i), dim};
        if (is_batch(self, i) && self->ways[i].n_rows == self->n_replicas)
            is_each = self->ways[i].way == PLI_SPLIT
                          ? pli_is_true(PyObject_Vectorcall(
                                self->walk.state->repeats_row, args, 2, NULL))
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

/* Sets n_rows, and returns the first leaf with so few; -1 if no leaf is split. */
static Py_ssize_t find_fewest(scattering *self)
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
static Py_ssize_t find_other(const scattering *self, int is_strict)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->leaves); i++) {
        const Py_ssize_t n = self->ways[i].n_rows;
        if (is_batch(self, i) && n != self->n_rows &&
            (is_strict || self->n_rows == 0 || n % self->n_rows != 0))
            return i;
    }
    return -1;
}

static int count_rows(scattering *self)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->leaves); i++)
        if ((self->ways[i].way == PLI_SPLIT && read_rows(self, i) != 0) ||
            (self->ways[i].way == PLI_PACK_FIRST && read_packed(self, i) != 0))
            return -1;
    (void)find_fewest(self);
    if (find_other(self, 1) < 0)
        return 0;
    if (find_each(self) != 0)
        return -1;
    const Py_ssize_t fewest = find_fewest(self);
    Py_ssize_t other = find_other(self, 0);
    if (other >= 0)
        return refuse_rows(self, fewest, other);
    other = find_other(self, 1);
    return other >= 0 ? warn_of_multiple(self, other) : 0;
}

/* ---- chunks --------------------------------------------------------------------- */

/* The first row of part k among `n_rows`, a multiple of the fewest. */
static Py_ssize_t begin_of(const scattering *self, Py_ssize_t n_rows, Py_ssize_t k)
{
    const Py_ssize_t n_each = self->n_rows / self->n_parts;
    const Py_ssize_t n_larger = self->n_rows % self->n_parts;
    const Py_ssize_t begin = k * n_each + (k < n_larger ? k : n_larger);
    return begin > 0 ? begin * (n_rows / self->n_rows) : 0;
}

static PyObject *sizes_of(const scattering *self, Py_ssize_t n_rows)
{
    PyObject *sizes = PyTuple_New(self->n_parts);
    for (Py_ssize_t k = 0; sizes != NULL && k < self->n_parts; k++)
        pli_tuple_put(&sizes, k,
                      PyLong_FromSsize_t(begin_of(self, n_rows, k + 1) -
                                         begin_of(self, n_rows, k)));
    return sizes;
}

/* A view of some rows of a leaf: leaf[begin:end], along dimension 1 leaf[:, begin:end].
 * Of a tensor, autograd tracks it. */
static PyObject *narrow(PyObject *leaf, int dim, Py_ssize_t begin, Py_ssize_t end)
{
    if (dim == 0)
        return PySequence_GetSlice(leaf, begin, end);
    PyObject *index = PyTuple_New(dim + 1);
    for (int d = 0; index != NULL && d <= dim; d++)
        pli_tuple_put(&index, d,
                      d < dim ? PySlice_New(NULL, NULL, NULL)
                              : PyObject_CallFunction((PyObject *)&PySlice_Type, "nn",
                                                      begin, end));
    PyObject *part = index != NULL ? PyObject_GetItem(leaf, index) : NULL;
    Py_XDECREF(index);
    return part;
}

/* Cuts leaf i; `lists` has a list for each part. */
static int cut_leaf(const scattering *self, Py_ssize_t i, PyObject *lists)
{
    PyObject *leaf = PyList_GET_ITEM(self->leaves, i);
    const leaf_way *of = &self->ways[i];
    for (Py_ssize_t k = 0; k < self->n_parts; k++) {
        const Py_ssize_t begin =
            of->way == PLI_EACH ? k : begin_of(self, of->n_rows, k);
        const Py_ssize_t end =
            of->way == PLI_EACH ? k + 1 : begin_of(self, of->n_rows, k + 1);
        PyObject *part =
            of->way == PLI_WHOLE ? Py_NewRef(leaf) : narrow(leaf, of->dim, begin, end);
        if (part == NULL)
            return -1;
        PyList_SET_ITEM(PyTuple_GET_ITEM(lists, k), i, part);
    }
    return 0;
}

/* Cuts the PackedSequence whose first leaf is i.  A part has as many tensors as the
 * whole, which may lack the unsorted indices. */
static int cut_packed(const scattering *self, Py_ssize_t i, PyObject *lists)
{
    const Py_ssize_t n = PyList_GET_SIZE(self->leaves);
    PyObject *sizes = sizes_of(self, self->ways[i].n_rows), *parts = NULL;
    PyObject *args[] = {self->ways[i].packed, sizes};
    if (sizes != NULL)
        parts = PyObject_Vectorcall(self->walk.state->split_packed, args, 2, NULL);
    Py_XDECREF(sizes);
    for (Py_ssize_t k = 0; parts != NULL && k < self->n_parts; k++) {
        PyObject *part = PyList_GET_ITEM(parts, k), *list = PyTuple_GET_ITEM(lists, k);
        Py_ssize_t at = i;
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(part); j++) {
            PyObject *tensor = PyTuple_GET_ITEM(part, j);
            if (tensor != Py_None &&
                (j == 0 || (at < n && self->ways[at].way == PLI_PACK_MORE)))
                PyList_SET_ITEM(list, at++, Py_NewRef(tensor));
        }
    }
    return pli_drop(parts);
}

/* A tuple with a list of leaves for each part. */
static PyObject *cut(const scattering *self)
{
    const Py_ssize_t n = PyList_GET_SIZE(self->leaves);
    if (self->n_parts == 1 && !self->has_each)
        return PyTuple_Pack(1, self->leaves);
    PyObject *lists = PyTuple_New(self->n_parts);
    for (Py_ssize_t k = 0; lists != NULL && k < self->n_parts; k++)
        pli_tuple_put(&lists, k, PyList_New(n));
    for (Py_ssize_t i = 0; lists != NULL && i < n; i++) {
        const int way = self->ways[i].way;
        int status = 0;
        if (way == PLI_PACK_FIRST)
            status = cut_packed(self, i, lists);
        else if (way != PLI_PACK_MORE)
            status = cut_leaf(self, i, lists);
        if (status != 0)
            Py_CLEAR(lists);
    }
    return lists;
}

/* ---- scatter() ------------------------------------------------------------------ */

/* Stores how the next leaf goes to the replicas, by the containers around it. */
static int keep_way(scattering *self, const pli_step *at)
{
    const Py_ssize_t i = PyList_GET_SIZE(self->leaves);
    if (pli_check(self->walk.state, pli_grow((size_t)i, sizeof *self->ways, "arguments",
                                             &self->capacity, &self->ways)) != 0)
        return -1;
    leaf_way *way = &self->ways[i];
    for (*way = (leaf_way){0}; at != NULL && way->way != PLI_WHOLE; at = at->parent) {
        if (at->container->kind == PLI_MARK) {
            way->way = PLI_WHOLE;
        } else if (at->container->kind == PLI_PACKED) {
            way->way = at->child == 0 ? PLI_PACK_FIRST : PLI_PACK_MORE;
            way->packed = at->container->value;
        }
    }
    return way->way == PLI_PACK_FIRST ? PyList_Append(self->packs, way->packed) : 0;
}

static int sort_value(pli_walk *walk, int kind, PyObject *const *values,
                      const pli_step *at, PyObject **out)
{
    scattering *self = (scattering *)walk;
    (void)out;
    if (kind < PLI_CONSTANT &&
        (keep_way(self, at) != 0 || PyList_Append(self->leaves, values[0]) != 0))
        return -1;
    return kind <= PLI_CONSTANT;
}

/* (tree, sizes, lists of leaves) */
static PyObject *scatter(scattering *self)
{
    /* A single replica takes whatever the module takes. */
    if (pli_look(&self->walk, self->call) != 0 ||
        (self->n_replicas > 1 && count_rows(self) != 0))
        return NULL;
    const Py_ssize_t n =
        self->n_replicas < self->n_rows ? self->n_replicas : self->n_rows;
    self->n_parts = n < 1 ? 1 : n;
    PyObject *tree = pli_tree_new(self->walk.state, self->call, 0);
    PyObject *sizes = sizes_of(self, self->n_rows);
    PyObject *lists = cut(self), *all = NULL;
    if (tree != NULL && sizes != NULL && lists != NULL)
        all = PyTuple_Pack(3, tree, sizes, lists);
    Py_XDECREF(tree);
    Py_XDECREF(sizes);
    Py_XDECREF(lists);
    return all;
}

PyObject *pli_scatter(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    if (n_args != 4 || !PyTuple_CheckExact(args[0]) || !PyDict_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError,
                            "scatter(inputs: tuple, kwargs: dict, n: int, dim: int)");
    scattering self = {.walk = {.state = state, .n = 1, .meet = sort_value},
                       .n_replicas = PyLong_AsSsize_t(args[2]),
                       .dim = PyLong_AsSsize_t(args[3])};
    if (PyErr_Occurred() || pli_needs_torch(state) != 0)
        return NULL;
    if (self.n_replicas < 1)
        return PyErr_Format(PyExc_ValueError, "scatter over %zd replicas",
                            self.n_replicas);
    self.call = PyTuple_Pack(2, args[0], args[1]);
    self.leaves = PyList_New(0);
    self.packs = PyList_New(0);
    PyObject *all = NULL;
    if (self.call != NULL && self.leaves != NULL && self.packs != NULL)
        all = scatter(&self);
    Py_XDECREF(self.call);
    Py_XDECREF(self.leaves);
    Py_XDECREF(self.packs);
    pli_free(self.ways);
    return all;
}
