/* test_hierarchy.c - worlds of several hosts. */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/alloc.h"
#include "hosts.h"
#include "ops.h"
#include "small_steps.h"

enum {
    MOST_ELEMS = 20000, /* float64: more than is sent in one part between three hosts */
    N_RANGES = 8,
    RANGE_ELEMS = 3000,
};
static const size_t large_elems = (size_t)8 * RANGE_ELEMS;

static const hosts worlds[] = {
    {.n_hosts = 2, .n_ranks = {1, 1}},       {.n_hosts = 2, .n_ranks = {2, 2}},
    {.n_hosts = 2, .n_ranks = {2, 1}},       {.n_hosts = 2, .n_ranks = {1, 3}},
    {.n_hosts = 3, .n_ranks = {1, 1, 1}},    {.n_hosts = 3, .n_ranks = {3, 1, 2}},
    {.n_hosts = 4, .n_ranks = {2, 2, 2, 2}}, {.n_hosts = 5, .n_ranks = {1, 2, 1, 3, 1}},
};
enum { N_WORLDS = sizeof worlds / sizeof worlds[0] };

static hosts world_of(size_t k)
{
    hosts it = worlds[k % N_WORLDS];
    it.deadline_ns = RANKS_DEADLINE_NS;
    it.is_narrow = k % 2 == 1;
    return it;
}

/* Runs in the first n worlds; the context is the world itself. */
static void run_worlds(size_t n, size_t arena_bytes, void (*run)(rank_job *job))
{
    for (size_t k = 0; k < n; k++) {
        hosts it = world_of(k);
        hosts_run(&it, arena_bytes, run, &it, k);
    }
}

/* A test that each rank runs. */
#define HOSTS_TEST(n_worlds, arena_bytes, name)                                        \
    TEST_BY(name, rank_job *job, run_worlds(n_worlds, arena_bytes, name##_by))

/* ---- operations ----------------------------------------------------------------- */

HOSTS_TEST(N_WORLDS, ops_arena_bytes(MOST_ELEMS),
           every_rank_of_every_host_gets_the_result)
{
    static const pl_op_kind kinds[] = {PL_ALL_REDUCE, PL_ALL_GATHER, PL_BROADCAST,
                                       PL_BARRIER};
    static const size_t sizes[] = {0, 1, 17, 1000, MOST_ELEMS};
    unsigned seed = 0;
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        for (int dtype = 0; dtype < PL_N_DTYPES; dtype++) {
            for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
                const size_t n = sizes[s];
                pl_op op = {.kind = kinds[k],
                            .dtype = (pl_dtype)dtype,
                            .reduction = (pl_reduction)(seed % PL_N_REDUCTIONS),
                            .root = (int)(seed % (unsigned)job->world_size),
                            .offset_bytes = 2 * OPS_GUARD_BYTES,
                            .n_elems = n};
                if (op.kind == PL_ALL_GATHER)
                    op.n_elems = n / (size_t)job->world_size * (size_t)job->world_size;
                if (!ops_is_allowed(op.dtype, op.reduction))
                    op.reduction = PL_SUM;
                seed++;
                if (!CHECK_OK(ops_run(job->comm, &op, seed)))
                    return;
            }
        }
    }
}

/* If hosts have unequal numbers of ranks, no rank may count twice: in this mean, twice
 * a value is seen. */
static void average_large_halves(rank_job *job)
{
    const pl_op op = {
        .kind = PL_ALL_REDUCE, .reduction = PL_MEAN, .dtype = PL_F16, .n_elems = 100};
    const uint16_t largest = 0x7b00; /* 57344 */
    uint16_t *range = (void *)job->comm->arena;
    for (size_t i = 0; i < op.n_elems; i++)
        range[i] = largest;
    CHECK_OK(do_op(job->comm, &op));
    for (size_t i = 0; i < op.n_elems; i++)
        CHECK(range[i] == largest);
}

TEST(a_mean_over_unequal_hosts_does_not_overflow)
{
    const hosts it = {
        .n_hosts = 2, .n_ranks = {6, 1}, .deadline_ns = RANKS_DEADLINE_NS};
    hosts_run(&it, 4096, average_large_halves, NULL, 1);
}

static pl_op drawn_op(draw *shared, size_t range, int world_size)
{
    static const pl_op_kind kinds[] = {PL_ALL_REDUCE, PL_ALL_REDUCE, PL_ALL_REDUCE,
                                       PL_BROADCAST,  PL_ALL_GATHER, PL_BARRIER};
    const size_t range_bytes = ops_arena_bytes(RANGE_ELEMS);
    pl_op op = {.kind = kinds[draw_below(shared, 6)],
                .dtype = (pl_dtype)draw_below(shared, PL_N_DTYPES),
                .reduction = (pl_reduction)draw_below(shared, PL_N_REDUCTIONS),
                .root = (int)draw_below(shared, (size_t)world_size),
                .offset_bytes = range * range_bytes + 2 * OPS_GUARD_BYTES,
                .n_elems = draw_below(shared, RANGE_ELEMS)};
    if (op.kind == PL_ALL_GATHER)
        op.n_elems -= op.n_elems % (size_t)world_size;
    if (!ops_is_allowed(op.dtype, op.reduction))
        op.reduction = PL_SUM;
    op.is_followed = draw_below(shared, 2) == 0;
    return op;
}

/* Several operations in flight, some of which follow one another; each rank draws its
 * own waits and pauses. */
static void do_many(rank_job *job)
{
    draw shared = draw_of(*(const uint64_t *)job->context);
    for (int round = 0; round < 12; round++) {
        pl_op ops[N_RANGES];
        pl_ticket tickets[N_RANGES];
        const size_t n = 1 + draw_below(&shared, N_RANGES);
        for (size_t k = 0; k < n; k++) {
            ops[k] = drawn_op(&shared, k, job->world_size);
            if (k + 1 == n)
                ops[k].is_followed = 0;
            ops_fill(job->comm, &ops[k], (unsigned)(round * N_RANGES + (int)k));
        }
        for (size_t k = 0; k < n; k++) {
            draw_rest(&job->random, PLI_MS);
            if (!CHECK_OK(pl_comm_issue(job->comm, &ops[k], &tickets[k])))
                return;
            if (draw_below(&job->random, 2) == 0)
                CHECK_OK(pl_comm_progress(job->comm));
            if (!ops[k].is_followed && draw_below(&job->random, 3) == 0 &&
                !CHECK_OK(wait_through(job->comm, tickets[k])))
                return;
        }
        if (!CHECK_OK(wait_through(job->comm, tickets[n - 1])))
            return;
        for (size_t k = 0; k < n; k++)
            ops_check(job->comm, &ops[k], (unsigned)(round * N_RANGES + (int)k));
    }
}

TEST(operations_in_flight_do_not_disturb_one_another)
{
    const uint64_t n_seeds = IS_SANITIZED ? 16 : 64;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        const hosts it = world_of(seed);
        uint64_t shared = seed;
        hosts_run(&it, N_RANGES * ops_arena_bytes(RANGE_ELEMS), do_many, &shared, seed);
    }
}

TEST(steps_have_exact_means)
{
    const uint64_t n_seeds = IS_SANITIZED ? 8 : 16;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        const hosts world = world_of(seed);
        pl_step_size size;
        if (CHECK_OK(arrays_measure(&model, hosts_world_size(&world), &size)))
            hosts_run(&world, size.arena_bytes, take_three_steps, NULL, seed);
    }
}

/* ---- what is refused ------------------------------------------------------------ */

static pl_op mean_of(size_t n_elems)
{
    return (pl_op){.kind = PL_ALL_REDUCE,
                   .reduction = PL_MEAN,
                   .dtype = PL_F32,
                   .offset_bytes = 2 * OPS_GUARD_BYTES,
                   .n_elems = n_elems};
}

static void be_refused(rank_job *job)
{
    pl_op op = mean_of(10);
    pl_ticket ticket = 0;
    CHECK_FAILS(pl_comm_wait(job->comm, 1, 0), PL_EINVAL, "ticket 1, but only 0");
    op.kind = PL_REDUCE;
    CHECK(pl_comm_issue(job->comm, &op, &ticket) == PL_EUNSUPPORTED);
    op = mean_of(10);
    op.dtype = PL_I32;
    CHECK_FAILS(pl_comm_issue(job->comm, &op, &ticket), PL_EINVAL, "cannot be reduced");
    op = mean_of(10);
    op.is_followed = 1;
    CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
    CHECK_FAILS(pl_comm_wait(job->comm, ticket, 0), PL_EINVAL,
                "issue the operations that follow it");
    op.is_followed = 0;
    op.offset_bytes += 4096;
    CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
    CHECK(ticket == 2);
    CHECK_OK(wait_through(job->comm, ticket));
    CHECK_OK(wait_through(job->comm, 1));
    CHECK_OK(pli_comm_check_peers(job->comm));
    CHECK(!pli_comm_is_group_comm(job->comm));
    for (int k = 0; k < HOSTS_OPS; k++) {
        op = mean_of(0);
        op.is_followed = 1;
        CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
    }
}

TEST(a_bad_call_is_refused_and_the_world_stays_usable)
{
    const hosts it = world_of(1);
    hosts_run(&it, 1 << 16, be_refused, NULL, 1);
}

/* ---- failures ------------------------------------------------------------------- */

/* A step of several operations, checked; returns 0 if it fails. */
static int do_step(rank_job *job, unsigned seed, int n_ops)
{
    pl_ticket ticket = 0;
    pl_op ops[N_RANGES];
    for (int k = 0; k < n_ops; k++) {
        ops[k] = mean_of(k % 2 == 0 ? RANGE_ELEMS : large_elems);
        ops[k].offset_bytes += (size_t)k * ops_arena_bytes(large_elems);
        ops[k].is_followed = k % 3 == 0 && k + 1 < n_ops;
        ops[k].ends_step = k + 1 == n_ops;
        ops_fill(job->comm, &ops[k], seed + (unsigned)k);
        if (pl_comm_issue(job->comm, &ops[k], &ticket) != PL_OK)
            return 0;
        draw_rest(&job->random, PLI_MS / 4);
    }
    if (wait_through(job->comm, ticket) != PL_OK)
        return 0;
    for (int k = 0; k < n_ops; k++)
        ops_check(job->comm, &ops[k], seed + (unsigned)k);
    return 1;
}

/* Some ranks lag: the deadline applies to silence, and no rank is silent. */
static void lag(rank_job *job)
{
    for (unsigned step = 0; step < 16; step++) {
        draw_rest(&job->random, 240 * PLI_MS);
        CHECK(do_step(job, step, 1));
    }
}

TEST(a_rank_that_is_slow_fails_nobody)
{
    hosts world = world_of(1);
    world.deadline_ns = 1000 * PLI_MS;
    hosts_run(&world, N_RANGES * ops_arena_bytes(large_elems), lag, NULL, 3);
}

/* A rank's part of a step that it, or another rank, gives up: it may have issued some
 * operations. */
static void fail_step(rank_job *job, unsigned seed, int is_culprit)
{
    const int n_issued = (int)draw_below(&job->random, N_RANGES - 1);
    if (is_culprit) {
        pl_ticket ticket = 0;
        for (int k = 0; k < n_issued; k++) {
            pl_op op = mean_of(k % 2 == 0 ? RANGE_ELEMS : large_elems);
            op.offset_bytes += (size_t)k * ops_arena_bytes(large_elems);
            op.is_followed = k % 3 == 0;
            ops_fill(job->comm, &op, seed + (unsigned)k);
            if (pl_comm_issue(job->comm, &op, &ticket) != PL_OK)
                break; /* another culprit was first */
        }
        draw_rest(&job->random, PLI_MS);
        pl_comm_abort(job->comm, "the dog ate it");
    } else {
        CHECK(!do_step(job, seed, N_RANGES));
        if (!CHECK(error_has("the dog ate it")))
            CHECK_MORE("rank %d: %s", job->rank, pl_error_message());
    }
}

static void fail_in_a_step(rank_job *job)
{
    draw shared = draw_of(*(const uint64_t *)job->context);
    const int culprit = (int)draw_below(&shared, (size_t)job->world_size);
    const int other = (int)draw_below(&shared, (size_t)job->world_size);
    const unsigned n_well = (unsigned)draw_below(&shared, 3);
    for (unsigned step = 0; step < n_well; step++)
        if (!CHECK(do_step(job, step, N_RANGES)))
            CHECK_MORE("rank %d: %s", job->rank, pl_error_message());
    draw_rest(&job->random, PLI_MS);
    fail_step(job, 100, job->rank == culprit || job->rank == other);
    check_stays_failed(job->comm, PL_EPEER, "the dog ate it");
}

TEST(a_failure_reaches_every_rank_of_every_host_and_stands)
{
    const uint64_t n_seeds = IS_SANITIZED ? 60 : 200;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        const hosts it = world_of(seed);
        uint64_t shared = seed;
        hosts_run(&it, N_RANGES * ops_arena_bytes(large_elems), fail_in_a_step, &shared,
                  seed);
    }
}

typedef struct interruption {
    verdicts found;
    uint64_t seed;
    int64_t patience_ns; /* how long the culprit waits for the step's end */
} interruption;

/* A rank fails while it waits for the end of a step, or just after. */
static void be_interrupted(rank_job *job)
{
    const interruption *what = job->context;
    verdicts *all = job->context; /* its first member */
    draw shared = draw_of(what->seed);
    pl_op op = mean_of(17 + draw_below(&shared, 3) * (large_elems / 2));
    pl_ticket ticket = 0;
    op.ends_step = 1;
    CHECK(do_step(job, 1, 3));
    if (job->rank == all->culprit) {
        CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
        const pl_status st = pl_comm_wait(job->comm, ticket, what->patience_ns);
        CHECK(st == PL_OK || st == PL_EAGAIN);
        all->has_ended[job->rank] = st == PL_OK;
        pl_comm_abort(job->comm, "the dog ate it");
    } else {
        draw_rest(&job->random, PLI_MS / 2);
        all->has_ended[job->rank] = do_op(job->comm, &op) == PL_OK;
        /* If it failed, a peer may still use this rank's arena: it is not filled. */
        if (all->has_ended[job->rank])
            CHECK(!do_step(job, 2, 2));
    }
    check_stays_failed(job->comm, PL_EPEER, "the dog ate it");
}

/* The notice of the failure may overtake what others still lack of the step. */
TEST(a_step_that_one_rank_has_taken_is_taken_by_all_though_that_rank_fails)
{
    const uint64_t n_seeds = IS_SANITIZED ? 80 : 400;
    unsigned n_ended = 0;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        const hosts it = world_of(seed / 7);
        const int n = hosts_world_size(&it);
        interruption what = {.found.culprit = (int)(seed % (uint64_t)n),
                             .seed = seed,
                             .patience_ns = seed % 2 == 0
                                                ? RANKS_DEADLINE_NS
                                                : (int64_t)(seed * 7919 % PLI_MS)};
        hosts_run(&it, N_RANGES * ops_arena_bytes(large_elems), be_interrupted, &what,
                  seed);
        verdicts_check(&what.found, n);
        n_ended += (unsigned)what.found.has_ended[what.found.culprit];
    }
    printf("%u culprits had taken the step\n", n_ended);
}

/* Another thread may learn that a host's next step has failed before this one sees that
 * its own step is over. */
static void see_the_end_late(rank_job *job)
{
    pl_op op = mean_of(17);
    pl_ticket ticket = 0;
    op.ends_step = 1;
    if (!CHECK_OK(pl_comm_issue(job->comm, &op, &ticket)))
        return;
    if (job->rank == 0) {
        CHECK_OK(wait_through(job->comm, ticket));
        pl_comm_abort(job->comm, "the dog ate it");
    } else {
        while (!job->comm->ops->is_done(job->comm, ticket))
            if (pl_comm_progress(job->comm) != PL_OK && /* rank 0 may have gone on */
                !CHECK(job->comm->ops->is_done(job->comm, ticket)))
                return;
        while (pli_comm_query(job->comm, PLI_QUERY_STEP) == PL_OK)
            pli_sleep_ns(PLI_MS);
        CHECK_OK(pl_comm_wait(job->comm, ticket, 0));
        CHECK(!do_step(job, 2, 2));
    }
}

TEST(a_step_that_is_over_is_so_for_who_looks_later)
{
    for (int n_ranks = 1; n_ranks <= 2; n_ranks++) {
        const hosts it = {.n_hosts = 2,
                          .n_ranks = {n_ranks, n_ranks},
                          .deadline_ns = RANKS_DEADLINE_NS};
        hosts_run(&it, N_RANGES * ops_arena_bytes(large_elems), see_the_end_late, NULL,
                  1);
    }
}

/* The last host leaves after another has failed: that is known beside the failure. */
HOSTS_TEST(N_WORLDS, 2 * ops_arena_bytes(large_elems),
           a_host_that_goes_after_a_failure_is_known_to_be_gone)
{
    const hosts *it = job->context;
    const int first_of_last = job->world_size - it->n_ranks[it->n_hosts - 1];
    CHECK(do_step(job, 1, 2));
    if (job->rank == 0)
        pl_comm_abort(job->comm, "the dog ate it");
    else
        CHECK(!do_step(job, 2, 2));
    if (job->rank >= first_of_last) {
        draw_rest(&job->random, 20 * PLI_MS);
        pl_comm_leave(job->comm);
    } else if (job->rank == 0) {
        while (pli_comm_query(job->comm, PLI_QUERY_GONE) == PL_OK)
            pli_sleep_ns(PLI_MS);
        CHECK_SAYS("host", "died or left");
        CHECK(pli_comm_query(job->comm, PLI_QUERY_WORLD) == PL_EPEER);
        check_stays_failed(job->comm, PL_EPEER, "the dog ate it");
    }
}

/* The last host leaves after one operation, with an exception's message or without. */
HOSTS_TEST(4 * N_WORLDS, 1 << 16, a_host_that_leaves_early_is_named)
{
    const pl_op op = mean_of(500);
    const hosts *it = job->context;
    const int first_of_last = job->world_size - it->n_ranks[it->n_hosts - 1];
    CHECK_OK(do_op(job->comm, &op));
    if (job->rank >= first_of_last) {
        draw_rest(&job->random, 20 * PLI_MS);
        if (it->is_narrow)
            pli_comm_set_failure_message(job->comm, "the dog ate it");
        pl_comm_leave(job->comm);
        return;
    }
    CHECK(do_op(job->comm, &op) == PL_EPEER);
    CHECK_SAYS("host");
    CHECK(error_has("the dog ate it") == it->is_narrow);
    check_stays_failed(job->comm, PL_EPEER, "host");
}

/* Leaving does not fail a rank that has all it needs. */
HOSTS_TEST(4 * N_WORLDS, 1 << 16, a_host_that_leaves_after_its_part_fails_nobody)
{
    pl_op op = mean_of(5000);
    pl_ticket ticket = 0;
    for (int k = 0; k < 3; k++) {
        CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
        op.offset_bytes += 5000 * sizeof(float);
    }
    draw_rest(&job->random, 20 * PLI_MS);
    CHECK_OK(wait_through(job->comm, ticket));
    pl_comm_leave(job->comm);
    pl_comm_leave(job->comm);
}

static void differ(rank_job *job)
{
    const int odd = *(const int *)job->context;
    const pl_op op = mean_of(job->rank >= odd ? 501 : 500);
    pl_status st = do_op(job->comm, &op);
    CHECK(st == PL_EMISMATCH || st == PL_EPEER);
    CHECK_SAYS("another operation");
}

TEST(another_operation_on_another_host_is_an_error_on_all)
{
    for (size_t k = 0; k < N_WORLDS; k++) {
        const hosts it = world_of(k);
        int odd = hosts_world_size(&it) - it.n_ranks[it.n_hosts - 1];
        hosts_run(&it, 1 << 16, differ, &odd, k);
    }
}

static void stall(rank_job *job)
{
    const pl_op op = mean_of(500);
    const hosts *it = job->context;
    pl_ticket ticket = 0;
    if (job->rank >= it->n_ranks[0]) {
        pli_sleep_ns(2 * it->deadline_ns);
        return;
    }
    CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
    const pl_status st = wait_through(job->comm, ticket);
    CHECK(job->rank == 0 ? st == PL_ETIMEOUT : st == PL_EPEER);
    CHECK_SAYS("host", "kept this rank waiting");
}

TEST(a_host_that_does_not_come_is_named_at_the_deadline)
{
    for (size_t k = 0; k < N_WORLDS; k++) {
        hosts it = world_of(k);
        it.deadline_ns = 1000 * PLI_MS;
        hosts_run(&it, 1 << 16, stall, &it, k);
    }
}

/* Three hosts divide a range; the last has sent its parts first, and is silent. */
typedef struct silence {
    hosts world;
    atomic_int has_begun;
} silence;

static void fall_silent(rank_job *job)
{
    silence *it = job->context;
    const pl_op op = mean_of(MOST_ELEMS);
    pl_ticket ticket = 0;
    CHECK(do_step(job, 1, 2));
    if (job->rank == job->world_size - 1) {
        CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
        atomic_store(&it->has_begun, 1);
        pli_sleep_ns(3 * it->world.deadline_ns);
        return;
    }
    while (!atomic_load(&it->has_begun))
        pli_sleep_ns(PLI_MS);
    CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
    CHECK(wait_through(job->comm, ticket) != PL_OK);
    if (!CHECK(error_has("rank 2 (host 2) kept this rank waiting")))
        CHECK_MORE("rank %d: %s", job->rank, pl_error_message());
}

TEST(who_waits_for_a_silent_host_is_not_blamed_for_it)
{
    for (int narrow = 0; narrow < 2; narrow++) {
        silence it = {.world = {.n_hosts = 3,
                                .n_ranks = {1, 1, 1},
                                .deadline_ns = 1000 * PLI_MS,
                                .is_narrow = narrow}};
        hosts_run(&it.world, 4 * ops_arena_bytes(large_elems), fall_silent, &it, 1);
    }
}

/* ---- construction --------------------------------------------------------------- */

TEST(what_makes_no_hierarchy_leaves_its_parts_to_their_owner)
{
    const int n_ranks[] = {1, 1};
    pl_comm *inner = NULL;
    pl_comm *out = NULL;
    if (!CHECK_OK(local_create(1, 64, RANKS_DEADLINE_NS, &inner)))
        return;
    pli_hierarchy_options options = {
        .world_size = 2, .n_hosts = 2, .n_ranks = n_ranks, .inner = inner, .n_ops = 4};
    CHECK_FAILS(pli_hierarchy_create(&options, &out), PL_EINVAL, "links");
    options.n_hosts = 1;
    CHECK_FAILS(pli_hierarchy_create(&options, &out), PL_EINVAL, "1 hosts");
    options.n_hosts = 2;
    options.world_size = 3;
    CHECK_FAILS(pli_hierarchy_create(&options, &out), PL_EINVAL, "hosts have");
    CHECK(out == NULL);
    pl_comm_destroy(inner);
}

TEST(links_that_cannot_be_made_close_no_descriptor_of_others)
{
    const char *const names[] = {"rank 0 (host 0)", "rank 1 (host 1)"};
    const int fds[2 * PLI_N_LINK_STREAMS] = {0};
    const pli_links_options options = {.n_hosts = 2, .fds = fds, .names = names};
    const int spare =
        open("/dev/null", O_RDONLY); /* it is 0 if the caller closed that */
    pli_links *links = NULL;
    (void)setenv("PACELINE_LINK_TIMEOUT", "soon", 1);
    CHECK_FAILS(pli_links_create(&options, &links), PL_EINVAL, "PACELINE_LINK_TIMEOUT");
    (void)unsetenv("PACELINE_LINK_TIMEOUT");
    CHECK(links == NULL);
    CHECK(fcntl(0, F_GETFD) >= 0);
    (void)close(spare);
}
