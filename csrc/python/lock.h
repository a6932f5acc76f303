/* lock.h - what takes the GIL's place where Python has none.
 *
 * The binding is written for one thread at a time.  In a free-threaded Python every
 * function that Python calls begins with PLI_ENTER: one lock for the whole extension, a
 * critical section of the module.  Python gives it up where it would give up the GIL,
 * in Py_BEGIN_ALLOW_THREADS and wherever this thread waits, and has it again after.
 * Likewise, what holds across a call into Python with a GIL does here, and nothing
 * more.
 *
 * Two things differ.  An object whose last reference goes in another thread waits for
 * the lock before it leaves our lists: who follows a pointer that is borrowed asks by
 * pli_reducer_ref() first.  And the lock is ours alone: a dict or a list of the
 * caller's must not be changed by another thread while we read it.
 *
 * tp_traverse runs while all threads stand still, and takes no lock; nor does the end
 * of an object that no list of ours leads to.
 */
#ifndef PLI_LOCK_H
#define PLI_LOCK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef Py_GIL_DISABLED

/* The module of itself, of one of its types, or of an instance. */
static inline PyObject *pli_module_of(PyObject *object)
{
    if (PyModule_Check(object))
        return object;
    PyTypeObject *type =
        PyType_Check(object) ? (PyTypeObject *)object : Py_TYPE(object);
    PyObject *module = PyType_GetModule(type);
    if (module != NULL)
        return module;
    PyErr_Clear(); /* Python ends, and has cleared the type: no other thread is left */
    return object;
}

static inline void pli_leave(PyCriticalSection *section)
{
    PyCriticalSection_End(section);
}

/* To the end of the block; `object` lives until then. */
#define PLI_ENTER(object)                                                              \
    __attribute__((cleanup(pli_leave))) PyCriticalSection entered_section;             \
    PyCriticalSection_Begin(&entered_section, pli_module_of((PyObject *)(object)))

#else
#define PLI_ENTER(object) (void)(object)
#endif

#endif
