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
 * CASTAGNOLI.  So it folds each 256 bytes into the next, and the CRC of the last is
 * that of all.  From the cache this is three times as fast as the lanes.
 */
#include "crc32c.h"

#include <string.h>

/* The highest bit is the coefficient of x^0. */
#define CASTAGNOLI UINT32_C(0x82f63b78)

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

#if defined(__x86_64__)
#include <immintrin.h>
#define HAS_INSTRUCTION __builtin_cpu_supports("sse4.2")
#ifdef __clang__ /* asks for it by name; gcc before 11 does not know the name */
#define SSE42 "sse4.2,crc32"
#else
#define SSE42 "sse4.2"
#endif
#define WITH_INSTRUCTION __attribute__((target(SSE42)))
#define CRC_OF_8(crc, word) ((uint32_t)__builtin_ia32_crc32di((crc), (word)))
#define CRC_OF_1(crc, byte) __builtin_ia32_crc32qi((crc), (byte))
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define HAS_INSTRUCTION ((getauxval(AT_HWCAP) & 1 << 7) != 0) /* HWCAP_CRC32 */
#define WITH_INSTRUCTION __attribute__((target("arch=armv8-a+crc")))
#ifdef __clang__
#define CRC_OF_8(crc, word) __builtin_arm_crc32cd((crc), (word))
#define CRC_OF_1(crc, byte) __builtin_arm_crc32cb((crc), (byte))
#else
#define CRC_OF_8(crc, word) __builtin_aarch64_crc32cx((crc), (word))
#define CRC_OF_1(crc, byte) __builtin_aarch64_crc32cb((crc), (byte))
#endif
#endif

#ifdef HAS_INSTRUCTION
enum { LANE_BYTES = 8192 };
/* x^(8 * LANE_BYTES) modulo CASTAGNOLI */
#define LANE_FACTOR UINT32_C(0x28461564)

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (; a != 0; a <<= 1) {
        product ^= (0 - (a >> 31)) & b;
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
    for (size_t i = 0; i < LANE_BYTES; i += 8) {
        crc = CRC_OF_8(crc, word_at(at + i));
        second = CRC_OF_8(second, word_at(at + LANE_BYTES + i));
        third = CRC_OF_8(third, word_at(at + LANE_BYTES + LANE_BYTES + i));
    }
    second ^= multiply(crc, LANE_FACTOR);
    return third ^ multiply(second, LANE_FACTOR);
}

WITH_INSTRUCTION static uint32_t
crc_by_instruction(uint32_t crc, const unsigned char *at, size_t n_bytes)
{
    enum { LANES_BYTES = 3 * LANE_BYTES };
    for (; n_bytes >= LANES_BYTES; at += LANES_BYTES, n_bytes -= LANES_BYTES)
        crc = crc_of_lanes(crc, at);
    for (; n_bytes >= 8; at += 8, n_bytes -= 8)
        crc = CRC_OF_8(crc, word_at(at));
    for (; n_bytes > 0; n_bytes--)
        crc = CRC_OF_1(crc, *at++);
    return crc;
}
#endif

#if defined(__x86_64__)
enum { FOLD_BYTES = 256, FOLDS_LEAST_BYTES = 1024 };

/* Folds while at least FOLD_BYTES follow; FOLDS_LEAST_BYTES or more are there. */
__attribute__((target(SSE42 ",avx512f,vpclmulqdq"))) static uint32_t
crc_by_folds(uint32_t crc, const unsigned char *at, size_t n_bytes)
{
    /* x^(2048 + 63) and x^(2048 - 1), for the two halves of 16 bytes: a carry-less
     * product of reflected polynomials is one power too high. */
    const __m512i factors = _mm512_broadcast_i32x4(
        _mm_set_epi64x(INT64_C(0x1426a81500000000), (long long)0xe9a5d8be00000000));
    unsigned char rest[FOLD_BYTES];
    __m512i folded[4];
    for (size_t k = 0; k < 4; k++)
        folded[k] = _mm512_loadu_si512(at + 64 * k);
    folded[0] = _mm512_xor_si512(folded[0], _mm512_maskz_set1_epi32(1, (int)crc));
    for (n_bytes -= FOLD_BYTES, at += FOLD_BYTES; n_bytes >= FOLD_BYTES;
         n_bytes -= FOLD_BYTES, at += FOLD_BYTES)
#pragma GCC unroll 4 /* else the compiler keeps `folded` in memory */
        for (size_t k = 0; k < 4; k++)
            folded[k] = _mm512_ternarylogic_epi64(
                _mm512_clmulepi64_epi128(folded[k], factors, 0x00),
                _mm512_clmulepi64_epi128(folded[k], factors, 0x11),
                _mm512_loadu_si512(at + 64 * k), 0x96); /* exclusive or */
    memcpy(rest, folded, sizeof rest);
    return crc_by_instruction(crc_by_instruction(0, rest, sizeof rest), at, n_bytes);
}
#endif

uint32_t pli_crc32c(uint32_t crc, const void *bytes, size_t n_bytes)
{
#if defined(__x86_64__)
    if (n_bytes >= FOLDS_LEAST_BYTES && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("vpclmulqdq"))
        return ~crc_by_folds(~crc, bytes, n_bytes);
#endif
#ifdef HAS_INSTRUCTION
    if (HAS_INSTRUCTION)
        return ~crc_by_instruction(~crc, bytes, n_bytes);
#endif
    return pli_crc32c_plain(crc, bytes, n_bytes);
}
