/* broadcast.h - World.broadcast(tensors, root=0). */
#ifndef PLI_BROADCAST_H
#define PLI_BROADCAST_H

#include "python/state.h"

/* Every rank gives dense tensors of the same sizes; the root's values end up in all.
 * It goes through the whole arena: no gradient may be in it. */
PyObject *pli_world_broadcast(PyObject *world, PyObject *args);

#endif
