/* reducer_args.h - the parts of a Reducer, read from Python and checked. */
#ifndef PLI_REDUCER_ARGS_H
#define PLI_REDUCER_ARGS_H

#include "reducer_object.h"

/* Options as Python gives them; every size in bytes. */
typedef struct pli_reducer_args {
    PyObject *world; /* NULL in measure() */
    PyObject *params;
    PyObject *buffers; /* sequence of (dict, name) */
    Py_ssize_t bucket_bytes;
    Py_ssize_t last_bytes;
    Py_ssize_t view_bytes; /* the smallest gradient that becomes a view */
    PyObject *sparse;      /* sequence of indices into params; NULL: none */
    PyObject *caps;        /* sequence of a size for each bucket; NULL: none */
    int world_size;        /* 0: up to PL_MAX_RANKS */
} pli_reducer_args;

/* The caps of buckets, checked; out->each is for pli_free().  -1 with ValueError where
 * a size cannot be. */
int pli_reducer_read_caps(const module_state *state, const pli_reducer_args *args,
                          pl_plan_caps *out);

/* Layouts of the parameters, and where the buffers are; for pli_free_slots() and
 * pli_free_buffers(), after a failure too. */
int pli_reducer_read_params(const module_state *state, dl_device place,
                            PyObject *params, grad_slot **out, size_t *out_n);
int pli_reducer_read_buffers(const module_state *state, dl_device place,
                             PyObject *buffers, grad_buffer **out, size_t *out_n,
                             size_t *out_bytes);

/* Gives those parameters the sparse policy that are declared so; on a GPU they are
 * reduced densely, as any. */
int pli_reducer_read_sparse(PyObject *sparse, int is_on_device, grad_slot *slots,
                            size_t n_slots);

/* The core's view of the same; for pli_reducer_free_spec(). */
int pli_reducer_make_spec(const module_state *state, const pli_reducer_args *args,
                          const grad_slot *slots, size_t n_slots, size_t extra_bytes,
                          pl_reducer_spec *out);
void pli_reducer_free_spec(pl_reducer_spec *spec);

/* measure(params, buffers, bucket_bytes, last_bytes, sparse, device, world_size)
 * -> (arena_bytes, n_ops, header_bytes) */
PyObject *pli_measure(PyObject *module, PyObject *args);

void pli_free_slots(grad_slot *slots, size_t n_slots);
void pli_free_buffers(grad_buffer *buffers, size_t n_buffers);

#endif
