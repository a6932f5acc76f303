/* crc32c.c - by the processor's own instructions if it has them, else by a table.
 *
 * A CRC is the message, as a polynomial over GF(2), modulo CASTAGNOLI.  Its first bit
 * has the highest power of x.
 *
 * The instruction for 8 bytes takes 3 cycles, and a new one can begin in each: so a
 * long run is cut into three lanes, computed side by side.  To append a lane, the CRC
 * before it is multiplied by x^(8 * the lane's bytes).
 *
 * AVX-512 with VPCLMULQDQ multiplies 64 bytes at a time by powers of x modulo
 * CASTAGNOLI.  So it folds each 256 bytes into the next, and at last 256 into 16, whose
 * CRC is the same.  From the cache this is three times as fast as the lanes.
 */
#include "crc32c.h"

#include <string.h>

#define CASTAGNOLI                                                                     \
    UINT32_C(0x82f63b78) /* the highest bit is the coefficient of x^0                  \
                          */

uint32_t pli_crc32c_plain(uint32_t crc, const void *bytes, size_t n_bytes)
{
    static const uint32_t of_nibble[16] = {
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3,
        0x61c69362, 0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
        0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75};
    const unsigned char *at = bytes;
    crc = ~crc;
    for (; n_bytes > 0; n_bytes--) {
        crc ^= *at++;
        crc = crc >> 4 ^ of_nibble[crc & 15];
        crc = crc >> 4 ^ of_nibble[crc & 15];
    }
    return ~crc;
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_INSTRUCTION 1
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#define CRC_OF_8(crc, word) ((uint32_t)__builtin_ia32_crc32di((crc), (word)))
#define CRC_OF_1(crc, byte) __builtin_ia32_crc32qi((crc), (byte))

static int has_instruction(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#include <sys/auxv.h>
#define HAS_INSTRUCTION 1
#define WITH_INSTRUCTION __attribute__((target("arch=armv8-a+crc")))
#define CRC_OF_8(crc, word) __builtin_aarch64_crc32cx((crc), (word))
#define CRC_OF_1(crc, byte) __builtin_aarch64_crc32cb((crc), (byte))

static int has_instruction(void)
{
    enum { HWCAP_CRC = 1 << 7 };
    return (getauxval(AT_HWCAP) & HWCAP_CRC) != 0;
}
#endif

#ifdef HAS_INSTRUCTION
enum { LANE_BYTES = 8192, LANE_WORDS = LANE_BYTES / 8 };
/* x^(8 * LANE_BYTES) modulo CASTAGNOLI */
#define LANE_FACTOR UINT32_C(0x28461564)

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = UINT32_C(1) << 31; bit != 0; bit >>= 1) {
        product ^= (0 - (uint32_t)((a & bit) != 0)) & b;
        b = b >> 1 ^ ((0 - (b & 1)) & CASTAGNOLI);
    }
    return product;
}

static uint64_t word_at(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

WITH_INSTRUCTION static uint32_t crc_of_lanes(uint32_t crc, const unsigned char *at)
{
    uint32_t second = 0;
    uint32_t third = 0;
    for (int i = 0; i < LANE_WORDS; i++, at += 8) {
        crc = CRC_OF_8(crc, word_at(at));
        second = CRC_OF_8(second, word_at(at + LANE_BYTES));
        third = CRC_OF_8(third, word_at(at + (ptrdiff_t)2 * LANE_BYTES));
    }
    second ^= multiply(LANE_FACTOR, crc);
    return third ^ multiply(LANE_FACTOR, second);
}

#if defined(__x86_64__)
#include <immintrin.h>
#define WITH_FOLDS __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))
enum { FOLD_BYTES = 256, FOLDS_LEAST_BYTES = 1024 };

/* Of x^n, for the two halves of 16 bytes that move by `bits`.  A carry-less product of
 * reflected polynomials is one power too high, so n is bits + 63 and bits - 1. */
#define FACTORS_2048 INT64_C(0x1426a81500000000), (long long)0xe9a5d8be00000000
#define FACTORS_128 INT64_C(0x3171d43000000000), INT64_C(0x3743f7bd00000000)

static int has_folds(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

WITH_FOLDS static __m512i fold_64(__m512i folded, __m512i next, __m512i factors)
{
    const __m512i low = _mm512_clmulepi64_epi128(folded, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(folded, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* exclusive or */
}

WITH_FOLDS static __m128i fold_16(__m128i folded, __m128i next)
{
    const __m128i factors = _mm_set_epi64x(FACTORS_128);
    const __m128i low = _mm_clmulepi64_si128(folded, factors, 0x00);
    const __m128i high = _mm_clmulepi64_si128(folded, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* n_bytes is a multiple of FOLD_BYTES, and not 0. */
WITH_FOLDS static uint32_t crc_by_folds(uint32_t crc, const unsigned char *at,
                                        size_t n_bytes)
{
    const __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x(FACTORS_2048));
    __m512i folded[4];
    __m128i lanes[FOLD_BYTES / 16];
    for (int k = 0; k < 4; k++)
        folded[k] = _mm512_loadu_si512(at + (ptrdiff_t)64 * k);
    folded[0] =
        _mm512_xor_si512(folded[0], _mm512_inserti32x4(_mm512_setzero_si512(),
                                                       _mm_cvtsi32_si128((int)crc), 0));
    while ((n_bytes -= FOLD_BYTES) > 0) {
        at += FOLD_BYTES;
        for (int k = 0; k < 4; k++)
            folded[k] =
                fold_64(folded[k], _mm512_loadu_si512(at + (ptrdiff_t)64 * k), factors);
    }
    memcpy(lanes, folded, sizeof lanes);
    for (int k = 1; k < FOLD_BYTES / 16; k++)
        lanes[k] = fold_16(lanes[k - 1], lanes[k]);
    crc = CRC_OF_8(0, (uint64_t)_mm_cvtsi128_si64(lanes[FOLD_BYTES / 16 - 1]));
    return CRC_OF_8(crc, (uint64_t)_mm_extract_epi64(lanes[FOLD_BYTES / 16 - 1], 1));
}
#endif

WITH_INSTRUCTION static uint32_t crc_by_instruction(uint32_t crc, const void *bytes,
                                                    size_t n_bytes)
{
    enum { LANES_BYTES = 3 * LANE_BYTES };
    const unsigned char *at = bytes;
    crc = ~crc;
#if defined(__x86_64__)
    if (n_bytes >= FOLDS_LEAST_BYTES && has_folds()) {
        const size_t n_folded = n_bytes / FOLD_BYTES * FOLD_BYTES;
        crc = crc_by_folds(crc, at, n_folded);
        at += n_folded;
        n_bytes -= n_folded;
    }
#endif
    for (; n_bytes >= LANES_BYTES; at += LANES_BYTES, n_bytes -= LANES_BYTES)
        crc = crc_of_lanes(crc, at);
    for (; n_bytes >= 8; at += 8, n_bytes -= 8)
        crc = CRC_OF_8(crc, word_at(at));
    for (; n_bytes > 0; n_bytes--)
        crc = CRC_OF_1(crc, *at++);
    return ~crc;
}
#endif

uint32_t pli_crc32c(uint32_t crc, const void *bytes, size_t n_bytes)
{
#ifdef HAS_INSTRUCTION
    if (has_instruction())
        return crc_by_instruction(crc, bytes, n_bytes);
#endif
    return pli_crc32c_plain(crc, bytes, n_bytes);
}
