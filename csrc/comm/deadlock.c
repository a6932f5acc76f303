/* deadlock.c - finds two ranks that wait for each other in two worlds.
 *
 * If rank 0 runs backward through wrapper A and then B, and rank 1 through B and then
 * A, each waits in its first wrapper for gradients that the other computes later:
 *
 *     rank 0   A posted, waits -> rank 1          (B comes later)
 *     rank 1   B posted, waits -> rank 0          (A comes later)
 *
 * Neither can go on, so both fail after a short while and not at the deadline.
 */
#include "shm_counters.h"

typedef struct wait {
    const pli_shm_comm *here;
    int rank;
} wait;

/* A process may have another rank in another world. */
static const pli_rank *find_process(const pli_shm_comm *world, uint64_t process)
{
    for (int r = 0; r < world->super.world_size; r++) {
        const pli_rank *rank = pli_rank_of(world->segment, r);
        if (r != world->super.rank && atomic_load(&rank->process) == process)
            return rank;
    }
    return NULL;
}

/* Whether the rank's last activity was to wait for the end of a step. */
static int waits(const pli_rank *rank)
{
    const uint32_t activity = atomic_load(&rank->activity);
    return activity == PL_FINISHING || activity == PL_JOINED;
}

/* Fails both worlds if so: the other rank must not find this one gone instead. */
static int fail_if_waits_for_us(const pl_comm *other, const void *context)
{
    if (other->host == NULL)
        return 0; /* of several hosts: each host's part is a world itself */
    const wait *at = context;
    const pli_shm_comm *there = (const pli_shm_comm *)(const void *)other;
    const pli_rank *peer_here = pli_rank_of(at->here->segment, at->rank);
    const pli_rank *own_here = pli_rank_of(at->here->segment, at->here->super.rank);
    const pli_rank *own_there = pli_rank_of(there->segment, there->super.rank);
    const pli_rank *peer_there = find_process(there, atomic_load(&peer_here->process));
    pli_failure failure;
    /* Nothing waits for a failed step, whatever the activity still shows. */
    if (peer_there == NULL || atomic_load(&peer_there->life) != PLI_PRESENT ||
        pli_failure_stands(there, &failure))
        return 0;
    /* The peer has posted what this rank has not, and only waits for it. */
    if (!waits(peer_there) ||
        atomic_load(&peer_there->posted) <= atomic_load(&own_there->posted) ||
        atomic_load(&peer_there->thread) != atomic_load(&peer_here->thread) ||
        atomic_load(&own_there->thread) != atomic_load(&own_here->thread))
        return 0;
    pli_epoch_fail(at->here, at->rank, PLI_DEADLOCK);
    pli_epoch_fail(there, there->super.rank, PLI_DEADLOCK);
    return 1;
}

void pli_deadlock_check(const pli_shm_comm *self, int rank)
{
    const wait at = {.here = self, .rank = rank};
    const pli_rank *they = pli_rank_of(self->segment, rank);
    const pli_rank *we = pli_rank_of(self->segment, self->super.rank);
    if (atomic_load(&they->process) != 0 && waits(we) &&
        atomic_load(&they->posted) < atomic_load(&we->posted))
        (void)pli_progress_any_other(self->progress, &self->super, fail_if_waits_for_us,
                                     &at);
}
