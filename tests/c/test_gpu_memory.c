/* test_gpu_memory.c - a world's memory comes from torch's allocator, which may reuse it
 * only behind all work that touches it: whoever releases it, and whenever.
 */
#include "gpu_ranks.h"
#include "nccl/gpu_comm_state.h"

/* Has torch use memory again at once; the fake reports work that still touches it. */
static void check_reuse(gpu_rank *self)
{
    fake_torch_settle();
    CHECK(fake_bytes_in_use(self->rank) == 0);
}

static void *end_world(void *self)
{
    gpu_end_world(self);
    return NULL;
}

/* The user's stream is behind, and its work reads the means. */
GPU_TEST(9, 1 + seed % 3, FAKE_LATE, another_thread_ends_a_world_with_work_in_flight)
{
    pthread_t thread;
    void *out = NULL;
    CHECK_OK(self->backend->ops->alloc(self->backend, 4096, &out));
    if (CHECK_OK(gpu_step(self)) && CHECK_OK(gpu_copy_mean(self, out)) &&
        CHECK(pthread_create(&thread, NULL, end_world, self) == 0))
        (void)pthread_join(thread, NULL);
    fake_torch_settle();
    self->backend->ops->free(self->backend, out);
    check_reuse(self);
}

/* Nobody waits for an operation that is still queued on the side stream. */
GPU_TEST(4, 2, FAKE_LATE, a_world_ends_within_a_step)
{
    pl_ticket ticket = 0;
    CHECK_OK(gpu_issue_op(self, &mean, &ticket));
    gpu_end_world(self);
    check_reuse(self);
}

/* A failed backward has left work on a stream, and no operation after it. */
GPU_TEST(2, 2, FAKE_LATE, what_a_failed_step_left_comes_before_the_reuse)
{
    CUstream stream = NULL;
    pli_cuda_scope scope;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == 0);
    CHECK(cuMemsetD8Async((CUdeviceptr)(uintptr_t)self->comm->device_memory, 0, 64,
                          stream) == 0);
    CHECK_OK(self->comm->device->outlive(self->comm, (pl_stream *)(void *)stream));
    gpu_end_world(self);
    check_reuse(self);
    CHECK(cuStreamDestroy(stream) == 0);
    pli_cuda_leave(self->backend, &scope);
}

/* As the garbage collector may. */
GPU_TEST(6, 2, seed % 2 != 0 ? FAKE_LATE : FAKE_RANDOM,
         a_world_that_ends_in_a_capture_does_not_spoil_it)
{
    CUgraph graph = NULL;
    CUstream stream = gpu_user_stream(self);
    if (!CHECK_OK(gpu_step(self)))
        return;
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == 0);
    gpu_end_world(self);
    CHECK(fake_bytes_in_use(self->rank) > 0);
    CHECK(cuStreamEndCapture(stream, &graph) == 0);
    CHECK(cuGraphDestroy(graph) == 0);
    check_reuse(self);
}

static int one_step(gpu_rank *self, unsigned seed)
{
    return gpu_fill(self, &mean, seed) && CHECK_OK(gpu_step(self));
}

/* The world leaves its memory to views, and ends; then they are dropped. */
GPU_TEST(12, 1 + seed % 3, schedules[seed % 3], views_keep_the_memory_that_a_world_left)
{
    device_memory *views[3] = {NULL};
    const void *at[3] = {NULL};
    for (unsigned k = 0; k < 3; k++) {
        if (!one_step(self, k))
            return;
        views[k] = self->comm->device_owner;
        device_memory_hold(views[k]);
        at[k] = pli_comm_memory(self->comm, mean.offset_bytes);
        if (k < 2 && !CHECK_OK(self->comm->device->renew(self->comm)))
            return;
        CHECK(k == 2 || pli_comm_memory(self->comm, mean.offset_bytes) != at[k]);
    }
    (void)gpu_agree_on_end(self);
    gpu_end_world(self);
    for (unsigned k = 0; k < 3; k++) {
        gpu_check_kept(self, &mean, at[k], k);
        device_memory_drop(views[k]);
    }
    check_reuse(self);
}

GPU_TEST(4, 2, FAKE_LATE, a_replay_writes_the_memory_that_its_world_has_left)
{
    pli_cuda_scope scope;
    if (!one_step(self, 1) || !CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CUgraphExec exec = gpu_capture_step(self);
    CHECK_OK(self->comm->device->renew(self->comm));
    CHECK_OK(self->comm->device->renew(self->comm)); /* not captured: not kept */
    CHECK(one_step(self, 2));
    CHECK(cuGraphLaunch(exec, gpu_user_stream(self)) == 0);
    gpu_check(self, &mean, 2);
    CHECK(cuGraphExecDestroy(exec) == 0);
    gpu_end_world(self);
    check_reuse(self);
    pli_cuda_leave(self->backend, &scope);
}

static pl_status refuse(void *context, void *owner, pl_stream *stream)
{
    (void)context;
    (void)owner;
    (void)stream;
    return pli_fail(PL_ESTATE, "torch does not know the stream");
}

/* Each new stream is recorded once. */
GPU_TEST(1, 1, FAKE_EARLY, a_stream_that_cannot_be_recorded_is_an_error)
{
    pli_gpu_comm *comm = (pli_gpu_comm *)(void *)self->comm;
    CHECK_OK(gpu_step(self));
    comm->allocator.record_stream = refuse;
    CHECK_OK(gpu_step(self));
    CHECK_FAILS(pli_comm_order(self->comm, NULL), PL_ESTATE,
                "does not know the stream");
    CHECK(self->comm->device->renew(self->comm) == PL_ESTATE);
    CHECK_OK(gpu_step(self));
}
