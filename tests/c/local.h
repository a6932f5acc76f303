/* local.h - ranks that are threads of this process. */
#ifndef PLT_LOCAL_H
#define PLT_LOCAL_H

#include "comm/comm.h"

/* Makes a world of `world_size` ranks in one process; out[r] is for the thread
 * that is rank r to use and to destroy.  The last one destroyed frees the rest. */
pl_status local_create(int world_size, size_t arena_bytes, int64_t deadline_ns,
                       pl_comm **out) PL_MUST_USE;

#endif
