/* tensor.h - reads a tensor's memory and layout, and makes tensors over our own memory.
 *
 * Both use DLPack's exchange table if torch has one (2.10 and newer: 44 ns a tensor, no
 * copy, no Python call), and capsules otherwise.
 */
#ifndef PLI_TENSOR_H
#define PLI_TENSOR_H

#include "comm/window.h"
#include "core/layout.h"
#include "state.h"

/* Reads a strided CPU tensor; 0, or -1 with an exception that begins with `what`:
 * NotImplementedError for a tensor on another device, TypeError for other objects. */
int pli_tensor_read(const module_state *state, PyObject *object, const char *what,
                    pli_tensor *out);

/* The same for a tensor on `place`; ValueError if it is elsewhere.  Does not wait for
 * writes that are still on a stream. */
int pli_tensor_read_on(const module_state *state, dl_device place, PyObject *object,
                       const char *what, pli_tensor *out);

/* The same, but also accepts a tensor that wraps others and has no memory: its layout
 * is lazy, and only torch can copy it. */
int pli_tensor_read_any(const module_state *state, dl_device place, PyObject *object,
                        const char *what, pli_tensor *out);

/* The same for a gradient, which is asked for a lazy sign whatever its size.  The other
 * readings ask tensors of one element alone: only a private function of torch negates
 * larger ones without gaps.  Subclasses are not asked, because some refuse. */
int pli_tensor_read_grad(const module_state *state, dl_device place, PyObject *object,
                         const char *what, pli_tensor *out);

/* The device of a strided tensor. */
int pli_tensor_place(const module_state *state, PyObject *object, const char *what,
                     dl_device *out);

/* A part of a window of gradients. */
typedef struct pli_view {
    pli_window *window;
    size_t slot;   /* the window counts views by slot */
    size_t offset; /* in the window */
} pli_view;

/* A new CPU tensor of layout `layout` over a view.  The window counts the view until
 * the tensor's storage is freed. */
PyObject *pli_tensor_view(const module_state *state, const pli_view *view,
                          const pli_layout *layout);

/* The same over memory that must outlive it. */
PyObject *pli_tensor_borrow(const module_state *state, void *data,
                            const pli_layout *layout);

/* Tells autograd that all tensors of a sequence were overwritten; runs no Python. */
int pli_increment_versions(const module_state *state, PyObject *tensors);

/* A tensor's version counter, or -1 with an exception. */
long pli_tensor_version(PyObject *tensor);

/* Has torch copy a tensor's values to another, unseen by autograd; 0, or -1. */
int pli_tensor_overwrite(PyObject *to, PyObject *from);

#endif
