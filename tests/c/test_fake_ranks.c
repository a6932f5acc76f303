/* test_fake_ranks.c - the fake of NCCL: aborts, the first collective; a forked child.
 */
#include <sys/wait.h>
#include <unistd.h>

#include "core/clock.h"
#include "fake_ranks.h"

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
