/* gather.c - joins the replicas' outputs into one.
 *
 * The outputs are walked side by side; replica 0's determines the kind of each part.
 *
 *     replica 0: {"logits": (2, 5), "n": 2}
 *     replica 1: {"logits": (1, 5), "n": 1}      ->  {"logits": (3, 5), "n": [2, 1]}
 */
#include "python/array.h"
#include "tree.h"

typedef struct joiner {
    pli_walk walk;
    PyObject *sizes; /* a tuple: rows of each replica; unknown if the length differs */
    Py_ssize_t dim;
    PyObject *dim_object;
    PyObject *join; /* brings values of replicas to one device, and joins tensors of
                     * several devices; NULL: torch's functions join */
    int has_warned; /* about scalars, in this call */
} joiner;

/* "gather: output['logits'][0]" */
static PyObject *output_at(const pli_step *at)
{
    return pli_path(at, "gather: output");
}

/* ---- tensors and arrays --------------------------------------------------------- */

static int refuse_shapes(const pli_step *at, Py_ssize_t k, const pli_shape *first,
                         const pli_shape *other, Py_ssize_t dim)
{
    PyObject *first_text = pli_shape_text(first);
    PyObject *other_text = pli_shape_text(other);
    if (first_text == NULL || other_text == NULL)
        ;
    else if (first->n_dims == other->n_dims && pli_shape_dim(first, dim) < 0)
        (void)pli_raise_at(PyExc_ValueError, output_at(at),
                           "has shape %U on replica 0, and no dimension %zd to "
                           "join along: override gather to define the result",
                           first_text, dim);
    else
        (void)pli_raise_at(PyExc_ValueError, output_at(at),
                           "has shape %U on replica 0 and %U on replica %zd: only "
                           "dimension %zd may differ; pad them to one size in the "
                           "module, or override gather",
                           first_text, other_text, k, dim);
    Py_XDECREF(first_text);
    Py_XDECREF(other_text);
    return -1;
}

/* Whether two differ in no dimension but `dim`, counted from the front. */
static int are_joined(const pli_shape *first, const pli_shape *other, int dim)
{
    if (first->n_dims != other->n_dims)
        return 0;
    for (int d = 0; d < first->n_dims; d++)
        if (d != dim && first->sizes[d] != other->sizes[d])
            return 0;
    return 1;
}

/* Fills *first with replica 0's shape; -1 if the values cannot be joined. */
static int check_shapes(const joiner *self, PyObject *const *values, const pli_step *at,
                        pli_shape *first)
{
    pli_shape other;
    if (pli_leaf_shape(self->walk.state, values[0], first) != 0)
        return -1;
    if (self->walk.n == 1)
        return 0;
    if (first->n_dims == PLI_SHAPE_UNKNOWN)
        return pli_raise_at(PyExc_ValueError, output_at(at),
                            "is a nested tensor, which has no shape to join by: return "
                            "its rows as tensors of one shape, or override gather");
    const int dim = pli_shape_dim(first, self->dim);
    if (dim < 0 && first->n_dims > 0)
        return refuse_shapes(at, 0, first, first, self->dim);
    for (Py_ssize_t k = 1; k < self->walk.n; k++) {
        if (pli_leaf_shape(self->walk.state, values[k], &other) != 0)
            return -1;
        if (!are_joined(first, &other, dim))
            return refuse_shapes(at, k, first, &other, self->dim);
    }
    return 0;
}

static int warn_of_scalars(joiner *self)
{
    if (self->has_warned)
        return 0;
    self->has_warned = 1;
    PyObject *done =
        PyObject_CallFunction(self->walk.state->warn_of_scalars, "n", self->walk.n);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *join_tensors(joiner *self, PyObject *values, const pli_shape *shape)
{
    if (shape->n_dims != 0 && self->walk.n == 1 && self->join == NULL)
        return Py_NewRef(PyTuple_GET_ITEM(values, 0));
    if (shape->n_dims == 0 && warn_of_scalars(self) != 0)
        return NULL;
    PyObject *args[] = {values, shape->n_dims > 0 ? self->dim_object : Py_None};
    if (self->join != NULL)
        return PyObject_Vectorcall(self->join, args, 2, NULL);
    return shape->n_dims > 0 ? PyObject_Vectorcall(self->walk.state->cat, args, 2, NULL)
                             : PyObject_CallOneArg(self->walk.state->stack, values);
}

static PyObject *join_arrays(joiner *self, PyObject *values, const pli_shape *shape)
{
    if (shape->n_dims > 0 && self->walk.n == 1)
        return Py_NewRef(PyTuple_GET_ITEM(values, 0));
    const int dim = shape->n_dims > 0 ? pli_shape_dim(shape, self->dim) : 0;
    return PyObject_CallFunction(self->walk.state->join_arrays, "Oi", values, dim);
}

/* ---- kinds ---------------------------------------------------------------------- */

static int refuse_types(const pli_step *at, PyObject *first, PyObject *other,
                        Py_ssize_t k)
{
    return pli_raise_at(
        PyExc_TypeError, output_at(at),
        "is %s%.200s on replica 0 and %s%.200s on replica %zd: return the same from "
        "each replica, or override gather",
        first == Py_None ? "" : "of type ",
        first == Py_None ? "None" : Py_TYPE(first)->tp_name,
        other == Py_None ? "" : "of type ",
        other == Py_None ? "None" : Py_TYPE(other)->tp_name, k);
}

static int kind_of_output(const module_state *state, PyObject *value)
{
    const int kind = pli_kind_of(state, value);
    return kind == PLI_MARK ? PLI_CONSTANT : kind;
}

/* The kind of the replicas' values, by replica 0's; -1 if another kind differs.  None
 * means "nothing": it does not mix with other constants. */
static int kind_of_all(const joiner *self, PyObject *const *values, const pli_step *at)
{
    const int kind = kind_of_output(self->walk.state, values[0]);
    for (Py_ssize_t k = 1; kind >= 0 && k < self->walk.n; k++) {
        const int other = kind_of_output(self->walk.state, values[k]);
        if (other < 0)
            return -1;
        const int is_same_type = Py_TYPE(values[0]) == Py_TYPE(values[k]);
        const int is_none = values[0] == Py_None || values[k] == Py_None;
        if (kind != other || (!is_same_type && (kind > PLI_CONSTANT || is_none)))
            return refuse_types(at, values[0], values[k], k);
    }
    return kind;
}

/* ---- containers ----------------------------------------------------------------- */

static int refuse_keys(const pli_step *at, const pli_container *parts, Py_ssize_t k)
{
    return pli_raise_at(
        PyExc_ValueError, output_at(at),
        "has the keys %R on replica 0 and %R on replica %zd: return the same "
        "keys from each replica, or override gather",
        parts[0].keys, parts[k].keys, k);
}

/* Brings replica k's children into the order of replica 0's keys. */
static int order_by_keys(const pli_step *at, pli_container *parts, Py_ssize_t k)
{
    PyObject *wanted = parts[0].keys, *keys = parts[k].keys;
    const int same = PyObject_RichCompareBool(wanted, keys, Py_EQ);
    if (same != 0)
        return same < 0 ? -1 : 0;
    const Py_ssize_t n = PyTuple_GET_SIZE(wanted);
    if (PyTuple_GET_SIZE(keys) != n)
        return refuse_keys(at, parts, k);
    PyObject *ordered = PyTuple_New(n);
    for (Py_ssize_t i = 0; ordered != NULL && i < n; i++) {
        const Py_ssize_t from = PySequence_Index(keys, PyTuple_GET_ITEM(wanted, i));
        if (from < 0) {
            Py_DECREF(ordered);
            PyErr_Clear();
            return refuse_keys(at, parts, k);
        }
        PyTuple_SET_ITEM(ordered, i,
                         Py_NewRef(PyTuple_GET_ITEM(parts[k].children, from)));
    }
    if (ordered == NULL)
        return -1;
    Py_SETREF(parts[k].children, ordered);
    return 0;
}

static int align(pli_container *parts, Py_ssize_t k, const pli_step *at)
{
    const pli_container *first = &parts[0], *other = &parts[k];
    if (first->keys != NULL && other->keys != NULL)
        return order_by_keys(at, parts, k);
    if (first->context != NULL) {
        const int same =
            PyObject_RichCompareBool(first->context, other->context, Py_EQ);
        if (same == 0)
            return pli_raise_at(
                PyExc_ValueError, output_at(at),
                "is a %.200s with the context %R on replica 0 and %R on replica %zd: "
                "return the same from each replica, or override gather",
                Py_TYPE(first->value)->tp_name, first->context, other->context, k);
        if (same < 0)
            return -1;
    }
    const Py_ssize_t n_first = PyTuple_GET_SIZE(first->children);
    const Py_ssize_t n_other = PyTuple_GET_SIZE(other->children);
    if (n_first == n_other)
        return 0;
    return pli_raise_at(PyExc_ValueError, output_at(at),
                        "has %zd entries on replica 0 and %zd on replica %zd: "
                        "return the same number from each replica, or override gather",
                        n_first, n_other, k);
}

/* ---- lists of rows -------------------------------------------------------------- */

static Py_ssize_t rows_of(const joiner *self, Py_ssize_t k)
{
    return PyLong_AsSsize_t(PyTuple_GET_ITEM(self->sizes, k));
}

/* A walk that counts tensors and arrays with and without the rows of a replica. */
typedef struct counting {
    pli_walk walk;
    Py_ssize_t dim, n_rows, n_with, n_without;
} counting;

static int count(pli_walk *walk, int kind, PyObject *const *values, const pli_step *at,
                 PyObject **out)
{
    counting *self = (counting *)walk;
    pli_shape shape = {0};
    (void)at;
    (void)out;
    self->n_with += kind == PLI_PACKED;
    if (kind < PLI_CONSTANT && pli_leaf_shape(walk->state, values[0], &shape) != 0)
        return -1;
    if (shape.n_dims > 0) {
        const int dim = pli_shape_dim(&shape, self->dim);
        const int is_with = dim >= 0 && shape.sizes[dim] == self->n_rows;
        self->n_with += is_with;
        self->n_without += !is_with;
    }
    return kind <= PLI_CONSTANT || kind == PLI_PACKED;
}

/* Whether all entries of the lists can be joined with one another: 1, 0 or -1. */
static int are_alike(const joiner *self, PyObject *const *lists)
{
    joiner among = *self;
    among.walk.mode = PLI_LOOK;
    among.walk.met[0] = among.walk.met[1] = NULL;
    PyObject *all = PyList_New(0);
    for (Py_ssize_t k = 0; all != NULL && k < self->walk.n; k++)
        if (PyList_SetSlice(all, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, lists[k]) != 0)
            Py_CLEAR(all);
    if (all == NULL)
        return -1;
    among.walk.n = PyList_GET_SIZE(all);
    const int status =
        pli_drop(pli_walk_values(&among.walk, PySequence_Fast_ITEMS(all)));
    Py_DECREF(all);
    if (status == 0)
        return 1;
    if (!PyErr_ExceptionMatches(PyExc_ValueError) &&
        !PyErr_ExceptionMatches(PyExc_TypeError))
        return -1;
    PyErr_Clear();
    return 0;
}

/* Whether an entry shows that it belongs to a row: 1, 0 or -1.  A container does, and a
 * tensor whose size is neither equal on all replicas, as that of a loss, nor in
 * proportion to their rows, as that of a feature map. */
static int is_of_a_row(const joiner *self, PyObject *const *lists)
{
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(lists[0]); j++) {
        Py_ssize_t n_first = 0;
        for (Py_ssize_t k = 0; k < self->walk.n; k++) {
            if (j >= PyList_GET_SIZE(lists[k])) /* a replica with fewer rows */
                continue;
            PyObject *entry = PyList_GET_ITEM(lists[k], j);
            pli_shape shape = {0};
            const int kind = pli_kind_of(self->walk.state, entry);
            if (kind >= PLI_CONSTANT)
                return kind > PLI_CONSTANT;
            if (kind < 0 || pli_leaf_shape(self->walk.state, entry, &shape) != 0)
                return -1;
            const int dim = pli_shape_dim(&shape, self->dim);
            const Py_ssize_t n = dim >= 0 ? shape.sizes[dim] : 0;
            n_first = k == 0 ? n : n_first;
            if (n != n_first && n * rows_of(self, 0) != n_first * rows_of(self, k))
                return 1;
        }
    }
    return 0;
}

/* Two losses look like the vectors of two rows, two batches like two images' boxes. */
static int warn_of_doubt(const pli_step *at)
{
    return pli_raise_at(
        PyExc_UserWarning, output_at(at),
        "is a list as long as a replica has rows: joined by entry, as lists of feature "
        "maps are; to say so, return a tuple; if an entry belongs to a row, return a "
        "dict for each row, or override gather");
}

/* Whether lists with tensors have an entry for each row, as those of detections, whose
 * tensors have other numbers of rows than the replica: 1, 0 or -1.  By chance some may
 * have as many; then all entries must have one form, which feature maps and other
 * tensors beside them lack. */
static int are_of_rows(const joiner *self, PyObject *const *lists, const pli_step *at)
{
    counting of = {.walk = {.state = self->walk.state, .n = 1, .meet = count},
                   .dim = self->dim};
    for (Py_ssize_t k = 0; k < self->walk.n; k++) {
        of.n_rows = rows_of(self, k);
        if (pli_look(&of.walk, lists[k]) != 0)
            return -1;
    }
    const int alike = of.n_with > 0 ? are_alike(self, lists) : of.n_without > 0;
    if (alike != 1 || self->walk.n == 1)
        return alike < 0 ? -1 : alike && of.n_without > 0;
    const int is_row = of.n_without > 0 ? is_of_a_row(self, lists) : 0;
    return is_row != 0 ? is_row : warn_of_doubt(at);
}

/* Whether these lists have one entry for each row of their replica: 1, 0 or -1.  Lists
 * of plain values (numbers, strings, objects) do.  Lists that hold a tensor or an array
 * are joined by entry, as torch's gather does, unless they are `are_of_rows`. */
static int are_by_row(const joiner *self, PyObject *const *lists, const pli_step *at)
{
    const int is_known = PyTuple_GET_SIZE(self->sizes) == self->walk.n;
    Py_ssize_t other = -1; /* a replica whose list has another length */
    pli_contents found = {0};
    for (Py_ssize_t k = 0; k < self->walk.n; k++) {
        if (pli_look_inside(self->walk.state, lists[k], &found) != 0)
            return -1;
        if (is_known && other < 0 && PyList_GET_SIZE(lists[k]) != rows_of(self, k))
            other = k;
    }
    if (PyErr_Occurred())
        return -1;
    if (found.has_leaf)
        return is_known && other < 0 ? are_of_rows(self, lists, at) : 0;
    if (!found.has_value || other < 0 || self->walk.n == 1)
        return found.has_value;
    return pli_raise_at(
        PyExc_ValueError, output_at(at),
        "has %zd entries for the %zd rows of replica %zd: a list of numbers, "
        "strings or objects must have one entry per row; return a tuple "
        "instead, or override gather",
        PyList_GET_SIZE(lists[other]), rows_of(self, other), other);
}

/* A value of replica k, with its tensors on the device of the outputs. */
static PyObject *brought(const joiner *self, PyObject *value, Py_ssize_t k)
{
    return self->join != NULL
               ? PyObject_CallMethod(self->join, "of_replica", "On", value, k)
               : Py_NewRef(value);
}

/* Joins lists end to end. */
static PyObject *chain(const joiner *self, PyObject *const *lists)
{
    PyObject *all = PyList_New(0);
    for (Py_ssize_t k = 0; all != NULL && k < self->walk.n; k++) {
        const Py_ssize_t end = PyList_GET_SIZE(all);
        PyObject *list = brought(self, lists[k], k);
        if (list == NULL || PyList_SetSlice(all, end, end, list) != 0)
            Py_CLEAR(all);
        Py_XDECREF(list);
    }
    PyObject *made =
        all != NULL ? pli_list_like(self->walk.state, lists[0], all) : NULL;
    Py_XDECREF(all);
    return made;
}

/* ---- joining -------------------------------------------------------------------- */

static int join(pli_walk *walk, int kind, PyObject *const *values, const pli_step *at,
                PyObject **out)
{
    joiner *self = (joiner *)walk;
    const int only_looks = walk->mode == PLI_LOOK;
    kind = kind_of_all(self, values, at);
    if (kind == PLI_LIST && !only_looks) {
        const int is_chain = are_by_row(self, values, at);
        if (is_chain == 1)
            *out = chain(self, values);
        return is_chain == 1 && *out == NULL ? -1 : is_chain;
    }
    if (kind < 0 || (kind > PLI_CONSTANT && kind != PLI_PACKED))
        return kind < 0 ? -1 : 0;
    pli_shape shape;
    if (kind < PLI_CONSTANT && check_shapes(self, values, at, &shape) != 0)
        return -1;
    if (only_looks)
        return 1;
    PyObject *all = PyTuple_New(self->walk.n);
    for (Py_ssize_t k = 0; all != NULL && k < self->walk.n; k++)
        pli_tuple_put(&all, k,
                      kind == PLI_PACKED ? brought(self, values[k], k)
                                         : Py_NewRef(values[k]));
    if (all == NULL)
        return -1;
    if (kind == PLI_TENSOR)
        *out = join_tensors(self, all, &shape);
    else if (kind == PLI_ARRAY)
        *out = join_arrays(self, all, &shape);
    else if (kind == PLI_PACKED)
        *out = PyObject_CallOneArg(self->walk.state->join_packed, all);
    else
        *out = values[0] == Py_None ? Py_NewRef(Py_None) : PySequence_List(all);
    Py_DECREF(all);
    return *out != NULL ? 1 : -1;
}

PyObject *pli_gather(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    if (n_args < 3 || n_args > 4 || !PyTuple_Check(args[1]) || !PyLong_Check(args[2]))
        return PyErr_Format(
            PyExc_TypeError,
            "gather(outputs: list, sizes: tuple of int, dim: int, join=None)");
    joiner self = {
        .walk = {.state = state, .mode = PLI_REBUILD, .meet = join, .align = align},
        .sizes = args[1],
        .dim = PyLong_AsSsize_t(args[2]),
        .dim_object = args[2],
        .join = n_args > 3 && args[3] != Py_None ? args[3] : NULL,
    };
    if (PyErr_Occurred() || pli_needs_torch(state) != 0)
        return NULL;
    PyObject *result = NULL;
    PyObject *values = PySequence_Tuple(args[0]);
    if (values == NULL)
        return NULL;
    self.walk.n = PyTuple_GET_SIZE(values);
    if (self.walk.n > 0)
        result = pli_walk_values(&self.walk, PySequence_Fast_ITEMS(values));
    else
        PyErr_SetString(PyExc_ValueError, "gather: no outputs");
    Py_DECREF(values);
    return result;
}
