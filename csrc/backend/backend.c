/* backend.c - what no kind of memory takes. */
#include "backend.h"

static int is_real_float(pl_dtype dtype)
{
    return dtype >= PL_F16 && dtype <= PL_F64;
}

pl_status pli_backend_check_casts(const pl_cast *casts, size_t n_casts)
{
    pl_status st = PL_OK;
    for (size_t i = 0; i < n_casts; i++)
        if (!is_real_float(casts[i].from_dtype) || !is_real_float(casts[i].to_dtype))
            PL_FAIL(PL_EINVAL, "no cast from %s to %s: floating point alone is cast",
                    pl_dtype_text(casts[i].from_dtype),
                    pl_dtype_text(casts[i].to_dtype));
done:
    return st;
}

pl_status pli_backend_check_slots(const pl_slots *slots)
{
    pl_status st = PL_OK;
    if (slots->n_ranks < 1 || slots->n_ranks > PL_MAX_RANKS)
        PL_FAIL(PL_EINVAL, "slots of %d ranks, but 1 to %d can be summed",
                slots->n_ranks, PL_MAX_RANKS);
    if (slots->dtype < PL_F16)
        PL_FAIL(PL_EINVAL, "slots of %s: only floating point is summed",
                pl_dtype_text(slots->dtype));
    if (slots->reduction != PL_SUM && slots->reduction != PL_MEAN)
        PL_FAIL(PL_EINVAL, "slots are reduced to sums and means alone");
done:
    return st;
}
