/* crossing.h - two ranks that wait for one another in two worlds.
 *
 * Where rank 0 runs backward through wrapper A and then B, and rank 1 through B and
 * then A, each waits at its first for gradients that the other computes after it:
 *
 *     rank 0   A posted, waits -> rank 1          (B comes later)
 *     rank 1   B posted, waits -> rank 0          (A comes later)
 *
 * Nobody can help them, so they are told at once and not at the deadline.
 */
#ifndef PLI_CROSSING_H
#define PLI_CROSSING_H

#include "shared.h"

/* Tells the threads of this process apart; never 0. */
uint32_t pli_thread_number(void);

/* Fails both worlds where `rank`, for which this rank waits, waits itself for this rank
 * in another world, and neither has a thread at hand that could come.  To be called
 * only after some patience: another thread may be about to. */
void pli_crossing_check(const pli_shared_comm *self, int rank);

#endif
