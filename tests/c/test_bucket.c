/* test_bucket.c - the table of moves, whole: four are allowed, every other is not. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "reducer/bucket.h"

static const char *const texts[PL_N_BUCKET_PHASES] = {"filling", "ready", "posted",
                                                      "reduced"};

TEST(a_bucket_moves_to_the_next_phase_of_the_ring_and_nowhere_else)
{
    for (int from = 0; from < PL_N_BUCKET_PHASES; from++) {
        for (int to = 0; to < PL_N_BUCKET_PHASES; to++) {
            pl_bucket_phase phase = (pl_bucket_phase)from;
            const pl_status st = pl_bucket_move(&phase, (pl_bucket_phase)to, 0);
            if (to == (from + 1) % PL_N_BUCKET_PHASES) {
                CHECK_OK(st);
                CHECK((int)phase == to);
            } else {
                CHECK(st == PL_ESTATE);
                CHECK((int)phase == from);
            }
        }
    }
}

TEST(a_refused_move_names_the_bucket_and_both_phases)
{
    for (int from = 0; from < PL_N_BUCKET_PHASES; from++) {
        char words[80];
        pl_bucket_phase phase = (pl_bucket_phase)from;
        (void)snprintf(words, sizeof words, "bucket 17 cannot go from %s to %s",
                       texts[from], texts[from]);
        CHECK(pl_bucket_move(&phase, phase, 17) == PL_ESTATE);
        CHECK(strcmp(pl_error_message(), words) == 0);
    }
}

TEST(a_bucket_goes_round_any_number_of_steps)
{
    pl_bucket_phase phase = PL_BUCKET_FILLING;
    for (int step = 0; step < 100; step++) {
        CHECK_OK(pl_bucket_move(&phase, PL_BUCKET_READY, 0));
        CHECK_OK(pl_bucket_move(&phase, PL_BUCKET_POSTED, 0));
        CHECK_OK(pl_bucket_move(&phase, PL_BUCKET_REDUCED, 0));
        CHECK_OK(pl_bucket_move(&phase, PL_BUCKET_FILLING, 0));
    }
}
