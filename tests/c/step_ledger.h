/* step_ledger.h - random or listed events of gradients, played on arrays and on paper.
 *
 * A rank plays its own events on arrays and all ranks' events on a naive ledger, which
 * adds and averages numbers.  After each step every `.grad` must hold the ledger's
 * values, and be the same array as before, or a new one, as step.h says.  Values are
 * multiples of 6^4, so four means by one to three ranks are exact.
 */
#ifndef PLT_STEP_LEDGER_H
#define PLT_STEP_LEDGER_H

#include "step_ranks.h"

enum { UNIT = 1296, MOST_RANKS = 3, MOST_STEPS = 4 };

/* GATE's bucket is the first; while its gradient is missing, none is posted. */
enum { GATE, SMALL, LARGE, BROAD, ROWS, SMALL_ROWS, MIXED, N_PARAMS };

static const array_param params[N_PARAMS] = {
    [GATE] = {2, 2, 0},       [SMALL] = {2, 2, 0},
    [LARGE] = {4, 8, 0},      /* becomes a view, */
    [BROAD] = {2, 9, 0},      /* and so does this */
    [ROWS] = {4, 2, 1},       /* declared sparse */
    [SMALL_ROWS] = {4, 2, 0}, /* its gradients are sparse, but not declared so */
    [MIXED] = {4, 2, 1},      /* declared sparse, and dense on rank 0 */
};
static const array_model model = {.params = params,
                                  .n_params = N_PARAMS,
                                  .view_bytes = 64,
                                  .caps = {.bucket_bytes = 1, .last_bytes = 1}};

/* ---- events --------------------------------------------------------------------- */

typedef enum event {
    NO_GRADIENT,
    ONE_GRADIENT,
    TWO_GRADIENTS,
    LATE_GRADIENT,    /* one more than in the last step, after its bucket was posted */
    HELD_VIEW,        /* the user keeps the last `.grad`, and sets it to none */
    SWAPPED_BEFORE,   /* the user sets another `.grad` before backward */
    REPLACED_BETWEEN, /* a hook sets another one before the end of backward */
    HOOK_AFTER_OURS,  /* a hook doubles `.grad` */
    LAZY_SIGN,
    OTHER_STRIDES,
    UNDEFINED, /* the gradient is none */
    N_EVENTS
} event;

/* Steps of all ranks, after all gradients were set to none. */
typedef struct program {
    int n_steps;
    event events[MOST_STEPS][MOST_RANKS][N_PARAMS];
    pl_role roles[MOST_STEPS][MOST_RANKS];
    char has_local[MOST_STEPS][MOST_RANKS]; /* a local backward runs before the step */
    pl_join_divisor divisor;
    pl_join_grads shadow_grads;
    int is_shuffled; /* gradients come in random order */
    int ends_apart;  /* after the steps, ranks find that they are in different ones */
    const char *name;
} program;

static int is_view_param(size_t i)
{
    return i == LARGE || i == BROAD;
}

/* Whether the user sets `.grad` to none before backward. */
static int is_reset_before(event what)
{
    return what == HELD_VIEW || what == LAZY_SIGN || what == UNDEFINED ||
           what == OTHER_STRIDES;
}

static size_t n_elems_of(size_t i)
{
    return (size_t)(params[i].n_rows * params[i].n_cols);
}

static int has_sparse_gradient(size_t i, int rank)
{
    return i == ROWS || i == SMALL_ROWS || (i == MIXED && rank != 0);
}

/* The values of the k-th gradient of a step; of a sparse one, rows are zero. */
static void draw_values(unsigned seed, int rank, size_t i, int k, float *out)
{
    draw random =
        draw_of(seed * 1009u + (unsigned)rank * 101u + (unsigned)i * 11u + (unsigned)k);
    for (int row = 0; row < params[i].n_rows; row++) {
        const int is_zero = has_sparse_gradient(i, rank) && draw_below(&random, 2) == 0;
        for (int col = 0; col < params[i].n_cols; col++)
            *out++ = is_zero ? 0 : (float)(UNIT * (1 + (int)draw_below(&random, 4)));
    }
}

enum { MOST_GRADIENTS = 5 };           /* of a parameter in a step */
enum { REPLACEMENT = 99, LOCAL = 98 }; /* k of what the user, a local backward sets */

/* ---- the ledger ----------------------------------------------------------------- */

typedef struct entry {
    int has;
    float values[ARRAYS_MOST_ELEMS];
} entry;

typedef struct ledger {
    int world_size;
    entry entries[MOST_RANKS][N_PARAMS];
    entry sent[MOST_RANKS][N_PARAMS];    /* of this step */
    int n_before[MOST_RANKS][N_PARAMS];  /* gradients in the step before */
    int is_unseen[MOST_RANKS][N_PARAMS]; /* of a local backward */
    int is_used[N_PARAMS];
    int n_active;
} ledger;

static void entry_add(entry *it, size_t i, const float *values)
{
    for (size_t k = 0; k < n_elems_of(i); k++)
        it->values[k] = values[k] + (it->has ? it->values[k] : 0);
    it->has = 1;
}

static void entry_set(entry *it, size_t i, const float *values)
{
    it->has = 0;
    entry_add(it, i, values);
}

static int n_gradients(const ledger *it, event what, int rank, size_t i)
{
    const int n_before = it->n_before[rank][i];
    switch (what) {
    case NO_GRADIENT:
    case UNDEFINED:
        return 0;
    case TWO_GRADIENTS:
        return 2;
    case LATE_GRADIENT:
        return n_before > 0 && n_before < 4 ? n_before + 1 : 2;
    default:
        return 1;
    }
}

/* Whether a local backward has a gradient for the parameter. */
static int is_local(unsigned seed, int rank, size_t i)
{
    draw random = draw_of(seed * 31u + (unsigned)rank * 7u + (unsigned)i);
    return draw_below(&random, 2) == 0;
}

static void ledger_local(ledger *it, unsigned seed, int rank)
{
    float values[ARRAYS_MOST_ELEMS];
    for (size_t i = 0; i < N_PARAMS; i++) {
        if (!is_local(seed, rank, i))
            continue;
        draw_values(seed, rank, i, LOCAL, values);
        entry_add(&it->entries[rank][i], i, values);
        it->is_unseen[rank][i] = 1;
    }
}

/* A rank's backward, on paper. */
static void ledger_backward(ledger *it, event what, unsigned seed, int rank, size_t i)
{
    float values[ARRAYS_MOST_ELEMS];
    entry *grad = &it->entries[rank][i];
    const int n = n_gradients(it, what, rank, i);
    if (is_reset_before(what))
        grad->has = 0;
    draw_values(seed, rank, i, REPLACEMENT, values);
    if (what == SWAPPED_BEFORE)
        entry_set(grad, i, values);
    for (int k = 0; k < n; k++) {
        draw_values(seed, rank, i, k, values);
        entry_add(grad, i, values);
    }
    if (what == HOOK_AFTER_OURS)
        entry_add(grad, i, grad->values);
    it->sent[rank][i] = *grad;
    /* The rows of a parameter declared sparse are read at the end. */
    draw_values(seed, rank, i, REPLACEMENT, values);
    if (what == REPLACED_BETWEEN)
        entry_set(params[i].is_sparse ? &it->sent[rank][i] : grad, i, values);
    if (n > 0 || (what == NO_GRADIENT && grad->has && it->is_unseen[rank][i]))
        it->is_used[i] = 1;
    it->n_before[rank][i] = n;
}

static void ledger_average(ledger *it, const program *steps, size_t i, entry *out)
{
    const int divisor =
        steps->divisor == PL_BY_N_ACTIVE ? it->n_active : it->world_size;
    *out = (entry){.has = 1};
    for (int r = 0; r < it->world_size; r++)
        if (it->sent[r][i].has)
            for (size_t k = 0; k < n_elems_of(i); k++)
                out->values[k] += it->sent[r][i].values[k];
    for (size_t k = 0; k < n_elems_of(i); k++)
        out->values[k] /= (float)divisor;
}

static void ledger_bind(ledger *it, const program *steps, int step, size_t i)
{
    entry mean;
    ledger_average(it, steps, i, &mean);
    for (int r = 0; r < it->world_size; r++) {
        const int is_active = steps->roles[step][r] == PL_ACTIVE;
        if (!is_active && steps->shadow_grads == PL_LEAVES_GRADS)
            continue;
        if (it->is_used[i]) {
            it->entries[r][i] = mean;
            it->is_unseen[r][i] = 0;
        } else if (!is_active) {
            it->entries[r][i].has = 0;
        }
    }
}

/* A whole step of all ranks, on paper. */
static void ledger_step(ledger *it, const program *steps, int step, unsigned seed)
{
    it->n_active = 0;
    memset(it->is_used, 0, sizeof it->is_used);
    memset(it->sent, 0, sizeof it->sent);
    for (int r = 0; r < it->world_size; r++) {
        if (steps->has_local[step][r])
            ledger_local(it, seed, r);
        if (steps->roles[step][r] != PL_ACTIVE)
            continue;
        it->n_active++;
        for (size_t i = 0; i < N_PARAMS; i++)
            ledger_backward(it, steps->events[step][r][i], seed, r, i);
    }
    for (size_t i = 0; i < N_PARAMS && it->n_active > 0; i++)
        ledger_bind(it, steps, step, i);
}

/* ---- the same on arrays --------------------------------------------------------- */

enum { MOST_HELD = MOST_STEPS * N_PARAMS };

typedef struct holding {
    pl_grad *grad;
    float values[ARRAYS_MOST_ELEMS];
} holding;

typedef struct player {
    rank_arrays arrays;
    ledger paper;
    const program *steps;
    draw random;   /* this rank's own */
    unsigned seed; /* of the step */
    holding held[MOST_HELD];
    size_t n_held;
    /* of the step under way, by parameter */
    pl_grad *taken[N_PARAMS]; /* `.grad` when it was first taken; held */
    pl_grad *last[N_PARAMS];  /* ... at the end of the backward; held */
    int was_seen[N_PARAMS];   /* ... it was a view of the slot */
    int had_grad[N_PARAMS];
    int is_taken[N_PARAMS];
} player;

static pl_grad *new_array(player *it, size_t i, const float *values, event what)
{
    pli_layout layout = layout_of(params[i].n_rows, params[i].n_cols);
    const int rank = it->arrays.rank;
    if (has_sparse_gradient(i, rank))
        return array_sparse_of(&it->arrays, &layout, values);
    if (what == OTHER_STRIDES) {
        layout.dims[0].stride = 1;
        layout.dims[1].stride = params[i].n_rows;
    }
    pl_grad *grad = array_new(&it->arrays, &layout);
    if (what == LAZY_SIGN)
        grad->lazy = it->seed % 2 ? LAZY_HIDDEN : LAZY_SHOWN;
    array_fill(grad, values);
    grad->n_writes = 0;
    return grad;
}

static void hold_grad(player *it, size_t i)
{
    pl_grad *grad = it->arrays.grads[i];
    holding *next = &it->held[it->n_held];
    if (grad == NULL)
        return;
    array_hold(grad);
    next->grad = grad;
    array_values(grad, next->values);
    it->n_held++;
}

static void set_replacement(player *it, size_t i)
{
    float values[ARRAYS_MOST_ELEMS];
    draw_values(it->seed, it->arrays.rank, i, REPLACEMENT, values);
    arrays_set_grad(&it->arrays, i, new_array(it, i, values, ONE_GRADIENT));
}

static event event_now(const player *it, int step, size_t i)
{
    return it->steps->events[step][it->arrays.rank][i];
}

static void before_backward(player *it, int step)
{
    for (size_t i = 0; i < N_PARAMS; i++) {
        const event what = event_now(it, step, i);
        if (what == HELD_VIEW)
            hold_grad(it, i);
        if (is_reset_before(what))
            arrays_set_grad(&it->arrays, i, NULL);
        if (what == SWAPPED_BEFORE)
            set_replacement(it, i);
        it->arrays.has_hooks[i] = what == REPLACED_BETWEEN || what == HOOK_AFTER_OURS;
        it->had_grad[i] = it->arrays.grads[i] != NULL;
    }
}

/* A backward that is not synchronised. */
static int play_local(player *it)
{
    float values[ARRAYS_MOST_ELEMS];
    rank_arrays *arrays = &it->arrays;
    arrays->settings.is_on = 0;
    for (size_t i = 0; i < N_PARAMS; i++) {
        if (!is_local(it->seed, arrays->rank, i))
            continue;
        draw_values(it->seed, arrays->rank, i, LOCAL, values);
        if (!CHECK_OK(arrays_arrive(arrays, i, new_array(it, i, values, ONE_GRADIENT),
                                    PL_ARRIVES_ALONE)))
            return 0;
    }
    arrays->settings.is_on = 1;
    return CHECK(!pl_step_look(arrays->step).is_active);
}

static int arrive(player *it, event what, size_t i, int k)
{
    float values[ARRAYS_MOST_ELEMS];
    rank_arrays *arrays = &it->arrays;
    pl_arrival arrival = PL_ARRIVES_ALONE;
    if (arrays->has_hooks[i])
        arrival =
            what == HOOK_AFTER_OURS ? PL_ARRIVES_BEFORE_HOOKS : PL_ARRIVES_AFTER_HOOKS;
    draw_values(it->seed, arrays->rank, i, k, values);
    if (what != UNDEFINED)
        arrays_accumulate(arrays, i, new_array(it, i, values, what));
    if (!it->is_taken[i])
        it->taken[i] = array_hold_maybe(arrays->grads[i]);
    it->is_taken[i] = 1;
    return CHECK_OK(arrays_arrive(arrays, i, NULL, arrival));
}

/* The parameters of a step's gradients, in the order in which they come: the second one
 * of each after the first of all; or shuffled.  Returns their number. */
static size_t order_gradients(player *it, int step, size_t *out)
{
    size_t n = 0;
    for (int k = 0; k < MOST_GRADIENTS; k++)
        for (size_t i = 0; i < N_PARAMS; i++) {
            const event what = event_now(it, step, i);
            const int n_calls = what == UNDEFINED
                                    ? 1
                                    : n_gradients(&it->paper, what, it->arrays.rank, i);
            if (k < n_calls)
                out[n++] = i;
        }
    for (size_t a = 1; it->steps->is_shuffled && a < n; a++) {
        const size_t b = draw_below(&it->random, a + 1);
        const size_t swapped = out[a];
        out[a] = out[b];
        out[b] = swapped;
    }
    return n;
}

/* The user's hooks. */
static void after_gradients(player *it, int step)
{
    for (size_t i = 0; i < N_PARAMS; i++) {
        float sums[ARRAYS_MOST_ELEMS];
        const event what = event_now(it, step, i);
        if (what == REPLACED_BETWEEN)
            set_replacement(it, i);
        if (what != HOOK_AFTER_OURS)
            continue;
        array_values(it->arrays.grads[i], sums);
        for (size_t k = 0; k < n_elems_of(i); k++)
            sums[k] *= 2;
        array_fill(it->arrays.grads[i], sums);
    }
}

/* While a gradient of GATE is missing, no bucket is posted: so it is the last, unless
 * others are late. */
static int backward(player *it, int step)
{
    size_t order[MOST_GRADIENTS * N_PARAMS];
    int n_taken[N_PARAMS] = {0};
    before_backward(it, step);
    const size_t n = order_gradients(it, step, order);
    const int is_gate_last = !it->steps->is_shuffled && n > 0 && order[0] == GATE &&
                             event_now(it, step, SMALL) != LATE_GRADIENT;
    for (size_t a = 0; a < n; a++) {
        const size_t i = order[is_gate_last ? (a + 1) % n : a];
        if (it->steps->is_shuffled && draw_below(&it->random, 40) == 0)
            CHECK_OK(pl_step_before_fork(it->arrays.step));
        if (!arrive(it, event_now(it, step, i), i, n_taken[i]++))
            return 0;
    }
    after_gradients(it, step);
    return 1;
}

/* ---- checks --------------------------------------------------------------------- */

static void complain(const player *it, int step, size_t i, const char *words)
{
    CHECK_MORE("%s: rank %d of %d, parameter %zu, step %d, seed %u, event %d of %s",
               words, it->arrays.rank, it->arrays.world_size, i, step, it->seed,
               (int)event_now(it, step, i), it->steps->name);
}

static int is_seen(const pl_grad *grad)
{
    return grad->window != NULL && grad->window->comm != NULL;
}

/* A gradient that was dropped until the end of the step: the array that came back. */
static pl_grad *same_view(const player *it, size_t i)
{
    pl_grad *taken = it->taken[i];
    const int stays = it->had_grad[i] && it->arrays.settings.keeps_grads;
    return taken != NULL && (is_seen(taken) || stays) ? taken : NULL;
}

/* The array that `.grad` must still be after a step that used the parameter; NULL: a
 * new one. */
static pl_grad *same_array(const player *it, size_t i)
{
    const pl_step_settings *settings = &it->arrays.settings;
    pl_grad *last = it->last[i];
    if (last == NULL)
        return is_view_param(i) && it->is_taken[i] ? same_view(it, i) : NULL;
    if (has_sparse_gradient(i, 1)) /* of either kind, on some rank */
        return last->n_sparse_dims == it->arrays.grads[i]->n_sparse_dims ? last : NULL;
    if (is_view_param(i) && !it->is_taken[i] && it->was_seen[i])
        return last;
    if (settings->binds_new || (last->lazy && !settings->keeps_grads))
        return NULL;
    return last;
}

/* A view was left where it is, and then its window was retired: it is a new array or
 * not, by the order of the parameters. */
static int is_either(const player *it, size_t i)
{
    return is_view_param(i) && !it->is_taken[i] && it->was_seen[i] &&
           !is_seen(it->last[i]);
}

static void check_identity(const player *it, int step, size_t i, int is_active)
{
    const pl_grad *grad = it->arrays.grads[i];
    const pl_grad *same =
        is_active && it->paper.is_used[i] ? same_array(it, i) : it->last[i];
    if (is_either(it, i) || (!is_active && it->paper.n_active > 0 &&
                             it->steps->shadow_grads == PL_BINDS_RESULTS))
        return;
    if (same != NULL && !CHECK(grad == same))
        complain(it, step, i, "another array than before");
    if (same == NULL && grad != NULL &&
        !CHECK(grad != it->last[i] && grad != it->taken[i]))
        complain(it, step, i, "the same array as before");
    if (same == NULL && grad != NULL &&
        !CHECK((grad->window != NULL) == is_view_param(i)))
        complain(it, step, i, "not the memory of its policy");
}

static void check_grad(const player *it, int step, size_t i)
{
    const rank_arrays *arrays = &it->arrays;
    const entry *paper = &it->paper.entries[arrays->rank][i];
    const pl_grad *grad = arrays->grads[i];
    if (!CHECK((grad != NULL) == paper->has))
        complain(it, step, i, "a gradient, or none");
    else if (grad != NULL && !CHECK(array_holds(grad, paper->values)))
        complain(it, step, i, "another value");
    if (grad != NULL &&
        !CHECK(grad->n_refs == 1 + (grad == it->last[i]) + (grad == it->taken[i])))
        complain(it, step, i, "another number of references");
}

static void check_step(player *it, int step, int is_active)
{
    rank_arrays *arrays = &it->arrays;
    for (size_t i = 0; i < N_PARAMS; i++) {
        check_grad(it, step, i);
        check_identity(it, step, i, is_active);
        array_drop(it->taken[i]);
        array_drop(it->last[i]);
        it->taken[i] = it->last[i] = NULL;
        it->is_taken[i] = 0;
    }
    for (size_t h = 0; h < it->n_held; h++)
        if (!CHECK(array_holds(it->held[h].grad, it->held[h].values)))
            complain(it, step, h, "a view that is held has changed");
    CHECK(pl_step_look(arrays->step).participation.n_active == it->paper.n_active);
    CHECK(arrays_n_in_step(arrays) == 0);
    if (!CHECK(arrays->n_alive == arrays_n_known(arrays) + (long)it->n_held))
        complain(it, step, 0, "an array is left over");
}

/* ---- programs ------------------------------------------------------------------- */

static int play_step(player *it, int step)
{
    rank_arrays *arrays = &it->arrays;
    const pl_role role = it->steps->roles[step][arrays->rank];
    if ((it->steps->has_local[step][arrays->rank] && !play_local(it)) ||
        (role == PL_ACTIVE && !backward(it, step)))
        return 0;
    ledger_step(&it->paper, it->steps, step, it->seed);
    for (size_t i = 0; i < N_PARAMS; i++) {
        it->last[i] = array_hold_maybe(arrays->grads[i]);
        it->was_seen[i] = it->last[i] != NULL && is_seen(it->last[i]);
    }
    const int is_done =
        role == PL_ACTIVE
            ? CHECK_OK(arrays_end_backward(arrays))
            : CHECK_OK(pl_step_shadow(arrays->step, role, it->steps->shadow_grads));
    if (!is_done)
        complain(it, step, 0, "the step failed");
    check_step(it, step, role == PL_ACTIVE);
    return is_done;
}

/* Each rank has run another number of forwards. */
static int end_apart(player *it)
{
    rank_arrays *arrays = &it->arrays;
    for (int n = 0; n <= arrays->rank; n++)
        (void)pl_step_forward_ends(arrays->step, PL_OUTPUTS_UNWATCHED, PL_TRAINS);
    memset(arrays->has_hooks, 0, sizeof arrays->has_hooks);
    for (size_t i = 0; i < N_PARAMS; i++) {
        float values[ARRAYS_MOST_ELEMS];
        draw_values(it->seed, arrays->rank, i, 0, values);
        if (!CHECK_OK(arrays_arrive(arrays, i, new_array(it, i, values, ONE_GRADIENT),
                                    PL_ARRIVES_ALONE)))
            return 0;
        for (int r = 0; r < arrays->world_size; r++)
            it->paper.n_before[r][i] = 1;
    }
    return CHECK_FAILS(arrays_end_backward(arrays), PL_EMISMATCH, "same step") &&
           CHECK(arrays_n_in_step(arrays) == 0);
}

static int play_program(player *it, const program *steps)
{
    int is_done = 1;
    it->steps = steps;
    arrays_zero(&it->arrays);
    memset(it->paper.entries, 0, sizeof it->paper.entries);
    memset(it->paper.is_unseen, 0, sizeof it->paper.is_unseen);
    pl_step_set_join(it->arrays.step, steps->divisor, PL_JOIN_GOES_ON);
    for (int step = 0; is_done && step < steps->n_steps; step++) {
        it->seed++;
        is_done = play_step(it, step);
    }
    if (is_done && steps->ends_apart && it->arrays.world_size > 1)
        is_done = end_apart(it);
    for (; it->n_held > 0; it->n_held--)
        array_drop(it->held[it->n_held - 1].grad);
    return is_done;
}

/* How the ranks of a world run, and which programs. */
typedef struct playing {
    pl_step_settings settings;
    int is_recorded;
    size_t stride; /* plays every n-th program */
    uint64_t seed;
    int (*play)(player *it, const struct playing *what);
} playing;

static void play_rank(rank_job *job)
{
    const playing *what = job->context;
    player *it = calloc(1, sizeof *it);
    if (it == NULL)
        exit(2);
    it->paper.world_size = job->world_size;
    it->random = job->random;
    if (CHECK_OK(arrays_create(&model, job->comm, &it->arrays))) {
        it->arrays.settings = what->settings;
        it->arrays.settings.is_on = 1;
        it->arrays.is_recorded = what->is_recorded;
        (void)what->play(it, what);
    }
    arrays_destroy(&it->arrays);
    free(it);
}

#endif
