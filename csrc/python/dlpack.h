/* dlpack.h - the part of DLPack 1.3's binary interface that this extension uses.
 *
 * Declared here instead of including DLPack's header: the standard fixes the layout of
 * the structs, and a reader must refuse another major version.
 */
#ifndef PLI_DLPACK_H
#define PLI_DLPACK_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_MAJOR = 1 };
enum {
    DL_INT = 0,
    DL_UINT = 1,
    DL_FLOAT = 2,
    DL_BFLOAT = 4,
    DL_COMPLEX = 5,
    DL_BOOL = 6
};

typedef struct dl_device {
    int32_t type;
    int32_t id;
} dl_device;

typedef struct dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} dl_dtype;

typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: row-major */
    uint64_t byte_offset;
} dl_tensor;

/* The unversioned form, for torch before 2.10. */
typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

typedef struct dl_version {
    uint32_t major;
    uint32_t minor;
} dl_version;

typedef struct dl_managed_versioned {
    dl_version version;
    void *context;
    void (*deleter)(struct dl_managed_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

/* The table in the capsule `__dlpack_c_exchange_api__` of a tensor type. */
typedef struct dl_exchange {
    dl_version version;
    struct dl_exchange *previous;
    int (*allocate)(dl_tensor *prototype, dl_managed_versioned **out, void *context,
                    void (*set_error)(void *context, const char *kind,
                                      const char *words));
    int (*managed_from_object)(void *object, dl_managed_versioned **out);
    int (*managed_to_object)(dl_managed_versioned *tensor, void **out);
    int (*tensor_from_object)(void *object, dl_tensor *out);
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} dl_exchange;

#define DL_EXCHANGE_CAPSULE "dlpack_exchange_api"

#endif
