/* backend.c - what all backends share. */
#include "backend.h"

pl_status pli_backend_check_ranges(const pl_rank_ranges *ranges)
{
    pl_status st = PL_OK;
    if (ranges->n_ranks < 1)
        PL_FAIL(PL_EINVAL, "cannot sum the ranges of %d ranks", ranges->n_ranks);
    if (ranges->dtype < PL_F16)
        PL_FAIL(PL_EINVAL, "cannot sum ranges of %s: only floating point and complex",
                pl_dtype_text(ranges->dtype));
    if (ranges->reduction != PL_SUM && ranges->reduction != PL_MEAN)
        PL_FAIL(PL_EINVAL, "cannot reduce ranges: give PL_SUM or PL_MEAN");
done:
    return st;
}

pl_status pli_backend_await(pl_backend *backend, pl_event *event, pli_backoff *backoff,
                            const char *what)
{
    pl_status st = PL_OK;
    int is_done = 0;
    PL_TRY(backend->ops->event_is_done(backend, event, &is_done));
    while (!is_done) {
        PL_TRY(pli_backoff_pause(backoff, what));
        PL_TRY(backend->ops->event_is_done(backend, event, &is_done));
    }
done:
    return st;
}
