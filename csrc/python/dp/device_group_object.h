/* device_group_object.h - a DeviceGroup, and how its methods read their arguments. */
#ifndef PLI_DEVICE_GROUP_OBJECT_H
#define PLI_DEVICE_GROUP_OBJECT_H

#include "python/gpu.h"
#include "python/tensor.h"
#include "replicas/device_group.h"

typedef struct device_group_object {
    PyObject_HEAD
    pli_device_group *group;
    PyObject *devices; /* a tuple */
} device_group_object;

typedef struct pli_group_streams {
    pl_stream *by_member[PLI_MOST_MEMBERS];
} pli_group_streams;

static inline device_group_object *group_of(PyObject *object)
{
    return (device_group_object *)object;
}

static inline Py_ssize_t n_members(const device_group_object *self)
{
    return PyTuple_GET_SIZE(self->devices);
}

static inline const gpu_object *device_of(const device_group_object *self,
                                          Py_ssize_t member)
{
    return (const gpu_object *)PyTuple_GET_ITEM(self->devices, member);
}

/* All of these return 0, or -1 with an exception. */
int pli_group_read_stream(PyObject *number, pl_stream **out);
int pli_group_read_streams(const device_group_object *self, PyObject *numbers,
                           pli_group_streams *out);
int pli_group_check_member(const device_group_object *self, Py_ssize_t member);
int pli_group_check_lists(PyObject *one, PyObject *other);

/* A tensor of a member; it must be one block of memory. */
int pli_group_read_block(const device_group_object *self, Py_ssize_t member,
                         PyObject *tensor, pli_tensor *out);

/* Such a tensor that holds a segment of n_bytes. */
int pli_group_read_whole(const device_group_object *self, Py_ssize_t member,
                         PyObject *tensor, size_t n_bytes, pli_tensor *out);

/* Such a tensor that fits at an offset, in bytes, into a block of n_bytes. */
typedef struct block_part {
    pli_tensor tensor;
    size_t offset;
} block_part;
int pli_group_read_part(const device_group_object *self, Py_ssize_t member,
                        PyObject *tensor, PyObject *offset, size_t n_bytes,
                        block_part *out);

/* A list with a tensor of each member, or None. */
int pli_group_read_rooms(const device_group_object *self, PyObject *items,
                         pli_room *out);

static inline pl_move pli_group_move_of(void *to, const pli_tensor *from)
{
    return (pl_move){.to = to,
                     .from = from->data,
                     .dtype = from->layout.dtype,
                     .n_elems = from->layout.n_elems};
}

/* A method: a new GradientSum (gradient_sum_type.c). */
PyObject *pli_group_gradient_sum(PyObject *group, PyObject *args);

#endif
