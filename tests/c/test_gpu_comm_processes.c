/* test_gpu_comm_processes.c - GPU worlds of processes: they work, or one is killed or
 * stopped; and worlds over a process group (group_comm.h). */
#include "gpu_ranks.h"
#include "processes.h"

#include "comm/group_comm.h"

#define SOON_NS ((IS_SANITIZED ? 12000 : 5000) * PLI_MS)

/* A child's part of a GPU world; `all` is its own. */
typedef struct worker {
    gpu_ranks all;
    gpu_rank rank;
} worker;

static board *gpu_board(int world_size, uint64_t seed)
{
    board *it = board_create(world_size, seed);
    it->arena_bytes = GPUS_HOST_BYTES + PLI_GPU_BOARD_BYTES;
    return it;
}

static pl_status worker_open(worker *it, child *self)
{
    pl_status st = PL_OK;
    const board *shared = self->board;
    it->all = gpu_ranks_of(shared->world_size, shared->seed,
                           (fake_schedule)(shared->seed % 3));
    it->all.deadline_ns = shared->deadline_ns;
    it->rank = (gpu_rank){.all = &it->all, .rank = self->rank};
    fake_reset(&it->all.fake);
    PL_TRY(pli_nccl_library_open(fake_path(), &it->all.library));
    PL_TRY(pli_watchdog_create(&it->all.watchdog));
    PL_TRY(child_join(self));
    it->all.bases[self->rank] = self->comm;
    PL_TRY(gpu_open(&it->rank));
    PL_TRY(gpu_join(&it->rank));
    self->comm = it->rank.comm;
done:
    return st;
}

static void worker_close(worker *it, child *self)
{
    pl_comm_destroy(self->comm);
    self->comm = NULL;
    gpu_close(&it->rank);
    gpu_ranks_end(&it->all);
}

static pl_status await_failure(pl_comm *comm)
{
    const int64_t begin = pli_now_ns();
    pl_status st = PL_OK;
    while (st == PL_OK && CHECK(pli_now_ns() - begin < RANKS_DEADLINE_NS)) {
        st = pl_comm_progress(comm);
        pli_sleep_ns(PLI_MS);
    }
    return st;
}

static pl_status worker_step(worker *it, unsigned step)
{
    pl_status st = PL_OK;
    pli_comm_record_activity(it->rank.comm, PL_BACKWARD, step);
    if (!gpu_fill(&it->rank, &mean, step))
        return PL_ESYS;
    PL_TRY(gpu_step(&it->rank));
    if (gpu_n_wrong(&it->rank, &mean, step) != 0)
        st = await_failure(it->rank.comm); /* a rank that died did not do its part */
done:
    return st;
}

/* ---- worlds that work ----------------------------------------------------------- */

static void do_five_steps(child *self)
{
    worker it;
    pl_status st = worker_open(&it, self);
    for (unsigned step = 1; step <= 5 && st == PL_OK; step++) {
        draw_rest(&self->random, PLI_MS);
        st = worker_step(&it, step);
    }
    CHECK_OK(st);
    child_report(self, st);
    worker_close(&it, self);
}

TEST(worlds_of_processes_have_the_means)
{
    for (uint64_t seed = 1; seed <= 9; seed++)
        processes_run(gpu_board(1 + (int)(seed % 3), seed), do_five_steps);
}

/* ---- one rank is killed --------------------------------------------------------- */

static void step_until_it_fails(child *self)
{
    worker it;
    pl_status st = worker_open(&it, self);
    for (unsigned step = 1; st == PL_OK; step++) {
        draw_rest(&self->random, PLI_MS);
        st = worker_step(&it, step);
        atomic_fetch_add(&self->board->note, step == 1); /* NCCL has connected it */
    }
    child_report(self, st);
    await_flag(&self->board->is_stopped);
    fake_forget_errors(); /* it may have waited for an operation that never came */
    worker_close(&it, self);
}

TEST(a_rank_that_is_killed_is_named_by_all)
{
    for (uint64_t seed = 1; seed <= 9; seed++) {
        draw random = draw_of(seed);
        const int world_size = 2 + (int)(seed % 2);
        const int culprit = (int)draw_below(&random, (size_t)world_size);
        board *all = gpu_board(world_size, seed);
        processes_start(all, step_until_it_fails);
        processes_await_world(all);
        pli_sleep_ns((int64_t)draw_below(&random, 60000000));
        processes_blame(all, culprit, PL_EPEER, processes_lose(all, culprit, SIGKILL),
                        SOON_NS);
        board_destroy(all);
    }
}

/* Rank 0's host is in user code; its device waits for rank 1, which is killed. */
static void wait_on_the_device(child *self)
{
    worker it;
    pl_ticket ticket = 0;
    int is_done = 0;
    pl_status st = worker_open(&it, self);
    if (st == PL_OK)
        st = worker_step(&it, 1);
    CHECK_OK(st);
    if (self->rank == 1) {
        atomic_store(&self->board->note, 1);
        for (;;)
            pli_sleep_ns(PLI_MS);
    }
    CHECK_OK(gpu_issue_op(&it.rank, &mean, &ticket));
    CHECK_OK(pli_comm_order(self->comm, it.rank.stream));
    CHECK_OK(it.rank.backend->ops->event_record(it.rank.backend, it.rank.ready,
                                                it.rank.stream));
    while (!is_done) {
        CHECK_OK(it.rank.backend->ops->event_is_done(it.rank.backend, it.rank.ready,
                                                     &is_done));
        pli_sleep_ns(PLI_MS);
    }
    child_report(self, pl_comm_progress(self->comm));
    worker_close(&it, self);
}

/* The same in a graph's replay, which no host follows. */
static void replay(child *self)
{
    worker it;
    pli_cuda_scope scope;
    pl_status st = worker_open(&it, self);
    CUstream stream = gpu_user_stream(&it.rank);
    if (st == PL_OK)
        st = worker_step(&it, 1);
    CHECK_OK(st);
    CHECK_OK(pli_cuda_enter(it.rank.backend, &scope));
    CUgraphExec exec = gpu_capture_step(&it.rank);
    if (self->rank == 1) {
        atomic_store(&self->board->note, 1);
        for (;;)
            pli_sleep_ns(PLI_MS);
    }
    CHECK(cuGraphLaunch(exec, stream) == 0);
    while (cuStreamQuery(stream) != 0)
        pli_sleep_ns(PLI_MS);
    child_report(self, pl_comm_progress(self->comm));
    CHECK(cuGraphExecDestroy(exec) == 0);
    pli_cuda_leave(it.rank.backend, &scope);
    for (int i = 0; i < 5000 && fake_live(FAKE_COMMS) > 0; i++)
        pli_sleep_ns(PLI_MS);
    worker_close(&it, self);
}

TEST(who_waits_on_the_device_or_in_a_replay_is_let_go_where_a_rank_is_killed)
{
    static const child_fn ways[] = {wait_on_the_device, replay};
    for (int way = 0; way < 2; way++) {
        board *all = gpu_board(2, 4);
        processes_start(all, ways[way]);
        await_flag(&all->note);
        pli_sleep_ns(50 * PLI_MS);
        processes_blame(all, 1, PL_EPEER, processes_lose(all, 1, SIGKILL),
                        RANKS_DEADLINE_NS);
        CHECK(strstr(all->reports[0].words, "died") != NULL);
        board_destroy(all);
    }
}

TEST(a_rank_that_stands_still_is_noticed_at_the_deadline)
{
    board *all = gpu_board(2, 2);
    all->deadline_ns = 2000 * PLI_MS;
    processes_start(all, step_until_it_fails);
    while (atomic_load(&all->note) < 2)
        pli_sleep_ns(PLI_MS);
    (void)processes_lose(all, 1, SIGSTOP);
    /* Or the operation, if the host waited on the device and not for the rank. */
    const char *words = all->reports[0].words;
    if (!CHECK(all->reports[0].status == PL_ETIMEOUT &&
               (blames(words, 0, 1) || strstr(words, "on the device") != NULL)))
        CHECK_MORE("%s", all->reports[0].words);
    board_destroy(all);
}

/* ---- worlds over a process group ------------------------------------------------ */

/* A group that carries data through the arena of a world of threads. */
typedef struct carrier {
    pl_comm *through;
    char *arena; /* the group_comm's */
    pl_op op;
    pl_ticket ticket;
    int n_dropped;
} carrier;

static size_t bytes_of(const pl_op *op)
{
    return op->n_elems * pl_dtype_bytes(op->dtype);
}

static pl_status carry(void *context, const pl_op *op, pl_ticket ticket)
{
    carrier *it = context;
    char *theirs = it->through->arena;
    (void)ticket;
    it->op = *op;
    if (op->kind != PL_BARRIER)
        memcpy(theirs + op->offset_bytes, it->arena + op->offset_bytes, bytes_of(op));
    const pl_status st = pl_comm_issue(it->through, op, &it->ticket);
    return st == PL_OK ? wait_through(it->through, it->ticket) : st;
}

static pl_status carried(void *context, pl_ticket ticket)
{
    carrier *it = context;
    const char *theirs = it->through->arena;
    (void)ticket;
    if (it->op.kind != PL_BARRIER)
        memcpy(it->arena + it->op.offset_bytes, theirs + it->op.offset_bytes,
               bytes_of(&it->op));
    return PL_OK;
}

static void drop(void *context)
{
    ((carrier *)context)->n_dropped++;
}

typedef struct over_group {
    carrier carriers[GPUS_MOST];
    pl_comm *lone[GPUS_MOST];
} over_group;

static pl_status make_group_comm(gpu_ranks *all, over_group *it, int rank)
{
    pl_status st = PL_OK;
    PL_TRY(local_create(1, GPUS_HOST_BYTES + PLI_GPU_BOARD_BYTES, RANKS_DEADLINE_NS,
                        &it->lone[rank]));
    it->carriers[rank] =
        (carrier){.through = all->bases[rank], .arena = it->lone[rank]->arena};
    PL_TRY(pli_group_comm_create(
        &(pli_group_comm_options){.rank = rank,
                                  .world_size = all->world_size,
                                  .base = it->lone[rank],
                                  .callbacks = {.context = &it->carriers[rank],
                                                .issue = carry,
                                                .wait = carried,
                                                .drop = drop}},
        &all->bases[rank]));
done:
    return st;
}

static void step_and_fail(gpu_rank *self)
{
    pl_ticket ticket = 0;
    for (unsigned step = 1; step <= 4; step++) {
        (void)gpu_fill(self, &mean, step);
        CHECK_OK(gpu_step(self));
        gpu_check(self, &mean, step);
    }
    pl_comm_abort(self->comm, "no more of this");
    CHECK_FAILS(gpu_issue_op(self, &mean, &ticket), PL_EPEER, "no more of this");
    CHECK_FAILS(pl_comm_progress(self->comm), PL_EPEER, "no more of this");
}

static void run_over_group(int world_size, uint64_t seed, void (*run)(gpu_rank *self),
                           int n_expected)
{
    over_group it = {0};
    pl_comm *through[GPUS_MOST];
    gpu_rank ranks[GPUS_MOST];
    gpu_ranks all = gpu_ranks_of(world_size, seed, (fake_schedule)(seed % 3));
    if (!gpu_ranks_start(&all))
        return;
    for (int r = 0; r < world_size; r++) {
        through[r] = all.bases[r];
        CHECK_OK(make_group_comm(&all, &it, r));
    }
    if (n_expected > 0)
        fake_fail("cuMemAlloc", 1, 2);
    CHECK(gpu_ranks_run(&all, run, ranks) == n_expected);
    for (int r = 0; r < world_size; r++) {
        pl_comm_destroy(through[r]);
        CHECK(ranks[r].made == PL_OK || strstr(ranks[r].words, "out of memory"));
        CHECK(n_expected > 0 || it.carriers[r].n_dropped == 1);
    }
    gpu_ranks_end(&all);
}

TEST(a_group_comm_serves_as_the_base_of_a_gpu_world)
{
    for (uint64_t seed = 1; seed <= 6; seed++)
        run_over_group(2 + (int)(seed % 2), seed, step_and_fail, 0);
}

/* The host is ahead of the device: a finished step may still wait for its means. */
static void fail_before_the_means(gpu_rank *self)
{
    (void)gpu_fill(self, &mean, 1);
    CHECK_OK(gpu_step(self));
    pl_comm_abort(self->comm, "no more of this");
    gpu_check(self, &mean, 1);
}

TEST(means_of_a_step_that_is_over_outlive_a_failure_over_a_group)
{
    for (uint64_t seed = 1; seed <= 6; seed++)
        run_over_group(2 + (int)(seed % 2), seed, fail_before_the_means, 0);
}

TEST(ranks_over_a_group_are_told_who_could_not_begin)
{
    run_over_group(3, 1, step_and_fail, 3);
}
