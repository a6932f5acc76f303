/* recorder.h - records the last steps of a rank, or of a process with replicas, in a
 * memfd that the user's `paceline top` and `paceline trace` read.  They find it among
 * the descriptors of the user's processes, in /proc.
 *
 *     | layout |  now  |  who: JSON  | record 0 | record 1 | ... | record 63 |
 *     0        64     128           4096
 *
 * Step s is in record s % 64.  There are no locks, and one writer: the thread that runs
 * the step.  During a step other threads may add to its record.  The `sequence` of a
 * record is odd from the beginning of its step to the end.  A reader accepts a copy if
 * `sequence` was the same even number before and after copying.
 *
 *     forward -> user's code -> backward -> the end of backward -> user's code
 *        \_________/ again, for the same step: it begins anew       (recorded)
 *
 * Times are nanoseconds of CLOCK_MONOTONIC; 0: unknown, or not yet.  paceline._recorder
 * reads this layout and must have the same PLI_RECORDER_VERSION.
 *
 * After creation, no call can fail.  In a forked child the calls record nothing.  Every
 * function accepts NULL for the recorder.
 */
#ifndef PLI_RECORDER_H
#define PLI_RECORDER_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "core/activity.h"
#include "core/status.h"

#define PLI_RECORDER_MAGIC UINT64_C(0x44524f4345524c50) /* "PLRECORD" */

enum {
    PLI_RECORDER_VERSION = 1,
    PLI_RECORDER_RECORDS = 64,
    PLI_RECORDER_BUCKETS = 28, /* the first ones of a step */
    PLI_RECORDER_WHO_BYTES = 3968,
    PLI_RECORDER_SEALS = 7,    /* the size is final: F_SEAL_SEAL, _SHRINK and _GROW */
    PLI_RECORDER_NOBODY = -1,  /* instead of a rank: there was no wait */
    PLI_RECORDER_SOMEBODY = -2 /* instead of a rank: a wait for an unknown rank */
};

/* One bucket on this rank. */
typedef struct pli_recorded_bucket {
    _Atomic int64_t ready_ns; /* when it had all its gradients */
    _Atomic int64_t begin_ns; /* when this rank began its part of the reduction */
    _Atomic int64_t end_ns;   /* when this rank finished its part */
    _Atomic int64_t n_bytes;
} pli_recorded_bucket;

typedef struct pli_record {
    _Atomic uint64_t sequence;
    _Atomic int64_t step;
    _Atomic int64_t forward_begin_ns;
    _Atomic int64_t forward_end_ns;
    _Atomic int64_t backward_begin_ns; /* the first gradient */
    _Atomic int64_t backward_end_ns;   /* this rank has posted all its gradients */
    _Atomic int64_t reduced_ns;        /* all means are in place */
    _Atomic int64_t end_ns;
    _Atomic int64_t reducing_ns; /* duration of this rank's parts of all reductions */
    _Atomic int64_t waiting_ns;  /* duration of waits for other ranks */
    _Atomic int64_t awaited;     /* the rank that arrived last */
    _Atomic int64_t n_buckets;
    _Atomic int64_t n_bytes; /* reduced */
    int64_t reserved[3];
    pli_recorded_bucket buckets[PLI_RECORDER_BUCKETS];
} pli_record;

typedef struct pli_recorder_file {
    _Atomic uint64_t magic; /* written last */
    uint32_t version;
    uint32_t header_bytes;
    uint32_t record_bytes;
    uint32_t n_records;
    uint32_t n_buckets; /* capacity of a record */
    uint32_t reserved[9];
    /* "now": each field is stored separately */
    _Atomic int64_t activity; /* pl_activity */
    _Atomic int64_t since_ns;
    _Atomic int64_t step;
    _Atomic int64_t awaiting; /* the rank that this one waits for */
    int64_t reserved_now[4];
    char who[PLI_RECORDER_WHO_BYTES];
    pli_record records[PLI_RECORDER_RECORDS];
} pli_recorder_file;

typedef struct pli_recorder pli_recorder;

/* Makes a memfd of that name, with all pages allocated, and begins to record.  `who` is
 * a JSON object in UTF-8.  *out: the caller destroys it. */
pl_status pli_recorder_create(const char *name, const char *who,
                              pli_recorder **out) PL_MUST_USE;

/* Closes the descriptor, so that no reader finds the file.  May be called twice, and in
 * a forked child, which closes its copy: readers pass over it in any case. */
void pli_recorder_hide(pli_recorder *self);
void pli_recorder_destroy(pli_recorder *self);

/* Records what the process does from now on, and in which step. */
void pli_recorder_activity(pli_recorder *self, pl_activity activity, uint64_t step);

/* The record in which that step is or was; NULL in a forked child.  It may be read
 * between steps. */
const pli_record *pli_recorder_look(const pli_recorder *self, uint64_t step);

/* Call these between backward and the end of the step. */
void pli_recorder_plan(pli_recorder *self, size_t n_buckets, size_t n_bytes);
void pli_recorder_ready(pli_recorder *self, size_t bucket, size_t n_bytes);
void pli_recorder_reduced(pli_recorder *self);

/* Call these before and after this rank's part of an operation, with pl_op.bucket. */
void pli_recorder_part_begins(pli_recorder *self, unsigned bucket);
void pli_recorder_part_ends(pli_recorder *self, unsigned bucket);

/* Call these around a wait.  `begins` returns the time, even without a recorder; pass
 * it to `ends` with the rank that arrived last.  `awaits` names the rank meanwhile. */
int64_t pli_recorder_wait_begins(pli_recorder *self);
void pli_recorder_awaits(pli_recorder *self, int rank);
void pli_recorder_wait_ends(pli_recorder *self, int64_t begin_ns, int awaited);

#endif
