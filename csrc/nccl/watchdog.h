/* watchdog.h - one thread a process that watches its GPU worlds.
 *
 * Ten times a second it has each world check its peers, NCCL's errors, and
 * the oldest operation that the device has not done.  It starts with the first world
 * and ends with the last.
 */
#ifndef PLI_WATCHDOG_H
#define PLI_WATCHDOG_H

#include "core/status.h"

typedef struct pli_watchdog pli_watchdog;

pl_status pli_watchdog_create(pli_watchdog **out) PL_MUST_USE;
void pli_watchdog_destroy(pli_watchdog *watchdog); /* all have left; NULL is allowed */

/* Has `check(context)` called from the thread, never by two at once; leave() returns
 * once no call is under way, and may not be called from inside one. */
pl_status pli_watchdog_join(pli_watchdog *watchdog, void (*check)(void *context),
                            void *context) PL_MUST_USE;
void pli_watchdog_leave(pli_watchdog *watchdog, const void *context);

/* In a forked child: the thread is not there.  NULL is allowed. */
void pli_watchdog_forget(pli_watchdog *watchdog);

#endif
