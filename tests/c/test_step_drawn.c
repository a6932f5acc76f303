/* test_step_drawn.c - random programs: each parameter of each rank has its own events,
 * gradients come in any order, local backwards run in between, ranks run out of batches
 * or skip a backward.  A naive ledger says what each `.grad` must be. */
#include "step_ledger.h"

#include "seeds.h"

enum { N_PROGRAMS = 12 }; /* of a seed, in one world */

/* Every rank draws the same programs. */
static program draw_program(draw *random, int world_size)
{
    program it = {.n_steps = 1 + (int)draw_below(random, MOST_STEPS),
                  .divisor = draw_below(random, 2) ? PL_BY_N_ACTIVE : PL_BY_WORLD_SIZE,
                  .shadow_grads =
                      draw_below(random, 2) ? PL_BINDS_RESULTS : PL_LEAVES_GRADS,
                  .is_shuffled = 1,
                  .ends_apart = draw_below(random, 4) == 0,
                  .name = "a drawn program"};
    for (int r = 0; r < world_size; r++) {
        int n_batches = (int)draw_below(random, 2 * MOST_STEPS);
        if (it.ends_apart)
            n_batches = MOST_STEPS;
        for (int step = 0; step < it.n_steps; step++) {
            it.roles[step][r] = PL_ACTIVE;
            if (step >= n_batches)
                it.roles[step][r] = step == n_batches ? PL_JOINING : PL_SHADOWING;
            it.has_local[step][r] = draw_below(random, 4) == 0;
            for (size_t i = 0; i < N_PARAMS; i++)
                it.events[step][r][i] = (event)draw_below(random, N_EVENTS);
            it.events[step][r][GATE] = ONE_GRADIENT; /* or there is no step */
        }
    }
    return it;
}

static int play_drawn(player *it, const playing *what)
{
    draw random = draw_of(what->seed);
    int is_done = 1;
    for (int n = 0; is_done && n < N_PROGRAMS; n++) {
        const program next = draw_program(&random, it->arrays.world_size);
        is_done = play_program(it, &next);
    }
    return is_done;
}

TEST(random_programs_leave_the_means_that_a_naive_ledger_has)
{
    EACH_SEED (seed, 60) {
        draw random = draw_of(seed);
        playing what = {.play = play_drawn, .seed = seed};
        what.settings.keeps_grads = draw_below(&random, 3) == 0;
        what.settings.binds_new = draw_below(&random, 4) == 0;
        what.is_recorded = draw_below(&random, 5) == 0;
        arrays_run(&model, 1 + (int)(seed % MOST_RANKS), play_rank, &what, seed);
    }
}
