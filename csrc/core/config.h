/* config.h - the only place that reads the environment.
 *
 *   PACELINE_ISA      plain | neon | avx2 | avx512: arithmetic of reductions
 *   PACELINE_TIMEOUT  seconds that a rank waits for another before it gives up
 */
#ifndef PLI_CONFIG_H
#define PLI_CONFIG_H

#include "status.h"

/* The word in PACELINE_ISA, or NULL where none is set. */
const char *pli_config_isa(void);

/* *out is PACELINE_TIMEOUT in nanoseconds, or `otherwise_ns` where it is not set;
 * PL_EINVAL where it is no positive number of seconds. */
pl_status pli_config_timeout_ns(int64_t otherwise_ns, int64_t *out) PL_MUST_USE;

#endif
