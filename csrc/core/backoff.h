/* backoff.h - how to wait for another thread, process or device: spin for a moment,
 * then sleep.
 *
 *     way to wait        sleeps                         woken by
 *     pli_backoff        longer and longer, after it    its timer: it polls
 *                        has yielded its core
 *     pli_futex_wait()   until the word has changed     pli_futex_wake()
 *
 * shm_comm.c says how long a rank spins first, and backoff.c how long pli_backoff does.
 */
#ifndef PLI_BACKOFF_H
#define PLI_BACKOFF_H

#include <stdatomic.h>

#include "clock.h"
#include "status.h"

typedef struct pli_backoff {
    pl_status (*poll)(void *context); /* a failure ends the wait; may be NULL */
    void *context;
    int64_t most_ns;
    pli_stopwatch waited;
    int64_t sleep_ns;
    int n_spins;
    int n_yields;
} pli_backoff;

/* Starts a wait of at most most_ns from now. */
pli_backoff pli_backoff_begin(int64_t most_ns, pl_status (*poll)(void *context),
                              void *context);

/* Lets some time pass.  If the time is used up: PL_ETIMEOUT, with a message that `what`
 * has not ended. */
pl_status pli_backoff_pause(pli_backoff *backoff, const char *what) PL_MUST_USE;

/* Spins once; 0 if *n_spins are used up. */
static inline int pli_spin(int *n_spins)
{
    if (*n_spins <= 0)
        return 0;
    --*n_spins;
    pli_cpu_relax();
    return 1;
}

/* A spin lock, for sections of a few instructions. */
static inline void pli_spin_lock(atomic_flag *lock)
{
    while (atomic_flag_test_and_set_explicit(lock, memory_order_acquire))
        pli_cpu_relax();
}

static inline int pli_spin_try_lock(atomic_flag *lock)
{
    return !atomic_flag_test_and_set_explicit(lock, memory_order_acquire);
}

static inline void pli_spin_unlock(atomic_flag *lock)
{
    atomic_flag_clear_explicit(lock, memory_order_release);
}

/* Sleeps while *word is `value`, for up to most_ns or until a signal arrives.  `word`
 * may be in memory that processes share. */
void pli_futex_wait(const _Atomic uint32_t *word, uint32_t value, int64_t most_ns);
void pli_futex_wake(const _Atomic uint32_t *word, int n_waiters);

#endif
