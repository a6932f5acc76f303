/* world.h - a rank's end of a world, as Python holds it. */
#ifndef PLI_WORLD_H
#define PLI_WORLD_H

#include "../comm/relay.h"
#include "state.h"

typedef struct world_object {
    PyObject_HEAD
    pl_comm *comm;
    PyObject *relay; /* who carries a relay's operations; NULL: shared memory does */
    PyObject *weak_references;
} world_object;

/* What waits in slices, so that signals are seen: any pl_*_wait or _recover. */
typedef pl_status (*pli_slice_fn)(void *self, int64_t slice_ns);

/* Calls `slice` with the GIL released until it is done, looking at signals between;
 * -1 with an exception set. */
int pli_wait_in_slices(const module_state *state, pli_slice_fn slice, void *self);

/* For a call that has raised inside the core: a failure with the exception's words; the
 * exception stays set, and is what pli_check() leaves. */
pl_status pli_callback_failed(void);

/* What calls relay.issue() and relay.wait(), taking the GIL; borrowed. */
pli_relay_carrier pli_relay_carrier_of(PyObject *relay);

/* The text of an argument `words`, borrowed; NULL with TypeError. */
const char *pli_words(PyObject *words);

#endif
