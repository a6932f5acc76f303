/* hook_type.h - the hook of each parameter. */
#ifndef PLI_HOOK_TYPE_H
#define PLI_HOOK_TYPE_H

#include "reducer_object.h"

PyObject *pli_hook_new(const module_state *state, reducer_object *reducer,
                       size_t index);

/* The reducer is gone: the hook does nothing from now on. */
void pli_hook_detach(PyObject *hook);

/* Sets `unused` of the Reducer: under strict, whose gradients are torch's error in this
 * backward. */
int pli_hook_set_unused(PyObject *object, PyObject *mask, void *closure);

/* A method of the Reducer: a gradient has come in an autograd context. */
PyObject *pli_hook_arrive_in_context(PyObject *object, PyObject *args);

#endif
