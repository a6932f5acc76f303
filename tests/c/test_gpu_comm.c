/* test_gpu_comm.c - worlds of GPUs: operations, order, memory, graphs, ends.
 *
 * All on the fake, in many orders: a missing wait is a wrong number.
 */
#include "gpu_ranks.h"
#include "nccl/gpu_comm_state.h"

/* ---- numbers -------------------------------------------------------------------- */

static pl_op draw_op(draw *it, int world_size)
{
    pl_op op = {0};
    do {
        op.kind = (pl_op_kind)draw_below(it, PL_BARRIER);
        op.dtype = (pl_dtype)draw_below(it, PL_N_DTYPES);
        op.reduction = (pl_reduction)draw_below(it, PL_MAX);
    } while (ops_reduces(op.kind) &&
             (op.dtype == PL_I16 || !ops_is_allowed(op.dtype, op.reduction)));
    op.root = (int)draw_below(it, (size_t)world_size);
    op.n_elems = draw_below(it, draw_below(it, 3) == 0 ? 300 : 40);
    if (op.kind == PL_ALL_GATHER)
        op.n_elems *= (size_t)world_size;
    return op;
}

/* Several operations in flight on separate ranges; then all are checked. */
static void run_random_steps(gpu_rank *self)
{
    draw shared = draw_of(self->all->seed); /* all ranks issue the same */
    for (unsigned step = 0; step < 3; step++) {
        pl_op ops[3];
        pl_ticket ticket = 0, before = 0;
        size_t at = GPUS_HOST_BYTES + OPS_GUARD_BYTES;
        for (unsigned k = 0; k < 3; k++) {
            ops[k] = draw_op(&shared, self->all->world_size);
            ops[k].offset_bytes = at;
            at += ops[k].n_elems * pl_dtype_bytes(ops[k].dtype) + 63;
            at = at / 64 * 64 + 2 * OPS_GUARD_BYTES;
            if (!CHECK(at < GPUS_BYTES) || !gpu_fill(self, &ops[k], step * 3 + k) ||
                !CHECK_OK(gpu_issue_op(self, &ops[k], &ticket)))
                return;
            CHECK(ticket >= before);
            before = ticket;
        }
        draw_rest(&self->random, 100000);
        if (!CHECK_OK(gpu_agree_on_end(self)))
            return;
        for (unsigned k = 0; k < 3; k++)
            gpu_check(self, &ops[k], step * 3 + k);
    }
}

TEST_ON_HOSTS(operations_have_their_outcome_in_any_order_of_things)
{
    for (uint64_t seed = 1; seed <= (IS_SANITIZED ? 12 : 24); seed++)
        for (int s = 0; s < N_SCHEDULES; s++) {
            gpu_ranks all = gpu_ranks_of(1 + (int)(seed % 4), seed, schedules[s]);
            gpu_ranks_run_world(&all, run_random_steps);
        }
}

/* ---- memory --------------------------------------------------------------------- */

static int one_step(gpu_rank *self, unsigned seed)
{
    if (!gpu_fill(self, &mean, seed) || !CHECK_OK(gpu_step(self)))
        return 0;
    gpu_check(self, &mean, seed);
    return 1;
}

GPU_TEST_ON_HOSTS(1, 1, FAKE_EARLY, a_step_neither_allocates_nor_waits_for_the_device)
{
    static const char *const names[] = {"cuMemAlloc", "cuMemFree", "cuEventCreate",
                                        "cuStreamSynchronize"};
    int before[4];
    if (!one_step(self, 1) || !CHECK_OK(gpu_agree_on_end(self)))
        return;
    for (int k = 0; k < 4; k++)
        before[k] = fake_count(names[k]);
    for (int n = 0; n < 200; n++)
        if (!CHECK_OK(gpu_step(self)))
            return;
    for (int k = 0; k < 4; k++)
        CHECK(fake_count(names[k]) == before[k]);
    (void)gpu_agree_on_end(self); /* before another rank ends its world */
}

/* ---- checks --------------------------------------------------------------------- */

GPU_TEST(2, seed, FAKE_RANDOM, what_no_device_can_do_is_refused_and_changes_nothing)
{
    pl_ticket ticket = 0;
    pl_op op = mean;
    op.offset_bytes = GPUS_HOST_BYTES - 64;
    CHECK_FAILS(pl_comm_issue(self->comm, &op, &ticket), PL_EINVAL,
                "partly on the host");
    op = mean;
    op.reduction = PL_MAX;
    CHECK(pl_comm_issue(self->comm, &op, &ticket) == PL_EINVAL);
    op.dtype = PL_I32;
    CHECK(pl_comm_issue(self->comm, &op, &ticket) == PL_EINVAL);
    op.reduction = PL_MEAN;
    CHECK(pl_comm_issue(self->comm, &op, &ticket) == PL_EINVAL);
    op.reduction = PL_SUM;
    op.dtype = PL_I16;
    CHECK_FAILS(pl_comm_issue(self->comm, &op, &ticket), PL_EINVAL, "int16");
    op = mean;
    op.n_elems = GPUS_BYTES;
    CHECK(pl_comm_issue(self->comm, &op, &ticket) == PL_EINVAL);
    CHECK(pl_comm_wait(self->comm, 1000000, 0) == PL_EINVAL);
    (void)one_step(self, 3); /* still works */
}

TEST(a_base_without_room_for_the_words_is_refused)
{
    pl_comm *base = NULL;
    pl_comm *comm = NULL;
    pl_backend *backend = NULL;
    const pli_cuda_options device = {.driver = fake_path()};
    fake_reset(NULL);
    if (!CHECK_OK(pli_cuda_backend_create(&device, &backend)) ||
        !CHECK_OK(local_create(1, 4096, RANKS_DEADLINE_NS, &base)))
        return;
    pli_gpu_comm_options options = {.base = base,
                                    .backend = backend,
                                    .host_bytes = 4096,
                                    .device_bytes = 4096,
                                    .allocator = device_allocator(backend),
                                    .n_ops = 1,
                                    .deadline_ns = RANKS_DEADLINE_NS};
    CHECK(pli_gpu_comm_create(&options, &comm) == PL_EINVAL);
    options.host_bytes = 100;
    CHECK(pli_gpu_comm_create(&options, &comm) == PL_EINVAL);
    options.host_bytes = 0;
    CHECK_OK(pli_gpu_comm_create(&options, &comm));
    pl_comm_destroy(comm != NULL ? comm : base);
    fake_torch_settle();
    pli_backend_destroy(backend);
    CHECK(fake_live_objects() == 0);
}

/* ---- graphs --------------------------------------------------------------------- */

static void capture_and_replay(gpu_rank *self)
{
    pli_cuda_scope scope;
    if (!one_step(self, 1) || !CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CUgraphExec exec = gpu_capture_step(self);
    CHECK_OK(pli_comm_order(self->comm, self->stream)); /* waits for no captured work */
    for (unsigned k = 2; k < 5; k++) {
        (void)gpu_fill(self, &mean, k);
        CHECK(cuGraphLaunch(exec, gpu_user_stream(self)) == 0);
        gpu_check(self, &mean, k);
        pli_sleep_ns(*(const int64_t *)self->all->context);
        CHECK_OK(pl_comm_progress(self->comm));
    }
    (void)one_step(self, 5); /* works as before the capture */
    CHECK_OK(gpu_agree_on_end(self));
    CHECK(cuGraphExecDestroy(exec) == 0);
    pli_cuda_leave(self->backend, &scope);
}

TEST_ON_HOSTS(steps_can_be_captured_and_replayed)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        gpu_ranks all =
            gpu_ranks_of(1 + (int)(seed % 3), seed, schedules[seed / 2 % 3]);
        /* One world pauses past its deadline: its watchdog finds nothing late. */
        const int is_slow = seed == 5 && all.per_host == 0;
        int64_t rest_ns = (is_slow ? 900 : 1) * PLI_MS;
        if (is_slow)
            all.deadline_ns = 2000 * PLI_MS;
        all.context = &rest_ns;
        gpu_ranks_run_world(&all, capture_and_replay);
    }
}

/* The last rank's host leaves while others wait for its GPU in a replay, which their
 * hosts do not follow. */
static void replay_while_a_host_goes(gpu_rank *self)
{
    pli_cuda_scope scope;
    if (!one_step(self, 1) || !CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CUgraphExec exec = gpu_capture_step(self);
    if (self->rank == self->all->world_size - 1) {
        pl_comm_leave(self->comm);
    } else {
        CHECK(cuGraphLaunch(exec, gpu_user_stream(self)) == 0);
        CHECK(gpu_await_stream(self, RANKS_DEADLINE_NS / 2)); /* it is aborted */
        CHECK_FAILS(pl_comm_progress(self->comm), PL_EPEER, "died or left");
    }
    CHECK(cuGraphExecDestroy(exec) == 0);
    pli_cuda_leave(self->backend, &scope);
}

TEST(who_waits_in_a_replay_is_let_go_where_another_host_goes)
{
    for (gpu_ranks_per_host = 1; gpu_ranks_per_host <= 2; gpu_ranks_per_host++) {
        gpu_ranks all = gpu_ranks_of(1 + gpu_ranks_per_host, 1, FAKE_LATE);
        gpu_ranks_run_world(&all, replay_while_a_host_goes);
    }
    gpu_ranks_per_host = 0;
}

/* A user's graph outlives the world, which failed before, or ends well: NCCL ends no
 * communicator while a graph holds operations of it, and may need longer than the world
 * waits. */
static void end_before_the_graph(gpu_rank *self)
{
    pli_cuda_scope scope;
    if (!one_step(self, 1) || !CHECK_OK(pli_cuda_enter(self->backend, &scope)))
        return;
    CUgraphExec exec = gpu_capture_step(self);
    if (self->all->seed % 2 != 0)
        pl_comm_abort(self->comm, "a test's reasons");
    gpu_end_world(self);
    CHECK(cuGraphExecDestroy(exec) == 0);
    pli_cuda_leave(self->backend, &scope);
}

TEST(a_world_ends_whose_operations_a_graph_still_holds)
{
    GPU_WORLDS_WITH(4, 2, schedules[seed % 3], all.fake.abort_ms = seed > 2 ? 300 : 0,
                    end_before_the_graph)
}

/* NCCL is slow to end rank 0's communicator, and the watchdog checks meanwhile. */
static void end_while_the_watchdog_looks(gpu_rank *self)
{
    atomic_int *n_ended = self->all->context;
    if (self->rank == 0) {
        end_before_the_graph(self);
        atomic_store(n_ended, 1);
    } else if (one_step(self, 1) && CHECK_OK(gpu_step(self))) {
        while (atomic_load(n_ended) == 0)
            pli_sleep_ns(PLI_MS);
        CHECK_OK(pl_comm_progress(self->comm));
    }
}

TEST_ON_HOSTS(a_rank_that_ends_well_has_failed_no_step_of_the_others)
{
    atomic_int n_ended = 0;
    gpu_ranks all = gpu_ranks_of(2, 2, FAKE_LATE);
    all.context = &n_ended;
    all.deadline_ns = 5000 * PLI_MS; /* rank 1's last operation never finishes */
    gpu_ranks_run_world(&all, end_while_the_watchdog_looks);
}

/* ---- the end -------------------------------------------------------------------- */

/* The host does not wait for the last step before its world ends: the user's stream
 * copies out of the world's memory in its turn, much later. */
static void end_behind_a_step(gpu_rank *self)
{
    void *out = NULL;
    const size_t n_bytes = mean.n_elems * pl_dtype_bytes(mean.dtype);
    if (!CHECK_OK(self->backend->ops->alloc(self->backend, n_bytes, &out)))
        return;
    const int is_well = gpu_fill(self, &mean, 7) && CHECK_OK(gpu_step(self)) &&
                        CHECK_OK(gpu_copy_mean(self, out));
    gpu_end_world(self);
    if (is_well)
        gpu_check_kept(self, &mean, out, 7);
    self->backend->ops->free(self->backend, out);
}

GPU_TEST_ON_HOSTS(12, 1 + seed % 4, seed % 4 == 0 ? FAKE_RANDOM : FAKE_LATE,
                  a_world_that_ends_well_has_done_its_last_step)
{
    end_behind_a_step(self);
    if (!CHECK(self->words[0] == '\0'))
        CHECK_MORE("%s", self->words);
}

/* A device that has finished no operation before done_at_ns, and the next n_late ones
 * each 100 ms after the one before. */
static _Atomic(const pl_backend_ops *) quick_ops; /* the same for all devices */
static pl_backend_ops slow_ops[GPUS_MOST];
static _Atomic int64_t done_at_ns;
static atomic_int n_late;

static pl_status is_done_at_last(pl_backend *backend, pl_event *event, int *out)
{
    pl_status st = PL_OK;
    *out = 0;
    if (pli_now_ns() >= atomic_load(&done_at_ns))
        st = atomic_load(&quick_ops)->event_is_done(backend, event, out);
    if (*out && atomic_fetch_sub(&n_late, 1) > 0)
        atomic_store(&done_at_ns, pli_now_ns() + 100 * PLI_MS);
    return st;
}

/* The world has no watchdog: a thread of it would read the tables meanwhile. */
static void slow_down(gpu_rank *self)
{
    pl_backend_ops *slow = &slow_ops[self->rank];
    atomic_store(&quick_ops, self->backend->ops);
    *slow = *self->backend->ops;
    slow->event_is_done = is_done_at_last;
    self->backend->ops = slow;
}

static void run_slow_worlds(uint64_t n_worlds, void (*run)(gpu_rank *self))
{
    GPU_WORLDS_WITH(n_worlds, 2, FAKE_LATE, all.has_watchdog = 0, run);
}

/* The operations together take the device longer than the deadline, but none alone. */
static void end_behind_many_operations(gpu_rank *self)
{
    pl_ticket ticket = 0;
    slow_down(self);
    for (int k = 0; k < 10; k++)
        CHECK_OK(gpu_issue_op(self, &mean, &ticket));
    CHECK_OK(gpu_agree_on_end(self));
    ((pli_gpu_comm *)(void *)self->comm)->deadline_ns = 1500 * PLI_MS;
    gpu_end_world(self);
    if (!CHECK(self->words[0] == '\0'))
        CHECK_MORE("%s", self->words);
}

TEST(a_world_waits_at_its_end_for_each_operation_as_long_as_its_deadline)
{
    atomic_store(&n_late, 20);
    run_slow_worlds(1, end_behind_many_operations);
    atomic_store(&n_late, 0);
}

/* The world's memory can be freed from then on. */
static void note_loss_and_finish(void *context, const char *message)
{
    gpu_note_loss(context, message);
    atomic_store(&done_at_ns, 0);
}

static void end_beyond_the_deadline(gpu_rank *self)
{
    pli_gpu_comm *comm = (pli_gpu_comm *)(void *)self->comm;
    atomic_store(&done_at_ns, pli_now_ns() + 2 * RANKS_DEADLINE_NS);
    if (self->rank == 0)
        slow_down(self);
    CHECK_OK(gpu_step(self));
    if (self->rank == 0) {
        /* Only the end has a short deadline: a loaded machine may be slow before. */
        comm->deadline_ns = 300 * PLI_MS;
        comm->report_loss = note_loss_and_finish;
        const int64_t begin = pli_now_ns();
        gpu_end_world(self);
        CHECK(pli_now_ns() - begin <
              8000 * PLI_MS); /* not as long as after a failure */
        CHECK(strstr(self->words, "rank 0: the all-reduce of 100 float32") != NULL &&
              strstr(self->words, "has not finished on the device") != NULL);
    } else {
        pl_status st = PL_OK;
        while (st == PL_OK)
            st = pl_comm_progress(self->comm);
        CHECK(st == PL_EPEER && error_has("has not finished on the device"));
    }
}

TEST(means_that_are_lost_at_a_worlds_end_are_reported_to_all)
{
    run_slow_worlds(2, end_beyond_the_deadline);
}

/* Rank 1 leaves before rank 0's device has finished the step that both have taken. */
static void lose_the_means_of_a_step(gpu_rank *self)
{
    atomic_store(&done_at_ns, pli_now_ns() + 2 * RANKS_DEADLINE_NS);
    if (self->rank == 0)
        slow_down(self);
    CHECK_OK(gpu_step(self));
    if (self->rank == 1)
        return;
    CHECK_OK(self->comm->device->check_means(self->comm));
    while (pli_comm_check_peers(self->comm) == PL_OK)
        pli_sleep_ns(PLI_MS);
    CHECK_FAILS(self->comm->device->check_means(self->comm), PL_EPEER,
                "rank 0: means of a finished step were lost on the device");
    CHECK_SAYS("start again from what was saved (rank 0: rank 1");
    atomic_store(&done_at_ns, 0);
}

TEST(no_new_world_may_follow_one_that_has_lost_means)
{
    run_slow_worlds(2, lose_the_means_of_a_step);
}

/* Rank 0 leaves while rank 1's device is still at the same, old operation. */
static void leave_before_a_late_device(gpu_rank *self)
{
    const int64_t done_ns = atomic_load(&done_at_ns);
    if (self->rank == 1)
        slow_down(self);
    if (!CHECK_OK(gpu_step(self)))
        return;
    while (pli_now_ns() < done_ns + (self->rank == 0 ? -700 : 100) * PLI_MS) {
        if (self->rank == 1)
            pli_gpu_comm_watch(self->comm);
        pli_sleep_ns(10 * PLI_MS);
    }
    CHECK_OK(pl_comm_progress(self->comm));
}

TEST_ON_HOSTS(a_device_may_finish_its_part_after_another_rank_has_left)
{
    atomic_store(&done_at_ns, pli_now_ns() + 3200 * PLI_MS);
    run_slow_worlds(1, leave_before_a_late_device);
}
