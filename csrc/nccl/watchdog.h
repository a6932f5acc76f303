/* watchdog.h - one thread per process, which watches its GPU worlds.
 *
 * Ten times a second each world checks its peers, NCCL's errors, and the oldest
 * operation that the device has not done.  The thread starts with the first world and
 * ends with the last.
 */
#ifndef PLI_WATCHDOG_H
#define PLI_WATCHDOG_H

#include "core/status.h"

typedef struct pli_watchdog pli_watchdog;

pl_status pli_watchdog_create(pli_watchdog **out) PL_MUST_USE;
void pli_watchdog_destroy(pli_watchdog *watchdog); /* all have left; NULL is allowed */

/* join() makes the thread call check(context), one check at a time.  leave() returns
 * once no such call is under way; check() may not call it. */
pl_status pli_watchdog_join(pli_watchdog *watchdog, void (*check)(void *context),
                            void *context) PL_MUST_USE;
void pli_watchdog_leave(pli_watchdog *watchdog, const void *context);

/* For a forked child, which does not have the thread.  NULL is allowed. */
void pli_watchdog_forget(pli_watchdog *watchdog);

#endif
