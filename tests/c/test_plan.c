/* test_plan.c - the layout of parameters, by its properties.
 *
 * check_plan() checks a plan against all that plan.h promises; the tests call it on
 * plans made by hand and at random.
 */
#include <string.h>

#include "check.h"
#include "core/plan.h"
#include "draw.h"

enum { MAX_PARAMS = 1000 };

#define CAPS(bytes, last) {.bucket_bytes = (bytes), .last_bytes = (last)}
#define WIDE CAPS(1 << 20, 1 << 20)

static const pl_plan_caps wide = WIDE;

static size_t padded_bytes(const pl_param *param)
{
    return (param->n_elems * pl_dtype_bytes(param->dtype) + PL_CACHE_LINE - 1) /
           PL_CACHE_LINE * PL_CACHE_LINE;
}

/* ---- properties of every plan --------------------------------------------------- */

/* Buckets lie one after the other, and so do their members inside them. */
static void check_layout(const pl_plan *plan, const pl_param *params)
{
    size_t bucket_at = 0;
    size_t n_members = 0;
    for (size_t b = 0; b < plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &plan->buckets[b];
        size_t slot_at = bucket_at;
        CHECK(bucket->offset_bytes == bucket_at);
        CHECK(bucket->n_params > 0);
        CHECK(bucket->params == plan->members + n_members);
        for (size_t m = 0; m < bucket->n_params; m++) {
            const uint32_t i = bucket->params[m];
            CHECK(params[i].dtype == bucket->dtype);
            CHECK(plan->slots[i].bucket == b);
            CHECK(plan->slots[i].offset_bytes == slot_at);
            CHECK(slot_at % PL_CACHE_LINE == 0);
            slot_at += padded_bytes(&params[i]);
        }
        CHECK(bucket->n_elems * pl_dtype_bytes(bucket->dtype) == slot_at - bucket_at);
        bucket_at = slot_at;
        n_members += bucket->n_params;
    }
    CHECK(n_members == plan->n_params);
    CHECK(bucket_at == plan->n_bytes);
    CHECK(plan->n_bytes == pl_plan_bytes(params, plan->n_params));
}

/* Within a dtype the members of all buckets, in turn, are the order itself; buckets are
 * issued by the position of their last member. */
static void check_order_kept(const pl_plan *plan, const pl_param *params,
                             const uint32_t *order)
{
    static size_t position_of[MAX_PARAMS];
    size_t latest[PL_N_DTYPES];
    size_t last_end = 0;
    for (size_t d = 0; d < PL_N_DTYPES; d++)
        latest[d] = 0;
    for (size_t p = 0; p < plan->n_params; p++)
        position_of[order[p]] = p;
    for (size_t b = 0; b < plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &plan->buckets[b];
        for (size_t m = 0; m < bucket->n_params; m++) {
            const size_t p = position_of[bucket->params[m]] + 1;
            CHECK(p > latest[params[bucket->params[m]].dtype]);
            latest[params[bucket->params[m]].dtype] = p;
        }
        CHECK(latest[bucket->dtype] > last_end);
        last_end = latest[bucket->dtype];
    }
    CHECK(last_end == plan->n_params);
}

/* The cap of bucket b, which is the k-th of its dtype. */
static size_t cap_of(const pl_plan *plan, const pl_plan_caps *caps, size_t b, size_t k)
{
    if (caps->n_each > 0)
        return caps->each[k < caps->n_each ? k : caps->n_each - 1];
    return b + 1 == plan->n_buckets ? caps->last_bytes : caps->bucket_bytes;
}

/* Each bucket keeps to its cap, and took all that it could: from the end, or with a cap
 * for each from the beginning, the next parameter of its dtype would not fit. */
static void check_caps(const pl_plan *plan, const pl_param *params,
                       const pl_plan_caps *caps)
{
    const pl_bucket_plan *last_of[PL_N_DTYPES] = {NULL};
    size_t caps_of[PL_N_DTYPES], n_of[PL_N_DTYPES] = {0};
    for (size_t b = 0; b < plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &plan->buckets[b];
        const pl_bucket_plan *before = last_of[bucket->dtype];
        const size_t n_bytes = bucket->n_elems * pl_dtype_bytes(bucket->dtype);
        const size_t cap = cap_of(plan, caps, b, n_of[bucket->dtype]++);
        CHECK(bucket->n_params == 1 || n_bytes <= cap);
        if (before != NULL && caps->n_each > 0)
            CHECK(before->n_elems * pl_dtype_bytes(before->dtype) +
                      padded_bytes(&params[bucket->params[0]]) >
                  caps_of[bucket->dtype]);
        else if (before != NULL)
            CHECK(n_bytes +
                      padded_bytes(&params[before->params[before->n_params - 1]]) >
                  cap);
        last_of[bucket->dtype] = bucket;
        caps_of[bucket->dtype] = cap;
    }
}

/* Returns the plan; NULL if there is none. */
static pl_plan *check_plan(const pl_param *params, size_t n, const uint32_t *order,
                           const pl_plan_caps *caps)
{
    static uint32_t reversed[MAX_PARAMS];
    pl_plan *plan = NULL;
    if (!CHECK_OK(pl_plan_create(params, n, order, caps, &plan)))
        return NULL;
    for (size_t i = 0; i < n; i++)
        reversed[i] = (uint32_t)(n - 1 - i);
    CHECK(plan->n_params == n);
    check_layout(plan, params);
    check_order_kept(plan, params, order != NULL ? order : reversed);
    check_caps(plan, params, caps);
    return plan;
}

/* ---- by hand -------------------------------------------------------------------- */

/* The parameters, and the buckets that they must give. */
typedef struct hand_plan {
    size_t n_params;
    const pl_param *params;
    pl_plan_caps caps;
    const char *buckets;
} hand_plan;

#define PARAMS(...)                                                                    \
    (const pl_param[])                                                                 \
    {                                                                                  \
        __VA_ARGS__                                                                    \
    }
#define EACH(n, ...) {.each = (const size_t[]){__VA_ARGS__}, .n_each = (n)}
#define A_LINE {16, PL_F32}

static const pl_param lines[12] = {A_LINE, A_LINE, A_LINE, A_LINE, A_LINE, A_LINE,
                                   A_LINE, A_LINE, A_LINE, A_LINE, A_LINE, A_LINE};

static const hand_plan hand_plans[] = {
    /* a parameter larger than the cap has its own bucket */
    {4, PARAMS(A_LINE, {100000, PL_F32}, A_LINE, A_LINE), CAPS(1024, 512),
     "|3 2 |1 |0 "},
    /* the last bucket is small, the others are cut from the end: the rest is first */
    {12, lines, CAPS(256, 64), "|11 10 9 |8 7 6 5 |4 3 2 1 |0 "},
    /* caps of 0 give each parameter a bucket */
    {4, PARAMS({3, PL_F32}, {3, PL_F64}, {3, PL_F32}, {3, PL_F64}), CAPS(0, 0),
     "|3 |2 |1 |0 "},
    /* dtypes do not share buckets, which are issued as they end */
    {5, PARAMS({5, PL_F32}, {5, PL_BF16}, {5, PL_F32}, {5, PL_BF16}, {5, PL_F64}), WIDE,
     "|4 |3 1 |2 0 "},
    {4, PARAMS({0, PL_F32}, {5, PL_F32}, {0, PL_F32}, {0, PL_F16}), WIDE, "|3 |2 1 0 "},
    /* with a cap for each, buckets are cut from the beginning; the last cap repeats */
    {11, lines, EACH(3, 64, 192, 128), "|10 |9 8 7 |6 5 |4 3 |2 1 |0 "},
    /* every dtype begins with the first cap */
    {6, PARAMS({8, PL_F64}, A_LINE, {8, PL_F64}, A_LINE, {8, PL_F64}, A_LINE),
     EACH(2, 64, 1 << 20), "|5 |4 |3 1 |2 0 "},
    /* a parameter larger than its cap takes that cap for itself */
    {3, PARAMS(A_LINE, A_LINE, {1000, PL_F32}), EACH(2, 64, 128), "|2 |1 0 "},
};

TEST(plans_by_hand_have_the_buckets_that_they_must)
{
    for (size_t k = 0; k < sizeof hand_plans / sizeof hand_plans[0]; k++) {
        const hand_plan *it = &hand_plans[k];
        char text[128];
        size_t at = 0;
        pl_plan *plan = check_plan(it->params, it->n_params, NULL, &it->caps);
        for (size_t b = 0; plan != NULL && b < plan->n_buckets; b++)
            for (size_t m = 0; m < plan->buckets[b].n_params; m++)
                at += (size_t)snprintf(text + at, sizeof text - at, "%s%u ",
                                       m == 0 ? "|" : "", plan->buckets[b].params[m]);
        if (!CHECK(plan != NULL && strcmp(text, it->buckets) == 0))
            CHECK_MORE("plan %zu: %s", k, text);
        pl_plan_destroy(plan);
    }
}

TEST(a_slot_is_of_whole_lines_where_there_are_elements)
{
    const pl_param with_empty[] = {{0, PL_F32}, {5, PL_F32}, {0, PL_F32}, {0, PL_F16}};
    CHECK(pl_plan_bytes(with_empty, 4) == PL_CACHE_LINE);
    for (int d = 0; d < PL_N_DTYPES; d++) {
        const pl_param one = {.n_elems = 1, .dtype = (pl_dtype)d};
        pl_plan *plan = check_plan(&one, 1, NULL, &wide);
        CHECK(plan != NULL && plan->n_buckets == 1);
        CHECK(pl_plan_bytes(&one, 1) == PL_CACHE_LINE);
        pl_plan_destroy(plan);
    }
}

TEST(a_thousand_tiny_parameters_share_the_buckets)
{
    static pl_param params[MAX_PARAMS];
    const pl_plan_caps caps = {.bucket_bytes = 100 * PL_CACHE_LINE,
                               .last_bytes = 10 * PL_CACHE_LINE};
    for (size_t i = 0; i < MAX_PARAMS; i++)
        params[i] = (pl_param){.n_elems = 1, .dtype = PL_BF16};
    pl_plan *plan = check_plan(params, MAX_PARAMS, NULL, &caps);
    CHECK(plan != NULL && plan->n_buckets == 11); /* 10 last, then 9 x 100, then 90 */
    CHECK(pl_plan_bytes(params, MAX_PARAMS) == (size_t)MAX_PARAMS * PL_CACHE_LINE);
    pl_plan_destroy(plan);
}

TEST(an_order_that_is_no_permutation_is_refused)
{
    static const uint32_t orders[][3] = {{0, 0, 1}, {0, 1, 3},          {3, 2, 1},
                                         {1, 1, 1}, {0, 1, UINT32_MAX}, {2, 0, 2}};
    const pl_param params[] = {{1, PL_F32}, {2, PL_F32}, {3, PL_F32}};
    for (size_t k = 0; k < sizeof orders / sizeof orders[0]; k++) {
        pl_plan *plan = NULL;
        CHECK_FAILS(pl_plan_create(params, 3, orders[k], &wide, &plan), PL_EINVAL,
                    "must come once");
        CHECK(plan == NULL);
    }
}

TEST(a_plan_of_nothing_is_refused_and_nothing_is_destroyed)
{
    const pl_param param = {1, PL_F32};
    pl_plan *plan = NULL;
    CHECK(pl_plan_create(&param, 0, NULL, &wide, &plan) == PL_EINVAL);
    CHECK(pl_plan_create(&param, (size_t)UINT32_MAX + 1, NULL, &wide, &plan) ==
          PL_EINVAL);
    CHECK(plan == NULL);
    CHECK(pl_plan_bytes(NULL, 0) == 0);
    pl_plan_destroy(NULL);
}

/* ---- at random ------------------------------------------------------------------ */

static void draw_params(draw *random, pl_param *params, size_t n)
{
    const size_t n_dtypes = 1 + draw_below(random, 4);
    const size_t most = (size_t)1 << draw_below(random, 14);
    for (size_t i = 0; i < n; i++)
        params[i] = (pl_param){
            .n_elems = draw_below(random, most + 1),
            .dtype = (pl_dtype)((draw_below(random, n_dtypes) * 3) % PL_N_DTYPES)};
}

TEST(every_plan_drawn_at_random_keeps_its_promises)
{
    static pl_param params[MAX_PARAMS];
    static uint32_t order[MAX_PARAMS];
    size_t each[8];
    for (uint64_t seed = 1; seed <= 1000; seed++) {
        draw random = draw_of(seed);
        const size_t n = 1 + draw_below(&random, seed % 50 == 0 ? MAX_PARAMS : 60);
        pl_plan_caps caps = {
            .bucket_bytes = draw_below(&random, (size_t)1 << draw_below(&random, 18)),
            .last_bytes = draw_below(&random, (size_t)1 << draw_below(&random, 14))};
        if (seed > 500)
            caps = (pl_plan_caps){.each = each, .n_each = 1 + draw_below(&random, 8)};
        for (size_t k = 0; k < caps.n_each; k++)
            each[k] = 1 + draw_below(&random, (size_t)1 << draw_below(&random, 18));
        draw_params(&random, params, n);
        draw_order(&random, order, n);
        const int n_failures = atomic_load(&check_n_failures);
        pl_plan_destroy(check_plan(params, n, NULL, &caps));
        pl_plan_destroy(check_plan(params, n, order, &caps));
        if (atomic_load(&check_n_failures) > n_failures)
            CHECK_MORE("seed %d, %zu parameters, %zu caps", (int)seed, n, caps.n_each);
    }
}

TEST(two_plans_of_the_same_input_are_the_same)
{
    static pl_param params[100];
    static uint32_t order[100];
    draw random = draw_of(99);
    const pl_plan_caps caps = {.bucket_bytes = 5000, .last_bytes = 1000};
    pl_plan *plans[2] = {NULL, NULL};
    draw_params(&random, params, 100);
    draw_order(&random, order, 100);
    for (int k = 0; k < 2; k++)
        if (!CHECK_OK(pl_plan_create(params, 100, order, &caps, &plans[k])))
            return;
    CHECK(plans[0]->n_buckets == plans[1]->n_buckets);
    for (size_t i = 0; i < 100; i++) {
        CHECK(plans[0]->slots[i].bucket == plans[1]->slots[i].bucket);
        CHECK(plans[0]->slots[i].offset_bytes == plans[1]->slots[i].offset_bytes);
    }
    CHECK(memcmp(plans[0]->members, plans[1]->members, 100 * sizeof(uint32_t)) == 0);
    pl_plan_destroy(plans[0]);
    pl_plan_destroy(plans[1]);
}
