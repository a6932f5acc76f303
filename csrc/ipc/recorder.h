/* recorder.h - the last steps of a rank, or of the parent of replicas, in a file that
 * other processes of the user read: `paceline top` and `paceline trace`.
 *
 *     | layout |  now  |  who: JSON  | record 0 | record 1 | ... | record 63 |
 *     0        64     128           4096
 *
 * Step s is in record s % 64.  There is one writer, the thread whose step it is, and
 * there are no locks: a record's `sequence` is odd from the step's begin to its end,
 * and a reader takes what it has copied where that was the same even number before and
 * after.  While a step is under way, other threads may add to it what they do for it.
 *
 *     forward -> user's code -> backward -> the end of backward -> user's code
 *        \_________/ again, for the same step: it begins anew       (recorded)
 *
 * Times are CLOCK_MONOTONIC's nanoseconds; 0: not known, or not yet.  The layout is
 * that of paceline._recorder, which has the same PLI_RECORDER_VERSION.
 *
 * Recording never fails once it has begun.  A forked child has no part in it: there all
 * calls do nothing.  NULL may be given for a recorder everywhere.
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
    PLI_RECORDER_BUCKETS = 28, /* of a step, its first */
    PLI_RECORDER_WHO_BYTES = 3968,
    PLI_RECORDER_NOBODY = -1,  /* in place of a rank: there was no wait */
    PLI_RECORDER_SOMEBODY = -2 /* ... for whom is not known */
};

/* A bucket of a rank. */
typedef struct pli_recorded_bucket {
    _Atomic int64_t ready_ns; /* it had all its gradients on this rank */
    _Atomic int64_t begin_ns; /* this rank began its part of the reduction */
    _Atomic int64_t end_ns;   /* ... and was done with it */
    _Atomic int64_t n_bytes;
} pli_recorded_bucket;

typedef struct pli_record {
    _Atomic uint64_t sequence;
    _Atomic int64_t step;
    _Atomic int64_t forward_begin_ns;
    _Atomic int64_t forward_end_ns;
    _Atomic int64_t backward_begin_ns; /* the first gradient */
    _Atomic int64_t backward_end_ns;   /* all that this rank has is posted */
    _Atomic int64_t reduced_ns;        /* all means are in place */
    _Atomic int64_t end_ns;
    _Atomic int64_t reducing_ns; /* this rank's parts of all reductions */
    _Atomic int64_t waiting_ns;  /* nothing to do before another rank came */
    _Atomic int64_t awaited;     /* the rank that came last */
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
    uint32_t n_buckets; /* room for, a record */
    uint32_t reserved[9];
    /* now, each by itself */
    _Atomic int64_t activity; /* pl_activity */
    _Atomic int64_t since_ns;
    _Atomic int64_t step;
    _Atomic int64_t awaiting; /* the rank that is waited for */
    int64_t reserved_now[4];
    char who[PLI_RECORDER_WHO_BYTES];
    pli_record records[PLI_RECORDER_RECORDS];
} pli_recorder_file;

typedef struct pli_recorder pli_recorder;

/* Makes the file, which must not be there, for the user alone, with all its pages, and
 * begins to record.  `who` is a JSON object, in UTF-8.  *out: the caller destroys it.
 */
pl_status pli_recorder_create(const char *path, const char *who,
                              pli_recorder **out) PL_MUST_USE;

/* Removes the file's name: nobody finds it any more.  May be called twice. */
void pli_recorder_unlink(pli_recorder *self);
void pli_recorder_destroy(pli_recorder *self);

/* What the process does from now on, in which step: see above. */
void pli_recorder_activity(pli_recorder *self, pl_activity activity, uint64_t step);

/* Between backward and the end of the step. */
void pli_recorder_plan(pli_recorder *self, size_t n_buckets, size_t n_bytes);
void pli_recorder_ready(pli_recorder *self, size_t bucket, size_t n_bytes);
void pli_recorder_reduced(pli_recorder *self);

/* Round this rank's part of an operation; `bucket` is that of pl_op. */
void pli_recorder_part_begins(pli_recorder *self, unsigned bucket);
void pli_recorder_part_ends(pli_recorder *self, unsigned bucket);

/* Round a wait.  begins: returns the time, recorder or not, for `ends`, which is given
 * the rank that came last; `awaits` says meanwhile for whom. */
int64_t pli_recorder_wait_begins(pli_recorder *self);
void pli_recorder_awaits(pli_recorder *self, int rank);
void pli_recorder_wait_ends(pli_recorder *self, int64_t begin_ns, int awaited);

#endif
