/* kernels_nvrtc.h - the kernels' code: a fatbin inside the extension, and CUDA's
 * run-time compiler, for drivers that do not accept the fatbin and for builds without
 * one.
 */
#ifndef PLI_KERNELS_NVRTC_H
#define PLI_KERNELS_NVRTC_H

#include "core/status.h"

/* Static; NULL in a build without nvcc. */
const void *pli_kernels_fatbin(void);

/* Compiles the kernels' source, or reads the result from the cache, for a device of
 * capability `compute` (90 for 9.0); `has_large`: the driver accepts large parameters.
 * `path` names NVRTC; if it is NULL or cannot be opened, one that is already loaded or
 * that the loader finds is used.  *out is an image for cuModuleLoadData(); free it by
 * pli_free().  PL_EUNSUPPORTED if there is no NVRTC, or if it fails. */
pl_status pli_nvrtc_compile(const char *path, int compute, int has_large,
                            void **out) PL_MUST_USE;

#endif
