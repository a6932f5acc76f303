/* shared.c - posting, working and waiting on counters in shared memory. */
#include "shared.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../core/alloc.h"
#include "../core/clock.h"
#include "failure.h"

enum {
    SPINS_WITH_CORES = 1000, /* pauses before a sleep: 20 to 40 us */
    SPINS_CROWDED = 100,     /* ... where ranks outnumber cores */
    NAP_MS = 10              /* between two looks at the peers' processes */
};

static pli_shared_comm *shared_of(pl_comm *comm)
{
    return (pli_shared_comm *)(void *)comm;
}

static uint64_t base_of(const pli_shared_comm *self)
{
    return self->epoch << PLI_EPOCH_SHIFT;
}

typedef _Atomic uint64_t *(*counter_fn)(pli_rank *rank);

static _Atomic uint64_t *posted_counter(pli_rank *rank)
{
    return &rank->posted;
}

static _Atomic uint64_t *done_counter(pli_rank *rank)
{
    return &rank->done;
}

static _Atomic uint64_t *epoch_counter(pli_rank *rank)
{
    return &rank->epoch;
}

/* The first rank whose counter is below `least`, or -1. */
static int laggard(const pli_shared_comm *self, counter_fn counter, uint64_t least)
{
    for (int r = 0; r < self->super.world_size; r++)
        if (atomic_load_explicit(counter(pli_rank_of(self->segment, r)),
                                 memory_order_acquire) < least)
            return r;
    return -1;
}

/* One word that differs where two operations differ. */
static uint64_t tag_of(const pl_op *op)
{
    uint64_t tag = (uint64_t)op->kind | (uint64_t)op->reduction << 4 |
                   (uint64_t)op->dtype << 8 | (uint64_t)(uint32_t)op->root << 16;
    tag = (tag ^ op->offset_bytes) * UINT64_C(0x9e3779b97f4a7c15);
    tag = (tag ^ tag >> 29 ^ op->n_elems) * UINT64_C(0xbf58476d1ce4e5b9);
    return tag ^ tag >> 32;
}

static pl_status fail_as(pli_shared_comm *self, const char *waiting_for)
{
    pli_failure failure = {0};
    if (!pli_failure_get(self->segment, &failure) ||
        !pli_failure_concerns(&failure, self->epoch))
        return PL_OK;
    return pli_failure_report(self->segment, &failure, self->super.rank, waiting_for);
}

static pl_status shared_issue(pl_comm *comm, const pl_op *op, const pli_order *order,
                              pl_ticket *out)
{
    pl_status st = PL_OK;
    pli_shared_comm *self = shared_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    const uint64_t n = atomic_load_explicit(&self->n_posted, memory_order_relaxed) + 1;
    (void)order; /* host memory is ready when this is called */
    PL_TRY(fail_as(self, ""));
    if (self->phase != PLI_RUNNING)
        PL_FAIL(PL_ESTATE, "an operation was issued while the world recovers");
    if (op->kind <= PL_REDUCE_SCATTER &&
        self->sums->fn[op->dtype][op->reduction] == NULL)
        PL_FAIL(PL_EINVAL,
                "%s cannot be reduced that way: the mean takes floating point "
                "types, the maximum integers",
                pl_dtype_text(op->dtype));
    /* A peer that lags may still compare what the ring would now forget. */
    if (n > self->segment->ring_ops &&
        laggard(self, done_counter, base_of(self) + n - self->segment->ring_ops) >= 0)
        PL_FAIL(PL_ESTATE, "more than %u operations in flight: wait for some",
                self->segment->ring_ops);
    const size_t slot = n & (self->segment->ring_ops - 1);
    self->ring[slot] = *op;
    atomic_store_explicit(&pli_tags_of(self->segment, comm->rank)[slot], tag_of(op),
                          memory_order_relaxed);
    atomic_store_explicit(&self->n_posted, n, memory_order_release);
    atomic_store_explicit(&mine->posted, base_of(self) + n, memory_order_release);
    pli_bell_ring(self->segment);
    *out = base_of(self) + n;
done:
    return st;
}

/* Whether every rank has posted operation n of this epoch. */
static int all_posted(pli_shared_comm *self, uint64_t n)
{
    uint64_t lowest = UINT64_MAX;
    if (self->n_all_posted >= n)
        return 1;
    for (int r = 0; r < self->super.world_size; r++) {
        const uint64_t posted = atomic_load_explicit(
            &pli_rank_of(self->segment, r)->posted, memory_order_acquire);
        if (posted < base_of(self) + n)
            return 0;
        if (posted < lowest)
            lowest = posted;
    }
    self->n_all_posted = lowest - base_of(self);
    return 1;
}

static int is_same_everywhere(pli_shared_comm *self, size_t slot)
{
    const uint64_t mine = tag_of(&self->ring[slot]);
    for (int r = 0; r < self->super.world_size; r++) {
        if (atomic_load_explicit(&pli_tags_of(self->segment, r)[slot],
                                 memory_order_relaxed) == mine)
            continue;
        pli_failure_set(
            self->segment,
            &(pli_failure){.epoch = self->epoch, .rank = r, .reason = PLI_MISMATCH});
        return 0;
    }
    return 1;
}

/* Does every part that is ready; `busy` is held. */
static void work_locked(pli_shared_comm *self)
{
    pli_rank *mine = pli_rank_of(self->segment, self->super.rank);
    pli_failure failure;
    while (self->n_done < atomic_load_explicit(&self->n_posted, memory_order_acquire)) {
        const uint64_t n = self->n_done + 1;
        const size_t slot = n & (self->segment->ring_ops - 1);
        if (!all_posted(self, n) || (pli_failure_get(self->segment, &failure) &&
                                     pli_failure_concerns(&failure, self->epoch)))
            break;
        if (!is_same_everywhere(self, slot))
            break;
        pli_part_run(self, &self->ring[slot]);
        self->n_done = n;
        atomic_store_explicit(&mine->done, base_of(self) + n, memory_order_release);
        pli_bell_ring(self->segment);
    }
}

static void work(pli_shared_comm *self)
{
    if (atomic_flag_test_and_set_explicit(&self->busy, memory_order_acquire))
        return; /* another thread is at it */
    work_locked(self);
    atomic_flag_clear_explicit(&self->busy, memory_order_release);
}

static pl_status shared_progress(pl_comm *comm)
{
    pli_shared_comm *self = shared_of(comm);
    work(self);
    return fail_as(self, "");
}

/* ---- waiting -------------------------------------------------------------- */

/* Whom an operation waits for: a rank that has not even posted it comes first. */
static int culprit_of(const pli_shared_comm *self, counter_fn counter, uint64_t least)
{
    const int silent =
        counter == done_counter ? laggard(self, posted_counter, least) : -1;
    return silent >= 0 ? silent : laggard(self, counter, least);
}

static void set_failure(const pli_shared_comm *self, int rank, pli_reason reason)
{
    pli_failure_set(
        self->segment,
        &(pli_failure){.epoch = self->epoch, .rank = rank, .reason = reason});
}

/* Looks at the peers once in a while: gone, dead, or beyond the deadline? */
static void look_at_peers(pli_shared_comm *self, counter_fn counter, uint64_t least)
{
    const int culprit = culprit_of(self, counter, least);
    if (culprit < 0)
        return;
    pli_rank *rank = pli_rank_of(self->segment, culprit);
    if (atomic_load(&rank->life) == PLI_GONE) {
        set_failure(self, culprit, PLI_LEFT);
        return;
    }
    for (int r = pli_watch_ended(&self->watch, 0); r >= 0;
         r = pli_watch_ended(&self->watch, r + 1)) {
        /* One that did all that is waited for has failed nobody yet. */
        if (atomic_load(counter(pli_rank_of(self->segment, r))) >= least)
            continue;
        const int said_goodbye =
            atomic_load(&pli_rank_of(self->segment, r)->life) == PLI_GONE;
        set_failure(self, r, said_goodbye ? PLI_LEFT : PLI_DIED);
        return;
    }
    const uint64_t sign = atomic_load(&rank->posted) + atomic_load(&rank->done) +
                          atomic_load(&rank->step) + ((uint64_t)culprit << 56);
    const int64_t now = pli_now_ns();
    if (sign != self->patience_sign || self->patience_since_ns == 0) {
        self->patience_sign = sign;
        self->patience_since_ns = now;
    } else if (now - self->patience_since_ns > self->deadline_ns) {
        set_failure(self, culprit, PLI_LATE);
    }
}

static void nap(pli_shared_comm *self, counter_fn counter, uint64_t least)
{
    pli_header *header = pli_header_of(self->segment);
    const struct timespec limit = {.tv_nsec = NAP_MS * PLI_MS};
    pli_failure failure;
    atomic_fetch_add(&header->n_waiters, 1);
    const uint32_t heard = atomic_load(&header->bell);
    atomic_thread_fence(memory_order_seq_cst);
    const uint64_t next =
        atomic_load(&pli_rank_of(self->segment, self->super.rank)->done) + 1;
    const int has_work = next <= base_of(self) + atomic_load(&self->n_posted) &&
                         laggard(self, posted_counter, next) < 0;
    if (!has_work && laggard(self, counter, least) >= 0 &&
        !(pli_failure_get(self->segment, &failure) &&
          pli_failure_concerns(&failure, self->epoch)))
        (void)syscall(SYS_futex, &header->bell, FUTEX_WAIT, heard, &limit, NULL, 0);
    atomic_fetch_sub(&header->n_waiters, 1);
}

/* Waits until every rank's counter has reached `least`. */
static pl_status wait_for(pli_shared_comm *self, counter_fn counter, uint64_t least,
                          int64_t slice_ns)
{
    pl_status st = PL_OK;
    const int64_t begin = pli_now_ns();
    int n_spins = self->n_spins;
    for (;;) {
        work(self);
        if (laggard(self, counter, least) < 0)
            break;
        PL_TRY(fail_as(self, ", waiting"));
        if (n_spins-- > 0) {
            pli_pause();
            continue;
        }
        pli_progress_others(self->progress, &self->super);
        nap(self, counter, least);
        look_at_peers(self, counter, least);
        if (pli_now_ns() - begin > slice_ns && laggard(self, counter, least) >= 0)
            PL_FAIL(PL_EAGAIN, "not done yet");
    }
    self->patience_since_ns = 0;
done:
    return st;
}

static pl_status shared_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    pl_status st = PL_OK;
    pli_shared_comm *self = shared_of(comm);
    if (ticket > base_of(self) + atomic_load(&self->n_posted))
        PL_FAIL(PL_EINVAL, "ticket %llu is waited for, but was never issued",
                (unsigned long long)ticket);
    PL_TRY(wait_for(self, done_counter, ticket, slice_ns));
done:
    return st;
}

/* ---- failing, and going on ------------------------------------------------- */

static void shared_last_words(pl_comm *comm, const char *words)
{
    pli_rank *mine = pli_rank_of(shared_of(comm)->segment, comm->rank);
    atomic_store(&mine->words_state, PLI_NO_WORDS);
    if (words == NULL)
        return;
    /* The end of a traceback says most. */
    const size_t n = strlen(words);
    const size_t room = PLI_WORDS_BYTES - 1;
    const char *from = n > room ? words + (n - room) : words;
    memcpy(mine->words, from, strlen(from) + 1);
    atomic_store(&mine->words_state, PLI_WORDS_READY);
}

static void shared_abort(pl_comm *comm, const char *words)
{
    pli_shared_comm *self = shared_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    if (words != NULL)
        shared_last_words(comm, words);
    else if (atomic_load(&mine->words_state) == PLI_NO_WORDS)
        atomic_store(&mine->words_state, PLI_WORDS_FOLLOW);
    set_failure(self, comm->rank, PLI_RAISED);
}

/* Takes up the next epoch: everything of the old one counts as done. */
static void enter_next_epoch(pli_shared_comm *self)
{
    pli_rank *mine = pli_rank_of(self->segment, self->super.rank);
    while (atomic_flag_test_and_set_explicit(&self->busy, memory_order_acquire))
        pli_pause(); /* a thread ends its part of an aborted operation */
    self->epoch++;
    atomic_store(&self->n_posted, 0);
    self->n_all_posted = 0;
    self->n_done = 0;
    atomic_flag_clear_explicit(&self->busy, memory_order_release);
    shared_last_words(&self->super, NULL);
    atomic_store(&mine->posted, base_of(self));
    atomic_store(&mine->done, base_of(self));
    atomic_store(&mine->epoch, self->epoch);
    pli_bell_ring(self->segment);
}

static pl_status shared_recover(pl_comm *comm, int64_t slice_ns, pl_recovery *out)
{
    pl_status st = PL_OK;
    pli_shared_comm *self = shared_of(comm);
    pli_failure failure;
    if (self->phase == PLI_RUNNING) {
        if (!pli_failure_get(self->segment, &failure) ||
            !pli_failure_concerns(&failure, self->epoch)) {
            *out = PL_NOTHING_FAILED;
            goto done;
        }
        if (pli_failure_is_final(&failure))
            PL_TRY(fail_as(self, ""));
        enter_next_epoch(self);
        self->phase = PLI_RECOVERING;
    }
    PL_TRY(wait_for(self, epoch_counter, self->epoch, slice_ns));
    self->phase = PLI_RUNNING;
    *out = PL_RECOVERED;
done:
    return st;
}

static void shared_note(pl_comm *comm, pl_activity activity, uint64_t step)
{
    pli_rank *mine = pli_rank_of(shared_of(comm)->segment, comm->rank);
    atomic_store_explicit(&mine->activity, activity, memory_order_relaxed);
    atomic_store_explicit(&mine->step, step, memory_order_relaxed);
}

static void *shared_arena(pl_comm *comm)
{
    return pli_arena_of(shared_of(comm)->segment, comm->rank);
}

/* ---- life ------------------------------------------------------------------ */

void pli_shared_segment_release(pli_shared_segment *shared)
{
    if (shared == NULL || atomic_fetch_sub(&shared->n_users, 1) > 1)
        return;
    pli_segment_fini(&shared->segment);
    pli_free(shared);
}

static void shared_leave(pl_comm *comm)
{
    pli_shared_comm *self = shared_of(comm);
    if (getpid() != self->owner_pid)
        return;
    atomic_store(&pli_rank_of(self->segment, comm->rank)->life, PLI_GONE);
    pli_bell_ring(self->segment);
}

static void shared_destroy(pl_comm *comm)
{
    pli_shared_comm *self = shared_of(comm);
    pli_progress_leave(self->progress, comm);
    shared_leave(comm);
    pli_watch_fini(&self->watch);
    pli_shared_segment_release(self->shared);
    pli_free(self->ring);
    pli_free(self);
}

static const pl_comm_ops shared_ops = {
    .name = "shm",
    .issue = shared_issue,
    .progress = shared_progress,
    .wait = shared_wait,
    .recover = shared_recover,
    .abort = shared_abort,
    .note = shared_note,
    .last_words = shared_last_words,
    .arena = shared_arena,
    .leave = shared_leave,
    .destroy = shared_destroy,
};

static int spins_for(int world_size)
{
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0 &&
        CPU_COUNT(&cores) < world_size)
        return SPINS_CROWDED;
    return SPINS_WITH_CORES;
}

uint32_t pli_ring_ops(size_t n_ops)
{
    uint32_t ring_ops = 64;
    while (ring_ops < n_ops && ring_ops < UINT32_C(1) << 20)
        ring_ops *= 2;
    return ring_ops;
}

pl_status pli_shared_create(const pli_shared_options *options, pli_shared_comm **out)
{
    pl_status st = PL_OK;
    pli_shared_comm *self = NULL;
    pli_segment *segment = &options->shared->segment;
    PL_TRY(pli_calloc(1, sizeof *self, "a rank's end of its world", &self));
    self->super = (pl_comm){.ops = &shared_ops,
                            .rank = options->rank,
                            .world_size = segment->world_size,
                            .arena_bytes = segment->arena_bytes};
    pli_watch_init(&self->watch, segment->world_size);
    self->deadline_ns = options->deadline_ns;
    self->owner_pid = getpid();
    self->n_spins = spins_for(segment->world_size);
    atomic_flag_clear(&self->busy);
    PL_TRY(pli_cpu_sums(&self->sums));
    PL_TRY(pli_calloc(segment->ring_ops, sizeof *self->ring, "operations in flight",
                      &self->ring));
    PL_TRY(pli_progress_join(options->progress, &self->super));
    self->progress = options->progress;
    self->shared = options->shared;
    self->segment = segment;
    pli_rank *mine = pli_rank_of(segment, options->rank);
    atomic_store(&mine->pid, options->pid);
    atomic_store(&mine->life, PLI_PRESENT);
    *out = self;
    self = NULL;
done:
    if (self != NULL) {
        pli_free(self->ring);
        pli_free(self);
    }
    return st;
}
