/* test_fake_capture.c - the fake's captures: what they contain, and what invalidates
 * them. */
#include <pthread.h>

#include "fake_gpu.h"

static const int global = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* Captures, makes one forbidden call, and checks that the capture is invalid. */
static void invalidates(CUresult (*forbidden)(gpu *it), CUresult result)
{
    gpu it = gpu_open(1, FAKE_LATE);
    CUgraph graph = NULL;
    int status = 0;
    CHECK(cuStreamBeginCapture(it.a, global) == CUDA_SUCCESS);
    CHECK(gpu_zero(&it, it.a) == CUDA_SUCCESS);
    CHECK(cuEventRecord(it.event, it.a) == CUDA_SUCCESS);
    CHECK(forbidden(&it) == result);
    CHECK(cuStreamIsCapturing(it.a, &status) == CUDA_SUCCESS);
    CHECK(status == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    CHECK(gpu_zero(&it, it.a) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(cuStreamEndCapture(it.a, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(graph == NULL);
    gpu_close(&it);
}

static CUresult allocate(gpu *it)
{
    CUdeviceptr memory = 0;
    (void)it;
    return cuMemAlloc(&memory, 16);
}

static CUresult give_back(gpu *it)
{
    return cuMemFree(it->x);
}

/* Forbidden in every mode. */
static CUresult synchronize_relaxed(gpu *it)
{
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)it;
    CHECK(cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS);
    const CUresult result = cuCtxSynchronize();
    CHECK(cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS);
    return result;
}

static CUresult synchronize_it(gpu *it)
{
    return cuStreamSynchronize(it->a);
}

static CUresult synchronize_another(gpu *it)
{
    return cuStreamSynchronize(it->b);
}

static CUresult query_captured(gpu *it)
{
    return cuEventQuery(it->event);
}

static CUresult wait_for_uncaptured(gpu *it)
{
    CUevent event = NULL;
    CHECK(cuEventCreate(&event, 0) == CUDA_SUCCESS);
    CHECK(cuEventRecord(event, it->b) == CUDA_SUCCESS);
    const CUresult result = cuStreamWaitEvent(it->a, event, 0);
    CHECK(cuEventDestroy(event) == CUDA_SUCCESS);
    return result;
}

static CUresult merge_two(gpu *it)
{
    CUgraph graph = NULL;
    CHECK(cuStreamBeginCapture(it->b, global) == CUDA_SUCCESS);
    const CUresult result = cuStreamWaitEvent(it->b, it->event, 0);
    CHECK(cuStreamEndCapture(it->b, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    return result;
}

TEST(what_a_capture_forbids_invalidates_it)
{
    invalidates(allocate, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    invalidates(give_back, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    invalidates(synchronize_relaxed, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    invalidates(synchronize_it, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    invalidates(synchronize_another, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    invalidates(query_captured, CUDA_ERROR_CAPTURED_EVENT);
    invalidates(wait_for_uncaptured, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    invalidates(merge_two, CUDA_ERROR_STREAM_CAPTURE_MERGE);
}

ONE_GPU_TEST(FAKE_LATE, a_stream_that_is_not_joined_spoils_the_capture)
{
    CUgraph graph = NULL;
    CHECK(cuStreamBeginCapture(it->a, global) == CUDA_SUCCESS);
    CHECK(cuEventRecord(it->event, it->a) == CUDA_SUCCESS);
    CHECK(cuStreamWaitEvent(it->b, it->event, 0) == CUDA_SUCCESS);
    CHECK(gpu_zero(it, it->b) == CUDA_SUCCESS);
    CHECK(cuStreamEndCapture(it->b, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    CHECK(cuStreamEndCapture(it->a, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(cuStreamBeginCapture(it->a, global) == CUDA_SUCCESS);
    CHECK(cuEventRecord(it->event, it->a) == CUDA_SUCCESS);
    CHECK(cuStreamWaitEvent(it->b, it->event, 0) == CUDA_SUCCESS);
    CHECK(gpu_zero(it, it->b) == CUDA_SUCCESS);
    CHECK(cuStreamEndCapture(it->a, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    CHECK(graph == NULL);
    CHECK(cuStreamWaitEvent(it->b, it->event, 0) == CUDA_ERROR_CAPTURED_EVENT);
    CHECK(gpu_zero(it, it->b) == CUDA_SUCCESS); /* both streams are free again */
}

ONE_GPU_TEST(FAKE_LATE, the_legacy_stream_is_forbidden_beside_a_blocking_one)
{
    CUgraph graph = NULL;
    CUstream blocking = NULL;
    int status = 0;
    CHECK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT) == CUDA_SUCCESS);
    CHECK(cuStreamBeginCapture(NULL, global) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cuStreamBeginCapture(it->a, global) == CUDA_SUCCESS);
    CHECK(gpu_zero(it, NULL) == CUDA_SUCCESS);
    CHECK(cuStreamEndCapture(it->a, &graph) == CUDA_SUCCESS);
    CHECK(cuGraphDestroy(graph) == CUDA_SUCCESS);
    CHECK(cuStreamBeginCapture(blocking, global) == CUDA_SUCCESS);
    CHECK(cuStreamIsCapturing(NULL, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CHECK(cuStreamEndCapture(blocking, &graph) == CUDA_SUCCESS); /* queries are fine */
    CHECK(cuGraphDestroy(graph) == CUDA_SUCCESS);
    CHECK(cuStreamBeginCapture(blocking, global) == CUDA_SUCCESS);
    CHECK(gpu_zero(it, NULL) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CHECK(cuStreamIsCapturing(NULL, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CHECK(cuStreamEndCapture(blocking, &graph) ==
          CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(cuStreamDestroy(blocking) == CUDA_SUCCESS);
}

typedef struct other {
    gpu *it;
    int mode;
    CUresult result;
} other;

static void *query_in_a_thread(void *memory)
{
    other *self = memory;
    int mode = self->mode;
    CHECK(cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS);
    CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    self->result = cuStreamQuery(self->it->b);
    return NULL;
}

/* Result of another thread's query, by its mode and the capture's. */
static CUresult query_beside(int capture_mode, int thread_mode)
{
    gpu it = gpu_open(1, FAKE_LATE);
    other self = {&it, thread_mode, CUDA_SUCCESS};
    CUgraph graph = NULL;
    pthread_t thread;
    CHECK(cuStreamBeginCapture(it.a, capture_mode) == CUDA_SUCCESS);
    (void)pthread_create(&thread, NULL, query_in_a_thread, &self);
    (void)pthread_join(thread, NULL);
    CHECK(cuStreamEndCapture(it.a, &graph) ==
          (self.result == CUDA_SUCCESS ? CUDA_SUCCESS
                                       : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    if (graph != NULL)
        CHECK(cuGraphDestroy(graph) == CUDA_SUCCESS);
    gpu_close(&it);
    return self.result;
}

TEST(other_threads_are_bound_by_the_modes)
{
    const CUresult forbidden = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CHECK(query_beside(CU_STREAM_CAPTURE_MODE_GLOBAL, 0) == forbidden);
    CHECK(query_beside(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 0) == CUDA_SUCCESS);
    CHECK(query_beside(CU_STREAM_CAPTURE_MODE_RELAXED, 0) == CUDA_SUCCESS);
    CHECK(query_beside(CU_STREAM_CAPTURE_MODE_GLOBAL,
                       CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == CUDA_SUCCESS);
    CHECK(query_beside(CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED) ==
          CUDA_SUCCESS);
}

static void *end_in_a_thread(void *memory)
{
    other *self = memory;
    CUgraph graph = NULL;
    self->result = cuStreamEndCapture(self->it->a, &graph);
    return NULL;
}

ONE_GPU_TEST(FAKE_LATE, a_capture_ends_where_it_began)
{
    other self = {it, 0, CUDA_SUCCESS};
    CUgraph graph = NULL;
    pthread_t thread;
    CHECK(cuStreamEndCapture(it->a, &graph) == CUDA_ERROR_ILLEGAL_STATE);
    CHECK(cuStreamBeginCapture(it->a, global) == CUDA_SUCCESS);
    CHECK(cuStreamBeginCapture(it->a, global) == CUDA_ERROR_ILLEGAL_STATE);
    (void)pthread_create(&thread, NULL, end_in_a_thread, &self);
    (void)pthread_join(thread, NULL);
    CHECK(self.result == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    CHECK(cuStreamEndCapture(it->a, &graph) == CUDA_SUCCESS);
    CHECK(cuGraphDestroy(graph) == CUDA_SUCCESS);
}

/* A relaxed thread may allocate and free beside the capture. */
ONE_GPU_TEST(FAKE_LATE, a_relaxed_thread_may_allocate)
{
    CUgraph graph = NULL;
    CUdeviceptr memory = 0;
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CHECK(cuStreamBeginCapture(it->a, global) == CUDA_SUCCESS);
    CHECK(cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS);
    CHECK(cuMemAlloc(&memory, 16) == CUDA_SUCCESS);
    CHECK(cuMemFree(memory) == CUDA_SUCCESS);
    CHECK(cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS);
    CHECK(mode == CU_STREAM_CAPTURE_MODE_RELAXED);
    CHECK(cuStreamEndCapture(it->a, &graph) == CUDA_SUCCESS);
    CHECK(cuGraphDestroy(graph) == CUDA_SUCCESS);
}

/* The graph writes to freed memory. */
ONE_GPU_TEST(FAKE_LATE, a_replay_on_freed_memory_is_seen)
{
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    CUdeviceptr memory = 0;
    CHECK(cuMemAlloc(&memory, 16) == CUDA_SUCCESS);
    CHECK(cuStreamBeginCapture(it->a, global) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(memory, 0, 16, it->a) == CUDA_SUCCESS);
    CHECK(cuStreamEndCapture(it->a, &graph) == CUDA_SUCCESS);
    CHECK(cuGraphInstantiate(&exec, graph, 0) == CUDA_SUCCESS);
    CHECK(cuMemFree(memory) == CUDA_SUCCESS);
    CHECK(cuGraphLaunch(exec, it->a) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(it->a) == CUDA_SUCCESS);
    gpu_expect_error("was freed");
    CHECK(cuGraphExecDestroy(exec) == CUDA_SUCCESS);
    CHECK(cuGraphDestroy(graph) == CUDA_SUCCESS);
}
