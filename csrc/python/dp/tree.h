/* tree.h - the nesting of a value, apart from its tensors and arrays.
 *
 * A tree is a list of nodes in the order in which a walk from the left meets them: a
 * container stands before its children.  The leaves are torch's tensors and NumPy's
 * arrays; everything that is neither a leaf nor a known container is a constant, and
 * stands in its node.
 *
 *     ({"x": t, "n": 3}, u)      tuple(2) dict(2) tensor constant(3) tensor
 */
#ifndef PLI_TREE_H
#define PLI_TREE_H

#include "python/state.h"

typedef enum pli_kind {
    PLI_TENSOR,
    PLI_ARRAY,
    PLI_CONSTANT,
    PLI_TUPLE, /* these three: exactly that type */
    PLI_LIST,
    PLI_DICT,
    PLI_TUPLE_LIKE, /* made by type(items): torch.return_types, torch.Size */
    PLI_NAMED,      /* a namedtuple */
    PLI_PACKED,     /* torch's PackedSequence, a namedtuple of tensors */
    PLI_LIST_LIKE,
    PLI_DICT_LIKE,
    PLI_OUTPUT,     /* a dict and a dataclass at once, as Hugging Face's ModelOutput */
    PLI_ATTRIBUTES, /* a dataclass; a UserDict, by its one attribute */
    PLI_REGISTERED, /* in torch's registry of pytrees */
    PLI_MARKER,     /* paceline._compat.packed_sequence.Replicated: is taken off, and is
                       never a node */
    PLI_N_KINDS
} pli_kind;

/* What a container is but for its children; also a leaf, or a constant.  All owned. */
typedef struct pli_node {
    pli_kind kind;
    Py_ssize_t n_children;
    PyTypeObject *type; /* NULL: a leaf or a constant */
    PyObject *keys;     /* a child's key or attribute each; registered: its maker */
    /* The constant; registered: its context; a dict's default_factory. */
    PyObject *extra;
    PyObject *attributes; /* what else its __dict__ had; Ellipsis: it was itself */
} pli_node;

typedef struct pli_tree {
    PyObject_VAR_HEAD
    Py_ssize_t n_leaves;
    pli_node nodes[];
} pli_tree;

/* How a leaf goes to the replicas. */
enum {
    PLI_SPLIT,
    PLI_WHOLE,
    PLI_PACK_FIRST, /* the first leaf of a PackedSequence */
    PLI_PACK_MORE,
    PLI_EACH /* a number a replica, always the same */
};

/* What a walk finds. */
typedef struct pli_walk {
    const module_state *state;
    pli_node *nodes;
    Py_ssize_t n_nodes, n_nodes_allocated;
    PyObject *leaves; /* a list */
    PyObject *packs;  /* the PackedSequences that are to be split; NULL: none */
    char *ways;       /* a letter of the enum above for each leaf; NULL: not wanted */
    Py_ssize_t n_ways_allocated;
    int n_markers; /* markers taken off so far */
    int n_whole;   /* markers that the walk is inside of */
    int n_packs;   /* PackedSequences that the walk is inside of: 0 or 1 */
    pli_node few_nodes[12];
} pli_walk;

/* ---- tree_open.c: one container ------------------------------------------------- */

/* The kind of a value, or -1. */
int pli_kind_of(const module_state *state, PyObject *value);

/* Opens a container of kind `kind`: fills *out, and returns its children, a tuple.
 * NULL on failure; *out is then empty, and need not be dropped. */
PyObject *pli_open(const module_state *state, PyObject *value, pli_kind kind,
                   pli_node *out);

void pli_node_drop(pli_node *node);

/* ---- tree_close.c: the way back ------------------------------------------------- */

/* A new container like the one that was opened, with the children `items`, a tuple;
 * steals `items`, also on failure. */
PyObject *pli_close(const module_state *state, const pli_node *node, PyObject *items);

/* The value of a tree with leaves `leaves`, a list or tuple of the right length. */
PyObject *pli_tree_unflatten(const module_state *state, const pli_tree *tree,
                             PyObject *leaves);

/* ---- tree_walk.c ---------------------------------------------------------------- */

/* Walks `value`; `wants_ways` for scatter.  Drop the walk in any case. */
int pli_walk_begin(pli_walk *walk, const module_state *state, int wants_ways);
int pli_walk_value(pli_walk *walk, PyObject *value);
void pli_walk_drop(pli_walk *walk);

/* flatten(value) */
PyObject *pli_flatten(PyObject *module, PyObject *value);

/* ---- tree.c --------------------------------------------------------------------- */

/* The tree of a walk, which gives up its nodes. */
pli_tree *pli_tree_new(const module_state *state, pli_walk *walk);

/* Where a leaf of (args, kwargs) is: "args[0]['mask']", "kwargs['x']". */
PyObject *pli_tree_path_of_call(const pli_tree *tree, Py_ssize_t leaf);

/* The step from a container to its child: "[0]", "['mask']" or ".logits". */
PyObject *pli_node_step(const pli_node *node, Py_ssize_t child);

#endif
