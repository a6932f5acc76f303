/* slots.h - gradients that replicas leave in shared memory: what both sides share.
 *
 *   replica k:  backward -> .grad of parameter i -> slot (k, i), and it is dropped
 *   caller:     backward -> add(): .grad of parameter i += slot (1, i) + slot (2, i)
 * ...
 *
 * A replica has one row of slots, its own (slots_fill.c); the caller has every
 * replica's (slots_type.c).  Which slots hold a gradient is a mask, one byte a
 * parameter.
 */
#ifndef PLI_SLOTS_H
#define PLI_SLOTS_H

#include "../backend/cpu_sum.h"
#include "tensor.h"

typedef struct slots_object slots_object;

/* The callable behind a parameter's post-accumulate-grad hook.  The parameter owns it,
 * and the slots own the parameter: so it borrows them. */
typedef struct tap_object {
    PyObject_HEAD
    slots_object *slots; /* NULL once they are gone */
    size_t index;
} tap_object;

typedef struct slot {
    PyObject *param;
    PyObject **views; /* by row */
    void **at;        /* by row */
    pli_layout *layout;
    tap_object *tap; /* NULL: none was asked for */
    unsigned char is_used;
} slot;

struct slots_object {
    PyObject_HEAD
    slot *slots;
    size_t n_slots;
    int n_rows;
    const pli_sum_table *sums;
    const module_state *state;
    PyObject *str_hooks;
    PyObject *str_post_hooks;
};

/* to = the sum of `in`, elements of the slot's layout. */
void pli_slots_sum(const slots_object *self, const slot *one, const void **in, int n_in,
                   void *to);

int pli_slots_call(PyObject *object, const char *name, PyObject *arg);

/* The methods of a replica's side. */
PyObject *pli_slots_taps(PyObject *object, PyObject *least_bytes);
PyObject *pli_slots_open(PyObject *object, PyObject *ignored);
PyObject *pli_slots_sweep(PyObject *object, PyObject *ignored);
PyObject *pli_slots_strays(PyObject *object, PyObject *ignored);

#endif
