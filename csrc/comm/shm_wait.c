/* shm_wait.c - does this rank's parts, and waits for the others: operations, epochs and
 * notices.
 *
 * A notice is a bit that a rank leaves for the peers between two operations.  All ranks
 * issue the same operations, so "after the operations issued so far, the n-th time" is
 * the same point of the program on each.  A rank that leaves the bit does not wait; one
 * that needs it waits until that rank has reached the point.
 */
#include "core/backoff.h"
#include "shm_counters.h"

enum { SLEEP_MS = 10 }; /* between two checks of the peers' processes */

pl_status pli_shm_check(const pli_shm_comm *self, const char *waiting_for)
{
    pli_failure failure = {0};
    pli_failure cause;
    if (!pli_failure_stands(self, &failure))
        return PL_OK;
    if (pli_failure_is_final(&failure) &&
        pli_failure_raised_in(self->segment, self->epoch, &cause))
        failure = cause;
    return pli_failure_report(self->segment, &failure, self->super.rank, waiting_for);
}

void pli_shm_work(pl_comm *comm)
{
    pli_shm_comm *self = pli_shm_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    const _Atomic uint64_t *all_posted = &pli_header_of(self->segment)->all_posted;
    pli_failure failure;
    if (!pli_spin_try_lock(&self->busy))
        return; /* another thread is doing so */
    while (self->n_done < atomic_load_explicit(&self->n_posted, memory_order_acquire)) {
        const uint64_t n = self->n_done + 1;
        if (!pli_all_have(self, all_posted, pli_epoch_base(self) + n) ||
            pli_failure_stands(self, &failure))
            break;
        pli_part_run(self, &self->ring[n & (self->segment->ring_ops - 1)]);
        self->n_done = n;
        atomic_store(&mine->done, pli_epoch_base(self) + n);
        (void)pli_have_all_done(self, pli_epoch_base(self) + n);
    }
    pli_spin_unlock(&self->busy);
}

/* ---- waiting -------------------------------------------------------------------- */

static int have_all_come(const pli_shm_comm *self, pli_counter counter, uint64_t least)
{
    return counter == pli_counter_done ? pli_have_all_done(self, least)
                                       : pli_laggard(self, counter, least) < 0;
}

/* Likewise, as far as is known without looking at every rank. */
static int is_said_to_have_come(const pli_shm_comm *self, pli_counter counter,
                                uint64_t least)
{
    return counter == pli_counter_done
               ? pli_all_have(self, &pli_header_of(self->segment)->all_done, least)
               : have_all_come(self, counter, least);
}

static void sleep_briefly(pli_shm_comm *self, pli_counter counter, uint64_t least)
{
    pli_header *header = pli_header_of(self->segment);
    pli_failure failure;
    atomic_fetch_add(&header->n_waiters, 1);
    const uint32_t before = atomic_load(&header->wakeup);
    const uint64_t next =
        atomic_load(&pli_rank_of(self->segment, self->super.rank)->done) + 1;
    const int has_work = next <= pli_epoch_base(self) + atomic_load(&self->n_posted) &&
                         pli_have_all_posted(self, next);
    if (!has_work && !have_all_come(self, counter, least) &&
        !pli_failure_stands(self, &failure))
        pli_futex_wait(&header->wakeup, before, SLEEP_MS * PLI_MS);
    atomic_fetch_sub(&header->n_waiters, 1);
}

pl_status pli_shm_wait_for(pli_shm_comm *self, pli_counter counter, uint64_t least,
                           int64_t slice_ns)
{
    pl_status st = PL_OK;
    const int64_t begin = pli_recorder_wait_begins(self->super.recorder);
    pli_failure failure;
    int n_spins = self->n_spins;
    int awaited = PLI_RECORDER_NOBODY;
    int is_failed = 0;
    for (;;) {
        pli_shm_work(&self->super);
        /* The rank that failed may have seen the awaited end before. */
        is_failed = pli_failure_stands(self, &failure);
        if (is_said_to_have_come(self, counter, least) ||
            (is_failed && have_all_come(self, counter, least)))
            break;
        if (is_failed)
            PL_TRY(pli_shm_check(self, ", waiting"));
        awaited = pli_awaited(self, counter, least, awaited);
        if (pli_spin(&n_spins))
            continue;
        pli_progress_others(self->progress, &self->super);
        sleep_briefly(self, counter, least);
        pli_peers_check(self, counter, least);
        if (have_all_come(self, counter, least))
            break;
        if (pli_now_ns() - begin > slice_ns &&
            (slice_ns == 0 || !pli_must_see_end(self, counter, least)))
            PL_FAIL(PL_EAGAIN, "not done yet");
    }
    self->silence = (pli_stopwatch){0};
done:
    pli_recorder_wait_ends(self->super.recorder, begin, awaited);
    return st;
}

/* ---- notices -------------------------------------------------------------------- */

/* epoch | operations issued : 32 | number : 7 | bit : 1 */
static uint64_t notice_of(const pli_shm_comm *self, unsigned n)
{
    return pli_epoch_base(self) + (atomic_load(&self->n_posted) << 8) + (uint64_t)n * 2;
}

void pli_shm_notify(pl_comm *comm, unsigned n, unsigned bit)
{
    pli_shm_comm *self = pli_shm_of(comm);
    atomic_store(&pli_rank_of(self->segment, comm->rank)->notice,
                 notice_of(self, n) + bit);
    pli_wake_ranks(self->segment);
}

/* Whether a rank is at a barrier that this one has not reached: it has changed its
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
    pli_shm_comm *self = pli_shm_of(comm);
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
        *bit = 1; /* both then find that this rank's next operation differs */
        st = PL_OK;
        goto done;
    }
    PL_TRY(st);
    const uint64_t notice = pli_counter_notice(self, rank);
    *bit = notice / 2 == least / 2 ? (unsigned)(notice & 1) : 0;
done:
    return st;
}
