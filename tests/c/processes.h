/* processes.h - ranks as forked processes, and a board of shared memory between them.
 *
 *     parent:  board_create ... processes_start ... (kills, stops) ... processes_end
 *     child:   child_join ... operations ... child_report
 *
 * The parent stays a single thread, and so does each child.  A child ends by exit(), so
 * that a leak checker can report, or at the latest by its own alarm.
 */
#ifndef PLT_PROCESSES_H
#define PLT_PROCESSES_H

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/shm_init.h"
#include "leaks.h"
#include "ops.h"
#include "ranks.h"
#include "secret.h"

enum { PROCESSES_MAX = 256, PROCESSES_ALARM_S = 40 };

/* A rank's report of its end. */
typedef struct report {
    pl_status status;
    int64_t at_ns;
    atomic_int n_ops; /* operations waited for */
    atomic_int is_joined;
    atomic_int is_made;
    char words[1024];
} report;

typedef struct board {
    int world_size;
    uint64_t seed;
    size_t arena_bytes;
    int64_t deadline_ns;
    int pids[PL_MAX_RANKS];
    char address[PLI_ADDRESS_BYTES];
    atomic_int is_listening; /* rank 0 has written its address */
    atomic_int is_started;   /* set by the parent: construction may begin */
    atomic_int is_stopped;   /* set by the parent: the ranks must end */
    atomic_int note;         /* for the test */
    report reports[PROCESSES_MAX];
} board;

typedef struct child {
    board *board;
    int rank;
    draw random;
    pli_listener *listener; /* rank 0's */
    int n_descriptors;      /* before it joined */
    pl_comm *comm;
} child;

typedef void (*child_fn)(child *self);

static inline board *board_create(int world_size, uint64_t seed)
{
    board *it = mmap(NULL, sizeof *it, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (it == MAP_FAILED)
        exit(2);
    it->world_size = world_size;
    it->seed = seed;
    it->arena_bytes = 65536;
    it->deadline_ns = RANKS_DEADLINE_NS;
    return it;
}

static inline void board_destroy(board *it)
{
    (void)munmap(it, sizeof *it);
}

static inline void await_flag(const atomic_int *flag)
{
    int64_t sleep_ns = 100000;
    while (atomic_load(flag) == 0) {
        pli_sleep_ns(sleep_ns);
        sleep_ns += sleep_ns < 10 * PLI_MS ? sleep_ns / 8 : 0; /* ranks may be many */
    }
}

/* ---- in a child ----------------------------------------------------------------- */

static inline void child_report(child *self, pl_status st)
{
    report *mine = &self->board->reports[self->rank];
    mine->at_ns = pli_now_ns();
    mine->status = st;
    (void)snprintf(mine->words, sizeof mine->words, "%.1000s",
                   st == PL_OK ? "" : pl_error_message());
    atomic_store(&mine->is_made, 1);
}

static inline pl_status child_join(child *self)
{
    const board *all = self->board;
    const pli_shm_options options = {.rank = self->rank,
                                     .world_size = all->world_size,
                                     .arena_bytes = all->arena_bytes,
                                     .n_ops = 64,
                                     .deadline_ns = all->deadline_ns,
                                     .pids = all->pids,
                                     .prove = secret_prove};
    const pl_status st =
        pli_shm_create(&options, self->listener, all->address, &self->comm);
    pli_listener_destroy(self->listener);
    self->listener = NULL;
    if (st == PL_OK)
        atomic_store(&self->board->reports[self->rank].is_joined, 1);
    return st;
}

/* The child's n-th all-reduce, which is exact. */
static inline pl_status child_reduce(child *self, unsigned n)
{
    const pl_op op = {.reduction = PL_MEAN,
                      .dtype = n % 2 == 0 ? PL_F32 : PL_BF16,
                      .offset_bytes = OPS_GUARD_BYTES,
                      .n_elems = 1000 + n % 3};
    const pl_status st = ops_run(self->comm, &op, n);
    if (st == PL_OK)
        atomic_fetch_add(&self->board->reports[self->rank].n_ops, 1);
    return st;
}

/* Destroys the world, and checks that nothing of it is left. */
static inline void child_leave(child *self)
{
    pl_comm_destroy(self->comm);
    self->comm = NULL;
    CHECK(n_open_descriptors() == self->n_descriptors);
    CHECK(n_shared_mappings() == 0);
}

static inline void child_main(board *all, int rank, child_fn run)
{
    child self = {.board = all,
                  .rank = rank,
                  .random = draw_of(all->seed * PL_MAX_RANKS + (uint64_t)rank)};
    (void)alarm(PROCESSES_ALARM_S);
    atomic_store(&check_n_failures, 0);
    self.n_descriptors = n_open_descriptors();
    if (rank == 0) {
        if (!CHECK_OK(pli_listener_create(all->address, &self.listener)))
            exit(3);
        atomic_store(&all->is_listening, 1);
    }
    await_flag(&all->is_started);
    run(&self);
    if (self.comm != NULL)
        child_leave(&self);
    exit(atomic_load(&check_n_failures) == 0 ? 0 : 1);
}

/* ---- in the parent -------------------------------------------------------------- */

/* Forks one process per rank; the ranks construct their world after this returns. */
static inline void processes_start(board *all, child_fn run)
{
    (void)fflush(NULL);
    for (int r = 0; r < all->world_size; r++) {
        const pid_t pid = fork();
        if (pid < 0)
            exit(2);
        if (pid == 0)
            child_main(all, r, run);
        all->pids[r] = pid;
    }
    await_flag(&all->is_listening);
    atomic_store(&all->is_started, 1);
}

/* Waits for all; every rank but `killed` must have ended well. */
static inline void processes_end(board *all, int killed)
{
    for (int r = 0; r < all->world_size; r++) {
        int how = 0;
        (void)waitpid(all->pids[r], &how, 0);
        if (r != killed && !CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0))
            CHECK_MORE("rank %d of %d ended with %#x, seed %d", r, all->world_size, how,
                       (int)all->seed);
    }
}

/* A world whose ranks all end well. */
static inline void processes_run(board *all, child_fn run)
{
    processes_start(all, run);
    processes_end(all, -1);
    board_destroy(all);
}

/* Waits until all ranks have joined. */
static inline void processes_await_world(const board *all)
{
    for (int r = 0; r < all->world_size; r++)
        await_flag(&all->reports[r].is_joined);
}

/* Kills or stops `culprit`, awaits the others' reports, and ends all; returns when. */
static inline int64_t processes_lose(board *all, int culprit, int signal)
{
    const int64_t begin = pli_now_ns();
    (void)kill(all->pids[culprit], signal);
    for (int r = 0; r < all->world_size; r++)
        if (r != culprit)
            await_flag(&all->reports[r].is_made);
    atomic_store(&all->is_stopped, 1);
    (void)kill(all->pids[culprit], SIGKILL);
    processes_end(all, culprit);
    return begin;
}

/* Checks the reports of all ranks but `culprit`: the status, and the culprit's name. */
static inline void processes_blame(const board *all, int culprit, pl_status expected,
                                   int64_t since_ns, int64_t most_ns)
{
    for (int r = 0; r < all->world_size; r++) {
        const report *it = &all->reports[r];
        if (r == culprit)
            continue;
        if (!CHECK(it->status == expected && blames(it->words, r, culprit) &&
                   it->at_ns - since_ns < most_ns))
            CHECK_MORE("seed %d, rank %d of %d, culprit %d: %s after %d ms: %s",
                       (int)all->seed, r, all->world_size, culprit,
                       pl_status_text(it->status),
                       (int)((it->at_ns - since_ns) / PLI_MS), it->words);
    }
}

#endif
