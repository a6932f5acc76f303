/* reducer_build.h - the parts of a Reducer, read from Python and checked. */
#ifndef PLI_REDUCER_BUILD_H
#define PLI_REDUCER_BUILD_H

#include "grads.h"

/* Options as Python gives them; every size in bytes. */
typedef struct pli_reducer_arguments {
    PyObject *world; /* NULL in measure() */
    PyObject *params;
    PyObject *buffers; /* sequence of (dict, name) */
    Py_ssize_t bucket_bytes;
    Py_ssize_t last_bytes;
    Py_ssize_t view_bytes; /* the smallest gradient that becomes a view */
    PyObject *sparse;      /* sequence of indices into params; NULL: none */
    PyObject *caps;        /* sequence of a size for each bucket; NULL: none */
} pli_reducer_arguments;

/* The caps of buckets, checked; out->each is for pli_free().  -1 with ValueError where
 * a size cannot be. */
int pli_reducer_read_caps(const module_state *state, const pli_reducer_arguments *given,
                          pl_plan_caps *out);

/* Fills a new reducer and registers its hooks; -1 leaves the rest to its dealloc. */
int pli_reducer_build(const module_state *state, reducer_object *self,
                      const pli_reducer_arguments *given);

void pli_free_slots(grad_slot *slots, size_t n_slots);
void pli_free_buffers(grad_buffer *buffers, size_t n_buffers);

#endif
