/* reducer_list.h - the module's list of live reducers; it owns none. */
#ifndef PLI_REDUCER_LIST_H
#define PLI_REDUCER_LIST_H

#include "reducer_object.h"

/* Puts a new reducer at the end; 0 or -1.  The order of construction is that in which
 * the steps of one backward finish, and in which most ranks take the shadow steps of
 * several wrappers. */
int pli_reducers_enter(module_state *state, reducer_object *self);

/* Takes a reducer out, if it is in the list. */
void pli_reducers_leave(module_state *state, reducer_object *self);

/* A new reference to a reducer found by a borrowed pointer; NULL if another thread
 * dropped its last reference and now waits for the lock to leave. */
reducer_object *pli_reducer_ref(reducer_object *self);

/* A new reference to the first reducer of a list that still lives, or NULL. */
reducer_object *pli_reducers_first(reducer_object *list);

#endif
