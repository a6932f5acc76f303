/* device_group.h - parameters to the devices of one process, and copies between them,
 * and sums of gradients, ordered by events alone.
 *
 *     python/dp
 *       \--> device_group --> backend/cuda, cuda_peers
 *
 * Member 0 has the model; every other member has a replica.  Two members may be one
 * device.  Parameters go to a member on its side stream, so that copies to several
 * devices run side by side; what member 0 packs is on its own.  Arguments and outputs,
 * for which the member has to wait in any case, go on the stream that it computes on.
 * Nothing here waits on the host, or allocates.
 *
 * All links carry about as much.  A large part of the parameters goes from member to
 * member, not from member 0 to each.
 *
 * `streams` are, by member, what its replica computes on: what they hold comes before,
 * and what is done here comes before what they are given next.  So memory that torch
 * has allocated for them may be freed, or written to, as soon as a call has returned.
 *
 * Packed parameters lie on member 0 for a moment: in a ring of equal slots, each of
 * which is written anew once its last use is done on the device.
 *
 * Any thread may call; calls come one after the other.
 */
#ifndef PLI_DEVICE_GROUP_H
#define PLI_DEVICE_GROUP_H

#include "backend/backend.h"

typedef struct pli_device_group pli_device_group;

enum { PLI_RING_SLOTS = 3, PLI_MOST_MEMBERS = 64 };

/* Memory of member 0, of PLI_RING_SLOTS slots; the caller's, and for a call alone. */
typedef struct pli_ring {
    void *memory;
    size_t slot_bytes; /* a multiple of PL_CACHE_LINE */
} pli_ring;

/* Members' backends, of CUDA; retained. */
pl_status pli_device_group_create(pl_backend *const *members, int n_members,
                                  pli_device_group **out) PL_MUST_USE;
void pli_device_group_destroy(pli_device_group *self);

/* Whether a member's kernels can read member 0's memory. */
int pli_device_group_reads_first(const pli_device_group *self, int member);

/* Moves of whole tensors from one member to another; `streams` of these two are read.
 */
pl_status pli_device_group_copy(pli_device_group *self, pl_stream *const *streams,
                                int source, int target, const pl_move *moves,
                                size_t n_moves) PL_MUST_USE;

/* Parameters that travel as one block. */
typedef struct pli_segment {
    const pl_move *moves; /* from member 0's memory; `to` is an offset in the block */
    size_t n_moves;
    size_t n_bytes;       /* of the block: one slot's at the most, or of one move that
                           * is all of it */
    void *const *targets; /* by member, where the block goes; NULL: nowhere */
} pli_segment;

/* Memory of a member; NULL: it has none.  The caller's, and for a call alone. */
typedef struct pli_room {
    void *memory;
    size_t n_bytes;
} pli_room;

/* Brings segments to the members that want them, in their order.  Blocks of one member
 * do not overlap.  With `sums`, members compare, and what a member has already does not
 * travel: they are, by member, room for a number of 64 bits a segment on member 0, for
 * two on the others.  NULL: all is sent. */
pl_status pli_device_group_broadcast(pli_device_group *self, pl_stream *const *streams,
                                     const pli_segment *segments, size_t n_segments,
                                     pli_ring ring, const pli_room *sums) PL_MUST_USE;

/* What member 0's stream holds comes before what sums of gradients write. */
pl_status pli_device_group_fence(pli_device_group *self,
                                 pl_stream *const *streams) PL_MUST_USE;

/* All sums of gradients that were begun come before what streams are given next. */
pl_status pli_device_group_settle(pli_device_group *self,
                                  pl_stream *const *streams) PL_MUST_USE;

/* ---- gradient_sum.c ------------------------------------------------------------- */

/* Gradients of one segment, from members 1, 2, ... to member 0, while all members
 * compute on.
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
