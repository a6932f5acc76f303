/* cpu_sum_vec.h - vectors of PLI_V_BYTES bytes, in the compiler's own notation.
 *
 * gcc and clang turn `a + b` of such types into the instructions of whatever
 * target is set where this is included, so one source serves every instruction
 * set.  A vector travels as v_u32, whatever its lanes are: a cast between vector
 * types of one size keeps the bits.
 *
 * Included once by each cpu_sum_<isa>.c, after its target pragma; hence the bare
 * names, and the absence of headers here, which that target must not touch.
 */
#ifndef PLI_CPU_SUM_VEC_H
#define PLI_CPU_SUM_VEC_H

/* What is inlined sees `how` as constants, and becomes one loop without branches. */
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

/* A vector anywhere in memory that holds any type. */
typedef v_u32 v_loose __attribute__((aligned(1), may_alias));

/* What one step of a loop works on.  A 16-bit float widens to twice its size, so a
 * step is one vector of those in memory, and two of any other type. */
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

/* Lanes of `yes` where the mask's are all ones, of `no` where they are zero. */
PLI_INLINE v_u32 v_select(v_u32 mask, v_u32 yes, v_u32 no)
{
    return (yes & mask) | (no & ~mask);
}

#endif
