/* snapshot.h - one object that a snapshot watches, and what it was like.
 *
 * A dictionary, a list, what is iterated over (a set, a deque), a class, a function, a
 * cell, one entry of a dictionary, a tensor, or memory that can be read as a buffer (an
 * array).  Members are compared by identity; numbers and strings of Python's own types
 * by value where that fails.  Nothing rests on version tags of CPython, which it no
 * longer moves for attributes that live inline.  What a tensor or an array answers to
 * some questions counts as its members; beside them a hash of its form and content is
 * kept (snapshot_memory.c).
 */
#ifndef PLI_SNAPSHOT_H
#define PLI_SNAPSHOT_H

#include "python/state.h"

typedef enum pli_watched_kind {
    PLI_WATCHED_DICT,
    PLI_WATCHED_ORDERED, /* an OrderedDict: its order is not the dictionary's */
    PLI_WATCHED_LIST,
    PLI_WATCHED_ITERABLE,
    PLI_WATCHED_CLASS,
    PLI_WATCHED_FUNCTION,
    PLI_WATCHED_CELL,
    PLI_WATCHED_ENTRY, /* `live` is the dictionary, `owner` the name */
    PLI_WATCHED_TENSOR,
    PLI_WATCHED_BYTES,
} pli_watched_kind;

/* All zeros: nothing is watched here. */
typedef struct pli_watched {
    PyObject *live;     /* NULL: nothing */
    PyObject *owner;    /* whose attributes `live` is; or NULL */
    PyTypeObject *type; /* of the owner, as it was */
    PyObject **keys;    /* owned, as the values; entries may be NULL */
    PyObject **values;
    Py_ssize_t n_seen;
    Py_ssize_t n_allocated;
    uint64_t hash; /* of the form and content of tensors and arrays */
    int is_whole;  /* all bytes of a tensor are hashed, however many */
    pli_watched_kind kind;
} pli_watched;

/* Records an object for the first time; `owner` may be NULL.  0, or -1 with an
 * exception: then `out` is to be dropped too. */
int pli_watched_init(const module_state *state, PyObject *live, PyObject *owner,
                     int is_whole, pli_watched *out);

/* May run code of the members' own. */
void pli_watched_drop(pli_watched *item);

int pli_watched_visit(const pli_watched *item, visitproc visit, void *arg);

/* 1 where it is as it was, 0 where not.  Raises nothing. */
int pli_watched_is_same(const module_state *state, const pli_watched *item);

/* Two dictionaries: the entries that are not the same at their position, as they were
 * and as they are.  For items of kind DICT and ORDERED. */
PyObject *pli_watched_delta(const pli_watched *item);

/* Hashes the form and the content of an item of kind TENSOR or BYTES; of a large tensor
 * that is not whole the form alone.  0, or -1 with an exception. */
int pli_watched_hash(const module_state *state, const pli_watched *item, uint64_t *out);

#endif
