/* test_gpu_comm_hardware.c - NCCL on real machines: it blocks threads, connects ranks
 * in the first operation of a kind, sends after an operation is done, and needs memory
 * for all of that.
 */
#include "gpu_ranks.h"

enum { LARGE_BYTES = 640 << 10 };
#define SOON_NS ((1000 + 500 * TIMES_AS_LONG) * PLI_MS)

/* ---- threads that NCCL blocks --------------------------------------------------- */

typedef struct kept_inside {
    atomic_int n_over; /* ranks that may go on */
    int n_ops;         /* issued by rank 0 only */
    pl_op op;
} kept_inside;

/* Rank 0's thread is blocked by an operation that rank 1, which is well, never does. */
static void wait_inside(gpu_rank *self)
{
    kept_inside *it = self->all->context;
    pl_status st = PL_OK;
    pl_ticket ticket = 0;
    CHECK_OK(gpu_step(self));
    if (self->rank == 0) {
        for (int k = 0; k < it->n_ops && st == PL_OK; k++)
            st = gpu_issue_op(self, &it->op, &ticket);
        CHECK(st == PL_ETIMEOUT);
        atomic_store(&it->n_over, 1);
    }
    while (atomic_load(&it->n_over) == 0)
        pli_sleep_ns(PLI_MS);
    if (self->rank == 1)
        CHECK(pl_comm_progress(self->comm) == PL_EPEER &&
              blames(pl_error_message(), 1, 0));
    CHECK_OK(self->comm->device->check_means(self->comm));
}

/* A kind of operation that is not tried before steps, and one for which the device's
 * queue has no room. */
TEST(a_call_that_does_not_come_back_is_given_up_at_the_deadline)
{
    static const struct {
        pl_op_kind kind;
        int n_ops, depth;
    } rows[] = {{PL_REDUCE, 1, 0}, {PL_ALL_REDUCE, 100, 8}};
    for (uint64_t k = 0; k < 2; k++) {
        kept_inside it = {.n_ops = rows[k].n_ops, .op = mean};
        gpu_ranks all = gpu_ranks_of(2, k + 1, FAKE_RANDOM);
        it.op.kind = rows[k].kind;
        all.fake.queue_depth = rows[k].depth;
        all.deadline_ns = SOON_NS;
        all.context = &it;
        gpu_ranks_run_world(&all, wait_inside);
    }
}

static void issue_many(gpu_rank *self)
{
    pl_ticket ticket = 0;
    for (int k = 0; k < 50; k++)
        CHECK_OK(gpu_issue_op(self, &mean, &ticket));
    CHECK_OK(gpu_agree_on_end(self));
}

TEST(a_full_queue_is_waited_for)
{
    GPU_WORLDS_WITH(4, 2, FAKE_LATE, all.fake.queue_depth = 8, issue_many);
}

static void take_a_step(gpu_rank *self)
{
    CHECK_OK(gpu_step(self));
}

/* ---- construction --------------------------------------------------------------- */

static void must_not_run(gpu_rank *self)
{
    (void)self;
    CHECK(0);
}

/* Rank 1 never enters NCCL, and rank 0 gives up. */
static void *come_alone(void *memory)
{
    gpu_rank *self = memory;
    pl_comm *base = self->all->bases[self->rank];
    if (self->rank == 0 && CHECK_OK(gpu_open(self))) {
        const pli_nccl_options options = {.library = self->all->library,
                                          .backend = self->backend,
                                          .world_size = 2,
                                          .id = self->all->context,
                                          .deadline_ns = 50 * PLI_MS};
        pli_nccl *nccl = NULL;
        CHECK_OK(
            pli_nccl_new_id(self->all->library, self->backend, self->all->context));
        CHECK_FAILS(pli_nccl_create(&options, &nccl), PL_ETIMEOUT,
                    "meeting the other ranks");
    }
    gpu_close(self);
    pl_comm_destroy(base);
    return NULL;
}

TEST(a_thread_that_is_left_behind_takes_nothing_of_its_maker)
{
    char id[PLI_NCCL_ID_BYTES];
    gpu_ranks all = gpu_ranks_of(2, 1, FAKE_RANDOM);
    all.context = id;
    if (!gpu_ranks_start(&all))
        return;
    for (int r = 0; r < 2; r++) {
        gpu_rank rank = {.all = &all, .rank = r};
        (void)come_alone(&rank);
    }
    gpu_ranks_end(&all);
}

/* ---- connections ---------------------------------------------------------------- */

static pl_status prepare(gpu_rank *self)
{
    const pli_reduced_range range = {.offset_bytes = GPUS_HOST_BYTES,
                                     .least_bytes = 38, /* of bfloat16 */
                                     .most_bytes = self->all->device_bytes};
    const pli_order order = {.ready = self->ready};
    pl_status st = PL_OK;
    PL_TRY(self->backend->ops->event_record(self->backend, self->ready, self->stream));
    PL_TRY(self->comm->device->prepare(self->comm, &range, &order));
done:
    return st;
}

static void await_all(gpu_rank *self)
{
    atomic_int *n_here = self->all->context;
    (void)atomic_fetch_add(n_here, 1);
    while (atomic_load(n_here) % self->all->world_size != 0)
        pli_sleep_ns(100000);
}

/* Operations of each size that a bucket, or the model's broadcast, may have. */
GPU_TEST_WITH(2, 1 + seed, FAKE_LATE, atomic_int n_here = 0; all.context = &n_here;
              all.device_bytes = LARGE_BYTES, a_step_connects_nothing)
{
    static const size_t sizes[] = {1000, 20000, 70000, LARGE_BYTES / 4};
    if (!CHECK_OK(prepare(self)))
        return;
    await_all(self);
    const int n_before = fake_connections();
    CHECK(n_before > 0);
    for (size_t k = 0; k < 4; k++) {
        pl_ticket ticket = 0;
        pl_op op = mean;
        op.offset_bytes = GPUS_HOST_BYTES;
        op.n_elems = sizes[k];
        CHECK_OK(gpu_issue_op(self, &op, &ticket));
        op.kind = PL_BROADCAST;
        CHECK_OK(gpu_issue_op(self, &op, &ticket));
        CHECK_OK(gpu_agree_on_end(self));
    }
    await_all(self);
    CHECK(fake_connections() == n_before);
}

/* Only one rank enters the trial, until it gives up; the watchdog checks meanwhile. */
GPU_TEST_WITH(2, 2, FAKE_RANDOM, atomic_int n_here = 0; all.context = &n_here;
              all.deadline_ns = SOON_NS; all.fake.lazy_connect = 0;
              all.fake.abort_ms = 500, a_trial_that_is_given_up_is_told_by_its_reason)
{
    if (self->rank == 0) {
        CHECK_FAILS(prepare(self), PL_ETIMEOUT, "the first operations on the device");
    }
    await_all(self);
    if (self->rank == 1) {
        CHECK_FAILS(pl_comm_progress(self->comm), PL_EPEER,
                    "the first operations on the device");
    }
}

/* The stream reads the memory before the trial overwrites it, and not afterwards. */
GPU_TEST(4, 2, FAKE_LATE, a_trial_comes_behind_what_the_stream_still_reads)
{
    void *out = NULL;
    char values[400];
    if (!CHECK_OK(self->backend->ops->alloc(self->backend, sizeof values, &out)) ||
        !gpu_fill(self, &mean, 3) || !CHECK_OK(gpu_step(self)))
        return;
    CHECK_OK(gpu_copy_mean(self, out));
    CHECK_OK(prepare(self));
    CHECK_OK(pli_cuda_read(self->backend, values, out, sizeof values, self->stream));
    for (size_t i = 0; i < 100; i++)
        if (!CHECK(
                value_is(values, PL_F32, i,
                         ops_expected(&mean, 3, self->all->world_size, self->rank, i))))
            break;
    self->backend->ops->free(self->backend, out);
}

static void prepare_in_vain(gpu_rank *self)
{
    self->made = prepare(self);
    CHECK(self->made != PL_OK);
    (void)snprintf(self->words, sizeof self->words, "%s", pl_error_message());
    CHECK(pl_comm_progress(self->comm) != PL_OK);
}

/* Runs a world whose trial fails; returns how many ranks' messages contain `what`. */
static int fail_trial(gpu_ranks *all, void (*run)(gpu_rank *self), pl_status st,
                      const char *what)
{
    gpu_rank ranks[GPUS_MOST];
    int n_said = 0;
    int n_met = 0;
    if (!gpu_ranks_start(all))
        return 0;
    CHECK(gpu_ranks_run(all, run, ranks) == all->world_size);
    for (int r = 0; r < all->world_size; r++) {
        n_met += ranks[r].made == st;
        n_said += strstr(ranks[r].words, what) != NULL;
        if (strstr(ranks[r].words, what) == NULL)
            CHECK_MORE("rank %d: %s", r, ranks[r].words);
    }
    CHECK(n_met >= 1);
    gpu_ranks_end(all);
    return n_said;
}

/* The connections of every world fit, those of steps do not; or none fit. */
TEST(memory_that_a_connection_lacks_is_missed_at_construction)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        gpu_ranks all = gpu_ranks_of(2, seed, FAKE_RANDOM);
        all.device_bytes = LARGE_BYTES;
        all.fake.capacity = LARGE_BYTES + (9 << 20);
        all.fake.connect_bytes = 2 << 20;
        CHECK(fail_trial(&all, prepare_in_vain, PL_ENOMEM, "out of memory") == 2);
        all = gpu_ranks_of(2, seed, FAKE_RANDOM);
        all.fake.capacity = 1 << 20;
        all.fake.connect_bytes = 1 << 20;
        CHECK(fail_trial(&all, must_not_run, PL_ENOMEM, "out of memory") == 2);
    }
}

TEST(numbers_that_are_wrong_are_found_at_construction)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        gpu_ranks all = gpu_ranks_of(2, seed, FAKE_RANDOM);
        all.device_bytes = LARGE_BYTES;
        all.fake.corrupt_bytes = 128 << 10; /* small ones use another path */
        CHECK(fail_trial(&all, prepare_in_vain, PL_ESYS, "wrong numbers") == 2);
        all = gpu_ranks_of(2, seed, FAKE_RANDOM);
        all.fake.corrupt_bytes = 1;
        CHECK(fail_trial(&all, must_not_run, PL_ESYS, "wrong numbers") == 2);
    }
}

/* ---- one card ------------------------------------------------------------------- */

TEST_ON_HOSTS(ranks_on_one_card_are_told_what_to_do_by_every_nccl)
{
    static const struct {
        int nccl, is_shared, one_bus;
    } all_of[] = {{22809, 1, 0}, {23007, 1, 0}, {22809, 0, 1}};
    for (int k = 0; k < 3; k++) {
        gpu_ranks all = gpu_ranks_of(2, 1, FAKE_RANDOM);
        all.fake.nccl = all_of[k].nccl;
        all.fake.one_bus = all_of[k].one_bus;
        all.is_shared = all_of[k].is_shared;
        /* On several hosts one may only see that the other has gone. */
        CHECK(fail_trial(&all, must_not_run, PL_EINVAL, "torch.cuda.set_device") >=
              (gpu_ranks_are_apart(&all) ? 1 : 2));
    }
}

/* Since 2.30 the parts of a card are separate GPUs. */
TEST(parts_of_one_card_take_a_rank_each)
{
    gpu_ranks all = gpu_ranks_of(2, 1, FAKE_RANDOM);
    all.fake.nccl = 23007;
    all.fake.one_bus = 1;
    gpu_ranks_run_world(&all, issue_many);
}

/* ---- the end -------------------------------------------------------------------- */

static const int sending_versions[] = {21903, 22005, 22304, 22602, 22809};

/* Rank 0 ends its world when its device is done; its data still lies with the proxy,
 * and rank 1's device waits for it. */
GPU_TEST_WITH(10, 2, FAKE_LATE, atomic_int n_ended = 0; all.context = &n_ended;
              all.fake.nccl = sending_versions[seed % 5];
              all.fake.net = 1, who_ends_well_has_sent_all_that_its_peers_wait_for)
{
    atomic_int *n_ended = self->all->context;
    if (!gpu_fill(self, &mean, 5) || !CHECK_OK(gpu_step(self)))
        return;
    if (self->rank == 0) {
        gpu_end_world(self);
        atomic_store(n_ended, 1);
        return;
    }
    while (atomic_load(n_ended) == 0)
        pli_sleep_ns(PLI_MS);
    gpu_check(self, &mean, 5);
}

TEST(a_flush_that_takes_too_long_is_given_up)
{
    GPU_WORLDS_WITH(1, 2, FAKE_EARLY, all.fake.proxy_blocks = 1, take_a_step);
}
