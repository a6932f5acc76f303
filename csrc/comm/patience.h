/* patience.h - how somebody waits for what cannot be slept on: it spins, then rests for
 * longer and longer, and looks now and then whether waiting is still of use.
 */
#ifndef PLI_PATIENCE_H
#define PLI_PATIENCE_H

#include "../backend/backend.h"

typedef struct pli_patience {
    pl_status (*look)(void *context); /* non-PL_OK gives up with that; NULL: never */
    void *context;
    int64_t until_ns;
    int64_t rest_ns;
    int n_spins;
} pli_patience;

/* Begins now. */
pli_patience pli_patience_for(int64_t most_ns, pl_status (*look)(void *context),
                              void *context);

/* Lets some time pass.  PL_ETIMEOUT, saying that `what` has not ended, where there is
 * none left. */
pl_status pli_patience_pass(pli_patience *it, const char *what) PL_MUST_USE;

/* Waits until the event's last record is done. */
pl_status pli_patience_await(pli_patience *it, pl_backend *backend, pl_event *event,
                             const char *what) PL_MUST_USE;

#endif
