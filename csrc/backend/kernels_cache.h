/* kernels_cache.h - caches the kernels that NVRTC compiled, in files.
 *
 *     $XDG_CACHE_HOME/paceline/kernels-<key>.bin, else ~/.cache/paceline/...
 *
 * A file is written under a temporary name and then renamed, so that a process sees all
 * of it or none.  A file that is damaged, or that other users may write to, is ignored.
 * The cache reports no errors: if a file cannot be read, the caller compiles the
 * kernels; if they cannot be written, the next process compiles them again.
 */
#ifndef PLI_KERNELS_CACHE_H
#define PLI_KERNELS_CACHE_H

#include <stddef.h>
#include <stdint.h>

/* The image of that key and a zero behind it, or NULL; free it by pli_free(). */
void *pli_kernels_cache_read(uint64_t key);

void pli_kernels_cache_write(uint64_t key, const void *image, size_t n_bytes);

#endif
