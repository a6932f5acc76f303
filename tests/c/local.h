/* local.h - ranks that are threads of this process. */
#ifndef PLT_LOCAL_H
#define PLT_LOCAL_H

#include "comm/comm.h"

/* Makes a world of `world_size` ranks in one process.  The thread of rank r uses and
 * destroys out[r].  Destroying the last one frees the rest. */
pl_status local_create(int world_size, size_t arena_bytes, int64_t deadline_ns,
                       pl_comm **out) PL_MUST_USE;

#endif
