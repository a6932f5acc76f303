/* config.h - the only place that reads the environment.
 *
 *   PACELINE_ISA      plain | neon | avx2 | avx512: arithmetic of reductions
 *   PACELINE_LIBCUDA  path of CUDA's driver, in place of libcuda.so.1
 *   PACELINE_LIBNCCL  path of NCCL, in place of the one that torch has
 *
 *   PACELINE_NCCL_BLOCKING  1 (the default): calls into NCCL return when they are
 *                           done.  0: at once where it can; since 2.23 NCCL then
 *                           starts a thread for each.  NCCL_COMM_BLOCKING overrules it.
 *
 *   PACELINE_TIMEOUT  seconds that a rank waits for another before it gives up
 *
 *   XDG_CACHE_HOME, HOME  where the user's programs keep what can be made again
 */
#ifndef PLI_CONFIG_H
#define PLI_CONFIG_H

#include "status.h"

/* The word in PACELINE_ISA, or NULL where none is set. */
const char *pli_config_isa(void);

/* The path in PACELINE_LIBCUDA, in PACELINE_LIBNCCL; NULL where none is set. */
const char *pli_config_libcuda(void);
const char *pli_config_libnccl(void);

/* Non-zero unless PACELINE_NCCL_BLOCKING is set to 0. */
int pli_config_nccl_blocks(void);

/* The folder for files that can be made again, without a slash at its end; 0 where the
 * environment names none, or n_bytes are too few. */
int pli_config_cache_folder(char *out, size_t n_bytes);

/* *out is PACELINE_TIMEOUT in nanoseconds, or `otherwise_ns` where it is not set;
 * PL_EINVAL where it is no positive number of seconds. */
pl_status pli_config_timeout_ns(int64_t otherwise_ns, int64_t *out) PL_MUST_USE;

#endif
