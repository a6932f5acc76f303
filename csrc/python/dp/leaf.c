/* leaf.c - shapes and rows of tensors and arrays. */
#include "python/array.h"
#include "tree.h"

/* ---- shapes --------------------------------------------------------------------- */

static int too_many_dims(int n_dims)
{
    if (n_dims <= PLI_MAX_DIMS)
        return 0;
    return pli_error(PyExc_ValueError, "a tensor or array of %d dimensions: at most %d",
                     n_dims, PLI_MAX_DIMS);
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

/* For subclasses and tensors that DLPack refuses: sparse, nested, meta, quantized. */
static int shape_by_attributes(const module_state *state, PyObject *tensor,
                               pli_shape *out)
{
    PyObject *sizes;
    PyObject *answer = PyObject_CallOneArg(state->layout_of, tensor);
    int status = -1;
    if (answer != NULL && PyArg_ParseTuple(answer, "pO", &out->is_strided, &sizes)) {
        out->n_dims =
            sizes == Py_None ? PLI_SHAPE_UNKNOWN : (int)PyTuple_GET_SIZE(sizes);
        status = too_many_dims(out->n_dims);
        for (int d = 0; status == 0 && d < out->n_dims; d++)
            out->sizes[d] =
                PyNumber_AsSsize_t(PyTuple_GET_ITEM(sizes, d), PyExc_OverflowError);
        if (PyErr_Occurred())
            status = -1;
    }
    Py_XDECREF(answer);
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

static PyObject *slice_of(Py_ssize_t start, Py_ssize_t n)
{
    PyObject *from = PyLong_FromSsize_t(start);
    PyObject *to = PyLong_FromSsize_t(start + n);
    PyObject *slice = from != NULL && to != NULL ? PySlice_New(from, to, NULL) : NULL;
    Py_XDECREF(from);
    Py_XDECREF(to);
    return slice;
}

/* The index start : start + n: [:, rows] along dimension 1, [..., rows, :] along -2. */
static PyObject *index_of(Py_ssize_t dim, Py_ssize_t start, Py_ssize_t n)
{
    if (dim == 0)
        return slice_of(start, n);
    const Py_ssize_t at = dim > 0 ? dim : 1;
    PyObject *index = PyTuple_New(1 + (dim > 0 ? dim : -dim));
    for (Py_ssize_t i = 0; index != NULL && i < PyTuple_GET_SIZE(index); i++) {
        if (i == at)
            pli_tuple_put(&index, i, slice_of(start, n));
        else
            pli_tuple_put(&index, i,
                          i == 0 && dim < 0 ? Py_NewRef(Py_Ellipsis)
                                            : PySlice_New(NULL, NULL, NULL));
    }
    return index;
}

PyObject *pli_leaf_narrow(PyObject *leaf, Py_ssize_t dim, Py_ssize_t start,
                          Py_ssize_t n)
{
    PyObject *index = index_of(dim, start, n);
    PyObject *part = index != NULL ? PyObject_GetItem(leaf, index) : NULL;
    Py_XDECREF(index);
    return part;
}
