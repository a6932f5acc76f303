/* test_step_forwards.c - which backward is a step, and whether all ranks are in the
 * same one; gradients in a context; and a process that was forked. */
#include <sys/wait.h>

#include "comm/shm_comm.h"
#include "step_ranks.h"

enum { FIRST, SECOND, N_PARAMS };

static const array_param params[N_PARAMS] = {{2, 2, 0}, {4, 8, 0}};
static const array_model model = {.params = params,
                                  .n_params = N_PARAMS,
                                  .view_bytes = 64,
                                  .caps = {.bucket_bytes = 1, .last_bytes = 1}};

static pl_grad *gradient(rank_arrays *self, size_t i)
{
    float values[ARRAYS_MOST_ELEMS];
    const pli_layout layout = layout_of(params[i].n_rows, params[i].n_cols);
    for (size_t k = 0; k < layout.n_elems; k++)
        values[k] = (float)(2 * self->rank + 4);
    return array_dense_of(self, &layout, values);
}

static int is_filled(const pl_grad *grad, float value)
{
    for (size_t k = 0; grad != NULL && k < grad->layout.n_elems; k++)
        if (array_get(grad, k) != value)
            return 0;
    return grad != NULL;
}

/* ---- programs ------------------------------------------------------------------- */

/* A program is a text with one letter for each thing that a rank does:
 *
 *     F E   a forward in training or evaluation mode; f e: no hook on its outputs
 *     X x   a forward in training or evaluation mode raises
 *     A     await_backward
 *     B V   backward of the oldest, of the newest such forward
 *     W     one backward of the oldest and the newest
 *     b     backward that no output shows;   p: only for the first parameter
 *     n y   forwards are not synchronised from now on, or are again
 *     N Y   no backward is
 *
 * A result has one letter for each backward: s a step, l local, m a mismatch. */
typedef struct row {
    const char *programs[2]; /* of the two ranks */
    const char *results[2];
    char is_following; /* settings.follows_forwards */
    char is_over;      /* settings.ends_with_step */
} row;

static const row rows[] = {
    /* a backward follows its forward */
    {{"FBFB", "FBFB"}, {"ss", "ss"}, 1, 0},
    {{"fbfb", "fbfb"}, {"ss", "ss"}, 1, 0},
    {{"EBeb", "EBeb"}, {"ss", "ss"}, 1, 0},
    {{"FBb", "FBbb"}, {"sl", "sll"}, 1, 0},
    {{"fbb", "fbb"}, {"sl", "sl"}, 1, 0},
    {{"bFB", "FB"}, {"ls", "s"}, 1, 0},
    {{"AbbAb", "AbAb"}, {"sls", "ss"}, 1, 0},
    {{"FFBBb", "FFBB"}, {"ssl", "ss"}, 1, 0},
    {{"FFBB", "FFVB"}, {"ss", "ss"}, 1, 0},
    /* parameters without a gradient await one, or do not */
    {{"fpb", "fpb"}, {"ss", "ss"}, 1, 0},
    {{"fpbb", "fpbb"}, {"ssl", "ssl"}, 1, 0},
    {{"fpb", "fpb"}, {"sl", "sl"}, 1, 1},
    {{"FBpb", "FBpb"}, {"sll", "sll"}, 1, 0},
    /* every backward is a step */
    {{"bb", "bb"}, {"ss", "ss"}, 0, 0},
    {{"Fbb", "bb"}, {"ms", "ms"}, 0, 0},
    {{"nbyb", "b"}, {"ls", "s"}, 0, 0},
    {{"nFByb", "nFByb"}, {"ls", "ls"}, 0, 0},
    /* without synchronisation */
    {{"nFByFB", "nFByFB"}, {"ls", "ls"}, 1, 0},
    {{"nFByFB", "FB"}, {"ls", "s"}, 1, 0},
    {{"nfbyfb", "nfbyfb"}, {"ls", "ls"}, 1, 0},
    {{"fnfbyb", "fnfbyb"}, {"ll", "ll"}, 1, 0},
    {{"nFFyBBFB", "nFFyBBFB"}, {"lls", "lls"}, 1, 0},
    {{"FNBYFB", "FNBYFB"}, {"ls", "ls"}, 1, 0},
    {{"fNbYb", "fNbYb"}, {"ls", "ls"}, 1, 0},
    {{"nFyFWFB", "nFyFWFB"}, {"ss", "ss"}, 1, 0},
    {{"FnFyWFB", "FnFyWFB"}, {"ss", "ss"}, 1, 0},
    {{"FnFyVB", "FnFyVB"}, {"ls", "ls"}, 1, 0},
    /* ranks in different steps; the next step is one again */
    {{"FFVFB", "FFVFFV"}, {"ss", "ss"}, 1, 0},
    {{"FBFB", "FFVFB"}, {"ms", "ms"}, 1, 0},
    {{"fbfb", "ffbfb"}, {"ms", "ms"}, 1, 0},
    {{"FBFB", "FbFV"}, {"ms", "ms"}, 1, 0},
    {{"FBFB", "XFBFB"}, {"ms", "ms"}, 1, 0},
    {{"XFBFB", "XFBFB"}, {"ss", "ss"}, 1, 0},
    {{"EBEB", "EEVEB"}, {"ms", "ms"}, 1, 0},
    {{"EBEB", "xEBEB"}, {"ms", "ms"}, 1, 0},
    {{"fFVFB", "FBFB"}, {"ss", "ss"}, 1, 0},
    /* evaluation does not count in a training step */
    {{"EFVFB", "FBFB"}, {"ss", "ss"}, 1, 0},
    {{"xFBFB", "FBFB"}, {"ss", "ss"}, 1, 0},
    {{"eFBFB", "FBFB"}, {"ss", "ss"}, 1, 0},
};
enum { N_ROWS = sizeof rows / sizeof *rows, MOST_FORWARDS = 8 };

typedef struct forward {
    uint64_t token; /* 0: none, or used */
    int is_synchronised, is_watched;
} forward;

typedef struct reader {
    rank_arrays arrays;
    forward forwards[MOST_FORWARDS]; /* whose backward has not run */
    size_t n_forwards;
    char results[MOST_FORWARDS];
    size_t n_results;
} reader;

static void run_forward(reader *it, char letter)
{
    rank_arrays *arrays = &it->arrays;
    const int is_watched = letter == 'F' || letter == 'E';
    const pl_forward_mode mode =
        letter == 'F' || letter == 'f' ? PL_TRAINS : PL_EVALUATES;
    CHECK_OK(pl_step_forward_begins(arrays->step));
    const uint64_t token = pl_step_forward_ends(
        arrays->step, is_watched ? PL_OUTPUTS_WATCHED : PL_OUTPUTS_UNWATCHED, mode);
    CHECK((token != 0) == (is_watched && arrays->settings.is_on));
    if (is_watched)
        it->forwards[it->n_forwards++] = (forward){
            .token = token, .is_synchronised = arrays->settings.is_on, .is_watched = 1};
}

/* The backward begins at both outputs of a forward. */
static pl_status begin_at(reader *it, size_t at)
{
    pl_status st = PL_OK;
    const forward from = it->forwards[at];
    it->n_forwards--;
    memmove(&it->forwards[at], &it->forwards[at + 1],
            (it->n_forwards - at) * sizeof *it->forwards);
    PL_TRY(pl_step_output(it->arrays.step, from.token, from.is_synchronised));
    PL_TRY(pl_step_output(it->arrays.step, 0, from.is_synchronised));
done:
    return st;
}

static pl_status run_backward(reader *it, char letter)
{
    pl_status st = PL_OK;
    rank_arrays *arrays = &it->arrays;
    arrays_zero(arrays);
    if (letter == 'B' || letter == 'W')
        PL_TRY(begin_at(it, 0));
    if (letter == 'V' || letter == 'W')
        PL_TRY(begin_at(it, it->n_forwards - 1));
    for (size_t i = 0; i < N_PARAMS; i++)
        if (letter != 'p' || i == FIRST)
            PL_TRY(arrays_arrive(arrays, i, gradient(arrays, i), PL_ARRIVES_ALONE));
    PL_TRY(arrays_end_backward(arrays));
done:
    return st;
}

static char result_of(reader *it, char letter)
{
    rank_arrays *arrays = &it->arrays;
    const uint64_t before = pl_step_look(arrays->step).number;
    const pl_status st = run_backward(it, letter);
    const pl_step_state state = pl_step_look(arrays->step);
    const float local = (float)(2 * arrays->rank + 4);
    CHECK(!state.is_active && !state.has_failed && arrays_n_in_step(arrays) == 0);
    CHECK(arrays->n_alive == arrays_n_known(arrays));
    CHECK(st == PL_OK || (st == PL_EMISMATCH && error_has("not in the same step")));
    if (st != PL_OK) {
        CHECK(error_has("last step: rank 0: ") && error_has("; rank 1: "));
        return 'm';
    }
    const int is_step = state.number > before;
    CHECK(is_filled(arrays->grads[FIRST], is_step ? 5 : local));
    CHECK(pl_step_look(arrays->step).unseen[FIRST] == !is_step);
    if (letter != 'p')
        CHECK(is_filled(arrays->grads[SECOND], is_step ? 5 : local));
    return is_step ? 's' : 'l';
}

static void run_letter(reader *it, char letter)
{
    pl_step *step = it->arrays.step;
    switch (letter) {
    case 'n':
    case 'y':
        it->arrays.settings.is_on = letter == 'y';
        break;
    case 'N':
    case 'Y':
        it->arrays.settings.is_in_no_sync = letter == 'N';
        break;
    case 'X':
    case 'x':
        CHECK_OK(pl_step_forward_begins(step));
        pl_step_forward_fails(step, letter == 'X' ? PL_TRAINS : PL_EVALUATES);
        break;
    case 'A':
        pl_step_await_backward(step);
        break;
    case 'F':
    case 'f':
    case 'E':
    case 'e':
        run_forward(it, letter);
        break;
    default:
        it->results[it->n_results++] = result_of(it, letter);
        break;
    }
}

static void read_program(reader *it, const char *program, const char *results)
{
    for (const char *at = program; *at != '\0'; at++)
        run_letter(it, *at);
    if (!CHECK(strcmp(it->results, results) == 0))
        CHECK_MORE("rank %d, '%s': %s, not %s", it->arrays.rank, program, it->results,
                   results);
}

static void run_program(rank_job *job)
{
    const row *expected = job->context;
    reader it = {.n_results = 0};
    if (CHECK_OK(arrays_create(&model, job->comm, &it.arrays))) {
        it.arrays.settings.follows_forwards = expected->is_following;
        it.arrays.settings.ends_with_step = expected->is_over;
        read_program(&it, expected->programs[job->rank], expected->results[job->rank]);
    }
    arrays_destroy(&it.arrays);
}

TEST(a_backward_is_a_step_if_its_forward_was_synchronised)
{
    for (size_t k = 0; k < N_ROWS; k++) {
        row it = rows[k];
        arrays_run(&model, 2, run_program, &it, 1);
    }
}

/* Rank 1 of ten is out of batches, and the last one has run one forward more. */
static void differ_in_forwards(rank_job *job)
{
    rank_arrays self;
    const int is_active = job->rank != 1;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        for (int n = 0; n < 1 + job->rank / 9; n++)
            pl_step_await_backward(self.step);
        pl_status st =
            is_active
                ? arrays_arrive(&self, FIRST, gradient(&self, FIRST), PL_ARRIVES_ALONE)
                : pl_step_shadow(self.step, PL_JOINING, PL_LEAVES_GRADS);
        if (is_active && CHECK_OK(st))
            st = arrays_end_backward(&self);
        CHECK_FAILS(st, PL_EMISMATCH, "step: rank 0: 1, 0 of them", "; rank 2: 1, ",
                    "; rank 8: 1, ");
        CHECK(!error_has("; rank 9: "));
    }
    arrays_destroy(&self);
}

TEST(a_mismatch_names_the_first_eight_ranks_that_have_batches)
{
    arrays_run(&model, 10, differ_in_forwards, NULL, 1);
}

/* ---- after a failure ------------------------------------------------------------ */

/* Two ranks, whose steps a test can reach from one thread. */
typedef struct pair {
    pl_comm *comms[2];
    reader readers[2];
    const char *const *programs, *const *results;
} pair;

static int pair_create(pair *it)
{
    pl_step_size size;
    memset(it, 0, sizeof *it);
    int is_made =
        CHECK_OK(arrays_measure(&model, 2, &size)) &&
        CHECK_OK(local_create(2, size.arena_bytes, RANKS_DEADLINE_NS, it->comms));
    for (int r = 0; is_made && r < 2; r++) {
        is_made = CHECK_OK(arrays_create(&model, it->comms[r], &it->readers[r].arrays));
        it->readers[r].arrays.settings.follows_forwards = 1;
    }
    return is_made;
}

static void pair_destroy(pair *it)
{
    for (int r = 0; r < 2; r++) {
        arrays_destroy(&it->readers[r].arrays);
        pl_comm_destroy(it->comms[r]);
    }
}

static void run_pair(rank_job *job)
{
    pair *it = job->context;
    read_program(&it->readers[job->rank], it->programs[job->rank],
                 it->results[job->rank]);
}

/* How a world fails, and what follows. */
typedef enum failing {
    FAILS_APART,     /* on each rank */
    FAILS_THEN_JOIN, /* likewise; then a join context begins */
    RAISES_BEHIND,   /* on rank 0; a forward of rank 1 raises then */
    IS_MISMATCHED    /* the ranks issue different operations */
} failing;

typedef struct follow_row {
    const char *before[2], *steps[2]; /* programs, and their results */
    const char *after[2], *results[2];
    failing how;
} follow_row;

static const follow_row follow_rows[] = {
    {{"F", "F"}, {"", ""}, {"FB", "FB"}, {"s", "s"}, FAILS_APART},
    {{"F", ""}, {"", ""}, {"FBFB", "FBFB"}, {"ms", "ms"}, FAILS_APART},
    {{"F", ""}, {"", ""}, {"FB", "FB"}, {"s", "s"}, FAILS_THEN_JOIN},
    {{"F", ""}, {"", ""}, {"FB", "FB"}, {"s", "s"}, IS_MISMATCHED},
    /* steps of two forwards: the ranks count afresh */
    {{"FFWF", "FFW"}, {"s", "s"}, {"FB", "FB"}, {"s", "s"}, FAILS_APART},
    /* a forward that raises in a failed world is one of the failed step */
    {{"F", "F"}, {"", ""}, {"FB", "FB"}, {"s", "s"}, RAISES_BEHIND},
    {{"f", ""}, {"", ""}, {"fb", "fb"}, {"s", "s"}, RAISES_BEHIND},
};
enum { N_FOLLOW_ROWS = sizeof follow_rows / sizeof *follow_rows };

static void fail_pair(pair *it, failing how)
{
    for (int r = 0; r < 2; r++) {
        const pl_op op = {.kind = r == 0 ? PL_BARRIER : PL_ALL_REDUCE, .n_elems = 1};
        pl_ticket ticket;
        pl_step *step = it->readers[r].arrays.step;
        if (how == RAISES_BEHIND && r == 1)
            run_letter(&it->readers[r], 'X');
        else if (how == IS_MISMATCHED)
            (void)!pl_comm_issue(it->comms[r], &op, &ticket);
        else
            pl_step_fail(step, "a failure");
    }
    CHECK((pl_comm_progress(it->comms[0]) == PL_EMISMATCH) == (how == IS_MISMATCHED));
    for (int r = 0; how == IS_MISMATCHED && r < 2; r++)
        pl_step_fail(it->readers[r].arrays.step, NULL);
}

TEST(forwards_of_a_failed_step_count_in_the_next_world)
{
    for (size_t k = 0; k < N_FOLLOW_ROWS; k++) {
        const follow_row *what = &follow_rows[k];
        static pair failed, next;
        if (pair_create(&failed) && pair_create(&next)) {
            failed.programs = what->before;
            failed.results = what->steps;
            ranks_run(2, failed.comms, run_pair, &failed, 1);
            fail_pair(&failed, what->how);
            for (int r = 0; r < 2; r++) {
                pl_step *step = next.readers[r].arrays.step;
                pl_step_follow(step, failed.readers[r].arrays.step);
                if (what->how == FAILS_THEN_JOIN)
                    pl_step_set_join(step, PL_BY_WORLD_SIZE, PL_JOIN_GOES_ON);
            }
            next.programs = what->after;
            next.results = what->results;
            ranks_run(2, next.comms, run_pair, &next, 1);
        }
        pair_destroy(&failed);
        pair_destroy(&next);
    }
}

/* ---- one rank ------------------------------------------------------------------- */

static void run_alone(void (*run)(rank_arrays *self))
{
    pl_comm *comm = NULL;
    pl_step_size size;
    rank_arrays self;
    if (!CHECK_OK(arrays_measure(&model, 1, &size)) ||
        !CHECK_OK(local_create(1, size.arena_bytes, RANKS_DEADLINE_NS, &comm)))
        return;
    if (CHECK_OK(arrays_create(&model, comm, &self)))
        run(&self);
    arrays_destroy(&self);
    pl_comm_destroy(comm);
}

/* A test with a world of one rank. */
#define LONE_TEST(name) TEST_BY(name, rank_arrays *self, run_alone(name##_by))

static pl_status take(rank_arrays *self, size_t i)
{
    return arrays_arrive(self, i, gradient(self, i), PL_ARRIVES_ALONE);
}

LONE_TEST(strict_refuses_a_second_gradient)
{
    self->settings.is_strict = 1;
    CHECK_OK(take(self, FIRST));
    CHECK_OK(take(self, SECOND));
    CHECK_FAILS(take(self, FIRST), PL_ESTATE, "ready only once", "index 0",
                "second gradient in one backward");
    arrays_fail(self);
    CHECK(pl_step_look(self->step).has_failed);
}

LONE_TEST(strict_refuses_a_gradient_of_an_unused_parameter)
{
    self->settings.is_strict = 1;
    pl_step_look(self->step).unused[SECOND] = 1;
    CHECK_OK(take(self, FIRST));
    CHECK_FAILS(take(self, SECOND), PL_ESTATE, "index 1", "no output");
    arrays_fail(self);
}

LONE_TEST(a_compiled_backward_is_due_with_its_last_gradient)
{
    int is_due = 0;
    self->settings.is_compiled = 1;
    for (int n = 0; n < 2; n++) {
        arrays_accumulate(self, FIRST, gradient(self, FIRST));
        CHECK_OK(pl_step_take(self->step, FIRST, PL_ARRIVES_ALONE, &is_due));
        CHECK(!is_due && pl_step_look(self->step).is_open);
        arrays_accumulate(self, SECOND, gradient(self, SECOND));
        CHECK_OK(pl_step_take(self->step, SECOND, PL_ARRIVES_ALONE, &is_due));
        CHECK(is_due);
        CHECK_OK(pl_step_finish(self->step));
        CHECK(!pl_step_look(self->step).is_active);
        arrays_zero(self);
        self->settings.n_ends = 0;
    }
}

LONE_TEST(gradients_of_an_inner_backward_await_the_end_of_the_outer_one)
{
    arrays_expect_fault(self, CALL_IS_RECORDED, 1);
    CHECK_FAILS(take(self, FIRST), PL_ESTATE, "is_recorded was refused");
    CHECK(self->settings.n_ends == 1); /* which reports that */
    arrays_zero(self);
    CHECK_OK(take(self, FIRST));
    CHECK(self->settings.n_ends == 1);
    self->settings.n_ends = 0; /* the end of the inner one was called */
    CHECK_FAILS(pl_step_forward_begins(self->step), PL_ESTATE, "was never seen");
    CHECK_OK(take(self, SECOND));
    CHECK(self->settings.n_ends == 1);
    CHECK_OK(arrays_end_backward(self));
    CHECK(is_filled(self->grads[FIRST], 4) && is_filled(self->grads[SECOND], 4));
}

LONE_TEST(the_mean_goes_to_the_gradient_that_a_hook_has_set)
{
    CHECK_OK(arrays_arrive(self, FIRST, gradient(self, FIRST), PL_ARRIVES_AFTER_HOOKS));
    const pli_layout layout = layout_of(2, 2);
    arrays_set_grad(self, FIRST, array_new(self, &layout));
    CHECK_OK(arrays_end_backward(self));
    CHECK(is_filled(self->grads[FIRST], 4));
}

LONE_TEST(autograd_learns_of_a_write_to_a_gradient_that_a_graph_may_hold)
{
    for (int n = 0; n < 2; n++) {
        self->is_recorded = n;
        arrays_zero(self);
        CHECK_OK(take(self, FIRST));
        CHECK_OK(arrays_end_backward(self));
        CHECK(self->grads[FIRST]->n_writes == n);
    }
}

LONE_TEST(a_view_comes_back_if_the_step_fails)
{
    for (int n = 0; n < 2; n++) { /* then the buckets are in their final order */
        CHECK_OK(take(self, SECOND));
        CHECK_OK(arrays_end_backward(self));
    }
    const pl_grad *view = self->grads[SECOND];
    CHECK_OK(take(self, SECOND));
    CHECK(self->grads[SECOND] == NULL);
    arrays_fail(self);
    CHECK(self->grads[SECOND] == view && view != NULL);
}

LONE_TEST(a_gradient_of_another_size_or_dtype_is_refused)
{
    const pli_layout layout = layout_of(3, 2);
    arrays_set_grad(self, FIRST, array_new(self, &layout));
    CHECK_FAILS(arrays_arrive(self, FIRST, NULL, PL_ARRIVES_ALONE), PL_ESTATE,
                "parameter 0 was 4 x float32", "is 6 x float32");
    arrays_set_grad(self, FIRST, gradient(self, FIRST));
    self->grads[FIRST]->layout.dtype = PL_I32;
    CHECK_FAILS(arrays_arrive(self, FIRST, NULL, PL_ARRIVES_ALONE), PL_ESTATE,
                "parameter 0 was 4 x float32", "is 4 x int32");
    arrays_fail(self);
}

LONE_TEST(peers_see_what_a_rank_does)
{
    const pli_shm_comm *comm = (const pli_shm_comm *)(const void *)self->comm;
    const pli_rank *mine = pli_rank_of(comm->segment, 0);
    pli_comm_set_failure_message(self->comm, "an exception that was caught");
    CHECK_OK(pl_step_forward_begins(self->step));
    CHECK(mine->message_state == PLI_MESSAGE_NONE && mine->activity == PL_FORWARD);
    (void)pl_step_forward_ends(self->step, PL_OUTPUTS_WATCHED, PL_TRAINS);
    CHECK(mine->activity == PL_IDLE);
}

LONE_TEST(a_step_closes_before_it_ends)
{
    int is_due = 0;
    CHECK_OK(pl_step_close(self->step)); /* none is open */
    CHECK_OK(take(self, FIRST));
    CHECK_OK(pl_step_close(self->step));
    const pl_step_state state = pl_step_look(self->step);
    CHECK(state.is_active && !state.is_open);
    CHECK_OK(pl_step_close(self->step));
    arrays_accumulate(self, SECOND, gradient(self, SECOND));
    CHECK(pl_step_take(self->step, SECOND, PL_ARRIVES_ALONE, &is_due) == PL_ESTATE);
    arrays_fail(self);
    CHECK(arrays_n_in_step(self) == 0);
}

LONE_TEST(a_process_that_was_forked_takes_no_part)
{
    int status = 1;
    CHECK_OK(pl_step_check_process(self->step));
    CHECK_OK(take(self, FIRST));
    CHECK_OK(arrays_end_backward(self));
    const pid_t child = fork();
    if (child == 0) {
        int is_local = take(self, SECOND) == PL_OK && self->settings.n_ends == 0;
        is_local &= pl_step_look(self->step).number == 1;
        is_local &= pl_step_check_process(self->step) == PL_ESTATE &&
                    error_has("was forked from rank 0");
        is_local &= pl_step_forward_begins(self->step) == PL_ESTATE;
        is_local &=
            pl_step_shadow(self->step, PL_JOINING, PL_LEAVES_GRADS) == PL_ESTATE;
        pl_step_fail(self->step, "the child's");
        is_local &= !pl_step_look(self->step).has_failed;
        _exit(is_local ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

LONE_TEST(a_byte_counts_up_to_255_gradients)
{
    unsigned char counts[2];
    for (int n = 0; n < 300; n++)
        CHECK_OK(take(self, FIRST));
    CHECK_OK(arrays_arrive(self, SECOND, NULL, PL_ARRIVES_ALONE)); /* undefined */
    CHECK_OK(arrays_end_backward(self));
    pl_step_count_grads(self->step, counts);
    CHECK(counts[FIRST] == 255 && counts[SECOND] == 1);
}

static int stop_at_the_first(pl_grad *grad, void *n)
{
    CHECK(grad->n_refs > 0);
    return ++*(int *)n;
}

LONE_TEST(what_a_step_holds_is_visited_and_dropped)
{
    int n = 0;
    CHECK(pl_step_visit(self->step, stop_at_the_first, &n) == 0 && n == 0);
    CHECK_OK(take(self, FIRST));
    CHECK_OK(take(self, SECOND));
    CHECK(arrays_n_in_step(self) >= 2);
    CHECK(pl_step_visit(self->step, stop_at_the_first, &n) == 1 && n == 1);
    pl_step_drop(self->step);
    CHECK(arrays_n_in_step(self) == 0);
    CHECK(self->n_alive == arrays_n_known(self));
    pl_step_fail(self->step, NULL);
}

TEST(an_idle_rank_notices_that_a_peer_has_failed)
{
    static pair it;
    if (pair_create(&it)) {
        pl_step *peer = it.readers[0].arrays.step;
        pl_step *idle = it.readers[1].arrays.step;
        CHECK_OK(pl_step_notice_failure(idle));
        pl_step_fail(peer, "its words;");
        CHECK_OK(pl_step_forward_begins(peer)); /* its words stay */
        CHECK_FAILS(pl_step_notice_failure(idle), PL_EPEER, "its words;");
        for (int r = 0; r < 2; r++) {
            pl_step *step = it.readers[r].arrays.step;
            CHECK(pl_step_look(step).has_failed);
            CHECK_OK(pl_step_notice_failure(step)); /* it knows */
            CHECK_OK(pl_step_check_failure(step));
        }
        it.comms[1]->is_group_comm = 1; /* then it may be one of several worlds */
        CHECK_FAILS(pl_step_check_failure(idle), PL_EPEER, "its words;");
        it.comms[1]->is_group_comm = 0;
    }
    pair_destroy(&it);
}

/* ---- gradients in a context ----------------------------------------------------- */

static void take_in_context(rank_job *job)
{
    rank_arrays self;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        for (int n = 0; n < 3; n++) {
            arrays_set_grad(&self, SECOND, gradient(&self, SECOND));
            self.in_context[FIRST] = gradient(&self, FIRST);
            CHECK_OK(pl_step_take_in_context(self.step, FIRST, 7 + n));
            CHECK(pl_step_look(self.step).context == 7 + n);
            int is_due = 0;
            CHECK_FAILS(pl_step_take(self.step, SECOND, PL_ARRIVES_ALONE, &is_due),
                        PL_ESTATE, "two backwards at once");
            CHECK_OK(arrays_end_backward(&self));
            unsigned char counts[N_PARAMS];
            pl_step_count_grads(self.step, counts);
            CHECK(counts[FIRST] == 1 && counts[SECOND] == 0);
            CHECK(pl_step_look(self.step).context == PL_NO_CONTEXT);
            CHECK(is_filled(self.in_context[FIRST], 5));
            CHECK(self.in_context[SECOND] == NULL && self.grads[FIRST] == NULL);
            CHECK(is_filled(self.grads[SECOND], (float)(2 * self.rank + 4)));
            array_drop(self.in_context[FIRST]);
            self.in_context[FIRST] = NULL;
        }
    }
    arrays_destroy(&self);
}

TEST(gradients_in_a_context_leave_those_of_the_parameters_alone)
{
    arrays_run(&model, 2, take_in_context, NULL, 1);
}
