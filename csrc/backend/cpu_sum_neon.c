/* cpu_sum_neon.c - reductions for aarch64, in 16-byte vectors.
 *
 * Every aarch64 has Advanced SIMD, so cpu_sum_plain.c uses it too.  This file adds the
 * instructions that convert float16.
 */
#include <stdint.h>
#include <string.h>

#include "cpu_sum.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define PLI_V_BYTES 16
#define PLI_V_ISA PLI_ISA_NEON
#define PLI_V_TABLE pli_sum_table_neon

#include "cpu_sum_vec.h"

PLI_INLINE pair f16_load(const unsigned char *p)
{
    const uint8x16_t v = vld1q_u8(p);
    const float16x4_t a = vreinterpret_f16_u8(vget_low_u8(v));
    const float16x4_t b = vreinterpret_f16_u8(vget_high_u8(v));
    return (pair){(v_u32)vcvt_f32_f16(a), (v_u32)vcvt_f32_f16(b)};
}

PLI_INLINE void f16_store(unsigned char *p, pair v)
{
    const float16x4_t a = vcvt_f16_f32((float32x4_t)v.a);
    const float16x4_t b = vcvt_f16_f32((float32x4_t)v.b);
    vst1q_u8(p, vcombine_u8(vreinterpret_u8_f16(a), vreinterpret_u8_f16(b)));
}

#include "cpu_sum_body.h"

#endif
