/* wait.h - waits in the core with the GIL released, in slices, and handles signals
 * between two slices. */
#ifndef PLI_WAIT_H
#define PLI_WAIT_H

#include "comm/comm.h"
#include "state.h"

/* Waits for the operations up to the ticket; 0, or -1 with an exception set. */
int pli_wait_for_ticket(const module_state *state, pl_comm *comm, pl_ticket ticket);

/* Runs signal handlers, and returns whether one has raised; takes the GIL. */
int pli_is_interrupted(void *ignored);

#endif
