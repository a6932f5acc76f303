/* cpu_sum_avx2.c - reductions for x86-64 with AVX2 and F16C, in 32-byte vectors.
 *
 * The file is compiled for the baseline and raises the target only for its own
 * functions.  Headers come first, so that they keep the baseline.
 */
#include <stdint.h>
#include <string.h>

#include "cpu_sum.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#define PLI_V_BYTES 32
#define PLI_V_ISA PLI_ISA_AVX2
#define PLI_V_TABLE pli_sum_table_avx2

#include "cpu_sum_vec.h"

PLI_INLINE pair f16_load(const unsigned char *p)
{
    const __m256 a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    const __m256 b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)));
    return (pair){(v_u32)a, (v_u32)b};
}

PLI_INLINE void f16_store(unsigned char *p, pair v)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT };
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v.a, NEAREST));
    _mm_storeu_si128((__m128i *)(p + 16), _mm256_cvtps_ph((__m256)v.b, NEAREST));
}

#include "cpu_sum_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
