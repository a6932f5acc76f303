/* gpu_ranks.h - ranks as threads, each with a device of the fake, in one GPU world.
 *
 *     gpu_ranks all = gpu_ranks_of(world_size, seed, schedule);
 *     gpu_ranks_start(&all);            resets the fake
 *     gpu_ranks_run(&all, run);         in one thread per rank: makes the world, run(),
 *                                       ends the world
 *     gpu_ranks_end(&all);              nothing may be left
 */
#ifndef PLT_GPU_RANKS_H
#define PLT_GPU_RANKS_H

#define CHECK_AT_ONCE 3 /* they wait for deadlines */

#include "fake/fake.h" /* first: it renames functions of CUDA, as cuda.h does */

#include "backend/cuda.h"
#include "core/alloc.h"
#include "device_memory.h"
#include "hosts.h"
#include "nccl/gpu_comm.h"
#include "ops.h"

enum { GPUS_HOST_BYTES = 4096, GPUS_BYTES = 1 << 16, GPUS_MOST = 4 };

/* Ranks per host in worlds made from now on; 0: all ranks are on one host. */
static int gpu_ranks_per_host;

typedef struct gpu_ranks {
    int world_size;
    int per_host;
    uint64_t seed;
    fake_options fake;
    int64_t deadline_ns;
    int has_watchdog;
    int is_shared; /* one device for all */
    int may_keep;  /* frees may have failed */
    size_t device_bytes;
    pli_nccl_library *library;
    pli_watchdog *watchdog;
    pl_comm *bases[GPUS_MOST];
    pthread_barrier_t meeting; /* of ranks that leave a failed world */
    int has_next;              /* world */
    void *context;             /* the test's own */
} gpu_ranks;

/* What one rank has. */
typedef struct gpu_rank {
    gpu_ranks *all;
    int rank;
    draw random;
    pl_backend *backend;
    pl_comm *comm;     /* NULL: could not be made, or was ended by the test */
    pl_stream *stream; /* the user's */
    pl_event *ready;
    pl_status made;
    char words[2048]; /* why it could not be made, or what was lost at its end */
    void (*run)(struct gpu_rank *self);
} gpu_rank;

static inline gpu_ranks gpu_ranks_of(int world_size, uint64_t seed,
                                     fake_schedule schedule)
{
    gpu_ranks all = {.world_size = world_size,
                     .per_host = gpu_ranks_per_host,
                     .seed = seed,
                     .fake = fake_defaults(),
                     .deadline_ns = RANKS_DEADLINE_NS,
                     .has_watchdog = 1,
                     .device_bytes = GPUS_BYTES};
    all.fake.seed = seed;
    all.fake.schedule = schedule;
    all.fake.devices = GPUS_MOST;
    all.fake.lazy_connect = 1;
    all.fake.lazy_load = seed % 3 == 1;
    all.fake.one_queue = seed % 3 == 2;
    return all;
}

static inline void gpu_ranks_no_errors(const gpu_ranks *all)
{
    if (!CHECK(fake_errors() == 0))
        for (int i = 0; i < fake_errors() && i < 5; i++)
            CHECK_MORE("seed %d, %d a host: %s", (int)all->seed, all->per_host,
                       fake_error(i));
    fake_forget_errors();
}

/* Whether the ranks are on several hosts. */
static inline int gpu_ranks_are_apart(const gpu_ranks *all)
{
    return all->per_host > 0 && all->world_size > all->per_host;
}

static inline int gpu_ranks_make_bases(gpu_ranks *all)
{
    const size_t n_bytes = GPUS_HOST_BYTES + PLI_GPU_BOARD_BYTES;
    hosts it = {.deadline_ns = all->deadline_ns, .is_narrow = all->seed % 2 == 0};
    if (!gpu_ranks_are_apart(all))
        return CHECK_OK(
            local_create(all->world_size, n_bytes, all->deadline_ns, all->bases));
    for (int n = all->world_size; n > 0; n -= all->per_host)
        it.n_ranks[it.n_hosts++] = n < all->per_host ? n : all->per_host;
    return hosts_create(&it, n_bytes, all->bases);
}

static inline int gpu_ranks_start(gpu_ranks *all)
{
    fake_reset(&all->fake);
    if (!CHECK_OK(pli_nccl_library_open(fake_path(), &all->library)))
        return 0;
    if (all->has_watchdog && !CHECK_OK(pli_watchdog_create(&all->watchdog)))
        return 0;
    return gpu_ranks_make_bases(all);
}

/* Waits for detached threads, which end communicators or make calls that were given
 * up. */
static inline void gpu_ranks_await_threads(void)
{
    for (int64_t ns = 0; ns < RANKS_DEADLINE_NS && fake_live(FAKE_CONTEXTS) > 0;
         ns += PLI_MS) {
        fake_let_go();
        pli_sleep_ns(PLI_MS);
    }
}

static inline void gpu_ranks_end(gpu_ranks *all)
{
    static const char *const kinds[FAKE_N_KINDS] = {"contexts",    "streams", "events",
                                                    "allocations", "pinned",  "modules",
                                                    "graphs",      "execs",   "comms"};
    pli_watchdog_destroy(all->watchdog);
    pli_nccl_library_release(all->library);
    gpu_ranks_await_threads();
    fake_torch_settle();
    for (int kind = 0; kind < FAKE_N_KINDS && !all->may_keep; kind++)
        if (!CHECK(fake_live((fake_kind)kind) == 0))
            CHECK_MORE("seed %d: %d %s are left", (int)all->seed,
                       fake_live((fake_kind)kind), kinds[kind]);
    gpu_ranks_no_errors(all);
}

static inline pl_status gpu_open(gpu_rank *self)
{
    pl_status st = PL_OK;
    const pli_cuda_options options = {.device = self->all->is_shared ? 0 : self->rank,
                                      .driver = fake_path()};
    pli_cuda_scope scope;
    pli_cu_stream stream = NULL;
    PL_TRY(pli_cuda_backend_create(&options, &self->backend));
    PL_TRY(self->backend->ops->event_create(self->backend, &self->ready));
    PL_TRY(pli_cuda_enter(self->backend, &scope));
    const pli_cu_result made =
        pli_cuda_driver(self->backend)->cuStreamCreateWithPriority(&stream, 1, 0);
    pli_cuda_leave(self->backend, &scope);
    PL_TRY(pli_driver_check(pli_cuda_driver(self->backend), made, "making a stream"));
    self->stream = (pl_stream *)(void *)stream;
done:
    return st;
}

/* Waits for the user's stream, as a program does before it ends. */
static inline void gpu_close(gpu_rank *self)
{
    pli_cuda_scope scope;
    if (self->backend == NULL)
        return;
    if (self->stream != NULL && pli_cuda_enter(self->backend, &scope) == PL_OK) {
        const pli_driver *driver = pli_cuda_driver(self->backend);
        (void)driver->cuStreamSynchronize((pli_cu_stream)(void *)self->stream);
        (void)driver->cuStreamDestroy((pli_cu_stream)(void *)self->stream);
        pli_cuda_leave(self->backend, &scope);
    }
    self->backend->ops->event_destroy(self->backend, self->ready);
    pli_backend_destroy(self->backend);
}

static inline void gpu_note_loss(void *context, const char *message)
{
    gpu_rank *self = context;
    (void)snprintf(self->words, sizeof self->words, "%s", message);
}

static inline pl_status gpu_join(gpu_rank *self)
{
    gpu_ranks *all = self->all;
    const pli_gpu_comm_options options = {.base = all->bases[self->rank],
                                          .backend = self->backend,
                                          .nccl = all->library,
                                          .watchdog = all->watchdog,
                                          .host_bytes = GPUS_HOST_BYTES,
                                          .device_bytes = all->device_bytes,
                                          .allocator = device_allocator(self->backend),
                                          .n_ops = 16,
                                          .deadline_ns = all->deadline_ns,
                                          .report_loss = gpu_note_loss,
                                          .context = self};
    return pli_gpu_comm_create(&options, &self->comm);
}

static inline void *gpu_ranks_thread(void *memory)
{
    gpu_rank *self = memory;
    self->made = gpu_open(self);
    if (self->made == PL_OK) {
        self->made = gpu_join(self);
    } else { /* as a binding would: the others must not wait */
        pl_comm_abort(self->all->bases[self->rank], pl_error_message());
    }
    if (self->made == PL_OK)
        self->run(self);
    else
        (void)snprintf(self->words, sizeof self->words, "%s", pl_error_message());
    /* The world owns the base, if there is a world. */
    pl_comm_destroy(self->comm != NULL ? self->comm : self->all->bases[self->rank]);
    gpu_close(self);
    return NULL;
}

/* Returns how many ranks could not make the world; `ranks` may be NULL. */
static inline int gpu_ranks_run(gpu_ranks *all, void (*run)(gpu_rank *self),
                                gpu_rank *ranks)
{
    gpu_rank own[GPUS_MOST];
    pthread_t threads[GPUS_MOST];
    int n_failed = 0;
    ranks = ranks != NULL ? ranks : own;
    (void)pthread_barrier_init(&all->meeting, NULL, (unsigned)all->world_size);
    for (int r = 0; r < all->world_size; r++) {
        ranks[r] = (gpu_rank){.all = all,
                              .rank = r,
                              .random = draw_of(all->seed * GPUS_MOST + (uint64_t)r),
                              .run = run};
        if (pthread_create(&threads[r], NULL, gpu_ranks_thread, &ranks[r]) != 0)
            exit(2);
    }
    for (int r = 0; r < all->world_size; r++)
        (void)pthread_join(threads[r], NULL);
    (void)pthread_barrier_destroy(&all->meeting);
    for (int r = 0; r < all->world_size; r++)
        n_failed += ranks[r].made != PL_OK;
    return n_failed;
}

/* Start, run and end, for a world that every rank must be able to make. */
static inline void gpu_ranks_run_world(gpu_ranks *all, void (*run)(gpu_rank *self))
{
    gpu_rank ranks[GPUS_MOST];
    if (!gpu_ranks_start(all))
        return;
    if (!CHECK(gpu_ranks_run(all, run, ranks) == 0))
        for (int r = 0; r < all->world_size; r++)
            CHECK_MORE("seed %d, rank %d: %s", (int)all->seed, r, ranks[r].words);
    gpu_ranks_end(all);
}

/* A test with all ranks on one host, with one on each host, and with two on each. */
#define TEST_ON_HOSTS(name)                                                            \
    TEST_BY(name, void, {                                                              \
        for (gpu_ranks_per_host = 0; gpu_ranks_per_host <= 2; gpu_ranks_per_host++)    \
            name##_by();                                                               \
        gpu_ranks_per_host = 0;                                                        \
    })

enum { N_SCHEDULES = 3 };
static const fake_schedule schedules[] = {FAKE_RANDOM, FAKE_EARLY, FAKE_LATE};

/* A test that each rank runs, in n_worlds worlds.  Their size and schedule may depend
 * on `seed`, which begins at 1.  `options` are statements about the world, `all`. */
#define GPU_WORLDS_WITH(n_worlds, world_size, schedule, options, run)                  \
    for (uint64_t seed = 1; seed <= (n_worlds); seed++) {                              \
        gpu_ranks all = gpu_ranks_of((int)(world_size), seed, schedule);               \
        options;                                                                       \
        gpu_ranks_run_world(&all, run);                                                \
    }
#define GPU_WORLDS(n_worlds, world_size, schedule, run)                                \
    GPU_WORLDS_WITH(n_worlds, world_size, schedule, (void)0, run)
#define GPU_TEST_WITH(n_worlds, world_size, schedule, options, name)                   \
    TEST_BY(name, gpu_rank *self,                                                      \
            GPU_WORLDS_WITH(n_worlds, world_size, schedule, options, name##_by))
#define GPU_TEST(n_worlds, world_size, schedule, name)                                 \
    TEST_BY(name, gpu_rank *self, GPU_WORLDS(n_worlds, world_size, schedule, name##_by))
#define GPU_TEST_ON_HOSTS(n_worlds, world_size, schedule, name)                        \
    static void name##_on(gpu_rank *self);                                             \
    TEST_ON_HOSTS(name)                                                                \
    {                                                                                  \
        GPU_WORLDS(n_worlds, world_size, schedule, name##_on)                          \
    }                                                                                  \
    static void name##_on(gpu_rank *self)

/* ---- operations ----------------------------------------------------------------- */

/* Writes this rank's range, and guards on both sides, on the user's stream. */
static inline int gpu_fill(gpu_rank *self, const pl_op *op, unsigned seed)
{
    char range[GPUS_BYTES];
    const size_t n_bytes = op->n_elems * pl_dtype_bytes(op->dtype);
    char *to = (char *)pli_comm_memory(self->comm, op->offset_bytes) - OPS_GUARD_BYTES;
    ops_put(self->comm, op, seed, range + OPS_GUARD_BYTES);
    return CHECK_OK(pli_cuda_write(self->backend, to, range,
                                   n_bytes + 2 * OPS_GUARD_BYTES, self->stream));
}

/* How much of the operation's result is wrong for later work on the user's stream. */
static inline size_t gpu_n_wrong(gpu_rank *self, const pl_op *op, unsigned seed)
{
    char range[GPUS_BYTES];
    const size_t n_bytes = op->n_elems * pl_dtype_bytes(op->dtype);
    const char *from =
        (char *)pli_comm_memory(self->comm, op->offset_bytes) - OPS_GUARD_BYTES;
    if (!CHECK_OK(pli_cuda_read(self->backend, range, from,
                                n_bytes + 2 * OPS_GUARD_BYTES, self->stream)))
        return SIZE_MAX;
    return ops_n_wrong(self->comm, op, seed, range + OPS_GUARD_BYTES);
}

static inline void gpu_check(gpu_rank *self, const pl_op *op, unsigned seed)
{
    if (!ops_are_right(self->comm, op, gpu_n_wrong(self, op, seed)))
        CHECK_MORE("seed %d", (int)self->all->seed);
}

/* The same for 100 float32 at an address that the world may have left. */
static inline void gpu_check_kept(gpu_rank *self, const pl_op *op, const void *at,
                                  unsigned seed)
{
    float values[100];
    CHECK_OK(pli_cuda_read(self->backend, values, at, sizeof values, self->stream));
    for (size_t i = 0; i < 100; i++)
        if (!CHECK(
                value_is(values, PL_F32, i,
                         ops_expected(op, seed, self->all->world_size, self->rank, i))))
            return;
}

/* Issues op after the work on the user's stream. */
static inline pl_status gpu_issue_op(gpu_rank *self, const pl_op *op, pl_ticket *out)
{
    pl_status st = PL_OK;
    const pli_order order = {.ready = self->ready};
    PL_TRY(self->backend->ops->event_record(self->backend, self->ready, self->stream));
    PL_TRY(pli_comm_issue_ordered(self->comm, op, &order, out));
done:
    return st;
}

/* Whether enqueued operations finish, without a wait in the driver: the user's stream
 * waits for them, and the host polls it. */
static inline int gpu_await_stream(gpu_rank *self, int64_t most_ns)
{
    const int64_t begin = pli_now_ns();
    int is_done = 0;
    if (!CHECK_OK(
            self->backend->ops->event_record(self->backend, self->ready, self->stream)))
        return 0;
    while (!is_done && pli_now_ns() - begin < most_ns) {
        (void)self->backend->ops->event_is_done(self->backend, self->ready, &is_done);
        pli_sleep_ns(PLI_MS);
    }
    return is_done;
}

/* Waits for a host operation: the ranks agree that the step is over. */
static inline pl_status gpu_agree_on_end(gpu_rank *self)
{
    pl_status st = PL_OK;
    const pl_op op = {.kind = PL_BARRIER, .ends_step = 1};
    PL_TRY(do_op(self->comm, &op));
    PL_TRY(pli_comm_order(self->comm, self->stream));
done:
    return st;
}

/* ---- steps of one mean ---------------------------------------------------------- */

static const pl_op mean = {.kind = PL_ALL_REDUCE,
                           .reduction = PL_MEAN,
                           .dtype = PL_F32,
                           .offset_bytes = GPUS_HOST_BYTES + OPS_GUARD_BYTES,
                           .n_elems = 100};

/* The host waits only for the peers' hosts. */
static inline pl_status gpu_step(gpu_rank *self)
{
    pl_status st = PL_OK;
    pl_ticket ticket = 0;
    PL_TRY(gpu_issue_op(self, &mean, &ticket));
    PL_TRY(gpu_agree_on_end(self));
done:
    return st;
}

/* Copies the mean on the user's stream. */
static inline pl_status gpu_copy_mean(gpu_rank *self, void *out)
{
    const pl_move move = {.to = out,
                          .from = pli_comm_memory(self->comm, mean.offset_bytes),
                          .dtype = mean.dtype,
                          .n_elems = mean.n_elems};
    return self->backend->ops->copy(self->backend, &move, 1, self->stream);
}

static inline void gpu_end_world(gpu_rank *self)
{
    pl_comm_destroy(self->comm);
    self->comm = self->all->bases[self->rank] = NULL;
}

/* Call on every rank: leaves a failed world for a new one. */
static inline int gpu_renew_world(gpu_rank *self)
{
    gpu_ranks *all = self->all;
    pl_comm *failed = self->comm;
    CHECK_OK(failed->device->check_means(failed));
    if (pthread_barrier_wait(&all->meeting) == PTHREAD_BARRIER_SERIAL_THREAD)
        all->has_next = gpu_ranks_make_bases(all);
    (void)pthread_barrier_wait(&all->meeting);
    self->comm = NULL;
    const int is_made = all->has_next && CHECK_OK(gpu_join(self));
    pl_comm_destroy(failed);
    return is_made;
}

static inline CUstream gpu_user_stream(const gpu_rank *self)
{
    return (CUstream)(void *)self->stream;
}

/* Captures a step as torch does it: in every thread, calls that a capture forbids fail.
 * The caller has entered the backend; NULL on failure. */
static inline CUgraphExec gpu_capture_step(gpu_rank *self)
{
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    /* Work before a capture is not part of it. */
    if (!CHECK(cuStreamBeginCapture(gpu_user_stream(self), 0) == 0) ||
        !CHECK_OK(pli_comm_order(self->comm, self->stream)) ||
        !CHECK_OK(gpu_step(self)))
        return NULL;
    CHECK(cuStreamEndCapture(gpu_user_stream(self), &graph) == 0);
    CHECK(cuGraphInstantiate(&exec, graph, 0) == 0);
    CHECK(cuGraphDestroy(graph) == 0);
    return exec;
}

#endif
