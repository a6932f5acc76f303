/* test_progress.c - several worlds of one process: a wait in one works for all.
 *
 * Each rank has its own pli_progress, as each process has; its worlds join it.
 */
#include "comm/progress.h"
#include "comm/shm_comm.h"
#include "core/alloc.h"
#include "ops.h"
#include "ranks.h"

enum { MAX_WORLDS = 6, MAX_WORLD_SIZE = 4 };

typedef struct worlds {
    int n_worlds;
    int world_size;
    pli_progress *progress[MAX_WORLD_SIZE];
    pl_comm *comms[MAX_WORLDS][MAX_WORLD_SIZE];
} worlds;

static const pl_op barrier = {.kind = PL_BARRIER};

/* As local_create(), but its ranks join a progress. */
static int create_world(worlds *all, int w)
{
    pli_shm_segment *shared = NULL;
    if (!CHECK_OK(pli_calloc(1, sizeof *shared, "a test's world", &shared)))
        return 0;
    if (!CHECK_OK(
            pli_segment_create(PLI_SEGMENT_FILE, all->world_size, 65536, 64, shared)))
        return 0;
    atomic_store(&shared->n_users, all->world_size);
    for (int r = 0; r < all->world_size; r++) {
        pli_shm_comm *comm = NULL;
        const pli_shm_comm_options options = {.segment = shared,
                                              .progress = all->progress[r],
                                              .rank = r,
                                              .deadline_ns = RANKS_DEADLINE_NS};
        if (!CHECK_OK(pli_shm_comm_create(&options, &comm)))
            return 0;
        all->comms[w][r] = &comm->super;
    }
    return 1;
}

static int create_worlds(worlds *all, int n_worlds, int world_size)
{
    *all = (worlds){.n_worlds = n_worlds, .world_size = world_size};
    for (int r = 0; r < world_size; r++)
        if (!CHECK_OK(pli_progress_create(&all->progress[r])))
            return 0;
    for (int w = 0; w < n_worlds; w++)
        if (!create_world(all, w))
            return 0;
    return 1;
}

static void destroy_worlds(worlds *all)
{
    for (int w = 0; w < all->n_worlds; w++)
        for (int r = 0; r < all->world_size; r++)
            pl_comm_destroy(all->comms[w][r]);
    for (int r = 0; r < all->world_size; r++)
        pli_progress_destroy(all->progress[r]);
}

/* ---- opposite orders ------------------------------------------------------------ */

static void wait_in_own_order(rank_job *job)
{
    worlds *all = job->context;
    const pl_op op = {.reduction = PL_MEAN,
                      .dtype = PL_F32,
                      .offset_bytes = OPS_GUARD_BYTES,
                      .n_elems = 500};
    for (unsigned round = 0; round < 20; round++) {
        pl_ticket tickets[MAX_WORLDS] = {0};
        for (int w = 0; w < all->n_worlds; w++) {
            ops_fill(all->comms[w][job->rank], &op, round + (unsigned)w);
            CHECK_OK(pl_comm_issue(all->comms[w][job->rank], &op, &tickets[w]));
        }
        for (int k = 0; k < all->n_worlds; k++) {
            const int w = (k * (job->rank % 2 == 0 ? 1 : all->n_worlds - 1) +
                           job->rank + (int)round) %
                          all->n_worlds;
            CHECK_OK(wait_through(all->comms[w][job->rank], tickets[w]));
            ops_check(all->comms[w][job->rank], &op, round + (unsigned)w);
        }
    }
}

TEST(worlds_waited_for_in_opposite_orders_all_go_on)
{
    for (int world_size = 2; world_size <= 4; world_size++) {
        worlds all;
        if (!create_worlds(&all, world_size + 1, world_size))
            return;
        ranks_run(world_size, all.comms[0], wait_in_own_order, &all, 3);
        destroy_worlds(&all);
    }
}

TEST(who_waits_in_one_world_does_its_part_in_the_other)
{
    worlds all;
    pl_ticket tickets[2] = {0};
    if (!create_worlds(&all, 2, 2))
        return;
    for (int r = 0; r < 2; r++)
        for (int w = 0; w < 2; w++)
            CHECK_OK(pl_comm_issue(all.comms[w][r], &barrier, &tickets[w]));
    /* Rank 0 waits only in world 0, and does its part in world 1 meanwhile. */
    CHECK(pl_comm_wait(all.comms[0][0], tickets[0], 30 * PLI_MS) == PL_EAGAIN);
    CHECK_OK(pl_comm_wait(all.comms[1][1], tickets[1], 30 * PLI_MS));
    destroy_worlds(&all);
}

TEST(the_failure_of_one_world_is_not_the_others)
{
    worlds all;
    pl_ticket ticket = 0;
    if (!create_worlds(&all, 2, 2))
        return;
    pl_comm_abort(all.comms[0][1], "only here");
    CHECK_OK(pl_comm_issue(all.comms[1][0], &barrier, &ticket));
    CHECK_OK(pl_comm_issue(all.comms[1][1], &barrier, &ticket));
    CHECK(pl_comm_wait(all.comms[1][0], ticket, 30 * PLI_MS) == PL_EAGAIN);
    CHECK_OK(pl_comm_wait(all.comms[1][1], ticket, 30 * PLI_MS));
    CHECK_OK(pl_comm_wait(all.comms[1][0], ticket, 30 * PLI_MS));
    CHECK(pl_comm_issue(all.comms[0][0], &barrier, &ticket) == PL_EPEER);
    destroy_worlds(&all);
}

/* ---- joining and leaving -------------------------------------------------------- */

TEST(worlds_join_and_leave_in_any_order)
{
    worlds all;
    if (!create_worlds(&all, MAX_WORLDS, 1))
        return;
    draw random = draw_of(1);
    for (int round = 0; round < 30; round++) {
        const int w = (int)draw_below(&random, MAX_WORLDS);
        pl_ticket ticket = 0;
        pl_comm_destroy(all.comms[w][0]);
        all.comms[w][0] = NULL;
        pli_progress_others(all.progress[0], NULL);
        if (!create_world(&all, w))
            return;
        CHECK_OK(pl_comm_issue(all.comms[w][0], &barrier, &ticket));
        pli_progress_others(all.progress[0], NULL);
        CHECK_OK(pl_comm_wait(all.comms[w][0], ticket, 0));
    }
    destroy_worlds(&all);
}

TEST(no_progress_at_all_is_allowed)
{
    CHECK_OK(pli_progress_join(NULL, NULL));
    pli_progress_leave(NULL, NULL);
    pli_progress_others(NULL, NULL);
    pli_progress_destroy(NULL);
}

/* ---- two threads of one rank ---------------------------------------------------- */

enum { N_WAITS = 300 };

static atomic_int is_over;

/* One thread per rank works in world 0, which then fails ... */
static void work_and_fail(rank_job *job)
{
    worlds *all = job->context;
    pl_comm *comm = all->comms[0][job->rank];
    for (int round = 0; round < N_WAITS; round++)
        CHECK_OK(do_op(comm, &barrier));
    if (job->rank == 0)
        pl_comm_abort(comm, "the dog ate it");
    else
        CHECK(do_op(comm, &barrier) == PL_EPEER);
    check_stays_failed(comm, PL_EPEER, "the dog ate it");
    atomic_fetch_add(&is_over, 1);
}

/* ... another makes and destroys world 1 ... */
static void come_and_go(rank_job *job)
{
    worlds *all = job->context;
    worlds mine = {
        .n_worlds = 1, .world_size = 1, .progress = {all->progress[job->rank]}};
    while (atomic_load(&is_over) < all->world_size) {
        if (!create_world(&mine, 0))
            return;
        pli_sleep_ns(20000);
        pl_comm_destroy(mine.comms[0][0]);
    }
}

/* ... and one works for all worlds of its process meanwhile. */
static void work_for_all(rank_job *job)
{
    worlds *all = job->context;
    while (atomic_load(&is_over) < all->world_size) {
        pli_progress_others(all->progress[job->rank], NULL);
        pli_sleep_ns(10000);
    }
}

static void run_by_number(rank_job *job)
{
    static void (*const runs[])(rank_job *) = {work_and_fail, come_and_go,
                                               work_for_all};
    const int number = job->rank / 2;
    job->rank %= 2;
    runs[number](job);
}

TEST(threads_of_a_rank_work_wait_and_fail_beside_each_other)
{
    worlds all;
    pl_comm *nobody[6] = {NULL};
    if (!create_worlds(&all, 1, 2))
        return;
    atomic_store(&is_over, 0);
    ranks_run(6, nobody, run_by_number, &all, 4);
    destroy_worlds(&all);
}
