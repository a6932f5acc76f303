/* naive_sum.h - reductions as a test would have them: slow, plain, and independent.
 *
 * One element at a time, in rank order.  16-bit floats are rounded by arithmetic on
 * doubles, where the library shifts bits: the two share no method.  Random inputs
 * include overflow, NaN, denormals and ties, and are the same in every run; not for
 * several threads.
 */
#ifndef PLT_NAIVE_SUM_H
#define PLT_NAIVE_SUM_H

#include <math.h>
#include <string.h>

#include "values.h"

/* A float of `n_frac` fraction bits and the least exponent `e_min`, as a double. */
static inline double naive_decode(unsigned bits, int n_frac, int e_min)
{
    const unsigned exponent = (bits & 0x7fffu) >> n_frac;
    const unsigned top = 0x7fffu >> n_frac;
    const double fraction = (double)(bits & ((1u << n_frac) - 1u));
    const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
    if (exponent == top)
        return fraction != 0.0 ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, e_min - n_frac);
    return sign *
           ldexp(ldexp(1.0, n_frac) + fraction, (int)exponent - 1 + e_min - n_frac);
}

static inline unsigned naive_encode(double value, int n_frac, int e_min)
{
    const unsigned top = 0x7fffu >> n_frac;
    const unsigned sign = signbit(value) ? 0x8000u : 0u;
    if (isnan(value))
        return sign | (top << n_frac) | 1u;
    int e = 0;
    (void)frexp(value, &e); /* |value| in [2^(e-1), 2^e) */
    if (e - 1 < e_min || value == 0.0)
        e = e_min + 1;
    const double units =
        isinf(value) ? 0.0 : nearbyint(ldexp(fabs(value), n_frac + 1 - e));
    const double e_stored = (double)(e - 1 - e_min);
    const double bits = e_stored * ldexp(1.0, n_frac) + units;
    if (isinf(value) || bits >= (double)(top << n_frac))
        return sign | (top << n_frac);
    return sign | (unsigned)bits;
}

static inline int n_frac_of(pl_dtype dtype)
{
    return dtype == PL_F16 ? 10 : 7;
}

static inline int e_min_of(pl_dtype dtype)
{
    return dtype == PL_F16 ? -14 : -126;
}

static inline float naive_half(const void *p, pl_dtype dtype)
{
    uint16_t bits = 0;
    memcpy(&bits, p, sizeof bits);
    return (float)naive_decode(bits, n_frac_of(dtype), e_min_of(dtype));
}

/* The least k for which 2^k >= n: inputs of a mean are first divided by 2^k, so that a
 * mean of finite numbers is finite, and their sum by n / 2^k. */
static inline int naive_halvings(int n)
{
    int k = 0;
    while (1 << k < n)
        k++;
    return k;
}

static inline void naive_floats(const unsigned char *const *in, int n_in, size_t at,
                                int is_mean, pl_dtype dtype, unsigned char *out)
{
    const int k = is_mean ? naive_halvings(n_in) : 0;
    float sum = 0.0F;
    for (int r = 0; r < n_in; r++) {
        float x = 0.0F;
        if (dtype == PL_F32)
            memcpy(&x, in[r] + at, sizeof x);
        else
            x = naive_half(in[r] + at, dtype);
        x = ldexpf(x, -k);
        sum = r == 0 ? x : sum + x;
    }
    if (is_mean)
        sum /= ldexpf((float)n_in, -k);
    if (dtype == PL_F32) {
        memcpy(out + at, &sum, sizeof sum);
    } else {
        const unsigned bits = naive_encode(sum, n_frac_of(dtype), e_min_of(dtype));
        const uint16_t half = (uint16_t)bits;
        memcpy(out + at, &half, sizeof half);
    }
}

static inline void naive_doubles(const unsigned char *const *in, int n_in, size_t at,
                                 int is_mean, unsigned char *out)
{
    const int k = is_mean ? naive_halvings(n_in) : 0;
    double sum = 0.0;
    for (int r = 0; r < n_in; r++) {
        double x = 0.0;
        memcpy(&x, in[r] + at, sizeof x);
        x = ldexp(x, -k);
        sum = r == 0 ? x : sum + x;
    }
    if (is_mean)
        sum /= ldexp((double)n_in, -k);
    memcpy(out + at, &sum, sizeof sum);
}

/* The integer at p, sign-extended if its type is signed. */
static inline int64_t naive_integer(const unsigned char *p, pl_dtype dtype)
{
    int8_t i8 = 0;
    int16_t i16 = 0;
    int32_t i32 = 0;
    int64_t i64 = 0;
    switch (dtype) {
    case PL_U8:
        return *p;
    case PL_I8:
        memcpy(&i8, p, sizeof i8);
        return i8;
    case PL_I16:
        memcpy(&i16, p, sizeof i16);
        return i16;
    case PL_I32:
        memcpy(&i32, p, sizeof i32);
        return i32;
    default:
        memcpy(&i64, p, sizeof i64);
        return i64;
    }
}

static inline void naive_integers(const unsigned char *const *in, int n_in, size_t at,
                                  int is_max, pl_dtype dtype, unsigned char *out)
{
    int64_t result = naive_integer(in[0] + at, dtype);
    for (int r = 1; r < n_in; r++) {
        const int64_t x = naive_integer(in[r] + at, dtype);
        if (!is_max)
            result = (int64_t)((uint64_t)result + (uint64_t)x);
        else if (x > result)
            result = x;
    }
    for (size_t k = 0; k < pl_dtype_bytes(dtype); k++)
        out[at + k] = (unsigned char)((uint64_t)result >> (8 * k));
}

static inline void naive_reduce(const unsigned char *const *in, int n_in,
                                size_t n_bytes, pl_dtype dtype, pl_reduction reduction,
                                unsigned char *out)
{
    const pl_dtype part = value_part(dtype);
    for (size_t at = 0; at < n_bytes; at += pl_dtype_bytes(part)) {
        if (part == PL_F64)
            naive_doubles(in, n_in, at, reduction == PL_MEAN, out);
        else if (part == PL_F32 || part == PL_F16 || part == PL_BF16)
            naive_floats(in, n_in, at, reduction == PL_MEAN, part, out);
        else
            naive_integers(in, n_in, at, reduction == PL_MAX, part, out);
    }
}

/* ---- inputs and results --------------------------------------------------------- */

static uint64_t random_state = 88172645463325252u;

static inline uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 2685821657736338717u;
}

/* The bits of a special value: zeros, infinities, NaNs, extremes, denormals, ties. */
static inline uint64_t special_bits(pl_dtype dtype)
{
    static const uint16_t half[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400,
                                    0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0x7c01,
                                    0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0x7f81,
                                    0x0080, 0x007f, 0x3c00, 0x1000, 0x1400, 0x6400};
    static const float single[] = {0.0F,      -0.0F,   1e-45F,   -1e-45F,
                                   1e-38F,    3.4e38F, -3.4e38F, INFINITY,
                                   -INFINITY, NAN,     1.0F,     0x1p-24F};
    const uint64_t draw = random_u64() >> 8;
    if (pl_dtype_bytes(dtype) <= 2)
        return half[draw % (sizeof half / sizeof half[0])];
    const float f = single[draw % (sizeof single / sizeof single[0])];
    uint32_t f32_bits = 0;
    memcpy(&f32_bits, &f, sizeof f32_bits);
    if (dtype != PL_F64)
        return f32_bits;
    const double d = fabsf(f) <= 1e-38F ? (double)f * 0x1p-920 : (double)f;
    uint64_t f64_bits = 0;
    memcpy(&f64_bits, &d, sizeof f64_bits);
    return f64_bits;
}

/* The bits of a number between -8 and 8: sums round, but do not overflow. */
static inline uint64_t modest_bits(pl_dtype dtype)
{
    const double d = ldexp((double)(int32_t)random_u64(), -28);
    const float f = (float)d;
    uint64_t d_bits = 0;
    uint32_t f_bits = 0;
    memcpy(&d_bits, &d, sizeof d_bits);
    memcpy(&f_bits, &f, sizeof f_bits);
    switch (dtype) {
    case PL_F16:
    case PL_BF16:
        return naive_encode(f, n_frac_of(dtype), e_min_of(dtype));
    case PL_F32:
        return f_bits;
    case PL_F64:
        return d_bits;
    default:
        return random_u64();
    }
}

/* Fills with modest numbers, and one time in eight with specials or raw bits. */
static inline void naive_fill(unsigned char *data, size_t n_bytes, pl_dtype dtype)
{
    const pl_dtype part = value_part(dtype);
    const size_t part_bytes = pl_dtype_bytes(part);
    for (size_t at = 0; at < n_bytes; at += part_bytes) {
        const uint64_t kind = random_u64() >> 60;
        uint64_t bits = random_u64();
        if (kind == 0)
            bits = special_bits(part);
        else if (kind != 1)
            bits = modest_bits(part);
        for (size_t k = 0; k < part_bytes; k++)
            data[at + k] = (unsigned char)(bits >> (8 * k));
    }
}

static inline int is_nan_at(const unsigned char *p, pl_dtype part)
{
    float f = 0.0F;
    double d = 0.0;
    switch (part) {
    case PL_F16:
    case PL_BF16:
        return isnan(naive_half(p, part));
    case PL_F32:
        memcpy(&f, p, sizeof f);
        return isnan(f);
    case PL_F64:
        memcpy(&d, p, sizeof d);
        return isnan(d);
    default:
        return 0;
    }
}

/* The first element that differs, or -1. */
static inline long first_difference(const unsigned char *got,
                                    const unsigned char *expected, size_t n_bytes,
                                    pl_dtype dtype)
{
    const pl_dtype part = value_part(dtype);
    const size_t part_bytes = pl_dtype_bytes(part);
    if (n_bytes == 0 || memcmp(got, expected, n_bytes) == 0)
        return -1;
    for (size_t at = 0; at < n_bytes; at += part_bytes) {
        if (memcmp(got + at, expected + at, part_bytes) == 0)
            continue;
        if (!is_nan_at(got + at, part) || !is_nan_at(expected + at, part))
            return (long)(at / part_bytes);
    }
    return -1;
}

#endif
