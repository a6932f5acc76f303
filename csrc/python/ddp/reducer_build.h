/* reducer_build.h - a Reducer's construction. */
#ifndef PLI_REDUCER_BUILD_H
#define PLI_REDUCER_BUILD_H

#include "reducer_args.h"

/* Fills a new reducer and registers its hooks; -1 leaves the rest to its dealloc. */
int pli_reducer_build(const module_state *state, reducer_object *self,
                      const pli_reducer_args *args);

#endif
