/* test_fake_nccl_threads.c - what the fake of NCCL does beside the caller's thread, and
 * how long it blocks that: proxies, threads that launch, queues, communicators that
 * block.
 */
#include <stdlib.h>

#include "fake_ranks.h"

/* ---- proxies -------------------------------------------------------------------- */

/* Rank 0 ends by `end` when its own device is done; returns the result of rank 1's. */
static CUresult end_first(ncclResult_t (*end)(ncclComm_t comm))
{
    rank ranks[2];
    fake_options options = ranks_options(1, FAKE_LATE);
    options.net = 1;
    options.patience_ms = 500;
    ranks_make(ranks, 2, &options);
    EACH_RANK (it, ranks, 2)
        CHECK(rank_average(it, 1) == ncclSuccess);
    rank_enter(&ranks[0]);
    CHECK(cuStreamSynchronize(ranks[0].side) == CUDA_SUCCESS);
    CHECK(end(ranks[0].comm) == ncclSuccess);
    rank_leave();
    rank_enter(&ranks[1]);
    const CUresult result = cuStreamSynchronize(ranks[1].side);
    if (result == CUDA_SUCCESS)
        CHECK(rank_wrong_means(&ranks[1], ranks[1].side) == 0);
    else
        gpu_expect_error("never comes");
    rank_leave();
    CHECK(ncclCommAbort(ranks[1].comm) == ncclSuccess);
    for (int r = 0; r < 2; r++)
        rank_free(&ranks[r]);
    ranks_check_clean();
    return result;
}

TEST(what_a_proxy_has_not_sent_is_lost_with_an_abort)
{
    CHECK(end_first(ncclCommAbort) != CUDA_SUCCESS);
    CHECK(end_first(ncclCommDestroy) == CUDA_SUCCESS);
}

/* ---- communicators that do not block -------------------------------------------- */

/* Makes a communicator of one rank with `config`; returns the call's result. */
static ncclResult_t make_alone(const ncclConfig_t *config, int version)
{
    ncclUniqueId id;
    ncclConfig_t copy = *config;
    ncclComm_t comm = NULL;
    ncclResult_t state = ncclInProgress;
    fake_options options = ranks_options(1, FAKE_EARLY);
    options.nccl = version;
    fake_reset(&options);
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    const ncclResult_t made = ncclCommInitRankConfig(&comm, 1, id, 0, &copy);
    if (made == ncclSuccess || made == ncclInProgress) {
        while (state == ncclInProgress)
            CHECK(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
        CHECK(ncclCommDestroy(comm) == ncclSuccess);
    }
    return made;
}

TEST(a_config_counts_as_far_as_its_version_goes)
{
    ncclConfig_t config = {.size = sizeof config,
                           .magic = NCCL_API_MAGIC,
                           .version = 21400,
                           .blocking = 0,
                           .cgaClusterSize = 77}; /* that version has no such field */
    CHECK(make_alone(&config, 22809) == ncclInProgress);
    config.version = 21700;
    CHECK(make_alone(&config, 22809) == ncclInvalidArgument);
    config.size = 24; /* with the padding, where later versions have that field */
    CHECK(make_alone(&config, 22809) == ncclInvalidArgument);
    config.version = 21400;
    CHECK(make_alone(&config, 22809) == ncclInProgress);
    config.blocking = NCCL_CONFIG_UNDEF_INT;
    CHECK(make_alone(&config, 22809) == ncclSuccess);
}

TEST(the_environment_overrules_a_config)
{
    ncclConfig_t config = {
        .size = 24, .magic = NCCL_API_MAGIC, .version = 21400, .blocking = 0};
    (void)setenv("NCCL_COMM_BLOCKING", "1", 1);
    CHECK(make_alone(&config, 22809) == ncclSuccess);
    config.blocking = 1;
    (void)setenv("NCCL_COMM_BLOCKING", "0", 1);
    CHECK(make_alone(&config, 22809) == ncclInProgress);
    (void)unsetenv("NCCL_COMM_BLOCKING");
}

/* One operation is in a graph; another is launched directly while another stream is
 * captured in the global mode.  Returns the result of ending that capture. */
static CUresult launch_beside_a_capture(int blocking)
{
    rank it;
    ncclUniqueId id;
    CUgraph graphs[2] = {NULL, NULL};
    ncclResult_t state = ncclInProgress;
    ncclConfig_t config = {
        .size = 24, .magic = NCCL_API_MAGIC, .version = 21400, .blocking = blocking};
    const fake_options options = ranks_options(1, FAKE_EARLY);
    fake_reset(&options);
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    it = rank_make(0, 1, &id);
    rank_enter(&it);
    (void)ncclCommInitRankConfig(&it.comm, 1, id, 0, &config);
    while (state == ncclInProgress)
        CHECK(ncclCommGetAsyncError(it.comm, &state) == ncclSuccess);
    CHECK(cuStreamBeginCapture(it.side, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == 0);
    (void)rank_reduce(&it, 1, ncclFloat32, ncclSum);
    CHECK(cuStreamEndCapture(it.side, &graphs[0]) == 0);
    CUgraphExec exec = NULL;
    CHECK(cuGraphInstantiate(&exec, graphs[0], 0) == 0);
    CHECK(cuStreamBeginCapture(it.compute, CU_STREAM_CAPTURE_MODE_GLOBAL) == 0);
    (void)rank_reduce(&it, 1, ncclFloat32, ncclSum);
    const CUresult result = cuStreamEndCapture(it.compute, &graphs[1]);
    CHECK((fake_launch_threads() > 0) == !blocking);
    CHECK(cuGraphExecDestroy(exec) == 0);
    for (int k = 0; k < 2; k++)
        CHECK(graphs[k] == NULL || cuGraphDestroy(graphs[k]) == 0);
    CHECK(fake_synchronize_all());
    CHECK(ncclCommAbort(it.comm) == ncclSuccess);
    rank_leave();
    rank_free(&it);
    ranks_check_clean();
    return result;
}

TEST(a_thread_of_nccls_has_a_capture_mode_of_its_own)
{
    CHECK(launch_beside_a_capture(1) == CUDA_SUCCESS);
    CHECK(launch_beside_a_capture(0) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

/* ---- queues --------------------------------------------------------------------- */

TEST(a_queue_that_is_full_keeps_the_caller)
{
    rank ranks[2];
    fake_options options = ranks_options(1, FAKE_EARLY);
    options.queue_depth = 3;
    options.patience_ms = 50;
    ranks_make(ranks, 2, &options);
    rank_enter(&ranks[0]);
    for (int k = 0; k < 3; k++)
        CHECK(rank_average(&ranks[0], 1) == ncclSuccess);
    CHECK(rank_average(&ranks[0], 1) != ncclSuccess);
    gpu_expect_error("no room in the device's queue");
    rank_leave();
    ranks_abort(ranks, 2);
}
