/* clock.h - the monotonic clock, how long a wait has taken, and short sleeps. */
#ifndef PLI_CLOCK_H
#define PLI_CLOCK_H

#include <stdint.h>
#include <time.h>

#define PLI_MS INT64_C(1000000) /* nanoseconds in a millisecond */

static inline int64_t pli_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* How long a wait has taken, without time in which this process was stopped: a job may
 * be suspended as a whole, and the monotonic clock goes on.  A wait looks at its
 * stopwatch at least ten times a second, so PLI_LONGEST_LOOK_NS is all that counts of a
 * longer time between two looks.  All zero: it starts at the first look. */
typedef struct pli_stopwatch {
    int64_t started_ns;
    int64_t looked_ns;
} pli_stopwatch;

#define PLI_LONGEST_LOOK_NS (200 * PLI_MS)

static inline int64_t pli_elapsed_ns(pli_stopwatch *self)
{
    const int64_t now = pli_now_ns();
    if (self->started_ns == 0)
        *self = (pli_stopwatch){.started_ns = now, .looked_ns = now};
    if (now - self->looked_ns > PLI_LONGEST_LOOK_NS)
        self->started_ns += now - self->looked_ns - PLI_LONGEST_LOOK_NS;
    self->looked_ns = now;
    return now - self->started_ns;
}

static inline struct timespec pli_timespec(int64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / INT64_C(1000000000)),
                             .tv_nsec = (long)(ns % INT64_C(1000000000))};
}

static inline void pli_sleep_ns(int64_t ns)
{
    const struct timespec time = pli_timespec(ns);
    (void)nanosleep(&time, NULL);
}

/* Tells the processor that this is a spin loop. */
static inline void pli_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
