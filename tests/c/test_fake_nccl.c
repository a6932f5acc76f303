/* test_fake_nccl.c - the fake of NCCL: its results, and the mistakes that it
 * detects. */
#include "fake_ranks.h"

enum { N_SEEDS = 60 };

/* ---- ranks as threads ----------------------------------------------------------- */

typedef struct job {
    rank *rank;
    int has_wait;
    int n_wrong;
} job;

static void *thread_main(void *memory)
{
    job *self = memory;
    rank *it = self->rank;
    *it = rank_make(it->rank, it->n_ranks, &it->id);
    rank_enter(it);
    CHECK(ncclCommInitRank(&it->comm, it->n_ranks, it->id, it->rank) == ncclSuccess);
    for (int i = 0; i < 3; i++) {
        CHECK(rank_average(it, self->has_wait) == ncclSuccess);
        self->n_wrong += rank_wrong_means(it, it->side);
    }
    CHECK(ncclCommDestroy(it->comm) == ncclSuccess);
    rank_leave();
    rank_free(it);
    return NULL;
}

static int threads_wrong(uint64_t seed, fake_schedule schedule, int has_wait)
{
    enum { N_RANKS = 3 };
    int n_wrong = 0;
    rank ranks[N_RANKS];
    job jobs[N_RANKS];
    pthread_t threads[N_RANKS];
    ncclUniqueId id;
    const fake_options options = ranks_options(seed, schedule);
    fake_reset(&options);
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    for (int r = 0; r < N_RANKS; r++) {
        ranks[r] = (rank){.rank = r, .n_ranks = N_RANKS, .id = id};
        jobs[r] = (job){&ranks[r], has_wait, 0};
        (void)pthread_create(&threads[r], NULL, thread_main, &jobs[r]);
    }
    for (int r = 0; r < N_RANKS; r++) {
        (void)pthread_join(threads[r], NULL);
        n_wrong += jobs[r].n_wrong;
    }
    CHECK(fake_synchronize_all());
    ranks_check_clean();
    return n_wrong;
}

TEST(a_collective_that_does_not_wait_is_wrong)
{
    int n_wrong = 0;
    for (uint64_t seed = 0; seed < N_SEEDS; seed++)
        n_wrong += threads_wrong(seed, FAKE_RANDOM, 0) != 0;
    CHECK(n_wrong > 0);
    CHECK(threads_wrong(1, FAKE_LATE, 0) > 0);
}

/* ---- mistakes of a program ------------------------------------------------------ */

RANKS_TEST(2, 1, FAKE_EARLY, ranks_that_differ_are_seen)
{
    float out[RANK_N];
    EACH_RANK (it, ranks, 2)
        CHECK(rank_reduce(it, 10 + (size_t)it->rank, ncclFloat32, ncclSum) ==
              ncclSuccess);
    gpu_expect_error("collective 0 differs");
    rank_enter(&ranks[0]);
    rank_read(&ranks[0], out, sizeof out, ranks[0].side);
    CHECK(out[0] < -300.0f); /* garbage */
    rank_leave();
}

TEST(a_peer_that_never_comes_is_a_deadlock)
{
    rank ranks[2];
    const fake_options options = ranks_options(1, FAKE_LATE);
    ranks_make(ranks, 2, &options);
    rank_enter(&ranks[0]);
    CHECK(rank_average(&ranks[0], 1) == ncclSuccess);
    CHECK(cuStreamSynchronize(ranks[0].side) == CUDA_ERROR_LAUNCH_TIMEOUT);
    gpu_expect_error("which never comes");
    rank_leave();
    ranks_abort(ranks, 2);
}

/* A second communicator over the same two ranks. */
static void make_second(rank *ranks, ncclComm_t second[2])
{
    ncclUniqueId id;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    EACH_RANK_IN_GROUP (it, ranks, 2)
        CHECK(ncclCommInitRank(&second[it->rank], 2, id, it->rank) == ncclSuccess);
}

static void reduce_one(const rank *it, ncclComm_t comm, CUstream stream)
{
    CHECK(ncclAllReduce(rank_memory(it), rank_memory(it), 1, ncclFloat32, ncclSum, comm,
                        stream) == ncclSuccess);
}

/* Two communicators in different orders: on one stream per rank, or on a stream each on
 * the first rank. */
static CUresult cross(int is_on_two_streams, int n_slots, int is_one_queue)
{
    rank ranks[2];
    ncclComm_t second[2];
    fake_options options = ranks_options(1, FAKE_EARLY);
    options.patience_ms = 60000; /* a deadlock is found at once */
    options.slots = n_slots;
    options.one_queue = is_one_queue;
    ranks_make(ranks, 2, &options);
    make_second(ranks, second);
    reduce_one(&ranks[0], ranks[0].comm, ranks[0].side);
    reduce_one(&ranks[0], second[0],
               is_on_two_streams ? ranks[0].compute : ranks[0].side);
    reduce_one(&ranks[1], second[1], ranks[1].side);
    reduce_one(&ranks[1], ranks[1].comm, ranks[1].side);
    const CUresult result = cuStreamSynchronize(ranks[0].side);
    if (result != CUDA_SUCCESS)
        gpu_expect_error("a deadlock");
    for (int r = 0; r < 2; r++)
        CHECK(ncclCommAbort(second[r]) == ncclSuccess);
    ranks_abort(ranks, 2);
    return result;
}

TEST(crossed_communicators_are_a_deadlock)
{
    CHECK(cross(0, 4, 0) == CUDA_ERROR_LAUNCH_TIMEOUT);
}

TEST(slots_that_are_taken_are_a_deadlock)
{
    CHECK(cross(1, 2, 0) == CUDA_SUCCESS);
    CHECK(cross(1, 1, 0) == CUDA_ERROR_LAUNCH_TIMEOUT);
    CHECK(cross(1, 2, 1) == CUDA_ERROR_LAUNCH_TIMEOUT);
}

TEST(a_resident_collective_has_its_slot)
{
    rank ranks[2];
    fake_options options = ranks_options(1, FAKE_EARLY);
    options.slots = 1;
    ranks_make(ranks, 2, &options);
    EACH_RANK (it, ranks, 2) {
        CHECK(rank_average(it, 1) == ncclSuccess);
        CHECK((fake_pending() > 0) == (it->rank == 0));
    }
    ranks_end(ranks, 2);
}

RANKS_TEST(2, 1, FAKE_EARLY, memory_of_a_collective_is_looked_at)
{
    const size_t n_bytes = (size_t)RANK_BYTES * MAX_RANKS;
    EACH_RANK (it, ranks, 2)
        CHECK(ncclBroadcast(rank_memory(it), rank_memory(it),
                            n_bytes + (size_t)it->rank, ncclInt8, 0, it->comm,
                            it->side) == ncclSuccess);
    gpu_expect_error("differs");
    EACH_RANK (it, ranks, 2)
        CHECK(ncclBroadcast(rank_memory(it), rank_memory(it), n_bytes + 1, ncclInt8, 0,
                            it->comm, it->side) == ncclSuccess);
    gpu_expect_error("are not within the allocation");
}

RANKS_TEST(2, 1, FAKE_EARLY, registered_memory_is_registered_everywhere)
{
    void *handle = NULL;
    void *memory[2];
    EACH_RANK (it, ranks, 2)
        CHECK(ncclMemAlloc(&memory[it->rank], 64) == ncclSuccess);
    CHECK(ncclCommRegister(ranks[0].comm, memory[0], 64, &handle) == ncclSuccess);
    for (int r = 0; r < 2; r++)
        CHECK(ncclAllReduce(memory[r], memory[r], 1, ncclFloat32, ncclSum,
                            ranks[r].comm, ranks[r].side) == ncclSuccess);
    gpu_expect_error("registered on some ranks alone");
    CHECK(ncclMemFree(memory[0]) == ncclSuccess);
    gpu_expect_error("the memory is still registered");
    CHECK(ncclMemFree(memory[1]) == ncclSuccess);
    CHECK(ncclCommDeregister(ranks[0].comm, handle) == ncclSuccess);
}

TEST(two_ranks_do_not_share_a_device)
{
    ncclUniqueId id;
    ncclComm_t comms[2] = {NULL, NULL};
    CUcontext context = NULL;
    const fake_options options = ranks_options(1, FAKE_EARLY);
    fake_reset(&options);
    CHECK(cuInit(0) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRetain(&context, 1) == CUDA_SUCCESS);
    CHECK(cuCtxPushCurrent(context) == CUDA_SUCCESS);
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    CHECK(ncclGroupStart() == ncclSuccess);
    for (int r = 0; r < 2; r++)
        CHECK(ncclCommInitRank(&comms[r], 2, id, r) == ncclSuccess);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    CHECK(strstr(ncclGetLastError(NULL), "Duplicate GPU detected") != NULL);
    for (int r = 0; r < 2; r++)
        CHECK(ncclCommAbort(comms[r]) == ncclSuccess);
    CHECK(cuCtxPopCurrent(NULL) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRelease(1) == CUDA_SUCCESS);
    ranks_check_clean();
}
