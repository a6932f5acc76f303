/* cpu_sum_avx512.c - reductions for x86-64 with AVX-512, in 64-byte vectors.
 *
 * Has the structure of cpu_sum_avx2.c.  AVX512-BF16 and AVX512-FP16 stay unused: the
 * first flushes denormals, and the second would add in 16 bits.
 */
#include <stdint.h>
#include <string.h>

#include "cpu_sum.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))),                     \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif

#define PLI_V_BYTES 64
#define PLI_V_ISA PLI_ISA_AVX512
#define PLI_V_TABLE pli_sum_table_avx512

#include "cpu_sum_vec.h"

PLI_INLINE pair f16_load(const unsigned char *p)
{
    const __m512 a = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
    const __m512 b = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + 32)));
    return (pair){(v_u32)a, (v_u32)b};
}

PLI_INLINE void f16_store(unsigned char *p, pair v)
{
    /* A mask of all lanes: gcc's unmasked macro passes a -1 that -Wconversion flags. */
    enum { ALL = 0xffff, NEAREST = _MM_FROUND_TO_NEAREST_INT };
    const __m256i a = _mm512_maskz_cvtps_ph(ALL, (__m512)v.a, NEAREST);
    const __m256i b = _mm512_maskz_cvtps_ph(ALL, (__m512)v.b, NEAREST);
    _mm256_storeu_si256((__m256i *)p, a);
    _mm256_storeu_si256((__m256i *)(p + 32), b);
}

#include "cpu_sum_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
