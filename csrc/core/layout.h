/* layout.h - how the elements of a tensor lie in memory: density, and strided copies.
 *
 *     row-major   the last index moves fastest, without gaps        | 0 1 2 | 3 4 5 |
 *     dense       one block, each byte once, in any order of dims   | 0 3 | 1 4 | 2 5 |
 *     otherwise   gaps, repeats, or strides that go backwards
 *
 * To pack is to copy elements into a contiguous block: a dense tensor in memory order,
 * so that its strides hold in the block too, and any other in row-major order.  Pure
 * functions; only pli_layout_copy() allocates.
 */
#ifndef PLI_LAYOUT_H
#define PLI_LAYOUT_H

#include "status.h"

enum { PLI_MAX_DIMS = 64 };

typedef struct pli_dim {
    int64_t size;
    int64_t stride;
} pli_dim;

/* A layout of elements that can be reduced. */
typedef struct pli_layout {
    pl_dtype dtype;
    int n_dims;
    size_t n_elems;
    int is_lazy; /* memory does not hold the elements: conjugation or sign are not yet
                    applied, or the tensor wraps another and has no memory */
    pli_dim dims[PLI_MAX_DIMS]; /* strides in elements */
} pli_layout;

/* A tensor's memory. */
typedef struct pli_tensor {
    void *data; /* borrowed: valid while the tensor lives and is not modified */
    pli_layout layout;
} pli_tensor;

static inline size_t pli_layout_bytes(const pli_layout *layout)
{
    return layout->n_elems * pl_dtype_bytes(layout->dtype);
}

/* Non-zero if the elements fill one block of memory, each once. */
int pli_layout_is_dense(const pli_layout *layout);

/* Gives `layout` the row-major strides of its shape. */
void pli_layout_make_row_major(pli_layout *layout);

/* A copy without the unused dimensions, so that a thousand fit in a processor's cache.
 * The caller frees it by pli_free(). */
pl_status pli_layout_copy(const pli_layout *layout, pli_layout **out) PL_MUST_USE;

/* Non-zero if both put the same elements at the same places, as the same bits. */
int pli_layout_equal(const pli_layout *left, const pli_layout *right);

/* Packs the elements at `data` into `block`, and copies them back. */
void pli_layout_pack(const pli_layout *layout, const void *data, void *block);
void pli_layout_unpack(const pli_layout *layout, void *data, const void *block);

#endif
