/* values.h - elements that are small integers, whatever their dtype.
 *
 * Their sums and means are exact in every dtype, so a test compares bits.  A *part* is
 * a real number: a complex element has two, any other has one.
 */
#ifndef PLT_VALUES_H
#define PLT_VALUES_H

#include <stdint.h>
#include <string.h>

#include "include/paceline.h"

enum { VALUE_MOST = 256 }; /* the largest integer up to which bfloat16 has no gap */

static inline pl_dtype value_part(pl_dtype dtype)
{
    if (dtype == PL_C64)
        return PL_F32;
    return dtype == PL_C128 ? PL_F64 : dtype;
}

static inline size_t value_n_parts(pl_dtype dtype, size_t n_elems)
{
    return dtype == PL_C64 || dtype == PL_C128 ? 2 * n_elems : n_elems;
}

static inline int value_is_integer(pl_dtype dtype)
{
    return dtype <= PL_I64;
}

static inline uint16_t value_f16(int value)
{
    const unsigned magnitude = (unsigned)(value < 0 ? -value : value);
    unsigned exponent = 0;
    if (magnitude == 0)
        return 0;
    while (magnitude >> (exponent + 1) != 0)
        exponent++;
    return (uint16_t)((value < 0 ? 0x8000u : 0u) | (exponent + 15) << 10 |
                      ((magnitude << (10 - exponent)) & 0x3ffu));
}

static inline uint16_t value_bf16(int value)
{
    const float wide = (float)value;
    uint32_t bits = 0;
    memcpy(&bits, &wide, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Writes the bytes of `value` as one part to `out`; returns their number. */
static inline size_t value_bytes(pl_dtype part, int value, unsigned char out[8])
{
    const float narrow = (float)value;
    const double wide = (double)value;
    const int64_t whole = value; /* its low bytes come first: little endian */
    const uint16_t half = part == PL_F16 ? value_f16(value) : value_bf16(value);
    switch (part) {
    case PL_F16:
    case PL_BF16:
        memcpy(out, &half, sizeof half);
        break;
    case PL_F32:
        memcpy(out, &narrow, sizeof narrow);
        break;
    case PL_F64:
        memcpy(out, &wide, sizeof wide);
        break;
    default:
        memcpy(out, &whole, sizeof whole);
        break;
    }
    return pl_dtype_bytes(part);
}

static inline void value_put(void *to, pl_dtype part, size_t i, int value)
{
    unsigned char bytes[8];
    const size_t n = value_bytes(part, value, bytes);
    memcpy((char *)to + i * n, bytes, n);
}

static inline int value_is(const void *at, pl_dtype part, size_t i, int value)
{
    unsigned char bytes[8];
    const size_t n = value_bytes(part, value, bytes);
    return memcmp((const char *)at + i * n, bytes, n) == 0;
}

#endif
