/* test_gpu_memory.c - a world's memory on its GPU: when it is deregistered and freed,
 * and where it is allocated when little is left. */
#include "gpu_ranks.h"

#include "nccl/gpu_memory.h"

/* Does what a further world of the process would do. */
static void make_and_end_a_pool(const gpu_rank *self)
{
    const pli_pool_options options = {
        .library = self->all->library, .backend = self->backend, .n_bytes = 256};
    pli_pool *pool = NULL;
    pli_block *block = NULL;
    if (CHECK_OK(pli_pool_create(&options, &pool)) &&
        CHECK_OK(pli_pool_take(pool, &block)))
        block->ref.release(&block->ref);
    pli_pool_close(pool);
}

/* ---- captures ------------------------------------------------------------------- */

/* Ends a world in the thread that captures `stream`, as the garbage collector may. */
static void end_in_a_capture(gpu_rank *self, CUstream stream)
{
    CUgraph graph = NULL;
    const int64_t n_bytes = fake_bytes_in_use(self->rank);
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == 0);
    gpu_end_world(self);
    const int is_reader = stream == gpu_user_stream(self);
    CHECK((fake_bytes_in_use(self->rank) == n_bytes) == is_reader);
    CHECK(cuStreamEndCapture(stream, &graph) == 0);
    CHECK(cuGraphDestroy(graph) == 0);
    make_and_end_a_pool(self);
    CHECK(fake_bytes_in_use(self->rank) == 0);
}

static void end_in_the_readers_capture(gpu_rank *self)
{
    if (CHECK_OK(gpu_step(self)))
        end_in_a_capture(self, gpu_user_stream(self));
}

static void end_in_anothers_capture(gpu_rank *self)
{
    CUstream other = NULL;
    pli_cuda_scope scope;
    if (!CHECK_OK(gpu_step(self)) || !CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING) == 0);
    pli_cuda_leave(self->backend, &scope);
    end_in_a_capture(self, other);
    CHECK(cuStreamDestroy(other) == 0);
}

TEST(a_world_that_ends_in_a_capture_does_not_spoil_it)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        gpu_ranks all = gpu_ranks_of(2, seed, seed % 2 != 0 ? FAKE_LATE : FAKE_RANDOM);
        gpu_ranks_run_world(&all, end_in_the_readers_capture);
        gpu_ranks_run_world(&all, end_in_anothers_capture);
    }
}

/* ---- work in flight ------------------------------------------------------------- */

/* Three gradients are kept, and dropped while the device is behind: two more blocks
 * than the one kept as a spare. */
GPU_TEST(9, 1 + seed % 3, FAKE_LATE,
         memory_is_deregistered_and_freed_behind_its_last_operation)
{
    pli_memory_ref *kept[3];
    for (int k = 0; k < 3; k++) {
        if (!CHECK_OK(gpu_step(self)))
            return;
        kept[k] = self->comm->device->retain_memory(self->comm);
        CHECK_OK(self->comm->device->renew(self->comm));
    }
    for (int k = 0; k < 3; k++)
        kept[k]->release(kept[k]);
    const int64_t n_most = fake_bytes_in_use(self->rank);
    CHECK_OK(self->comm->device->renew(self->comm));
    CHECK(fake_synchronize_all());
    for (int k = 0; k < 20; k++) /* a query may take time */
        CHECK_OK(self->comm->device->renew(self->comm));
    CHECK(fake_bytes_in_use(self->rank) == n_most / 2); /* one in use, one spare */
    CHECK_OK(gpu_agree_on_end(self));
}

static int is_behind(gpu_rank *self, int of_user)
{
    pl_stream *side = pli_cuda_side_stream(self->backend);
    return cuStreamQuery((CUstream)(void *)(of_user ? self->stream : side)) != 0;
}

/* A failed backward has left work on a user's stream, and no operation after it. */
static void end_behind_a_failed_step(gpu_rank *self)
{
    CUstream stream = NULL;
    pli_cuda_scope scope;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == 0);
    CHECK(cuMemsetD8Async(
              (CUdeviceptr)(uintptr_t)pli_comm_memory(self->comm, mean.offset_bytes), 0,
              64, stream) == 0);
    self->comm->device->follow(self->comm, (pl_stream *)(void *)stream);
    CHECK(is_behind(self, 0) && !is_behind(self, 1));
    gpu_end_world(self);
    CHECK(fake_bytes_in_use(self->rank) == 0);
    CHECK(cuStreamDestroy(stream) == 0);
    pli_cuda_leave(self->backend, &scope);
}

/* All captured work is in the graph. */
static void follow_a_capture(gpu_rank *self)
{
    CUstream stream = NULL;
    CUgraph graph = NULL;
    pli_cuda_scope scope;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == 0);
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED) == 0);
    const int n_records = fake_count("cuEventRecord");
    self->comm->device->follow(self->comm, (pl_stream *)(void *)stream);
    CHECK(fake_count("cuEventRecord") == n_records);
    CHECK(cuStreamEndCapture(stream, &graph) == 0);
    CHECK(cuGraphDestroy(graph) == 0);
    CHECK(cuStreamDestroy(stream) == 0);
    pli_cuda_leave(self->backend, &scope);
}

TEST(what_a_failed_step_left_comes_before_the_end)
{
    gpu_ranks all = gpu_ranks_of(2, 1, FAKE_LATE);
    gpu_ranks_run_world(&all, end_behind_a_failed_step);
    gpu_ranks_run_world(&all, follow_a_capture);
}

/* A view is read after its world's end, and dropped while the read is in flight. */
GPU_TEST(4, 2, seed % 2 != 0 ? FAKE_LATE : FAKE_RANDOM,
         a_view_that_outlives_its_world_is_freed_behind_its_reader)
{
    void *out = NULL;
    const size_t n_bytes = mean.n_elems * pl_dtype_bytes(mean.dtype);
    if (!CHECK_OK(self->backend->ops->alloc(self->backend, n_bytes, &out)) ||
        !CHECK_OK(gpu_step(self)))
        return;
    pli_memory_ref *view = self->comm->device->retain_memory(self->comm);
    const pl_move move = {.to = out,
                          .from = pli_comm_memory(self->comm, mean.offset_bytes),
                          .dtype = mean.dtype,
                          .n_elems = mean.n_elems};
    gpu_end_world(self);
    CHECK_OK(self->backend->ops->copy(self->backend, &move, 1, self->stream));
    view->release(view);
    self->backend->ops->free(self->backend, out);
    CHECK(fake_bytes_in_use(self->rank) == 0);
}

/* Of more streams than the pool keeps, the newest are known. */
GPU_TEST(1, 2, FAKE_LATE, memory_is_freed_behind_the_newest_readers)
{
    CUstream streams[2 * PLI_POOL_READERS];
    pli_cuda_scope scope;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    for (int i = 0; i < 2 * PLI_POOL_READERS; i++)
        CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING) == 0);
    if (CHECK_OK(gpu_step(self)))
        for (int i = 0; i < 2 * PLI_POOL_READERS; i++)
            CHECK_OK(pli_comm_order(self->comm, (pl_stream *)(void *)streams[i]));
    for (int i = 0; i < PLI_POOL_READERS; i++) /* streams no longer kept */
        CHECK(cuStreamDestroy(streams[i]) == 0);
    CHECK(cuMemsetD8Async(
              (CUdeviceptr)(uintptr_t)pli_comm_memory(self->comm, mean.offset_bytes), 0,
              64, streams[PLI_POOL_READERS]) == 0);
    gpu_end_world(self);
    for (int i = PLI_POOL_READERS; i < 2 * PLI_POOL_READERS; i++)
        CHECK(cuStreamDestroy(streams[i]) == 0);
    pli_cuda_leave(self->backend, &scope);
}

/* The user's stream is destroyed, without notice to the world. */
static void destroy_a_reader(gpu_rank *self)
{
    CUstream stream = NULL;
    pli_cuda_scope scope;
    if (!CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == 0);
    if (CHECK_OK(gpu_step(self)))
        CHECK_OK(pli_comm_order(self->comm, (pl_stream *)(void *)stream));
    CHECK(cuStreamSynchronize(stream) == 0);
    CHECK(cuStreamDestroy(stream) == 0);
    pli_cuda_leave(self->backend, &scope);
    gpu_end_world(self);
    CHECK(fake_bytes_in_use(self->rank) == 0);
}

TEST(a_reader_that_has_gone_does_not_keep_the_memory)
{
    gpu_ranks all = gpu_ranks_of(1, 1, FAKE_LATE);
    all.fake.quiet = 1;
    if (!gpu_ranks_start(&all))
        return;
    CHECK(gpu_ranks_run(&all, destroy_a_reader, NULL) == 0);
    /* There is no other way to detect it. */
    CHECK(fake_errors() == 1 && strstr(fake_error(0), "was used after its end") != 0);
    fake_forget_errors();
    gpu_ranks_end(&all);
}

/* ---- allocation ----------------------------------------------------------------- */

static atomic_int n_emptied;

static void empty_caches(void *context)
{
    (void)context;
    atomic_fetch_add(&n_emptied, 1);
    fake_empty_caches();
}

static void count_and_keep(void *context)
{
    (void)context;
    atomic_fetch_add(&n_emptied, 1);
}

typedef struct bench {
    pl_backend *backend;
    pli_nccl_library *library;
    pli_pool *pool;
} bench;

static int bench_open(bench *self, const fake_options *fake, size_t n_bytes,
                      void (*empty)(void *context))
{
    const pli_cuda_options device = {.driver = fake_path()};
    *self = (bench){0};
    atomic_store(&n_emptied, 0);
    fake_reset(fake);
    if (!CHECK_OK(pli_cuda_backend_create(&device, &self->backend)) ||
        !CHECK_OK(pli_nccl_library_open(fake_path(), &self->library)))
        return 0;
    const pli_pool_options options = {.library = self->library,
                                      .backend = self->backend,
                                      .n_bytes = n_bytes,
                                      .empty_caches = empty};
    return CHECK_OK(pli_pool_create(&options, &self->pool));
}

static void bench_close(bench *self)
{
    pli_pool_close(self->pool);
    pli_nccl_library_release(self->library);
    pli_backend_destroy(self->backend);
    CHECK(fake_live_objects() == 0);
    CHECK(fake_errors() == 0);
}

enum { ARENA = 1 << 20 };

TEST(caches_are_emptied_once_where_there_is_no_memory)
{
    bench it;
    pli_block *block = NULL;
    fake_options fake = fake_defaults();
    fake.capacity = 3 * ARENA / 2;
    fake.taken = ARENA;
    if (!bench_open(&it, &fake, ARENA, empty_caches))
        return;
    if (CHECK_OK(pli_pool_take(it.pool, &block)))
        block->ref.release(&block->ref);
    CHECK(atomic_load(&n_emptied) == 1);
    bench_close(&it);
    if (!bench_open(&it, &fake, ARENA, count_and_keep))
        return;
    CHECK_FAILS(pli_pool_take(it.pool, &block), PL_ENOMEM, "device 0 is out of memory",
                "1048576 bytes", "after torch.cuda.empty_cache()");
    CHECK(atomic_load(&n_emptied) == 1);
    bench_close(&it);
    if (!bench_open(&it, &fake, ARENA, NULL))
        return;
    CHECK(pli_pool_take(it.pool, &block) == PL_ENOMEM);
    CHECK(!error_has("empty_cache"));
    bench_close(&it);
}

/* Blocks of NCCL's allocator, by its version and the arena's size. */
static int n_of_nccl(int version, size_t n_bytes)
{
    bench it;
    pli_block *block = NULL;
    fake_options fake = fake_defaults();
    fake.nccl = version;
    fake.granularity = version < 22700 ? 512 << 20 : 2 << 20;
    if (!bench_open(&it, &fake, n_bytes, NULL))
        return -1;
    if (CHECK_OK(pli_pool_take(it.pool, &block)))
        block->ref.release(&block->ref);
    const int n = fake_count("ncclMemAlloc");
    bench_close(&it);
    return n;
}

TEST(small_arenas_are_not_of_an_nccl_that_rounds_far_up)
{
    CHECK(n_of_nccl(22105, ARENA) == 0);
    CHECK(n_of_nccl(22602, ARENA) == 0);
    CHECK(n_of_nccl(22602, 256 << 20) == 1);
    CHECK(n_of_nccl(22703, ARENA) == 1);
}

TEST(new_memory_is_zeros)
{
    bench it;
    pli_block *block = NULL, *other = NULL;
    char found[2][ARENA];
    fake_options fake = fake_defaults();
    if (!bench_open(&it, &fake, ARENA, NULL))
        return;
    pl_stream *side = pli_cuda_side_stream(it.backend);
    if (CHECK_OK(pli_pool_take(it.pool, &block)) &&
        CHECK_OK(pli_pool_take(it.pool, &other)) &&
        CHECK_OK(
            pli_cuda_read(it.backend, found[0], block->memory.address, ARENA, side)) &&
        CHECK_OK(
            pli_cuda_read(it.backend, found[1], other->memory.address, ARENA, side)))
        for (size_t i = 0; i < sizeof found; i++)
            if (!CHECK(((char *)found)[i] == 0))
                break;
    if (block != NULL)
        block->ref.release(&block->ref);
    if (other != NULL)
        other->ref.release(&other->ref);
    bench_close(&it);
}
