/* parcel.h - one tensor or array on its way out: what it is, and how its bytes lie.
 *
 * Taken from an object without a copy where it is a strided tensor in CPU memory or an
 * array of numbers; anything else of torch's and NumPy's is pickled.
 */
#ifndef PLI_PARCEL_H
#define PLI_PARCEL_H

#include "state.h"

typedef enum pli_form {
    PLI_FORM_NONE,
    PLI_FORM_TENSOR,
    PLI_FORM_ARRAY,
    PLI_FORM_PICKLE
} pli_form;

typedef struct pli_parcel {
    PyObject *object; /* owned, as all that follows */
    PyObject *owner;  /* of the description: a capsule; or the pickled bytes */
    Py_buffer buffer; /* of an array: buffer.obj is NULL where there is none */
    pli_form form;
    uint8_t flags;
    dl_dtype dtype;
    int n_dims;
    int n_rows; /* leading dimensions to walk through; behind them is one piece */
    const int64_t *sizes;
    const int64_t *strides; /* in stride_bytes; NULL: row-major */
    int64_t stride_bytes;
    size_t item_bytes;
    size_t n_bytes;
    const char *data;
    size_t at;
} pli_parcel;

/* Fills a zeroed parcel; -1 with an exception set.  Either way it is for
 * pli_parcel_fini(). */
int pli_parcel_take(const module_state *state, PyObject *object, pli_parcel *out);
void pli_parcel_fini(pli_parcel *parcel);

/* A CPU tensor's description, good while it lives unmodified and *owner is held, which
 * is NULL where there is nothing to hold.  -1 with TypeError where it is no strided
 * tensor in memory, NotImplementedError where its memory is a device's. */
int pli_tensor_describe(const module_state *state, PyObject *tensor, dl_tensor *out,
                        PyObject **owner);

/* Non-zero where the elements fill one block of memory, each once; *n_bytes is its
 * size, and `strides` gets one stride a dimension, in elements. */
int pli_tensor_is_dense(const dl_tensor *tensor, size_t *n_bytes, int64_t *strides);

#endif
