/* shm_counters.h - how far each rank has come, as one of them sees it, and whether its
 * epoch has failed; for shm_comm.c, shm_wait.c, shm_counters.c, peer_check.c and
 * deadlock.c only.
 *
 * A counter's value is epoch << PLI_EPOCH_SHIFT | n: a rank in a later epoch is ahead
 * of every count of this one.
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

/* What a rank has done; if it has left this rank's epoch, what it had done by then, as
 * a rank that recovers does nothing more of the old epoch.  Not inline, because callers
 * compare its address. */
uint64_t pli_counter_done(const pli_shm_comm *self, int rank);

static inline uint64_t pli_counter_epoch(const pli_shm_comm *self, int rank)
{
    return atomic_load_explicit(&pli_rank_of(self->segment, rank)->epoch,
                                memory_order_seq_cst);
}

/* A barrier's tag differs from the tags of all other operations. */
static inline uint64_t pli_barrier_tag(unsigned mark)
{
    return (uint64_t)PL_BARRIER | (uint64_t)mark << 16;
}

static inline int pli_is_barrier_tag(uint64_t tag)
{
    return tag >> 48 == 0 && (tag & 0xffff) == PL_BARRIER;
}

/* UINT64_MAX for every rank but notice_from: this rank waits for no other notice. */
static inline uint64_t pli_counter_notice(const pli_shm_comm *self, int rank)
{
    return rank == self->notice_from
               ? atomic_load_explicit(&pli_rank_of(self->segment, rank)->notice,
                                      memory_order_seq_cst)
               : UINT64_MAX;
}

/* Whether a rank has left: none of its counters grows any more. */
static inline int pli_rank_has_left(const pli_shm_comm *self, int rank)
{
    return atomic_load(&pli_rank_of(self->segment, rank)->life) == PLI_GONE;
}

/* A rank whose counter is below `least`, searched from `from` on, or -1. */
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

/* Whether the header shows that all have reached `least`, in this rank's epoch. */
static inline int pli_all_have(const pli_shm_comm *self, const _Atomic uint64_t *word,
                               uint64_t least)
{
    const uint64_t told = atomic_load(word);
    return told >= least && told >> PLI_EPOCH_SHIFT == self->epoch;
}

/* The rank, as numbered in messages, that keeps this one from reaching `least`: it has
 * not posted the next operation, or not done its part.  `before` is the previous
 * result; while that rank still lags, no other is looked at. */
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

/* Whether this rank has done its part of the operation that ends a step, and waits for
 * the others.  Every rank has posted it then, and may see its end at any moment, so
 * this rank must not leave the step. */
static inline int pli_must_see_end(const pli_shm_comm *self, pli_counter counter,
                                   uint64_t least)
{
    const size_t slot = (least - pli_epoch_base(self)) & (self->segment->ring_ops - 1);
    return counter == pli_counter_done && self->ring[slot].ends_step &&
           counter(self, self->super.rank) >= least;
}

/* Returns non-zero and fills *out if this rank's epoch has failed. */
static inline int pli_failure_stands(const pli_shm_comm *self, pli_failure *out)
{
    return pli_failure_get(self->segment, out) &&
           pli_failure_concerns(out, self->epoch);
}

/* Fails the epoch and blames `rank`. */
static inline void pli_epoch_fail(const pli_shm_comm *self, int rank, pli_reason reason)
{
    pli_failure_set(
        self->segment,
        &(pli_failure){.epoch = self->epoch, .rank = rank, .reason = reason});
}

/* ---- shm_counters.c ------------------------------------------------------------- */

/* A word that differs for different operations. */
uint64_t pli_tag_of(const pl_op *op);

/* Whether every rank has posted operation `number` of this epoch, and the same one.
 * Fails the epoch if they differ.  The first rank to find all posted tells all. */
int pli_have_all_posted(const pli_shm_comm *self, uint64_t number);

/* ... and has done its part of it. */
int pli_have_all_done(const pli_shm_comm *self, uint64_t number);

/* ---- peer_check.c and deadlock.c ------------------------------------------------ */

/* Called now and then by a rank that waits until every counter has reached `least`.
 * Fails the world if that can never happen. */
void pli_peers_check(pli_shm_comm *self, pli_counter counter, uint64_t least);

/* Blames a rank whose process ended below `least`; returns whether it found one. */
int pli_peers_blame_dead(const pli_shm_comm *self, pli_counter counter, uint64_t least);

/* Fails both worlds if this rank waits for `rank`, `rank` waits for this rank in
 * another world, and neither has another thread to do the rest.  Call it only after a
 * while: such a thread may be about to come. */
void pli_deadlock_check(const pli_shm_comm *self, int rank);

/* ---- shm_wait.c ----------------------------------------------------------------- */

/* PL_OK, or why this rank's epoch has failed. */
pl_status pli_shm_check(const pli_shm_comm *self, const char *waiting_for) PL_MUST_USE;

/* Does every part that is ready, unless another thread is doing so. */
void pli_shm_work(pl_comm *comm);

/* Waits until every rank's counter has reached `least`. */
pl_status pli_shm_wait_for(pli_shm_comm *self, pli_counter counter, uint64_t least,
                           int64_t slice_ns) PL_MUST_USE;

/* Functions of pli_host_ops. */
void pli_shm_notify(pl_comm *comm, unsigned n, unsigned bit);
pl_status pli_shm_await_notice(pl_comm *comm, int rank, unsigned n, int64_t slice_ns,
                               unsigned *bit) PL_MUST_USE;

#endif
