/* tree.h - containers, opened and made again, and the walk through nested ones.
 *
 * The leaves are torch's tensors and NumPy's arrays.  A value that is neither a leaf
 * nor a container is a constant.
 *
 *     ({"x": t, "n": 3}, u)      two leaves, t and u, in a tuple with a dict
 *
 * One walk serves all: it opens a container, goes through its children, and makes a
 * container like it of what stands for them.  Its function `meet` says what stands for
 * a leaf.  gather() walks through several values side by side, the others through one.
 */
#ifndef PLI_TREE_H
#define PLI_TREE_H

#include "python/state.h"
#include "replicas/split.h"

typedef enum pli_kind {
    PLI_TENSOR,
    PLI_ARRAY,
    PLI_CONSTANT,
    PLI_TUPLE, /* these and their subclasses, but for what torch's registry has */
    PLI_LIST,
    PLI_DICT,
    PLI_NAMED,  /* a namedtuple */
    PLI_PACKED, /* torch's PackedSequence, a namedtuple of tensors */
    PLI_DATACLASS,
    PLI_REGISTERED, /* in torch.utils._pytree: OrderedDict, deque, ModelOutput, ... */
    PLI_MARK,       /* paceline._compat.packed_sequence.Replicated */
    PLI_N_KINDS
} pli_kind;

/* ---- kinds.c: one container ----------------------------------------------------- */

typedef struct pli_container {
    pli_kind kind;
    PyObject *value;    /* borrowed */
    PyObject *children; /* a tuple; owned, as what follows */
    PyObject *keys;     /* a tuple: keys or attributes of the children; NULL: none */
    PyObject *maker;    /* registered: its function to unflatten, and the context */
    PyObject *context;
} pli_container;

/* The kind of a value, or -1. */
int pli_kind_of(const module_state *state, PyObject *value);

/* Opens a container of kind `kind`.  Drop `out` in any case. */
int pli_open(const module_state *state, PyObject *value, pli_kind kind,
             pli_container *out);
void pli_container_drop(pli_container *self);

/* A new container like `self` with the children `items`, a tuple of as many; a list may
 * have more or fewer. */
PyObject *pli_close(const module_state *state, const pli_container *self,
                    PyObject *items);

/* ---- tree.c: nested ones -------------------------------------------------------- */

/* Where a walk is: a chain of frames on the stack, outermost last. */
typedef struct pli_step {
    const struct pli_step *parent;
    const pli_container *container;
    Py_ssize_t child;
} pli_step;

typedef struct pli_walk {
    const module_state *state;
    Py_ssize_t n; /* values side by side */
    enum {
        PLI_LOOK,    /* make nothing: None stands for all */
        PLI_REBUILD, /* make containers again */
        PLI_UNMARK   /* the same, without marks */
    } mode;
    /* Says what stands for `values`, which are of kind `kind` by the first: 1, with a
     * new reference in *out, or without, for None; 0 to walk through the children of a
     * container; or -1. */
    int (*meet)(struct pli_walk *walk, int kind, PyObject *const *values,
                const pli_step *at, PyObject **out);
    /* Brings the children of part k into the order of part 0's; NULL where n is 1. */
    int (*align)(pli_container *parts, Py_ssize_t k, const pli_step *at);
} pli_walk;

/* What stands for `values`; `at` is NULL for the outermost. */
PyObject *pli_walk_values(pli_walk *walk, PyObject *const *values, const pli_step *at);

/* Walks through one value, in the mode PLI_LOOK: 0 or -1. */
int pli_look(pli_walk *walk, PyObject *value);

/* What there is in a value: a tensor or an array, a constant but None, a mark. */
typedef struct pli_contents {
    int has_leaf, has_value, has_mark;
} pli_contents;

/* Adds what is in `value` to `contents`: 0 or -1. */
int pli_look_inside(const module_state *state, PyObject *value, pli_contents *contents);

/* `start`, then a step for each frame: "[0]", "['mask']" or ".logits".  Where `start`
 * is NULL the outermost is (args, kwargs): "args[0]['mask']", "kwargs['x']". */
PyObject *pli_path(const pli_step *at, const char *start);

/* The path of leaf number `leaf`. */
PyObject *pli_path_of_leaf(const module_state *state, PyObject *value, Py_ssize_t leaf,
                           const char *start);

/* `value` with its leaves, in order, replaced by those of a list or tuple. */
PyObject *pli_with_leaves(const module_state *state, PyObject *value, PyObject *leaves,
                          int keeps_marks);

/* A Tree, which takes `value` apart and puts it together. */
PyObject *pli_tree_new(const module_state *state, PyObject *value, int keeps_marks);

/* flatten(value) */
PyObject *pli_flatten(PyObject *module, PyObject *value);

/* ---- leaf.c: a tensor or an array ---------------------------------------------- */

int pli_leaf_shape(const module_state *state, PyObject *leaf, pli_shape *out);

/* "(2, 3)" */
PyObject *pli_shape_text(const pli_shape *shape);

/* `n` rows of a leaf from row `start`, a view; autograd knows a tensor's. */
PyObject *pli_leaf_narrow(PyObject *leaf, Py_ssize_t dim, Py_ssize_t start,
                          Py_ssize_t n);

/* ---- scatter.c and gather.c ---------------------------------------------------- */

/* scatter(inputs, kwargs, n, dim) */
PyObject *pli_scatter(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* gather(outputs, sizes, dim, join=None) */
PyObject *pli_gather(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* ---- kept.c: whether the dictionaries of kept modules are as they were --------- */

/* differing(dicts, expected, any): a list of the numbers of dicts that have not the
 * names of the expected one in its order, or other objects as values; where it has
 * `any`, all objects will do. */
PyObject *pli_differing(PyObject *module, PyObject *args);

/* restore(dicts, expected): have all dicts hold that, and nothing else. */
PyObject *pli_restore(PyObject *module, PyObject *args);

/* reference_counts(objects): a tuple. */
PyObject *pli_reference_counts(PyObject *module, PyObject *objects);

#endif
