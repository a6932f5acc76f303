/* hook_type.h - the hook of each parameter. */
#ifndef PLI_HOOK_TYPE_H
#define PLI_HOOK_TYPE_H

#include "reducer_object.h"

PyObject *pli_hook_new(const module_state *state, reducer_object *reducer,
                       size_t index);

/* The function that torch calls: a builtin, the cheapest callable. */
PyObject *pli_hook_function(PyObject *hook);

/* The reducer is gone: makes the hook do nothing. */
void pli_hook_detach(PyObject *hook);

#endif
