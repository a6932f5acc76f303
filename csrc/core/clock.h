/* clock.h - the monotonic clock, and short sleeps. */
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
