/* test_fake_memory.c - the fake's memory: what may not be freed yet, and what is used
 * up. */
#include "fake_gpu.h"

ONE_GPU_TEST(FAKE_LATE, nccl_frees_memory_under_what_is_in_flight)
{
    void *memory = NULL;
    CHECK(ncclMemAlloc(&memory, GPU_BYTES) == ncclSuccess);
    CHECK(gpu_add_one(it, (CUdeviceptr)(uintptr_t)memory, it->a) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(it->a) == CUDA_SUCCESS);
    CHECK(gpu_zero(it, it->a) == CUDA_SUCCESS); /* not in that memory */
    CHECK(ncclMemFree(memory) == ncclSuccess);
    CHECK(fake_errors() == 0);
    CHECK(ncclMemAlloc(&memory, GPU_BYTES) == ncclSuccess);
    CHECK(gpu_add_one(it, (CUdeviceptr)(uintptr_t)memory, it->a) == CUDA_SUCCESS);
    CHECK(ncclMemFree(memory) == ncclSuccess);
    gpu_expect_error("ncclMemFree: ");
    CHECK(fake_synchronize_all());
    fake_forget_errors(); /* the kernel has touched freed memory */
}

ONE_GPU_TEST(FAKE_LATE, memory_is_not_deregistered_under_a_collective)
{
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    void *memory = NULL;
    void *handle = NULL;
    CHECK(ncclMemAlloc(&memory, GPU_BYTES) == ncclSuccess);
    CHECK(ncclGetUniqueId(&id) == ncclSuccess);
    CHECK(ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess);
    for (int is_waited_for = 0; is_waited_for < 2; is_waited_for++) {
        CHECK(ncclCommRegister(comm, memory, GPU_BYTES, &handle) == ncclSuccess);
        CHECK(ncclAllReduce(memory, memory, GPU_N, ncclFloat32, ncclSum, comm, it->a) ==
              ncclSuccess);
        if (is_waited_for)
            CHECK(cuStreamSynchronize(it->a) == CUDA_SUCCESS);
        CHECK(ncclCommDeregister(comm, handle) == ncclSuccess);
        if (!is_waited_for)
            gpu_expect_error("ncclCommDeregister: ");
    }
    CHECK(ncclMemFree(memory) == ncclSuccess);
    CHECK(ncclCommDestroy(comm) == ncclSuccess);
}

TEST(what_others_have_taken_cannot_be_allocated)
{
    fake_options options = fake_defaults();
    CUcontext context = NULL;
    CUdeviceptr memory = 0;
    void *large = NULL;
    size_t available = 0, total = 0;
    options.capacity = 4096;
    options.taken = 3072;
    options.granularity = 2048;
    gpu_start(&options);
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
    CHECK(cuCtxPushCurrent(context) == CUDA_SUCCESS);
    CHECK(cuMemGetInfo(&available, &total) == CUDA_SUCCESS);
    CHECK(available == 1024 && total == 4096);
    CHECK(cuMemAlloc(&memory, 2048) == CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(ncclMemAlloc(&large, 512) == ncclUnhandledCudaError);
    fake_empty_caches();
    CHECK(cuMemAlloc(&memory, 2048) == CUDA_SUCCESS);
    CHECK(ncclMemAlloc(&large, 512) == ncclSuccess);
    CHECK(fake_bytes_in_use(0) == 4096);
    CHECK(ncclMemFree(large) == ncclSuccess);
    CHECK(cuMemFree(memory) == CUDA_SUCCESS);
    CHECK(fake_bytes_in_use(0) == 0);
    CHECK(cuCtxPopCurrent(&context) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
    CHECK(fake_errors() == 0 && fake_live_objects() == 0);
}

/* Two devices of one process: a kernel of the first writes to the second's memory. */
TEST(a_kernel_touches_a_peers_memory_with_access_alone)
{
    for (int how = 0; how < 4; how++) {
        fake_options options = fake_defaults();
        int can = -1;
        CUcontext other = NULL;
        CUdeviceptr x = 0;
        float last = -1;
        options.quiet = 1;
        options.peers = how != 3;
        gpu it = gpu_open_with(&options);
        if (how == 2)
            fake_part(1, 0);
        CHECK(cuDeviceCanAccessPeer(&can, 0, 1) == CUDA_SUCCESS && can == (how < 2));
        CHECK(cuDeviceCanAccessPeer(&can, 0, 0) == CUDA_SUCCESS && can == 0);
        CHECK(cuDeviceCanAccessPeer(&can, 0, 9) == CUDA_ERROR_INVALID_DEVICE);
        CHECK(cuDevicePrimaryCtxRetain(&other, 1) == CUDA_SUCCESS);
        CHECK(cuCtxPushCurrent(other) == CUDA_SUCCESS);
        CHECK(cuMemAlloc(&x, GPU_BYTES) == CUDA_SUCCESS);
        CHECK(cuMemsetD8Async(x, 0, GPU_BYTES, NULL) == CUDA_SUCCESS);
        CHECK(cuCtxSynchronize() == CUDA_SUCCESS);
        CHECK(cuCtxPopCurrent(NULL) == CUDA_SUCCESS);
        if (how > 0) {
            const CUresult result = cuCtxEnablePeerAccess(other, 0);
            CHECK(result ==
                  (how == 1 ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED));
        }
        CHECK(gpu_add_one(&it, x, it.a) == CUDA_SUCCESS);
        const CUresult result = cuStreamSynchronize(it.a);
        if (how == 1) {
            CHECK(result == CUDA_SUCCESS);
            CHECK(cuMemcpyDtoHAsync(&last, x, sizeof last, NULL) == CUDA_SUCCESS &&
                  last == 1);
            CHECK(cuCtxEnablePeerAccess(other, 0) ==
                  CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
            CHECK(cuMemFree(x) == CUDA_SUCCESS);
            CHECK(cuDevicePrimaryCtxRelease(1) == CUDA_SUCCESS);
            gpu_close(&it);
        } else {
            CHECK(cuStreamSynchronize(it.a) == CUDA_ERROR_ILLEGAL_ADDRESS);
            gpu_expect_error("add_one: the memory is another device's");
        }
    }
    fake_reset(NULL);
}

TEST(a_copy_names_whose_memory_it_is)
{
    for (int peers = 0; peers < 2; peers++) {
        fake_options options = fake_defaults();
        float ones[GPU_N], found[GPU_N];
        CUcontext other = NULL;
        CUdeviceptr there = 0;
        options.schedule = FAKE_LATE;
        options.peers = peers;
        options.quiet = 1;
        gpu it = gpu_open_with(&options);
        for (int i = 0; i < GPU_N; i++)
            ones[i] = 1.0F;
        CHECK(cuDevicePrimaryCtxRetain(&other, 1) == CUDA_SUCCESS);
        CHECK(cuCtxPushCurrent(other) == CUDA_SUCCESS);
        CHECK(cuMemAlloc(&there, GPU_BYTES) == CUDA_SUCCESS);
        CHECK(cuCtxPopCurrent(&other) == CUDA_SUCCESS);
        CHECK(cuMemcpyHtoDAsync(it.x, ones, GPU_BYTES, it.a) == CUDA_SUCCESS);
        CHECK(cuMemcpyPeerAsync(there, it.context, it.x, it.context, GPU_BYTES, it.a) ==
              CUDA_ERROR_INVALID_VALUE);
        gpu_expect_error("what is copied to is device 1's, not device 0's");
        CHECK(cuMemcpyPeerAsync(there, other, it.x, other, GPU_BYTES, it.a) ==
              CUDA_ERROR_INVALID_VALUE);
        gpu_expect_error("what is copied from is device 0's, not device 1's");
        CHECK(cuMemcpyPeerAsync(there, other, it.x, it.context, GPU_BYTES, it.a) ==
              CUDA_SUCCESS);
        CHECK(fake_pending() == 2);
        CHECK(cuMemcpyDtoHAsync(found, there, GPU_BYTES, it.a) == CUDA_SUCCESS);
        CHECK(memcmp(found, ones, sizeof found) == 0);
        CHECK(cuMemFree(there) == CUDA_SUCCESS);
        CHECK(cuDevicePrimaryCtxRelease(1) == CUDA_SUCCESS);
        gpu_close(&it);
    }
}
