/* driver_calls.c - what each call of the CUDA driver costs the host, in nanoseconds.
 *
 *   gcc -O2 tests/gpu/driver_calls.c -o driver_calls -ldl && ./driver_calls
 *
 * The device is idle before each batch of calls and is not waited for within it, so a
 * figure is the time to enqueue.  A second context on the same GPU stands for another
 * GPU: copies between the two go through cuMemcpyPeerAsync.  One line of JSON.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    BATCH = 100, /* calls; fewer than a stream's queue holds */
    N_BATCHES = 41,
    N_BYTES = 4096
};

typedef void *handle; /* context, stream, event, module, function */
typedef unsigned long long address;

static struct {
    int (*init)(unsigned);
    int (*ctx_create)(handle *, unsigned, int);
    int (*retain)(handle *, int);
    int (*push)(handle);
    int (*pop)(handle *);
    int (*wait_for_all)(void);
    int (*stream_create)(handle *, unsigned);
    int (*event_create)(handle *, unsigned);
    int (*record)(handle, handle);
    int (*wait)(handle, handle, unsigned);
    int (*query)(handle);
    int (*capturing)(handle, int *);
    int (*alloc)(address *, size_t);
    int (*copy)(address, address, size_t, handle);
    int (*copy_peer)(address, handle, address, handle, size_t, handle);
    int (*clear)(address, unsigned char, size_t, handle);
    int (*load)(handle *, const void *);
    int (*find)(handle *, handle, const char *);
    int (*launch)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  unsigned, handle, void **, void **);
} cu;

static struct {
    handle here, there; /* contexts */
    handle stream, side, there_stream;
    handle event, there_event;
    handle small, large; /* kernels, by the size of their arguments */
    address from, to, there_to;
    char arguments[4000];
} g;

static const char *const ptx =
    ".version 7.0\n.target sm_52\n.address_size 64\n"
    ".visible .entry small(.param .align 8 .b8 a[64]) { ret; }\n"
    ".visible .entry large(.param .align 8 .b8 a[4000]) { ret; }\n";

static void check(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "%s: error %d of the driver\n", what, result);
        exit(1);
    }
}

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(1);
    }
    return found;
}

static void open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    *(void **)&cu.init = symbol(library, "cuInit");
    *(void **)&cu.ctx_create = symbol(library, "cuCtxCreate_v2");
    *(void **)&cu.retain = symbol(library, "cuDevicePrimaryCtxRetain");
    *(void **)&cu.push = symbol(library, "cuCtxPushCurrent_v2");
    *(void **)&cu.pop = symbol(library, "cuCtxPopCurrent_v2");
    *(void **)&cu.wait_for_all = symbol(library, "cuCtxSynchronize");
    *(void **)&cu.stream_create = symbol(library, "cuStreamCreate");
    *(void **)&cu.event_create = symbol(library, "cuEventCreate");
    *(void **)&cu.record = symbol(library, "cuEventRecord");
    *(void **)&cu.wait = symbol(library, "cuStreamWaitEvent");
    *(void **)&cu.query = symbol(library, "cuEventQuery");
    *(void **)&cu.capturing = symbol(library, "cuStreamIsCapturing");
    *(void **)&cu.alloc = symbol(library, "cuMemAlloc_v2");
    *(void **)&cu.copy = symbol(library, "cuMemcpyDtoDAsync_v2");
    *(void **)&cu.copy_peer = symbol(library, "cuMemcpyPeerAsync");
    *(void **)&cu.clear = symbol(library, "cuMemsetD8Async");
    *(void **)&cu.load = symbol(library, "cuModuleLoadData");
    *(void **)&cu.find = symbol(library, "cuModuleGetFunction");
    *(void **)&cu.launch = symbol(library, "cuLaunchKernel");
}

static void make_things(void)
{
    enum { NON_BLOCKING = 1, NO_TIMING = 2 };
    handle module, popped;
    check(cu.init(0), "cuInit");
    check(cu.retain(&g.here, 0), "cuDevicePrimaryCtxRetain");
    check(cu.ctx_create(&g.there, 0, 0), "cuCtxCreate");
    check(cu.stream_create(&g.there_stream, NON_BLOCKING), "cuStreamCreate");
    check(cu.event_create(&g.there_event, NO_TIMING), "cuEventCreate");
    check(cu.alloc(&g.there_to, N_BYTES), "cuMemAlloc");
    check(cu.pop(&popped), "cuCtxPopCurrent");
    check(cu.push(g.here), "cuCtxPushCurrent");
    check(cu.stream_create(&g.stream, NON_BLOCKING), "cuStreamCreate");
    check(cu.stream_create(&g.side, NON_BLOCKING), "cuStreamCreate");
    check(cu.event_create(&g.event, NO_TIMING), "cuEventCreate");
    check(cu.alloc(&g.from, N_BYTES), "cuMemAlloc");
    check(cu.alloc(&g.to, N_BYTES), "cuMemAlloc");
    check(cu.load(&module, ptx), "cuModuleLoadData");
    check(cu.find(&g.small, module, "small"), "cuModuleGetFunction");
    check(cu.find(&g.large, module, "large"), "cuModuleGetFunction");
}

static int do_record(void)
{
    return cu.record(g.event, g.stream);
}
static int do_wait(void)
{
    return cu.wait(g.side, g.event, 0);
}
static int do_wait_there(void)
{
    return cu.wait(g.there_stream, g.event, 0);
}
static int do_record_there(void)
{
    return cu.record(g.there_event, g.there_stream);
}

static int do_query(void)
{
    int result = cu.query(g.event);
    return result == 600 /* not ready */ ? 0 : result;
}

static int do_is_capturing(void)
{
    int is_capturing;
    return cu.capturing(g.stream, &is_capturing);
}

static int do_push_and_pop(void)
{
    handle popped;
    int result = cu.push(g.there);
    return result != 0 ? result : cu.pop(&popped);
}

static int launch(handle kernel)
{
    void *arguments[] = {g.arguments};
    return cu.launch(kernel, 1, 1, 1, 32, 1, 1, 0, g.stream, arguments, NULL);
}

static int do_launch_small(void)
{
    return launch(g.small);
}
static int do_launch_large(void)
{
    return launch(g.large);
}
static int do_copy(void)
{
    return cu.copy(g.to, g.from, N_BYTES, g.stream);
}
static int do_clear(void)
{
    return cu.clear(g.to, 0, N_BYTES, g.stream);
}

static int do_copy_peer(void)
{
    return cu.copy_peer(g.there_to, g.there, g.from, g.here, N_BYTES, g.stream);
}

static const struct {
    const char *name;
    int (*call)(void);
} calls[] = {
    {"cuEventRecord", do_record},
    {"cuEventRecord, the other context's", do_record_there},
    {"cuStreamWaitEvent", do_wait},
    {"cuStreamWaitEvent, across contexts", do_wait_there},
    {"cuEventQuery", do_query},
    {"cuStreamIsCapturing", do_is_capturing},
    {"cuCtxPushCurrent and cuCtxPopCurrent", do_push_and_pop},
    {"cuLaunchKernel, 64 bytes of arguments", do_launch_small},
    {"cuLaunchKernel, 4000 bytes of arguments", do_launch_large},
    {"cuMemcpyDtoDAsync, 4 KiB", do_copy},
    {"cuMemcpyPeerAsync, 4 KiB, across contexts", do_copy_peer},
    {"cuMemsetD8Async, 4 KiB", do_clear},
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int64_t median_ns(size_t i)
{
    int64_t times[N_BATCHES];
    for (int batch = 0; batch < N_BATCHES; batch++) {
        handle popped;
        check(cu.wait_for_all(), "cuCtxSynchronize");
        check(cu.push(g.there), "cuCtxPushCurrent");
        check(cu.wait_for_all(), "cuCtxSynchronize");
        check(cu.pop(&popped), "cuCtxPopCurrent");
        int64_t begin = now_ns();
        for (int n = 0; n < BATCH; n++)
            check(calls[i].call(), calls[i].name);
        times[batch] = (now_ns() - begin) / BATCH;
    }
    qsort(times, N_BATCHES, sizeof times[0], by_value);
    return times[N_BATCHES / 2];
}

int main(void)
{
    open_driver();
    make_things();
    printf("{");
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        printf("%s\"%s\": %lld", i > 0 ? ", " : "", calls[i].name,
               (long long)median_ns(i));
    printf("}\n");
    return 0;
}
