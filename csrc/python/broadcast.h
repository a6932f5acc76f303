/* broadcast.h - World.broadcast(tensors). */
#ifndef PLI_BROADCAST_H
#define PLI_BROADCAST_H

#include "state.h"

/* Every rank gives dense tensors of the same sizes; rank 0's values end up in all. */
PyObject *pli_world_broadcast(PyObject *world, PyObject *tensors);

#endif
