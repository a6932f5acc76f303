/* failure.c - records which rank is to blame, and reports it as a message. */
#include "failure.h"

#include <stdio.h>
#include <string.h>

#include "comm.h"

/* How long a report waits for a message that the culprit has announced. */
enum { MESSAGE_TIMEOUT_MS = 1000 };

static uint64_t pack(const pli_failure *failure)
{
    return (uint64_t)(uint16_t)failure->rank << 16 | (uint64_t)failure->reason << 8 | 1;
}

void pli_failure_set(const pli_shm_segment *segment, const pli_failure *failure)
{
    uint64_t none = 0;
    (void)atomic_compare_exchange_strong(&pli_header_of(segment)->failure, &none,
                                         pack(failure));
    pli_wake_ranks(segment);
}

static const char *activity_text(const pli_rank *rank)
{
    static const char *const texts[PL_N_ACTIVITIES] = {
#define ACTIVITY_TEXT(name, text) [name] = text,
        PLI_ACTIVITY_MAP(ACTIVITY_TEXT)
#undef ACTIVITY_TEXT
    };
    const uint32_t activity = atomic_load(&rank->activity);
    return activity < PL_N_ACTIVITIES ? texts[activity] : "an unknown activity";
}

/* Where a rank is: "step 12, in backward, after operation 3". */
static void describe(const pli_rank *rank, char *out, size_t out_bytes)
{
    (void)snprintf(out, out_bytes, "step %llu, in %s, after operation %llu",
                   (unsigned long long)atomic_load(&rank->step), activity_text(rank),
                   (unsigned long long)atomic_load(&rank->posted));
}

/* Copies the message, with title and final zero; `out` has PLI_MESSAGE_BYTES + 64. */
static void copy_message(pli_rank *culprit, char *out)
{
    const int64_t until = pli_now_ns() + MESSAGE_TIMEOUT_MS * PLI_MS;
    while (atomic_load(&culprit->message_state) == PLI_MESSAGE_FOLLOWS &&
           pli_now_ns() < until)
        pli_sleep_ns(2 * PLI_MS);
    /* Another write may be under way: retry until the copy is of one write. */
    do {
        const uint32_t n_writes = atomic_load(&culprit->n_writes);
        out[0] = '\0';
        if (n_writes % 2 == 0 &&
            atomic_load(&culprit->message_state) == PLI_MESSAGE_READY) {
            static const char title[] = "\n\nIts own failure message:\n";
            size_t n = 0;
            char letter = ' ';
            memcpy(out, title, sizeof title);
            for (; letter != '\0' && n < PLI_MESSAGE_BYTES; n++)
                out[sizeof title - 1 + n] = letter =
                    __atomic_load_n(&culprit->message[n], __ATOMIC_RELAXED);
            out[sizeof title - 1 + n] = '\0';
        }
        if (n_writes % 2 == 0 && atomic_load(&culprit->n_writes) == n_writes)
            return;
        pli_sleep_ns(PLI_MS);
    } while (pli_now_ns() < until);
}

/* On the rank at fault; PL_OK if other words fit. */
static pl_status report_own(pli_reason reason, int me, const char *here,
                            const char *message)
{
    if (reason == PLI_RAISED)
        return pli_fail(PL_EPEER, "rank %d: this rank's step failed (%s)%s", me, here,
                        message);
    if (reason == PLI_LATE)
        return pli_fail(PL_ETIMEOUT,
                        "rank %d: this rank kept the others waiting beyond the "
                        "deadline (%s)%s",
                        me, here, message);
    if (reason == PLI_MISMATCH)
        return pli_fail(PL_EMISMATCH,
                        "rank %d: this rank issued another operation than the others "
                        "(%s): the ranks must run the same steps",
                        me, here);
    return PL_OK;
}

static pl_status report_mismatch(int me, int r, const char *there, const char *here,
                                 const char *message)
{
    return pli_fail(PL_EMISMATCH,
                    "rank %d: rank %d issued another operation than this rank (%s "
                    "there, %s here): the ranks must run the same steps%s",
                    me, r, there, here, message);
}

static pl_status report_deadlock(int me, int r, const char *there, const char *here)
{
    return pli_fail(
        PL_EMISMATCH,
        "rank %d: this rank and rank %d wait for one another, each in another "
        "wrapper (in this one, rank %d: %s; this rank: %s): go backward through "
        "the wrappers in the same order on all ranks, or once through the sum of "
        "the losses; pass wrappers to join contexts in the order of their creation",
        me, r, r, there, here);
}

pl_status pli_failure_report(const pli_shm_segment *segment, const pli_failure *failure,
                             int me, const char *waiting_for)
{
    /* Any process that maps the segment may have written that number. */
    const int is_known = failure->rank < segment->world_size;
    const pli_reason reason = is_known ? failure->reason : PLI_N_REASONS;
    pli_rank *culprit = pli_rank_of(segment, is_known ? failure->rank : me);
    const int r = segment->first_rank + failure->rank;
    const int pid = (int)atomic_load(&culprit->pid);
    char there[160];
    char here[160];
    char message[PLI_MESSAGE_BYTES + 64];
    describe(culprit, there, sizeof there);
    describe(pli_rank_of(segment, me), here, sizeof here);
    me += segment->first_rank;
    copy_message(culprit, message);
    const pl_status own = r == me ? report_own(reason, me, here, message) : PL_OK;
    if (own != PL_OK)
        return own;
    switch (reason) {
    case PLI_RAISED:
        return pli_fail(
            PL_EPEER,
            "rank %d: the step of rank %d failed (%s), so this one cannot be "
            "finished (%s%s)%s",
            me, r, there, here, waiting_for, message);
    case PLI_DIED:
        if (atomic_load(&culprit->life) == PLI_ABSENT)
            return pli_fail(PL_EPEER,
                            "rank %d: rank %d died or gave up during construction", me,
                            r);
        return pli_fail(
            PL_EPEER,
            "rank %d: rank %d (process %d) died (%s); this rank was at %s%s%s", me, r,
            pid, there, here, waiting_for, message);
    case PLI_LEFT:
        return pli_fail(
            PL_EPEER,
            "rank %d: rank %d (process %d) has left (%s), but this rank waits "
            "for it (%s%s)%s%s",
            me, r, pid, there, here, waiting_for,
            message[0] != '\0' ? "" : ": every rank needs the same number of steps",
            message);
    case PLI_LATE:
        return pli_fail(
            PL_ETIMEOUT,
            "rank %d: rank %d (process %d) lives but kept the others waiting "
            "beyond the deadline (%s); this rank was at %s%s%s",
            me, r, pid, there, here, waiting_for, message);
    case PLI_MISMATCH:
        return report_mismatch(me, r, there, here, message);
    case PLI_DEADLOCK:
        return report_deadlock(me, r, there, here);
    case PLI_N_REASONS:
        break;
    }
    return pli_fail(PL_EPEER, "rank %d: rank %d failed for an unknown reason", me, r);
}
