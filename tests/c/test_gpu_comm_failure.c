/* test_gpu_comm_failure.c - worlds of GPUs in which a part fails: every rank gets an
 * error, none hangs, nothing is leaked, and a new world works. */
#include "gpu_ranks.h"

#include <sys/wait.h>

static const pl_op short_mean = {.kind = PL_ALL_REDUCE,
                                 .reduction = PL_MEAN,
                                 .dtype = PL_BF16,
                                 .offset_bytes = GPUS_HOST_BYTES + 8192,
                                 .n_elems = 300};

static void say(gpu_rank *self, pl_status st)
{
    self->made = st;
    (void)snprintf(self->words, sizeof self->words, "%s",
                   st == PL_OK ? "" : pl_error_message());
}

/* A step of two means; not waited for if it fails. */
static pl_status try_step(gpu_rank *self, uint64_t step)
{
    pl_status st = PL_OK;
    pl_ticket ticket = 0;
    pli_comm_record_activity(self->comm, PL_BACKWARD, step);
    PL_TRY(gpu_issue_op(self, &mean, &ticket));
    PL_TRY(gpu_issue_op(self, &short_mean, &ticket));
    PL_TRY(gpu_agree_on_end(self));
done:
    return st;
}

/* ---- every call fails once ------------------------------------------------------ */

/* Returns only when no rank can be waiting any more. */
static void three_steps(gpu_rank *self)
{
    pl_status st = PL_OK;
    for (uint64_t step = 1; st == PL_OK && step <= 3; step++)
        st = try_step(self, step);
    if (st == PL_OK)
        st = self->comm->device->renew(self->comm);
    if (st == PL_OK)
        st = try_step(self, 4);
    say(self, st);
    if (st != PL_OK)
        pl_comm_abort(self->comm, self->words); /* as a reducer would */
}

/* Whatever failed, a rank that did not finish has a reason. */
static void check_ends(const gpu_ranks *all, const gpu_rank *ranks, const char *what,
                       int n)
{
    for (int r = 0; r < all->world_size; r++)
        if (!CHECK(ranks[r].made == PL_OK || ranks[r].words[0] != '\0'))
            CHECK_MORE("%s %d: rank %d has no words", what, n, r);
}

static int fail_nth(const char *function, int n, int code)
{
    gpu_ranks all = gpu_ranks_of(2, (uint64_t)n, schedules[n % 3]);
    gpu_rank ranks[GPUS_MOST];
    all.per_host = n % 2;
    all.deadline_ns = 2000 * PLI_MS;
    all.may_keep = strcmp(function, "cuCtxGetCurrent") == 0 ||
                   strcmp(function, "cuThreadExchangeStreamCaptureMode") == 0;
    if (!gpu_ranks_start(&all))
        return 0;
    const int n_before = fake_count(function);
    fake_fail(function, n, code);
    (void)gpu_ranks_run(&all, three_steps, ranks);
    const int is_hit = fake_count(function) - n_before >= n;
    check_ends(&all, ranks, function, n);
    gpu_ranks_end(&all);
    return is_hit;
}

TEST(every_call_of_the_driver_and_of_nccl_may_fail)
{
    static const struct {
        const char *name;
        int code;
        int most; /* failing calls, tried one by one */
    } calls[] = {
        {"cuMemAlloc", 2, 40},
        {"cuEventCreate", 2, 10},
        {"cuEventRecord", 719, 60},
        {"cuEventQuery", 719, 20},
        {"cuStreamWaitEvent", 719, 40},
        {"cuStreamIsCapturing", 719, 30},
        {"cuLaunchKernel", 719, 40},
        {"cuMemcpyHtoDAsync", 719, 10},
        {"cuCtxGetCurrent", 201, 300},
        {"cuThreadExchangeStreamCaptureMode", 201, 60},
        {"cuStreamCreateWithPriority", 2, 10},
        {"ncclGetUniqueId", 2, 4},
        {"ncclCommInitRank", 2, 4},
        {"ncclCommGetAsyncError", 3, 40},
        {"ncclAllReduce", 1, 20},
        {"ncclBroadcast", 1, 10},
        {"ncclCommFinalize", 3, 4},
    };
    for (size_t k = 0; k < sizeof calls / sizeof calls[0]; k++)
        for (int n = 1; n <= calls[k].most; n += 1 + n / (IS_SANITIZED ? 1 : 2))
            if (!fail_nth(calls[k].name, n, calls[k].code))
                break;
}

static void fail_each_of_ours(enum pli_fault_kind kind)
{
    int is_hit = 1;
    for (long n = 1; is_hit && CHECK(n < 200); n++) {
        gpu_ranks all = gpu_ranks_of(2, (uint64_t)n, schedules[n % 3]);
        gpu_rank ranks[GPUS_MOST];
        all.per_host = (int)n % 2;
        all.deadline_ns = 2000 * PLI_MS;
        if (!gpu_ranks_start(&all))
            return;
        pli_fault_arm(kind, n);
        (void)gpu_ranks_run(&all, three_steps, ranks);
        is_hit = pli_fault_count(kind) >= n;
        pli_fault_arm(kind, 0);
        check_ends(&all, ranks, "allocation or system call", (int)n);
        gpu_ranks_end(&all);
    }
}

TEST(every_allocation_and_system_call_may_fail)
{
    fail_each_of_ours(PLI_FAULT_ALLOC);
    fail_each_of_ours(PLI_FAULT_SYSCALL);
}

/* ---- a step fails, and a new world follows -------------------------------------- */

enum { N_ROUNDS = 6 };

/* In each round one rank fails somewhere in a step. */
static void fail_and_go_on(gpu_rank *self)
{
    draw shared = draw_of(self->all->seed);
    for (unsigned round = 0; round < N_ROUNDS; round++) {
        const int culprit = (int)draw_below(&shared, (size_t)self->all->world_size);
        const unsigned n_good = (unsigned)draw_below(&shared, 3);
        pl_status st = PL_OK;
        pl_ticket ticket = 0;
        for (unsigned k = 0; k < n_good; k++) {
            if (!gpu_fill(self, &mean, round * 4 + k) ||
                !CHECK_OK(try_step(self, round)))
                return;
            gpu_check(self, &mean, round * 4 + k);
        }
        if (self->rank == culprit) {
            const size_t n = draw_below(&self->random, 3); /* operations of the step */
            for (size_t k = 0; k < n; k++)
                CHECK_OK(gpu_issue_op(self, k == 0 ? &mean : &short_mean, &ticket));
            draw_rest(&self->random, 3 * PLI_MS);
            pl_comm_abort(self->comm, "a step of mine");
        } else {
            while (st == PL_OK) /* others may learn of it late */
                st = try_step(self, round);
            if (!CHECK(st == PL_EPEER &&
                       blames(pl_error_message(), self->rank, culprit) &&
                       error_has("a step of mine")))
                CHECK_MORE("rank %d of %d, %d a host: %s", self->rank,
                           self->all->world_size, self->all->per_host,
                           pl_error_message());
        }
        /* Nothing can be issued any more, and the first failure stays. */
        if (self->rank != culprit)
            pl_comm_abort(self->comm, "of no interest");
        CHECK_FAILS(gpu_issue_op(self, &mean, &ticket), PL_EPEER, "a step of mine");
        if (!gpu_renew_world(self))
            return;
        if (!gpu_fill(self, &mean, round * 4 + 3) || !CHECK_OK(try_step(self, round)))
            return;
        gpu_check(self, &mean, round * 4 + 3);
    }
}

TEST_ON_HOSTS(a_failed_world_stays_failed_and_a_new_one_works)
{
    GPU_WORLDS(8, 1 + seed % 4, schedules[seed % 3], fail_and_go_on);
}

/* The device is one step behind the host, and the next step fails at once. */
GPU_TEST_ON_HOSTS(4, 2 + seed % 2, FAKE_LATE,
                  the_means_of_a_step_that_is_over_outlive_the_failure_of_the_next)
{
    for (unsigned round = 0; round < 3; round++) {
        if (!gpu_fill(self, &mean, round) || !CHECK_OK(try_step(self, round)))
            return;
        if (self->rank == (int)round % self->all->world_size)
            pl_comm_abort(self->comm, "at once");
        while (pl_comm_progress(self->comm) == PL_OK)
            pli_sleep_ns(PLI_MS);
        gpu_check(self, &mean, round);
        if (!gpu_renew_world(self))
            return;
    }
}

/* Rank 1 sleeps after each host operation that it issues; meanwhile rank 0 sees the
 * operation's end and fails in the next one, and rank 1's watchdog detects that. */
static pl_comm_ops slow_ops;
static const pl_comm_ops *fast_ops;
static atomic_int slow_ms; /* 100: one check of the watchdog */

static pl_status issue_and_sleep(pl_comm *comm, const pl_op *op, const pli_order *order,
                                 pl_ticket *out)
{
    const pl_status st = fast_ops->issue(comm, op, order, out);
    pli_sleep_ns(atomic_load(&slow_ms) * PLI_MS);
    return st;
}

static void fail_behind_what_is_over(gpu_rank *self)
{
    if (self->rank == 1)
        atomic_store(&slow_ms, 250);
    if (!gpu_fill(self, &mean, 1) || !CHECK_OK(try_step(self, 1)))
        return;
    if (self->rank == 0)
        pl_comm_abort(self->comm, "at once");
    while (pl_comm_progress(self->comm) == PL_OK)
        pli_sleep_ns(PLI_MS);
    gpu_check(self, &mean, 1);
    CHECK_OK(self->comm->device->check_means(self->comm));
}

TEST(what_is_over_on_one_host_is_so_for_who_is_slow_on_another)
{
    gpu_ranks all = gpu_ranks_of(2, 1, FAKE_RANDOM);
    all.per_host = 1;
    if (!gpu_ranks_start(&all))
        return;
    fast_ops = all.bases[1]->ops;
    slow_ops = *fast_ops;
    slow_ops.issue = issue_and_sleep;
    all.bases[1]->ops = &slow_ops;
    atomic_store(&slow_ms, 0);
    CHECK(gpu_ranks_run(&all, fail_behind_what_is_over, NULL) == 0);
    gpu_ranks_end(&all);
}

/* ---- the watchdog --------------------------------------------------------------- */

/* Rank 0 waits on the device for an operation that rank 1 never issues. */
static void wait_for_one_that_never_comes(gpu_rank *self)
{
    pl_ticket ticket = 0;
    atomic_int *is_over = self->all->context;
    CHECK_OK(try_step(self, 1));
    if (self->rank == 0) {
        pli_comm_record_activity(self->comm, PL_BACKWARD, 7);
        CHECK_OK(gpu_issue_op(self, &mean, &ticket));
        CHECK_OK(pli_comm_order(self->comm, self->stream));
        CHECK(gpu_await_stream(self, RANKS_DEADLINE_NS));
        say(self, pl_comm_progress(self->comm));
        CHECK(self->made == PL_ETIMEOUT &&
              error_has("rank 0: the all-reduce of 100 "
                        "float32 at byte 64") &&
              error_has("step 7"));
        CHECK(gpu_issue_op(self, &mean, &ticket) == PL_ETIMEOUT);
        atomic_store(is_over, 1);
    } else {
        gpu_await_stream(self, RANKS_DEADLINE_NS);
        while (atomic_load(is_over) == 0)
            pli_sleep_ns(PLI_MS);
        pl_status st = PL_OK;
        while (st == PL_OK)
            st = pl_comm_progress(self->comm);
        CHECK(st == PL_EPEER && blames(pl_error_message(), self->rank, 0) &&
              error_has("within the deadline"));
    }
    self->made = PL_OK;
}

TEST_ON_HOSTS(who_waits_on_the_device_is_let_go_at_the_deadline)
{
    atomic_int is_over = 0;
    gpu_ranks all = gpu_ranks_of(2, 1, schedules[gpu_ranks_per_host]);
    all.deadline_ns = 2000 * PLI_MS;
    all.context = &is_over;
    gpu_ranks_run_world(&all, wait_for_one_that_never_comes);
}

/* Rank 0's host sleeps, its device waits; rank 1 fails, and reports it. */
GPU_TEST_ON_HOSTS(3, 2, schedules[seed % 3],
                  who_waits_on_the_device_is_let_go_where_another_rank_fails)
{
    pl_ticket ticket = 0;
    CHECK_OK(try_step(self, 1));
    if (self->rank == 0) {
        CHECK_OK(gpu_issue_op(self, &mean, &ticket));
        CHECK_OK(pli_comm_order(self->comm, self->stream));
        CHECK(gpu_await_stream(self, RANKS_DEADLINE_NS));
        CHECK_FAILS(pl_comm_progress(self->comm), PL_EPEER, "no more");
    } else {
        pli_sleep_ns(20 * PLI_MS);
        pl_comm_abort(self->comm, "no more");
    }
}

/* The host of the last rank leaves after the world's work; rank 0's sleeps. */
static void sleep_while_another_host_goes(gpu_rank *self)
{
    pl_ticket ticket = 0;
    CHECK_OK(try_step(self, 1));
    if (self->rank == self->all->world_size - 1) {
        pl_comm_leave(self->comm);
        return;
    }
    CHECK_OK(gpu_issue_op(self, &mean, &ticket));
    CHECK_OK(pli_comm_order(self->comm, self->stream));
    CHECK(gpu_await_stream(self, RANKS_DEADLINE_NS / 2));
    CHECK_FAILS(pl_comm_progress(self->comm), PL_EPEER, "died or left");
}

TEST(who_waits_on_the_device_is_let_go_where_another_host_goes)
{
    for (gpu_ranks_per_host = 1; gpu_ranks_per_host <= 2; gpu_ranks_per_host++) {
        gpu_ranks all = gpu_ranks_of(1 + gpu_ranks_per_host, 1, FAKE_LATE);
        gpu_ranks_run_world(&all, sleep_while_another_host_goes);
    }
    gpu_ranks_per_host = 0;
}

static void meet_an_error_of_nccls(gpu_rank *self)
{
    pl_status st = PL_OK;
    CHECK_OK(try_step(self, 1));
    if (self->rank == 1)
        fake_fail("ncclCommGetAsyncError", 1, ncclRemoteError);
    for (uint64_t step = 2; st == PL_OK; step++) {
        st = try_step(self, step);
        pli_sleep_ns(PLI_MS);
    }
    say(self, st);
}

TEST_ON_HOSTS(an_error_that_nccl_has_later_ends_the_step_on_all_ranks)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        gpu_ranks all = gpu_ranks_of(2, seed, FAKE_EARLY);
        gpu_rank ranks[GPUS_MOST];
        int n_in_its_words = 0;
        if (!gpu_ranks_start(&all))
            return;
        CHECK(gpu_ranks_run(&all, meet_an_error_of_nccls, ranks) == 2);
        for (int r = 0; r < 2; r++)
            n_in_its_words += strstr(ranks[r].words, "remote process exited") != NULL;
        CHECK(n_in_its_words >= 1);
        gpu_ranks_end(&all);
    }
}

/* ---- ranks that do not fit together --------------------------------------------- */

static void issue_what_others_do_not(gpu_rank *self)
{
    pl_op op = mean;
    pl_ticket ticket = 0;
    if (self->rank == 1)
        op.n_elems = 50;
    CHECK_OK(gpu_issue_op(self, &op, &ticket));
    say(self, gpu_agree_on_end(self));
    CHECK(self->made == PL_EMISMATCH ||
          (gpu_ranks_are_apart(self->all) && self->made == PL_EPEER));
    CHECK_SAYS("another operation");
}

TEST_ON_HOSTS(ranks_that_issue_other_operations_on_the_device_are_told)
{
    gpu_ranks all = gpu_ranks_of(3, 1, FAKE_LATE);
    gpu_rank ranks[GPUS_MOST];
    if (!gpu_ranks_start(&all))
        return;
    CHECK(gpu_ranks_run(&all, issue_what_others_do_not, ranks) == 3);
    if (!gpu_ranks_are_apart(&all)) /* else the first host seen to differ is named */
        CHECK(blames(ranks[0].words, 0, 1));
    fake_forget_errors(); /* the fake's NCCL detects it too, if it gets there */
    gpu_ranks_end(&all);
}

/* ---- the end -------------------------------------------------------------------- */

GPU_TEST_ON_HOSTS(6, 2, schedules[seed % 3], a_world_ends_though_its_step_never_will)
{
    pl_ticket ticket = 0;
    CHECK_OK(try_step(self, 1));
    const int64_t begin = pli_now_ns();
    if (self->rank == 0)
        CHECK_OK(gpu_issue_op(self, &mean, &ticket));
    gpu_end_world(self);
    CHECK(pli_now_ns() - begin < RANKS_DEADLINE_NS / 3);
}

/* One rank ends its world while the others' live on. */
GPU_TEST_ON_HOSTS(12, 3, schedules[seed % 3],
                  who_ends_early_does_its_part_of_the_last_step)
{
    for (unsigned step = 1; step <= 3; step++) {
        if (!gpu_fill(self, &mean, step) || !CHECK_OK(try_step(self, step)))
            return;
        if (step == 3 && self->rank == 0)
            return; /* and destroys its world */
        draw_rest(&self->random, PLI_MS);
        gpu_check(self, &mean, step);
    }
}

GPU_TEST_ON_HOSTS(1, 1, FAKE_LATE, a_forked_child_touches_nothing)
{
    int how = 0;
    CHECK_OK(try_step(self, 1));
    const pid_t pid = fork();
    if (pid == 0) {
        (void)alarm(20);
        pli_watchdog_forget(self->all->watchdog);
        pl_comm_abort(self->comm, "no");
        pl_comm_destroy(self->comm);
        pli_watchdog_destroy(self->all->watchdog);
        _exit(fake_errors() == 0 ? 0 : 1);
    }
    CHECK(waitpid(pid, &how, 0) == pid && WIFEXITED(how) && WEXITSTATUS(how) == 0);
    CHECK_OK(try_step(self, 2));
}
