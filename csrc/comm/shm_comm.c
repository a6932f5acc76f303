/* shm_comm.c - posts operations in shared memory; failure, recovery and lifetime. */
#include "shm_comm.h"

#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/backoff.h"
#include "core/pages.h"
#include "shm_counters.h"

enum {
    SPINS_WITH_CORES = 1000, /* pauses before a sleep: 20 to 40 us */
    SPINS_CROWDED = 100      /* ... if ranks outnumber cores */
};

static pl_status shm_issue(pl_comm *comm, const pl_op *op, const pli_order *order,
                           pl_ticket *out)
{
    pl_status st = PL_OK;
    pli_shm_comm *self = pli_shm_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    const uint64_t n = atomic_load_explicit(&self->n_posted, memory_order_relaxed) + 1;
    (void)order; /* host memory is ready when this is called */
    PL_TRY(pli_shm_check(self, ""));
    if (self->phase != PLI_RUNNING)
        PL_FAIL(PL_ESTATE, "an operation was issued while the world recovers");
    if (op->kind <= PL_REDUCE && self->sums->fn[op->dtype][op->reduction] == NULL)
        PL_FAIL(PL_EINVAL,
                "%s cannot be reduced that way: the mean takes floating point "
                "types, the maximum integers",
                pl_dtype_text(op->dtype));
    /* A lagging peer may still compare the tag that this would overwrite. */
    if (n > self->segment->ring_ops &&
        !pli_have_all_done(self, pli_epoch_base(self) + n - self->segment->ring_ops))
        PL_FAIL(PL_ESTATE, "more than %u operations in flight: wait for some",
                self->segment->ring_ops);
    const size_t slot = n & (self->segment->ring_ops - 1);
    self->ring[slot] = *op;
    atomic_store_explicit(&pli_tags_of(self->segment, comm->rank)[slot], pli_tag_of(op),
                          memory_order_relaxed);
    atomic_store_explicit(&self->n_posted, n, memory_order_release);
    atomic_store(&mine->posted, pli_epoch_base(self) + n);
    (void)pli_have_all_posted(self, pli_epoch_base(self) + n);
    *out = pli_epoch_base(self) + n;
done:
    return st;
}

static pl_status shm_progress(pl_comm *comm)
{
    pli_shm_work(comm);
    return pli_shm_check(pli_shm_of(comm), "");
}

/* ---- waiting -------------------------------------------------------------------- */

static pl_status shm_check_peers(pl_comm *comm)
{
    pli_shm_comm *self = pli_shm_of(comm);
    pli_shm_work(comm);
    for (int r = 0; r < comm->world_size; r++)
        if (r != comm->rank && pli_rank_has_left(self, r))
            pli_epoch_fail(self, r, PLI_LEFT);
    (void)pli_peers_blame_dead(self, pli_counter_done, UINT64_MAX);
    return pli_shm_check(self, ", waiting");
}

/* Does not fail the world: a rank that left normally may have done its part. */
static pl_status check_gone(const pli_shm_comm *self)
{
    pl_status st = PL_OK;
    for (int end = 0; end < PLI_N_ENDS; end++) {
        const int r = pli_watch_ended(&self->watch, (pli_end)end, 0);
        if (r >= 0)
            PL_FAIL(PL_EPEER, "rank %d: rank %d is gone",
                    self->segment->first_rank + self->super.rank,
                    self->segment->first_rank + r);
    }
done:
    return st;
}

static pl_status shm_query(pl_comm *comm, pli_query what)
{
    pli_shm_comm *self = pli_shm_of(comm);
    pli_failure failure = {0};
    if (what == PLI_QUERY_GONE)
        return check_gone(self);
    if (what == PLI_QUERY_WORLD) {
        (void)pli_peers_blame_dead(self, pli_counter_done, UINT64_MAX);
        if (!pli_failure_stands(self, &failure) || !pli_failure_is_final(&failure))
            return PL_OK;
    }
    return pli_shm_check(self, "");
}

static int shm_is_done(pl_comm *comm, pl_ticket ticket)
{
    return pli_have_all_done(pli_shm_of(comm), ticket);
}

static pl_status shm_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    pl_status st = PL_OK;
    pli_shm_comm *self = pli_shm_of(comm);
    if (ticket > pli_epoch_base(self) + atomic_load(&self->n_posted))
        PL_FAIL(PL_EINVAL, "ticket %llu was never issued", (unsigned long long)ticket);
    st = pli_shm_wait_for(self, pli_counter_done, ticket, slice_ns);
done:
    return st;
}

/* ---- failure and recovery ------------------------------------------------------- */

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
    pli_shm_comm *self = pli_shm_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    if (getpid() != self->owner_pid)
        return;            /* a forked child lacks most of the mapping */
    if (message == NULL) { /* peers may not have read why this rank failed */
        if (pli_failure_stands(self, &failure) && failure.rank == comm->rank)
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
    pli_shm_comm *self = pli_shm_of(comm);
    pli_rank *mine = pli_rank_of(self->segment, comm->rank);
    if (getpid() != self->owner_pid)
        return;
    if (message != NULL)
        shm_set_failure_message(comm, message);
    else if (atomic_load(&mine->message_state) == PLI_MESSAGE_NONE)
        atomic_store(&mine->message_state, PLI_MESSAGE_FOLLOWS);
    pli_epoch_fail(self, comm->rank, PLI_RAISED);
}

static void shm_end(pl_comm *comm, const char *message)
{
    pli_shm_comm *self = pli_shm_of(comm);
    if (getpid() != self->owner_pid)
        return;
    shm_set_failure_message(comm, message);
    /* One epoch on: ranks may be about to leave a failed step behind. */
    pli_failure_set(self->segment, &(pli_failure){.epoch = self->epoch + 1,
                                                  .rank = comm->rank,
                                                  .reason = PLI_ENDED});
}

/* Enters the epoch after the one that failed. */
static void enter_epoch_after(pli_shm_comm *self, const pli_failure *failure)
{
    pli_rank *mine = pli_rank_of(self->segment, self->super.rank);
    pli_spin_lock(&self->busy); /* wait for a part of an aborted operation */
    if (self->phase == PLI_RUNNING)
        atomic_store(&mine->done_before, pli_epoch_base(self) + self->n_done);
    self->epoch = failure->epoch + 1;
    atomic_store(&self->n_posted, 0);
    self->n_done = 0;
    pli_spin_unlock(&self->busy);
    /* Keep a message that is there: every peer needs time to read it. */
    break_promise(mine);
    self->silence = (pli_stopwatch){0};
    atomic_store(&mine->posted, pli_epoch_base(self));
    atomic_store(&mine->done, pli_epoch_base(self));
    atomic_store(&mine->epoch, self->epoch);
    pli_wake_ranks(self->segment);
}

/* Whether this rank must leave its epoch, even while it recovers. */
static int has_failed(const pli_shm_comm *self, pli_failure *out)
{
    if (!pli_failure_stands(self, out))
        return 0;
    if (self->phase == PLI_RUNNING || out->rank == self->super.rank)
        return 1;
    /* If all ranks have reached this epoch, it has begun, and a step in it has failed:
     * this rank will meet that failure there. */
    return pli_laggard(self, pli_counter_epoch, self->epoch) >= 0;
}

static pl_status shm_recover(pl_comm *comm, int64_t slice_ns, pl_recovery *out)
{
    pl_status st = PL_OK;
    pli_shm_comm *self = pli_shm_of(comm);
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
        st = pli_shm_wait_for(self, pli_counter_epoch, self->epoch, slice_ns);
    } while (st == PL_EPEER); /* start again if another rank aborts the recovery */
    PL_TRY(st);
    shm_set_failure_message(comm, NULL);
    self->phase = PLI_RUNNING;
    *out = PL_RECOVERED;
done:
    return st;
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
    pli_rank *mine = pli_rank_of(pli_shm_of(comm)->segment, comm->rank);
    atomic_store_explicit(&mine->thread, thread_number(), memory_order_relaxed);
    atomic_store_explicit(&mine->activity, activity, memory_order_relaxed);
    atomic_store_explicit(&mine->step, step, memory_order_relaxed);
}

static void shm_forget(pl_comm *comm)
{
    (void)comm; /* a child's copies close when it ends */
}

static off_t own_offset(pl_comm *comm, size_t offset_bytes)
{
    const pli_shm_segment *segment = pli_shm_of(comm)->segment;
    return (off_t)(segment->arenas_at + (size_t)comm->rank * segment->arena_bytes +
                   offset_bytes);
}

static pl_status shm_map_own(pl_comm *comm, size_t offset_bytes, size_t bytes,
                             void **out)
{
    pl_status st = PL_OK;
    const pli_shm_segment *segment = pli_shm_of(comm)->segment;
    const off_t at = own_offset(comm, offset_bytes);
    /* Without a file, mremap() with an old size of 0 maps the same pages again. */
    void *memory =
        segment->fd >= 0
            ? PL_SYS_PTR(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                              segment->fd, at),
                         MAP_FAILED)
            : PL_SYS_PTR(mremap(segment->base + at, 0, bytes, MREMAP_MAYMOVE),
                         MAP_FAILED);
    if (memory == MAP_FAILED)
        PL_FAIL_ERRNO("cannot map %zu bytes of gradients", bytes);
    (void)madvise(memory, bytes, 22 /* MADV_POPULATE_READ: no faults later */);
    *out = memory;
done:
    return st;
}

static pl_status shm_unshare_own(pl_comm *comm, size_t offset_bytes, size_t bytes,
                                 void *memory)
{
    const pli_shm_segment *segment = pli_shm_of(comm)->segment;
    return pli_pages_make_private(memory, bytes, segment->fd,
                                  own_offset(comm, offset_bytes));
}

/* ---- life ----------------------------------------------------------------------- */

void pli_shm_segment_release(pli_shm_segment *segment)
{
    if (segment == NULL || atomic_fetch_sub(&segment->n_users, 1) > 1)
        return;
    pli_segment_fini(segment);
    pli_free(segment);
}

static void shm_leave(pl_comm *comm)
{
    pli_shm_comm *self = pli_shm_of(comm);
    if (getpid() != self->owner_pid)
        return;
    atomic_store(&pli_rank_of(self->segment, comm->rank)->life, PLI_GONE);
    pli_wake_ranks(self->segment);
}

static void shm_destroy(pl_comm *comm)
{
    pli_shm_comm *self = pli_shm_of(comm);
    pli_progress_leave(self->progress, comm);
    shm_leave(comm);
    if (getpid() == self->owner_pid) /* a child may have closed its copies */
        pli_watch_fini(&self->watch);
    pli_shm_segment_release(self->segment);
    pli_free(self->ring);
    pli_free(self);
}

static const pl_comm_ops shm_ops = {
    .name = "shm",
    .issue = shm_issue,
    .work = pli_shm_work,
    .progress = shm_progress,
    .check_peers = shm_check_peers,
    .query = shm_query,
    .is_done = shm_is_done,
    .wait = shm_wait,
    .recover = shm_recover,
    .abort = shm_abort,
    .record_activity = shm_record_activity,
    .set_failure_message = shm_set_failure_message,
    .forget = shm_forget,
    .leave = shm_leave,
    .destroy = shm_destroy,
};

static const pli_host_ops shm_host_ops = {
    .end = shm_end,
    .notify = pli_shm_notify,
    .await_notice = pli_shm_await_notice,
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
