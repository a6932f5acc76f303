/* pages.h - pages of a mapping that others share, turned into this process's own. */
#ifndef PLI_PAGES_H
#define PLI_PAGES_H

#include "status.h"

/* Turns a mapping's pages into private ones, in place, with their contents. */
pl_status pli_pages_make_private(void *base, size_t n_bytes) PL_MUST_USE;

#endif
