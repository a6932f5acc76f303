/* test_fake_nccl_threads.c - what the fake of NCCL does beside the caller's thread, and
 * how long it blocks that: proxies and queues.
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
