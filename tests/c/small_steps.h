/* small_steps.h - steps of a model with a small, a large and a sparse gradient, whose
 * means every rank knows. */
#ifndef PLT_SMALL_STEPS_H
#define PLT_SMALL_STEPS_H

#include "step_ranks.h"

enum { SMALL, LARGE, ROWS, N_PARAMS };

static const array_param params[N_PARAMS] = {
    [SMALL] = {2, 2, 0}, [LARGE] = {4, 8, 0}, [ROWS] = {4, 2, 1}};
static const array_model model = {.params = params,
                                  .n_params = N_PARAMS,
                                  .view_bytes = 64,
                                  .caps = {.bucket_bytes = 64, .last_bytes = 64}};

/* A gradient with `value` in each element; of the sparse parameter, in row `rank`. */
static inline pl_grad *gradient(rank_arrays *self, size_t i, float value)
{
    float values[ARRAYS_MOST_ELEMS] = {0};
    const pli_layout layout = layout_of(params[i].n_rows, params[i].n_cols);
    for (size_t k = 0; k < layout.n_elems; k++)
        if (i != ROWS || (int)k / params[i].n_cols == self->rank)
            values[k] = value;
    return i == ROWS ? array_sparse_of(self, &layout, values)
                     : array_dense_of(self, &layout, values);
}

/* Whether `.grad` is the mean of such gradients of all ranks, `value` on rank 0 and one
 * more on each further rank. */
static inline int is_mean(const rank_arrays *self, size_t i, float value)
{
    float values[ARRAYS_MOST_ELEMS];
    const float n = (float)self->world_size;
    for (size_t k = 0; k < self->grads[i]->layout.n_elems; k++) {
        const int row = (int)k / params[i].n_cols;
        values[k] = value + (n - 1) / 2;
        if (i == ROWS)
            values[k] = row < self->world_size ? (value + (float)row) / n : 0;
    }
    return array_holds(self->grads[i], values);
}

static inline int backward(rank_arrays *self, float value)
{
    for (size_t i = N_PARAMS; i-- > 0;)
        if (!CHECK_OK(arrays_arrive(self, i,
                                    gradient(self, i, value + (float)self->rank),
                                    PL_ARRIVES_ALONE)))
            return 0;
    return CHECK_OK(arrays_end_backward(self));
}

static inline void check_state(const rank_arrays *self, uint64_t n_steps)
{
    const pl_step_state state = pl_step_look(self->step);
    CHECK(!state.is_active && !state.is_open && !state.has_failed);
    CHECK(state.number == n_steps && state.n_taken == n_steps);
    CHECK(state.participation.n_active == self->world_size);
    CHECK(state.plan->n_params == N_PARAMS);
    CHECK(self->n_finished == n_steps);
    unsigned char counts[N_PARAMS];
    pl_step_count_grads(self->step, counts);
    for (size_t i = 0; i < N_PARAMS; i++)
        CHECK(counts[i] == 1);
    CHECK(arrays_n_in_step(self) == 0);
    CHECK(self->n_alive == arrays_n_known(self));
    CHECK(self->n_calls[CALL_CURRENT_STREAM] == 0); /* of a GPU */
}

static inline void take_three_steps(rank_job *job)
{
    rank_arrays self;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        for (int n = 1; n <= 3; n++) {
            arrays_zero(&self);
            if (!backward(&self, (float)(8 * n)))
                break;
            for (size_t i = 0; i < N_PARAMS; i++)
                CHECK(is_mean(&self, i, (float)(8 * n)));
            CHECK(self.grads[SMALL]->window == NULL && self.grads[LARGE]->window);
            CHECK(self.grads[ROWS]->n_sparse_dims == 1);
            check_state(&self, (uint64_t)n);
        }
    }
    arrays_destroy(&self);
}

#endif
