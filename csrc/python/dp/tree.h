/* tree.h - opens containers and makes them again, and walks through nested ones.
 *
 * The leaves are tensors of torch and arrays of NumPy.  A value that is neither a leaf
 * nor a container is a constant.
 *
 *     ({"x": t, "n": 3}, u)      two leaves, t and u, in a tuple with a dict
 *
 * One walk serves all callers: it opens a container, walks its children, and makes a
 * container like it from their replacements.  The walk's function `meet` decides what
 * replaces a leaf.  gather() walks several values side by side, the others walk one.
 *
 * A container that is met again has the replacement that it had before: it may lead
 * back to itself.  Where one value is walked, these are constants: empty containers,
 * which forward may fill, and dataclasses without leaf or mark, whose identity it may
 * check (an enumeration).
 */
#ifndef PLI_TREE_H
#define PLI_TREE_H

#include "core/layout.h"
#include "python/state.h"

typedef enum pli_kind {
    PLI_TENSOR,
    PLI_ARRAY,
    PLI_CONSTANT,
    PLI_TUPLE, /* these and their subclasses, unless torch's registry has the type */
    PLI_LIST,
    PLI_DICT,
    PLI_NAMED,  /* a namedtuple */
    PLI_PACKED, /* torch's PackedSequence, a namedtuple of tensors */
    PLI_DATACLASS,
    PLI_REGISTERED, /* in torch.utils._pytree: OrderedDict, deque, ModelOutput, ... */
    PLI_MARK,       /* paceline._compat.packed_sequence.Replicated */
    PLI_N_KINDS
} pli_kind;

typedef struct pli_container {
    pli_kind kind;
    PyObject *value;    /* borrowed */
    PyObject *children; /* a tuple; owned, like the next three */
    PyObject *keys;     /* a tuple of the children's keys or attributes, or NULL */
    PyObject *maker;    /* if registered: the unflatten function and the context */
    PyObject *context;
    PyObject *made; /* the new container, before it has children; or NULL */
} pli_container;

/* The kind of a value, or -1. */
int pli_kind_of(const module_state *state, PyObject *value);

/* A new list of the type of `list`, and with its attributes, with other items. */
PyObject *pli_list_like(const module_state *state, PyObject *list, PyObject *items);

/* The position of a walk: a chain of frames on the stack, outermost last. */
typedef struct pli_step {
    const struct pli_step *parent;
    const pli_container *container;
    Py_ssize_t child;
} pli_step;

typedef struct pli_walk {
    const module_state *state;
    Py_ssize_t n; /* values side by side */
    enum {
        PLI_LOOK,    /* make nothing: None replaces everything */
        PLI_REBUILD, /* make containers again */
        PLI_UNMARK   /* like PLI_REBUILD, without marks */
    } mode;
    /* Decides what replaces `values`, whose kind is `kind`, by the first.  Returns 1
     * with a new reference in *out, or with NULL there, for None; 0 to walk through the
     * children of a container; -1 on failure. */
    int (*meet)(struct pli_walk *walk, int kind, PyObject *const *values,
                const pli_step *at, PyObject **out);
    /* Brings the children of part k into the order of part 0's; NULL if n is 1. */
    int (*align)(pli_container *parts, Py_ssize_t k, const pli_step *at);
    /* The containers met so far: outside marks and inside.  Each is walked once. */
    PyObject *met[2];
    int is_marked; /* the walk is inside a mark */
} pli_walk;

/* The replacement of `values`. */
PyObject *pli_walk_values(pli_walk *walk, PyObject *const *values);

/* Walks through one value, in the mode PLI_LOOK: 0 or -1. */
int pli_look(pli_walk *walk, PyObject *value);

/* Whether a container holds a tensor or array, a constant other than None, a mark. */
typedef struct pli_contents {
    int has_leaf, has_value, has_mark;
    PyObject *leaves; /* a list that takes each leaf, or NULL: stop at the first */
} pli_contents;

/* Adds what is in a container to `contents`: 0 or -1. */
int pli_look_inside(const module_state *state, PyObject *container,
                    pli_contents *contents);

/* `start`, then a step for each frame: "[0]", "['mask']" or ".logits".  If `start` is
 * NULL, the outermost container is (args, kwargs): "args[0]['mask']", "kwargs['x']". */
PyObject *pli_path(const pli_step *at, const char *start);

/* The path of leaf number `leaf`. */
PyObject *pli_path_of_leaf(const module_state *state, PyObject *value, Py_ssize_t leaf,
                           const char *start);

/* A Tree, which puts `value` together again with other leaves. */
PyObject *pli_tree_new(const module_state *state, PyObject *value, int keeps_marks);

typedef struct pli_shape {
    int n_dims;     /* or PLI_SHAPE_UNKNOWN */
    int is_strided; /* not sparse, not nested */
    int64_t sizes[PLI_MAX_DIMS];
} pli_shape;

enum { PLI_SHAPE_UNKNOWN = -1 }; /* n_dims of a nested tensor */

/* The shape of a tensor or an array: 0 or -1. */
int pli_leaf_shape(const module_state *state, PyObject *leaf, pli_shape *out);

/* `dim` counted from the front, or -1 if the shape has no such dimension. */
int pli_shape_dim(const pli_shape *shape, Py_ssize_t dim);

/* "(2, 3)" */
PyObject *pli_shape_text(const pli_shape *shape);

/* ---- functions of the module ---------------------------------------------------- */

/* flatten(value) */
PyObject *pli_flatten(PyObject *module, PyObject *value);

/* leaves(value) */
PyObject *pli_leaves(PyObject *module, PyObject *value);

/* scatter(inputs, kwargs, n, dim) */
PyObject *pli_scatter(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* gather(outputs, sizes, dim, join=None) */
PyObject *pli_gather(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
