/* device_group.h - copies tensors between the devices of one process and sums
 * gradients; only events order the work.
 *
 *     python/dp
 *       \--> device_group --> backend/cuda
 *
 * Member 0 has the model; every other member has a replica.  Two members may share a
 * device.  A member receives parameters on its side stream, so that copies to several
 * devices overlap; member 0 packs on its own side stream.  Arguments and outputs, which
 * a member must wait for anyway, are copied on its compute stream.  Apart from create,
 * calls allocate nothing, and block the host only if they fail.
 *
 * Members pass a large segment on, one to the next, so that member 0's link does not
 * carry a copy for each.  All links have about the same bandwidth.
 *
 * `streams` holds the compute stream of each member.  A call's work runs after the work
 * that these streams already hold, and before work enqueued on them later.  So the
 * caller may free or overwrite memory that torch allocated on these streams as soon as
 * a call returns.
 *
 * Member 0 packs parameters into a ring of equal slots.  A slot is overwritten once its
 * last use is done on the device.
 *
 * Any thread may call; a lock serializes all calls but pli_gradient_sum_pack().
 */
#ifndef PLI_DEVICE_GROUP_H
#define PLI_DEVICE_GROUP_H

#include <pthread.h>

#include "backend/backend.h"

typedef struct pli_device_group pli_device_group;

enum { PLI_RING_SLOTS = 3, PLI_MOST_MEMBERS = 64 };

/* Memory of member 0 with PLI_RING_SLOTS slots; borrowed for a call. */
typedef struct pli_ring {
    void *memory;
    size_t slot_bytes; /* a multiple of PL_CACHE_LINE */
} pli_ring;

/* `members` are CUDA backends, which the group retains. */
pl_status pli_device_group_create(pl_backend *const *members, int n_members,
                                  pli_device_group **out) PL_MUST_USE;
void pli_device_group_destroy(pli_device_group *self);

/* Whether a member's kernels can read member 0's memory. */
int pli_device_group_reads_first(const pli_device_group *self, int member);

/* Copies whole tensors from one member to another; uses the streams of these two. */
pl_status pli_device_group_copy(pli_device_group *self, pl_stream *const *streams,
                                int source, int target, const pl_move *moves,
                                size_t n_moves) PL_MUST_USE;

/* Parameters that travel as one block. */
typedef struct pli_segment {
    const pl_move *moves; /* from member 0's memory; `to` is an offset in the block */
    size_t n_moves;
    size_t n_bytes;       /* of the block: at most one slot, unless one move covers the
                           * block */
    void *const *targets; /* the block's address on each member, or NULL to skip it */
} pli_segment;

/* Memory of a member, or NULL; borrowed for a call. */
typedef struct pli_room {
    void *memory;
    size_t n_bytes;
} pli_room;

/* Copies segments, in order, to the members that have a target for them.  Blocks of one
 * member must not overlap.  If `sums` is NULL, or one of these members cannot read
 * member 0's memory, sends all segments.  Otherwise compares checksums, and sends
 * segments that differ: sums[k] is memory of member k, for 64-bit numbers: one per
 * segment on member 0, two per segment on the others. */
pl_status pli_device_group_broadcast(pli_device_group *self, pl_stream *const *streams,
                                     const pli_segment *segments, size_t n_segments,
                                     pli_ring ring, const pli_room *sums) PL_MUST_USE;

/* Makes later sums of gradients wait for the work that member 0's stream holds. */
pl_status pli_device_group_fence(pli_device_group *self,
                                 pl_stream *const *streams) PL_MUST_USE;

/* Makes all streams wait for the sums of gradients begun so far. */
pl_status pli_device_group_settle(pli_device_group *self,
                                  pl_stream *const *streams) PL_MUST_USE;

/* ---- sums of gradients ---------------------------------------------------------- */

/* Sums the gradients of one segment, from members 1, 2, ... to member 0, while all
 * members go on computing.
 *
 *     member k's stream    ... pack ...  backward goes on
 *                                 \ event
 *     adder's side stream         wait, read all rows, add, write to member 0
 *                                                                       \ event
 *     member 0's stream    ... backward goes on ...                     wait
 *
 * No compute stream waits for a sum before pli_gradient_sum_end().  So keep the memory
 * of rows and of the sum until pli_device_group_settle() has made all streams wait.
 */
typedef struct pli_gradient_sum pli_gradient_sum;

/* `group` must outlive it.  Only one sum at a time may be in progress. */
pl_status pli_gradient_sum_create(pli_device_group *group,
                                  pli_gradient_sum **out) PL_MUST_USE;
void pli_gradient_sum_destroy(pli_gradient_sum *self);

/* Packs a member's gradients into `row` by `moves`, on its compute stream.  Members may
 * call concurrently. */
pl_status pli_gradient_sum_pack(pli_gradient_sum *sum, int member, pl_stream *stream,
                                const pl_move *moves, size_t n_moves,
                                const void *row) PL_MUST_USE;

/* to = the sum of the rows packed since the last sum, in the order of members; 16-bit
 * floats are added in float32 and rounded once.  `to` is memory of member 0 that
 * existed at the last pli_device_group_fence().  rooms[k] is memory of member k for
 * several rows; only the group's sums may use it. */
pl_status pli_gradient_sum_begin(pli_gradient_sum *self, const pl_move *to,
                                 const pli_room *rooms) PL_MUST_USE;

/* Makes `stream`, of member 0, wait for the sum. */
pl_status pli_gradient_sum_end(pli_gradient_sum *sum, pl_stream *stream) PL_MUST_USE;

/* ---- the state, for device_group.c and its tests --------------------------------- */

typedef struct pli_group_member {
    pl_backend *backend;
    pl_stream *side;
    pl_event *mark;
    pl_event *has_read[PLI_RING_SLOTS]; /* in a broadcast, by slot */
    uint64_t readers; /* bits: members that read its blocks, in a broadcast */
    int reads_first;  /* its kernels can read member 0's memory */
} pli_group_member;

struct pli_device_group {
    pthread_mutex_t lock;
    int n_members;
    unsigned n_sent;                       /* slots of the ring written so far */
    uint64_t slot_readers[PLI_RING_SLOTS]; /* bits: members that have read it */
    size_t passed_bytes; /* segments of this size or more go from member to member */
    unsigned n_sums;     /* sums of gradients begun so far */
    size_t shard_bytes;  /* the least shard of a sum */
    pli_group_member members[];
};

#endif
