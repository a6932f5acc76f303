/* cpu_sum.h - the arithmetic of a reduction on the CPU.
 *
 * One call combines the same range of every rank's memory, in rank order, and
 * writes the result to one or more places.  Order and roundings do not depend on
 * the instruction set, on how the range is cut into slices, or on which rank
 * computes: every rank of every run gets the same bits.
 *
 *   floats    ((r0 + r1) + r2) + ...   in the type; float16 and bfloat16 in
 *             float32 with one rounding to nearest even at the end
 *   complex   as two floats
 *   integers  wrap around
 *   PL_MEAN   multiplies each input by a power of two, so that no sum of finite
 *             inputs overflows, and divides the sum by the rest of n_in, before
 *             that one rounding
 */
#ifndef PLI_CPU_SUM_H
#define PLI_CPU_SUM_H

#include "include/paceline.h"

/* name, text for PACELINE_ISA, in rising order of preference */
#define PLI_ISA_MAP(X)                                                                 \
    X(PLI_ISA_PLAIN, "plain")                                                          \
    X(PLI_ISA_NEON, "neon")                                                            \
    X(PLI_ISA_AVX2, "avx2")                                                            \
    X(PLI_ISA_AVX512, "avx512")

typedef enum pli_isa {
#define PLI_ISA_ENUM(name, text) name,
    PLI_ISA_MAP(PLI_ISA_ENUM)
#undef PLI_ISA_ENUM
        PLI_N_ISAS
} pli_isa;

typedef struct pli_sum_args {
    const void *const *in; /* n_in ranges, in rank order; 1 to PL_MAX_RANKS */
    int n_in;
    void *const *out; /* n_out ranges; each is one of `in` or overlaps none */
    int n_out;
    size_t n_elems;
} pli_sum_args;

typedef void (*pli_sum_fn)(const pli_sum_args *args);

/* The functions of one instruction set; NULL if the type has no such reduction
 * (PL_MAX of floats and complex, PL_MEAN of integers). */
typedef struct pli_sum_table {
    pli_isa isa;
    pli_sum_fn fn[PL_N_DTYPES][PL_N_REDUCTIONS];
} pli_sum_table;

/* An instruction set's text, and the reverse; PL_EINVAL names the allowed words. */
const char *pli_isa_text(pli_isa isa);
pl_status pli_isa_parse(const char *text, pli_isa *out) PL_MUST_USE;

/* The static table of `isa`, or NULL if this build or this processor lacks it.  There
 * is always a table for PLI_ISA_PLAIN. */
const pli_sum_table *pli_sum_table_of(pli_isa isa);

/* The best table that this processor has. */
const pli_sum_table *pli_sum_table_best(void);

/* The table that PACELINE_ISA names, or the best if it is not set; PL_EINVAL if there
 * is no such table. */
pl_status pli_cpu_sums(const pli_sum_table **out) PL_MUST_USE;

/* What pli_sum_table_of() chooses from.  Each is defined in builds for its
 * architecture; the processor may still lack the instructions. */
const pli_sum_table *pli_sum_table_plain(void);
const pli_sum_table *pli_sum_table_neon(void);
const pli_sum_table *pli_sum_table_avx2(void);
const pli_sum_table *pli_sum_table_avx512(void);

#endif
