/* test_shm_failure.c - worlds of processes of which one is killed, stopped, or exits
 * without notice: every other rank names it, and soon.
 *
 * Seeds decide which and when; the operating system still affects the order of events,
 * so a failure here need not repeat at once.
 */
#include "processes.h"

#define SOON_NS (1000 * TIMES_AS_LONG * PLI_MS)

/* Joins after a while, and reduces until that fails or the parent ends it. */
static void reduce_until_it_fails(child *self)
{
    pl_status st = PL_OK;
    draw_rest(&self->random, 3 * PLI_MS);
    st = child_join(self);
    for (unsigned n = 0; st == PL_OK; n++) {
        draw_rest(&self->random, 100000);
        st = child_reduce(self, n);
    }
    child_report(self, st);
    if (self->comm == NULL)
        CHECK(n_open_descriptors() == self->n_descriptors);
    /* No process ends at the moment it fails; this one stays until all have reported,
     * or they would blame it. */
    await_flag(&self->board->is_stopped);
}

/* ---- killed --------------------------------------------------------------------- */

static void kill_one(uint64_t seed, int is_joined)
{
    draw random = draw_of(seed);
    const int world_size = 2 + (int)draw_below(&random, 3);
    const int culprit = (int)draw_below(&random, (size_t)world_size);
    board *all = board_create(world_size, seed);
    processes_start(all, reduce_until_it_fails);
    if (is_joined)
        processes_await_world(all);
    pli_sleep_ns((int64_t)draw_below(&random, 4000000));
    processes_blame(all, culprit, PL_EPEER, processes_lose(all, culprit, SIGKILL),
                    SOON_NS);
    board_destroy(all);
}

TEST(a_rank_killed_while_it_works_is_named_by_all_at_once)
{
    for (uint64_t seed = 1; seed <= 40; seed++)
        kill_one(seed, 1);
}

TEST(a_rank_killed_while_the_world_is_made_is_named_by_all_at_once)
{
    for (uint64_t seed = 1001; seed <= 1080; seed++)
        kill_one(seed, 0);
}

/* Rank 0 raises; then rank 1 is killed. */
static void look_for_the_dead(child *self)
{
    pl_status st = child_join(self);
    if (self->rank == 0 && st == PL_OK)
        pl_comm_abort(self->comm, "the dog ate it");
    while (st == PL_OK && pl_comm_progress(self->comm) == PL_OK)
        pli_sleep_ns(PLI_MS);
    while (st == PL_OK) {
        st = pli_comm_query(self->comm, PLI_QUERY_GONE);
        pli_sleep_ns(PLI_MS);
    }
    child_report(self, st);
    CHECK_FAILS(pli_comm_query(self->comm, PLI_QUERY_WORLD), PL_EPEER, "died");
    check_stays_failed(self->comm, PL_EPEER, "the dog ate it");
    await_flag(&self->board->is_stopped);
}

TEST(a_rank_killed_after_the_world_has_failed_is_known_to_be_gone)
{
    board *all = board_create(3, 1);
    processes_start(all, look_for_the_dead);
    processes_await_world(all);
    pli_sleep_ns(20 * PLI_MS);
    processes_blame(all, 1, PL_EPEER, processes_lose(all, 1, SIGKILL), SOON_NS);
    board_destroy(all);
}

/* Its child holds all its descriptors, as a data loader's worker does. */
static void have_a_child_that_stays(child *self)
{
    if (!CHECK_OK(child_join(self)))
        return;
    if (self->rank == 1) {
        const pid_t pid = fork();
        if (pid == 0) {
            (void)alarm(PROCESSES_ALARM_S);
            await_flag(&self->board->is_stopped);
            _exit(0);
        }
        atomic_store(&self->board->note, 1);
    }
    pl_status st = PL_OK;
    for (unsigned n = 0; st == PL_OK; n++)
        st = child_reduce(self, n);
    child_report(self, st);
}

TEST(a_killed_rank_is_noticed_though_its_children_live)
{
    board *all = board_create(2, 1);
    processes_start(all, have_a_child_that_stays);
    await_flag(&all->note);
    pli_sleep_ns(5 * PLI_MS);
    processes_blame(all, 1, PL_EPEER, processes_lose(all, 1, SIGKILL), SOON_NS);
    CHECK(strstr(all->reports[0].words, "died") != NULL);
    board_destroy(all);
}

/* ---- exited --------------------------------------------------------------------- */

static void go_without_a_word(child *self)
{
    pl_status st = child_join(self);
    for (unsigned n = 0; st == PL_OK; n++) {
        if (self->rank == 1 && n == 10)
            _exit(0);
        st = child_reduce(self, n);
    }
    CHECK_SAYS("died");
    child_report(self, st);
}

static void say_goodbye(child *self)
{
    pl_status st = child_join(self);
    for (unsigned n = 0; st == PL_OK; n++) {
        if (self->rank == 1 && n == 10) {
            child_leave(self);
            if (atomic_load(&self->board->note))
                pli_sleep_ns(50 * PLI_MS); /* it has left, but its process lives */
            return;
        }
        st = child_reduce(self, n);
    }
    CHECK_SAYS("has left", "every rank needs the same number of steps");
    child_report(self, st);
}

TEST(a_rank_that_goes_is_named_to_those_who_wait_for_it)
{
    static const child_fn ways[] = {go_without_a_word, say_goodbye, say_goodbye};
    for (int way = 0; way < 3; way++) {
        board *all = board_create(3, (uint64_t)way);
        const int64_t begin = pli_now_ns();
        atomic_store(&all->note, way == 2);
        processes_start(all, ways[way]);
        processes_end(all, 1);
        processes_blame(all, 1, PL_EPEER, begin, 2 * SOON_NS);
        board_destroy(all);
    }
}

/* ---- stopped -------------------------------------------------------------------- */

TEST(a_rank_that_is_stopped_is_named_after_the_deadline_and_not_before)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        const int culprit = (int)seed % 3;
        board *all = board_create(3, seed);
        all->deadline_ns = 1000 * PLI_MS;
        processes_start(all, reduce_until_it_fails);
        processes_await_world(all);
        pli_sleep_ns(5 * PLI_MS);
        const int64_t begin = processes_lose(all, culprit, SIGSTOP);
        processes_blame(all, culprit, PL_ETIMEOUT, begin, 1000 * PLI_MS + SOON_NS);
        for (int r = 0; r < 3; r++)
            CHECK(r == culprit || all->reports[r].at_ns - begin >= 950 * PLI_MS);
        board_destroy(all);
    }
}

TEST(a_rank_that_is_stopped_for_less_than_the_deadline_is_waited_for)
{
    board *all = board_create(2, 1);
    all->deadline_ns = 2000 * PLI_MS;
    processes_start(all, reduce_until_it_fails);
    processes_await_world(all);
    for (int round = 0; round < 3; round++) {
        pli_sleep_ns(5 * PLI_MS);
        (void)kill(all->pids[1], SIGSTOP);
        pli_sleep_ns(60 * PLI_MS);
        const int n_ops = atomic_load(&all->reports[0].n_ops);
        pli_sleep_ns(40 * PLI_MS);
        CHECK(atomic_load(&all->reports[0].n_ops) == n_ops);
        (void)kill(all->pids[1], SIGCONT);
        while (atomic_load(&all->reports[0].n_ops) < n_ops + 20)
            pli_sleep_ns(PLI_MS);
    }
    processes_blame(all, 1, PL_EPEER, processes_lose(all, 1, SIGKILL), SOON_NS);
    board_destroy(all);
}
