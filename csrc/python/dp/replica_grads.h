/* replica_grads.h - gradients that replicas leave in shared memory: what both sides
 * share.
 *
 *   replica k:  backward -> .grad of parameter i -> slot (k, i), and it is dropped
 *   caller:     backward -> add(): .grad of parameter i += slot (1, i) + slot (2, i)
 * ...
 *
 * A replica has one row of slots, its own (replica_grads_fill.c); the caller has every
 * replica's (replica_grads_type.c).  Which slots hold a gradient is a mask, one byte a
 * parameter.
 */
#ifndef PLI_REPLICA_GRADS_H
#define PLI_REPLICA_GRADS_H

#include "backend/backend.h"
#include "python/tensor.h"

typedef struct replica_grads_object replica_grads_object;

/* The callable behind a parameter's post-accumulate-grad hook.  The parameter owns it,
 * and the slots own the parameter: so it borrows them. */
typedef struct grad_hook_object {
    PyObject_HEAD
    replica_grads_object *slots; /* NULL once they are gone */
    size_t index;
} grad_hook_object;

typedef struct grad_slot {
    PyObject *param;
    PyObject **views; /* by row */
    void **at;        /* by row */
    pli_layout *layout;
    grad_hook_object *hook; /* NULL: none was asked for */
    unsigned char is_used;
} grad_slot;

struct replica_grads_object {
    PyObject_HEAD
    grad_slot *slots;
    size_t n_slots;
    int n_rows;
    int is_shut; /* hooks leave .grad where it is */
    pl_backend *backend;
    const module_state *state;
};

int pli_call_method(PyObject *object, const char *name, PyObject *arg);

/* The methods of a replica's side. */
PyObject *pli_replica_grads_hooks(PyObject *object, PyObject *least_bytes);
PyObject *pli_replica_grads_open(PyObject *object, PyObject *ignored);
PyObject *pli_replica_grads_shut(PyObject *object, PyObject *is_shut);
PyObject *pli_replica_grads_sweep(PyObject *object, PyObject *ignored);
PyObject *pli_replica_grads_fallbacks(PyObject *object, PyObject *ignored);

#endif
