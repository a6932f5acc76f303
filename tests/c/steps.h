/* steps.h - training steps of a made-up model, which every rank can compute in full.
 *
 * The number of gradients of each parameter, on each rank, and their values are drawn
 * from (seed, step, rank, parameter), so each rank can compute the exact means.  Values
 * are multiples of the world size, or of another unit.
 */
#ifndef PLT_STEPS_H
#define PLT_STEPS_H

#include <stdlib.h>

#include "ranks.h"
#include "reducer/reducer_state.h"
#include "values.h"

enum { STEPS_MAX_PARAMS = 40, STEPS_MAX_ELEMS = 300, STEPS_MAX_GRADS = 2 };

typedef struct model {
    uint64_t seed;
    int world_size;
    size_t n_params;
    pl_param params[STEPS_MAX_PARAMS];
    pl_plan_caps caps;
    unsigned percent_unused; /* of parameters, per rank and step */
    unsigned percent_twice;
    unsigned percent_held;
    int unit;
    uint64_t n_batches[PL_MAX_RANKS]; /* steps for which a rank has gradients; 0: all */
    int64_t rest_ns;                  /* the longest pause between gradients; 0: none */
} model;

static inline model model_of(uint64_t seed, int world_size, size_t n_params)
{
    static const pl_dtype dtypes[] = {PL_F32,  PL_BF16, PL_F16, PL_F64,
                                      PL_C128, PL_C64,  PL_F32};
    draw random = draw_of(seed);
    model it = {.seed = seed,
                .world_size = world_size,
                .unit = world_size,
                .n_params = n_params,
                .caps = {.bucket_bytes = 512 + draw_below(&random, 4096),
                         .last_bytes = draw_below(&random, 1024)}};
    const size_t n_dtypes = 1 + draw_below(&random, 7);
    for (size_t i = 0; i < n_params; i++)
        it.params[i] = (pl_param){.n_elems = 1 + draw_below(&random, STEPS_MAX_ELEMS),
                                  .dtype = dtypes[draw_below(&random, n_dtypes)]};
    return it;
}

static inline pl_reducer_spec spec_of(const model *it)
{
    return (pl_reducer_spec){.params = it->params,
                             .n_params = it->n_params,
                             .extra_bytes = sizeof(uint64_t),
                             .caps = it->caps};
}

/* ---- worlds --------------------------------------------------------------------- */

/* Runs the model's ranks as threads of one world. */
static inline void run_model(const model *it, void (*run)(rank_job *job), void *context)
{
    const pl_reducer_spec spec = spec_of(it);
    ranks_run_world(it->world_size, pl_reducer_arena_bytes(&spec), run, context,
                    it->seed);
}

/* Makes the bases of a world for all ranks. */
typedef int (*world_fn)(const model *it, size_t n_bytes, pl_comm **out);

/* Where all ranks of a failed world meet, to make the next. */
typedef struct succession {
    pthread_barrier_t meeting;
    world_fn make;
    size_t n_bytes;
    pl_comm *next[PL_MAX_RANKS];
} succession;

/* Call on every rank: returns its base of the next world, or NULL. */
static inline pl_comm *succession_meet(succession *self, const model *it, int rank)
{
    if (pthread_barrier_wait(&self->meeting) == PTHREAD_BARRIER_SERIAL_THREAD &&
        !self->make(it, self->n_bytes, self->next))
        memset(self->next, 0, sizeof self->next);
    (void)pthread_barrier_wait(&self->meeting);
    return self->next[rank];
}

/* Runs the model's ranks as threads of a first world, and maybe of further ones.  Each
 * destroys its own. */
static inline void succession_run(succession *self, const model *it,
                                  void (*run)(rank_job *job), void *context)
{
    if (!self->make(it, self->n_bytes, self->next))
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

static inline int step_has_batch(const model *it, uint64_t step, int rank)
{
    return it->n_batches[rank] == 0 || step <= it->n_batches[rank];
}

static inline int step_n_grads(const model *it, uint64_t step, int rank, size_t i)
{
    if (!step_has_batch(it, step, rank))
        return 0;
    if (step_percent(it, step, rank, i, 1) < it->percent_unused)
        return 0;
    return step_percent(it, step, rank, i, 2) < it->percent_twice ? 2 : 1;
}

static inline int step_is_held(const model *it, uint64_t step, int rank, size_t i)
{
    return step_percent(it, step, rank, i, 3) < it->percent_held;
}

static inline int step_value(const model *it, uint64_t step, int rank, size_t i,
                             int k_grad, size_t part)
{
    const unsigned mixed =
        ((unsigned)part * 2654435761u + (unsigned)i * 40503u +
         (unsigned)step * 2246822519u + (unsigned)rank * 3266489917u +
         (unsigned)k_grad * 668265263u) >>
        16;
    return it->unit * ((int)(mixed % 5) - 2);
}

static inline size_t param_parts(const model *it, size_t i)
{
    return value_n_parts(it->params[i].dtype, it->params[i].n_elems);
}

/* The sum of one rank's gradients [from, to) for one part. */
static inline int step_total(const model *it, uint64_t step, int rank, size_t i,
                             int from, int to, size_t part)
{
    int total = 0;
    for (int k_grad = from; k_grad < to; k_grad++)
        total += step_value(it, step, rank, i, k_grad, part);
    return total;
}

static inline void fill_grads(const model *it, uint64_t step, int rank, size_t i,
                              int from, int to, void *out)
{
    for (size_t part = 0; part < param_parts(it, i); part++)
        value_put(out, value_part(it->params[i].dtype), part,
                  step_total(it, step, rank, i, from, to, part));
}

static inline int step_mean(const model *it, uint64_t step, size_t i, size_t part)
{
    int sum = 0;
    for (int r = 0; r < it->world_size; r++)
        sum += step_total(it, step, r, i, 0, step_n_grads(it, step, r, i), part);
    return sum / it->world_size;
}

static inline int step_is_used(const model *it, uint64_t step, size_t i)
{
    for (int r = 0; r < it->world_size; r++)
        if (step_n_grads(it, step, r, i) > 0)
            return 1;
    return 0;
}

/* ---- a step, on any memory ------------------------------------------------------ */

static inline pl_status reducer_wait_through(pl_reducer *reducer)
{
    pl_status st = PL_EAGAIN;
    while (st == PL_EAGAIN)
        st = pl_reducer_wait(reducer, RANKS_SLICE_NS);
    return st;
}

/* Holds back the buckets of this step's held parameters. */
static inline void defer_held(const model *it, uint64_t step, int rank,
                              pl_reducer *reducer)
{
    for (size_t i = 0; i < it->n_params; i++)
        if (step_is_held(it, step, rank, i))
            pl_reducer_defer_bucket(reducer, i);
}

/* Marks the parameters that have no gradient on this rank, and closes the step. */
static inline pl_status close_step(const model *it, uint64_t step, int rank,
                                   pl_reducer *reducer)
{
    pl_status st = PL_OK;
    for (size_t i = 0; i < it->n_params && st == PL_OK; i++)
        if (step_n_grads(it, step, rank, i) == 0)
            st = pl_reducer_mark_unused(reducer, i, NULL, PL_REPLACE, PL_UNUSED);
    return st == PL_OK ? pl_reducer_close(reducer) : st;
}

/* Checks that the memory at `at` holds the ranks' sum divided by `divisor`. */
static inline void check_mean(const model *it, uint64_t step, int rank, size_t i,
                              const void *at, int divisor)
{
    const pl_dtype dtype = it->params[i].dtype;
    size_t n_wrong = 0;
    for (size_t part = 0; part < param_parts(it, i); part++)
        n_wrong += !value_is(at, value_part(dtype), part,
                             step_mean(it, step, i, part) * it->world_size / divisor);
    if (!CHECK(n_wrong == 0))
        CHECK_MORE("seed %d, step %d, rank %d of %d, parameter %zu of %s: %zu parts of "
                   "%zu wrong",
                   (int)it->seed, (int)step, rank, it->world_size, i,
                   pl_dtype_text(dtype), n_wrong, param_parts(it, i));
}

/* Checks a step's end after the accident of another rank. */
static inline void check_accident(const accident *what, int rank, pl_status st)
{
    if (!CHECK(st == PL_EPEER && blames(pl_error_message(), rank, what->culprit) &&
               error_has(what->words)))
        CHECK_MORE("%s: %s", pl_status_text(st), pl_error_message());
}

/* ---- a step, in host memory ----------------------------------------------------- */

typedef struct trainer {
    const model *model;
    pl_comm *comm;
    pl_backend *backend;
    pl_reducer *reducer;
    int rank;
    draw *random;
    int n_late; /* results so far */
    int taken[STEPS_MAX_PARAMS];
    _Alignas(16) char data[STEPS_MAX_ELEMS * 16];
} trainer;

static inline int trainer_create(const model *it, pl_comm *comm, draw *random,
                                 trainer *out)
{
    const pl_reducer_spec spec = spec_of(it);
    *out = (trainer){
        .model = it, .comm = comm, .rank = pl_comm_rank(comm), .random = random};
    return CHECK_OK(pli_cpu_backend_create(&out->backend)) &&
           CHECK_OK(pl_reducer_create(&spec, comm, out->backend, &out->reducer));
}

static inline void trainer_destroy(trainer *self)
{
    pl_reducer_destroy(self->reducer);
    pli_backend_destroy(self->backend);
}

static inline char *trainer_slot(const trainer *self, size_t i)
{
    return self->comm->arena + pl_reducer_slot_offset(self->reducer, i);
}

/* The first gradient replaces, or is in its slot already; later ones add. */
static inline pl_status trainer_grad(trainer *self, uint64_t step, size_t i, int k_grad)
{
    pl_ready_result result = PL_LATE;
    void *data = self->data;
    pl_write_mode mode = k_grad == 0 ? PL_REPLACE : PL_ADD;
    if (k_grad == 0 && draw_below(self->random, 3) == 0) {
        mode = PL_IN_PLACE;
        data = trainer_slot(self, i);
    }
    fill_grads(self->model, step, self->rank, i, k_grad, k_grad + 1, data);
    const pl_status st =
        pl_reducer_mark_ready(self->reducer, i, data, mode, NULL, &result);
    if (st != PL_OK)
        return st;
    if (result == PL_COPIED)
        self->taken[i]++;
    else
        self->n_late++;
    CHECK(result == PL_COPIED || k_grad > 0);
    CHECK(result == PL_COPIED || self->model->params[i].n_elems > 0);
    CHECK(result == PL_COPIED || !step_is_held(self->model, step, self->rank, i));
    return PL_OK;
}

/* Fires parameters in any order, the first gradient of each before a second of any. */
static inline pl_status trainer_backward(trainer *self, uint64_t step, size_t n_params)
{
    const model *it = self->model;
    uint32_t order[STEPS_MAX_PARAMS];
    memset(self->taken, 0, sizeof self->taken);
    defer_held(it, step, self->rank, self->reducer);
    for (int k_grad = 0; k_grad < STEPS_MAX_GRADS; k_grad++) {
        draw_order(self->random, order, it->n_params);
        for (size_t k = 0; k < n_params; k++) {
            if (it->rest_ns > 0)
                draw_rest(self->random, it->rest_ns);
            if (k_grad >= step_n_grads(it, step, self->rank, order[k]))
                continue;
            const pl_status st = trainer_grad(self, step, order[k], k_grad);
            if (st != PL_OK)
                return st;
        }
    }
    return PL_OK;
}

/* Every other step adds late gradients in the second all-reduce; the others write new
 * totals. */
static inline pl_status trainer_amend(trainer *self, uint64_t step)
{
    const model *it = self->model;
    for (size_t i = 0; i < it->n_params; i++) {
        const int n_grads = step_n_grads(it, step, self->rank, i);
        const int from = step % 2 == 0 ? self->taken[i] : 0;
        if (!pl_reducer_is_late(self->reducer, i))
            continue;
        fill_grads(it, step, self->rank, i, from, n_grads, self->data);
        const pl_status st =
            pl_reducer_write_late(self->reducer, i, from < n_grads ? self->data : NULL,
                                  step % 2 == 0 ? PL_ADD : PL_REPLACE);
        if (st != PL_OK)
            return st;
    }
    const pl_status st = pl_reducer_close(self->reducer);
    return st == PL_OK ? reducer_wait_through(self->reducer) : st;
}

/* The root has written its `extra`. */
static inline pl_status trainer_finish_with_extra(trainer *self, uint64_t step)
{
    pl_status st = close_step(self->model, step, self->rank, self->reducer);
    if (st == PL_OK)
        st = reducer_wait_through(self->reducer);
    if (st == PL_OK && pl_reducer_n_late(self->reducer) > 0)
        st = trainer_amend(self, step);
    return st;
}

static inline pl_status trainer_finish(trainer *self, uint64_t step)
{
    if (self->rank == 0)
        memcpy(pl_reducer_extra(self->reducer), &step, sizeof step);
    return trainer_finish_with_extra(self, step);
}

/* Call when the step's means are in, before the step's end. */
static inline void trainer_check(trainer *self, uint64_t step)
{
    const model *it = self->model;
    uint64_t extra = 0;
    memcpy(&extra, pl_reducer_extra(self->reducer), sizeof extra);
    CHECK(extra == step);
    CHECK(pl_reducer_n_late(self->reducer) == 0);
    for (size_t i = 0; i < it->n_params; i++) {
        check_mean(it, step, self->rank, i, trainer_slot(self, i), it->world_size);
        CHECK((pl_reducer_is_used(self->reducer, i) != 0) ==
              (step_is_used(it, step, i) != 0));
        CHECK((int)self->reducer->slots[i].n_ready ==
              step_n_grads(it, step, self->rank, i));
    }
}

/* A whole step without a failure. */
static inline int trainer_step(trainer *self, uint64_t step)
{
    if (!CHECK_OK(pl_reducer_begin(self->reducer)) ||
        !CHECK_OK(trainer_backward(self, step, self->model->n_params)) ||
        !CHECK_OK(trainer_finish(self, step)))
        return 0;
    trainer_check(self, step);
    return CHECK_OK(pl_reducer_end(self->reducer));
}

/* Some such steps of a model, which is the context. */
enum { STEPS_TRAINED = 8 };
static atomic_int n_late_verdicts;

static inline void train_model(rank_job *job)
{
    trainer self;
    if (!trainer_create(job->context, job->comm, &job->random, &self))
        return;
    for (uint64_t step = 1; step <= STEPS_TRAINED; step++) {
        if (!trainer_step(&self, step))
            break;
        CHECK(self.reducer->step == step);
        CHECK(self.reducer->generation == (step > 1));
    }
    atomic_fetch_add(&n_late_verdicts, self.n_late);
    trainer_destroy(&self);
}

#endif
