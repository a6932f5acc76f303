/* test_plan.c - the layout of parameters, by its properties.
 *
 * check_plan() holds every plan to all that plan.h promises; the tests call it on
 * plans drawn by hand and at random.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "core/plan.h"
#include "draw.h"

enum { MAX_PARAMS = 1000 };

static const pl_plan_caps wide = {.bucket_bytes = 1 << 20, .last_bytes = 1 << 20};

static size_t padded_bytes(const pl_param *param)
{
    return (param->n_elems * pl_dtype_bytes(param->dtype) + PL_CACHE_LINE - 1) /
           PL_CACHE_LINE * PL_CACHE_LINE;
}

/* ---- what every plan must be ---------------------------------------------------- */

/* Buckets lie one behind the other; their members do so inside them. */
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

static void check_caps(const pl_plan *plan, const pl_plan_caps *caps)
{
    for (size_t b = 0; b < plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &plan->buckets[b];
        const size_t n_bytes = bucket->n_elems * pl_dtype_bytes(bucket->dtype);
        const size_t cap =
            b + 1 == plan->n_buckets ? caps->last_bytes : caps->bucket_bytes;
        CHECK(bucket->n_params == 1 || n_bytes <= cap);
    }
}

/* Within a dtype the members of all buckets, in turn, are the order itself; buckets
 * are issued by the position of their last member. */
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

/* Two neighbours of one dtype that would fit in one bucket are in one: from the end,
 * each bucket took all that it could. */
static void check_buckets_full(const pl_plan *plan, const pl_param *params,
                               const pl_plan_caps *caps)
{
    for (size_t b = 0; b < plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &plan->buckets[b];
        const size_t n_bytes = bucket->n_elems * pl_dtype_bytes(bucket->dtype);
        const size_t cap =
            b + 1 == plan->n_buckets ? caps->last_bytes : caps->bucket_bytes;
        for (size_t a = b; a-- > 0;) {
            const pl_bucket_plan *before = &plan->buckets[a];
            if (before->dtype != bucket->dtype)
                continue;
            const uint32_t refused = before->params[before->n_params - 1];
            CHECK(n_bytes + padded_bytes(&params[refused]) > cap);
            break;
        }
    }
}

static void check_plan(const pl_param *params, size_t n, const uint32_t *order,
                       const pl_plan_caps *caps, size_t *n_buckets)
{
    static uint32_t reversed[MAX_PARAMS];
    pl_plan *plan = NULL;
    *n_buckets = 0;
    if (!CHECK_OK(pl_plan_create(params, n, order, caps, &plan)))
        return;
    for (size_t i = 0; i < n; i++)
        reversed[i] = (uint32_t)(n - 1 - i);
    CHECK(plan->n_params == n);
    check_layout(plan, params);
    check_caps(plan, caps);
    check_order_kept(plan, params, order != NULL ? order : reversed);
    check_buckets_full(plan, params, caps);
    *n_buckets = plan->n_buckets;
    pl_plan_destroy(plan);
}

/* ---- by hand -------------------------------------------------------------------- */

TEST(one_parameter_is_one_bucket)
{
    for (int d = 0; d < PL_N_DTYPES; d++) {
        const pl_param param = {.n_elems = 1, .dtype = (pl_dtype)d};
        size_t n_buckets = 0;
        check_plan(&param, 1, NULL, &wide, &n_buckets);
        CHECK(n_buckets == 1);
        CHECK(pl_plan_bytes(&param, 1) == PL_CACHE_LINE);
    }
}

TEST(a_parameter_larger_than_the_cap_has_a_bucket_of_its_own)
{
    const pl_plan_caps caps = {.bucket_bytes = 1024, .last_bytes = 512};
    const pl_param params[] = {
        {16, PL_F32}, {100000, PL_F32}, {16, PL_F32}, {16, PL_F32}};
    pl_plan *plan = NULL;
    size_t n_buckets = 0;
    check_plan(params, 4, NULL, &caps, &n_buckets);
    CHECK(n_buckets == 3);
    if (!CHECK_OK(pl_plan_create(params, 4, NULL, &caps, &plan)))
        return;
    CHECK(plan->buckets[1].n_params == 1);
    CHECK(plan->buckets[1].params[0] == 1);
    CHECK(plan->buckets[1].n_elems == 100000);
    pl_plan_destroy(plan);
}

TEST(the_last_bucket_is_small_and_the_rest_is_cut_from_the_end)
{
    const pl_plan_caps caps = {.bucket_bytes = 256, .last_bytes = 64};
    pl_param params[12];
    pl_plan *plan = NULL;
    for (size_t i = 0; i < 12; i++)
        params[i] = (pl_param){.n_elems = 16, .dtype = PL_F32}; /* a line each */
    if (!CHECK_OK(pl_plan_create(params, 12, NULL, &caps, &plan)))
        return;
    /* 11 10 9 | 8 7 6 5 | 4 3 2 1 | 0: the remainder comes first */
    CHECK(plan->n_buckets == 4);
    CHECK(plan->buckets[0].n_params == 3);
    CHECK(plan->buckets[1].n_params == 4);
    CHECK(plan->buckets[2].n_params == 4);
    CHECK(plan->buckets[3].n_params == 1);
    CHECK(plan->buckets[0].params[0] == 11);
    CHECK(plan->buckets[3].params[0] == 0);
    pl_plan_destroy(plan);
}

TEST(a_thousand_tiny_parameters_share_the_buckets)
{
    static pl_param params[MAX_PARAMS];
    const pl_plan_caps caps = {.bucket_bytes = 100 * PL_CACHE_LINE,
                               .last_bytes = 10 * PL_CACHE_LINE};
    size_t n_buckets = 0;
    for (size_t i = 0; i < MAX_PARAMS; i++)
        params[i] = (pl_param){.n_elems = 1, .dtype = PL_BF16};
    check_plan(params, MAX_PARAMS, NULL, &caps, &n_buckets);
    CHECK(n_buckets == 11); /* 10 last, then 9 x 100, then 90 */
    CHECK(pl_plan_bytes(params, MAX_PARAMS) == (size_t)MAX_PARAMS * PL_CACHE_LINE);
}

TEST(caps_of_nothing_give_a_bucket_to_each_parameter)
{
    const pl_plan_caps caps = {.bucket_bytes = 0, .last_bytes = 0};
    const pl_param params[] = {{3, PL_F32}, {3, PL_F64}, {3, PL_F32}, {3, PL_F64}};
    size_t n_buckets = 0;
    check_plan(params, 4, NULL, &caps, &n_buckets);
    CHECK(n_buckets == 4);
}

TEST(dtypes_do_not_share_buckets_but_are_issued_as_they_end)
{
    const pl_param params[] = {
        {5, PL_F32}, {5, PL_BF16}, {5, PL_F32}, {5, PL_BF16}, {5, PL_F64}};
    pl_plan *plan = NULL;
    size_t n_buckets = 0;
    check_plan(params, 5, NULL, &wide, &n_buckets);
    CHECK(n_buckets == 3);
    if (!CHECK_OK(pl_plan_create(params, 5, NULL, &wide, &plan)))
        return;
    CHECK(plan->buckets[0].dtype == PL_F64);
    CHECK(plan->buckets[1].dtype == PL_BF16);
    CHECK(plan->buckets[2].dtype == PL_F32);
    CHECK(plan->buckets[2].params[0] == 2);
    CHECK(plan->buckets[2].params[1] == 0);
    pl_plan_destroy(plan);
}

TEST(parameters_without_elements_take_no_bytes)
{
    const pl_param params[] = {{0, PL_F32}, {5, PL_F32}, {0, PL_F32}, {0, PL_F16}};
    size_t n_buckets = 0;
    CHECK(pl_plan_bytes(params, 4) == PL_CACHE_LINE);
    check_plan(params, 4, NULL, &wide, &n_buckets);
    CHECK(n_buckets == 2);
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

/* ---- a cap for each bucket ------------------------------------------------------ */

/* The k-th bucket of a dtype keeps to the k-th cap, or to the last one, and ends only
 * where the next parameter would not fit. */
static void check_each_cap(const pl_plan *plan, const pl_param *params,
                           const pl_plan_caps *caps)
{
    size_t n_before[PL_N_DTYPES] = {0};
    for (size_t b = 0; b < plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &plan->buckets[b];
        const size_t k = n_before[bucket->dtype]++;
        const size_t cap = caps->each[k < caps->n_each ? k : caps->n_each - 1];
        const size_t n_bytes = bucket->n_elems * pl_dtype_bytes(bucket->dtype);
        CHECK(bucket->n_params == 1 || n_bytes <= cap);
        for (size_t a = b + 1; a < plan->n_buckets; a++) {
            if (plan->buckets[a].dtype != bucket->dtype)
                continue;
            CHECK(n_bytes + padded_bytes(&params[plan->buckets[a].params[0]]) > cap);
            break;
        }
    }
}

static void check_plan_of_each(const pl_param *params, size_t n, const uint32_t *order,
                               const pl_plan_caps *caps, size_t *n_buckets)
{
    static uint32_t reversed[MAX_PARAMS];
    pl_plan *plan = NULL;
    if (!CHECK_OK(pl_plan_create(params, n, order, caps, &plan)))
        return;
    for (size_t i = 0; i < n; i++)
        reversed[i] = (uint32_t)(n - 1 - i);
    check_layout(plan, params);
    check_order_kept(plan, params, order != NULL ? order : reversed);
    check_each_cap(plan, params, caps);
    *n_buckets = plan->n_buckets;
    pl_plan_destroy(plan);
}

TEST(buckets_with_a_cap_each_are_cut_from_the_beginning)
{
    static const size_t each[] = {64, 192, 128};
    static const size_t expected[] = {1, 3, 2, 2, 2, 1}; /* the last cap goes on */
    const pl_plan_caps caps = {
        .bucket_bytes = 64, .last_bytes = 64, .each = each, .n_each = 3};
    pl_param params[11];
    pl_plan *plan = NULL;
    for (size_t i = 0; i < 11; i++)
        params[i] = (pl_param){.n_elems = 16, .dtype = PL_F32}; /* a line each */
    if (!CHECK_OK(pl_plan_create(params, 11, NULL, &caps, &plan)))
        return;
    CHECK(plan->n_buckets == 6);
    for (size_t b = 0; b < plan->n_buckets && b < 6; b++)
        CHECK(plan->buckets[b].n_params == expected[b]);
    CHECK(plan->buckets[0].params[0] == 10);
    pl_plan_destroy(plan);
}

TEST(every_dtype_begins_with_the_first_cap)
{
    static const size_t each[] = {64, 1 << 20};
    const pl_plan_caps caps = {.each = each, .n_each = 2};
    const pl_param params[] = {{8, PL_F64},  {16, PL_F32}, {8, PL_F64},
                               {16, PL_F32}, {8, PL_F64},  {16, PL_F32}};
    size_t n_buckets = 0;
    check_plan_of_each(params, 6, NULL, &caps, &n_buckets);
    CHECK(n_buckets == 4); /* one and two, of either */
}

TEST(a_parameter_larger_than_its_cap_takes_that_cap_alone)
{
    static const size_t each[] = {64, 128};
    const pl_plan_caps caps = {.each = each, .n_each = 2};
    const pl_param params[] = {{16, PL_F32}, {16, PL_F32}, {1000, PL_F32}};
    pl_plan *plan = NULL;
    if (!CHECK_OK(pl_plan_create(params, 3, NULL, &caps, &plan)))
        return;
    CHECK(plan->n_buckets == 2); /* 2 | 1 0 */
    CHECK(plan->buckets[0].n_params == 1 && plan->buckets[0].params[0] == 2);
    CHECK(plan->buckets[1].n_params == 2);
    pl_plan_destroy(plan);
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
    for (uint64_t seed = 1; seed <= 500; seed++) {
        draw random = draw_of(seed);
        const size_t n = 1 + draw_below(&random, seed % 50 == 0 ? MAX_PARAMS : 60);
        const pl_plan_caps caps = {
            .bucket_bytes = draw_below(&random, (size_t)1 << draw_below(&random, 18)),
            .last_bytes = draw_below(&random, (size_t)1 << draw_below(&random, 14))};
        size_t n_buckets = 0;
        draw_params(&random, params, n);
        draw_order(&random, order, n);
        const int n_failures = atomic_load(&check_n_failures);
        check_plan(params, n, NULL, &caps, &n_buckets);
        check_plan(params, n, order, &caps, &n_buckets);
        if (atomic_load(&check_n_failures) > n_failures)
            CHECK_MORE("seed %d, %zu parameters", (int)seed, n);
    }
}

TEST(every_plan_with_caps_drawn_at_random_keeps_its_promises)
{
    static pl_param params[MAX_PARAMS];
    static uint32_t order[MAX_PARAMS];
    size_t each[8];
    for (uint64_t seed = 1; seed <= 500; seed++) {
        draw random = draw_of(1000 + seed);
        const size_t n = 1 + draw_below(&random, seed % 50 == 0 ? MAX_PARAMS : 60);
        const pl_plan_caps caps = {.each = each, .n_each = 1 + draw_below(&random, 8)};
        size_t n_buckets = 0;
        for (size_t k = 0; k < caps.n_each; k++)
            each[k] = 1 + draw_below(&random, (size_t)1 << draw_below(&random, 18));
        draw_params(&random, params, n);
        draw_order(&random, order, n);
        const int n_failures = atomic_load(&check_n_failures);
        check_plan_of_each(params, n, NULL, &caps, &n_buckets);
        check_plan_of_each(params, n, order, &caps, &n_buckets);
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
