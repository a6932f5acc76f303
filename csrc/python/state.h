/* state.h - the module's state, and how a status becomes an exception.
 *
 * Everything lives in the module's state: no static PyObject, no global.
 * paceline._compat.torch_core passes all that the extension needs of torch once, by
 * attach_torch(), so that every probe of torch's versions is in one Python file.
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

/* torch's callables: each is a field of the state and a keyword of attach_torch(). */
#define PLI_TORCH_MAP(X)                                                               \
    X(queue_callback)    /* has the engine run a callable when this backward ends */   \
    X(current_node)      /* the autograd node under evaluation, or None */             \
    X(current_task)      /* the number of the backward that runs in this thread */     \
    X(current_stream)    /* a device index to its CUstream, as a number */             \
    X(device_empty)      /* memory of torch's allocator, of a device index and size */ \
    X(record_stream)     /* has it outlive the work on a CUstream, a number */         \
    X(view_of)           /* a part of it, of a dtype, sizes and strides */             \
    X(after_node)        /* runs a callable when the node under evaluation is done */  \
    X(is_grad_enabled)   /* inside a hook: is this backward itself recorded? */        \
    X(is_compiled)       /* does compiled autograd run backward? no final callbacks */ \
    X(increment_version) /* for pli_increment_versions() */                            \
    X(empty_like)        /* a private gradient for a parameter without one */          \
    X(from_dlpack)       /* a capsule to a tensor, for torch before 2.10 */            \
    X(to_dlpack)         /* a tensor to a capsule, on any device */                    \
    X(sparse_read)       /* this and the next two: paceline._compat.sparse_rows */     \
    X(sparse_room)                                                                     \
    X(sparse_densify)                                                                  \
    X(cat)                                                                             \
    X(stack)                                                                           \
    X(dataclass_fields) /* dataclasses.fields */                                       \
    X(copy_attributes)  /* this and the next six: paceline._compat.packed_sequence */  \
    X(layout_of)                                                                       \
    X(repeats_row)                                                                     \
    X(packed_rows)                                                                     \
    X(split_packed)                                                                    \
    X(join_packed)                                                                     \
    X(join_arrays)                                                                     \
    X(warn_of_scalars) /* at the line of the program that called */

/* Classes, which are other arguments of attach_torch(). */
#define PLI_CLASS_MAP(X)                                                               \
    X(tensor_type)                                                                     \
    X(size_type)                                                                       \
    X(packed_type) /* PackedSequence */                                                \
    X(marker_type) /* paceline._compat.packed_sequence.Replicated */

/* All objects that the state owns, besides types and names. */
#define PLI_OBJECT_MAP(X)                                                              \
    PLI_TORCH_MAP(X)                                                                   \
    PLI_CLASS_MAP(X)                                                                   \
    X(registry)         /* an argument of attach_torch(): pytrees, {type: NodeDef} */  \
    X(errors)           /* the module paceline._errors */                              \
    X(exchange_capsule) /* owns the exchange table */

/* Interned names of frequently read attributes; name x is in the field name_x. */
#define PLI_NAME_MAP(X)                                                                \
    X(_fields)                                                                         \
    X(_make)                                                                           \
    X(__dataclass_fields__)                                                            \
    X(__new__)                                                                         \
    X(data)                                                                            \
    X(dtype)                                                                           \
    X(flatten_fn)                                                                      \
    X(grad)                                                                            \
    X(is_conj)                                                                         \
    X(is_neg)                                                                          \
    X(name)                                                                            \
    X(requires_grad)                                                                   \
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
    X(tree)                                                                            \
    X(device_group)                                                                    \
    X(gradient_sum)

typedef struct module_state {
#define TYPE_FIELD(name) PyTypeObject *name##_type;
    PLI_TYPE_MAP(TYPE_FIELD)
#undef TYPE_FIELD
    pli_progress *progress;
    pli_processes *processes;        /* the peers of all worlds */
    pli_watchdog *watchdog;          /* of GPU worlds; NULL before the first one */
    struct reducer_object *reducers; /* linked list of all live ones; borrowed */
    const dl_exchange *exchange;     /* NULL: torch before 2.10 */
#define OBJECT_FIELD(name) PyObject *name;
    PLI_OBJECT_MAP(OBJECT_FIELD)
#undef OBJECT_FIELD
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

/* Raises the exception of `st` with this thread's message, unless `st` is PL_OK or an
 * exception is already set.  Returns NULL, for the caller to return. */
PyObject *pli_raise(const module_state *state, pl_status st);

/* As PyErr_Format(), but returns -1, for functions that return int. */
int pli_error(PyObject *type, const char *format, ...);

/* Raises an exception; its message is `path`, which it steals, and the formatted words.
 * If `path` is NULL, keeps the exception that is set.  Returns -1.  If `type` is
 * UserWarning, warns instead, and returns 0 or -1. */
int pli_raise_at(PyObject *type, PyObject *path, const char *format, ...);

/* The exception that is set, as text, "TypeError: ..."; it stays set.  NULL, without
 * another exception, if there is no memory. */
PyObject *pli_exception_words(void);

/* Returns a failure for a callback that raised inside the core; its message is the
 * exception's text.  The exception stays set, and pli_check() keeps it. */
pl_status pli_callback_failed(void);

/* As pli_raise(), but returns 0 for PL_OK and -1 otherwise. */
static inline int pli_check(const module_state *state, pl_status st)
{
    if (st == PL_OK)
        return 0;
    pli_raise(state, st);
    return -1;
}

/* 0, or -1 with an exception if attach_torch() was not called (module.c). */
int pli_needs_torch(const module_state *state);

/* One spec per type, in the file that implements the type. */
#define TYPE_SPEC(name) extern PyType_Spec pli_##name##_spec;
PLI_TYPE_MAP(TYPE_SPEC)
#undef TYPE_SPEC

#endif
