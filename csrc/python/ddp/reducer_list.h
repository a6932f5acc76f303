/* reducer_list.h - the module's list of the reducers that live, which owns none. */
#ifndef PLI_REDUCER_LIST_H
#define PLI_REDUCER_LIST_H

#include "reducer_object.h"

/* Puts a new reducer at the end; 0 or -1.  In the order in which they were made the
 * steps of one backward are finished, and most ranks take the shadow steps of several
 * wrappers. */
int pli_reducers_enter(module_state *state, reducer_object *self);

/* Takes it out, if it is there. */
void pli_reducers_leave(module_state *state, reducer_object *self);

/* A new reference to a reducer that was found by a borrowed pointer; NULL where its
 * last reference has gone in another thread, which waits for the lock to leave. */
reducer_object *pli_reducer_ref(reducer_object *self);

/* A new reference to the first reducer of a list for which there is one, or NULL. */
reducer_object *pli_reducers_first(reducer_object *list);

#endif
