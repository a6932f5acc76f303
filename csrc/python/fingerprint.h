/* fingerprint.h - paceline._native.fingerprint(tensor). */
#ifndef PLI_FINGERPRINT_H
#define PLI_FINGERPRINT_H

#include "state.h"

PyObject *pli_fingerprint(PyObject *module, PyObject *object);

#endif
