/* leaf.c - shapes and rows of tensors and arrays. */
#include "leaf.h"

#include "python/array.h"

/* ---- shapes --------------------------------------------------------------------- */

static int too_many_dims(int n_dims)
{
    if (n_dims <= PLI_MAX_DIMS)
        return 0;
    PyErr_Format(PyExc_ValueError, "a tensor or array of %d dimensions: at most %d",
                 n_dims, PLI_MAX_DIMS);
    return -1;
}

static int shape_of_array(PyObject *array, pli_shape *out)
{
    out->n_dims = pli_array_n_dims(array);
    out->is_strided = 1;
    if (too_many_dims(out->n_dims) != 0)
        return -1;
    for (int d = 0; d < out->n_dims; d++)
        out->sizes[d] = pli_array_size(array, d);
    return 0;
}

/* For subclasses, and for what DLPack refuses: sparse, nested, meta, quantized. */
static int shape_by_attributes(const module_state *state, PyObject *tensor,
                               pli_shape *out)
{
    out->n_dims = PLI_SHAPE_UNKNOWN;
    out->is_strided = pli_is_true(PyObject_CallOneArg(state->is_strided, tensor));
    const int is_nested = pli_is_true(PyObject_GetAttr(tensor, state->name_is_nested));
    if (is_nested != 0 || out->is_strided < 0)
        return is_nested < 0 || out->is_strided < 0 ? -1 : 0;
    PyObject *shape = PyObject_GetAttr(tensor, state->name_shape);
    if (shape == NULL)
        return -1;
    int status = -1;
    if (!PyTuple_Check(shape)) {
        PyErr_Format(PyExc_TypeError, "a tensor's shape is a %.200s, not a tuple",
                     Py_TYPE(shape)->tp_name);
    } else if (too_many_dims((int)PyTuple_GET_SIZE(shape)) == 0) {
        out->n_dims = (int)PyTuple_GET_SIZE(shape);
        for (int d = 0; d < out->n_dims; d++)
            out->sizes[d] =
                PyNumber_AsSsize_t(PyTuple_GET_ITEM(shape, d), PyExc_OverflowError);
        status = PyErr_Occurred() ? -1 : 0;
    }
    Py_DECREF(shape);
    return status;
}

int pli_leaf_shape(const module_state *state, PyObject *leaf, pli_shape *out)
{
    dl_tensor dl;
    const int is_exact = (PyObject *)Py_TYPE(leaf) == state->tensor_type;
    if (!is_exact &&
        !PyType_IsSubtype(Py_TYPE(leaf), (PyTypeObject *)state->tensor_type))
        return shape_of_array(leaf, out);
    if (!is_exact || state->exchange == NULL)
        return shape_by_attributes(state, leaf, out);
    if (state->exchange->tensor_from_object(leaf, &dl) != 0) {
        PyErr_Clear();
        return shape_by_attributes(state, leaf, out);
    }
    if (too_many_dims(dl.ndim) != 0)
        return -1;
    out->n_dims = dl.ndim;
    out->is_strided = 1;
    for (int d = 0; d < dl.ndim; d++)
        out->sizes[d] = dl.shape[d];
    return 0;
}

PyObject *pli_shape_text(const pli_shape *shape)
{
    if (shape->n_dims < 0)
        return PyUnicode_FromString("(nested)");
    PyObject *sizes = PyTuple_New(shape->n_dims);
    for (int d = 0; sizes != NULL && d < shape->n_dims; d++)
        pli_tuple_put(&sizes, d, PyLong_FromLongLong(shape->sizes[d]));
    PyObject *text = sizes != NULL ? PyObject_Repr(sizes) : NULL;
    Py_XDECREF(sizes);
    return text;
}

/* ---- rows ----------------------------------------------------------------------- */

/* tensor[start : start + n]: a third less than narrow() takes. */
static PyObject *slice_tensor(PyObject *tensor, Py_ssize_t start, Py_ssize_t n)
{
    PyObject *slice = pli_array_slice(start, n);
    PyObject *part = slice != NULL ? PyObject_GetItem(tensor, slice) : NULL;
    Py_XDECREF(slice);
    return part;
}

static PyObject *narrow_tensor(const module_state *state, PyObject *tensor,
                               Py_ssize_t dim, Py_ssize_t start, Py_ssize_t n)
{
    PyObject *part = NULL;
    PyObject *args[] = {tensor, PyLong_FromSsize_t(dim), PyLong_FromSsize_t(start),
                        PyLong_FromSsize_t(n)};
    if (args[1] != NULL && args[2] != NULL && args[3] != NULL)
        part = PyObject_VectorcallMethod(state->name_narrow, args, 4, NULL);
    for (int i = 1; i < 4; i++)
        Py_XDECREF(args[i]);
    return part;
}

PyObject *pli_leaf_narrow(const module_state *state, PyObject *leaf, Py_ssize_t dim,
                          Py_ssize_t start, Py_ssize_t n)
{
    if (PyType_IsSubtype(Py_TYPE(leaf), (PyTypeObject *)state->tensor_type))
        return dim == 0 ? slice_tensor(leaf, start, n)
                        : narrow_tensor(state, leaf, dim, start, n);
    const Py_ssize_t counted = dim < 0 ? dim + pli_array_n_dims(leaf) : dim;
    return pli_array_narrow(leaf, (int)counted, start, n);
}
