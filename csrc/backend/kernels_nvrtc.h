/* kernels_nvrtc.h - CUDA's run-time compiler, for drivers that do not take the fatbin,
 * and for builds without one.
 */
#ifndef PLI_KERNELS_NVRTC_H
#define PLI_KERNELS_NVRTC_H

#include "core/status.h"

/* Compiles the kernels' source, unless a process has done so before, for a device of
 * capability `compute` (90 for 9.0), with those of large parameters where the driver
 * takes such (`has_large`), by the library at `path`; NULL, or where it cannot be
 * opened: one that the process has, or that the loader finds.  *out is what
 * cuModuleLoadData() takes; the caller frees it by pli_free().  PL_EUNSUPPORTED where
 * there is no NVRTC, or it cannot. */
pl_status pli_nvrtc_compile(const char *path, int compute, int has_large,
                            void **out) PL_MUST_USE;

#endif
