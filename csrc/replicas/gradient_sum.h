/* gradient_sum.h - gradients of one segment, from members 1, 2, ... to member 0, while
 * all members compute on.
 *
 *     member k's stream    ... pack ...  backward goes on
 *                                 \ event
 *     adder's side stream         wait, read all rows, add, write to member 0
 *                                                                       \ event
 *     member 0's stream    ... backward goes on ...                     wait
 *
 * No stream that a member computes on waits for a sum before pli_gradient_sum_end().
 * So the memory of rows and of the sum must stay until pli_device_group_settle() has
 * had all streams wait.
 */
#ifndef PLI_GRADIENT_SUM_H
#define PLI_GRADIENT_SUM_H

#include "device_group.h"

typedef struct pli_gradient_sum pli_gradient_sum;

/* `group` outlives it.  One sum at a time may be on its way. */
pl_status pli_gradient_sum_create(pli_device_group *group,
                                  pli_gradient_sum **out) PL_MUST_USE;
void pli_gradient_sum_destroy(pli_gradient_sum *self);

/* Makes moves on the stream that a member computes on: they make its row.  Members may
 * call at once. */
pl_status pli_gradient_sum_pack(pli_gradient_sum *self, int member, pl_stream *stream,
                                const pl_move *moves, size_t n_moves,
                                const void *row) PL_MUST_USE;

/* to = the rows that were packed since the last sum, in the order of members: 16-bit
 * floats are added up in float32 and rounded once.  `to` is memory of member 0 that was
 * there at the last pli_device_group_fence(); `rooms`, by member, are for several rows,
 * and belong to the group's sums alone. */
pl_status pli_gradient_sum_begin(pli_gradient_sum *self, const pl_move *to,
                                 const pli_room *rooms) PL_MUST_USE;

/* Has `stream`, of member 0, come behind the sum. */
pl_status pli_gradient_sum_end(pli_gradient_sum *self, pl_stream *stream) PL_MUST_USE;

#endif
