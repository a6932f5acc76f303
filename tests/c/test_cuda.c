/* test_cuda.c - the CUDA driver and backend, on a fake of libcuda. */
#include "fake/fake.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/cuda.h"
#include "check.h"
#include "core/alloc.h"

enum { N = 1000, N_BYTES = N * (int)sizeof(float), N_DEVICES = 2 };

static void start_over(fake_schedule schedule)
{
    fake_options options = fake_defaults();
    options.schedule = schedule;
    options.devices = N_DEVICES;
    fake_reset(&options);
}

static pl_status open_device(int device, pl_backend **out)
{
    const pli_cuda_options options = {.device = device, .driver = fake_path()};
    return pli_cuda_backend_create(&options, out);
}

static void nothing_is_left(void)
{
    CHECK(fake_live_objects() == 0);
    CHECK(fake_live(FAKE_CONTEXTS) == 0);
    CHECK(fake_context_depth() == 0);
    for (int i = 0; i < fake_errors(); i++)
        CHECK_MORE("%s", fake_error(i));
    CHECK(fake_errors() == 0);
}

/* ---- one device with two streams of a user -------------------------------------- */

typedef struct bench {
    pl_backend *backend;
    const pli_driver *driver;
    pl_stream *a, *b;
    float *x, *y; /* device memory; x[i] = i + 1, y[i] = 0 */
} bench;

static pl_stream *new_stream(const pli_driver *driver)
{
    pli_cu_stream stream = NULL;
    CHECK(driver->cuStreamCreateWithPriority(&stream, 1, 0) == 0);
    return (pl_stream *)(void *)stream;
}

static int bench_open(bench *out, fake_schedule schedule)
{
    static const float zeros[N];
    float counts[N];
    pli_cuda_scope scope;
    start_over(schedule);
    *out = (bench){0};
    if (!CHECK_OK(open_device(0, &out->backend)))
        return 0;
    pl_backend *const backend = out->backend;
    out->driver = pli_cuda_driver(backend);
    for (int i = 0; i < N; i++)
        counts[i] = (float)(i + 1);
    if (!CHECK_OK(pli_cuda_enter(backend, &scope)))
        return 0;
    out->a = new_stream(out->driver);
    out->b = new_stream(out->driver);
    pli_cuda_leave(backend, &scope);
    return CHECK_OK(backend->ops->alloc(backend, N_BYTES, (void **)&out->x)) &&
           CHECK_OK(backend->ops->alloc(backend, N_BYTES, (void **)&out->y)) &&
           CHECK_OK(pli_cuda_write(backend, out->x, counts, N_BYTES, out->a)) &&
           CHECK_OK(pli_cuda_write(backend, out->y, zeros, N_BYTES, out->a));
}

static void bench_close(bench *self)
{
    pl_backend *const backend = self->backend;
    pli_cuda_scope scope;
    if (backend == NULL)
        return;
    backend->ops->free(backend, self->x);
    backend->ops->free(backend, self->y);
    if (CHECK_OK(pli_cuda_enter(backend, &scope))) {
        (void)self->driver->cuStreamDestroy((pli_cu_stream)(void *)self->a);
        (void)self->driver->cuStreamDestroy((pli_cu_stream)(void *)self->b);
        pli_cuda_leave(backend, &scope);
    }
    pli_backend_destroy(backend);
    nothing_is_left();
}

#define BENCH_TEST(schedule, name)                                                     \
    TEST_BY(name, bench *self, {                                                       \
        bench it;                                                                      \
        if (bench_open(&it, schedule))                                                 \
            name##_by(&it);                                                            \
        bench_close(&it);                                                              \
    })

/* y = x on a stream */
static int copy_on(const bench *self, pl_stream *stream)
{
    const pl_move move = {
        .to = self->y, .from = self->x, .dtype = PL_F32, .n_elems = N};
    return CHECK_OK(self->backend->ops->copy(self->backend, &move, 1, stream));
}

/* Whether a host that reads y on `stream` gets x; -1: neither x nor zeros. */
static int y_is_x(const bench *self, pl_stream *stream)
{
    float y[N];
    int n_equal = 0, n_zero = 0;
    if (!CHECK_OK(pli_cuda_read(self->backend, y, self->y, N_BYTES, stream)))
        return -1;
    for (int i = 0; i < N; i++) {
        n_equal += y[i] == (float)(i + 1);
        n_zero += y[i] == 0;
    }
    return n_equal == N ? 1 : n_zero == N ? 0 : -1;
}

/* ---- life ----------------------------------------------------------------------- */

TEST(a_device_has_one_backend_and_its_users_are_counted)
{
    pl_backend *first = NULL, *second = NULL, *other = NULL;
    start_over(FAKE_EARLY);
    if (CHECK_OK(open_device(0, &first)) && CHECK_OK(open_device(0, &second)) &&
        CHECK_OK(open_device(1, &other))) {
        CHECK(first == second);
        CHECK(first != other);
        CHECK(pli_cuda_device(first) == 0);
        CHECK(pli_cuda_device(other) == 1);
        CHECK(pli_cuda_side_stream(first) != NULL);
        CHECK(pli_cuda_side_stream(first) != pli_cuda_side_stream(other));
        CHECK(strcmp(first->ops->name, "cuda") == 0);
        CHECK(first->ops->batching == PL_MOVE_BY_BUCKET);
        CHECK(strcmp(pli_cuda_kernels(first), "fatbin") == 0 ||
              strcmp(pli_cuda_kernels(first), "nvrtc") == 0);
        CHECK(fake_live(FAKE_CONTEXTS) == 2);
        CHECK(fake_live(FAKE_STREAMS) == 2);
        CHECK(fake_context_depth() == 0);
    }
    if (first != NULL)
        pli_cuda_backend_retain(first);
    pli_backend_destroy(other);
    CHECK(fake_live(FAKE_CONTEXTS) == 1);
    pli_backend_destroy(first);
    pli_backend_destroy(second);
    CHECK(fake_live(FAKE_CONTEXTS) == 1);
    pli_backend_destroy(first);
    nothing_is_left();
}

TEST(a_device_out_of_range_is_named_with_how_many_there_are)
{
    pl_backend *backend = NULL;
    start_over(FAKE_EARLY);
    CHECK_FAILS(open_device(2, &backend), PL_EINVAL, "device 2 is out of range",
                "2 devices");
    CHECK_FAILS(open_device(-1, &backend), PL_EINVAL, "device -1 is out of range");
    CHECK(backend == NULL);
    nothing_is_left();
}

TEST(a_machine_without_a_device_is_told_so)
{
    pl_backend *backend = NULL;
    fake_options options = fake_defaults();
    options.devices = 0;
    fake_reset(&options);
    fake_fail("cuInit", 1, CUDA_ERROR_NO_DEVICE);
    CHECK_FAILS(open_device(0, &backend), PL_EUNSUPPORTED, "sees no device",
                "CUDA_VISIBLE_DEVICES");
    CHECK(backend == NULL);
    start_over(FAKE_EARLY);
    fake_fail("cuInit", 1, CUDA_ERROR_UNKNOWN);
    CHECK_FAILS(open_device(0, &backend), PL_EUNSUPPORTED, "CUDA error 999",
                "nvidia-smi");
    nothing_is_left();
}

/* Functions whose failure `create` can report. */
static const char *const at_construction[] = {
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuDeviceGetAttribute",
    "cuCtxGetStreamPriorityRange",
    "cuStreamCreateWithPriority",
    "cuModuleGetFunction",
};

TEST(a_construction_that_fails_anywhere_leaves_nothing_behind)
{
    const size_t n = sizeof at_construction / sizeof at_construction[0];
    for (size_t i = 0; i < n; i++) {
        for (int code = 2; code <= 999; code += 997) {
            pl_backend *backend = NULL;
            start_over(FAKE_EARLY);
            fake_fail(at_construction[i], 1, code);
            const pl_status st = open_device(0, &backend);
            if (!CHECK(st != PL_OK && backend == NULL)) {
                CHECK_MORE("%s failed", at_construction[i]);
                pli_backend_destroy(backend);
                continue;
            }
            char words[32];
            (void)snprintf(words, sizeof words, "CUDA error %d", code);
            CHECK_SAYS(words);
            nothing_is_left();
        }
    }
}

TEST(a_construction_without_memory_leaves_nothing_behind)
{
    for (long nth = 1; nth < 100; nth++) {
        pl_backend *backend = NULL;
        start_over(FAKE_EARLY);
        pli_fault_arm(PLI_FAULT_ALLOC, nth);
        const pl_status st = open_device(0, &backend);
        const long n_seen = pli_fault_count(PLI_FAULT_ALLOC);
        pli_fault_arm(PLI_FAULT_ALLOC, 0);
        pli_backend_destroy(backend);
        nothing_is_left();
        if (n_seen < nth) {
            CHECK_OK(st);
            CHECK(nth > 1);
            return;
        }
        CHECK(st == PL_ENOMEM);
        CHECK(backend == NULL);
    }
    CHECK(0);
}

/* ---- memory --------------------------------------------------------------------- */

BENCH_TEST(FAKE_LATE, memory_comes_aligned_and_is_given_back)
{
    void *some = NULL, *none = NULL;
    pl_backend *const backend = self->backend;
    CHECK_OK(backend->ops->alloc(backend, 100, &some));
    CHECK_OK(backend->ops->alloc(backend, 0, &none));
    CHECK(some != NULL && (uintptr_t)some % PL_CACHE_LINE == 0);
    CHECK(none != NULL && none != some);
    CHECK(fake_live(FAKE_ALLOCATIONS) == 4);
    backend->ops->free(backend, some);
    backend->ops->free(backend, none);
    backend->ops->free(backend, NULL);
    CHECK(fake_live(FAKE_ALLOCATIONS) == 2);
}

TEST(more_memory_than_there_is_is_refused_with_both_sizes)
{
    pl_backend *backend = NULL;
    void *memory = NULL;
    fake_options options = fake_defaults();
    options.capacity = 1 << 20;
    fake_reset(&options);
    if (CHECK_OK(open_device(0, &backend))) {
        CHECK_FAILS(backend->ops->alloc(backend, 3 << 20, &memory), PL_ENOMEM,
                    "device 0 is out of memory", "3145728 bytes", "of its 1048576");
        CHECK(memory == NULL);
        fake_fail("cuMemAlloc", 1, CUDA_ERROR_ILLEGAL_ADDRESS);
        CHECK_FAILS(backend->ops->alloc(backend, 64, &memory), PL_ESYS,
                    "allocating device memory");
        CHECK(memory == NULL);
    }
    pli_backend_destroy(backend);
    nothing_is_left();
}

BENCH_TEST(FAKE_LATE, a_read_is_done_when_it_returns_in_pinned_memory_too)
{
    void *pinned = NULL;
    pli_cuda_scope scope;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CHECK(cuMemHostAlloc(&pinned, N_BYTES, 0) == 0);
    pli_cuda_leave(self->backend, &scope);
    memset(pinned, 0, N_BYTES);
    CHECK_OK(pli_cuda_read(self->backend, pinned, self->x, N_BYTES, self->a));
    CHECK(((const float *)pinned)[N - 1] == (float)N);
    CHECK_OK(pli_cuda_enter(self->backend, &scope));
    CHECK(cuMemFreeHost(pinned) == 0);
    pli_cuda_leave(self->backend, &scope);
}

/* ---- order ---------------------------------------------------------------------- */

TEST(an_event_orders_one_stream_behind_another)
{
    for (int is_waited_for = 0; is_waited_for <= 1; is_waited_for++) {
        bench self;
        pl_event *event = NULL;
        if (bench_open(&self, FAKE_LATE) &&
            CHECK_OK(self.backend->ops->event_create(self.backend, &event)) &&
            copy_on(&self, self.a)) {
            const pl_backend_ops *const ops = self.backend->ops;
            CHECK_OK(ops->event_record(self.backend, event, self.a));
            if (is_waited_for)
                CHECK_OK(ops->event_wait(self.backend, event, self.b));
            CHECK(y_is_x(&self, self.b) == is_waited_for);
            CHECK_OK(ops->synchronize(self.backend, self.a));
            CHECK(y_is_x(&self, self.b) == 1);
            ops->event_destroy(self.backend, event);
        }
        bench_close(&self);
    }
}

BENCH_TEST(FAKE_LATE, an_event_says_whether_it_is_done_and_never_waits)
{
    pl_event *event = NULL;
    int is_done = 7;
    if (!CHECK_OK(self->backend->ops->event_create(self->backend, &event)))
        return;
    pl_backend *const backend = self->backend;
    CHECK_OK(backend->ops->event_is_done(backend, event, &is_done));
    CHECK(is_done == 1); /* never recorded */
    (void)copy_on(self, self->a);
    CHECK_OK(backend->ops->event_record(backend, event, self->a));
    fake_fail("cuEventQuery", 1, CUDA_ERROR_NOT_READY);
    CHECK_OK(backend->ops->event_is_done(backend, event, &is_done));
    CHECK(is_done == 0);
    CHECK(fake_pending() > 0);
    CHECK_OK(backend->ops->synchronize(backend, self->a));
    CHECK_OK(backend->ops->event_is_done(backend, event, &is_done));
    CHECK(is_done == 1);
    is_done = 7;
    fake_fail("cuEventQuery", 1, CUDA_ERROR_LAUNCH_FAILED);
    CHECK_FAILS(backend->ops->event_is_done(backend, event, &is_done), PL_ESYS,
                "CUDA error 719");
    CHECK(is_done == 7);
    backend->ops->event_destroy(backend, event);
    backend->ops->event_destroy(backend, NULL);
}

BENCH_TEST(FAKE_LATE, the_side_stream_waits_for_nobody_it_was_not_told_to)
{
    pl_backend *const backend = self->backend;
    (void)copy_on(self, pli_cuda_side_stream(backend));
    CHECK_OK(backend->ops->synchronize(backend, NULL)); /* the legacy stream */
    CHECK(y_is_x(self, self->a) == 0);
    CHECK_OK(backend->ops->synchronize(backend, pli_cuda_side_stream(backend)));
    CHECK(y_is_x(self, self->a) == 1);
}

/* ---- threads and contexts ------------------------------------------------------- */

static void *use_without_a_context(void *context)
{
    bench *const self = context;
    pl_backend *const backend = self->backend;
    pl_event *event = NULL;
    void *memory = NULL;
    CHECK(fake_context_depth() == 0);
    CHECK_OK(backend->ops->alloc(backend, 64, &memory));
    CHECK_OK(backend->ops->event_create(backend, &event));
    (void)copy_on(self, self->a);
    CHECK_OK(backend->ops->event_record(backend, event, self->a));
    CHECK_OK(backend->ops->event_wait(backend, event, self->b));
    CHECK(y_is_x(self, self->b) == 1);
    backend->ops->event_destroy(backend, event);
    backend->ops->free(backend, memory);
    CHECK(fake_context_depth() == 0);
    return NULL;
}

BENCH_TEST(FAKE_LATE, any_thread_may_call_whatever_context_is_current_there)
{
    pl_backend *other = NULL;
    pthread_t thread;
    pli_cuda_scope outer, inner;
    if (!CHECK_OK(open_device(1, &other)))
        return;
    if (CHECK(pthread_create(&thread, NULL, use_without_a_context, self) == 0))
        (void)pthread_join(thread, NULL);
    CHECK_OK(pli_cuda_enter(other, &outer));
    CHECK(fake_context_depth() == 1);
    (void)copy_on(self, self->b);
    CHECK(y_is_x(self, self->b) == 1);
    CHECK(fake_context_depth() == 1);
    CHECK_OK(pli_cuda_enter(self->backend, &inner)); /* they nest */
    CHECK(fake_context_depth() == 2);
    pli_cuda_leave(self->backend, &inner);
    pli_cuda_leave(other, &outer);
    CHECK(fake_context_depth() == 0);
    pli_backend_destroy(other);
}

BENCH_TEST(FAKE_RANDOM, what_every_step_does_allocates_and_asks_nothing)
{
    static const char *const never[] = {
        "cuCtxPushCurrent",  "cuMemAlloc",          "cuMemFree",
        "cuEventCreate",     "cuEventQuery",        "cuStreamSynchronize",
        "cuMemcpyHtoDAsync", "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode",
    };
    const size_t n = sizeof never / sizeof never[0];
    int before[sizeof never / sizeof never[0]];
    pl_event *event = NULL;
    pli_cuda_scope scope;
    if (!CHECK_OK(self->backend->ops->event_create(self->backend, &event)) ||
        !CHECK_OK(pli_cuda_enter(self->backend, &scope))) /* as torch has done */
        return;
    for (size_t i = 0; i < n; i++)
        before[i] = fake_count(never[i]);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    for (int step = 0; step < 10; step++) {
        (void)copy_on(self, self->a);
        CHECK_OK(self->backend->ops->event_record(self->backend, event, self->a));
        CHECK_OK(self->backend->ops->event_wait(self->backend, event, self->b));
    }
    CHECK(pli_fault_count(PLI_FAULT_ALLOC) == 0);
    for (size_t i = 0; i < n; i++)
        if (!CHECK(fake_count(never[i]) == before[i]))
            CHECK_MORE("%s was called", never[i]);
    pli_cuda_leave(self->backend, &scope);
    self->backend->ops->event_destroy(self->backend, event);
}

TEST(a_call_that_fails_says_what_and_leaves_the_context_as_it_was)
{
    static const struct {
        const char *function, *words;
    } table[] = {{"cuEventRecord", "recording a CUDA event"},
                 {"cuStreamWaitEvent", "having a stream wait"},
                 {"cuStreamSynchronize", "waiting for the device"},
                 {"cuMemcpyDtoHAsync", "copying from the device"},
                 {"cuMemcpyHtoDAsync", "copying to the device"},
                 {"cuEventCreate", "creating a CUDA event"},
                 {"cuStreamIsCapturing", "is captured"},
                 {"cuLaunchKernel", ""}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        bench self;
        pl_event *event = NULL, *other = NULL;
        float word = 0;
        int is_capturing = 7;
        if (bench_open(&self, FAKE_LATE) &&
            CHECK_OK(self.backend->ops->event_create(self.backend, &event))) {
            pl_backend *const it = self.backend;
            const pl_move move = {
                .to = self.y, .from = self.x, .dtype = PL_F32, .n_elems = N};
            fake_fail(table[i].function, 1, CUDA_ERROR_LAUNCH_FAILED);
            const pl_status all[] = {
                it->ops->event_record(it, event, self.a),
                it->ops->event_wait(it, event, self.a),
                it->ops->synchronize(it, self.a),
                pli_cuda_read(it, &word, self.x, sizeof word, self.a),
                pli_cuda_write(it, self.x, &word, sizeof word, self.a),
                it->ops->event_create(it, &other),
                pli_cuda_is_capturing(it, self.a, &is_capturing),
                it->ops->copy(it, &move, 1, self.a),
            };
            for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
                CHECK(all[k] == (k == i ? PL_ESYS : PL_OK));
            CHECK_SAYS(table[i].words, "CUDA error 719");
            CHECK((other == NULL) == (i == 5));
            CHECK(is_capturing == (i == 6 ? 7 : 0));
            CHECK(fake_context_depth() == 0);
            it->ops->event_destroy(it, event);
            it->ops->event_destroy(it, other);
        }
        bench_close(&self);
    }
}

TEST(a_call_that_cannot_enter_the_context_fails_and_does_nothing)
{
    static const char *const table[] = {"cuCtxGetCurrent", "cuCtxPushCurrent",
                                        "cuThreadExchangeStreamCaptureMode"};
    for (size_t i = 0; i < 3; i++) {
        bench self;
        void *memory = NULL;
        if (bench_open(&self, FAKE_LATE)) {
            pl_backend *const it = self.backend;
            fake_fail(table[i], 1, CUDA_ERROR_LAUNCH_FAILED);
            CHECK(it->ops->alloc(it, 64, &memory) == PL_ESYS);
            CHECK(memory == NULL);
            if (i < 2) {
                const pl_move move = {
                    .to = self.y, .from = self.x, .dtype = PL_F32, .n_elems = N};
                fake_fail(table[i], 1, CUDA_ERROR_LAUNCH_FAILED);
                CHECK(it->ops->copy(it, &move, 1, self.a) == PL_ESYS);
                CHECK(y_is_x(&self, self.a) == 0);
            }
            CHECK(fake_context_depth() == 0);
        }
        bench_close(&self);
    }
}

/* ---- capture -------------------------------------------------------------------- */

static void *look_while_another_captures(void *context)
{
    bench *const self = context;
    pl_backend *const backend = self->backend;
    pl_event *event = NULL;
    void *memory = NULL;
    int is_done = 0;
    CHECK_OK(backend->ops->event_create(backend, &event));
    CHECK_OK(backend->ops->event_record(backend, event, self->b));
    CHECK_OK(backend->ops->event_is_done(backend, event, &is_done));
    CHECK_OK(backend->ops->alloc(backend, 64, &memory));
    backend->ops->free(backend, memory);
    CHECK_OK(backend->ops->synchronize(backend, self->b));
    backend->ops->event_destroy(backend, event);
    return NULL;
}

BENCH_TEST(FAKE_LATE, a_capture_takes_what_its_stream_is_given_and_disturbs_nobody)
{
    pthread_t thread;
    pli_cuda_scope scope;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    int is_capturing = 7;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CUstream const a = (CUstream)(void *)self->a;
    pli_cuda_leave(self->backend, &scope);
    CHECK_OK(pli_cuda_is_capturing(self->backend, self->a, &is_capturing));
    CHECK(is_capturing == 0);
    CHECK(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL) == 0);
    CHECK_OK(pli_cuda_is_capturing(self->backend, self->a, &is_capturing));
    CHECK(is_capturing != 0);
    CHECK_OK(pli_cuda_is_capturing(self->backend, self->b, &is_capturing));
    CHECK(is_capturing == 0);
    (void)copy_on(self, self->a);
    if (CHECK(pthread_create(&thread, NULL, look_while_another_captures, self) == 0))
        (void)pthread_join(thread, NULL);
    CHECK(cuStreamEndCapture(a, &graph) == 0);
    CHECK(y_is_x(self, self->a) == 0);
    CHECK_OK(pli_cuda_enter(self->backend, &scope));
    CHECK(cuGraphInstantiate(&exec, graph, 0) == 0);
    CHECK(cuGraphLaunch(exec, a) == 0);
    CHECK(y_is_x(self, self->a) == 1);
    CHECK(cuGraphExecDestroy(exec) == 0);
    CHECK(cuGraphDestroy(graph) == 0);
    pli_cuda_leave(self->backend, &scope);
}

BENCH_TEST(FAKE_LATE, a_scope_leaves_the_threads_own_capture_mode_as_it_was)
{
    pli_cuda_scope outer, inner;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &outer)) ||
        !CHECK_OK(pli_cuda_enter(self->backend, &inner)))
        return;
    int mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    pli_cuda_leave(self->backend, &inner);
    CHECK(self->driver->cuThreadExchangeStreamCaptureMode(&mode) == 0);
    CHECK(mode == CU_STREAM_CAPTURE_MODE_RELAXED); /* the outer scope's */
    CHECK(self->driver->cuThreadExchangeStreamCaptureMode(&mode) == 0);
    pli_cuda_leave(self->backend, &outer);
    mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CHECK(self->driver->cuThreadExchangeStreamCaptureMode(&mode) == 0);
    CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

/* ---- moves ---------------------------------------------------------------------- */

static int y_equals(const bench *self, const float *wanted)
{
    float y[N];
    return CHECK_OK(pli_cuda_read(self->backend, y, self->y, N_BYTES, self->a)) &&
           CHECK(memcmp(y, wanted, sizeof y) == 0);
}

BENCH_TEST(FAKE_LATE, every_move_is_made_on_the_stream_that_is_named)
{
    float wanted[N];
    pl_backend *const it = self->backend;
    const pl_move move = {
        .to = self->y, .from = self->x, .dtype = PL_F32, .n_elems = N};
    const pl_rank_ranges slots = {.to = self->y,
                                  .from = self->x,
                                  .stride_bytes = N_BYTES / 2,
                                  .n_ranks = 2,
                                  .dtype = PL_F32,
                                  .reduction = PL_SUM,
                                  .n_elems = N / 2};
    CHECK_OK(it->ops->add(it, &move, 1, self->a));
    CHECK_OK(it->ops->add(it, &move, 1, self->a));
    CHECK_OK(it->ops->scale(it, &move, 1, 3, 2, self->a));
    CHECK(y_is_x(self, self->b) == 0);
    for (int i = 0; i < N; i++)
        wanted[i] = (float)(3 * (i + 1));
    (void)y_equals(self, wanted);
    CHECK_OK(it->ops->sum(it, &slots, self->a));
    for (int i = 0; i < N / 2; i++)
        wanted[i] = (float)(2 * i + 2 + N / 2);
    (void)y_equals(self, wanted);
    pl_rank_ranges only = slots;
    only.n_ranks = 1;
    CHECK_OK(it->ops->sum(it, &only, self->a));
    for (int i = 0; i < N / 2; i++)
        wanted[i] = (float)(i + 1);
    (void)y_equals(self, wanted);
}

BENCH_TEST(FAKE_LATE, a_refresh_and_its_checksums_are_on_the_stream_that_is_named)
{
    enum { N_SUMS = 2 };
    uint64_t found[N_SUMS] = {0}, *sums = NULL;
    const size_t n_bytes = sizeof found;
    pl_backend *const it = self->backend;
    const pli_piece piece = {self->y, self->x, N_BYTES, 0, 0};
    CHECK_OK(it->ops->alloc(it, n_bytes, (void **)&sums));
    CHECK_OK(pli_cuda_write(it, sums, found, n_bytes, self->a));
    CHECK_OK(pli_cuda_checksum(it, &piece, 1, sums, self->a));
    CHECK_OK(pli_cuda_read(it, found, sums, n_bytes, self->b));
    CHECK(found[0] == 0);
    CHECK_OK(pli_cuda_read(it, found, sums, n_bytes, self->a));
    CHECK(found[0] != 0 && found[1] == 0);
    CHECK_OK(pli_cuda_refresh(it, &piece, 1, sums, sums, self->a));
    CHECK(y_is_x(self, self->a) == 0);
    CHECK_OK(pli_cuda_refresh(it, &piece, 1, sums, sums + 1, self->a));
    CHECK(y_is_x(self, self->b) == 0);
    CHECK(y_is_x(self, self->a) == 1);
    it->ops->free(it, sums);
}

/* ---- a forked child ------------------------------------------------------------- */

BENCH_TEST(FAKE_LATE, a_forked_child_is_told_and_leaves_the_parents_device_alone)
{
    pl_event *event = NULL;
    if (!CHECK_OK(self->backend->ops->event_create(self->backend, &event)))
        return;
    pl_backend *const it = self->backend;
    const pid_t pid = fork();
    if (pid == 0) {
        pl_backend *again = NULL;
        const int n_frees = fake_count("cuMemFree");
        int is_well = open_device(0, &again) == PL_ESTATE && again == NULL;
        is_well &= strstr(pl_error_message(), "spawn") != NULL;
        it->ops->free(it, self->x);
        it->ops->event_destroy(it, event);
        pli_backend_destroy(it);
        is_well &= fake_count("cuMemFree") == n_frees;
        is_well &= fake_count("cuEventDestroy") == 0;
        is_well &= fake_live(FAKE_CONTEXTS) == 1;
        _exit(is_well ? 0 : 1);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
    it->ops->event_destroy(it, event);
}
