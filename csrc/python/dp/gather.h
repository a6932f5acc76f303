/* gather.h - what gather.c asks of gather_rules.c. */
#ifndef PLI_GATHER_H
#define PLI_GATHER_H

#include "leaf.h"
#include "tree.h"

/* Where the walk is: a chain of frames on the stack, read only when an error speaks. */
typedef struct step {
    const struct step *parent;
    const pli_node *node;
    Py_ssize_t child;
} step;

typedef struct joiner {
    const module_state *state;
    Py_ssize_t n;    /* replicas */
    PyObject *sizes; /* a tuple: rows of each replica; another length: not known */
    Py_ssize_t dim;
    PyObject *dim_object;
    PyObject *join; /* makes one tensor of many, on several devices; NULL: torch does */
    int *has_warned; /* of scalars, in this call */
} joiner;

/* Raises "gather: output['logits'][0] " and the words; returns -1. */
int pli_refuse_output(PyObject *type, const step *at, const char *format, ...);

/* What the replicas' values are, by replica 0's; -1 where another's is something else.
 */
int pli_outputs_kind(const joiner *self, PyObject *values, const step *at, int *kind);

/* Have these lists one entry for each row of their replica?  1, 0 or -1.  So it is with
 * lists of plain values (numbers, strings, objects), which are joined end to end. Those
 * with a tensor or an array inside are joined entry by entry, as torch's gather does.
 */
int pli_lists_are_by_row(const joiner *self, PyObject *lists, const step *at);

/* gather(outputs, sizes, dim, join=None) */
PyObject *pli_gather(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
