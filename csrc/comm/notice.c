/* notice.c - a bit that a rank leaves for the peers between two operations.
 *
 * All ranks issue the same operations, so "behind the operations issued so far, the
 * n-th time" is the same point of the program on each.  A rank that leaves the bit
 * waits for nobody; one that wants it waits until that rank has been there.
 */
#include "shm_counters.h"

/* epoch | operations issued : 32 | number : 7 | bit : 1 */
static uint64_t notice_of(const pli_shm_comm *self, unsigned n)
{
    return pli_epoch_base(self) + (atomic_load(&self->n_posted) << 8) + (uint64_t)n * 2;
}

void pli_shm_notify(pl_comm *comm, unsigned n, unsigned bit)
{
    pli_shm_comm *self = (pli_shm_comm *)(void *)comm;
    atomic_store(&pli_rank_of(self->segment, comm->rank)->notice,
                 notice_of(self, n) + bit);
    pli_wake_ranks(self->segment);
}

/* Whether a rank is at a barrier that this one has not come to: it has changed its
 * model.  See odd_one_out(). */
static int is_at_barrier(const pli_shm_comm *self, int rank)
{
    const uint64_t next = atomic_load(&self->n_posted) + 1;
    const uint64_t posted = pli_counter_posted(self, rank);
    if (posted < pli_epoch_base(self) + next ||
        posted >> PLI_EPOCH_SHIFT != self->epoch)
        return 0;
    const _Atomic uint64_t *tags = pli_tags_of(self->segment, rank);
    return pli_is_barrier_tag(atomic_load(&tags[next & (self->segment->ring_ops - 1)]));
}

pl_status pli_shm_await_notice(pl_comm *comm, int rank, unsigned n, int64_t slice_ns,
                               unsigned *bit)
{
    pl_status st = PL_OK;
    pli_shm_comm *self = (pli_shm_comm *)(void *)comm;
    const pli_rank *theirs = pli_rank_of(self->segment, rank);
    const uint64_t least = notice_of(self, n);
    self->notice_from = rank;
    st = pli_shm_wait_for(self, pli_counter_notice, least, slice_ns);
    if (st == PL_EAGAIN && atomic_load(&theirs->activity) == PL_FINISHING &&
        pli_counter_posted(self, rank) > pli_counter_posted(self, comm->rank) &&
        pli_counter_notice(self, rank) < least)
        PL_FAIL(PL_EMISMATCH,
                "rank %d: this rank is in a forward that rank %d has not had, which is "
                "at the end of its backward: every rank needs the same forwards that "
                "record gradients, or wrap the model with broadcast_buffers=False",
                comm->rank, rank);
    if (st == PL_EAGAIN && is_at_barrier(self, rank)) {
        *bit = 1; /* what this rank issues then is what both find to differ */
        st = PL_OK;
        goto done;
    }
    PL_TRY(st);
    const uint64_t notice = pli_counter_notice(self, rank);
    *bit = notice / 2 == least / 2 ? (unsigned)(notice & 1) : 0;
done:
    return st;
}
