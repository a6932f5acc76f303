/* gpu_type.c - paceline._native.Device: a GPU's memory, kernels and side stream. */
#include "gpu.h"

#include <stddef.h>

#include "backend/driver.h"
#include "tensor.h"

#include <structmember.h>

#if PY_VERSION_HEX < 0x030d0000
#define Py_IsFinalizing _Py_IsFinalizing
#endif

static gpu_object *gpu_of(PyObject *object)
{
    return (gpu_object *)object;
}

int pli_gpu_current_stream(const module_state *state, const gpu_object *device,
                           pl_stream **out)
{
    const dl_exchange *exchange = state->exchange;
    void *stream = NULL;
    if (exchange != NULL && exchange->current_stream != NULL &&
        device->place.type == DL_CUDA) {
        if (exchange->current_stream(DL_CUDA, device->place.id, &stream) != 0)
            return -1;
        *out = stream;
        return 0;
    }
    PyObject *number = PyObject_CallFunction(state->current_stream, "i",
                                             pli_cuda_device(device->backend));
    if (number == NULL)
        return -1;
    stream = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    if (stream == NULL && PyErr_Occurred())
        return -1;
    *out = stream;
    return 0;
}

/* ---- memory of torch's allocator ------------------------------------------------ */

/* Memory that torch reuses may still be in use on the stream where it was allocated. */
static pl_status await_stream(const module_state *state, const gpu_object *device)
{
    pl_status st = PL_OK;
    pl_stream *stream = NULL;
    pl_backend *backend = device->backend;
    if (pli_gpu_current_stream(state, device, &stream) != 0)
        return pli_callback_failed();
    Py_BEGIN_ALLOW_THREADS
    st = backend->ops->synchronize(backend, stream);
    Py_END_ALLOW_THREADS
    return st;
}

static pl_status alloc_memory(void *context, size_t n_bytes, pli_device_memory *out)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    const module_state *state = state_of(context);
    PyObject *memory = PyObject_CallFunction(
        state->device_empty, "in", pli_cuda_device(gpu_of(context)->backend), n_bytes);
    PyObject *address =
        memory != NULL ? PyObject_CallMethod(memory, "data_ptr", NULL) : NULL;
    void *at = address != NULL ? PyLong_AsVoidPtr(address) : NULL;
    pl_status st = at != NULL ? await_stream(state, context) : pli_callback_failed();
    if (memory != NULL && st == PL_OK) {
        *out = (pli_device_memory){.address = at, .owner = memory};
        memory = NULL; /* handed over */
    }
    Py_XDECREF(address);
    Py_XDECREF(memory);
    PyGILState_Release(gil);
    return st;
}

/* The step may have failed by an exception, which stays. */
static pl_status record_stream(void *context, void *owner, pl_stream *stream)
{
    pl_status st = PL_OK;
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *result = PyObject_CallFunction(state_of(context)->record_stream, "ON",
                                             owner, PyLong_FromVoidPtr(stream));
    if (pli_drop(result) != 0) {
        st = pli_callback_failed();
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
    return st;
}

static void release_memory(void *context, void *owner)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    (void)context;
    Py_DECREF((PyObject *)owner);
    PyGILState_Release(gil);
}

pli_device_allocator pli_gpu_allocator(gpu_object *device)
{
    return (pli_device_allocator){.alloc = alloc_memory,
                                  .record_stream = record_stream,
                                  .release = release_memory,
                                  .context = device};
}

/* ---- the object ----------------------------------------------------------------- */

PyObject *pli_driver_version(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    const pli_driver *driver = NULL;
    const char *path = NULL;
    pl_status st;
    if (!PyArg_ParseTuple(args, "z:driver_version", &path))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    st = pli_driver_open(path, &driver);
    Py_END_ALLOW_THREADS
    if (st != PL_OK)
        return pli_raise(PyModule_GetState(module), st);
    return PyLong_FromLong(driver->version);
}

static PyObject *gpu_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"index", "driver", "nvrtc", "dlpack_type", NULL};
    pli_cuda_options options = {0};
    int dlpack_type = DL_CUDA;
    pl_status st;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|zzi:Device", names,
                                     &options.device, &options.driver, &options.nvrtc,
                                     &dlpack_type))
        return NULL;
    gpu_object *self = (gpu_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->place = (dl_device){.type = dlpack_type,
                              .id = dlpack_type == DL_CPU ? 0 : options.device};
    Py_BEGIN_ALLOW_THREADS
    st = pli_cuda_backend_create(&options, &self->backend);
    Py_END_ALLOW_THREADS
    if (pli_check(state_of_type(type), st) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void gpu_dealloc(PyObject *object)
{
    /* When Python ends, torch may still use the side stream to free memory. */
    if (!Py_IsFinalizing())
        pli_backend_destroy(gpu_of(object)->backend);
    pli_object_free(object);
}

static PyObject *gpu_synchronize(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    pl_backend *backend = gpu_of(object)->backend;
    pl_status st;
    (void)ignored;
    Py_BEGIN_ALLOW_THREADS
    st = backend->ops->synchronize(backend, pli_cuda_side_stream(backend));
    if (st == PL_OK)
        st = backend->ops->synchronize(backend, NULL);
    Py_END_ALLOW_THREADS
    return pli_none(pli_check(state_of(object), st));
}

static PyObject *gpu_index(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromLong(pli_cuda_device(gpu_of(object)->backend));
}

static PyObject *gpu_kernels(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyUnicode_FromString(pli_cuda_kernels(gpu_of(object)->backend));
}

static PyObject *gpu_name(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyUnicode_FromFormat("cuda:%d", pli_cuda_device(gpu_of(object)->backend));
}

static PyMethodDef gpu_methods[] = {
    {"synchronize", gpu_synchronize, METH_NOARGS,
     "synchronize($self, /)\n--\n\nWait for the side stream and the default stream."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef gpu_getset[] = {
    {"index", gpu_index, NULL, "Index of the device, as in torch.", NULL},
    {"kernels", gpu_kernels, NULL,
     "Where its kernels come from: 'fatbin', built in, or 'nvrtc', compiled here.",
     NULL},
    {"name", gpu_name, NULL, "Name of the device in torch, such as 'cuda:0'.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot gpu_slots[] = {
    {Py_tp_new, gpu_new},
    {Py_tp_dealloc, gpu_dealloc},
    {Py_tp_methods, gpu_methods},
    {Py_tp_getset, gpu_getset},
    {Py_tp_doc,
     "Device(index, driver=None, nvrtc=None, dlpack_type=2)\n--\n\n"
     "A GPU, with the paths of the libraries that reach it; dlpack_type is DLPack's "
     "device type of its tensors."},
    {0, NULL},
};

PLI_TYPE(gpu, Device, 0);
