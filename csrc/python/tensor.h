/* tensor.h - what C has to know of a tensor, and tensors made of our own memory.
 *
 * Both go through DLPack's exchange table where torch has one (2.10 and newer: 44 ns a
 * tensor, no copy, no Python call), and through capsules where it has not.
 */
#ifndef PLI_TENSOR_H
#define PLI_TENSOR_H

#include "../comm/room.h"
#include "../comm/window.h"
#include "state.h"

enum { PLI_MAX_DIMS = 64 };

typedef struct pli_dim {
    int64_t size;
    int64_t stride; /* in elements */
} pli_dim;

typedef struct pli_layout {
    pl_dtype dtype;
    int n_dims;
    size_t n_elems;
    pli_dim dims[PLI_MAX_DIMS];
} pli_layout;

typedef struct pli_tensor {
    void *data; /* borrowed: valid while the tensor lives unmodified */
    pli_layout layout;
} pli_tensor;

/* Reads a strided CPU tensor; -1 with an exception that begins with `what`:
 * NotImplementedError for one on another device, TypeError for anything else. */
int pli_tensor_read(const module_state *state, PyObject *object, const char *what,
                    pli_tensor *out);

/* Non-zero where the elements fill one block of memory, each once. */
int pli_layout_is_dense(const pli_layout *layout);

/* Gives `layout` the row-major strides of its shape. */
void pli_layout_make_row_major(pli_layout *layout);

/* A copy, no longer than its dimensions, for pli_free(): a thousand of them fit in a
 * processor's cache. */
pl_status pli_layout_copy(const pli_layout *layout, pli_layout **out) PL_MUST_USE;

/* Non-zero where both put the same elements at the same places. */
int pli_layout_equal(const pli_layout *left, const pli_layout *right);

static inline size_t pli_layout_bytes(const pli_layout *layout)
{
    return layout->n_elems * pl_dtype_bytes(layout->dtype);
}

/* A new torch tensor of layout `layout` at `offset` of the window, counted there as a
 * view of `slot` until its storage dies. */
PyObject *pli_tensor_view(const module_state *state, pli_window *window, size_t slot,
                          size_t offset, const pli_layout *layout);

/* A new torch tensor over like->data, with the dtype, shape and strides of `like`; the
 * room that it lies in stays mapped until its storage dies. */
PyObject *pli_tensor_in_room(const module_state *state, pli_room *room,
                             const dl_tensor *like);

/* A new torch tensor over memory that outlives it. */
PyObject *pli_tensor_borrow(const module_state *state, void *data,
                            const pli_layout *layout);

#endif
