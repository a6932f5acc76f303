/* test_fake_cuda.c - the fake of CUDA: missing order, misuse of memory, ordered
 * failures. */
#include <dlfcn.h>

#include "backend/kernels_table.h"
#include "fake_gpu.h"

/* ---- orders --------------------------------------------------------------------- */

/* A producer on one stream and a consumer on the other: returns what arrives. */
static float race(uint64_t seed, fake_schedule schedule, int has_wait)
{
    gpu it = gpu_open(seed, schedule);
    CHECK(gpu_zero(&it, it.a) == CUDA_SUCCESS);
    CHECK(gpu_add_one(&it, it.x, it.a) == CUDA_SUCCESS);
    CHECK(cuEventRecord(it.event, it.a) == CUDA_SUCCESS);
    if (has_wait)
        CHECK(cuStreamWaitEvent(it.b, it.event, 0) == CUDA_SUCCESS);
    CHECK(gpu_add_one(&it, it.x, it.b) == CUDA_SUCCESS);
    const float out = gpu_read(&it, it.b);
    gpu_close(&it);
    return out;
}

TEST(a_wait_makes_every_seed_right)
{
    for (uint64_t seed = 0; seed < GPU_N_SEEDS; seed++) {
        CHECK(race(seed, FAKE_RANDOM, 1) == 2.0f);
        CHECK(race(seed, FAKE_LATE, 1) == 2.0f);
    }
    CHECK(race(0, FAKE_EARLY, 1) == 2.0f);
}

TEST(a_missing_wait_gives_a_wrong_number)
{
    int n_wrong = 0;
    for (uint64_t seed = 0; seed < GPU_N_SEEDS; seed++)
        n_wrong += race(seed, FAKE_RANDOM, 0) != 2.0f;
    if (!CHECK(n_wrong > 20 && n_wrong < GPU_N_SEEDS))
        CHECK_MORE("%d of %d seeds", n_wrong, (int)GPU_N_SEEDS);
    CHECK(race(0, FAKE_LATE, 0) != 2.0f);
    CHECK(race(0, FAKE_EARLY, 0) == 2.0f);
}

TEST(a_seed_does_the_same_each_time)
{
    for (uint64_t seed = 0; seed < 20; seed++) {
        const float first = race(seed, FAKE_RANDOM, 0);
        const float second = race(seed, FAKE_RANDOM, 0);
        CHECK(memcmp(&first, &second, sizeof first) == 0);
    }
}

/* A wait refers to the latest record at the call, if any. */
static float wait_then_record(int has_record_before, int has_record_after)
{
    gpu it = gpu_open(1, FAKE_LATE);
    CHECK(gpu_zero(&it, it.a) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(it.a) == CUDA_SUCCESS);
    CHECK(gpu_add_one(&it, it.x, it.a) == CUDA_SUCCESS);
    if (has_record_before)
        CHECK(cuEventRecord(it.event, it.a) == CUDA_SUCCESS);
    CHECK(cuStreamWaitEvent(it.b, it.event, 0) == CUDA_SUCCESS);
    CHECK(gpu_add_one(&it, it.x, it.a) == CUDA_SUCCESS);
    if (has_record_after)
        CHECK(cuEventRecord(it.event, it.a) == CUDA_SUCCESS);
    const float out = gpu_read(&it, it.b);
    gpu_close(&it);
    return out;
}

TEST(a_wait_is_for_what_was_recorded_when_it_was_called)
{
    CHECK(wait_then_record(0, 0) == 0.0f);
    CHECK(wait_then_record(0, 1) == 0.0f);
    CHECK(wait_then_record(1, 0) == 1.0f);
    CHECK(wait_then_record(1, 1) == 1.0f);
}

/* A blocking stream and the legacy one are ordered in both directions. */
static float by_way_of_legacy(unsigned flags, int is_legacy_first)
{
    gpu it = gpu_open(1, FAKE_LATE);
    CUstream blocking = NULL;
    CHECK(cuStreamCreate(&blocking, flags) == CUDA_SUCCESS);
    CHECK(gpu_zero(&it, it.a) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(it.a) == CUDA_SUCCESS);
    CHECK(gpu_add_one(&it, it.x, is_legacy_first ? NULL : blocking) == CUDA_SUCCESS);
    const float out = gpu_read(&it, is_legacy_first ? blocking : NULL);
    CHECK(cuStreamDestroy(blocking) == CUDA_SUCCESS);
    gpu_close(&it);
    return out;
}

TEST(the_legacy_stream_has_an_order_with_blocking_ones_alone)
{
    CHECK(by_way_of_legacy(CU_STREAM_DEFAULT, 0) == 1.0f);
    CHECK(by_way_of_legacy(CU_STREAM_DEFAULT, 1) == 1.0f);
    CHECK(by_way_of_legacy(CU_STREAM_NON_BLOCKING, 0) == 0.0f);
    CHECK(by_way_of_legacy(CU_STREAM_NON_BLOCKING, 1) == 0.0f);
}

ONE_GPU_TEST(FAKE_LATE, a_query_is_answered_in_the_end)
{
    CHECK(cuEventQuery(it->event) == CUDA_SUCCESS); /* never recorded */
    CHECK(gpu_zero(it, it->a) == CUDA_SUCCESS);
    CHECK(cuEventRecord(it->event, it->a) == CUDA_SUCCESS);
    CHECK(cuEventQuery(it->event) == CUDA_ERROR_NOT_READY);
    int n = 0;
    while (cuEventQuery(it->event) == CUDA_ERROR_NOT_READY && n < 1000)
        n++;
    CHECK(n < 1000);
}

/* ---- memory --------------------------------------------------------------------- */

ONE_GPU_TEST(FAKE_EARLY, the_host_may_not_touch_device_memory)
{
    const volatile char *at = (const volatile char *)(uintptr_t)it->x;
    CHECK(gpu_zero(it, it->a) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(it->a) == CUDA_SUCCESS);
    CHECK(fake_errors() == 0);
    (void)at[17];
    gpu_expect_error("the host touched byte 17 of the 1024 of device memory");
    fake_show_memory();
    CHECK(at[17] == 0);
    fake_hide_memory();
}

ONE_GPU_TEST(FAKE_EARLY, what_runs_on_freed_memory_is_seen)
{
    CUdeviceptr memory = 0;
    CHECK(cuMemAlloc(&memory, GPU_BYTES) == CUDA_SUCCESS);
    CHECK(cuMemFree(memory) == CUDA_SUCCESS);
    CHECK(gpu_add_one(it, memory, it->a) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(it->a) == CUDA_SUCCESS);
    gpu_expect_error("an operation touched byte 0 of the 1024 of freed device memory");
    CHECK(cuMemsetD8Async(memory, 0, 4, it->a) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(it->a) == CUDA_SUCCESS);
    gpu_expect_error("was freed");
    CHECK(cuMemFree(memory) == CUDA_ERROR_INVALID_VALUE);
    gpu_expect_error("was freed twice");
    CHECK(cuMemFree(it->x + 8) == CUDA_ERROR_INVALID_VALUE);
    gpu_expect_error("is no allocation");
}

ONE_GPU_TEST(FAKE_LATE, a_free_waits_for_its_device)
{
    CUdeviceptr memory = 0;
    CHECK(cuMemAlloc(&memory, GPU_BYTES) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(memory, 0, GPU_BYTES, it->a) == CUDA_SUCCESS);
    CHECK(gpu_zero(it, it->b) == CUDA_SUCCESS);
    CHECK(fake_pending() == 2);
    CHECK(cuMemFree(memory) == CUDA_SUCCESS);
    CHECK(fake_pending() == 0);
}

ONE_GPU_TEST(FAKE_EARLY, what_lies_outside_is_seen)
{
    CUdeviceptr small = 0;
    CHECK(cuMemsetD8Async(it->x + 1020, 0, 8, it->a) == CUDA_SUCCESS);
    gpu_expect_error("8 bytes from byte 1020 on are not within the allocation's 1024");
    CHECK(gpu_add_one(it, it->x + 4, it->a) == CUDA_SUCCESS);
    gpu_expect_error("an operation touched");
    CHECK(cuMemAlloc(&small, GPU_BYTES - 4) == CUDA_SUCCESS);
    CHECK(cuMemsetD8Async(small, 0, GPU_BYTES - 4, it->a) == CUDA_SUCCESS);
    CHECK(gpu_add_one(it, small, it->a) == CUDA_SUCCESS);
    CHECK(cuMemFree(small) == CUDA_SUCCESS);
    gpu_expect_error("byte 1020 of an allocation of 1020 was written");
}

/* Host memory that is not pinned may be reused at once, pinned memory may not. */
static float copy_of(int is_pinned)
{
    gpu it = gpu_open(1, FAKE_LATE);
    static float values[GPU_N];
    for (int i = 0; i < GPU_N; i++)
        values[i] = 5.0f;
    if (is_pinned)
        CHECK(cuMemHostRegister(values, sizeof values, 0) == CUDA_SUCCESS);
    CHECK(cuMemcpyHtoDAsync(it.x, values, sizeof values, it.a) == CUDA_SUCCESS);
    memset(values, 0, sizeof values);
    const float out = gpu_read(&it, it.a);
    if (is_pinned)
        CHECK(cuMemHostUnregister(values) == CUDA_SUCCESS);
    gpu_close(&it);
    return out;
}

TEST(pinned_memory_is_read_when_the_copy_is_made)
{
    CHECK(copy_of(0) == 5.0f);
    CHECK(copy_of(1) == 0.0f);
}

/* ---- calls ---------------------------------------------------------------------- */

TEST(a_hidden_function_is_not_found)
{
    gpu it = gpu_open(1, FAKE_EARLY);
    void *found = NULL;
    int how = 0;
    void *library = dlopen(fake_path(), RTLD_NOW);
    CHECK(library != NULL && dlsym(library, "ncclMemAlloc") != NULL);
    fake_hide("ncclMemAlloc");
    fake_hide("cuMemGetInfo");
    CHECK(dlsym(library, "ncclMemAlloc") == NULL);
    CHECK(dlsym(library, "ncclMemFree") != NULL);
    CHECK(dlsym(library, "cuMemGetInfo_v2") == NULL);
    CHECK(cuGetProcAddress_v2("cuMemGetInfo", &found, 3020, 0, &how) == CUDA_SUCCESS);
    CHECK(found == NULL && how == 1);
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &found, 3020, 0, NULL) == CUDA_SUCCESS);
    CHECK(found != NULL);
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &found, 1000, 0, NULL) ==
          CUDA_ERROR_NOT_FOUND);
    CHECK(fake_errors() == 0);
    CHECK(cuGetProcAddress_v2("cuMemAlloc", &found, 2000, 0, NULL) == CUDA_SUCCESS);
    gpu_expect_error("cuMemAlloc of CUDA 2000 is an old variant");
    gpu_close(&it);
    fake_reset(NULL);
    CHECK(dlsym(library, "ncclMemAlloc") != NULL);
    (void)dlclose(library);
}

TEST(an_older_version_lacks_what_is_newer)
{
    fake_options options = fake_defaults();
    void *library = dlopen(fake_path(), RTLD_NOW);
    options.nccl = 21005;
    options.driver = 11040;
    fake_reset(&options);
    CHECK(dlsym(library, "ncclCommInitRank") != NULL);
    CHECK(dlsym(library, "ncclCommRegister") == NULL);
    CHECK(dlsym(library, "cuGetProcAddress") != NULL);
    CHECK(dlsym(library, "cuGetProcAddress_v2") == NULL);
    fake_reset(NULL);
    CHECK(dlsym(library, "ncclCommRegister") != NULL);
    CHECK(dlsym(library, "cuGetProcAddress_v2") != NULL);
    (void)dlclose(library);
}

ONE_GPU_TEST(FAKE_EARLY, objects_are_not_used_after_their_end)
{
    CUstream stream = NULL;
    CUevent event = NULL;
    (void)it;
    CHECK(cuStreamCreate(&stream, 0) == CUDA_SUCCESS);
    CHECK(cuEventCreate(&event, 0) == CUDA_SUCCESS);
    CHECK(fake_live(FAKE_STREAMS) == 3 && fake_live(FAKE_EVENTS) == 2);
    CHECK(cuStreamDestroy(stream) == CUDA_SUCCESS);
    CHECK(cuEventDestroy(event) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(stream) == CUDA_ERROR_INVALID_HANDLE);
    gpu_expect_error("was used after its end");
    CHECK(cuEventDestroy(event) == CUDA_ERROR_INVALID_HANDLE);
    gpu_expect_error("was used after its end");
}

ONE_GPU_TEST(FAKE_EARLY, calls_need_a_context_and_the_right_one)
{
    CUcontext other = NULL;
    CUdeviceptr memory = 0;
    CHECK(cuDevicePrimaryCtxRetain(&other, 1) == CUDA_SUCCESS);
    CHECK(cuCtxPushCurrent(other) == CUDA_SUCCESS);
    CHECK(gpu_add_one(it, it->x, it->a) == CUDA_ERROR_INVALID_HANDLE);
    CUevent event = NULL;
    CHECK(cuEventCreate(&event, 0) == CUDA_SUCCESS);
    CHECK(cuEventRecord(event, it->a) == CUDA_ERROR_INVALID_HANDLE);
    CHECK(cuEventDestroy(event) == CUDA_SUCCESS);
    CHECK(cuCtxPopCurrent(NULL) == CUDA_SUCCESS);
    CHECK(cuCtxPopCurrent(NULL) == CUDA_SUCCESS);
    CHECK(cuMemAlloc(&memory, 4) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(cuCtxPushCurrent(it->context) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRelease(1) == CUDA_SUCCESS);
    CHECK(cuCtxPushCurrent(other) == CUDA_ERROR_INVALID_CONTEXT);
}

#ifndef __SANITIZE_ADDRESS__ /* with it UBSan ends the program there */
/* No pointer to a float is two bytes off, so the kernels do not check for it. */
TEST(a_vector_that_is_not_aligned_ends_the_context)
{
    static pli_small_spans table;
    gpu it = gpu_open(1, FAKE_LATE);
    CUfunction add = NULL;
    CUcontext context = NULL;
    char *x = (char *)(uintptr_t)it.x; /* NOLINT(performance-no-int-to-ptr) */
    void *args[] = {&table};
    table.head.n_spans = 1;
    table.spans[0] =
        (pli_span){.to = x, .from = x + 512, .n = 64, .detail = PLI_WORD_F32};
    CHECK(cuModuleGetFunction(&add, it.module, "pl_add_small") == CUDA_SUCCESS);
    CHECK(gpu_zero(&it, it.a) == CUDA_SUCCESS);
    CHECK(cuLaunchKernel(add, 1, 1, 1, PLI_THREADS, 1, 1, 0, it.a, args, NULL) == 0);
    CHECK(cuStreamSynchronize(it.a) == CUDA_SUCCESS);
    table.spans[0].to = x + 2;
    table.spans[0].from = x + 514;
    CHECK(cuLaunchKernel(add, 1, 1, 1, PLI_THREADS, 1, 1, 0, it.a, args, NULL) == 0);
    (void)cuStreamSynchronize(it.a);
    CHECK(cuStreamSynchronize(it.a) == CUDA_ERROR_MISALIGNED_ADDRESS);
    CHECK(cuMemFree(it.x) == CUDA_ERROR_MISALIGNED_ADDRESS);
    CHECK(cuCtxPopCurrent(&context) == CUDA_ERROR_MISALIGNED_ADDRESS);
    gpu_expect_error("pl_add_small: a vector is not aligned");
    fake_reset(NULL);
}
#endif
