/* test_local_failure.c - worlds of threads that fail: which rank is named, by which
 * message, and how a world continues.
 *
 * If one thread drives several ranks, nothing depends on time; if each rank has a
 * thread, seeds decide when events happen.
 */
#include "comm/shm_comm.h"
#include "ops.h"
#include "ranks.h"

static const pl_op barrier = {.kind = PL_BARRIER};

/* Drives all ranks of a world on this thread: issues, does every part, checks. */
static void do_exact_all_reduce(int world_size, pl_comm **comms, unsigned seed)
{
    const pl_op op = {.reduction = PL_MEAN,
                      .dtype = PL_F32,
                      .offset_bytes = OPS_GUARD_BYTES,
                      .n_elems = 77};
    pl_ticket ticket = 0;
    for (int r = 0; r < world_size; r++) {
        ops_fill(comms[r], &op, seed);
        CHECK_OK(pl_comm_issue(comms[r], &op, &ticket));
    }
    for (int r = 0; r < world_size; r++)
        CHECK_OK(pl_comm_progress(comms[r]));
    for (int r = 0; r < world_size; r++) {
        CHECK_OK(wait_through(comms[r], ticket));
        ops_check(comms[r], &op, seed);
    }
}

/* Every rank but the last is in the new epoch before the last recovers. */
static void recover_all(int world_size, pl_comm **comms)
{
    for (int r = 0; r < world_size - 1; r++) {
        pl_recovery recovery = PL_NOTHING_FAILED;
        CHECK(pl_comm_recover(comms[r], 0, &recovery) == PL_EAGAIN);
    }
    for (int r = world_size; r-- > 0;) {
        pl_recovery recovery = PL_NOTHING_FAILED;
        CHECK_OK(recover_through(comms[r], &recovery));
        CHECK(recovery == PL_RECOVERED);
    }
}

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
    pl_recovery recovery;
    CHECK(pl_comm_recover(job->comm, 0, &recovery) == PL_EMISMATCH);
    CHECK(pl_comm_issue(job->comm, &common, &ticket) == PL_EMISMATCH);
    CHECK(pl_comm_progress(job->comm) == PL_EMISMATCH);
}

TEST(an_operation_unlike_the_others_fails_all_and_names_its_rank)
{
    for (int world_size = 2; world_size <= 4; world_size++)
        for (int variant = 0; variant < 6; variant++)
            for (uint64_t seed = 1; seed <= 3; seed++)
                ranks_run_world(world_size, 4096, do_another_operation, &variant, seed);
}

/* ---- a step that fails, and the next -------------------------------------------- */

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

static void do_round(rank_job *job, int round)
{
    const round_plan plan = plan_of(round, job->world_size);
    const pl_op op = {.reduction = PL_MEAN,
                      .dtype = PL_BF16,
                      .offset_bytes = OPS_GUARD_BYTES,
                      .n_elems = 100};
    pl_recovery recovery = PL_NOTHING_FAILED;
    CHECK(run_into_failure(job, &plan) == PL_EPEER);
    if (job->rank != plan.culprit && job->rank != plan.second) {
        CHECK(blames(pl_error_message(), job->rank, plan.culprit) ||
              (plan.second >= 0 && blames(pl_error_message(), job->rank, plan.second)));
        if (!CHECK(error_has(plan.words)))
            CHECK_MORE("round %d, rank %d: %s", round, job->rank, pl_error_message());
    }
    draw_rest(&job->random, 200000);
    CHECK_OK(recover_through(job->comm, &recovery));
    CHECK(recovery == PL_RECOVERED);
    CHECK_OK(ops_run(job->comm, &op, (unsigned)round));
}

static void do_rounds(rank_job *job)
{
    for (int round = 0; round < N_ROUNDS; round++)
        do_round(job, round);
}

TEST(an_aborted_step_reaches_all_with_its_words_and_the_world_goes_on)
{
    for (int world_size = 1; world_size <= 4; world_size++)
        ranks_run_world(world_size, N_OPS * 1024, do_rounds, NULL,
                        (uint64_t)world_size);
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
    recover_all(2, comms);
    pl_comm_abort(comms[1], NULL);
    pl_recovery recovery;
    CHECK(pl_comm_recover(comms[1], 0, &recovery) == PL_EAGAIN);
    /* It continued without a message: no rank waits for one. */
    const int64_t again = pli_now_ns();
    CHECK(pl_comm_issue(comms[0], &barrier, &ticket) == PL_EPEER);
    CHECK(!error_has("failure message"));
    CHECK(pli_now_ns() - again < 300 * PLI_MS);
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

PLAYED_TEST(2, RANKS_DEADLINE_NS,
            what_an_aborting_rank_left_undone_is_not_done_by_its_recovery)
{
    pl_ticket ticket = 0;
    pl_recovery recovery = PL_NOTHING_FAILED;
    CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
    CHECK_OK(pl_comm_issue(comms[1], &barrier, &ticket));
    CHECK_OK(pl_comm_progress(comms[1])); /* and rank 0 does not do its part */
    pl_comm_abort(comms[0], "stop");
    CHECK(pl_comm_recover(comms[0], 0, &recovery) == PL_EAGAIN);
    CHECK(wait_through(comms[1], ticket) == PL_EPEER);
    recover_all(2, comms);
    do_exact_all_reduce(2, comms, 1);
}

PLAYED_TEST(2, RANKS_DEADLINE_NS, what_all_had_done_before_a_rank_aborted_stays_done)
{
    pl_ticket ticket = 0;
    pl_recovery recovery = PL_NOTHING_FAILED;
    for (int has_recovered = 0; has_recovered < 2; has_recovered++) {
        CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
        CHECK_OK(pl_comm_issue(comms[1], &barrier, &ticket));
        CHECK_OK(pl_comm_progress(comms[1]));
        CHECK_OK(wait_through(comms[0], ticket)); /* rank 0's step ends well */
        pl_comm_abort(comms[0], "in the next step");
        if (has_recovered)
            CHECK(pl_comm_recover(comms[0], 0, &recovery) == PL_EAGAIN);
        CHECK_OK(wait_through(comms[1], ticket)); /* and so does rank 1's */
        CHECK(pl_comm_issue(comms[1], &barrier, &ticket) == PL_EPEER);
        recover_all(2, comms);
    }
    do_exact_all_reduce(2, comms, 1);
    CHECK_OK(pl_comm_recover(comms[0], 0, &recovery));
    CHECK(recovery == PL_NOTHING_FAILED);
}

PLAYED_TEST(2, RANKS_DEADLINE_NS, nothing_is_issued_while_the_world_recovers)
{
    pl_ticket ticket = 0;
    pl_recovery recovery = PL_NOTHING_FAILED;
    pl_comm_abort(comms[0], "stop");
    CHECK(pl_comm_recover(comms[0], 0, &recovery) == PL_EAGAIN);
    CHECK(pl_comm_issue(comms[0], &barrier, &ticket) == PL_ESTATE);
    CHECK(pl_comm_issue(comms[1], &barrier, &ticket) == PL_EPEER);
    recover_all(2, comms);
    do_exact_all_reduce(2, comms, 1);
}

PLAYED_TEST(3, RANKS_DEADLINE_NS, a_recovery_that_is_aborted_is_begun_anew)
{
    pl_recovery recovery = PL_NOTHING_FAILED;
    for (int round = 0; round < 5; round++) {
        pl_comm_abort(comms[0], "first");
        CHECK(pl_comm_recover(comms[0], 0, &recovery) == PL_EAGAIN);
        CHECK(pl_comm_recover(comms[1], 0, &recovery) == PL_EAGAIN);
        pl_comm_abort(comms[1], "interrupted while it recovered");
        recover_all(3, comms);
        do_exact_all_reduce(3, comms, (unsigned)round);
    }
}

PLAYED_TEST(2, 200 * PLI_MS, patience_with_a_rank_begins_anew_when_the_world_recovers)
{
    pl_ticket ticket = 0;
    pl_recovery recovery = PL_NOTHING_FAILED;
    CHECK_OK(pl_comm_issue(comms[0], &barrier, &ticket));
    CHECK(pl_comm_wait(comms[0], ticket, 0) == PL_EAGAIN);
    pl_comm_abort(comms[0], "the user pressed a key");
    pli_sleep_ns(300 * PLI_MS); /* and rested */
    CHECK(pl_comm_recover(comms[0], 20 * PLI_MS, &recovery) == PL_EAGAIN);
    CHECK_OK(recover_through(comms[1], &recovery));
    CHECK_OK(recover_through(comms[0], &recovery));
    do_exact_all_reduce(2, comms, 1);
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
    CHECK_SAYS("has left");
    pl_recovery recovery;
    CHECK(pl_comm_recover(job->comm, 0, &recovery) == PL_EPEER);
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
    comms[0]->host->end(comms[0], "for good");
    pli_comm_set_failure_message(comms[0], NULL);
    CHECK_FAILS(pl_comm_progress(comms[1]), PL_EPEER, "for good");
}
