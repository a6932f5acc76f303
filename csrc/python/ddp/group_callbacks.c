/* group_callbacks.c - calls the Python object that carries the core's operations for a
 * group comm:
 *
 *     group_comm.issue(kind, dtype, reduction, offset_bytes, n_elems, root, ticket)
 *     group_comm.wait(ticket)
 *     group_comm.drop()
 *
 * The core calls them where it issues, waits and fails, with or without the GIL.
 */
#include "world.h"

/* Takes over `result`, the outcome of a call; NULL is a failure. */
static pl_status status_of_call(PyObject *result)
{
    return pli_drop(result) == 0 ? PL_OK : pli_callback_failed();
}

static pl_status issue(void *context, const pl_op *op, pl_ticket ticket)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    const pl_status st = status_of_call(PyObject_CallMethod(
        context, "issue", "sssnniK", pli_op_kind_text(op->kind),
        pl_dtype_text(op->dtype), pli_reduction_texts[op->reduction],
        (Py_ssize_t)op->offset_bytes, (Py_ssize_t)op->n_elems, op->root,
        (unsigned long long)ticket));
    PyGILState_Release(gil);
    return st;
}

static pl_status wait(void *context, pl_ticket ticket)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    const pl_status st = status_of_call(
        PyObject_CallMethod(context, "wait", "K", (unsigned long long)ticket));
    PyGILState_Release(gil);
    return st;
}

/* Leaves an exception that is set unchanged. */
static void drop(void *context)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (pli_drop(PyObject_CallMethod(context, "drop", NULL)) != 0)
        PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
}

pli_group_callbacks pli_group_callbacks_of(PyObject *group_comm)
{
    return (pli_group_callbacks){
        .context = group_comm, .issue = issue, .wait = wait, .drop = drop};
}
