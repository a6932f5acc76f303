/* cpu_half.h - one 16-bit float to a double and back, in host memory.
 *
 * By arithmetic on doubles, which hold every step of it exactly: written to be read.
 */
#ifndef PLI_CPU_HALF_H
#define PLI_CPU_HALF_H

#include "../include/paceline.h"

/* What tells one 16-bit float from another. */
typedef struct pli_half_format {
    int n_fraction;   /* bits */
    int least_normal; /* its exponent */
} pli_half_format;

/* Of PL_F16 or PL_BF16. */
pli_half_format pli_half_format_of(pl_dtype dtype);

uint16_t pli_half_infinity(pli_half_format format);

/* Whether it is infinite or no number. */
int pli_half_is_special(uint16_t bits, pli_half_format format);

double pli_half_to_f64(uint16_t bits, pli_half_format format);

/* The nearest, or the even one of two; infinity where it is too large, and a quiet NaN
 * of the same sign for a NaN. */
uint16_t pli_half_of_f64(double value, pli_half_format format);

#endif
