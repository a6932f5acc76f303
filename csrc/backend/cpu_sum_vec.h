/* cpu_sum_vec.h - vectors of PLI_V_BYTES bytes, as vector extensions of the compiler.
 *
 * gcc and clang compile `a + b` of such types for the target that is set where this
 * file is included, so one source serves every instruction set.  Functions pass a
 * vector as v_u32, whatever its lanes are: a cast between vector types of one size
 * keeps the bits.
 *
 * Each cpu_sum_<isa>.c includes this file once, after its target pragma.  So the names
 * need no prefix, and no header is included here: the target must not affect headers.
 */
#ifndef PLI_CPU_SUM_VEC_H
#define PLI_CPU_SUM_VEC_H

/* Inlining makes `how` constant, so that each instance is a loop without branches. */
#define PLI_INLINE static inline __attribute__((always_inline))
#define PLI_VECTOR __attribute__((vector_size(PLI_V_BYTES)))

typedef uint8_t v_u8 PLI_VECTOR;
typedef int8_t v_i8 PLI_VECTOR;
typedef uint16_t v_u16 PLI_VECTOR;
typedef int16_t v_i16 PLI_VECTOR;
typedef uint32_t v_u32 PLI_VECTOR;
typedef int32_t v_i32 PLI_VECTOR;
typedef uint64_t v_u64 PLI_VECTOR;
typedef int64_t v_i64 PLI_VECTOR;
typedef float v_f32 PLI_VECTOR;
typedef double v_f64 PLI_VECTOR;

/* An unaligned vector in memory of any type. */
typedef v_u32 v_loose __attribute__((aligned(1), may_alias));

/* One step of a loop.  16-bit floats widen to twice their size, so a step is one vector
 * of them in memory, and two vectors of any other type. */
typedef struct pair {
    v_u32 a;
    v_u32 b;
} pair;

PLI_INLINE v_u32 v_load(const unsigned char *p)
{
    return *(const v_loose *)p;
}

PLI_INLINE void v_store(unsigned char *p, v_u32 v)
{
    *(v_loose *)p = v;
}

/* Selects lanes of `yes` where the mask is all ones, and of `no` where it is zero. */
PLI_INLINE v_u32 v_select(v_u32 mask, v_u32 yes, v_u32 no)
{
    return (yes & mask) | (no & ~mask);
}

#endif
