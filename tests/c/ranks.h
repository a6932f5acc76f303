/* ranks.h - ranks as threads: starts them, waits as a binding would, and ends them. */
#ifndef PLT_RANKS_H
#define PLT_RANKS_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "comm/comm.h"
#include "draw.h"
#include "local.h"

#define RANKS_SLICE_NS (50 * PLI_MS)
#define RANKS_DEADLINE_NS (30000 * PLI_MS) /* no test should reach it */

/* How many times as long a test may take as without a sanitizer. */
#if defined(__SANITIZE_THREAD__)
enum { IS_SANITIZED = 1, TIMES_AS_LONG = 8 };
#elif defined(__SANITIZE_ADDRESS__)
enum { IS_SANITIZED = 1, TIMES_AS_LONG = 2 };
#else
enum { IS_SANITIZED = 0, TIMES_AS_LONG = 1 };
#endif

typedef struct rank_job {
    int rank;
    int world_size;
    pl_comm *comm;
    void *context;
    draw random; /* this rank's own */
    void (*run)(struct rank_job *job);
} rank_job;

static inline void *ranks_thread(void *memory)
{
    rank_job *job = memory;
    job->run(job);
    return NULL;
}

/* Calls `run` in one thread per rank, and waits for all. */
static inline void ranks_run(int world_size, pl_comm *const *comms,
                             void (*run)(rank_job *job), void *context, uint64_t seed)
{
    rank_job jobs[PL_MAX_RANKS];
    pthread_t threads[PL_MAX_RANKS];
    for (int r = 0; r < world_size; r++) {
        jobs[r] = (rank_job){.rank = r,
                             .world_size = world_size,
                             .comm = comms[r],
                             .context = context,
                             .random = draw_of(seed * PL_MAX_RANKS + (uint64_t)r),
                             .run = run};
        if (pthread_create(&threads[r], NULL, ranks_thread, &jobs[r]) != 0)
            exit(2);
    }
    for (int r = 0; r < world_size; r++)
        (void)pthread_join(threads[r], NULL);
}

/* Makes a world, runs it, and destroys it. */
static inline void ranks_run_world(int world_size, size_t arena_bytes,
                                   void (*run)(rank_job *job), void *context,
                                   uint64_t seed)
{
    pl_comm *comms[PL_MAX_RANKS] = {NULL};
    if (!CHECK_OK(local_create(world_size, arena_bytes, RANKS_DEADLINE_NS, comms)))
        return;
    ranks_run(world_size, comms, run, context, seed);
    for (int r = 0; r < world_size; r++)
        pl_comm_destroy(comms[r]);
}

/* Runs a test in one thread, which drives all ranks of a world. */
static inline void ranks_play(int world_size, int64_t deadline_ns,
                              void (*run)(pl_comm **comms))
{
    pl_comm *comms[PL_MAX_RANKS] = {NULL};
    if (CHECK_OK(local_create(world_size, 4096, deadline_ns, comms)))
        run(comms);
    for (int r = 0; r < world_size; r++)
        pl_comm_destroy(comms[r]); /* NULL: the test has destroyed it */
}

#define PLAYED_TEST(world_size, deadline_ns, name)                                     \
    TEST_BY(name, pl_comm **comms, ranks_play(world_size, deadline_ns, name##_by))

/* `comm` is a pl_comm, or the context of a call that waits for one. */
static inline pl_status wait_through(void *comm, pl_ticket ticket)
{
    pl_status st = PL_EAGAIN;
    while (st == PL_EAGAIN)
        st = pl_comm_wait(comm, ticket, RANKS_SLICE_NS);
    return st;
}

/* Issues an operation, and waits for it. */
static inline pl_status do_op(pl_comm *comm, const pl_op *op)
{
    pl_ticket ticket = 0;
    const pl_status st = pl_comm_issue(comm, op, &ticket);
    return st == PL_OK ? wait_through(comm, ticket) : st;
}

/* Whether the message of this thread's last failure contains `words`. */
static inline int error_has(const char *words)
{
    return strstr(pl_error_message(), words) != NULL;
}

/* The first failure stands: every call returns it. */
static inline void check_stays_failed(pl_comm *comm, pl_status st, const char *words)
{
    const pl_op op = {.kind = PL_BARRIER};
    pl_ticket ticket = 77;
    for (int n = 0; n < 2; n++) {
        CHECK_FAILS(pl_comm_issue(comm, &op, &ticket), st, words);
        CHECK(ticket == 77); /* written on success only */
        CHECK_FAILS(pl_comm_progress(comm), st, words);
        CHECK_FAILS(pli_comm_check_peers(comm), st, words);
        CHECK_FAILS(pli_comm_query(comm, PLI_QUERY_STEP), st, words);
        pl_comm_abort(comm, "of a later failure");
    }
}

/* Whether rank `me`'s message blames rank `rank` ("rank 0: rank 1 died"); "rank 1" is
 * not "rank 12". */
static inline int blames(const char *message, int me, int rank)
{
    char name[32];
    (void)snprintf(name, sizeof name, "rank %d: ", me);
    if (strncmp(message, name, strlen(name)) == 0)
        message += strlen(name);
    (void)snprintf(name, sizeof name, "rank %d", rank);
    for (const char *at = strstr(message, name); at != NULL; at = strstr(at + 1, name))
        if (at[strlen(name)] < '0' || at[strlen(name)] > '9')
            return 1;
    return 0;
}

#endif
