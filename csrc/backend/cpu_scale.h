/* cpu_scale.h - a tensor times a ratio of two small integers, in host memory.
 *
 * For means over fewer ranks than were summed, which is rare: written for clarity, not
 * for speed.
 */
#ifndef PLI_CPU_SCALE_H
#define PLI_CPU_SCALE_H

#include "backend.h"

/* move->to = move->to * numerator / denominator; floats and complex only.  Computed in
 * float64 and rounded to nearest even, so exact where the ratio is a power of two and
 * the result a normal number. */
void pli_cpu_scale(const pl_move *move, int numerator, int denominator);

#endif
