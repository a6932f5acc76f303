/* snapshot_memory.c - what the memory of a tensor or an array is like, as a number.
 *
 * The version of a tensor misses writes by `.data` and through NumPy, and arrays have
 * none; so their content is hashed, and their form too: the same bytes may be seen by
 * another shape or with other strides.
 */
#include "snapshot.h"

#include "core/hash.h"
#include "python/tensor.h"
#include "tensor_hash.h"

/* Up to here all bytes of a tensor are hashed, whether or not it is to be whole. */
#define SMALL_BYTES ((size_t)1 << 14)

/* A buffer of more dimensions does not exist: neither NumPy nor Python has them. */
_Static_assert(PyBUF_MAX_NDIM <= PLI_MAX_DIMS, "the form of a buffer must fit");

/* Of two with the same bytes, those of another shape or with other strides have another
 * hash.  A stride that no second element is reached by does not count. */
static uint64_t hash_form(const pli_strided *elems)
{
    uint64_t form[1 + 2 * PLI_MAX_DIMS];
    size_t n = 0;
    form[n++] = elems->elem_bytes;
    for (int d = 0; d < elems->n_dims; d++) {
        form[n++] = (uint64_t)elems->dims[d].size;
        form[n++] = elems->dims[d].size > 1 ? (uint64_t)elems->dims[d].stride : 0;
    }
    return pli_hash_bytes(form, n * sizeof *form);
}

/* Hashes the elements: in the order of their memory where there are no gaps, as to copy
 * is slow; of those that are one in memory (expanded ones) that one.  0, or -1 with an
 * exception. */
static int hash_elements(const pli_strided *elems, const void *data, uint64_t *out)
{
    pli_dim dims[PLI_MAX_DIMS];
    pli_strided once = {dims, 0, elems->elem_bytes};
    for (int d = 0; d < elems->n_dims; d++)
        if (elems->dims[d].stride != 0 || elems->dims[d].size == 0)
            dims[once.n_dims++] = elems->dims[d];
    const size_t n_bytes = pli_strided_bytes(&once);
    if (pli_strided_density(&once) != PLI_NOT_DENSE) {
        *out = pli_hash_bytes(data, n_bytes);
        return 0;
    }
    char *copy = PyMem_Malloc(n_bytes);
    if (copy == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    pli_strided_pack(&once, data, copy);
    *out = pli_hash_bytes(copy, n_bytes);
    PyMem_Free(copy);
    return 0;
}

/* What DLPack cannot read (a sparse tensor, one without memory, float8) goes by its
 * answers and its shape. */
static uint64_t hash_shape(const module_state *state, PyObject *tensor)
{
    PyErr_Clear();
    PyObject *shape = PyObject_GetAttr(tensor, state->name_shape);
    const Py_hash_t hash = shape != NULL ? PyObject_Hash(shape) : -1;
    Py_XDECREF(shape);
    PyErr_Clear();
    return (uint64_t)hash;
}

/* Hashes a CPU tensor's form, and its content where that is to be. */
static uint64_t hash_tensor(const module_state *state, const pli_watched *item)
{
    pli_tensor read;
    pli_dim dims[PLI_MAX_DIMS];
    uint64_t hash = 0;
    if (pli_tensor_read(state, item->live, "a tensor", &read) != 0)
        return hash_shape(state, item->live);
    const pli_strided elems = {dims, read.layout.n_dims,
                               pl_dtype_bytes(read.layout.dtype)};
    for (int d = 0; d < elems.n_dims; d++)
        dims[d] = (pli_dim){read.layout.dims[d].size,
                            read.layout.dims[d].stride * (int64_t)elems.elem_bytes};
    const int is_hashed = item->is_whole || pli_strided_bytes(&elems) <= SMALL_BYTES;
    if (read.data != NULL && is_hashed && hash_elements(&elems, read.data, &hash) != 0)
        PyErr_Clear();
    return hash_form(&elems) ^ hash;
}

/* Hashes an array's form and memory.  0, or -1 with an exception. */
static int hash_array(const pli_watched *item, uint64_t *out)
{
    Py_buffer view;
    pli_dim dims[PLI_MAX_DIMS];
    uint64_t hash;
    if (PyObject_GetBuffer(item->live, &view, PyBUF_STRIDED_RO) != 0)
        return -1;
    const pli_strided elems = {dims, view.ndim, (size_t)view.itemsize};
    for (int d = 0; d < view.ndim; d++)
        dims[d] = (pli_dim){view.shape[d], view.strides[d]};
    const int status = hash_elements(&elems, view.buf, &hash);
    if (status == 0)
        *out = hash_form(&elems) ^ hash;
    PyBuffer_Release(&view);
    return status;
}

int pli_watched_hash(const module_state *state, const pli_watched *item, uint64_t *out)
{
    if (item->kind == PLI_WATCHED_BYTES)
        return hash_array(item, out);
    *out = hash_tensor(state, item);
    return 0;
}
