/* counters.h - how far each rank has come, as one of them sees it, and whether what it
 * does has failed; for shared.c, peers.c and crossing.c alone.
 *
 * What a counter says is epoch << PLI_EPOCH_SHIFT | n: a rank that has gone on to a
 * later epoch is ahead of every count of this one.
 */
#ifndef PLI_COUNTERS_H
#define PLI_COUNTERS_H

#include "failure.h"
#include "shared.h"

static inline uint64_t base_of(const pli_shared_comm *self)
{
    return self->epoch << PLI_EPOCH_SHIFT;
}

typedef uint64_t (*pli_counter)(const pli_shared_comm *self, int rank);

static inline uint64_t posted_counter(const pli_shared_comm *self, int rank)
{
    return atomic_load_explicit(&pli_rank_of(self->segment, rank)->posted,
                                memory_order_seq_cst);
}

/* What a rank had done when it left this rank's epoch, where it has left it: a rank
 * that recovers has done nothing of what it leaves behind. */
static inline uint64_t done_counter(const pli_shared_comm *self, int rank)
{
    pli_rank *words = pli_rank_of(self->segment, rank);
    const uint64_t done = atomic_load_explicit(&words->done, memory_order_seq_cst);
    return done >> PLI_EPOCH_SHIFT <= self->epoch
               ? done
               : atomic_load_explicit(&words->done_before, memory_order_relaxed);
}

static inline uint64_t epoch_counter(const pli_shared_comm *self, int rank)
{
    return atomic_load_explicit(&pli_rank_of(self->segment, rank)->epoch,
                                memory_order_seq_cst);
}

/* Whether a rank has said goodbye: none of its counters grows any more. */
static inline int has_left(const pli_shared_comm *self, int rank)
{
    return atomic_load(&pli_rank_of(self->segment, rank)->life) == PLI_GONE;
}

/* The first rank whose counter is below `least`, or -1. */
static inline int laggard(const pli_shared_comm *self, pli_counter counter,
                          uint64_t least)
{
    for (int r = 0; r < self->super.world_size; r++)
        if (counter(self, r) < least)
            return r;
    return -1;
}

/* Non-zero, with *out filled, where this rank's epoch has failed. */
static inline int failure_stands(const pli_shared_comm *self, pli_failure *out)
{
    return pli_failure_get(self->segment, out) &&
           pli_failure_concerns(out, self->epoch);
}

/* Fails the epoch, by a rank's fault. */
static inline void set_failure(const pli_shared_comm *self, int rank, pli_reason reason)
{
    pli_failure_set(
        self->segment,
        &(pli_failure){.epoch = self->epoch, .rank = rank, .reason = reason});
}

#endif
