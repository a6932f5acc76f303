/* state.h - what the module holds, and how a status becomes an exception.
 *
 * Everything lives in the module's state: no static PyObject, no global.  What the
 * extension needs of torch is handed to it once by paceline._compat.torch_core
 * (attach_torch), so that every probe of torch's versions is in one Python file.
 */
#ifndef PLI_STATE_H
#define PLI_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "comm/progress.h"
#include "core/process.h"
#include "core/status.h"
#include "dlpack.h"
#include "lock.h"
#include "nccl/watchdog.h"
#include "object.h"

/* torch's callables: field of the state and keyword of attach_torch(). */
#define PLI_TORCH_MAP(X)                                                               \
    X(queue_callback)  /* engine: run a callable when this backward ends */            \
    X(current_node)    /* the autograd node under evaluation, or None */               \
    X(current_task)    /* a number for the backward that runs in this thread */        \
    X(current_stream)  /* of a device's index: the CUstream, as a number */            \
    X(empty_cache)     /* has torch give back device memory that it only keeps */      \
    X(after_node)      /* a node under evaluation: call when it is over */             \
    X(is_grad_enabled) /* inside a hook: is this backward itself recorded? */          \
    X(is_compiled) /* is this backward compiled autograd's? it calls nobody back */    \
    X(increment_version) /* by pli_increment_versions() */                             \
    X(empty_like)        /* a private gradient for a parameter that had none */        \
    X(from_dlpack)       /* a tensor of a capsule, for torch before 2.10 */            \
    X(to_dlpack)         /* and a capsule of a tensor, whatever device is current */   \
    X(sparse_read)       /* these three: paceline._compat.sparse_rows */               \
    X(sparse_room)                                                                     \
    X(sparse_densify)                                                                  \
    X(cat)                                                                             \
    X(stack)                                                                           \
    X(dataclass_fields) /* dataclasses.fields */                                       \
    X(copy_attributes)  /* these seven: paceline._compat.packed_sequence */            \
    X(layout_of)                                                                       \
    X(repeats_row)                                                                     \
    X(packed_rows)                                                                     \
    X(split_packed)                                                                    \
    X(join_packed)                                                                     \
    X(join_arrays)

/* Handed over in the same way: the field, and the type that it must be of. */
#define PLI_KNOWN_MAP(X)                                                               \
    X(tensor_type, PyType_Type)                                                        \
    X(size_type, PyType_Type)                                                          \
    X(packed_type, PyType_Type) /* PackedSequence */                                   \
    X(marker_type, PyType_Type) /* paceline._compat.packed_sequence.Replicated */      \
    X(registry, PyDict_Type)    /* of pytrees: {type: NodeDef} */

/* Attribute names that are asked for often: interned, in the field name_x. */
#define PLI_NAME_MAP(X)                                                                \
    X(_fields)                                                                         \
    X(_make)                                                                           \
    X(__dataclass_fields__)                                                            \
    X(__new__)                                                                         \
    X(data)                                                                            \
    X(flatten_fn)                                                                      \
    X(name)                                                                            \
    X(unflatten_fn)                                                                    \
    X(value)

/* The heap types: <name>_type in the state, pli_<name>_spec. */
#define PLI_TYPE_MAP(X)                                                                \
    X(recorder)                                                                        \
    X(listener)                                                                        \
    X(gpu)                                                                             \
    X(world)                                                                           \
    X(reducer)                                                                         \
    X(hook)                                                                            \
    X(backward_end)                                                                    \
    X(watch)                                                                           \
    X(tree)                                                                            \
    X(scattered)                                                                       \
    X(device_group)                                                                    \
    X(gradient_sum)

typedef struct module_state {
#define TYPE_FIELD(name) PyTypeObject *name##_type;
    PLI_TYPE_MAP(TYPE_FIELD)
#undef TYPE_FIELD
    PyObject *errors;   /* the module paceline._errors */
    PyObject *str_grad; /* interned "grad", and so on */
    PyObject *str_is_neg;
    PyObject *str_is_conj;
    pli_progress *progress;
    pli_processes *processes;        /* the peers', of all worlds */
    pli_watchdog *watchdog;          /* of GPU worlds; NULL: there was none yet */
    struct reducer_object *reducers; /* all that live, linked; borrowed */
    const dl_exchange *exchange;     /* NULL: torch before 2.10 */
    PyObject *exchange_capsule;      /* owns it */
#define TORCH_FIELD(name) PyObject *name;
    PLI_TORCH_MAP(TORCH_FIELD)
#undef TORCH_FIELD
#define KNOWN_FIELD(name, type) PyObject *name;
    PLI_KNOWN_MAP(KNOWN_FIELD)
#undef KNOWN_FIELD
#define NAME_FIELD(name) PyObject *name_##name;
    PLI_NAME_MAP(NAME_FIELD)
#undef NAME_FIELD
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

/* Raises the exception of `st` with this thread's message, unless one is set
 * already; returns NULL for the caller to return.  PL_OK raises nothing. */
PyObject *pli_raise(const module_state *state, pl_status st);

/* As PyErr_Format(), for functions that return int: -1. */
int pli_error(PyObject *type, const char *format, ...);

/* Raises the path of a value, which it steals, and then words that speak of it; where
 * the path is NULL what its maker has raised stays. */
void pli_raise_at(PyObject *type, PyObject *path, const char *format, va_list args);

/* "TypeError: words" of the exception that is set, which stays set; NULL, and nothing
 * more raised, where there is no memory for it. */
PyObject *pli_exception_words(void);

/* For a call that has raised inside the core: a failure with the exception's words; the
 * exception stays set, and is what pli_check() leaves. */
pl_status pli_callback_failed(void);

/* The same as pli_raise() for functions that return int: 0 for PL_OK, else -1. */
int pli_check(const module_state *state, pl_status st);

/* -1 with an exception unless attach_torch() was called. */
int pli_needs_torch(const module_state *state);

/* One spec a type; each is in the file of its name. */
#define TYPE_SPEC(name) extern PyType_Spec pli_##name##_spec;
PLI_TYPE_MAP(TYPE_SPEC)
#undef TYPE_SPEC

#endif
