/* shm_comm.c - ranks of a host post operations in shared memory, do their parts, wait
 * for one another, and fail.
 *
 * Posting an operation, or doing a part of it, is one store.  Each rank then looks at
 * the others up to the first that is behind.  The last rank finds none behind, writes
 * the operation's number into the header and wakes all.  So a waiting rank reads one
 * word, however many ranks there are, and is woken when it can go on.  As the last rank
 * may die before it writes, a rank also looks at every other before it sleeps.
 */
#include "shm_comm.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/backoff.h"
#include "core/clock.h"
#include "core/hash.h"
#include "failure.h"

enum {
    SPINS_WITH_CORES = 1000, /* pauses before a sleep: 20 to 40 us */
    SPINS_CROWDED = 100,     /* ... if ranks outnumber cores */
    SLEEP_MS = 10,           /* between two checks of the peers' processes */
    DEADLOCK_MS = 500        /* of silence, before a check for deadlock */
};

static pli_shm_comm *shm_of(pl_comm *comm)
{
    return (pli_shm_comm *)(void *)comm;
}

typedef uint64_t (*counter_fn)(const pli_shm_comm *self, int rank);

static uint64_t counter_posted(const pli_shm_comm *self, int rank)
{
    return atomic_load(&pli_rank_of(self->segment, rank)->posted);
}

static uint64_t counter_done(const pli_shm_comm *self, int rank)
{
    return atomic_load(&pli_rank_of(self->segment, rank)->done);
}

/* UINT64_MAX for every rank but notice_from: this rank waits for no other notice. */
static uint64_t counter_notice(const pli_shm_comm *self, int rank)
{
    return rank == self->notice_from
               ? atomic_load(&pli_rank_of(self->segment, rank)->notice)
               : UINT64_MAX;
}

/* Whether a rank has left: none of its counters grows any more. */
static int has_left(const pli_shm_comm *self, int rank)
{
    return atomic_load(&pli_rank_of(self->segment, rank)->life) == PLI_GONE;
}

/* A rank whose counter is below `least`, searched from `from` on, or -1. */
static int find_laggard(const pli_shm_comm *self, counter_fn counter, uint64_t least,
                        int from)
{
    const int world_size = self->super.world_size;
    for (int r = from; r < from + world_size; r++)
        if (counter(self, r < world_size ? r : r - world_size) < least)
            return r < world_size ? r : r - world_size;
    return -1;
}

static int has_failed(const pli_shm_comm *self)
{
    pli_failure failure;
    return pli_failure_get(self->segment, &failure);
}

/* Fails the world and blames `rank`. */
static void fail_world(const pli_shm_comm *self, int rank, pli_reason reason)
{
    pli_failure_set(self->segment, &(pli_failure){.rank = rank, .reason = reason});
}

/* ---- what all ranks have done --------------------------------------------------- */

/* A word that differs for different operations; a barrier's is known as such. */
static uint64_t tag_of(const pl_op *op)
{
    return op->kind == PL_BARRIER ? (uint64_t)PL_BARRIER | (uint64_t)op->mark << 16
                                  : pli_op_hash(op);
}

static int is_barrier_tag(uint64_t tag)
{
    return tag >> 48 == 0 && (tag & 0xffff) == PL_BARRIER;
}

static uint64_t tag_at(const pli_shm_comm *self, int rank, size_t slot)
{
    return atomic_load_explicit(&pli_tags_of(self->segment, rank)[slot],
                                memory_order_relaxed);
}

/* The rank with which the fewest agree.  Of several, one at a barrier, where a rank
 * that has changed its model waits, else the last: every rank finds the same one,
 * whichever looks first. */
static int odd_one_out(const pli_shm_comm *self, size_t slot)
{
    int odd = 0;
    int n_fewest = PL_MAX_RANKS + 1;
    for (int r = 0; r < self->super.world_size; r++) {
        int n_agree = 0;
        for (int other = 0; other < self->super.world_size; other++)
            n_agree += tag_at(self, other, slot) == tag_at(self, r, slot);
        if (n_agree < n_fewest ||
            (n_agree == n_fewest && !is_barrier_tag(tag_at(self, odd, slot)))) {
            n_fewest = n_agree;
            odd = r;
        }
    }
    return odd;
}

static int is_same_everywhere(const pli_shm_comm *self, size_t slot)
{
    const uint64_t mine = tag_of(&self->ring[slot]);
    for (int r = 0; r < self->super.world_size; r++) {
        if (tag_at(self, r, slot) == mine)
            continue;
        fail_world(self, odd_one_out(self, slot), PLI_MISMATCH);
        return 0;
    }
    return 1;
}

/* Tells all ranks that all have reached `number`. */
static void say(const pli_shm_comm *self, _Atomic uint64_t *word, uint64_t number)
{
    uint64_t told = atomic_load(word);
    while (told < number)
        if (atomic_compare_exchange_weak(word, &told, number)) {
            pli_wake_ranks(self->segment);
            return;
        }
}

/* Whether every rank has posted operation `number`, and the same one.
 * Fails the world if they differ.  The first rank to find all posted tells all. */
static int have_all_posted(const pli_shm_comm *self, uint64_t number)
{
    _Atomic uint64_t *word = &pli_header_of(self->segment)->all_posted;
    if (atomic_load(word) >= number)
        return 1;
    if (find_laggard(self, counter_posted, number, 0) >= 0 || has_failed(self) ||
        !is_same_everywhere(self, number & (self->segment->ring_ops - 1)))
        return 0;
    say(self, word, number);
    return 1;
}

/* ... and has done its part of it. */
static int have_all_done(const pli_shm_comm *self, uint64_t number)
{
    _Atomic uint64_t *word = &pli_header_of(self->segment)->all_done;
    if (atomic_load(word) >= number)
        return 1;
    if (find_laggard(self, counter_done, number, 0) >= 0)
        return 0;
    say(self, word, number);
    return 1;
}

/* ---- parts ---------------------------------------------------------------------- */

/* Reduces `n` elements at byte `at` of every arena into the arenas of ranks
 * [out_rank, out_rank + n_out). */
static void reduce(const pli_shm_comm *self, const pl_op *op, size_t at, size_t n,
                   int out_rank, int n_out)
{
    const void *in[PL_MAX_RANKS];
    void *out[PL_MAX_RANKS];
    const int world_size = self->super.world_size;
    if (n == 0)
        return;
    for (int r = 0; r < world_size; r++)
        in[r] = pli_arena_of(self->segment, r) + at;
    for (int i = 0; i < n_out; i++)
        out[i] = pli_arena_of(self->segment, out_rank + i) + at;
    self->sums->fn[op->dtype][op->reduction](&(pli_sum_args){
        .in = in, .n_in = world_size, .out = out, .n_out = n_out, .n_elems = n});
}

static void run_part(const pli_shm_comm *self, const pl_op *op)
{
    const int world_size = self->super.world_size;
    const int rank = self->super.rank;
    const size_t elem_bytes = pl_dtype_bytes(op->dtype);
    const size_t block = op->n_elems / (size_t)world_size;
    const size_t block_at = op->offset_bytes + (size_t)rank * block * elem_bytes;
    size_t first = 0;
    size_t n = 0;
    if (op->kind != PL_BARRIER)
        pli_part_of(op->n_elems, elem_bytes, world_size, rank, &first, &n);
    const size_t part_at = op->offset_bytes + first * elem_bytes;
    char *own = pli_arena_of(self->segment, rank);
    switch (op->kind) {
    case PL_ALL_REDUCE:
        reduce(self, op, part_at, n, 0, world_size);
        break;
    case PL_REDUCE:
        reduce(self, op, part_at, n, op->root, 1);
        break;
    case PL_ALL_GATHER:
        for (int r = 0; r < world_size; r++)
            if (r != rank)
                memcpy(pli_arena_of(self->segment, r) + block_at, own + block_at,
                       block * elem_bytes);
        break;
    case PL_BROADCAST:
        if (rank != op->root)
            memcpy(own + op->offset_bytes,
                   pli_arena_of(self->segment, op->root) + op->offset_bytes,
                   op->n_elems * elem_bytes);
        break;
    case PL_BARRIER:
    case PL_N_OP_KINDS:
        break;
    }
}

/* PL_OK, or why the world has failed. */
static pl_status check_failure(const pli_shm_comm *self, const char *waiting_for)
{
    pli_failure failure = {0};
    if (!pli_failure_get(self->segment, &failure))
        return PL_OK;
    return pli_failure_report(self->segment, &failure, self->super.rank, waiting_for);
}

/* Does every part that is ready, unless another thread is doing so. */
static void shm_work(pl_comm *comm)
{
    pli_shm_comm *self = shm_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    const _Atomic uint64_t *all_posted = &pli_header_of(self->segment)->all_posted;
    if (!pli_spin_try_lock(&self->busy))
        return;
    while (self->n_done < atomic_load_explicit(&self->n_posted, memory_order_acquire)) {
        const uint64_t n = self->n_done + 1;
        if (atomic_load(all_posted) < n || has_failed(self))
            break;
        const pl_op *op = &self->ring[n & (self->segment->ring_ops - 1)];
        pli_recorder_part_begins(comm->recorder, op->bucket);
        run_part(self, op);
        pli_recorder_part_ends(comm->recorder, op->bucket);
        self->n_done = n;
        atomic_store(&mine->done, n);
        (void)have_all_done(self, n);
    }
    pli_spin_unlock(&self->busy);
}

/* ---- deadlocks ------------------------------------------------------------------ */

/* If rank 0 runs backward through wrapper A and then B, and rank 1 through B and then
 * A, each waits in its first wrapper for gradients that the other computes later:
 *
 *     rank 0   A posted, waits -> rank 1          (B comes later)
 *     rank 1   B posted, waits -> rank 0          (A comes later)
 *
 * Neither can go on, so both fail after a short while and not at the deadline. */
typedef struct wait {
    const pli_shm_comm *here;
    int rank;
} wait;

/* A process may have another rank in another world. */
static const pli_rank *find_process(const pli_shm_comm *world, uint64_t process)
{
    for (int r = 0; r < world->super.world_size; r++) {
        const pli_rank *rank = pli_rank_of(world->segment, r);
        if (r != world->super.rank && atomic_load(&rank->process) == process)
            return rank;
    }
    return NULL;
}

/* Whether the rank's last activity was to wait for the end of a step. */
static int waits(const pli_rank *rank)
{
    const uint32_t activity = atomic_load(&rank->activity);
    return activity == PL_FINISHING || activity == PL_JOINED;
}

/* Fails both worlds if so: the other rank must not find this one gone instead. */
static int fail_if_waits_for_us(const pl_comm *other, const void *context)
{
    if (other->host == NULL)
        return 0; /* of several hosts: each host's part is a world itself */
    const wait *at = context;
    const pli_shm_comm *there = (const pli_shm_comm *)(const void *)other;
    const pli_rank *peer_here = pli_rank_of(at->here->segment, at->rank);
    const pli_rank *own_here = pli_rank_of(at->here->segment, at->here->super.rank);
    const pli_rank *own_there = pli_rank_of(there->segment, there->super.rank);
    const pli_rank *peer_there = find_process(there, atomic_load(&peer_here->process));
    /* Nothing waits in a failed world, whatever the activity still shows. */
    if (peer_there == NULL || atomic_load(&peer_there->life) != PLI_PRESENT ||
        has_failed(there))
        return 0;
    /* The peer has posted what this rank has not, and only waits for it. */
    if (!waits(peer_there) ||
        atomic_load(&peer_there->posted) <= atomic_load(&own_there->posted) ||
        atomic_load(&peer_there->thread) != atomic_load(&peer_here->thread) ||
        atomic_load(&own_there->thread) != atomic_load(&own_here->thread))
        return 0;
    fail_world(at->here, at->rank, PLI_DEADLOCK);
    fail_world(there, there->super.rank, PLI_DEADLOCK);
    return 1;
}

/* Fails both worlds if this rank waits for `rank`, `rank` waits for this rank in
 * another world, and neither has another thread to do the rest.  Call it only after a
 * while: such a thread may be about to come. */
static void check_deadlock(const pli_shm_comm *self, int rank)
{
    const wait at = {.here = self, .rank = rank};
    const pli_rank *they = pli_rank_of(self->segment, rank);
    const pli_rank *we = pli_rank_of(self->segment, self->super.rank);
    if (atomic_load(&they->process) != 0 && waits(we) &&
        atomic_load(&they->posted) < atomic_load(&we->posted))
        (void)pli_progress_any_other(self->progress, &self->super, fail_if_waits_for_us,
                                     &at);
}

/* ---- peers ---------------------------------------------------------------------- */

/* Picks a rank below `least`: one that has left, else the one furthest behind in
 * posting, for which the rest may be waiting too, else in doing; -1 if none. */
static int culprit_of(const pli_shm_comm *self, counter_fn counter, uint64_t least)
{
    int culprit = -1;
    uint64_t lowest[2] = {UINT64_MAX, UINT64_MAX};
    for (int r = 0; r < self->super.world_size; r++) {
        const uint64_t count = counter(self, r);
        const uint64_t posted = counter_posted(self, r);
        if (count >= least)
            continue;
        if (has_left(self, r))
            return r;
        if (posted < lowest[0] || (posted == lowest[0] && count < lowest[1])) {
            culprit = r;
            lowest[0] = posted;
            lowest[1] = count;
        }
    }
    return culprit;
}

/* Blames a rank whose process ended below `least`; returns whether it found one. */
static int blame_dead(const pli_shm_comm *self, counter_fn counter, uint64_t least)
{
    for (int end = 0; end < PLI_N_ENDS; end++) {
        int r = -1;
        while ((r = pli_watch_ended(&self->watch, (pli_end)end, r + 1)) >= 0) {
            /* A rank that has done everything awaited is not to blame yet. */
            if (counter(self, r) >= least)
                continue;
            fail_world(self, r, has_left(self, r) ? PLI_LEFT : PLI_DIED);
            return 1;
        }
    }
    return 0;
}

/* Called now and then by a rank that waits until every counter has reached `least`.
 * Fails the world if that can never happen. */
static void check_peers(pli_shm_comm *self, counter_fn counter, uint64_t least)
{
    const int culprit = culprit_of(self, counter, least);
    if (culprit < 0)
        return;
    const pli_rank *rank = pli_rank_of(self->segment, culprit);
    if (has_left(self, culprit)) {
        fail_world(self, culprit, PLI_LEFT);
        return;
    }
    const uint64_t sign =
        pli_hash_with(atomic_load(&rank->posted) + atomic_load(&rank->done) +
                          atomic_load(&rank->step),
                      (uint64_t)culprit);
    if (sign != self->last_sign)
        self->silence = (pli_stopwatch){0};
    self->last_sign = sign;
    const int64_t silent_ns = pli_elapsed_ns(&self->silence);
    const int is_late = silent_ns > self->deadline_ns;
    /* With many ranks, each looks less often: the first to find a failure tells all. */
    const int n_looks = 1 + self->super.world_size / 32;
    if ((is_late || ++self->n_checks % (unsigned)n_looks == 0) &&
        blame_dead(self, counter, least))
        return;
    if (is_late)
        fail_world(self, culprit, PLI_LATE);
    else if (silent_ns > DEADLOCK_MS * PLI_MS)
        check_deadlock(self, culprit);
}

/* ---- waiting -------------------------------------------------------------------- */

/* The rank, as numbered in messages, that keeps this one from reaching `least`: it has
 * not posted the next operation, or not done its part.  `before` is the previous
 * result; while that rank still lags, no other is looked at. */
static int find_awaited(const pli_shm_comm *self, counter_fn counter, uint64_t least,
                        int before)
{
    const uint64_t done = atomic_load_explicit(
        &pli_rank_of(self->segment, self->super.rank)->done, memory_order_relaxed);
    const int from = before < 0 ? 0 : before - self->segment->first_rank;
    int rank =
        find_laggard(self, counter_posted, done < least ? done + 1 : least, from);
    if (rank < 0)
        rank = find_laggard(self, counter, least, from);
    rank = rank < 0 ? PLI_RECORDER_SOMEBODY : rank + self->segment->first_rank;
    pli_recorder_awaits(self->super.recorder, rank);
    return rank;
}

/* Whether this rank has done its part of the operation that ends a step, and waits for
 * the others.  Every rank has posted it then, and may see its end at any moment, so
 * this rank must not leave the step. */
static int must_see_end(const pli_shm_comm *self, counter_fn counter, uint64_t least)
{
    const size_t slot = least & (self->segment->ring_ops - 1);
    return counter == counter_done && self->ring[slot].ends_step &&
           counter(self, self->super.rank) >= least;
}

static int have_all_come(const pli_shm_comm *self, counter_fn counter, uint64_t least)
{
    return counter == counter_done ? have_all_done(self, least)
                                   : find_laggard(self, counter, least, 0) < 0;
}

/* Likewise, as far as is known without looking at every rank. */
static int is_said_to_have_come(const pli_shm_comm *self, counter_fn counter,
                                uint64_t least)
{
    return counter == counter_done
               ? atomic_load(&pli_header_of(self->segment)->all_done) >= least
               : have_all_come(self, counter, least);
}

static void sleep_briefly(pli_shm_comm *self, counter_fn counter, uint64_t least)
{
    pli_header *header = pli_header_of(self->segment);
    atomic_fetch_add(&header->n_waiters, 1);
    const uint32_t before = atomic_load(&header->wakeup);
    const uint64_t next =
        atomic_load(&pli_rank_of(self->segment, self->super.rank)->done) + 1;
    const int has_work =
        next <= atomic_load(&self->n_posted) && have_all_posted(self, next);
    if (!has_work && !have_all_come(self, counter, least) && !has_failed(self))
        pli_futex_wait(&header->wakeup, before, SLEEP_MS * PLI_MS);
    atomic_fetch_sub(&header->n_waiters, 1);
}

/* Waits until every rank's counter has reached `least`. */
static pl_status wait_for(pli_shm_comm *self, counter_fn counter, uint64_t least,
                          int64_t slice_ns)
{
    pl_status st = PL_OK;
    const int64_t begin = pli_recorder_wait_begins(self->super.recorder);
    int n_spins = self->n_spins;
    int awaited = PLI_RECORDER_NOBODY;
    int is_failed = 0;
    for (;;) {
        shm_work(&self->super);
        /* The rank that failed may have seen the awaited end before. */
        is_failed = has_failed(self);
        if (is_said_to_have_come(self, counter, least) ||
            (is_failed && have_all_come(self, counter, least)))
            break;
        if (is_failed)
            PL_TRY(check_failure(self, ", waiting"));
        awaited = find_awaited(self, counter, least, awaited);
        if (pli_spin(&n_spins))
            continue;
        pli_progress_others(self->progress, &self->super);
        sleep_briefly(self, counter, least);
        check_peers(self, counter, least);
        if (have_all_come(self, counter, least))
            break;
        if (pli_now_ns() - begin > slice_ns &&
            (slice_ns == 0 || !must_see_end(self, counter, least)))
            PL_FAIL(PL_EAGAIN, "not done yet");
    }
    self->silence = (pli_stopwatch){0};
done:
    pli_recorder_wait_ends(self->super.recorder, begin, awaited);
    return st;
}

/* ---- notices -------------------------------------------------------------------- */

/* A notice is a bit that a rank leaves for the peers between two operations.  All ranks
 * issue the same operations, so "after the operations issued so far, the n-th time" is
 * the same point of the program on each.  A rank that leaves the bit does not wait; one
 * that needs it waits until that rank has reached the point.
 *
 * operations issued : 56 | number : 7 | bit : 1 */
static uint64_t notice_of(const pli_shm_comm *self, unsigned n)
{
    return (atomic_load(&self->n_posted) << 8) + (uint64_t)n * 2;
}

static void shm_notify(pl_comm *comm, unsigned n, unsigned bit)
{
    pli_shm_comm *self = shm_of(comm);
    atomic_store(&pli_rank_of(self->segment, comm->rank)->notice,
                 notice_of(self, n) + bit);
    pli_wake_ranks(self->segment);
}

/* Whether a rank is at a barrier that this one has not reached: it has changed its
 * model.  See odd_one_out(). */
static int is_at_barrier(const pli_shm_comm *self, int rank)
{
    const uint64_t next = atomic_load(&self->n_posted) + 1;
    if (counter_posted(self, rank) < next)
        return 0;
    const _Atomic uint64_t *tags = pli_tags_of(self->segment, rank);
    return is_barrier_tag(atomic_load(&tags[next & (self->segment->ring_ops - 1)]));
}

static pl_status shm_await_notice(pl_comm *comm, int rank, unsigned n, int64_t slice_ns,
                                  unsigned *bit)
{
    pl_status st = PL_OK;
    pli_shm_comm *self = shm_of(comm);
    const pli_rank *theirs = pli_rank_of(self->segment, rank);
    const uint64_t least = notice_of(self, n);
    self->notice_from = rank;
    st = wait_for(self, counter_notice, least, slice_ns);
    if (st == PL_EAGAIN && atomic_load(&theirs->activity) == PL_FINISHING &&
        counter_posted(self, rank) > counter_posted(self, comm->rank) &&
        counter_notice(self, rank) < least) {
        pli_failure failure = {0};
        fail_world(self, comm->rank, PLI_MISMATCH);
        (void)pli_failure_get(self->segment, &failure);
        if (failure.reason != PLI_MISMATCH) /* every rank raises the first failure */
            PL_TRY(check_failure(self, ", waiting"));
        PL_FAIL(PL_EMISMATCH,
                "rank %d: this rank is in a forward that rank %d has not had, which is "
                "at the end of its backward: every rank needs the same forwards that "
                "record gradients, or wrap the model with broadcast_buffers=False",
                comm->rank, rank);
    }
    if (st == PL_EAGAIN && is_at_barrier(self, rank)) {
        *bit = 1; /* both then find that this rank's next operation differs */
        st = PL_OK;
        goto done;
    }
    PL_TRY(st);
    const uint64_t notice = counter_notice(self, rank);
    *bit = notice / 2 == least / 2 ? (unsigned)(notice & 1) : 0;
done:
    return st;
}

/* ---- issuing, progress and queries ---------------------------------------------- */

static pl_status shm_issue(pl_comm *comm, const pl_op *op, const pli_order *order,
                           pl_ticket *out)
{
    pl_status st = PL_OK;
    pli_shm_comm *self = shm_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    const uint64_t n = atomic_load_explicit(&self->n_posted, memory_order_relaxed) + 1;
    (void)order; /* host memory is ready when this is called */
    PL_TRY(check_failure(self, ""));
    if (op->kind <= PL_REDUCE && self->sums->fn[op->dtype][op->reduction] == NULL)
        PL_FAIL(PL_EINVAL,
                "%s cannot be reduced that way: the mean takes floating point "
                "types, the maximum integers",
                pl_dtype_text(op->dtype));
    /* A lagging peer may still compare the tag that this would overwrite. */
    if (n > self->segment->ring_ops &&
        !have_all_done(self, n - self->segment->ring_ops))
        PL_FAIL(PL_ESTATE, "more than %u operations in flight: wait for some",
                self->segment->ring_ops);
    const size_t slot = n & (self->segment->ring_ops - 1);
    self->ring[slot] = *op;
    atomic_store_explicit(&pli_tags_of(self->segment, comm->rank)[slot], tag_of(op),
                          memory_order_relaxed);
    atomic_store_explicit(&self->n_posted, n, memory_order_release);
    atomic_store(&mine->posted, n);
    (void)have_all_posted(self, n);
    *out = n;
done:
    return st;
}

static pl_status shm_progress(pl_comm *comm)
{
    shm_work(comm);
    return check_failure(shm_of(comm), "");
}

static pl_status shm_check_peers(pl_comm *comm)
{
    pli_shm_comm *self = shm_of(comm);
    shm_work(comm);
    for (int r = 0; r < comm->world_size; r++)
        if (r != comm->rank && has_left(self, r))
            fail_world(self, r, PLI_LEFT);
    (void)blame_dead(self, counter_done, UINT64_MAX);
    return check_failure(self, ", waiting");
}

/* Finds ranks that are gone, also after another failure.  Does not fail the world: a
 * rank that left normally may have done its part. */
static pl_status check_gone(const pli_shm_comm *self)
{
    pli_failure failure = {.rank = -1, .reason = PLI_LEFT};
    for (int r = 0; r < self->super.world_size && failure.rank < 0; r++)
        if (has_left(self, r) && r != self->super.rank)
            failure.rank = r;
    for (int end = 0; end < PLI_N_ENDS && failure.rank < 0; end++)
        failure = (pli_failure){.rank = pli_watch_ended(&self->watch, (pli_end)end, 0),
                                .reason = PLI_DIED};
    return failure.rank < 0
               ? PL_OK
               : pli_failure_report(self->segment, &failure, self->super.rank, "");
}

static pl_status shm_query(pl_comm *comm, pli_query what)
{
    pli_shm_comm *self = shm_of(comm);
    pli_failure failure = {.reason = PLI_N_REASONS};
    if (what == PLI_QUERY_WORLD)
        (void)blame_dead(self, counter_done, UINT64_MAX);
    const int is_raised =
        pli_failure_get(self->segment, &failure) && failure.reason == PLI_RAISED;
    if (what == PLI_QUERY_GONE || (what == PLI_QUERY_WORLD && is_raised))
        return check_gone(self);
    return check_failure(self, "");
}

static int shm_is_done(pl_comm *comm, pl_ticket ticket)
{
    return have_all_done(shm_of(comm), ticket);
}

static pl_status shm_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    pli_shm_comm *self = shm_of(comm);
    if (ticket > atomic_load(&self->n_posted))
        return pli_fail(PL_EINVAL, "ticket %llu was never issued",
                        (unsigned long long)ticket);
    return wait_for(self, counter_done, ticket, slice_ns);
}

/* ---- failure -------------------------------------------------------------------- */

/* Withdraws an announced message that will not follow. */
static void break_promise(pli_rank *mine)
{
    uint32_t promised = PLI_MESSAGE_FOLLOWS;
    (void)atomic_compare_exchange_strong(&mine->message_state, &promised,
                                         PLI_MESSAGE_NONE);
}

static void shm_set_failure_message(pl_comm *comm, const char *message)
{
    pli_failure failure;
    pli_shm_comm *self = shm_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    if (getpid() != self->owner_pid)
        return;            /* a forked child lacks most of the mapping */
    if (message == NULL) { /* peers may not have read why this rank failed */
        if (pli_failure_get(self->segment, &failure) && failure.rank == comm->rank)
            break_promise(mine);
        else
            atomic_store(&mine->message_state, PLI_MESSAGE_NONE);
        return;
    }
    /* The end of a traceback matters most. */
    const char *from = pli_text_tail(message, PLI_MESSAGE_BYTES - 1);
    pli_spin_lock(&self->is_writing); /* a watchdog may abort at the same time */
    atomic_fetch_add(&mine->n_writes, 1);
    for (size_t i = 0, n = strlen(from); i <= n; i++) /* peers may read it */
        __atomic_store_n(&mine->message[i], from[i], __ATOMIC_RELAXED);
    atomic_store(&mine->message_state, PLI_MESSAGE_READY);
    atomic_fetch_add(&mine->n_writes, 1);
    pli_spin_unlock(&self->is_writing);
}

static void shm_abort(pl_comm *comm, const char *message)
{
    pli_shm_comm *self = shm_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    if (getpid() != self->owner_pid)
        return;
    if (has_failed(self) && atomic_load(&mine->message_state) == PLI_MESSAGE_READY)
        return; /* the first failure stands, with its message */
    if (message != NULL)
        shm_set_failure_message(comm, message);
    else if (atomic_load(&mine->message_state) == PLI_MESSAGE_NONE)
        atomic_store(&mine->message_state, PLI_MESSAGE_FOLLOWS);
    fail_world(self, comm->rank, PLI_RAISED);
}

/* A number for each thread of this process; never 0. */
static uint32_t thread_number(void)
{
    static _Atomic uint32_t n_threads;
    static _Thread_local uint32_t number;
    if (number == 0)
        number = atomic_fetch_add(&n_threads, 1) + 1;
    return number;
}

static void shm_record_activity(pl_comm *comm, pl_activity activity, uint64_t step)
{
    pli_rank *mine = pli_rank_of(shm_of(comm)->segment, comm->rank);
    atomic_store_explicit(&mine->thread, thread_number(), memory_order_relaxed);
    atomic_store_explicit(&mine->activity, activity, memory_order_relaxed);
    atomic_store_explicit(&mine->step, step, memory_order_relaxed);
}

static void shm_forget(pl_comm *comm)
{
    (void)comm; /* a child's copies close when it ends */
}

static pl_status shm_map_own(pl_comm *comm, size_t offset_bytes, size_t bytes,
                             void **out)
{
    return pli_segment_map_again(shm_of(comm)->segment, comm->rank, offset_bytes, bytes,
                                 out);
}

static pl_status shm_unshare_own(pl_comm *comm, size_t offset_bytes, size_t bytes,
                                 void *memory)
{
    return pli_segment_unshare(shm_of(comm)->segment, comm->rank, offset_bytes, bytes,
                               memory);
}

/* ---- life ----------------------------------------------------------------------- */

static void shm_leave(pl_comm *comm)
{
    pli_shm_comm *self = shm_of(comm);
    if (getpid() != self->owner_pid)
        return;
    atomic_store(&pli_rank_of(self->segment, comm->rank)->life, PLI_GONE);
    pli_wake_ranks(self->segment);
}

static void shm_destroy(pl_comm *comm)
{
    pli_shm_comm *self = shm_of(comm);
    pli_progress_leave(self->progress, comm);
    shm_leave(comm);
    if (getpid() == self->owner_pid) /* a child may have closed its copies */
        pli_watch_fini(&self->watch);
    pli_segment_release(self->segment);
    pli_free(self->ring);
    pli_free(self);
}

static const pl_comm_ops shm_ops = {
    .name = "shm",
    .issue = shm_issue,
    .work = shm_work,
    .progress = shm_progress,
    .check_peers = shm_check_peers,
    .query = shm_query,
    .is_done = shm_is_done,
    .wait = shm_wait,
    .abort = shm_abort,
    .record_activity = shm_record_activity,
    .set_failure_message = shm_set_failure_message,
    .forget = shm_forget,
    .leave = shm_leave,
    .destroy = shm_destroy,
};

static const pli_host_ops shm_host_ops = {
    .notify = shm_notify,
    .await_notice = shm_await_notice,
    .map_own = shm_map_own,
    .unshare_own = shm_unshare_own,
};

static int spins_for(int world_size)
{
    cpu_set_t cores;
    const int is_known = sched_getaffinity(0, sizeof cores, &cores) == 0;
    const int is_crowded = is_known && CPU_COUNT(&cores) < world_size;
    return is_crowded ? SPINS_CROWDED : SPINS_WITH_CORES;
}

pl_status pli_shm_comm_create(const pli_shm_comm_options *options, pli_shm_comm **out)
{
    pl_status st = PL_OK;
    pli_shm_comm *self = NULL;
    pli_shm_segment *segment = options->segment;
    PL_TRY(pli_calloc(1, sizeof *self, "a rank's end of its world", &self));
    self->super = (pl_comm){.ops = &shm_ops,
                            .host = &shm_host_ops,
                            .arena = pli_arena_of(segment, options->rank),
                            .rank = options->rank,
                            .world_size = segment->world_size,
                            .arena_bytes = segment->arena_bytes,
                            .host_bytes = segment->arena_bytes,
                            .chunk_bytes = PLI_SHM_CHUNK_BYTES};
    self->deadline_ns = options->deadline_ns;
    self->owner_pid = getpid();
    self->n_spins = spins_for(segment->world_size);
    atomic_flag_clear(&self->busy);
    atomic_flag_clear(&self->is_writing);
    PL_TRY(pli_cpu_sums(&self->sums));
    PL_TRY(pli_calloc(segment->ring_ops, sizeof *self->ring, "operations in flight",
                      &self->ring));
    self->segment = segment; /* before others can find this world */
    PL_TRY(pli_progress_join(options->progress, &self->super));
    self->progress = options->progress;
    pli_segment_enter(segment, options->rank, options->pid,
                      pli_progress_process(options->progress), thread_number());
    *out = self;
    self = NULL;
done:
    if (self != NULL) {
        pli_free(self->ring);
        pli_free(self);
    }
    return st;
}
