/* window.h - this rank's buckets in host memory, as the user sees them.
 *
 * The user sees a parameter's gradient as a view into a window.  The window counts its
 * views by slot, one slot per parameter.  If a slot will be written while the user
 * still holds an old view of it (kept gradients), or if the process will fork, the
 * whole window is *retired*: every alias keeps its values, and new views come from a
 * new window.  A window lives as long as its reducer or any view of it.  It is a second
 * mapping of the arena; retiring makes its pages a private copy at the same address.
 */
#ifndef PLI_WINDOW_H
#define PLI_WINDOW_H

#include <stdatomic.h>

#include "comm.h"

typedef struct pli_window {
    char *base;
    size_t offset_bytes; /* in the arena */
    size_t n_bytes;
    pl_comm *comm; /* borrowed until the reducer releases the window; NULL: retired */
    atomic_size_t n_users; /* the reducer, and each view */
    size_t n_slots;
    atomic_uint *n_views; /* per slot */
} pli_window;

/* Shows [offset_bytes, offset_bytes + n_bytes) of this rank's arena. */
pl_status pli_window_create(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                            size_t n_slots, pli_window **out) PL_MUST_USE;

/* Leaves the window's memory to its views; does nothing if it has none.  Afterwards the
 * window can only be released. */
pl_status pli_window_retire(pli_window *window) PL_MUST_USE;

/* Counts a view of `slot`; pli_window_unsee() removes it again, from any thread. */
void pli_window_see(pli_window *window, size_t slot);
void pli_window_unsee(pli_window *window, size_t slot);

/* Number of views, over all slots. */
size_t pli_window_n_views(const pli_window *window);

/* Drops the share of the reducer, or of a view; NULL is allowed. */
void pli_window_release(pli_window *window);

#endif
