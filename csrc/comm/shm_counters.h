/* shm_counters.h - how far each rank has come, as one of them sees it, and whether what
 * it does has failed; for shm_comm.c, shm_wait.c, shm_counters.c, peer_check.c and
 * deadlock.c alone.
 *
 * What a counter says is epoch << PLI_EPOCH_SHIFT | n: a rank that has gone on to a
 * later epoch is ahead of every count of this one.
 */
#ifndef PLI_SHM_COUNTERS_H
#define PLI_SHM_COUNTERS_H

#include "failure.h"
#include "shm_comm.h"

static inline uint64_t pli_epoch_base(const pli_shm_comm *self)
{
    return self->epoch << PLI_EPOCH_SHIFT;
}

typedef uint64_t (*pli_counter)(const pli_shm_comm *self, int rank);

static inline uint64_t pli_counter_posted(const pli_shm_comm *self, int rank)
{
    return atomic_load_explicit(&pli_rank_of(self->segment, rank)->posted,
                                memory_order_seq_cst);
}

/* What a rank had done when it left this rank's epoch, where it has left it: a rank
 * that recovers has done nothing of what it leaves behind.  One function, as its
 * address is compared. */
uint64_t pli_counter_done(const pli_shm_comm *self, int rank);

static inline uint64_t pli_counter_epoch(const pli_shm_comm *self, int rank)
{
    return atomic_load_explicit(&pli_rank_of(self->segment, rank)->epoch,
                                memory_order_seq_cst);
}

/* A barrier's tag tells that it is one. */
static inline uint64_t pli_barrier_tag(unsigned mark)
{
    return (uint64_t)PL_BARRIER | (uint64_t)mark << 16;
}

static inline int pli_is_barrier_tag(uint64_t tag)
{
    return tag >> 48 == 0 && (tag & 0xffff) == PL_BARRIER;
}

/* Nobody waits for the notices of any rank but one. */
static inline uint64_t pli_counter_notice(const pli_shm_comm *self, int rank)
{
    return rank == self->notice_from
               ? atomic_load_explicit(&pli_rank_of(self->segment, rank)->notice,
                                      memory_order_seq_cst)
               : UINT64_MAX;
}

/* Whether a rank has said goodbye: none of its counters grows any more. */
static inline int pli_rank_has_left(const pli_shm_comm *self, int rank)
{
    return atomic_load(&pli_rank_of(self->segment, rank)->life) == PLI_GONE;
}

/* A rank whose counter is below `least`, sought from `from` on, or -1. */
static inline int pli_laggard_from(const pli_shm_comm *self, pli_counter counter,
                                   uint64_t least, int from)
{
    const int world_size = self->super.world_size;
    for (int r = from; r < from + world_size; r++)
        if (counter(self, r < world_size ? r : r - world_size) < least)
            return r < world_size ? r : r - world_size;
    return -1;
}

/* The first rank whose counter is below `least`, or -1. */
static inline int pli_laggard(const pli_shm_comm *self, pli_counter counter,
                              uint64_t least)
{
    return pli_laggard_from(self, counter, least, 0);
}

/* Whether a rank has said that all have come to `least`, in this rank's epoch. */
static inline int pli_all_have(const pli_shm_comm *self, const _Atomic uint64_t *word,
                               uint64_t least)
{
    const uint64_t told = atomic_load(word);
    return told >= least && told >> PLI_EPOCH_SHIFT == self->epoch;
}

/* The rank, as messages call it, that keeps this one from reaching `least`: one that
 * has not posted what comes next, or has not done its part.  `before`: the one that did
 * so last, at which others need not be looked at while it does. */
static inline int pli_awaited(const pli_shm_comm *self, pli_counter counter,
                              uint64_t least, int before)
{
    const uint64_t done = atomic_load_explicit(
        &pli_rank_of(self->segment, self->super.rank)->done, memory_order_relaxed);
    const int from = before < 0 ? 0 : before - self->segment->first_rank;
    int rank = pli_laggard_from(self, pli_counter_posted,
                                done < least ? done + 1 : least, from);
    if (rank < 0)
        rank = pli_laggard_from(self, counter, least, from);
    rank = rank < 0 ? PLI_RECORDER_SOMEBODY : rank + self->segment->first_rank;
    pli_recorder_awaits(self->super.recorder, rank);
    return rank;
}

/* Whether this rank has done its part of what ends a step, and waits for the others'.
 * Every rank has posted it then, and may see the end at any moment: this one must not
 * leave the step. */
static inline int pli_must_see_end(const pli_shm_comm *self, pli_counter counter,
                                   uint64_t least)
{
    const size_t slot = (least - pli_epoch_base(self)) & (self->segment->ring_ops - 1);
    return counter == pli_counter_done && self->ring[slot].ends_step &&
           counter(self, self->super.rank) >= least;
}

/* Non-zero, with *out filled, where this rank's epoch has failed. */
static inline int pli_failure_stands(const pli_shm_comm *self, pli_failure *out)
{
    return pli_failure_get(self->segment, out) &&
           pli_failure_concerns(out, self->epoch);
}

/* Fails the epoch, by a rank's fault. */
static inline void pli_epoch_fail(const pli_shm_comm *self, int rank, pli_reason reason)
{
    pli_failure_set(
        self->segment,
        &(pli_failure){.epoch = self->epoch, .rank = rank, .reason = reason});
}

/* ---- shm_counters.c ------------------------------------------------------------- */

/* One word that differs where two operations differ. */
uint64_t pli_tag_of(const pl_op *op);

/* Whether every rank has posted an operation of this epoch, and the same one: fails the
 * epoch where it is another.  The first to find it so tells all. */
int pli_have_all_posted(const pli_shm_comm *self, uint64_t number);

/* ... and has done its part of it. */
int pli_have_all_done(const pli_shm_comm *self, uint64_t number);

/* ---- peer_check.c and deadlock.c ------------------------------------------------ */

/* Once in a while, for who waits until every rank's counter has reached `least`: fails
 * the world where that can never be. */
void pli_peers_check(pli_shm_comm *self, pli_counter counter, uint64_t least);

/* Blames a rank whose process has ended below `least`; returns whether there was one.
 */
int pli_peers_blame_dead(const pli_shm_comm *self, pli_counter counter, uint64_t least);

/* Fails both worlds where `rank`, for which this rank waits, waits itself for this rank
 * in another world, and neither has a thread at hand that could come.  To be called
 * only after a while: another thread may be about to. */
void pli_deadlock_check(const pli_shm_comm *self, int rank);

/* ---- shm_wait.c ----------------------------------------------------------------- */

/* PL_OK, or why this rank's epoch has failed. */
pl_status pli_shm_check(const pli_shm_comm *self, const char *waiting_for) PL_MUST_USE;

/* Does every part that is ready, unless another thread is at it. */
void pli_shm_work(pl_comm *comm);

/* Waits until every rank's counter has reached `least`. */
pl_status pli_shm_wait_for(pli_shm_comm *self, pli_counter counter, uint64_t least,
                           int64_t slice_ns) PL_MUST_USE;

/* Of pli_host_ops. */
void pli_shm_notify(pl_comm *comm, unsigned n, unsigned bit);
pl_status pli_shm_await_notice(pl_comm *comm, int rank, unsigned n, int64_t slice_ns,
                               unsigned *bit) PL_MUST_USE;

#endif
