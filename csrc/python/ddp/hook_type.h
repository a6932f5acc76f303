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

/* One flag of all parameters' slots, as bytes; `offset` is that of the slot's field. */
PyObject *pli_hook_get_flags(PyObject *object, void *offset);
int pli_hook_set_flags(PyObject *object, PyObject *flags, void *offset);

/* A method of the Reducer: a gradient came in an autograd context. */
PyObject *pli_hook_arrive_in_context(PyObject *object, PyObject *args);

#endif
