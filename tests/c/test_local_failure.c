/* test_local_failure.c - worlds of threads that fail: which rank is named, and by which
 * message.
 *
 * If one thread drives several ranks, nothing depends on time; if each rank has a
 * thread, seeds decide when events happen.
 */
#include "comm/shm_comm.h"
#include "ops.h"
#include "ranks.h"

static const pl_op barrier = {.kind = PL_BARRIER};

/* ---- ranks that disagree -------------------------------------------------------- */

static void do_another_operation(rank_job *job)
{
    static const pl_op common = {
        .kind = PL_REDUCE, .dtype = PL_F32, .n_elems = 12, .offset_bytes = 64};
    pl_op op = common;
    pl_ticket ticket = 0;
    const int variant = *(const int *)job->context;
    if (job->rank == job->world_size - 1) {
        op.kind = variant == 0 ? PL_BROADCAST : op.kind;
        op.reduction = variant == 1 ? PL_MEAN : op.reduction;
        op.dtype = variant == 2 ? PL_I32 : op.dtype;
        op.root = variant == 3 ? 1 : op.root;
        op.offset_bytes = variant == 4 ? 128 : op.offset_bytes;
        op.n_elems = variant == 5 ? 11 : op.n_elems;
    }
    draw_rest(&job->random, 500000);
    CHECK_OK(do_op(job->comm, &common));
    draw_rest(&job->random, 500000);
    CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
    CHECK(wait_through(job->comm, ticket) == PL_EMISMATCH);
    if (!CHECK(job->rank == job->world_size - 1
                   ? error_has("this rank issued another operation than the others")
                   : blames(pl_error_message(), job->rank, job->world_size - 1)))
        CHECK_MORE("rank %d: %s", job->rank, pl_error_message());
    check_stays_failed(job->comm, PL_EMISMATCH, "another operation");
}

TEST(an_operation_unlike_the_others_fails_all_and_names_its_rank)
{
    for (int world_size = 2; world_size <= 4; world_size++)
        for (int variant = 0; variant < 6; variant++)
            for (uint64_t seed = 1; seed <= 3; seed++)
                ranks_run_world(world_size, 4096, do_another_operation, &variant, seed);
}

/* ---- a step that fails ---------------------------------------------------------- */

enum { N_ROUNDS = 100, N_OPS = 12 };

typedef struct round_plan {
    int culprit;
    int moment; /* of the culprit's operations: it aborts before this one */
    int second; /* another rank that aborts too; -1: none */
    char words[64];
} round_plan;

static round_plan plan_of(int round, int world_size)
{
    draw shared = draw_of((uint64_t)round + 5000);
    round_plan plan = {.culprit = (int)draw_below(&shared, (size_t)world_size),
                       .moment = (int)draw_below(&shared, N_OPS),
                       .second = -1};
    if (world_size > 1 && draw_below(&shared, 4) == 0)
        plan.second = (plan.culprit + 1) % world_size;
    (void)snprintf(plan.words, sizeof plan.words, "words of round %d;", round);
    return plan;
}

/* Runs operations until one fails, on this rank or another. */
static pl_status run_into_failure(rank_job *job, const round_plan *plan)
{
    pl_ticket ticket = 0;
    pl_status st = PL_OK;
    for (int k = 0; k < N_OPS && st == PL_OK; k++) {
        const pl_op op = {.kind = (pl_op_kind)(k % PL_N_OP_KINDS),
                          .dtype = PL_F64,
                          .offset_bytes = (size_t)k * 1024, /* separate, in flight */
                          .n_elems = (size_t)(job->world_size * k)};
        draw_rest(&job->random, 100000);
        if (job->rank == plan->culprit || job->rank == plan->second) {
            if (k == plan->moment) {
                pl_comm_abort(job->comm, plan->words);
                return PL_EPEER;
            }
        }
        st = pl_comm_issue(job->comm, &op, &ticket);
        if (st == PL_OK && draw_below(&job->random, 5) == 0)
            st = wait_through(job->comm, ticket);
    }
    return st == PL_OK ? wait_through(job->comm, ticket) : st;
}

static void do_round(rank_job *job)
{
    const int round = *(const int *)job->context;
    const round_plan plan = plan_of(round, job->world_size);
    const pl_op op = {.reduction = PL_MEAN,
                      .dtype = PL_BF16,
                      .offset_bytes = OPS_GUARD_BYTES,
                      .n_elems = 100};
    CHECK_OK(ops_run(job->comm, &op, (unsigned)round));
    CHECK(run_into_failure(job, &plan) == PL_EPEER);
    if (job->rank != plan.culprit && job->rank != plan.second) {
        CHECK(blames(pl_error_message(), job->rank, plan.culprit) ||
              (plan.second >= 0 && blames(pl_error_message(), job->rank, plan.second)));
        if (!CHECK(error_has(plan.words)))
            CHECK_MORE("round %d, rank %d: %s", round, job->rank, pl_error_message());
    }
    draw_rest(&job->random, 200000);
    check_stays_failed(job->comm, PL_EPEER, plan.words);
}

/* Each round has a world of its own, after the one that failed. */
TEST(an_aborted_step_reaches_all_with_its_words_and_the_next_world_goes_well)
{
    for (int world_size = 1; world_size <= 4; world_size++)
        for (int round = 0; round < N_ROUNDS; round++)
            ranks_run_world(world_size, N_OPS * 1024, do_round, &round,
                            (uint64_t)(100 * world_size + round));
}

PLAYED_TEST(3, RANKS_DEADLINE_NS, the_first_failure_stands_and_ranks_that_go_are_seen)
{
    pl_comm_abort(comms[0], "first");
    pl_comm_abort(comms[1], "second");
    for (int r = 0; r < 3; r++) {
        CHECK_FAILS(pl_comm_progress(comms[r]), PL_EPEER, "first");
        CHECK_OK(pli_comm_query(comms[r], PLI_QUERY_GONE));
        CHECK_OK(pli_comm_query(comms[r], PLI_QUERY_WORLD));
    }
    pl_comm_leave(comms[1]);
    CHECK_FAILS(pli_comm_query(comms[2], PLI_QUERY_GONE), PL_EPEER, "has left");
    CHECK(blames(pl_error_message(), 2, 1));
    CHECK_FAILS(pli_comm_query(comms[2], PLI_QUERY_WORLD), PL_EPEER, "has left");
    check_stays_failed(comms[2], PL_EPEER, "first");
}

PLAYED_TEST(2, RANKS_DEADLINE_NS, words_that_come_after_the_abort_are_waited_for)
{
    pl_ticket ticket = 0;
    CHECK_OK(pl_comm_issue(comms[1], &barrier, &ticket));
    pl_comm_abort(comms[0], NULL);
    const int64_t begin = pli_now_ns();
    CHECK(wait_through(comms[1], ticket) == PL_EPEER); /* no message came: ends */
    CHECK(pli_now_ns() - begin < 3000 * PLI_MS);
    CHECK(!error_has("failure message"));
    pli_comm_set_failure_message(comms[0], "ZeroDivisionError");
    CHECK_FAILS(wait_through(comms[1], ticket), PL_EPEER,
                "Its own failure message:\nZeroDivisionError");
}

PLAYED_TEST(2, RANKS_DEADLINE_NS, words_that_will_not_come_are_not_waited_for)
{
    pl_ticket ticket = 0;
    pl_comm_abort(comms[1], NULL);
    pli_comm_set_failure_message(comms[1], NULL);
    const int64_t begin = pli_now_ns();
    CHECK(pl_comm_issue(comms[0], &barrier, &ticket) == PL_EPEER);
    CHECK(!error_has("failure message"));
    CHECK(pli_now_ns() - begin < 300 * PLI_MS);
}

PLAYED_TEST(2, RANKS_DEADLINE_NS, words_too_long_for_their_room_keep_their_end)
{
    static char words[3 * PLI_MESSAGE_BYTES];
    pl_ticket ticket = 0;
    memset(words, '.', sizeof words - 1);
    memcpy(words, "begin", 5);
    memcpy(words + sizeof words - 5, "end!", 5);
    pl_comm_abort(comms[0], words);
    CHECK_FAILS(pl_comm_issue(comms[1], &barrier, &ticket), PL_EPEER, "...end!");
    CHECK(!error_has("begin"));
}

PLAYED_TEST(2, RANKS_DEADLINE_NS, what_an_aborting_rank_left_undone_is_never_done)
{
    pl_ticket ticket = 0;
    CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
    CHECK_OK(pl_comm_issue(comms[1], &barrier, &ticket));
    CHECK_OK(pl_comm_progress(comms[1])); /* and rank 0 does not do its part */
    pl_comm_abort(comms[0], "stop");
    CHECK(pl_comm_progress(comms[0]) == PL_EPEER);
    CHECK(wait_through(comms[0], ticket) == PL_EPEER);
    CHECK(wait_through(comms[1], ticket) == PL_EPEER);
}

PLAYED_TEST(2, RANKS_DEADLINE_NS, what_all_had_done_before_a_rank_aborted_stays_done)
{
    pl_ticket ticket = 0;
    CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
    CHECK_OK(pl_comm_issue(comms[1], &barrier, &ticket));
    CHECK_OK(pl_comm_progress(comms[1]));
    CHECK_OK(wait_through(comms[0], ticket)); /* rank 0's step ends well */
    pl_comm_abort(comms[0], "in the next step");
    pl_comm_leave(comms[0]);
    CHECK_OK(wait_through(comms[1], ticket)); /* and so does rank 1's */
    check_stays_failed(comms[1], PL_EPEER, "in the next step");
    CHECK_OK(wait_through(comms[1], ticket));
}

/* ---- ranks that leave, and slow ranks ------------------------------------------- */

static void do_and_leave(rank_job *job)
{
    const int leaver = *(const int *)job->context;
    for (int k = 0; k < 5; k++) {
        draw_rest(&job->random, 200000);
        CHECK_OK(do_op(job->comm, &barrier));
    }
    if (job->rank == leaver) {
        draw_rest(&job->random, 1000000);
        pl_comm_leave(job->comm);
        pl_comm_leave(job->comm); /* twice is allowed */
        return;
    }
    const int64_t begin = pli_now_ns();
    pl_status st = do_op(job->comm, &barrier);
    CHECK(st == PL_EPEER);
    CHECK(pli_now_ns() - begin < 3000 * PLI_MS);
    CHECK(blames(pl_error_message(), job->rank, leaver));
    check_stays_failed(job->comm, PL_EPEER, "has left");
}

TEST(a_rank_that_leaves_is_named_to_those_who_wait_for_it)
{
    for (int world_size = 2; world_size <= 4; world_size++)
        for (int leaver = 0; leaver < world_size; leaver++)
            ranks_run_world(world_size, 0, do_and_leave, &leaver, 9);
}

PLAYED_TEST(3, RANKS_DEADLINE_NS, a_rank_that_left_is_named_though_another_is_slower)
{
    pl_ticket ticket = 0;
    CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
    pl_comm_leave(comms[2]); /* while rank 1 computes */
    const int64_t begin = pli_now_ns();
    CHECK(wait_through(comms[0], ticket) == PL_EPEER);
    CHECK(blames(pl_error_message(), 0, 2));
    CHECK(pli_now_ns() - begin < 3000 * PLI_MS);
}

PLAYED_TEST(2, RANKS_DEADLINE_NS, a_rank_that_did_its_part_may_leave_in_peace)
{
    pl_ticket ticket = 0;
    CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
    CHECK_OK(pl_comm_issue(comms[1], &barrier, &ticket));
    CHECK_OK(pl_comm_progress(comms[1]));
    pl_comm_destroy(comms[1]);
    comms[1] = NULL;
    CHECK_OK(wait_through(comms[0], ticket));
}

static void wait_for_the_last(pl_comm **comms)
{
    pl_ticket ticket = 0;
    const int silent = pl_comm_world_size(comms[0]) - 1;
    for (int r = 0; r < silent; r++)
        CHECK_OK(pl_comm_issue(comms[r], &barrier, &ticket));
    const int64_t begin = pli_now_ns();
    for (int r = 0; r < silent; r++) {
        CHECK(wait_through(comms[r], ticket) == PL_ETIMEOUT);
        CHECK(blames(pl_error_message(), r, silent));
    }
    CHECK(pli_now_ns() - begin >= 150 * PLI_MS);
    CHECK(pli_now_ns() - begin < 3000 * PLI_MS);
    CHECK_FAILS(pl_comm_issue(comms[silent], &barrier, &ticket), PL_ETIMEOUT, "rank");
}

TEST(a_rank_that_never_comes_is_named_after_the_deadline)
{
    for (int world_size = 2; world_size <= 4; world_size++)
        ranks_play(world_size, 150 * PLI_MS, wait_for_the_last);
}

PLAYED_TEST(3, 150 * PLI_MS,
            not_the_rank_that_waits_itself_is_named_but_the_one_it_waits_for)
{
    pl_ticket tickets[3] = {0};
    /* Rank 0 is three operations ahead, rank 1 waits in the first, for rank 2. */
    for (int k = 0; k < 3; k++)
        CHECK_OK(pl_comm_issue(comms[0], &barrier, &tickets[k]));
    CHECK_OK(pl_comm_issue(comms[1], &barrier, &tickets[0]));
    CHECK(wait_through(comms[0], tickets[2]) == PL_ETIMEOUT);
    CHECK(blames(pl_error_message(), 0, 2));
    CHECK(wait_through(comms[1], tickets[0]) == PL_ETIMEOUT);
    CHECK(blames(pl_error_message(), 1, 2));
}

PLAYED_TEST(2, 400 * PLI_MS, a_slow_rank_that_shows_life_is_not_given_up)
{
    pl_ticket ticket = 0;
    CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
    for (uint64_t step = 1; step <= 6; step++) {
        CHECK(pl_comm_wait(comms[0], ticket, 120 * PLI_MS) == PL_EAGAIN);
        pli_comm_record_activity(comms[1], PL_BACKWARD, step);
    }
    CHECK_OK(pl_comm_issue(comms[1], &barrier, &ticket));
    CHECK_OK(pl_comm_progress(comms[1]));
    CHECK_OK(wait_through(comms[0], ticket));
}

/* Another thread may have failed the step just before this one drops its message. */
PLAYED_TEST(2, RANKS_DEADLINE_NS,
            words_of_a_failure_are_not_forgotten_before_they_are_read)
{
    pl_comm_abort(comms[0], "the dog ate it");
    pli_comm_set_failure_message(comms[0], NULL);
    CHECK_FAILS(pl_comm_progress(comms[1]), PL_EPEER, "the dog ate it");
}
