/* kept.h - what tells whether the dictionaries of kept modules are as they were. */
#ifndef PLI_KEPT_H
#define PLI_KEPT_H

#include "python/object.h"

/* differing(dicts, names, values, any): a list of the numbers of dicts that have not
 * the given names in this order, or other objects as values.  Values may be None, and
 * each of them the object `any`: then all objects will do. */
PyObject *pli_differing(PyObject *module, PyObject *args);

/* restore(dicts, names, values): have all dicts hold that, and nothing else. */
PyObject *pli_restore(PyObject *module, PyObject *args);

/* reference_counts(objects): a tuple. */
PyObject *pli_reference_counts(PyObject *module, PyObject *objects);

#endif
