/* cpu_cast.h - elements to another type, and a look for those that are no numbers, in
 * host memory: the twins of a device's kernels, written for clarity.
 */
#ifndef PLI_CPU_CAST_H
#define PLI_CPU_CAST_H

#include "backend.h"

/* As pl_backend_ops.cast, for one of the casts; floats only. */
void pli_cpu_cast(const pl_cast *cast, double scale);

/* Non-zero where an element of move->from is infinite or no number. */
int pli_cpu_has_nonfinite(const pl_move *move);

#endif
