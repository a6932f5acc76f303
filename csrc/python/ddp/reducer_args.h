/* reducer_args.h - the parts of a Reducer, read from Python and checked. */
#ifndef PLI_REDUCER_ARGS_H
#define PLI_REDUCER_ARGS_H

#include "reducer_object.h"

/* A Reducer's arguments as Python passes them; all sizes are in bytes. */
typedef struct pli_reducer_args {
    PyObject *world;   /* NULL in measure() */
    PyObject *params;  /* list of tensors */
    PyObject *buffers; /* list of (dict, name) */
    Py_ssize_t bucket_bytes;
    Py_ssize_t last_bytes;
    Py_ssize_t view_bytes; /* the smallest gradient that becomes a view */
    PyObject *sparse;      /* list of indices into params, or NULL */
    PyObject *caps;        /* tuple with the size of each bucket, or NULL */
    int world_size;        /* 0: up to PL_MAX_RANKS */
    int is_on_device;
} pli_reducer_args;

/* Reads and checks the caps of buckets; out->each is for pli_free().  Returns -1 with
 * ValueError if a size is out of range. */
int pli_reducer_read_caps(const module_state *state, const pli_reducer_args *args,
                          pl_plan_caps *out);

/* The parts made from the arguments. */
typedef struct pli_reducer_parts {
    grad_slot *slots; /* for pli_free_slots() */
    size_t n_slots;
    grad_buffer *buffers; /* for pli_free_buffers() */
    size_t n_buffers;
    pl_reducer_spec spec; /* for pli_reducer_free_spec() */
} pli_reducer_parts;

/* Reads all but the world; free *out after a failure too.  On a GPU, gradients declared
 * sparse are reduced as dense ones. */
int pli_reducer_read(const module_state *state, dl_device place,
                     const pli_reducer_args *args, pli_reducer_parts *out);
void pli_reducer_free_spec(pl_reducer_spec *spec);

/* Fills a new reducer and registers its hooks; -1 leaves the rest to its dealloc. */
int pli_reducer_build(const module_state *state, reducer_object *self,
                      const pli_reducer_args *args);

/* measure(params, buffers, bucket_bytes, last_bytes, sparse, device, world_size)
 * -> (arena_bytes, n_ops, header_bytes) */
PyObject *pli_measure(PyObject *module, PyObject *args);

void pli_free_slots(grad_slot *slots, size_t n_slots);
void pli_free_buffers(grad_buffer *buffers, size_t n_buffers);

#endif
