/* cpu_sum_plain.c - reductions with the baseline instructions of the architecture.
 *
 * Sixteen-byte vectors: SSE2 on x86-64, Advanced SIMD on aarch64, scalar code
 * elsewhere.  float16 is converted in integers: x86-64's baseline has no instruction.
 */
#include <stdint.h>
#include <string.h>

#include "cpu_sum.h"

#define PLI_V_BYTES 16
#define PLI_V_ISA PLI_ISA_PLAIN
#define PLI_V_TABLE pli_sum_table_plain

#include "cpu_sum_vec.h"

enum {
    F16_SIGN = 0x8000,
    F16_INF = 0x7c00,
    F16_QUIET = 0x0200,
    F16_FRACTION = 0x03ff,
    F16_MIN_NORMAL = 0x0400,
    F16_SHIFT = 13,         /* between the lowest bits of the fractions */
    F16_REBIAS = 112 << 23, /* between the biases of the exponents, in float32 */
    F32_SIZE = 0x7fffffff,  /* all but the sign */
    F32_HALF = 0x3f000000,  /* 0.5, whose last bit is worth the least float16, 2^-24 */
    F32_INF = 0x7f800000,   /* infinity */
    F32_F16_NORMAL = 0x38800000, /* 2^-14, the least normal float16 */
    F32_F16_OVER = 0x477ff000    /* 65520, the least that rounds to infinity */
};

/* Widens the float16 in each lane's lower half.  Lanes are signed because SSE2 compares
 * only signed integers; no value here reaches the sign bit. */
PLI_INLINE v_u32 f16_widen(v_u32 v)
{
    const v_i32 size = (v_i32)v & (F16_SIGN - 1);
    const v_i32 normal = (size << F16_SHIFT) + F16_REBIAS;
    /* 0.5 plus `size` steps of 2^-24, minus 0.5.  This is exact and avoids float32
     * denormals, which the program may have told the processor to flush. */
    const v_f32 denormal = (v_f32)(size + F32_HALF) - 0.5F;
    const v_u32 is_denormal = (v_u32)(size < F16_MIN_NORMAL);
    const v_i32 more = (size >= F16_INF) & F16_REBIAS;
    const v_u32 wide = v_select(is_denormal, (v_u32)denormal, (v_u32)(normal + more));
    return wide | ((v & F16_SIGN) << 16);
}

/* Rounds to float16, to nearest even, in each lane's lower half.  A NaN keeps the upper
 * bits of its fraction, as with the processors' instructions: hosts compare bits. */
PLI_INLINE v_u32 f16_narrow(v_u32 v)
{
    const v_i32 size = (v_i32)v & F32_SIZE;
    const v_i32 odd = (size >> F16_SHIFT) & 1;
    const v_i32 normal = (size + (0x0fff - F16_REBIAS) + odd) >> F16_SHIFT;
    /* The addition of 0.5 rounds to a multiple of 2^-24, as a denormal needs. */
    const v_i32 denormal = (v_i32)((v_f32)size + 0.5F) - F32_HALF;
    const v_i32 nan = F16_QUIET | ((size >> F16_SHIFT) & F16_FRACTION);
    const v_i32 special = F16_INF | ((size > F32_INF) & nan);
    const v_u32 is_denormal = (v_u32)(size < F32_F16_NORMAL);
    const v_u32 is_over = (v_u32)(size >= F32_F16_OVER);
    const v_u32 finite = v_select(is_denormal, (v_u32)denormal, (v_u32)normal);
    return v_select(is_over, (v_u32)special, finite) | ((v >> 16) & F16_SIGN);
}

/* Even and odd elements separately, as in bf16_load(). */
PLI_INLINE pair f16_load(const unsigned char *p)
{
    const v_u32 v = v_load(p);
    return (pair){f16_widen(v & 0xffffu), f16_widen(v >> 16)};
}

PLI_INLINE void f16_store(unsigned char *p, pair v)
{
    v_store(p, f16_narrow(v.a) | (f16_narrow(v.b) << 16));
}

#include "cpu_sum_body.h"
