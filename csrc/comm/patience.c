/* patience.c - spinning, resting, looking. */
#include "patience.h"

#include "../core/clock.h"

enum {
    N_SPINS = 2000,        /* before the first rest */
    FIRST_REST_US = 20,    /* doubled with each */
    LONGEST_REST_US = 5000 /* ... up to this */
};

pli_patience pli_patience_for(int64_t most_ns, pl_status (*look)(void *context),
                              void *context)
{
    const int64_t now = pli_now_ns();
    return (pli_patience){.look = look,
                          .context = context,
                          .until_ns =
                              most_ns < INT64_MAX - now ? now + most_ns : INT64_MAX,
                          .rest_ns = FIRST_REST_US * INT64_C(1000),
                          .n_spins = N_SPINS};
}

pl_status pli_patience_pass(pli_patience *it, const char *what)
{
    pl_status st = PL_OK;
    if (it->n_spins > 0) {
        it->n_spins--;
        pli_pause();
        goto done;
    }
    if (it->look != NULL)
        PL_TRY(it->look(it->context));
    if (pli_now_ns() > it->until_ns)
        PL_FAIL(PL_ETIMEOUT, "%s has not come to its end in time", what);
    pli_sleep_ns(it->rest_ns);
    if (it->rest_ns < LONGEST_REST_US * INT64_C(1000))
        it->rest_ns *= 2;
done:
    return st;
}

pl_status pli_patience_await(pli_patience *it, pl_backend *backend, pl_event *event,
                             const char *what)
{
    pl_status st = PL_OK;
    int is_done = 0;
    for (;;) {
        PL_TRY(backend->ops->event_is_done(backend, event, &is_done));
        if (is_done)
            break;
        PL_TRY(pli_patience_pass(it, what));
    }
done:
    return st;
}
