/* lock.h - replaces the GIL in a free-threaded Python.
 *
 * The binding is written for one thread at a time.  In a free-threaded Python every
 * function that Python calls begins with PLI_ENTER: it takes one lock for the whole
 * extension, a critical section of the module.  Python releases the lock where it would
 * release the GIL, in Py_BEGIN_ALLOW_THREADS and wherever the thread blocks, and then
 * takes it again.  So across a call into Python the lock guarantees what the GIL does,
 * and no more.
 *
 * Two things differ.  An object whose last reference another thread drops waits for the
 * lock before it leaves our lists, so code that follows a borrowed pointer must first
 * call reducer_ref() (autograd_hooks.c).  And the lock protects only our data: a dict
 * of the caller is read under PLI_HOLD or by pli_dict_get(), a list as a tuple made of
 * it.
 *
 * tp_traverse runs while all threads are stopped, and takes no lock.  Nor does the
 * dealloc of an object that is in none of our lists.
 */
#ifndef PLI_LOCK_H
#define PLI_LOCK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef Py_GIL_DISABLED

/* The module that `object` is, or whose type or instance it is. */
static inline PyObject *pli_module_of(PyObject *object)
{
    if (PyModule_Check(object))
        return object;
    PyTypeObject *type =
        PyType_Check(object) ? (PyTypeObject *)object : Py_TYPE(object);
    PyObject *module = PyType_GetModule(type);
    if (module != NULL)
        return module;
    PyErr_Clear(); /* Python shuts down and has cleared the type: one thread is left */
    return object;
}

static inline void pli_leave(PyCriticalSection *section)
{
    PyCriticalSection_End(section);
}

/* Holds the lock until the end of the block; `object` must live until then. */
#define PLI_ENTER(object)                                                              \
    __attribute__((cleanup(pli_leave))) PyCriticalSection entered_section;             \
    PyCriticalSection_Begin(&entered_section, pli_module_of((PyObject *)(object)))

/* The same for the own lock of a dict; no other code of Python may run in the block. */
#define PLI_HOLD(dict)                                                                 \
    __attribute__((cleanup(pli_leave))) PyCriticalSection held_section;                \
    PyCriticalSection_Begin(&held_section, dict)

/* Returns a new reference to dict[key], or NULL; a missing key sets no exception. */
static inline PyObject *pli_dict_get(PyObject *dict, PyObject *key)
{
    PyObject *value = NULL;
    (void)PyDict_GetItemRef(dict, key, &value);
    return value;
}

/* To be called in a loop that waits for the dealloc of an object, each time with the
 * next `n`.  What a thread has made and another has let go stays until the first one
 * runs Python again, or until a collection; a thread of autograd may sleep for long. */
static inline void pli_free_dropped(int n)
{
    if (n % 16 == 4)
        PyGC_Collect();
}

#else
#define PLI_ENTER(object) (void)(object)
#define PLI_HOLD(dict) (void)(dict)
#define pli_dict_get(dict, key) Py_XNewRef(PyDict_GetItemWithError(dict, key))
#define pli_free_dropped(n) (void)(n)
#endif

#endif
