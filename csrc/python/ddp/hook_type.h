/* hook_type.h - the hook of each parameter. */
#ifndef PLI_HOOK_TYPE_H
#define PLI_HOOK_TYPE_H

#include "reducer_object.h"

PyObject *pli_hook_new(const module_state *state, reducer_object *reducer,
                       size_t index);

/* The reducer is gone: the hook does nothing from now on. */
void pli_hook_detach(PyObject *hook);

/* A flag of each parameter's slot, as bytes of the Reducer: `offset` is the field's. */
PyObject *pli_hook_get_flags(PyObject *object, void *offset);
int pli_hook_set_flags(PyObject *object, PyObject *flags, void *offset);

/* A method of the Reducer: a gradient has come in an autograd context. */
PyObject *pli_hook_arrive_in_context(PyObject *object, PyObject *args);

#endif
