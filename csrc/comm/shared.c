/* shared.c - posting, working and waiting on counters in shared memory. */
#include "shared.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../core/alloc.h"
#include "../core/clock.h"
#include "counters.h"
#include "crossing.h"
#include "peers.h"

enum {
    SPINS_WITH_CORES = 1000, /* pauses before a sleep: 20 to 40 us */
    SPINS_CROWDED = 100,     /* ... where ranks outnumber cores */
    NAP_MS = 10              /* between two looks at the peers' processes */
};

static pli_shared_comm *shared_of(pl_comm *comm)
{
    return (pli_shared_comm *)(void *)comm;
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
    pli_failure cause;
    if (!failure_stands(self, &failure))
        return PL_OK;
    if (pli_failure_is_final(&failure) &&
        pli_failure_raised_in(self->segment, self->epoch, &cause))
        failure = cause;
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
    atomic_store(&mine->posted, base_of(self) + n);
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

static uint64_t tag_at(const pli_shared_comm *self, int rank, size_t slot)
{
    return atomic_load_explicit(&pli_tags_of(self->segment, rank)[slot],
                                memory_order_relaxed);
}

/* The rank with whom the fewest agree, the last of several: every rank finds the same
 * one, whoever looks first. */
static int odd_one_out(const pli_shared_comm *self, size_t slot)
{
    int odd = 0;
    int n_fewest = PL_MAX_RANKS + 1;
    for (int r = 0; r < self->super.world_size; r++) {
        int n_agree = 0;
        for (int other = 0; other < self->super.world_size; other++)
            n_agree += tag_at(self, other, slot) == tag_at(self, r, slot);
        if (n_agree <= n_fewest) {
            n_fewest = n_agree;
            odd = r;
        }
    }
    return odd;
}

static int is_same_everywhere(pli_shared_comm *self, size_t slot)
{
    const uint64_t mine = tag_of(&self->ring[slot]);
    for (int r = 0; r < self->super.world_size; r++) {
        if (tag_at(self, r, slot) == mine)
            continue;
        set_failure(self, odd_one_out(self, slot), PLI_MISMATCH);
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
        if (!all_posted(self, n) || failure_stands(self, &failure))
            break;
        if (!is_same_everywhere(self, slot))
            break;
        pli_part_run(self, &self->ring[slot]);
        self->n_done = n;
        atomic_store(&mine->done, base_of(self) + n);
        pli_bell_ring(self->segment);
    }
}

static void shared_work(pl_comm *comm)
{
    pli_shared_comm *self = shared_of(comm);
    if (atomic_flag_test_and_set_explicit(&self->busy, memory_order_acquire))
        return; /* another thread is at it */
    work_locked(self);
    atomic_flag_clear_explicit(&self->busy, memory_order_release);
}

static pl_status shared_progress(pl_comm *comm)
{
    shared_work(comm);
    return fail_as(shared_of(comm), "");
}

/* ---- waiting -------------------------------------------------------------- */

static pl_status shared_look(pl_comm *comm)
{
    pli_shared_comm *self = shared_of(comm);
    shared_work(comm);
    for (int r = 0; r < comm->world_size; r++)
        if (r != comm->rank && has_left(self, r))
            set_failure(self, r, PLI_LEFT);
    (void)pli_peers_blame_dead(self, done_counter, UINT64_MAX);
    return fail_as(self, ", waiting");
}

/* A rank that has left well may have done so with its part done. */
static pl_status look_for_gone(const pli_shared_comm *self)
{
    pl_status st = PL_OK;
    for (int end = 0; end < PLI_N_ENDS; end++) {
        const int r = pli_watch_ended(&self->watch, (pli_end)end, 0);
        if (r >= 0)
            PL_FAIL(PL_EPEER, "rank %d: rank %d is gone", self->super.rank, r);
    }
done:
    return st;
}

static pl_status shared_survey(pl_comm *comm, pli_survey what)
{
    pli_shared_comm *self = shared_of(comm);
    pli_failure failure = {0};
    if (what == PLI_SURVEY_GONE)
        return look_for_gone(self);
    if (what == PLI_SURVEY_WORLD) {
        (void)pli_peers_blame_dead(self, done_counter, UINT64_MAX);
        if (!failure_stands(self, &failure) || !pli_failure_is_final(&failure))
            return PL_OK;
    }
    return fail_as(self, "");
}

static int shared_is_done(pl_comm *comm, pl_ticket ticket)
{
    return laggard(shared_of(comm), done_counter, ticket) < 0;
}

static void nap(pli_shared_comm *self, pli_counter counter, uint64_t least)
{
    pli_header *header = pli_header_of(self->segment);
    const struct timespec limit = {.tv_nsec = NAP_MS * PLI_MS};
    pli_failure failure;
    atomic_fetch_add(&header->n_waiters, 1);
    const uint32_t heard = atomic_load(&header->bell);
    const uint64_t next =
        atomic_load(&pli_rank_of(self->segment, self->super.rank)->done) + 1;
    const int has_work = next <= base_of(self) + atomic_load(&self->n_posted) &&
                         laggard(self, posted_counter, next) < 0;
    if (!has_work && laggard(self, counter, least) >= 0 &&
        !failure_stands(self, &failure))
        (void)syscall(SYS_futex, &header->bell, FUTEX_WAIT, heard, &limit, NULL, 0);
    atomic_fetch_sub(&header->n_waiters, 1);
}

/* Waits until every rank's counter has reached `least`. */
static pl_status wait_for(pli_shared_comm *self, pli_counter counter, uint64_t least,
                          int64_t slice_ns)
{
    pl_status st = PL_OK;
    const int64_t begin = pli_now_ns();
    pli_failure failure;
    int n_spins = self->n_spins;
    for (;;) {
        shared_work(&self->super);
        if (laggard(self, counter, least) < 0)
            break;
        /* Whoever failed may have seen the end of what is waited for before. */
        if (failure_stands(self, &failure) && laggard(self, counter, least) >= 0)
            PL_TRY(fail_as(self, ", waiting"));
        if (n_spins-- > 0) {
            pli_pause();
            continue;
        }
        pli_progress_others(self->progress, &self->super);
        nap(self, counter, least);
        pli_peers_look(self, counter, least);
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
    pli_shared_comm *self = shared_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    if (words == NULL) {
        atomic_store(&mine->words_state, PLI_NO_WORDS);
        return;
    }
    /* The end of a traceback says most. */
    const size_t n = strlen(words);
    const size_t room = PLI_WORDS_BYTES - 1;
    const char *from = n > room ? words + (n - room) : words;
    while (atomic_flag_test_and_set(&self->is_speaking))
        pli_pause(); /* a watchdog may abort just now */
    atomic_fetch_add(&mine->n_writes, 1);
    for (size_t i = 0; i <= strlen(from); i++) /* others may read this, and find out */
        __atomic_store_n(&mine->words[i], from[i], __ATOMIC_RELAXED);
    atomic_store(&mine->words_state, PLI_WORDS_READY);
    atomic_fetch_add(&mine->n_writes, 1);
    atomic_flag_clear(&self->is_speaking);
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

/* Takes up the epoch behind the one that failed. */
static void enter_epoch_after(pli_shared_comm *self, const pli_failure *failure)
{
    pli_rank *mine = pli_rank_of(self->segment, self->super.rank);
    while (atomic_flag_test_and_set_explicit(&self->busy, memory_order_acquire))
        pli_pause(); /* a thread ends its part of an aborted operation */
    if (self->phase == PLI_RUNNING)
        atomic_store(&mine->done_before, base_of(self) + self->n_done);
    self->epoch = failure->epoch + 1;
    atomic_store(&self->n_posted, 0);
    self->n_all_posted = 0;
    self->n_done = 0;
    atomic_flag_clear_explicit(&self->busy, memory_order_release);
    /* Words that are there stay until everyone has had the time to read them. */
    uint32_t promised = PLI_WORDS_FOLLOW;
    (void)atomic_compare_exchange_strong(&mine->words_state, &promised, PLI_NO_WORDS);
    self->patience_since_ns = 0;
    atomic_store(&mine->posted, base_of(self));
    atomic_store(&mine->done, base_of(self));
    atomic_store(&mine->epoch, self->epoch);
    pli_bell_ring(self->segment);
}

/* Whether this rank must leave its epoch, be it while it recovers. */
static int has_failed(const pli_shared_comm *self, pli_failure *out)
{
    if (!failure_stands(self, out))
        return 0;
    if (self->phase == PLI_RUNNING || out->rank == self->super.rank)
        return 1;
    /* Where all have come to this epoch, it has begun, and what failed is the step in
     * it: this rank will meet that failure there. */
    return laggard(self, epoch_counter, self->epoch) >= 0;
}

static pl_status shared_recover(pl_comm *comm, int64_t slice_ns, pl_recovery *out)
{
    pl_status st = PL_OK;
    pli_shared_comm *self = shared_of(comm);
    do {
        pli_failure failure = {0};
        if (has_failed(self, &failure)) {
            if (pli_failure_is_final(&failure))
                PL_TRY(pli_failure_report(self->segment, &failure, comm->rank, ""));
            enter_epoch_after(self, &failure);
            self->phase = PLI_RECOVERING;
        } else if (self->phase == PLI_RUNNING) {
            *out = PL_NOTHING_FAILED;
            goto done;
        }
        st = wait_for(self, epoch_counter, self->epoch, slice_ns);
    } while (st == PL_EPEER); /* a recovery that another aborts is begun anew */
    PL_TRY(st);
    shared_last_words(comm, NULL);
    self->phase = PLI_RUNNING;
    *out = PL_RECOVERED;
done:
    return st;
}

static void shared_note(pl_comm *comm, pl_activity activity, uint64_t step)
{
    pli_rank *mine = pli_rank_of(shared_of(comm)->segment, comm->rank);
    atomic_store_explicit(&mine->thread, pli_thread_number(), memory_order_relaxed);
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
    .work = shared_work,
    .progress = shared_progress,
    .look = shared_look,
    .survey = shared_survey,
    .is_done = shared_is_done,
    .wait = shared_wait,
    .recover = shared_recover,
    .abort = shared_abort,
    .note = shared_note,
    .last_words = shared_last_words,
    .arena = shared_arena,
    .map_own = pli_shm_map_own,
    .unshare_own = pli_shm_unshare_own,
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

pl_status pli_shared_create(const pli_shared_options *options, pli_shared_comm **out)
{
    pl_status st = PL_OK;
    pli_shared_comm *self = NULL;
    pli_segment *segment = &options->shared->segment;
    PL_TRY(pli_calloc(1, sizeof *self, "a rank's end of its world", &self));
    self->super = (pl_comm){.ops = &shared_ops,
                            .rank = options->rank,
                            .world_size = segment->world_size,
                            .arena_bytes = segment->arena_bytes,
                            .host_bytes = segment->arena_bytes,
                            .chunk_bytes = PLI_SHARED_CHUNK_BYTES};
    pli_watch_init(&self->watch, segment->world_size);
    self->deadline_ns = options->deadline_ns;
    self->owner_pid = getpid();
    self->n_spins = spins_for(segment->world_size);
    atomic_flag_clear(&self->busy);
    atomic_flag_clear(&self->is_speaking);
    PL_TRY(pli_cpu_sums(&self->sums));
    PL_TRY(pli_calloc(segment->ring_ops, sizeof *self->ring, "operations in flight",
                      &self->ring));
    self->segment = segment; /* before others can meet this world */
    PL_TRY(pli_progress_join(options->progress, &self->super));
    self->progress = options->progress;
    self->shared = options->shared;
    pli_segment_enter(segment, options->rank, options->pid, pli_thread_number());
    *out = self;
    self = NULL;
done:
    if (self != NULL) {
        pli_free(self->ring);
        pli_free(self);
    }
    return st;
}
