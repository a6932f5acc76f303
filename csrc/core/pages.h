/* pages.h - makes the pages of a shared mapping private to this process. */
#ifndef PLI_PAGES_H
#define PLI_PAGES_H

#include <sys/types.h>

#include "status.h"

/* Makes a shared mapping's pages private, in place, and keeps their contents.  If the
 * mapping is of the file `fd` from offset `at`, it keeps what other threads write
 * meanwhile.  Without a file (-1), it may lose such a write. */
pl_status pli_pages_make_private(void *base, size_t n_bytes, int fd,
                                 off_t at) PL_MUST_USE;

#endif
