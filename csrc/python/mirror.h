/* mirror.h - one thing that a mirror keeps an eye on, and what it was like.
 *
 * A dictionary, a list, what is iterated over (a set, a deque), a tensor, or memory
 * that can be read as a buffer (an array).  Members are compared by identity; numbers
 * and strings of Python's own types by value where that fails.
 */
#ifndef PLI_MIRROR_H
#define PLI_MIRROR_H

#include "state.h"

typedef enum pli_mirror_kind {
    PLI_MIRROR_DICT,
    PLI_MIRROR_LIST,
    PLI_MIRROR_ITERABLE,
    PLI_MIRROR_TENSOR,
    PLI_MIRROR_BYTES,
} pli_mirror_kind;

/* All zeros: nothing is mirrored here. */
typedef struct pli_mirrored {
    PyObject *live;     /* NULL: nothing */
    uint64_t tag;       /* a dictionary's version, where Python counts them */
    PyObject *owner;    /* whose attributes `live` is; or NULL */
    PyTypeObject *type; /* of the owner, as it was */
    PyObject **values;  /* owned; a dictionary's keys are in `keys` */
    PyObject **keys;
    Py_ssize_t n_seen;
    Py_ssize_t n_room;
    PyObject *version; /* a tensor's */
    char *bytes;
    Py_ssize_t n_bytes;
    pli_mirror_kind kind;
} pli_mirrored;

/* Takes a thing for the first time; `owner` may be NULL.  0, or -1 with an exception:
 * then `out` is to be dropped too. */
int pli_mirrored_init(const module_state *state, PyObject *live, PyObject *owner,
                      pli_mirrored *out);

/* May run code of the members' own. */
void pli_mirrored_drop(pli_mirrored *item);

int pli_mirrored_visit(const pli_mirrored *item, visitproc visit, void *arg);

/* 1 where it is as it was, 0 where not.  Raises nothing. */
int pli_mirrored_is_same(const module_state *state, pli_mirrored *item);

/* Takes the thing as it is now.  0, or -1 with an exception. */
int pli_mirrored_take(const module_state *state, pli_mirrored *item);

/* (where the first difference is, what was from there on, what is): lists, or
 * dictionaries of what is not the same at its position; (0, None, None) for the rest.
 */
PyObject *pli_mirrored_delta(pli_mirrored *item);

#endif
