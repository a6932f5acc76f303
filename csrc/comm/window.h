/* window.h - this rank's buckets, for the eyes of the user.
 *
 * What the user sees as a parameter's gradient is a view into a window.  Views are
 * counted, each by the parameter it belongs to.  When a slot is about to be written
 * while somebody still holds an old view of it (kept gradients), or the process is
 * about to fork, the whole window is *retired*, so that every alias keeps its values,
 * and new views come from a new window.  A window lives as long as its reducer or any
 * view of it.
 *
 *     host     a second mapping: retired, its pages become a private copy at the same
 *              address, at any time
 *     device   a share of the world's memory: retired, the world takes other memory,
 *              and the old stays with the views; only before a step's first gradient,
 *              and not while a graph is captured
 */
#ifndef PLI_WINDOW_H
#define PLI_WINDOW_H

#include <stdatomic.h>

#include "comm.h"

typedef struct pli_window {
    char *base;
    size_t offset_bytes; /* in the arena */
    size_t n_bytes;
    pl_comm *comm;         /* borrowed until the reducer's share is released; NULL:
                              retired */
    pli_memory_ref *ref;   /* on a device; NULL: `base` is a mapping */
    atomic_size_t n_users; /* the reducer, and each view */
    size_t n_slots;
    atomic_uint *n_views; /* by slot */
} pli_window;

/* Shows [offset_bytes, offset_bytes + n_bytes) of this rank's arena. */
pl_status pli_window_create(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                            size_t n_slots, pli_window **out) PL_MUST_USE;

/* Leaves the window's memory to its views, unless none is left to see it.  The window
 * can only be released then. */
pl_status pli_window_retire(pli_window *window) PL_MUST_USE;

/* Counts a view of `slot` in; pli_window_unsee() counts it out, from any thread. */
void pli_window_see(pli_window *window, size_t slot);
void pli_window_unsee(pli_window *window, size_t slot);

/* Views of any slot. */
size_t pli_window_n_views(const pli_window *window);

/* The reducer's own share; NULL is allowed. */
void pli_window_release(pli_window *window);

#endif
