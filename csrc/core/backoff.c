/* backoff.c - spinning, yielding, sleeping, polling. */
#include "backoff.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    N_YIELDS = 50,          /* before the first sleep: the thread that we wait for, such
                                 as one of NCCL, may need this core */
    N_SPINS = 50,           /* before the first yield */
    FIRST_SLEEP_US = 20,    /* doubled with each sleep */
    LONGEST_SLEEP_US = 5000 /* ... up to this */
};

pli_backoff pli_backoff_begin(int64_t most_ns, pl_status (*poll)(void *context),
                              void *context)
{
    return (pli_backoff){.poll = poll,
                         .context = context,
                         .most_ns = most_ns,
                         .sleep_ns = FIRST_SLEEP_US * INT64_C(1000),
                         .n_spins = N_SPINS,
                         .n_yields = N_YIELDS};
}

pl_status pli_backoff_pause(pli_backoff *backoff, const char *what)
{
    pl_status st = PL_OK;
    if (pli_spin(&backoff->n_spins))
        goto done;
    if (backoff->n_yields > 0) {
        backoff->n_yields--;
        (void)sched_yield();
        goto done;
    }
    if (backoff->poll != NULL)
        PL_TRY(backoff->poll(backoff->context));
    if (pli_elapsed_ns(&backoff->waited) > backoff->most_ns)
        PL_FAIL(PL_ETIMEOUT, "%s did not finish in time", what);
    pli_sleep_ns(backoff->sleep_ns);
    if (backoff->sleep_ns < LONGEST_SLEEP_US * INT64_C(1000))
        backoff->sleep_ns *= 2;
done:
    return st;
}

void pli_futex_wait(const _Atomic uint32_t *word, uint32_t value, int64_t most_ns)
{
    const struct timespec most = pli_timespec(most_ns);
    (void)syscall(SYS_futex, word, FUTEX_WAIT, value, &most, NULL, 0);
}

void pli_futex_wake(const _Atomic uint32_t *word, int n_waiters)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE, n_waiters, NULL, NULL, 0);
}
