/* plan.c - cuts an order of parameters into buckets. */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

#include "alloc.h"

/* A bucket while the plan is being made: its members have one dtype, and the position
 * of the last one in the order decides when the bucket is issued. */
typedef struct draft {
    pl_dtype dtype;
    size_t n_bytes;
    size_t n_params;
    size_t last_position;
    struct draft *self; /* its place before the sort */
} draft;

static size_t slot_bytes(const pl_param *param)
{
    return pli_line_up(param->n_elems * pl_dtype_bytes(param->dtype));
}

size_t pl_plan_bytes(const pl_param *params, size_t n_params)
{
    size_t n_bytes = 0;
    for (size_t i = 0; i < n_params; i++)
        n_bytes += slot_bytes(&params[i]);
    return n_bytes;
}

static pl_status check_order(const uint32_t *order, size_t n_params)
{
    pl_status st = PL_OK;
    unsigned char *is_seen = NULL;
    PL_TRY(pli_calloc(n_params, 1, "order of parameters", &is_seen));
    for (size_t i = 0; i < n_params; i++) {
        if (order[i] >= n_params || is_seen[order[i]])
            PL_FAIL(PL_EINVAL,
                    "order[%zu] is %u: each of the %zu parameters must come once", i,
                    order[i], n_params);
        is_seen[order[i]] = 1;
    }
done:
    pli_free(is_seen);
    return st;
}

static int by_last_position(const void *left, const void *right)
{
    const size_t l = ((const draft *)left)->last_position;
    const size_t r = ((const draft *)right)->last_position;
    return (l > r) - (l < r);
}

/* The draft of each dtype that still takes members. */
typedef struct open_drafts {
    size_t of[PL_N_DTYPES];    /* SIZE_MAX: none yet */
    size_t n_cut[PL_N_DTYPES]; /* drafts begun so far */
} open_drafts;

static size_t cap_of(const pl_plan_caps *caps, const open_drafts *open, pl_dtype dtype)
{
    if (caps->n_each == 0)
        return open->of[dtype] == 0 ? caps->last_bytes : caps->bucket_bytes;
    const size_t k = open->n_cut[dtype] > 0 ? open->n_cut[dtype] - 1 : 0;
    return caps->each[k < caps->n_each ? k : caps->n_each - 1];
}

/* Cuts the order into drafts from the end (with n_each > 0: from the beginning), one
 * open per dtype.  draft_of[i] is parameter i's draft.  Returns how many there are. */
static size_t cut(const pl_param *params, size_t n_params, const uint32_t *order,
                  const pl_plan_caps *caps, draft *drafts, size_t *draft_of)
{
    open_drafts open = {.n_cut = {0}};
    size_t n_drafts = 0;
    for (size_t d = 0; d < PL_N_DTYPES; d++)
        open.of[d] = SIZE_MAX;
    for (size_t k = 0; k < n_params; k++) {
        const size_t position = caps->n_each > 0 ? k : n_params - 1 - k;
        const uint32_t i = order[position];
        const pl_dtype dtype = params[i].dtype;
        const size_t n_bytes = slot_bytes(&params[i]);
        if (open.of[dtype] == SIZE_MAX ||
            drafts[open.of[dtype]].n_bytes + n_bytes > cap_of(caps, &open, dtype)) {
            open.of[dtype] = n_drafts;
            open.n_cut[dtype]++;
            drafts[n_drafts++] = (draft){.dtype = dtype};
        }
        draft *into = &drafts[open.of[dtype]];
        into->n_bytes += n_bytes;
        into->n_params++;
        if (into->n_params == 1 || position > into->last_position)
            into->last_position = position;
        draft_of[i] = open.of[dtype];
    }
    return n_drafts;
}

static pl_status allocate(size_t n_params, size_t n_buckets, pl_plan **out)
{
    pl_status st = PL_OK;
    pl_plan *plan = NULL;
    PL_TRY(pli_calloc(1, sizeof *plan, "plan", &plan));
    PL_TRY(pli_calloc(n_params, sizeof *plan->slots, "plan's slots", &plan->slots));
    PL_TRY(
        pli_calloc(n_buckets, sizeof *plan->buckets, "plan's buckets", &plan->buckets));
    PL_TRY(
        pli_calloc(n_params, sizeof *plan->members, "plan's members", &plan->members));
    plan->n_params = n_params;
    plan->n_buckets = n_buckets;
    *out = plan;
    plan = NULL;
done:
    pl_plan_destroy(plan);
    return st;
}

/* Places the sorted drafts one after another, and the members inside each. */
static void place(pl_plan *plan, const pl_param *params, const uint32_t *order,
                  const draft *drafts, const size_t *bucket_of_draft,
                  const size_t *draft_of)
{
    size_t n_members = 0;
    for (size_t b = 0; b < plan->n_buckets; b++) {
        plan->buckets[b] = (pl_bucket_plan){
            .dtype = drafts[b].dtype,
            .offset_bytes = plan->n_bytes,
            .n_elems = drafts[b].n_bytes / pl_dtype_bytes(drafts[b].dtype),
            .params = plan->members + n_members,
        };
        plan->n_bytes += drafts[b].n_bytes;
        n_members += drafts[b].n_params;
    }
    for (size_t position = 0; position < plan->n_params; position++) {
        const uint32_t i = order[position];
        const size_t b = bucket_of_draft[draft_of[i]];
        pl_bucket_plan *bucket = &plan->buckets[b];
        size_t at = bucket->offset_bytes;
        if (bucket->n_params > 0) {
            const uint32_t before = bucket->params[bucket->n_params - 1];
            at = plan->slots[before].offset_bytes + slot_bytes(&params[before]);
        }
        plan->slots[i] = (pl_slot_plan){.bucket = (uint32_t)b, .offset_bytes = at};
        plan->members[(size_t)(bucket->params - plan->members) + bucket->n_params++] =
            i;
    }
}

pl_status pl_plan_create(const pl_param *params, size_t n_params, const uint32_t *order,
                         const pl_plan_caps *caps, pl_plan **out)
{
    pl_status st = PL_OK;
    pl_plan *plan = NULL;
    draft *drafts = NULL;
    uint32_t *reversed = NULL;
    size_t *draft_of = NULL;
    size_t *bucket_of_draft = NULL;
    if (n_params == 0 || n_params > UINT32_MAX)
        PL_FAIL(PL_EINVAL, "a plan of %zu parameters: give 1 to 2^32 - 1", n_params);
    PL_TRY(pli_calloc(n_params, sizeof *drafts, "plan's draft", &drafts));
    PL_TRY(pli_calloc(n_params, sizeof *draft_of, "plan's draft", &draft_of));
    PL_TRY(pli_calloc(n_params, sizeof *bucket_of_draft, "plan's draft",
                      &bucket_of_draft));
    if (order == NULL) {
        PL_TRY(
            pli_calloc(n_params, sizeof *reversed, "order of parameters", &reversed));
        for (size_t i = 0; i < n_params; i++)
            reversed[i] = (uint32_t)(n_params - 1 - i);
        order = reversed;
    } else {
        PL_TRY(check_order(order, n_params));
    }
    const size_t n_drafts = cut(params, n_params, order, caps, drafts, draft_of);
    for (size_t d = 0; d < n_drafts; d++)
        drafts[d].self = &drafts[d];
    qsort(drafts, n_drafts, sizeof *drafts, by_last_position);
    for (size_t b = 0; b < n_drafts; b++)
        bucket_of_draft[drafts[b].self - drafts] = b;
    PL_TRY(allocate(n_params, n_drafts, &plan));
    place(plan, params, order, drafts, bucket_of_draft, draft_of);
    *out = plan;
    plan = NULL;
done:
    pl_plan_destroy(plan);
    pli_free(drafts);
    pli_free(draft_of);
    pli_free(bucket_of_draft);
    pli_free(reversed);
    return st;
}

void pl_plan_destroy(pl_plan *plan)
{
    if (plan == NULL)
        return;
    pli_free(plan->slots);
    pli_free(plan->buckets);
    pli_free(plan->members);
    pli_free(plan);
}
