/* recorder.c - creates the file of the last steps, and writes to it.
 *
 * Every store is a release, which costs nothing on x86 and little elsewhere: a reader
 * that sees a value of a step also sees the odd `sequence` stored before it.
 */
#include "recorder.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/clock.h"

_Static_assert(sizeof(pli_record) == 1024, "readers rely on this size");
_Static_assert(offsetof(pli_recorder_file, activity) == 64, "as drawn above");
_Static_assert(offsetof(pli_recorder_file, who) == 128, "as drawn above");
_Static_assert(offsetof(pli_recorder_file, records) == 4096, "as drawn above");

struct pli_recorder {
    pli_recorder_file *file;    /* not mapped in a forked child */
    unsigned n_forks;           /* n_forks of the process that created it */
    atomic_int fd;              /* by which readers find the file; -1: hidden */
    pli_record *_Atomic record; /* of the current step; NULL between steps */
    int64_t part_begin_ns;
    int64_t reducing_before_ns; /* record->reducing_ns when the wait began */
};

/* Forks on the way to this process: a child must not write to its parent's file. */
static atomic_uint n_forks;
static pthread_once_t has_handler = PTHREAD_ONCE_INIT;
static int handler_error = 0;

static void count_fork(void)
{
    atomic_fetch_add_explicit(&n_forks, 1, memory_order_relaxed);
}

static void set_handler(void)
{
    handler_error = pthread_atfork(NULL, NULL, count_fork);
}

static int is_own(const pli_recorder *self)
{
    return self != NULL &&
           self->n_forks == atomic_load_explicit(&n_forks, memory_order_relaxed);
}

/* The record of the current step; NULL if there is none, or in a forked child. */
static pli_record *record_of(const pli_recorder *self)
{
    return is_own(self) ? self->record : NULL;
}

static void put(_Atomic int64_t *field, int64_t value)
{
    atomic_store_explicit(field, value, memory_order_release);
}

static int64_t get(const _Atomic int64_t *field)
{
    return atomic_load_explicit(field, memory_order_relaxed);
}

/* ---- life ----------------------------------------------------------------------- */

static pl_status map_new_file(const char *name, pli_recorder *self)
{
    pl_status st = PL_OK;
    const off_t n_bytes = sizeof *self->file;
    self->fd = PL_SYS(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (self->fd < 0)
        PL_FAIL_ERRNO("cannot make a file in memory (memfd_create)");
    /* Allocate all pages: a lack of memory is an error here, not a SIGBUS later. */
    if (PL_SYS(fallocate(self->fd, 0, 0, n_bytes)) != 0)
        PL_FAIL_ERRNO("no room for recorded steps");
    void *base = PL_SYS_PTR(mmap(NULL, sizeof *self->file, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_POPULATE, self->fd, 0),
                            MAP_FAILED);
    if (base == MAP_FAILED)
        PL_FAIL_ERRNO("cannot map recorded steps");
    (void)madvise(base, sizeof *self->file, MADV_DONTFORK);
    (void)madvise(base, sizeof *self->file, MADV_DONTDUMP);
    self->file = base;
done:
    return st;
}

static void write_header(pli_recorder_file *file, const char *who)
{
    file->version = PLI_RECORDER_VERSION;
    file->header_bytes = (uint32_t)offsetof(pli_recorder_file, records);
    file->record_bytes = (uint32_t)sizeof(pli_record);
    file->n_records = PLI_RECORDER_RECORDS;
    file->n_buckets = PLI_RECORDER_BUCKETS;
    memcpy(file->who, who, strlen(who));
    put(&file->awaiting, PLI_RECORDER_NOBODY);
    put(&file->since_ns, pli_now_ns());
    atomic_store_explicit(&file->magic, PLI_RECORDER_MAGIC, memory_order_release);
}

pl_status pli_recorder_create(const char *name, const char *who, pli_recorder **out)
{
    pl_status st = PL_OK;
    pli_recorder *self = NULL;
    if (strlen(who) >= PLI_RECORDER_WHO_BYTES)
        PL_FAIL(PL_EINVAL, "`who` has %zu bytes: give less than %d", strlen(who),
                PLI_RECORDER_WHO_BYTES);
    (void)pthread_once(&has_handler, set_handler);
    if (handler_error != 0)
        PL_FAIL(PL_ENOMEM, "no memory for a fork handler (pthread_atfork)");
    PL_TRY(pli_calloc(1, sizeof *self, "a recorder", &self));
    self->n_forks = atomic_load_explicit(&n_forks, memory_order_relaxed);
    self->fd = -1;
    PL_TRY(map_new_file(name, self));
    write_header(self->file, who);
    /* Cutting the file would kill this process and readers.  To them, an unsealed file
     * is not yet complete. */
    if (PL_SYS(fcntl(self->fd, F_ADD_SEALS, PLI_RECORDER_SEALS)) != 0)
        PL_FAIL_ERRNO("cannot seal recorded steps");
    *out = self;
    self = NULL;
done:
    pli_recorder_destroy(self);
    return st;
}

void pli_recorder_hide(pli_recorder *self)
{
    const int fd = self != NULL ? atomic_exchange(&self->fd, -1) : -1;
    if (fd >= 0)
        (void)close(fd);
}

void pli_recorder_destroy(pli_recorder *self)
{
    if (self == NULL)
        return;
    pli_recorder_hide(self);
    /* A forked child may have other memory at this address. */
    if (is_own(self) && self->file != NULL)
        (void)munmap(self->file, sizeof *self->file);
    pli_free(self);
}

/* ---- a step --------------------------------------------------------------------- */

static void begin_record(pli_recorder *self, uint64_t step)
{
    pli_record *record = &self->file->records[step % PLI_RECORDER_RECORDS];
    const uint64_t before =
        atomic_load_explicit(&record->sequence, memory_order_relaxed);
    atomic_store_explicit(&record->sequence, before | 1, memory_order_release);
    self->record = record;
    self->reducing_before_ns = 0;
    const int64_t n = get(&record->n_buckets);
    const size_t n_used =
        n >= 0 && n < PLI_RECORDER_BUCKETS ? (size_t)n : PLI_RECORDER_BUCKETS;
    const size_t end = offsetof(pli_record, buckets) + n_used * sizeof *record->buckets;
    for (size_t at = offsetof(pli_record, step); at < end; at += sizeof step)
        put((_Atomic int64_t *)(void *)((char *)record + at), 0);
    put(&record->step, (int64_t)step);
    put(&record->awaited, PLI_RECORDER_NOBODY);
}

static void end_record(pli_recorder *self, int64_t end_ns)
{
    pli_record *record = self->record;
    put(&record->end_ns, end_ns);
    self->record = NULL;
    atomic_fetch_add_explicit(&record->sequence, 1, memory_order_release);
}

static int is_under_way(const pli_recorder *self, uint64_t step)
{
    return self->record != NULL && get(&self->record->step) == (int64_t)step;
}

/* At the next step's forward: ends a step that had a forward and no backward. */
static void end_forward_alone(pli_recorder *self, uint64_t step)
{
    const pli_record *record = self->record;
    if (record != NULL && !is_under_way(self, step) && get(&record->forward_end_ns) &&
        !get(&record->backward_begin_ns))
        end_record(self, get(&record->forward_end_ns));
}

void pli_recorder_activity(pli_recorder *self, pl_activity activity, uint64_t step)
{
    if (!is_own(self))
        return;
    const int64_t now = pli_now_ns();
    put(&self->file->activity, activity);
    put(&self->file->since_ns, now);
    put(&self->file->step, (int64_t)step);
    put(&self->file->awaiting, PLI_RECORDER_NOBODY);
    if (activity == PL_FORWARD) {
        end_forward_alone(self, step);
        begin_record(self, step);
        put(&self->record->forward_begin_ns, now);
    } else if (activity == PL_BACKWARD) {
        if (!is_under_way(self, step))
            begin_record(self, step);
        put(&self->record->backward_begin_ns, now);
    } else if (self->record == NULL) {
        return;
    } else if (activity == PL_FINISHING || activity == PL_JOINED) {
        if (get(&self->record->backward_end_ns) == 0) /* the first of two calls */
            put(&self->record->backward_end_ns, now);
    } else if (get(&self->record->backward_begin_ns) == 0) {
        put(&self->record->forward_end_ns, now);
    } else {
        end_record(self, now);
    }
}

const pli_record *pli_recorder_look(const pli_recorder *self, uint64_t step)
{
    return is_own(self) ? &self->file->records[step % PLI_RECORDER_RECORDS] : NULL;
}

void pli_recorder_plan(pli_recorder *self, size_t n_buckets, size_t n_bytes)
{
    pli_record *record = record_of(self);
    if (record == NULL)
        return;
    put(&record->n_buckets, (int64_t)n_buckets);
    put(&record->n_bytes, (int64_t)n_bytes);
}

void pli_recorder_ready(pli_recorder *self, size_t bucket, size_t n_bytes)
{
    pli_record *record = record_of(self);
    if (record == NULL || bucket >= PLI_RECORDER_BUCKETS)
        return;
    pli_recorded_bucket *entry = &record->buckets[bucket];
    if (get(&entry->ready_ns) != 0)
        return;
    put(&entry->ready_ns, pli_now_ns());
    put(&entry->n_bytes, (int64_t)n_bytes);
}

void pli_recorder_reduced(pli_recorder *self)
{
    pli_record *record = record_of(self);
    if (record != NULL)
        put(&record->reduced_ns, pli_now_ns());
}

/* ---- parts and waits ------------------------------------------------------------ */

void pli_recorder_part_begins(pli_recorder *self, unsigned bucket)
{
    pli_record *record = record_of(self);
    if (record == NULL || bucket == 0)
        return;
    self->part_begin_ns = pli_now_ns();
    if (bucket <= PLI_RECORDER_BUCKETS &&
        get(&record->buckets[bucket - 1].begin_ns) == 0)
        put(&record->buckets[bucket - 1].begin_ns, self->part_begin_ns);
}

void pli_recorder_part_ends(pli_recorder *self, unsigned bucket)
{
    pli_record *record = record_of(self);
    if (record == NULL || bucket == 0)
        return;
    const int64_t now = pli_now_ns();
    put(&record->reducing_ns, get(&record->reducing_ns) + now - self->part_begin_ns);
    if (bucket <= PLI_RECORDER_BUCKETS)
        put(&record->buckets[bucket - 1].end_ns, now);
}

int64_t pli_recorder_wait_begins(pli_recorder *self)
{
    const pli_record *record = record_of(self);
    if (record != NULL)
        self->reducing_before_ns = get(&record->reducing_ns);
    return pli_now_ns();
}

void pli_recorder_awaits(pli_recorder *self, int rank)
{
    if (is_own(self))
        put(&self->file->awaiting, rank);
}

void pli_recorder_wait_ends(pli_recorder *self, int64_t begin_ns, int awaited)
{
    pli_record *record = record_of(self);
    if (record == NULL || awaited == PLI_RECORDER_NOBODY)
        return;
    /* Subtract the time in which the waiting thread did its own parts. */
    const int64_t worked = get(&record->reducing_ns) - self->reducing_before_ns;
    const int64_t waited = pli_now_ns() - begin_ns - worked;
    put(&record->waiting_ns, get(&record->waiting_ns) + waited);
    put(&record->awaited, awaited);
}
