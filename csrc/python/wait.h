/* wait.h - waiting in the core with the GIL released, in slices between which signals
 * are seen. */
#ifndef PLI_WAIT_H
#define PLI_WAIT_H

#include "comm/comm.h"
#include "state.h"

/* PL_EAGAIN after about slice_ns: any pl_*_wait or _recover. */
typedef pl_status (*pli_slice_fn)(void *context, int64_t slice_ns);

/* Calls `slice` until it is done; -1 with an exception set. */
int pli_wait_in_slices(const module_state *state, pli_slice_fn slice, void *context);

/* Waits until every rank did its part up to the ticket; -1 with an exception set. */
int pli_wait_for_ticket(const module_state *state, pl_comm *comm, pl_ticket ticket);

/* Whether a signal has come for this thread: for who cannot raise; takes the GIL. */
int pli_is_interrupted(void *ignored);

#endif
