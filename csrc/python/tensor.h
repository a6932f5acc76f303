/* tensor.h - what C has to know of a tensor, and tensors made of our own memory.
 *
 * Both go through DLPack's exchange table where torch has one (2.10 and newer: 44 ns a
 * tensor, no copy, no Python call), and through capsules where it has not.
 */
#ifndef PLI_TENSOR_H
#define PLI_TENSOR_H

#include "comm/window.h"
#include "core/layout.h"
#include "state.h"

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

/* The same, and of a tensor that wraps others, and has no memory of its own: its layout
 * is lazy, and torch alone can copy it. */
int pli_tensor_read_any(const module_state *state, dl_device place, PyObject *object,
                        const char *what, pli_tensor *out);

/* Where a strided tensor is. */
int pli_tensor_place(const module_state *state, PyObject *object, const char *what,
                     dl_device *out);

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

/* A new torch tensor over memory, on `place`, that outlives it. */
PyObject *pli_tensor_borrow(const module_state *state, dl_device place, void *data,
                            const pli_layout *layout);

/* Tells autograd that all tensors of a sequence were overwritten; no Python runs. */
int pli_increment_versions(const module_state *state, PyObject *tensors);

/* A tensor's version counter, or -1 with an exception. */
long pli_tensor_version(PyObject *tensor);

/* Overwrites a tensor with another's values, by torch, unseen by autograd; -1. */
int pli_tensor_overwrite(PyObject *to, PyObject *from);

#endif
