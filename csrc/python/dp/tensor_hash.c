/* tensor_hash.c - a number that stands for a tensor's bytes, all or the first of them.
 *
 * All tell whether somebody has written to a tensor behind its version counter
 * (`.data`, NumPy).  Replicas draw random numbers by seeds that follow from the state
 * of the caller's generator and from the beginning of their inputs: so
 * torch.manual_seed makes them repeatable, and the caller's stream is left as it was.
 */
#include "tensor_hash.h"

#include "core/hash.h"
#include "python/tensor.h"

PyObject *pli_tensor_hash(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PLI_ENTER(module);
    pli_tensor tensor;
    size_t most_bytes = SIZE_MAX;
    if (n_args < 1 || n_args > 2)
        return PyErr_Format(PyExc_TypeError, "tensor_hash(tensor, most_bytes)");
    if (n_args == 2)
        most_bytes = PyLong_AsSize_t(args[1]);
    if (PyErr_Occurred() ||
        pli_tensor_read(PyModule_GetState(module), args[0], "the tensor", &tensor) != 0)
        return NULL;
    if (!pli_layout_is_dense(&tensor.layout)) {
        PyErr_SetString(PyExc_ValueError,
                        "the tensor has holes or overlaps: give a contiguous copy");
        return NULL;
    }
    const size_t n_bytes = pli_layout_bytes(&tensor.layout);
    return PyLong_FromUnsignedLongLong(
        pli_hash_bytes(tensor.data, n_bytes < most_bytes ? n_bytes : most_bytes));
}
