/* cpu_scale.h - multiplies a tensor in host memory by a ratio of two small integers.
 *
 * Used for means over fewer ranks than were summed.  That is rare, so the code is
 * written for clarity rather than speed.
 */
#ifndef PLI_CPU_SCALE_H
#define PLI_CPU_SCALE_H

#include "backend.h"

/* move->to = move->to * numerator / denominator; floats and complex only.  Computed in
 * float64 and rounded to nearest even, so exact if the ratio is a power of two and the
 * result is a normal number. */
void pli_cpu_scale(const pl_move *move, int numerator, int denominator);

/* A 16-bit float as a double, which holds it exactly; and a double as a 16-bit float,
 * rounded to nearest even.  For finite numbers of PL_F16 and PL_BF16. */
double pli_cpu_widen(uint16_t bits, pl_dtype dtype);
uint16_t pli_cpu_round(double value, pl_dtype dtype);

#endif
