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

/* The same of a tensor on `place`: ValueError for one that is elsewhere.  What its
 * stream has yet to write is not waited for. */
int pli_tensor_read_on(const module_state *state, dl_device place, PyObject *object,
                       const char *what, pli_tensor *out);

/* Where a strided tensor is. */
int pli_tensor_place(const module_state *state, PyObject *object, const char *what,
                     dl_device *out);

/* A place in words: "the CPU", "cuda:1". */
typedef struct pli_place_text {
    char text[48];
} pli_place_text;
pli_place_text pli_place_in_words(dl_device place);

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

/* Part of a window onto gradients that are on `place`. */
typedef struct pli_view {
    pli_window *window;
    dl_device place;
    size_t slot;   /* whose views count this one */
    size_t offset; /* in the window */
} pli_view;

/* A new torch tensor of layout `layout` over a view, counted there until its storage
 * dies. */
PyObject *pli_tensor_view(const module_state *state, const pli_view *view,
                          const pli_layout *layout);

/* A new torch tensor over like->data, with the dtype, shape and strides of `like`; the
 * room that it lies in stays mapped until its storage dies. */
PyObject *pli_tensor_in_room(const module_state *state, pli_room *room,
                             const dl_tensor *like);

/* A new torch tensor over memory, on `place`, that outlives it. */
PyObject *pli_tensor_borrow(const module_state *state, dl_device place, void *data,
                            const pli_layout *layout);

#endif
