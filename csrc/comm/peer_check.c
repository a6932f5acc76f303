/* peer_check.c - is a rank that others wait for gone, dead, or past the deadline? */
#include "core/clock.h"
#include "core/hash.h"
#include "shm_counters.h"

enum { DEADLOCK_MS = 500 }; /* of silence, before a check for deadlock */

/* Picks a rank below `least`: one that has left, else the one furthest behind in
 * posting, for which the rest may be waiting too, else in doing; -1 if none. */
static int culprit_of(const pli_shm_comm *self, pli_counter counter, uint64_t least)
{
    int culprit = -1;
    uint64_t lowest[2] = {UINT64_MAX, UINT64_MAX};
    for (int r = 0; r < self->super.world_size; r++) {
        const uint64_t count = counter(self, r);
        const uint64_t posted = pli_counter_posted(self, r);
        if (count >= least)
            continue;
        if (pli_rank_has_left(self, r))
            return r;
        if (posted < lowest[0] || (posted == lowest[0] && count < lowest[1])) {
            culprit = r;
            lowest[0] = posted;
            lowest[1] = count;
        }
    }
    return culprit;
}

int pli_peers_blame_dead(const pli_shm_comm *self, pli_counter counter, uint64_t least)
{
    for (int end = 0; end < PLI_N_ENDS; end++) {
        int r = -1;
        while ((r = pli_watch_ended(&self->watch, (pli_end)end, r + 1)) >= 0) {
            /* A rank that has done everything awaited is not to blame yet. */
            if (counter(self, r) >= least)
                continue;
            pli_epoch_fail(self, r, pli_rank_has_left(self, r) ? PLI_LEFT : PLI_DIED);
            return 1;
        }
    }
    return 0;
}

void pli_peers_check(pli_shm_comm *self, pli_counter counter, uint64_t least)
{
    const int culprit = culprit_of(self, counter, least);
    if (culprit < 0)
        return;
    const pli_rank *rank = pli_rank_of(self->segment, culprit);
    if (pli_rank_has_left(self, culprit)) {
        pli_epoch_fail(self, culprit, PLI_LEFT);
        return;
    }
    const uint64_t sign =
        pli_hash_with(atomic_load(&rank->posted) + atomic_load(&rank->done) +
                          atomic_load(&rank->step),
                      (uint64_t)culprit);
    if (sign != self->last_sign)
        self->silence = (pli_stopwatch){0};
    self->last_sign = sign;
    const int64_t silent_ns = pli_elapsed_ns(&self->silence);
    const int is_late = silent_ns > self->deadline_ns;
    /* With many ranks, each looks less often: the first to find a failure tells all. */
    const int n_looks = 1 + self->super.world_size / 32;
    if ((is_late || ++self->n_checks % (unsigned)n_looks == 0) &&
        pli_peers_blame_dead(self, counter, least))
        return;
    if (is_late)
        pli_epoch_fail(self, culprit, PLI_LATE);
    else if (silent_ns > DEADLOCK_MS * PLI_MS)
        pli_deadlock_check(self, culprit);
}
