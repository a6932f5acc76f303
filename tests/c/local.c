/* local.c - ranks that are threads: one segment, mapped once, used by all. */
#include <string.h>

#include "comm/shm_comm.h"
#include "core/alloc.h"
#include "local.h"

enum { LOCAL_RING_OPS = 1024 };

pl_status local_create(int world_size, size_t arena_bytes, int64_t deadline_ns,
                       pl_comm **out)
{
    pl_status st = PL_OK;
    pli_shm_segment *shared = NULL;
    pli_shm_comm *comms[PL_MAX_RANKS] = {NULL};
    if (world_size < 1 || world_size > PL_MAX_RANKS)
        PL_FAIL(PL_EINVAL, "world_size is %d: give 1 to %d", world_size, PL_MAX_RANKS);
    PL_TRY(pli_calloc(1, sizeof *shared, "a world of threads", &shared));
    shared->fd = -1;
    PL_TRY(pli_segment_create(PLI_SEGMENT_FILE, world_size, arena_bytes, LOCAL_RING_OPS,
                              shared));
    atomic_store(&shared->n_users, 1); /* this function's own reference */
    for (int r = 0; r < world_size; r++) {
        PL_TRY(pli_shm_comm_create(&(pli_shm_comm_options){.segment = shared,
                                                           .rank = r,
                                                           .deadline_ns = deadline_ns},
                                   &comms[r]));
        atomic_fetch_add(&shared->n_users, 1);
    }
    for (int r = 0; r < world_size; r++) {
        out[r] = &comms[r]->super;
        comms[r] = NULL;
    }
done:
    for (int r = 0; r < PL_MAX_RANKS; r++)
        if (comms[r] != NULL)
            pl_comm_destroy(&comms[r]->super);
    pli_segment_release(shared);
    return st;
}
