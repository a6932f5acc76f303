/* test_step_failure.c - each callback fails in turn, in steps of all kinds of gradients
 * on two ranks.  The call returns the failure, nothing is left over, each `.grad` holds
 * what it held before or a mean, the peer learns of it, and a new world goes on. */
#include "core/alloc.h"
#include "step_ranks.h"

enum { N_RANKS = 2, N_STEPS = 5, UNIT = 64 };
enum { SMALL, LARGE, ROWS, SMALL_ROWS, LAST, N_PARAMS };

static const array_param params[N_PARAMS] = {
    [SMALL] = {2, 2, 0},      [LARGE] = {4, 8, 0}, [ROWS] = {4, 2, 1},
    [SMALL_ROWS] = {4, 2, 0}, [LAST] = {4, 5, 0},
};
static const size_t buffer_elems[] = {3};
static const array_model model = {.params = params,
                                  .n_params = N_PARAMS,
                                  .buffer_elems = buffer_elems,
                                  .n_buffers = 1,
                                  .view_bytes = 64,
                                  .caps = {.bucket_bytes = 1, .last_bytes = 1}};

/* ---- the steps ------------------------------------------------------------------ */

/* What a failed step may leave in `.grad`. */
typedef struct memory_of_grad {
    int has_before;
    float before[ARRAYS_MOST_ELEMS]; /* the step */
    float local[ARRAYS_MOST_ELEMS];  /* with the gradients of this rank's backward */
} memory_of_grad;

typedef struct actor {
    rank_arrays arrays;
    int step; /* under way; N_STEPS: all are done */
    pl_status result;
    char words[256]; /* of the failure */
    memory_of_grad memory[N_PARAMS];
} actor;

/* A `.grad` after each step that no callback failed; the same on both ranks. */
static float means[N_STEPS][N_PARAMS][ARRAYS_MOST_ELEMS];

static pl_grad *make_gradient(rank_arrays *self, size_t i, int step, int k)
{
    pli_layout layout = layout_of(params[i].n_rows, params[i].n_cols);
    const int is_sparse = i == ROWS || i == SMALL_ROWS;
    float values[ARRAYS_MOST_ELEMS] = {0};
    for (size_t e = 0; e < layout.n_elems; e++)
        if (!is_sparse || (int)e / params[i].n_cols != self->rank)
            values[e] = (float)(UNIT * (1 + self->rank + step + k + (int)e % 3));
    if (is_sparse && step != 3)
        return array_sparse_of(self, &layout, values);
    if (i == SMALL && step == 2) {
        layout.dims[0].stride = 1;
        layout.dims[1].stride = params[i].n_rows;
    }
    pl_grad *grad = array_dense_of(self, &layout, values);
    if (i == LAST && step == 1) {
        grad->lazy = LAZY_HIDDEN;
        array_fill(grad, values);
    }
    return grad;
}

static pl_status arrive(actor *it, size_t i, int k)
{
    rank_arrays *arrays = &it->arrays;
    pl_arrival arrival = PL_ARRIVES_ALONE;
    if (arrays->has_hooks[i])
        arrival = it->step == 2 ? PL_ARRIVES_BEFORE_HOOKS : PL_ARRIVES_AFTER_HOOKS;
    arrays_accumulate(arrays, i, make_gradient(arrays, i, it->step, k));
    for (size_t e = 0; e < arrays->grads[i]->layout.n_elems; e++)
        it->memory[i].local[e] = array_get(arrays->grads[i], e);
    return arrays_arrive(arrays, i, NULL, arrival);
}

/* In the second step further gradients are late, and in the last one some have none. */
static pl_status backward(actor *it)
{
    pl_status st = PL_OK;
    for (size_t i = 0; i < N_PARAMS; i++)
        if (it->step != 4 || i % 2 == (size_t)it->arrays.rank)
            PL_TRY(arrive(it, i, 0));
    for (size_t i = 0; i < LAST; i++)
        if (it->step == 1 || (it->step == 2 && i == LARGE))
            PL_TRY(arrive(it, i, 1));
    if (it->step == 1)
        PL_TRY(arrive(it, LARGE, 2));
    PL_TRY(arrays_end_backward(&it->arrays));
done:
    return st;
}

static void remember(actor *it)
{
    for (size_t i = 0; i < N_PARAMS; i++) {
        const pl_grad *grad = it->arrays.grads[i];
        memory_of_grad *memory = &it->memory[i];
        *memory = (memory_of_grad){.has_before = grad != NULL};
        if (grad == NULL)
            continue;
        array_values(grad, memory->before);
        memcpy(memory->local, memory->before, sizeof memory->local);
    }
}

/* Gradients of the third step are kept for the last ones. */
static pl_status play_step(actor *it)
{
    pl_status st = PL_OK;
    rank_arrays *arrays = &it->arrays;
    const float values[ARRAYS_MOST_ELEMS] = {(float)(it->step * 10 + arrays->rank)};
    if (it->step < 4)
        arrays_zero(arrays);
    if (it->step == 4)
        arrays_set_grad(arrays, SMALL, NULL);
    arrays->has_hooks[SMALL] = it->step == 2 || it->step == 3;
    arrays->is_recorded = it->step == 3;
    arrays->settings.keeps_grads = it->step >= 3;
    remember(it);
    PL_TRY(pl_step_forward_begins(arrays->step));
    if (it->step < 3)
        PL_TRY(pl_step_sync_buffers(arrays->step));
    else
        PL_TRY(pl_step_apply_buffers(arrays->step));
    if (arrays->rank == 0) /* as a forward writes it */
        array_fill(arrays->buffers[0], values);
    if (it->step == 3 && arrays->rank == 1)
        PL_TRY(pl_step_shadow(arrays->step, PL_JOINING, PL_BINDS_RESULTS));
    else
        PL_TRY(backward(it));
done:
    return st;
}

static void play(actor *it)
{
    for (it->step = 0; it->step < N_STEPS; it->step++) {
        it->result = play_step(it);
        if (it->result == PL_ESTATE && it->arrays.fault.hit == CALL_FINISHED) {
            CHECK(!pl_step_look(it->arrays.step).has_failed);
            it->result = PL_OK; /* the step was over */
        }
        if (it->result != PL_OK)
            break;
    }
    (void)snprintf(it->words, sizeof it->words, "%s",
                   it->result != PL_OK ? pl_error_message() : "");
    if (it->result != PL_OK)
        arrays_fail(&it->arrays);
}

/* ---- checks --------------------------------------------------------------------- */

static int is_expected(const actor *it, size_t i)
{
    const memory_of_grad *memory = &it->memory[i];
    const pl_grad *grad = it->arrays.grads[i];
    if (grad == NULL)
        return !memory->has_before || i == LARGE || i == LAST;
    for (size_t e = 0; e < grad->layout.n_elems; e++) {
        const float value = array_get(grad, e);
        const int is_before = memory->has_before && value == memory->before[e];
        if (!is_before && value != memory->local[e] && value != means[it->step][i][e])
            return 0;
    }
    return 1;
}

static void check_failed(actor *it)
{
    rank_arrays *arrays = &it->arrays;
    const pl_step_state state = pl_step_look(arrays->step);
    CHECK(state.has_failed && !state.is_active && !state.is_open);
    CHECK(arrays_n_in_step(arrays) <= model.n_buffers); /* as they were seen last */
    if (!CHECK(arrays->n_alive == arrays_n_known(arrays)))
        CHECK_MORE("rank %d, step %d: %ld arrays", arrays->rank, it->step,
                   arrays->n_alive - arrays_n_known(arrays));
    for (size_t i = 0; i < N_PARAMS; i++)
        if (!CHECK(is_expected(it, i)))
            CHECK_MORE("rank %d, step %d, parameter %zu: %s", arrays->rank, it->step, i,
                       it->words);
    CHECK(pl_step_notice_failure(arrays->step) == PL_OK);
    int is_due = 0;
    arrays->settings.n_ends = 0;
    CHECK(pl_step_take(arrays->step, SMALL, PL_ARRIVES_ALONE, &is_due) != PL_OK);
}

/* The step failed on `culprit`.  Its peer may have taken that step. */
static void check_both(actor *actors, int culprit)
{
    actor *failed = &actors[culprit];
    actor *peer = &actors[1 - culprit];
    CHECK(failed->result == PL_ESTATE);
    CHECK(strstr(failed->words, "was refused") != NULL);
    check_failed(failed);
    if (!CHECK(peer->step == failed->step || peer->step == failed->step + 1))
        CHECK_MORE("%d and %d: %s; %s", peer->step, failed->step, failed->words,
                   peer->words);
    if (peer->step == N_STEPS) {
        CHECK(peer->result == PL_OK);
        return;
    }
    if (!CHECK(peer->result == PL_EPEER && strstr(peer->words, "was refused") != NULL))
        CHECK_MORE("%s, not %s", peer->words, failed->words);
    check_failed(peer);
}

/* ---- worlds --------------------------------------------------------------------- */

typedef struct scene {
    actor actors[N_RANKS];
    pl_comm *comms[N_RANKS];
} scene;

static int scene_create(scene *it)
{
    pl_step_size size;
    memset(it, 0, sizeof *it);
    if (!CHECK_OK(arrays_measure(&model, N_RANKS, &size)) ||
        !CHECK_OK(
            local_create(N_RANKS, size.arena_bytes, RANKS_DEADLINE_NS, it->comms)))
        return 0;
    for (int r = 0; r < N_RANKS; r++) {
        const float nothing[ARRAYS_MOST_ELEMS] = {0};
        if (!CHECK_OK(arrays_create(&model, it->comms[r], &it->actors[r].arrays)))
            return 0;
        array_fill(it->actors[r].arrays.buffers[0], nothing);
    }
    return 1;
}

static void scene_destroy(scene *it)
{
    for (int r = 0; r < N_RANKS; r++) {
        arrays_destroy(&it->actors[r].arrays);
        pl_comm_destroy(it->comms[r]);
    }
}

static void play_rank(rank_job *job)
{
    actor *actors = job->context;
    play(&actors[job->rank]);
}

static void play_first_step(rank_job *job)
{
    actor *it = &((actor *)job->context)[job->rank];
    it->step = 0;
    it->result = play_step(it);
    if (it->result != PL_OK)
        arrays_fail(&it->arrays);
}

/* After the failure a new world goes on.  A rank that failed after the last operation
 * has taken a step less: the ranks compare these numbers when they meet. */
static void check_next_world(scene *failed)
{
    scene next;
    if (!scene_create(&next))
        return;
    for (int r = 0; r < N_RANKS; r++) {
        pl_step *step = next.actors[r].arrays.step;
        const pl_step *before = failed->actors[r].arrays.step;
        CHECK_OK(pl_step_check_failure(before));
        pl_step_follow(step, before);
        CHECK(pl_step_look(before).n_taken == (uint64_t)failed->actors[r].step);
        CHECK(pl_step_look(step).n_taken == (uint64_t)failed->actors[r].step);
    }
    ranks_run(N_RANKS, next.comms, play_first_step, next.actors, 1);
    for (int r = 0; r < N_RANKS; r++) {
        actor *it = &next.actors[r];
        if (!CHECK(it->result == PL_OK))
            continue;
        CHECK(pl_step_look(it->arrays.step).n_taken ==
              (uint64_t)failed->actors[r].step + 1);
        for (size_t i = 0; i < N_PARAMS; i++)
            CHECK(array_holds(it->arrays.grads[i], means[0][i]));
    }
    scene_destroy(&next);
}

/* ---- tests ---------------------------------------------------------------------- */

static void note_means(rank_job *job)
{
    actor *it = &((actor *)job->context)[job->rank];
    for (it->step = 0; it->step < N_STEPS; it->step++) {
        if (!CHECK_OK(play_step(it)))
            return;
        for (size_t i = 0; i < N_PARAMS && job->rank == 0; i++)
            array_values(it->arrays.grads[i], means[it->step][i]);
    }
}

static int learn_means(long *n_calls)
{
    scene it;
    if (scene_create(&it))
        ranks_run(N_RANKS, it.comms, note_means, it.actors, 1);
    const int is_done = it.actors[0].step == N_STEPS && it.actors[1].step == N_STEPS;
    for (int c = 0; c < N_ARRAY_CALLS; c++)
        for (int r = 0; r < N_RANKS; r++)
            n_calls[c] += it.actors[r].arrays.n_calls[c];
    scene_destroy(&it);
    return CHECK(is_done);
}

TEST(the_steps_of_this_test_use_every_callback_of_the_cpu)
{
    long n_calls[N_ARRAY_CALLS] = {0};
    if (!learn_means(n_calls))
        return;
    for (int c = 0; c < N_ARRAY_CALLS; c++)
        if (c != CALL_CURRENT_STREAM && c != CALL_CHECK_SIGNALS &&
            !CHECK(n_calls[c] > 0))
            CHECK_MORE("%s", array_call_text((array_call)c));
}

/* Fails the n-th callback on one rank.  Returns 0 if there were fewer. */
static int fail_call(int culprit, long n)
{
    scene it;
    if (!scene_create(&it))
        return 0;
    arrays_expect_fault(&it.actors[culprit].arrays, N_ARRAY_CALLS, n);
    ranks_run(N_RANKS, it.comms, play_rank, it.actors, 1);
    const int is_hit = it.actors[culprit].arrays.fault.hit != N_ARRAY_CALLS;
    if (is_hit && it.actors[culprit].arrays.fault.hit != CALL_FINISHED) {
        check_both(it.actors, culprit);
        check_next_world(&it);
    } else {
        CHECK(it.actors[0].step == N_STEPS && it.actors[1].step == N_STEPS);
    }
    scene_destroy(&it);
    return is_hit;
}

static void fail_each_call(int culprit)
{
    long n_calls[N_ARRAY_CALLS] = {0};
    long n = 1;
    if (!learn_means(n_calls))
        return;
    while (fail_call(culprit, n))
        n++;
    CHECK(n > 100);
}

TEST(each_callback_of_the_root_may_fail)
{
    fail_each_call(0);
}

TEST(each_callback_of_another_rank_may_fail)
{
    fail_each_call(1);
}

/* ---- allocations ---------------------------------------------------------------- */

/* Returns how many times it failed. */
static long set_hook_in_the_end(pl_step *step)
{
    static const size_t each[] = {64};
    const pl_plan_caps caps = {.each = each, .n_each = 1};
    static const pl_step_hook hook = {.post = NULL};
    const size_t n_buckets = pl_step_look(step).plan->n_buckets;
    long n = 0;
    for (pl_status st = PL_ENOMEM; CHECK(n < 50) && st != PL_OK; n++) {
        CHECK(pl_step_look(step).plan->n_buckets == n_buckets);
        pli_fault_arm(PLI_FAULT_ALLOC, n + 1);
        st = pl_step_set_hook(step, &hook, &caps);
        pli_fault_arm(PLI_FAULT_ALLOC, 0);
        CHECK(st == PL_OK || st == PL_ENOMEM);
    }
    return n - 1;
}

TEST(a_step_that_cannot_be_made_leaves_nothing)
{
    pl_comm *comm = NULL;
    pl_step_size size;
    CHECK_OK(arrays_measure(&model, 1, &size));
    if (!CHECK_OK(local_create(1, size.arena_bytes, RANKS_DEADLINE_NS, &comm)))
        return;
    for (long n = 1; CHECK(n < 100); n++) {
        rank_arrays arrays;
        pli_fault_arm(PLI_FAULT_ALLOC, n);
        const pl_status st = arrays_create(&model, comm, &arrays);
        pli_fault_arm(PLI_FAULT_ALLOC, 0);
        CHECK(st == PL_OK || st == PL_ENOMEM);
        if (st == PL_OK)
            CHECK(n > 5 && set_hook_in_the_end(arrays.step) > 2);
        arrays_destroy(&arrays);
        if (st == PL_OK)
            break;
    }
    pl_comm_destroy(comm);
}
