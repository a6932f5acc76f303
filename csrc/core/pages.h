/* pages.h - pages of a mapping that others share, turned into this process's own. */
#ifndef PLI_PAGES_H
#define PLI_PAGES_H

#include <sys/types.h>

#include "status.h"

/* Turns a shared mapping's pages into private ones, in place, with their contents.
 * They are those of the file `fd` from `at` on: what other threads write meanwhile is
 * kept.  Without a file (-1), such a write may be lost. */
pl_status pli_pages_make_private(void *base, size_t n_bytes, int fd,
                                 off_t at) PL_MUST_USE;

#endif
