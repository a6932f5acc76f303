/* kernels_words.h - the macros by which three compilers accept kernels.cu, and 16-bit
 * floats by integer arithmetic.
 *
 * With nvcc and NVRTC, KERNEL defines a kernel.  With a C compiler, it defines a
 * function that runs one block's threads one after another.  For that, the including
 * file defines BLOCK, the block's index; REACHED(words), which records that a branch
 * was taken; FETCHED(n_bytes), which records the bytes of a refresh; and VEC_TOUCHED,
 * which checks a vector's address and returns it.
 */
#ifndef PLI_KERNELS_WORDS_H
#define PLI_KERNELS_WORDS_H

#include "kernels_table.h"

#ifdef __CUDACC__
#define KERNEL(name, type)                                                             \
    extern "C" __global__ void __launch_bounds__(PLI_THREADS) name(const type given)
#define GIVEN given
#define DEVICE static __device__ __forceinline__
#define ALIGNED(n_bytes) __align__(n_bytes)
#define UNROLL _Pragma("unroll")
#define UNROLL_SOME _Pragma("unroll 4")
#define UNROLL_NOT _Pragma("unroll 1")
#define BLOCK blockIdx.x
#define FOR_EACH_THREAD(t) for (unsigned t = threadIdx.x, once = 1; once; once = 0)
#define REACHED(words)
#define FETCHED(n_bytes)
#define VEC(at, i) ((at)[i])
#define AS_F32(bits) __uint_as_float(bits)
#define AS_U32(value) __float_as_uint(value)
#define AS_F64(bits) __longlong_as_double((long long)(bits))
#define AS_U64(value) ((u64)__double_as_longlong(value))
/* nvcc and NVRTC before 12.1, and Pascal, lack large parameters.  A driver before 12.1
 * may refuse the whole module if one kernel has them. */
#ifndef PLI_TAKES_LARGE
#define PLI_TAKES_LARGE 1
#endif
#if PLI_TAKES_LARGE &&                                                                 \
    __CUDACC_VER_MAJOR__ * 1000 + __CUDACC_VER_MINOR__ * 10 >= 12010 &&                \
    (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700)
#define HAS_LARGE
#endif
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

/* All threads of a block call it: *to += the sum of their values. */
#define ADD_TO(to, value) add_of_warp((to), (value))
DEVICE void add_of_warp(u64 *to, u64 value)
{
    UNROLL for (unsigned distance = 16; distance > 0; distance /= 2) value +=
        __shfl_down_sync(0xffffffffu, value, distance);
    if (threadIdx.x % 32 == 0)
        atomicAdd(to, value);
}
#else /* the including file defines BLOCK, REACHED, FETCHED and VEC_TOUCHED */
#define VEC(at, i) (*(__typeof__(&(at)[i]))VEC_TOUCHED(&(at)[i]))
#define KERNEL(name, type) static void name(const type *given)
#define GIVEN (*given)
#define DEVICE static inline
#define ALIGNED(n_bytes) __attribute__((aligned(n_bytes), may_alias))
#define UNROLL
#define UNROLL_SOME
#define UNROLL_NOT
#define FOR_EACH_THREAD(t) for (unsigned t = 0; t < PLI_THREADS; t++)
#define AS_F32(bits) as_f32(bits)
#define AS_U32(value) as_u32(value)
#define AS_F64(bits) as_f64(bits)
#define AS_U64(value) as_u64(value)
#define HAS_LARGE
typedef unsigned char u8;
typedef unsigned short __attribute__((may_alias)) u16;
typedef unsigned __attribute__((may_alias)) u32;
typedef unsigned long long __attribute__((may_alias)) u64;
#define ADD_TO(to, value) ((void)__atomic_fetch_add((to), (value), __ATOMIC_RELAXED))

#define DEFINE_AS(name, from_type, to_type)                                            \
    DEVICE to_type name(from_type from)                                                \
    {                                                                                  \
        union {                                                                        \
            from_type from;                                                            \
            to_type to;                                                                \
        } both;                                                                        \
        both.from = from;                                                              \
        return both.to;                                                                \
    }
DEFINE_AS(as_f32, u32, float)
DEFINE_AS(as_u32, float, u32)
DEFINE_AS(as_f64, u64, double)
DEFINE_AS(as_u64, double, u64)
#endif

enum { BATCH = 4 }; /* vectors that a thread loads before its first store */

/* What a thread loads and stores at once, aligned to 16 bytes. */
typedef struct ALIGNED(16) vec_u16 {
    u16 e[8];
} vec_u16;
typedef struct ALIGNED(16) vec_u32 {
    u32 e[4];
} vec_u32;
typedef struct ALIGNED(16) vec_u64 {
    u64 e[4];
} vec_u64;

#define LANES(word) ((u32)(sizeof(vec_##word) / sizeof(word)))

/* A vector of eight words becomes eight floats for each operand.  More than two of them
 * would need so many registers that too few blocks fit on a multiprocessor. */
#define BATCH_OF(word) (LANES(word) > 4 ? BATCH / 2 : BATCH)

/* Words from `at` to the next address that is aligned for a vector. */
#define WORDS_TO_VEC(word, at)                                                         \
    ((u32)((0 - (u64)(at)) % sizeof(vec_##word) / sizeof(word)))

/* ---- 16-bit floats -------------------------------------------------------------- */

enum { HALF_SIGN = 0x8000, HALF_SIZE = 0x7fff };

DEVICE float f16_read(u16 bits)
{
    const u32 size = bits & HALF_SIZE;
    const u32 sign = (u32)(bits & HALF_SIGN) << 16;
    if (size < 0x0400) {
        REACHED("f16 denormal or zero widened");
        return AS_F32(AS_U32((float)size * AS_F32(0x33800000u)) | sign); /* 2^-24 */
    }
    if (size >= 0x7c00) {
        REACHED("f16 special widened");
        return AS_F32(((size << 13) + 0x70000000u) | sign);
    }
    return AS_F32(((size << 13) + 0x38000000u) | sign);
}

DEVICE float bf16_read(u16 bits)
{
    return AS_F32((u32)bits << 16);
}

/* bits / 2^n_bits, to nearest even. */
DEVICE u64 round_off(u64 bits, u32 n_bits)
{
    const u64 quotient = bits >> n_bits;
    const u64 rest = bits - (quotient << n_bits);
    const u64 half = (u64)1 << (n_bits - 1);
    return quotient + (rest > half || (rest == half && (quotient & 1) != 0) ? 1 : 0);
}

DEVICE u16 f16_write(float value)
{
    const u32 bits = AS_U32(value);
    const u32 size = bits & 0x7fffffffu;
    const u32 sign = (bits >> 16) & HALF_SIGN;
    if (size >= 0x477ff000u) { /* 65520, the least that rounds to infinity */
        REACHED("f32 too large for f16");
        return (u16)(sign | (size > 0x7f800000u ? 0x7e00u : 0x7c00u));
    }
    if (size >= 0x38800000u) { /* 2^-14, the least normal number */
        const u32 odd = (size >> 13) & 1;
        return (u16)(sign | ((size - 0x38000000u + 0x0fffu + odd) >> 13));
    }
    if (size <= 0x33000000u) { /* 2^-25, half of the least number */
        REACHED("f32 too small for f16");
        return (u16)sign;
    }
    REACHED("f32 to a denormal f16");
    const u64 fraction = (size & 0x007fffffu) | 0x00800000u;
    return (u16)(sign | (u32)round_off(fraction, 126 - (size >> 23)));
}

DEVICE u16 bf16_write(float value)
{
    const u32 bits = AS_U32(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        REACHED("f32 NaN to bf16");
        return (u16)(((bits >> 16) & HALF_SIGN) | 0x7fc0u);
    }
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* For finite numbers.  Rounding up to the next power of two carries into the exponent,
 * and a carry out of the largest exponent gives infinity. */
DEVICE u16 f64_to_half(double value, int n_fraction, int least_normal)
{
    const u64 bits = AS_U64(value);
    const u64 size = bits & 0x7fffffffffffffffu;
    const u32 sign = (u32)(bits >> 48) & HALF_SIGN;
    const u32 infinity = (u32)(HALF_SIZE >> n_fraction << n_fraction);
    int exponent = (int)(size >> 52) - 1023;
    int n_off = 52 - n_fraction;
    if (exponent > 1 - least_normal) {
        REACHED("f64 too large for 16 bits");
        return (u16)(sign | infinity);
    }
    if (exponent < least_normal) {
        REACHED("f64 to a 16-bit denormal or zero");
        n_off += least_normal - exponent;
        exponent = least_normal;
    }
    if (n_off > 53) {
        REACHED("f64 too small for 16 bits");
        return (u16)sign;
    }
    const u64 fraction = (size & 0x000fffffffffffffu) | 0x0010000000000000u;
    return (u16)(sign | (((u32)(exponent - least_normal) << n_fraction) +
                         (u32)round_off(fraction, (u32)n_off)));
}

DEVICE u16 f64_to_f16(double value)
{
    return f64_to_half(value, 10, -14);
}

DEVICE u16 f64_to_bf16(double value)
{
    return f64_to_half(value, 7, -126);
}

DEVICE u32 f64_to_f32(double value)
{
    return AS_U32((float)value);
}

/* ---- all four float types: from a word to the type of the sum, and back ---------- */

typedef float f16_real;
typedef float bf16_real;
typedef float f32_real;
typedef double f64_real;

#define f32_read(word) AS_F32(word)
#define f64_read(word) AS_F64(word)
#define f32_write(value) AS_U32(value)
#define f64_write(value) AS_U64(value)
#define f64_to_f64(value) AS_U64(value)

/* Infinity or NaN. */
#define f16_is_special(word) (((word) & 0x7c00) == 0x7c00)
#define bf16_is_special(word) (((word) & 0x7f80) == 0x7f80)
#define f32_is_special(word) (((word) & 0x7f800000u) == 0x7f800000u)
#define f64_is_special(word) (((word) >> 52 & 0x7ff) == 0x7ff)

#endif
