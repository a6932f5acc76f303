/* reducer_pair.h - two ranks with a reducer each.  One thread drives both, so that each
 * test chooses the order of all that happens. */
#ifndef PLT_REDUCER_PAIR_H
#define PLT_REDUCER_PAIR_H

#include "ranks.h"
#include "reducer/reducer_state.h"

typedef struct pair {
    pl_comm *comms[2];
    pl_backend *backend;
    pl_reducer *reducers[2];
} pair;

static inline void pair_destroy(pair *it)
{
    for (int r = 0; r < 2; r++) {
        pl_reducer_destroy(it->reducers[r]);
        pl_comm_destroy(it->comms[r]);
    }
    pli_backend_destroy(it->backend);
}

static inline pl_status pair_create(const pl_reducer_spec *spec, pair *out)
{
    pl_status st = PL_OK;
    *out = (pair){.backend = NULL};
    PL_TRY(pli_cpu_backend_create(&out->backend));
    PL_TRY(
        local_create(2, pl_reducer_arena_bytes(spec), RANKS_DEADLINE_NS, out->comms));
    for (int r = 0; r < 2; r++)
        PL_TRY(pl_reducer_create(spec, out->comms[r], out->backend, &out->reducers[r]));
done:
    if (st != PL_OK)
        pair_destroy(out);
    return st;
}

static inline void pair_run(const pl_reducer_spec *spec, void (*run)(pair *it))
{
    pair it;
    if (!CHECK_OK(pair_create(spec, &it)))
        return;
    run(&it);
    pair_destroy(&it);
}

static inline void begin_both(const pair *it)
{
    for (int r = 0; r < 2; r++)
        CHECK_OK(pl_reducer_begin(it->reducers[r]));
}

static inline void close_and_wait(const pair *it)
{
    for (int r = 0; r < 2; r++)
        CHECK_OK(pl_reducer_close(it->reducers[r]));
    CHECK_OK(pl_comm_progress(it->comms[1]));
    for (int r = 0; r < 2; r++)
        CHECK_OK(pl_reducer_wait(it->reducers[r], RANKS_SLICE_NS));
}

static inline void end_both(const pair *it)
{
    for (int r = 0; r < 2; r++)
        CHECK_OK(pl_reducer_end(it->reducers[r]));
}

/* Leaves a failed world for a new one.  Returns 0 if there is none. */
static inline int pair_renew(const pl_reducer_spec *spec, pair *it)
{
    pair next;
    if (!CHECK_OK(pair_create(spec, &next)))
        return 0;
    for (int r = 0; r < 2; r++) {
        CHECK(pl_reducer_has_failed(it->reducers[r]));
        CHECK_OK(pl_reducer_check_weights(it->reducers[r]));
        pl_reducer_follow(next.reducers[r], it->reducers[r]);
    }
    pair_destroy(it);
    *it = next;
    return 1;
}

static inline float *pair_slot(const pair *it, int rank, size_t param)
{
    return (float *)pli_comm_memory(it->comms[rank],
                                    pl_reducer_slot_offset(it->reducers[rank], param));
}

#endif
