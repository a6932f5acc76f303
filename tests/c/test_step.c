/* test_step.c - whole steps: what becomes of a small, a large and a sparse gradient;
 * the phases of a step's end; and what a caller may look at. */
#include "small_steps.h"

TEST(each_gradient_becomes_the_mean_of_all_ranks)
{
    for (int n = 1; n <= 4; n++)
        arrays_run(&model, n, take_three_steps, NULL, 1);
}

static void mix_kinds(rank_job *job)
{
    static const float values[2][4] = {{4, 6, 8, 2}, {2, 4, 2, 4}};
    static const float mean[] = {3, 5, 5, 3};
    const float *mine = values[job->rank];
    const pli_layout layout = layout_of(2, 2);
    rank_arrays self;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        CHECK_OK(arrays_arrive(&self, SMALL,
                               job->rank == 0 ? array_dense_of(&self, &layout, mine)
                                              : array_sparse_of(&self, &layout, mine),
                               PL_ARRIVES_ALONE));
        CHECK_OK(arrays_end_backward(&self));
        CHECK(array_holds(self.grads[SMALL], mean));
        CHECK(self.grads[SMALL]->n_sparse_dims == 0);
    }
    arrays_destroy(&self);
}

TEST(a_gradient_that_is_dense_on_any_rank_becomes_dense_on_all)
{
    arrays_run(&model, 2, mix_kinds, NULL, 1);
}

/* ---- ranks that wait ------------------------------------------------------------ */

/* Rank 0 runs a callback until rank 1, which waits for it, has handled signals. */
typedef struct slow {
    array_call which;
    int refuses; /* a signal handler of rank 1 raises */
    atomic_int is_handled;
} slow;

static void await_signals(void *context)
{
    slow *it = context;
    while (!atomic_load(&it->is_handled))
        pli_sleep_ns(PLI_MS);
}

static void handle_signals(void *context)
{
    slow *it = context;
    atomic_store(&it->is_handled, 1);
}

static void wait_for_a_callback(rank_job *job)
{
    slow *it = job->context;
    rank_arrays self;
    pl_status st = PL_OK;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        self.context = it;
        arrays_expect_fault(&self, job->rank == 0 ? it->which : CALL_CHECK_SIGNALS, 1);
        if (job->rank == 0 || !it->refuses)
            self.fault.instead = job->rank == 0 ? await_signals : handle_signals;
        for (size_t i = N_PARAMS; st == PL_OK && i-- > 0;)
            st = arrays_arrive(&self, i, gradient(&self, i, (float)(8 + job->rank)),
                               PL_ARRIVES_ALONE);
        if (st == PL_OK)
            st = arrays_end_backward(&self);
        for (size_t i = 0; i < N_PARAMS && !it->refuses && CHECK_OK(st); i++)
            CHECK(is_mean(&self, i, 8));
        if (it->refuses && job->rank == 1)
            CHECK_FAILS(st, PL_ESTATE, "check_signals was refused");
        if (it->refuses)
            arrays_fail(&self);
        handle_signals(it);
    }
    arrays_destroy(&self);
}

TEST(a_rank_that_waits_handles_signals)
{
    for (int n = 0; n < 4; n++) {
        slow it = {.which = n % 2 == 0 ? CALL_IS_RECORDED : CALL_READ_ROWS,
                   .refuses = n > 1};
        arrays_run(&model, 2, wait_for_a_callback, &it, 1);
    }
}

/* ---- views that the user keeps -------------------------------------------------- */

static const array_param views[] = {{4, 8, 0}, {2, 9, 0}};
static const array_model view_model = {.params = views,
                                       .n_params = 2,
                                       .view_bytes = 64,
                                       .caps = {.bucket_bytes = 1, .last_bytes = 1}};

static pl_grad *view_gradient(rank_arrays *self, size_t i, float value)
{
    float values[ARRAYS_MOST_ELEMS];
    const pli_layout layout = layout_of(views[i].n_rows, views[i].n_cols);
    for (size_t k = 0; k < layout.n_elems; k++)
        values[k] = value;
    return array_dense_of(self, &layout, values);
}

static int take_view(rank_arrays *self, size_t i, float value)
{
    return CHECK_OK(arrays_arrive(
        self, i, view_gradient(self, i, value + (float)self->rank), PL_ARRIVES_ALONE));
}

static int is_full_of(const pl_grad *grad, float value)
{
    for (size_t k = 0; k < grad->layout.n_elems; k++)
        if (array_get(grad, k) != value)
            return 0;
    return 1;
}

/* A view is accumulated in place; then another parameter's gradient, or zeros, are
 * written over a view that the user keeps, which makes the old window private. */
static void keep_another_view(rank_job *job)
{
    for (int n = 0; n < 4; n++) {
        const int keeps = n % 2;
        const int is_used = n < 2;
        rank_arrays self;
        if (CHECK_OK(arrays_create(&view_model, job->comm, &self))) {
            self.settings.keeps_grads = (char)keeps;
            for (int k = 0; k < 2; k++) { /* then the order of the buckets stays */
                arrays_zero(&self);
                CHECK(take_view(&self, 0, 1) && take_view(&self, 1, 3));
                CHECK_OK(arrays_end_backward(&self));
            }
            pl_grad *kept = self.grads[1];
            pl_grad *first = self.grads[0];
            array_hold(first);
            self.grads[1] = NULL;
            CHECK(take_view(&self, 0, 5) && (!is_used || take_view(&self, 1, 7)));
            CHECK_OK(arrays_end_backward(&self));
            CHECK(is_full_of(kept, 3.5F) && kept->window->comm == NULL);
            CHECK(is_full_of(self.grads[0], 7));
            CHECK(is_used ? is_full_of(self.grads[1], 7.5F) : self.grads[1] == NULL);
            CHECK((self.grads[0] == first) == (keeps != 0));
            array_drop(kept);
            array_drop(first);
        }
        arrays_destroy(&self);
    }
}

TEST(a_view_that_the_user_keeps_stays_as_it_was)
{
    arrays_run(&view_model, 2, keep_another_view, NULL, 1);
}

/* Before a fork in a backward, views become private; the step goes on. */
static void fork_in_backward(rank_job *job)
{
    rank_arrays self;
    if (CHECK_OK(arrays_create(&view_model, job->comm, &self))) {
        CHECK(take_view(&self, 0, 1) && take_view(&self, 1, 3));
        CHECK_OK(arrays_end_backward(&self));
        CHECK_OK(pl_step_before_fork(self.step));
        CHECK(self.grads[0]->window->comm == NULL);
        CHECK(take_view(&self, 0, 1));
        CHECK_OK(pl_step_before_fork(self.step));
        CHECK(take_view(&self, 1, 1));
        CHECK_OK(arrays_end_backward(&self));
        CHECK(is_full_of(self.grads[0], 3) && is_full_of(self.grads[1], 5));
        CHECK(self.grads[0]->window->comm != NULL);
    }
    arrays_destroy(&self);
}

TEST(views_become_private_before_a_fork)
{
    arrays_run(&view_model, 2, fork_in_backward, NULL, 1);
}

TEST(a_view_outlives_its_step)
{
    pl_comm *comm = NULL;
    pl_step_size size;
    rank_arrays self;
    CHECK_OK(arrays_measure(&view_model, 1, &size));
    if (!CHECK_OK(local_create(1, size.arena_bytes, RANKS_DEADLINE_NS, &comm)))
        return;
    if (CHECK_OK(arrays_create(&view_model, comm, &self))) {
        CHECK(take_view(&self, 0, 1) && take_view(&self, 1, 3));
        CHECK_OK(arrays_end_backward(&self));
        CHECK_OK(pl_step_before_fork(self.step));
        pl_step_destroy(self.step);
        self.step = NULL;
        CHECK(is_full_of(self.grads[0], 1) && is_full_of(self.grads[1], 3));
    }
    arrays_destroy(&self);
    pl_comm_destroy(comm);
}

/* ---- ranks that run out of batches ---------------------------------------------- */

/* Rank r has r + 1 batches.  With `raises` the first rank without one ends them all. */
static void run_out(rank_job *job, pl_join_end end)
{
    rank_arrays self;
    const int n_ranks = job->world_size;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        pl_step_set_join(self.step, PL_BY_N_ACTIVE, end);
        for (int n = 0; n < n_ranks; n++) {
            const int n_active = n_ranks - n;
            pl_status st = PL_OK;
            arrays_zero(&self);
            if (n > job->rank)
                st = pl_step_shadow(self.step,
                                    n == job->rank + 1 ? PL_JOINING : PL_SHADOWING,
                                    PL_LEAVES_GRADS);
            else
                st = arrays_arrive(&self, SMALL, gradient(&self, SMALL, 8),
                                   PL_ARRIVES_ALONE);
            if (n <= job->rank && CHECK_OK(st))
                st = arrays_end_backward(&self);
            const pl_step_state state = pl_step_look(self.step);
            CHECK(state.participation.n_active == n_active);
            CHECK(state.participation.first_active == n);
            CHECK(state.participation.last_joining == n - 1);
            CHECK(!state.is_active && !state.has_failed);
            CHECK(state.n_taken == (uint64_t)n + 1);
            if (n <= job->rank)
                CHECK(is_full_of(self.grads[SMALL], 8));
            const int is_end = end == PL_JOIN_RAISES && n > 0 && n <= job->rank;
            if (is_end)
                CHECK_FAILS(st, PL_ESTATE, "exhausted inputs");
            else
                CHECK_OK(st);
        }
        pl_step_set_join(self.step, PL_BY_WORLD_SIZE, PL_JOIN_GOES_ON);
        CHECK(pl_step_look(self.step).participation.n_active == n_ranks);
        CHECK(backward(&self, 8)); /* all are together again */
    }
    arrays_destroy(&self);
}

static void run_out_and_go_on(rank_job *job)
{
    run_out(job, PL_JOIN_GOES_ON);
}

static void run_out_and_raise(rank_job *job)
{
    run_out(job, PL_JOIN_RAISES);
}

TEST(ranks_run_out_of_batches_one_after_another)
{
    arrays_run(&model, 4, run_out_and_go_on, NULL, 1);
}

TEST(a_join_that_raises_tells_the_ranks_that_have_batches)
{
    arrays_run(&model, 4, run_out_and_raise, NULL, 1);
}

/* ---- what a caller may look at -------------------------------------------------- */

TEST(the_phases_of_the_end_of_a_step_are_listed_in_order)
{
    size_t n = 0;
    while (pl_step_phase(n) != NULL) {
        for (size_t k = 0; k < n; k++)
            CHECK(strcmp(pl_step_phase(k), pl_step_phase(n)) != 0);
        n++;
    }
    CHECK(n >= 10);
    CHECK(pl_step_phase(n + 1) == NULL);
}

TEST(the_size_of_a_step_holds_its_gradients_and_buffers)
{
    static const size_t buffer_elems[1] = {1 << 20};
    array_model more = model;
    pl_step_size dense, bare, size;
    more.n_buffers = 1;
    more.buffer_elems = buffer_elems;
    CHECK_OK(arrays_measure(&view_model, 2, &dense));
    CHECK_OK(arrays_measure(&model, 2, &bare));
    CHECK(dense.arena_bytes < PLI_EXCHANGE_BYTES); /* room for rows */
    CHECK(bare.arena_bytes > PLI_EXCHANGE_BYTES);
    CHECK_OK(arrays_measure(&more, 2, &size));
    CHECK(bare.arena_bytes > (2 * 2 + 4 * 8) * sizeof(float));
    CHECK(size.arena_bytes >= bare.arena_bytes + (1 << 20) * sizeof(float));
    CHECK(bare.n_ops > 0 && bare.header_bytes > 0);
}
