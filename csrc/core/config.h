/* config.h - the only place that reads the environment.
 *
 *   PACELINE_CHECK    off | rotate (the default) | all: the means that ranks compare
 *   PACELINE_ISA      plain | neon | avx2 | avx512: instruction set for reductions
 *   PACELINE_LIBCUDA  path of CUDA's driver, instead of libcuda.so.1
 *   PACELINE_LIBNCCL  path of NCCL, instead of torch's
 *
 *   PACELINE_TIMEOUT       seconds that a rank waits for another before it gives up
 *   PACELINE_LINK_TIMEOUT  seconds that a host may not answer before it counts as down
 *
 *   XDG_CACHE_HOME, HOME  where the user's programs keep caches
 */
#ifndef PLI_CONFIG_H
#define PLI_CONFIG_H

#include "status.h"

/* The value of a variable; NULL if it is empty or not set. */
const char *pli_config_word(const char *name);

/* Writes the path of the user's cache folder.  0 if the environment names no absolute
 * path, or if the path needs more than n_bytes. */
int pli_config_cache_folder(char *out, size_t n_bytes);

/* *out is a variable's seconds in nanoseconds, or `otherwise_ns` if it is not set;
 * PL_EINVAL unless it is a positive number. */
pl_status pli_config_timeout_ns(const char *name, int64_t otherwise_ns,
                                int64_t *out) PL_MUST_USE;

typedef enum pli_check_kind {
    PLI_CHECK_ROTATE,
    PLI_CHECK_OFF,
    PLI_CHECK_ALL
} pli_check_kind;

/* PACELINE_CHECK; PL_EINVAL if it is another word. */
pl_status pli_config_check(pli_check_kind *out) PL_MUST_USE;

#endif
