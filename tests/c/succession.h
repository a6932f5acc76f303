/* succession.h - worlds of which each follows one that has failed, and what all of
 * their ranks draw alike. */
#ifndef PLT_SUCCESSION_H
#define PLT_SUCCESSION_H

#include "hosts.h"

/* What is drawn from (seed, step, rank, parameter). */
typedef struct model {
    uint64_t seed;
    int world_size;
    size_t n_params;
    unsigned percent_unused; /* of parameters, per rank and step */
    unsigned percent_twice;
    int64_t rest_ns; /* the longest pause between gradients; 0: none */
} model;

/* Where all ranks of a failed world meet, to make the next. */
typedef struct succession {
    pthread_barrier_t meeting;
    size_t n_bytes;
    pl_comm *next[PL_MAX_RANKS]; /* the bases of the next world */
} succession;

/* The ranks of every other seed are on two hosts. */
static inline int succession_make(succession *self, const model *it)
{
    const hosts apart = {.n_hosts = 2,
                         .n_ranks = {1, it->world_size - 1},
                         .deadline_ns = RANKS_DEADLINE_NS,
                         .is_narrow = it->seed / 4 % 2 == 0};
    if (it->world_size > 1 && it->seed % 2 == 0)
        return hosts_create(&apart, self->n_bytes, self->next);
    return CHECK_OK(
        local_create(it->world_size, self->n_bytes, RANKS_DEADLINE_NS, self->next));
}

/* Call on every rank: returns its base of the next world, or NULL. */
static inline pl_comm *succession_meet(succession *self, const model *it, int rank)
{
    if (pthread_barrier_wait(&self->meeting) == PTHREAD_BARRIER_SERIAL_THREAD &&
        !succession_make(self, it))
        memset(self->next, 0, sizeof self->next);
    (void)pthread_barrier_wait(&self->meeting);
    return self->next[rank];
}

/* Runs the model's ranks as threads of a first world, and maybe of further ones.  Each
 * destroys its own. */
static inline void succession_run(succession *self, const model *it,
                                  void (*run)(rank_job *job), void *context)
{
    if (!succession_make(self, it))
        return;
    (void)pthread_barrier_init(&self->meeting, NULL, (unsigned)it->world_size);
    ranks_run(it->world_size, self->next, run, context, it->seed);
    (void)pthread_barrier_destroy(&self->meeting);
}

/* ---- random choices ------------------------------------------------------------- */

static inline unsigned step_percent(const model *it, uint64_t step, int rank, size_t i,
                                    unsigned salt)
{
    draw random = draw_of(it->seed * 1000003 + step * 10007 + (uint64_t)i * 101 +
                          (uint64_t)rank * 11 + salt);
    return (unsigned)draw_below(&random, 100);
}

/* The rank that fails in a step, and the point of its backward where it does. */
typedef struct accident {
    int culprit; /* -1: no rank fails in this step */
    size_t after_params;
    char words[48];
} accident;

static inline accident accident_of(const model *it, uint64_t step)
{
    draw shared = draw_of(it->seed * 7919 + step);
    accident what = {.culprit = (int)draw_below(&shared, (size_t)it->world_size),
                     .after_params = draw_below(&shared, it->n_params + 1)};
    if (draw_below(&shared, 3) == 0)
        what.culprit = -1;
    (void)snprintf(what.words, sizeof what.words, "accident of step %d;", (int)step);
    return what;
}

/* Checks a step's end after the accident of another rank. */
static inline void check_accident(const accident *what, int rank, pl_status st)
{
    if (!CHECK(st == PL_EPEER && blames(pl_error_message(), rank, what->culprit) &&
               error_has(what->words)))
        CHECK_MORE("%s: %s", pl_status_text(st), pl_error_message());
}

#endif
