/* counters.c - the cost of a rank's counters in shared memory, which peers and tools
 * read.  `make bench-counters` builds and runs it.
 *
 * step       pli_comm_record_activity: step, activity and thread, three relaxed stores
 * operation  the fixed cost of another operation of the same kind: an empty all-reduce
 *            issued and completed in a world of one rank, so its counters, tag and
 *            wakeup, without which there are no counters; a bucket is one or more
 * recorded   a whole step of four buckets in the recorder, with 20 reads of the clock
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../c/local.h"
#include "comm/comm.h"
#include "core/clock.h"

enum { N_EVENTS = 2000000, N_ROUNDS = 9 };

static int compare(const void *left, const void *right)
{
    const double l = *(const double *)left;
    const double r = *(const double *)right;
    return (l > r) - (l < r);
}

static void note(pl_comm *comm, uint64_t n)
{
    pli_comm_record_activity(comm, n & 1 ? PL_FORWARD : PL_BACKWARD, n);
}

static void operate(pl_comm *comm, uint64_t n)
{
    const pl_op op = {.kind = PL_ALL_REDUCE, .reduction = PL_MEAN, .dtype = PL_F32};
    pl_ticket ticket = 0;
    (void)n;
    if (pl_comm_issue(comm, &op, &ticket) != PL_OK || pl_comm_progress(comm) != PL_OK)
        abort();
}

static pli_recorder *recorder;

static void record(pl_comm *comm, uint64_t n)
{
    (void)comm;
    pli_recorder_activity(recorder, PL_FORWARD, n);
    pli_recorder_activity(recorder, PL_IDLE, n);
    pli_recorder_activity(recorder, PL_BACKWARD, n);
    pli_recorder_plan(recorder, 4, 1 << 20);
    for (unsigned b = 0; b < 4; b++) {
        pli_recorder_ready(recorder, b, 1 << 18);
        pli_recorder_part_begins(recorder, b + 1);
        pli_recorder_part_ends(recorder, b + 1);
    }
    pli_recorder_activity(recorder, PL_FINISHING, n);
    pli_recorder_wait_ends(recorder, pli_recorder_wait_begins(recorder), 1);
    pli_recorder_reduced(recorder);
    pli_recorder_activity(recorder, PL_IDLE, n);
}

static double ns_an_event(pl_comm *comm, void (*event)(pl_comm *comm, uint64_t n))
{
    double rounds[N_ROUNDS];
    for (int round = 0; round < N_ROUNDS; round++) {
        const int64_t begin = pli_now_ns();
        for (uint64_t n = 0; n < N_EVENTS; n++)
            event(comm, n);
        rounds[round] = (double)(pli_now_ns() - begin) / N_EVENTS;
    }
    qsort(rounds, N_ROUNDS, sizeof rounds[0], compare);
    return rounds[N_ROUNDS / 2];
}

int main(void)
{
    pl_comm *comm = NULL;
    if (local_create(1, 4096, INT64_C(1000000000), &comm) != PL_OK)
        return 1;
    (void)printf("median of %d rounds of %d events\n", N_ROUNDS, N_EVENTS);
    (void)printf("step       %5.1f ns an event\n", ns_an_event(comm, note));
    (void)printf("operation  %5.1f ns an event\n", ns_an_event(comm, operate));
    char path[64];
    (void)snprintf(path, sizeof path, "/dev/shm/paceline-bench-%d", (int)getpid());
    if (pli_recorder_create(path, "{}", &recorder) == PL_OK)
        (void)printf("recorded   %5.1f ns a step\n", ns_an_event(comm, record));
    pli_recorder_destroy(recorder);
    pl_comm_destroy(comm);
    return 0;
}
