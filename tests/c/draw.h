/* draw.h - random numbers and pauses, the same in every run of a seed.
 *
 * Each thread and each process has its own draw.
 */
#ifndef PLT_DRAW_H
#define PLT_DRAW_H

#include <stddef.h>
#include <stdint.h>

#include "core/clock.h"

typedef struct draw {
    uint64_t state;
} draw;

static inline draw draw_of(uint64_t seed)
{
    return (draw){.state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1};
}

static inline uint64_t draw_u64(draw *it)
{
    uint64_t z = it->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* A number from 0 to n - 1. */
static inline size_t draw_below(draw *it, size_t n)
{
    return (size_t)(draw_u64(it) % n);
}

/* Pauses for up to `most_ns`; three times out of four not at all. */
static inline void draw_rest(draw *it, int64_t most_ns)
{
    if (draw_below(it, 4) == 0)
        pli_sleep_ns((int64_t)draw_below(it, (size_t)most_ns));
}

/* Puts 0 .. n - 1 into `order`, in random order. */
static inline void draw_order(draw *it, uint32_t *order, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const size_t j = draw_below(it, i + 1);
        order[i] = order[j];
        order[j] = (uint32_t)i;
    }
}

#endif
