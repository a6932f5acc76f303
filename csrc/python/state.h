/* state.h - what the module holds, and how a status becomes an exception.
 *
 * Everything lives in the module's state: no static PyObject, no global.  What the
 * extension needs of torch is handed to it once by paceline._torch (attach_torch), so
 * that every probe of torch's versions is in one Python file.
 */
#ifndef PLI_STATE_H
#define PLI_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../comm/progress.h"
#include "../core/status.h"
#include "dlpack.h"

/* torch's callables: field of the state and keyword of attach_torch(). */
#define PLI_TORCH_MAP(X)                                                               \
    X(queue_callback)  /* engine: run a callable when this backward ends */            \
    X(current_node)    /* the autograd node under evaluation, or None */               \
    X(is_grad_enabled) /* inside a hook: is this backward itself recorded? */          \
    X(is_compiled) /* is this backward compiled autograd's? it calls nobody back */    \
    X(increment_version) /* tells autograd that tensors were overwritten */            \
    X(empty_like)        /* a private gradient for a parameter that had none */        \
    X(from_dlpack)       /* a tensor of a capsule, for torch before 2.10 */            \
    X(sparse_read)       /* these five: paceline._sparse */                            \
    X(sparse_room)                                                                     \
    X(sparse_put)                                                                      \
    X(sparse_densify)                                                                  \
    X(sparse_put_dense)

typedef struct module_state {
    PyTypeObject *listener_type;
    PyTypeObject *world_type;
    PyTypeObject *reducer_type;
    PyTypeObject *hook_type;
    PyTypeObject *guard_type;
    PyTypeObject *watch_type;
    PyObject *peer_error;
    PyObject *peer_timeout_error;
    PyObject *mismatch_error;
    PyObject *str_grad; /* interned "grad" */
    pli_progress *progress;
    struct reducer_object *reducers; /* all that live, linked; borrowed */
    const dl_exchange *exchange;     /* NULL: torch before 2.10 */
    PyObject *exchange_capsule;      /* owns it */
#define TORCH_FIELD(name) PyObject *name;
    PLI_TORCH_MAP(TORCH_FIELD)
#undef TORCH_FIELD
} module_state;

static inline module_state *state_of_type(PyTypeObject *type)
{
    PyObject *module = PyType_GetModule(type);
    return module != NULL ? PyModule_GetState(module) : NULL;
}

/* The state behind an instance of one of the module's own types. */
static inline module_state *state_of(PyObject *object)
{
    return state_of_type(Py_TYPE(object));
}

/* Raises the exception of `st` with this thread's last words, unless one is set
 * already; returns NULL for the caller to return.  PL_OK raises nothing. */
PyObject *pli_raise(const module_state *state, pl_status st);

/* The same for functions that return int: 0 for PL_OK, else -1. */
int pli_check(const module_state *state, pl_status st);

/* One spec a type; each is in the file of its name. */
extern PyType_Spec pli_listener_spec;
extern PyType_Spec pli_world_spec;
extern PyType_Spec pli_reducer_spec;
extern PyType_Spec pli_hook_spec;
extern PyType_Spec pli_guard_spec;
extern PyType_Spec pli_watch_spec;

#endif
