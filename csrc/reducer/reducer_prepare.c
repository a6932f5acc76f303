/* reducer_prepare.c - tells the world, before the first step, which operations steps
 * use.
 *
 * For each dtype these are all-reduces from the size of the largest bucket down to the
 * smallest parameter, because a late parameter is reduced alone.
 */
#include "reducer.h"
#include "reducer_state.h"

static pli_op_range range_of(const pl_reducer *self, pl_dtype dtype)
{
    pli_op_range range = {.op = {.kind = PL_ALL_REDUCE,
                                 .reduction = PL_MEAN,
                                 .dtype = dtype,
                                 .offset_bytes = self->at.buckets}};
    for (size_t b = 0; b < self->plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &self->plan->buckets[b];
        if (bucket->dtype == dtype && bucket->n_elems > range.op.n_elems)
            range.op.n_elems = bucket->n_elems;
    }
    range.n_least = range.op.n_elems;
    for (size_t i = 0; i < self->spec.n_params; i++) {
        const pl_param *param = &self->params[i];
        if (param->dtype == dtype && param->n_elems > 0 &&
            param->n_elems < range.n_least)
            range.n_least = param->n_elems;
    }
    return range;
}

pl_status pl_reducer_prepare(pl_reducer *self)
{
    pl_status st = PL_OK;
    pli_op_range ranges[PL_N_DTYPES];
    size_t n_ranges = 0;
    pli_order order = {.ready = NULL};
    if (self->comm->device == NULL)
        goto done;
    for (int dtype = 0; dtype < PL_N_DTYPES; dtype++) {
        const pli_op_range range = range_of(self, (pl_dtype)dtype);
        if (range.op.n_elems > 0)
            ranges[n_ranges++] = range;
    }
    PL_TRY(pli_reducer_record_side(self, self->stream, &order.ready));
    PL_TRY(self->comm->device->prepare(self->comm, ranges, n_ranges, &order));
done:
    return st;
}
