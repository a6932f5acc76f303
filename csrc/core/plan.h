/* plan.h - the bucket and the place of each parameter's gradient: pure arithmetic.
 *
 * Each bucket holds one dtype, and buckets are filled in the order in which gradients
 * are expected.  They are cut from the end of that order, so that the last bucket,
 * whose reduction no computation hides, is small:
 *
 *     expected first                                        expected last
 *     [ up to cap ][ up to cap ][ up to cap ][ what remains ][ last_cap ]
 *
 * A parameter is never split; one larger than the cap has its own bucket.  The bytes
 * needed do not depend on the order, so a new order fits the old arena.
 */
#ifndef PLI_PLAN_H
#define PLI_PLAN_H

#include "status.h"

typedef struct pl_param {
    size_t n_elems;
    pl_dtype dtype;
} pl_param;

typedef struct pl_plan_caps {
    size_t bucket_bytes; /* of a bucket, which has at least one parameter */
    size_t last_bytes;   /* of the bucket expected last */
    /* If n_each > 0, these caps replace the two above, and buckets are cut from the
     * beginning of the order: the k-th bucket of a dtype has up to each[k] bytes, and
     * the last cap holds for all later buckets. */
    const size_t *each; /* borrowed during calls only */
    size_t n_each;
} pl_plan_caps;

typedef struct pl_bucket_plan {
    pl_dtype dtype;
    size_t offset_bytes; /* from the start of the buckets' memory */
    size_t n_elems;      /* padding between slots included */
    size_t n_params;
    const uint32_t *params; /* members, in expected order; inside the plan */
} pl_bucket_plan;

typedef struct pl_slot_plan {
    uint32_t bucket;
    size_t offset_bytes; /* from the start of the buckets' memory; cache-line aligned */
} pl_slot_plan;

typedef struct pl_plan {
    size_t n_params;
    size_t n_buckets;
    size_t n_bytes;
    pl_slot_plan *slots;     /* by parameter */
    pl_bucket_plan *buckets; /* in the order in which they are issued */
    uint32_t *members;
} pl_plan;

/* Lays out n_params parameters.  `order` lists every index once, as gradients are
 * expected; NULL means last to first, the order of most backward passes.  PL_EINVAL
 * unless `order` is a permutation.  *out: the caller destroys it. */
pl_status pl_plan_create(const pl_param *params, size_t n_params, const uint32_t *order,
                         const pl_plan_caps *caps, pl_plan **out) PL_MUST_USE;
void pl_plan_destroy(pl_plan *plan);

/* The bytes that every plan of these parameters needs. */
size_t pl_plan_bytes(const pl_param *params, size_t n_params);

#endif
