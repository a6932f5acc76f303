/* fake_gpu.h - one device of the fake, with a kernel, for the fake's own tests. */
#ifndef PLT_FAKE_GPU_H
#define PLT_FAKE_GPU_H

#include <string.h>

#include "check.h"
#include "fake/fake.h"

enum { GPU_N = 256, GPU_BYTES = GPU_N * 4, GPU_N_SEEDS = 200 };

typedef struct gpu {
    CUcontext context;
    CUmodule module;
    CUfunction add_one;
    CUstream a, b; /* neither blocks with the legacy default stream */
    CUevent event;
    CUdeviceptr x; /* GPU_N floats */
} gpu;

/* x[i] += 1, for n elements */
static inline void kernel_add_one(void *const *args, const unsigned grid[3],
                                  const unsigned block[3])
{
    float *at = *(float *const *)args[0];
    const int n = *(const int *)args[1];
    (void)grid;
    (void)block;
    for (int i = 0; i < n; i++)
        at[i] += 1.0f;
}

static inline void gpu_start(const fake_options *options)
{
    static const size_t arg_bytes[] = {sizeof(float *), sizeof(int)};
    fake_reset(options);
    fake_register_kernel("add_one", 2, arg_bytes, kernel_add_one);
    CHECK(cuInit(0) == CUDA_SUCCESS);
}

static inline gpu gpu_open_with(const fake_options *options)
{
    gpu it = {0};
    gpu_start(options);
    CHECK(cuDevicePrimaryCtxRetain(&it.context, 0) == CUDA_SUCCESS);
    CHECK(cuCtxPushCurrent(it.context) == CUDA_SUCCESS);
    CHECK(cuModuleLoadData(&it.module, "image") == CUDA_SUCCESS);
    CHECK(cuModuleGetFunction(&it.add_one, it.module, "add_one") == CUDA_SUCCESS);
    CHECK(cuStreamCreate(&it.a, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    CHECK(cuStreamCreate(&it.b, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    CHECK(cuEventCreate(&it.event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    CHECK(cuMemAlloc(&it.x, GPU_BYTES) == CUDA_SUCCESS);
    return it;
}

static inline gpu gpu_open(uint64_t seed, fake_schedule schedule)
{
    fake_options options = fake_defaults();
    options.seed = seed;
    options.schedule = schedule;
    options.protect = 1;
    options.alloc_waits = 0;
    options.quiet = 1;
    return gpu_open_with(&options);
}

/* Checks that there was no error, and that nothing is left. */
static inline void gpu_close(gpu *it)
{
    CUcontext context = NULL;
    CHECK(cuMemFree(it->x) == CUDA_SUCCESS);
    CHECK(cuEventDestroy(it->event) == CUDA_SUCCESS);
    CHECK(cuStreamDestroy(it->a) == CUDA_SUCCESS);
    CHECK(cuStreamDestroy(it->b) == CUDA_SUCCESS);
    CHECK(fake_synchronize_all());
    CHECK(cuModuleUnload(it->module) == CUDA_SUCCESS);
    CHECK(cuCtxPopCurrent(&context) == CUDA_SUCCESS);
    CHECK(context == it->context);
    CHECK(cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
    if (!CHECK(fake_errors() == 0))
        CHECK_MORE("%s", fake_error(0));
    CHECK(fake_live_objects() == 0);
    CHECK(fake_context_depth() == 0);
}

#define ONE_GPU_TEST(schedule, name)                                                   \
    TEST_BY(name, gpu *it, {                                                           \
        gpu its = gpu_open(1, schedule);                                               \
        name##_by(&its);                                                               \
        gpu_close(&its);                                                               \
    })

/* Checks for an error that the test has caused; `words` are part of its text. */
static inline void gpu_expect_error(const char *words)
{
    const char *error = fake_error(0);
    if (!CHECK(error != NULL && strstr(error, words) != NULL))
        CHECK_MORE("%s, not %s", error != NULL ? error : "none", words);
    fake_forget_errors();
}

static inline CUresult gpu_add_one(const gpu *it, CUdeviceptr memory, CUstream stream)
{
    int n = GPU_N;
    void *args[] = {&memory, &n};
    const CUresult result =
        cuLaunchKernel(it->add_one, 1, 1, 1, GPU_N, 1, 1, 0, stream, args, NULL);
    memory = 0; /* the launch has copied its arguments */
    n = -1;
    return result;
}

static inline CUresult gpu_zero(const gpu *it, CUstream stream)
{
    return cuMemsetD8Async(it->x, 0, GPU_BYTES, stream);
}

/* The last element, read after all work on the stream. */
static inline float gpu_read(const gpu *it, CUstream stream)
{
    float out[GPU_N] = {0};
    CHECK(cuMemcpyDtoHAsync(out, it->x, sizeof out, stream) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(stream) == CUDA_SUCCESS);
    return out[GPU_N - 1];
}

#endif
