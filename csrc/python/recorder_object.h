/* recorder_object.h - the Python object that owns a recorder. */
#ifndef PLI_RECORDER_OBJECT_H
#define PLI_RECORDER_OBJECT_H

#include "ipc/recorder.h"
#include "state.h"

typedef struct recorder_object {
    PyObject_HEAD
    pli_recorder *recorder;
    PyObject *weak_references;
} recorder_object;

#endif
