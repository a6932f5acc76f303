/* wait.h - waits in the core with the GIL released, in slices, and handles signals
 * between two slices. */
#ifndef PLI_WAIT_H
#define PLI_WAIT_H

#include "comm/comm.h"
#include "state.h"

/* Any pl_*_wait: returns PL_EAGAIN after about slice_ns. */
typedef pl_status (*pli_slice_fn)(void *context, int64_t slice_ns);

/* Calls `slice` while it returns PL_EAGAIN; 0, or -1 with an exception set. */
int pli_wait_in_slices(const module_state *state, pli_slice_fn slice, void *context);

/* Waits for the operations up to the ticket; 0, or -1 with an exception set. */
int pli_wait_for_ticket(const module_state *state, pl_comm *comm, pl_ticket ticket);

/* Runs signal handlers, and returns whether one has raised; takes the GIL. */
int pli_is_interrupted(void *ignored);

#endif
