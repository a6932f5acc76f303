/* test_step_grads.c - what becomes of each `.grad`: every order of three events, by
 * every policy, in active and shadow steps, on one to three ranks. */
#include "step_ledger.h"

typedef enum course {
    ALL_ACTIVE,
    JOINS_LAST,
    JOINS_MIDDLE,
    JOINS_FIRST,
    N_COURSES
} course;

enum { N_STEPS = 3, N_ORDERS = N_EVENTS * N_EVENTS * N_EVENTS };

/* The last rank runs out of batches; in JOINS_FIRST the one before it, too. */
static pl_role role_of(course roles, int step, int rank, int world_size)
{
    static const int n_batches[] = {N_STEPS, 2, 1, 0};
    int n = rank == world_size - 1 ? n_batches[roles] : N_STEPS;
    if (roles == JOINS_FIRST && rank > 0 && rank == world_size - 2)
        n = 1;
    if (step < n)
        return PL_ACTIVE;
    return step == n ? PL_JOINING : PL_SHADOWING;
}

/* The n-th program.  In every other one rank r begins with the r-th event. */
static program program_of(size_t n, int world_size)
{
    const course roles = (course)(n % N_COURSES);
    const int is_shifted = n / N_COURSES % 2 == 1;
    event order[N_STEPS];
    program it = {.n_steps = N_STEPS, .name = "a listed order"};
    n /= N_COURSES * 2;
    for (size_t k = 0; k < N_STEPS; k++) {
        order[k] = (event)(n % N_EVENTS);
        n /= N_EVENTS;
    }
    it.divisor = order[0] % 2 ? PL_BY_N_ACTIVE : PL_BY_WORLD_SIZE;
    it.shadow_grads = order[1] % 2 ? PL_BINDS_RESULTS : PL_LEAVES_GRADS;
    for (int step = 0; step < N_STEPS; step++)
        for (int r = 0; r < world_size; r++) {
            it.roles[step][r] = role_of(roles, step, r, world_size);
            it.events[step][r][GATE] = ONE_GRADIENT;
            for (size_t i = GATE + 1; i < N_PARAMS; i++)
                it.events[step][r][i] = order[(step + is_shifted * r) % N_STEPS];
        }
    return it;
}

static int play_listed(player *it, const playing *what)
{
    const int world_size = it->arrays.world_size;
    const size_t n_programs = N_COURSES * 2 * N_ORDERS;
    /* The first makes the ranks learn the order of the buckets. */
    const size_t first = (ONE_GRADIENT + N_EVENTS * LATE_GRADIENT) * N_COURSES * 2;
    const program learn = program_of(first, world_size);
    int is_done = play_program(it, &learn);
    for (size_t n = 0; is_done && n < n_programs; n += what->stride) {
        const program next = program_of(n, world_size);
        is_done = play_program(it, &next);
    }
    return is_done;
}

static void play_worlds(playing what, int from, int to)
{
    what.play = play_listed;
    for (int n = from; n <= to; n++)
        arrays_run(&model, n, play_rank, &what, 1);
}

TEST(every_order_of_events_leaves_the_means_of_two_ranks)
{
    play_worlds((playing){.stride = 7}, 2, 2);
}

TEST(orders_of_events_leave_the_means_of_one_and_of_three_ranks)
{
    play_worlds((playing){.stride = 23}, 1, 1);
    play_worlds((playing){.stride = 29}, 3, 3);
}

TEST(a_gradient_that_a_step_finds_may_stay_the_same_array)
{
    play_worlds((playing){.stride = 61, .settings = {.keeps_grads = 1}}, 1, 3);
}

TEST(means_may_be_set_as_new_arrays)
{
    play_worlds((playing){.stride = 101, .settings = {.binds_new = 1}}, 1, 3);
}

TEST(the_gradients_of_a_recorded_backward_stay_as_they_came)
{
    play_worlds((playing){.stride = 101, .is_recorded = 1}, 1, 3);
    play_worlds((playing){.stride = 127,
                          .is_recorded = 1,
                          .settings = {.keeps_grads = 1, .binds_new = 1}},
                2, 2);
}
