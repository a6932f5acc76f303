/* kernels_cache.h - what NVRTC made of the kernels, kept in files between processes.
 *
 *     $XDG_CACHE_HOME/paceline/kernels-<key>.bin, else ~/.cache/paceline/...
 *
 * A file is written under another name first, and then renamed, so a process sees it
 * whole or not at all; one that is torn all the same, or that others may write to, is
 * no file.  What cannot be read is compiled, what cannot be written is not kept: the
 * cache never fails.
 */
#ifndef PLI_KERNELS_CACHE_H
#define PLI_KERNELS_CACHE_H

#include <stddef.h>
#include <stdint.h>

/* The image of that key with a zero behind it, for pli_free(); NULL: there is none. */
void *pli_kernels_cache_read(uint64_t key);

void pli_kernels_cache_write(uint64_t key, const void *image, size_t n_bytes);

#endif
