/* driver_calls.c - the host's time for each call of the CUDA driver, in nanoseconds.
 *
 *   gcc -O2 tests/gpu/driver_calls.c -o driver_calls -ldl && ./driver_calls
 *
 * The device is idle before each batch of calls, without waits in it, so a figure is
 * the time to enqueue.  A second context on the same GPU acts as another GPU: copies
 * between them use cuMemcpyPeerAsync.  Prints a line of JSON.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    BATCH = 100, /* calls; fewer than the capacity of a stream's queue */
    N_BATCHES = 41,
    N_BYTES = 4096
};

typedef void *handle; /* context, stream, event, module, function */
typedef unsigned long long address;

/* name, the driver's own name, arguments */
#define DRIVER_MAP(X)                                                                  \
    X(init, cuInit, (unsigned))                                                        \
    X(ctx_create, cuCtxCreate_v2, (handle *, unsigned, int))                           \
    X(retain, cuDevicePrimaryCtxRetain, (handle *, int))                               \
    X(push, cuCtxPushCurrent_v2, (handle))                                             \
    X(pop, cuCtxPopCurrent_v2, (handle *))                                             \
    X(wait_for_all, cuCtxSynchronize, (void))                                          \
    X(stream_create, cuStreamCreate, (handle *, unsigned))                             \
    X(event_create, cuEventCreate, (handle *, unsigned))                               \
    X(record, cuEventRecord, (handle, handle))                                         \
    X(wait, cuStreamWaitEvent, (handle, handle, unsigned))                             \
    X(query, cuEventQuery, (handle))                                                   \
    X(capturing, cuStreamIsCapturing, (handle, int *))                                 \
    X(alloc, cuMemAlloc_v2, (address *, size_t))                                       \
    X(copy, cuMemcpyDtoDAsync_v2, (address, address, size_t, handle))                  \
    X(copy_peer, cuMemcpyPeerAsync,                                                    \
      (address, handle, address, handle, size_t, handle))                              \
    X(clear, cuMemsetD8Async, (address, unsigned char, size_t, handle))                \
    X(load, cuModuleLoadData, (handle *, const void *))                                \
    X(find, cuModuleGetFunction, (handle *, handle, const char *))                     \
    X(launch, cuLaunchKernel,                                                          \
      (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,   \
       handle, void **, void **))

#define MEMBER(name, of_driver, arguments) int(*name) arguments;
static struct {
    DRIVER_MAP(MEMBER)
} cu;

static struct {
    handle here, there; /* contexts */
    handle stream, side, there_stream;
    handle event, there_event;
    handle small, large; /* kernels, by the size of their arguments */
    address from, to, there_to;
    char arguments[4000];
    int is_capturing;
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

static void open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
#define OPEN(name, of_driver, arguments)                                               \
    *(void **)&cu.name = dlsym(library, #of_driver);                                   \
    check(cu.name == NULL, #of_driver);
    DRIVER_MAP(OPEN)
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

static int query(void)
{
    int result = cu.query(g.event);
    return result == 600 /* not ready */ ? 0 : result;
}

static int push_and_pop(void)
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

/* name, its name in the output, the call */
#define CALL_MAP(X)                                                                    \
    X(record, "cuEventRecord", cu.record(g.event, g.stream))                           \
    X(record_there, "cuEventRecord, the other context's",                              \
      cu.record(g.there_event, g.there_stream))                                        \
    X(wait, "cuStreamWaitEvent", cu.wait(g.side, g.event, 0))                          \
    X(wait_there, "cuStreamWaitEvent, across contexts",                                \
      cu.wait(g.there_stream, g.event, 0))                                             \
    X(query, "cuEventQuery", query())                                                  \
    X(capturing, "cuStreamIsCapturing", cu.capturing(g.stream, &g.is_capturing))       \
    X(push, "cuCtxPushCurrent and cuCtxPopCurrent", push_and_pop())                    \
    X(small, "cuLaunchKernel, 64 bytes of arguments", launch(g.small))                 \
    X(large, "cuLaunchKernel, 4000 bytes of arguments", launch(g.large))               \
    X(copy, "cuMemcpyDtoDAsync, 4 KiB", cu.copy(g.to, g.from, N_BYTES, g.stream))      \
    X(copy_peer, "cuMemcpyPeerAsync, 4 KiB, across contexts",                          \
      cu.copy_peer(g.there_to, g.there, g.from, g.here, N_BYTES, g.stream))            \
    X(clear, "cuMemsetD8Async, 4 KiB", cu.clear(g.to, 0, N_BYTES, g.stream))

#define FUNCTION(name, words, call)                                                    \
    static int do_##name(void)                                                         \
    {                                                                                  \
        return call;                                                                   \
    }
CALL_MAP(FUNCTION)

#define ROW(name, words, call) {words, do_##name},
static const struct {
    const char *name;
    int (*call)(void);
} calls[] = {CALL_MAP(ROW)};

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
