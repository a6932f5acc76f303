/* uneven_inputs.h - methods of the Reducer for ranks that ran out of batches. */
#ifndef PLI_UNEVEN_INPUTS_H
#define PLI_UNEVEN_INPUTS_H

#include "reducer_object.h"

PyObject *pli_join_shadow_step(PyObject *object, PyObject *args);
PyObject *pli_join_abandon(PyObject *object, PyObject *text);
PyObject *pli_join_set(PyObject *object, PyObject *args);

#endif
