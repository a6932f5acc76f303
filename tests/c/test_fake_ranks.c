/* test_fake_ranks.c - the fake of NCCL over processes; ranks that die, stall, abort. */
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/clock.h"
#include "fake_ranks.h"
#include "leaks.h"

enum { N_RANKS = 3, N_STEPS = 5, ALARM_S = 60 };

/* Shared by the processes of a test. */
typedef struct hall {
    ncclUniqueId id;
    atomic_int has_id;
    atomic_int n_reduced;
    atomic_int is_over;
} hall;

static hall *all;

typedef struct plan {
    fake_options options;
    int is_blocking;
    int n_steps;
    int stops; /* this rank issues no step; -1: none */
} plan;

static void await(const atomic_int *flag, int value)
{
    while (atomic_load(flag) < value)
        pli_sleep_ns(100000);
}

/* ---- a rank that is a process --------------------------------------------------- */

static ncclResult_t poll_until_ready(ncclComm_t comm)
{
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
        CHECK(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
        pli_sleep_ns(1000);
    }
    return state;
}

static void init(rank *it, int is_blocking)
{
    rank_enter(it);
    if (is_blocking) {
        CHECK(ncclCommInitRank(&it->comm, it->n_ranks, it->id, it->rank) ==
              ncclSuccess);
    } else {
        ncclConfig_t config = {.size = sizeof config,
                               .magic = NCCL_API_MAGIC,
                               .version = 21800,
                               .blocking = 0,
                               .cgaClusterSize = NCCL_CONFIG_UNDEF_INT,
                               .minCTAs = NCCL_CONFIG_UNDEF_INT,
                               .maxCTAs = NCCL_CONFIG_UNDEF_INT,
                               .splitShare = NCCL_CONFIG_UNDEF_INT};
        CHECK(ncclCommInitRankConfig(&it->comm, it->n_ranks, it->id, it->rank,
                                     &config) == ncclInProgress);
        CHECK(poll_until_ready(it->comm) == ncclSuccess);
    }
    rank_leave();
}

static void run_steps(rank *it, const plan *what)
{
    rank_enter(it);
    for (int i = 0; i < what->n_steps; i++) {
        const ncclResult_t result = rank_average(it, 1);
        CHECK(result == ncclSuccess ||
              (result == ncclInProgress && !what->is_blocking));
        if (!what->is_blocking) /* ncclSuccess may come too early */
            CHECK(poll_until_ready(it->comm) == ncclSuccess);
        CHECK(rank_wrong_means(it, it->side) == 0);
    }
    rank_leave();
    (void)atomic_fetch_add(&all->n_reduced, 1);
}

/* The others enqueue one more step, which waits; they abort at the end. */
static void wait_and_abort(rank *it)
{
    rank_enter(it);
    CHECK(rank_average(it, 1) == ncclSuccess);
    CHECK(cuEventRecord(it->ready, it->side) == CUDA_SUCCESS);
    while (atomic_load(&all->is_over) == 0) {
        CHECK(cuEventQuery(it->ready) == CUDA_ERROR_NOT_READY);
        pli_sleep_ns(1000000);
    }
    CHECK(ncclCommAbort(it->comm) == ncclSuccess);
    CHECK(cuEventSynchronize(it->ready) == CUDA_SUCCESS);
    CHECK(rank_wrong_means(it, it->side) > 0);
    rank_leave();
}

static void child_main(int me, const plan *what)
{
    (void)alarm(ALARM_S);
    const int n_descriptors = n_open_descriptors();
    fake_reset(&what->options);
    CHECK(cuInit(0) == CUDA_SUCCESS);
    if (me == 0) {
        CHECK(ncclGetUniqueId(&all->id) == ncclSuccess);
        atomic_store(&all->has_id, 1);
    }
    await(&all->has_id, 1);
    rank it = rank_make(me, N_RANKS, &all->id);
    init(&it, what->is_blocking);
    run_steps(&it, what);
    if (what->stops == me)
        for (;;)
            (void)pause();
    if (what->stops >= 0) {
        wait_and_abort(&it);
    } else {
        CHECK(fake_synchronize_all());
        CHECK(ncclCommDestroy(it.comm) == ncclSuccess);
    }
    rank_free(&it);
    ranks_check_clean();
    CHECK(n_open_descriptors() == n_descriptors);
    fake_reset(NULL);
    exit(atomic_load(&check_n_failures) == 0 ? 0 : 1);
}

/* ---- the parent ----------------------------------------------------------------- */

static void run(const plan *what)
{
    pid_t pids[N_RANKS];
    (void)fflush(NULL);
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
               -1, 0);
    for (int r = 0; r < N_RANKS; r++) {
        pids[r] = fork();
        if (pids[r] == 0)
            child_main(r, what);
    }
    if (what->stops >= 0) {
        await(&all->n_reduced, N_RANKS);
        pli_sleep_ns(20 * PLI_MS);
        (void)kill(pids[what->stops], SIGKILL);
        pli_sleep_ns(20 * PLI_MS);
        atomic_store(&all->is_over, 1);
    }
    for (int r = 0; r < N_RANKS; r++) {
        int how = 0;
        (void)waitpid(pids[r], &how, 0);
        if (r != what->stops && !CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0))
            CHECK_MORE("rank %d, seed %d: %#x", r, (int)what->options.seed, how);
    }
    (void)munmap(all, sizeof *all);
}

TEST(ranks_as_processes_have_the_mean)
{
    for (uint64_t seed = 0; seed < 6; seed++) {
        plan what = {ranks_options(seed, (fake_schedule)(seed % 3)), 1, N_STEPS, -1};
        run(&what);
        what.is_blocking = 0;
        run(&what);
        what.options.lazy_connect = 1;
        run(&what);
        what.options.pump = 1;
        run(&what);
    }
}

TEST(a_killed_rank_leaves_the_others_waiting_until_they_abort)
{
    for (uint64_t seed = 0; seed < 3; seed++) {
        const plan what = {ranks_options(seed, (fake_schedule)seed), 1, 1, 1};
        run(&what);
    }
}

/* ---- in one process ------------------------------------------------------------- */

static void *abort_later(void *memory)
{
    const rank *it = memory;
    pli_sleep_ns(5 * PLI_MS);
    CHECK(ncclCommAbort(it->comm) == ncclSuccess);
    return NULL;
}

/* The host waits in one thread while another aborts. */
TEST(an_abort_ends_what_runs_and_what_is_queued)
{
    rank ranks[2];
    pthread_t thread;
    const fake_options options = ranks_options(1, FAKE_LATE);
    ranks_make(ranks, 2, &options);
    rank_enter(&ranks[0]);
    CHECK(rank_average(&ranks[0], 1) == ncclSuccess);
    CHECK(rank_average(&ranks[0], 1) == ncclSuccess);
    (void)pthread_create(&thread, NULL, abort_later, &ranks[0]);
    CHECK(cuStreamSynchronize(ranks[0].side) == CUDA_SUCCESS);
    (void)pthread_join(thread, NULL);
    CHECK(fake_pending() == 0);
    rank_leave();
    CHECK(rank_reduce(&ranks[0], 1, ncclFloat32, ncclSum) == ncclInvalidArgument);
    gpu_expect_error("was used after its end");
    CHECK(ncclCommAbort(ranks[1].comm) == ncclSuccess);
    for (int r = 0; r < 2; r++)
        rank_free(&ranks[r]);
    ranks_check_clean();
}

/* A call that returns ncclInProgress is not in the stream yet: work enqueued before it
 * is ready runs first. */
static int slow_and_hasty(uint64_t seed, int has_patience)
{
    ncclUniqueId id;
    float out[RANK_N];
    fake_options options = ranks_options(seed, FAKE_EARLY);
    options.polls = 5;
    fake_reset(&options);
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    rank it = rank_make(0, 1, &id);
    init(&it, 0);
    rank_enter(&it);
    rank_fill(&it, PL_F32, RANK_N, it.side);
    float *to = rank_memory(&it);
    const ncclResult_t result =
        ncclBroadcast(to, to + RANK_N, RANK_N, ncclFloat32, 0, it.comm, it.side);
    if (has_patience)
        CHECK(poll_until_ready(it.comm) == ncclSuccess);
    CHECK(cuMemcpyDtoDAsync(it.memory, it.memory + sizeof out, sizeof out, it.side) ==
          CUDA_SUCCESS);
    rank_read(&it, out, sizeof out, it.side);
    CHECK(result == ncclSuccess || result == ncclInProgress);
    CHECK(poll_until_ready(it.comm) == ncclSuccess);
    CHECK(ncclCommDestroy(it.comm) == ncclSuccess);
    rank_leave();
    rank_free(&it);
    ranks_check_clean();
    return out[0] != 1.0f;
}

TEST(a_call_in_progress_is_not_in_the_stream)
{
    int n_wrong = 0;
    for (uint64_t seed = 0; seed < 50; seed++) {
        CHECK(slow_and_hasty(seed, 1) == 0);
        n_wrong += slow_and_hasty(seed, 0);
    }
    CHECK(n_wrong > 10 && n_wrong < 50);
}

/* A step of a communicator is captured and replayed on every rank. */
RANKS_TEST(2, 1, FAKE_RANDOM, a_captured_collective_is_replayed)
{
    CUgraph graphs[2];
    CUgraphExec execs[2];
    EACH_RANK (it, ranks, 2) {
        CHECK(cuStreamBeginCapture(it->side, 0) == CUDA_SUCCESS);
        CHECK(rank_reduce(it, RANK_N, ncclFloat32, ncclAvg) == ncclSuccess);
        CHECK(cuStreamEndCapture(it->side, &graphs[it->rank]) == CUDA_SUCCESS);
        CHECK(cuGraphInstantiate(&execs[it->rank], graphs[it->rank], 0) ==
              CUDA_SUCCESS);
    }
    for (int i = 0; i < 3; i++) {
        EACH_RANK (it, ranks, 2) {
            rank_fill(it, PL_F32, RANK_N, it->side);
            CHECK(cuGraphLaunch(execs[it->rank], it->side) == CUDA_SUCCESS);
        }
        EACH_RANK (it, ranks, 2)
            CHECK(rank_wrong_means(it, it->side) == 0);
    }
    for (int r = 0; r < 2; r++) {
        CHECK(cuGraphExecDestroy(execs[r]) == CUDA_SUCCESS);
        CHECK(cuGraphDestroy(graphs[r]) == CUDA_SUCCESS);
    }
}

/* If the first call makes connections, it blocks the host until all ranks are in it:
 * one thread for two ranks needs a group. */
TEST(a_first_collective_blocks_the_host_for_its_peers)
{
    rank ranks[2];
    fake_options options = ranks_options(1, FAKE_EARLY);
    options.lazy_connect = 1;
    ranks_make(ranks, 2, &options);
    CHECK(rank_average(&ranks[0], 1) == ncclInternalError);
    gpu_expect_error("waits in its first collective of a kind");
    CHECK(ncclGroupStart() == ncclSuccess);
    for (int r = 0; r < 2; r++)
        CHECK(rank_average(&ranks[r], 1) == ncclSuccess);
    CHECK(ncclGroupEnd() == ncclSuccess);
    for (int r = 0; r < 2; r++)
        CHECK(rank_average(&ranks[r], 1) == ncclSuccess);
    ranks_end(ranks, 2);
}

/* The driver does not work in a child forked after cuInit(). */
TEST(a_forked_child_has_no_driver)
{
    int how = 0;
    CUcontext context = NULL;
    const fake_options options = ranks_options(1, FAKE_EARLY);
    fake_reset(&options);
    CHECK(cuInit(0) == CUDA_SUCCESS);
    (void)fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        _exit(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_ERROR_NOT_INITIALIZED ? 0
                                                                                  : 1);
    (void)waitpid(pid, &how, 0);
    CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0);
}
