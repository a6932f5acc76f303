/* test_local.c - operations between threads: results, order, and refusals.
 *
 * Failures are in test_local_failure.c.
 */
#include <limits.h>
#include <stdint.h>

#include "ops.h"
#include "ranks.h"

static const int world_sizes[] = {1, 2, 3, 4, 8};
enum {
    N_WORLD_SIZES = sizeof world_sizes / sizeof world_sizes[0],
    N_LARGE = IS_SANITIZED ? 20011 : 100003 /* elements */
};

/* ---- one operation at a time ---------------------------------------------------- */

/* Blocks must be whole: n elements per rank if there are blocks. */
static size_t n_elems_of(pl_op_kind kind, size_t n, int world_size)
{
    return kind == PL_ALL_GATHER ? n * (size_t)world_size : n;
}

static void do_one(rank_job *job, pl_op op, unsigned seed)
{
    op.offset_bytes = OPS_GUARD_BYTES + pl_dtype_bytes(op.dtype) * (seed % 5);
    op.root = (int)(seed % (unsigned)job->world_size);
    CHECK_OK(ops_run(job->comm, &op, seed));
}

static void do_every_kind_on(rank_job *job, pl_dtype dtype, size_t n, unsigned *seed)
{
    for (int kind = 0; kind < PL_BARRIER; kind++) {
        pl_op op = {.kind = (pl_op_kind)kind, .dtype = dtype};
        op.n_elems = n_elems_of(op.kind, n, job->world_size);
        for (int k = 0; k < PL_N_REDUCTIONS; k++) {
            op.reduction = (pl_reduction)k;
            if (ops_is_allowed(dtype, op.reduction) &&
                (ops_reduces(op.kind) || op.reduction == PL_SUM))
                do_one(job, op, ++*seed);
        }
    }
}

static void do_small_sizes(rank_job *job)
{
    static const size_t sizes[] = {0, 1, 63, 64, 65, 1000};
    unsigned seed = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (int d = 0; d < PL_N_DTYPES; d++)
            do_every_kind_on(job, (pl_dtype)d, sizes[s], &seed);
}

static void do_a_large_size(rank_job *job)
{
    static const pl_dtype dtypes[] = {PL_F32, PL_BF16, PL_C128, PL_I64};
    unsigned seed = 1000;
    for (int kind = 0; kind < PL_BARRIER; kind++) {
        const pl_dtype dtype = dtypes[kind % 4];
        const pl_op op = {.kind = (pl_op_kind)kind,
                          .reduction = value_is_integer(dtype) ? PL_SUM : PL_MEAN,
                          .dtype = dtype,
                          .n_elems =
                              n_elems_of((pl_op_kind)kind, N_LARGE, job->world_size)};
        do_one(job, op, ++seed);
    }
}

TEST(every_kind_dtype_and_reduction_is_exact_in_worlds_of_1_to_8)
{
    for (int i = 0; i < N_WORLD_SIZES; i++)
        ranks_run_world(world_sizes[i], ops_arena_bytes(8 * 1000 + 5), do_small_sizes,
                        NULL, 1);
}

TEST(large_ranges_of_odd_sizes_are_exact)
{
    for (int i = 0; i < N_WORLD_SIZES; i++)
        ranks_run_world(world_sizes[i], ops_arena_bytes(8 * N_LARGE + 5),
                        do_a_large_size, NULL, 1);
}

static void do_barriers(rank_job *job)
{
    atomic_int *n_arrived = job->context;
    for (int round = 1; round <= 50; round++) {
        const pl_op barrier = {.kind = PL_BARRIER};
        pl_ticket ticket = 0;
        draw_rest(&job->random, 200000);
        atomic_fetch_add(n_arrived, 1);
        CHECK_OK(pl_comm_issue(job->comm, &barrier, &ticket));
        CHECK(ticket == (pl_ticket)round);
        CHECK_OK(wait_through(job->comm, ticket));
        CHECK(atomic_load(n_arrived) >= round * job->world_size);
    }
}

TEST(no_rank_passes_a_barrier_before_all_have_come)
{
    for (int i = 0; i < N_WORLD_SIZES; i++) {
        atomic_int n_arrived = 0;
        ranks_run_world(world_sizes[i], 0, do_barriers, &n_arrived, 2);
    }
}

/* ---- several in flight ---------------------------------------------------------- */

enum { N_LANES = 16, LANE_ELEMS = 300, N_IN_TURN = 300 };

/* The k-th operation of a world's sequence, the same on every rank; each lane has its
 * own range of the arena. */
static pl_op op_of(uint64_t seed, size_t k, int world_size)
{
    draw shared = draw_of(seed * 100003 + k);
    pl_op op = {.kind = (pl_op_kind)draw_below(&shared, PL_N_OP_KINDS),
                .dtype = (pl_dtype)draw_below(&shared, PL_N_DTYPES),
                .root = (int)draw_below(&shared, (size_t)world_size)};
    const size_t n = draw_below(&shared, LANE_ELEMS / (size_t)world_size);
    op.n_elems = n_elems_of(op.kind, n, world_size);
    do
        op.reduction = (pl_reduction)draw_below(&shared, PL_N_REDUCTIONS);
    while (!ops_is_allowed(op.dtype, op.reduction));
    op.offset_bytes = k % N_LANES * ops_arena_bytes(LANE_ELEMS) + OPS_GUARD_BYTES +
                      pl_dtype_bytes(op.dtype) * draw_below(&shared, 3);
    return op;
}

static void wait_and_check(rank_job *job, uint64_t seed, size_t k,
                           const pl_ticket *tickets)
{
    const pl_op op = op_of(seed, k, job->world_size);
    if (CHECK_OK(wait_through(job->comm, tickets[k])))
        ops_check(job->comm, &op, (unsigned)k);
}

static void do_many_at_once(rank_job *job)
{
    const uint64_t seed = *(const uint64_t *)job->context;
    pl_ticket tickets[N_IN_TURN] = {0};
    for (size_t k = 0; k < N_IN_TURN; k++) {
        const pl_op op = op_of(seed, k, job->world_size);
        if (k >= N_LANES)
            wait_and_check(job, seed, k - N_LANES, tickets);
        draw_rest(&job->random, 100000);
        ops_fill(job->comm, &op, (unsigned)k);
        CHECK_OK(pl_comm_issue(job->comm, &op, &tickets[k]));
        for (size_t n = draw_below(&job->random, 3); n > 0; n--)
            CHECK_OK(pl_comm_progress(job->comm));
        if (draw_below(&job->random, 20) == 0)
            CHECK_OK(wait_through(job->comm, tickets[k]));
    }
    for (size_t k = N_IN_TURN - N_LANES; k < N_IN_TURN; k++)
        wait_and_check(job, seed, k, tickets);
}

TEST(operations_in_flight_come_out_exact_however_the_ranks_dawdle)
{
    for (uint64_t seed = 1; seed <= 3; seed++)
        for (int i = 0; i < N_WORLD_SIZES; i++)
            ranks_run_world(world_sizes[i], N_LANES * ops_arena_bytes(LANE_ELEMS),
                            do_many_at_once, &seed, seed);
}

/* Both ranks on one thread: no call here waits. */
PLAYED_TEST(2, RANKS_DEADLINE_NS,
            as_many_operations_as_the_ring_holds_are_in_flight_and_no_more)
{
    enum { RING_OPS = 1024 };
    const pl_op barrier = {.kind = PL_BARRIER};
    pl_ticket ticket = 0;
    for (int round = 0; round < 3; round++) {
        for (int k = 0; k < RING_OPS; k++)
            CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
        CHECK_FAILS(pl_comm_issue(comms[0], &barrier, &ticket), PL_ESTATE,
                    "more than 1024 operations in flight");
        CHECK(ticket == (pl_ticket)(round + 1) * RING_OPS);
        for (int k = 0; k < RING_OPS; k++)
            CHECK_OK(pl_comm_issue(comms[1], &barrier, &ticket));
        CHECK_OK(pl_comm_progress(comms[1]));
        CHECK(pl_comm_issue(comms[1], &barrier, &ticket) == PL_ESTATE);
        CHECK(pl_comm_wait(comms[1], ticket, 0) == PL_EAGAIN);
        CHECK_OK(pl_comm_progress(comms[0]));
        CHECK_OK(wait_through(comms[0], ticket));
        CHECK_OK(wait_through(comms[1], ticket));
    }
}

PLAYED_TEST(2, RANKS_DEADLINE_NS, a_wait_gives_control_back_after_its_slice)
{
    const pl_op barrier = {.kind = PL_BARRIER};
    pl_ticket ticket = 0;
    CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
    for (int k = 0; k < 5; k++) {
        const int64_t begin = pli_now_ns();
        CHECK(pl_comm_wait(comms[0], ticket, 20 * PLI_MS) == PL_EAGAIN);
        CHECK(pli_now_ns() - begin >= 20 * PLI_MS);
        CHECK(pli_now_ns() - begin < 2000 * PLI_MS);
    }
}

static void *do_part_late(void *comm)
{
    pli_sleep_ns(100 * PLI_MS);
    CHECK_OK(pl_comm_progress(comm));
    return NULL;
}

PLAYED_TEST(2, RANKS_DEADLINE_NS,
            a_rank_that_has_done_its_part_of_a_steps_end_waits_for_the_rest)
{
    const pl_op end = {.kind = PL_BARRIER, .ends_step = 1};
    pl_ticket ticket = 0;
    pthread_t late;
    CHECK_OK(pl_comm_issue(comms[0], &end, &ticket));
    CHECK(pl_comm_wait(comms[0], ticket, PLI_MS) == PL_EAGAIN);
    CHECK_OK(pl_comm_issue(comms[1], &end, &ticket));
    CHECK_OK(pl_comm_progress(comms[0]));
    CHECK(pl_comm_wait(comms[0], ticket, 0) == PL_EAGAIN);
    if (CHECK(pthread_create(&late, NULL, do_part_late, comms[1]) == 0)) {
        CHECK_OK(pl_comm_wait(comms[0], ticket, PLI_MS));
        CHECK(pthread_join(late, NULL) == 0);
    }
}

/* ---- bad arguments -------------------------------------------------------------- */

typedef struct bad_op {
    pl_op op;
    const char *words;
} bad_op;

static void check_bad_ops(pl_comm *comm, const bad_op *bad, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        pl_ticket ticket = 77;
        CHECK_FAILS(pl_comm_issue(comm, &bad[i].op, &ticket), PL_EINVAL, bad[i].words);
        CHECK(ticket == 77);
    }
}

PLAYED_TEST(3, RANKS_DEADLINE_NS,
            an_operation_that_makes_no_sense_is_refused_and_harms_nothing)
{
    /* the arena is one page or more; 1 MiB is outside it on any machine */
    static const bad_op bad[] = {
        {{.kind = PL_N_OP_KINDS}, "kind 5"},
        {{.kind = (pl_op_kind)-1}, "kind -1"},
        {{.dtype = PL_N_DTYPES, .n_elems = 1}, "dtype 11"},
        {{.dtype = (pl_dtype)-1}, "dtype -1"},
        {{.dtype = PL_F32, .offset_bytes = 2, .n_elems = 1}, "offset_bytes 2"},
        {{.dtype = PL_C128, .offset_bytes = 8, .n_elems = 1}, "complex128's 16"},
        {{.dtype = PL_F32, .n_elems = 1 << 20}, "leaves the arena"},
        {{.dtype = PL_F32, .offset_bytes = 1 << 20}, "leaves the arena"},
        {{.dtype = PL_F32, .n_elems = SIZE_MAX}, "leaves the arena"},
        {{.dtype = PL_F32, .n_elems = SIZE_MAX / 4 + 2}, "leaves the arena"},
        {{.dtype = PL_U8, .offset_bytes = SIZE_MAX, .n_elems = 2}, "leaves the arena"},
        {{.kind = PL_REDUCE, .dtype = PL_F32, .root = -1}, "root -1"},
        {{.kind = PL_REDUCE, .dtype = PL_F32, .root = 3}, "root 3"},
        {{.kind = PL_BROADCAST, .dtype = PL_F32, .root = 3}, "root 3"},
        {{.kind = PL_BROADCAST, .dtype = PL_F32, .root = INT_MIN}, "root -2147483648"},
        {{.dtype = PL_F32, .reduction = PL_N_REDUCTIONS}, "reduction 3"},
        {{.dtype = PL_F32, .reduction = (pl_reduction)-1}, "reduction -1"},
        {{.dtype = PL_I32, .reduction = PL_MEAN, .n_elems = 1}, "int32 cannot be"},
        {{.dtype = PL_F32, .reduction = PL_MAX, .n_elems = 1}, "float32 cannot be"},
        {{.kind = PL_ALL_GATHER, .dtype = PL_F32, .n_elems = 2}, "over 3 ranks"},
    };
    const pl_op good = {.dtype = PL_F32, .n_elems = 3};
    pl_ticket ticket = 0;
    check_bad_ops(comms[1], bad, sizeof bad / sizeof bad[0]);
    for (int r = 0; r < 3; r++)
        CHECK_OK(pl_comm_issue(comms[r], &good, &ticket));
    for (int r = 0; r < 3; r++)
        CHECK_OK(pl_comm_progress(comms[r]));
    for (int r = 0; r < 3; r++)
        CHECK_OK(wait_through(comms[r], ticket));
}

TEST(a_world_that_cannot_be_is_refused)
{
    static const int bad_sizes[] = {0, -1, PL_MAX_RANKS + 1, INT_MAX, INT_MIN};
    static const size_t bad_bytes[] = {SIZE_MAX, SIZE_MAX - 10, SIZE_MAX / 2 + 1,
                                       SIZE_MAX / 4 + 1, SIZE_MAX / 8};
    pl_comm *comms[PL_MAX_RANKS] = {NULL};
    for (size_t i = 0; i < sizeof bad_sizes / sizeof bad_sizes[0]; i++) {
        CHECK(local_create(bad_sizes[i], 1, RANKS_DEADLINE_NS, comms) == PL_EINVAL);
        CHECK(comms[0] == NULL);
        CHECK_SAYS("world_size is");
    }
    for (size_t i = 0; i < sizeof bad_bytes / sizeof bad_bytes[0]; i++) {
        if (!CHECK(local_create(4, bad_bytes[i], RANKS_DEADLINE_NS, comms) != PL_OK))
            for (int r = 0; r < 4; r++)
                pl_comm_destroy(comms[r]);
        comms[0] = NULL;
    }
}

TEST(a_world_has_as_many_ranks_as_the_limit_says)
{
    pl_comm *comms[PL_MAX_RANKS] = {NULL};
    if (!CHECK_OK(local_create(PL_MAX_RANKS, 100, RANKS_DEADLINE_NS, comms)))
        return;
    for (int r = 0; r < PL_MAX_RANKS; r++) {
        CHECK(pl_comm_rank(comms[r]) == r);
        CHECK(pl_comm_world_size(comms[r]) == PL_MAX_RANKS);
        CHECK(pl_comm_arena_bytes(comms[r]) >= 100);
        CHECK((uintptr_t)comms[r]->arena % 4096 == 0);
    }
    for (int r = 0; r < PL_MAX_RANKS; r += 2)
        pl_comm_destroy(comms[r]);
    for (int r = 1; r < PL_MAX_RANKS; r += 2)
        pl_comm_destroy(comms[r]);
    pl_comm_destroy(NULL);
    pl_comm_abort(NULL, "nobody hears this");
}
