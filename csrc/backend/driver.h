/* driver.h - CUDA's driver API, loaded at run time.
 *
 * The first use of a device opens libcuda by name and finds each function by
 * cuGetProcAddress, so the extension also loads on a machine without a driver.  This
 * header declares the prototypes that are used, with opaque handles.
 */
#ifndef PLI_DRIVER_H
#define PLI_DRIVER_H

#include "core/status.h"

typedef int pli_cu_result; /* CUresult; 0: success */
typedef int pli_cu_device;
typedef uint64_t pli_cu_memory; /* CUdeviceptr */
typedef struct CUctx_st *pli_cu_context;
typedef struct CUstream_st *pli_cu_stream;
typedef struct CUevent_st *pli_cu_event;
typedef struct CUmod_st *pli_cu_module;
typedef struct CUfunc_st *pli_cu_function;

/* name, the CUDA version that introduced the form used here, arguments */
#define PLI_DRIVER_MAP(X)                                                              \
    X(cuInit, 2000, (unsigned flags))                                                  \
    X(cuDriverGetVersion, 2020, (int *out))                                            \
    X(cuGetErrorString, 6000, (pli_cu_result error, const char **out))                 \
    X(cuDeviceGetCount, 2000, (int *out))                                              \
    X(cuDeviceGet, 2000, (pli_cu_device * out, int ordinal))                           \
    X(cuDeviceGetAttribute, 2000, (int *out, int attribute, pli_cu_device device))     \
    X(cuDeviceCanAccessPeer, 4000,                                                     \
      (int *out, pli_cu_device device, pli_cu_device peer))                            \
    X(cuDevicePrimaryCtxRetain, 7000, (pli_cu_context * out, pli_cu_device device))    \
    X(cuDevicePrimaryCtxRelease, 11000, (pli_cu_device device))                        \
    X(cuCtxPushCurrent, 4000, (pli_cu_context context))                                \
    X(cuCtxPopCurrent, 4000, (pli_cu_context * out))                                   \
    X(cuCtxGetCurrent, 4000, (pli_cu_context * out))                                   \
    X(cuCtxEnablePeerAccess, 4000, (pli_cu_context peer, unsigned flags))              \
    X(cuCtxGetStreamPriorityRange, 5050, (int *least, int *greatest))                  \
    X(cuStreamCreateWithPriority, 5050,                                                \
      (pli_cu_stream * out, unsigned flags, int priority))                             \
    X(cuStreamDestroy, 4000, (pli_cu_stream stream))                                   \
    X(cuStreamSynchronize, 2000, (pli_cu_stream stream))                               \
    X(cuStreamWaitEvent, 3020,                                                         \
      (pli_cu_stream stream, pli_cu_event event, unsigned flags))                      \
    X(cuStreamIsCapturing, 10000, (pli_cu_stream stream, int *out))                    \
    X(cuThreadExchangeStreamCaptureMode, 10010, (int *mode))                           \
    X(cuEventCreate, 2000, (pli_cu_event * out, unsigned flags))                       \
    X(cuEventDestroy, 4000, (pli_cu_event event))                                      \
    X(cuEventRecord, 2000, (pli_cu_event event, pli_cu_stream stream))                 \
    X(cuEventQuery, 2000, (pli_cu_event event))                                        \
    X(cuMemAlloc, 3020, (pli_cu_memory * out, size_t n_bytes))                         \
    X(cuMemFree, 3020, (pli_cu_memory memory))                                         \
    X(cuMemGetInfo, 3020, (size_t *available, size_t *total))                          \
    X(cuPointerGetAttribute, 4000, (void *out, int property, pli_cu_memory memory))    \
    X(cuMemcpyHtoDAsync, 3020,                                                         \
      (pli_cu_memory to, const void *from, size_t n_bytes, pli_cu_stream stream))      \
    X(cuMemcpyDtoHAsync, 3020,                                                         \
      (void *to, pli_cu_memory from, size_t n_bytes, pli_cu_stream stream))            \
    X(cuMemcpyPeerAsync, 4000,                                                         \
      (pli_cu_memory to, pli_cu_context to_context, pli_cu_memory from,                \
       pli_cu_context from_context, size_t n_bytes, pli_cu_stream stream))             \
    X(cuMemsetD8Async, 3020,                                                           \
      (pli_cu_memory to, unsigned char value, size_t n_bytes, pli_cu_stream stream))   \
    X(cuModuleLoadData, 2000, (pli_cu_module * out, const void *image))                \
    X(cuModuleUnload, 2000, (pli_cu_module module))                                    \
    X(cuModuleGetFunction, 2000,                                                       \
      (pli_cu_function * out, pli_cu_module module, const char *name))                 \
    X(cuLaunchKernel, 4000,                                                            \
      (pli_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,    \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,    \
       pli_cu_stream stream, void **arguments, void **extra))

typedef struct pli_driver {
    void *library;
    int version; /* 13000 for CUDA 13.0 */
#define PLI_DRIVER_FIELD(name, version, arguments) pli_cu_result(*name) arguments;
    PLI_DRIVER_MAP(PLI_DRIVER_FIELD)
#undef PLI_DRIVER_FIELD
} pli_driver;

enum { PLI_CU_STREAM_NON_BLOCKING = 1 };

/* The driver's results that this library distinguishes. */
enum {
    PLI_CU_OUT_OF_MEMORY = 2,
    PLI_CU_NOT_INITIALIZED = 3, /* cuInit returns it in a forked child */
    PLI_CU_NO_DEVICE = 100,
    PLI_CU_NOT_READY = 600,
    PLI_CU_PEERS_ALREADY = 704,
};

/* Opens libcuda (`path`; NULL: PACELINE_LIBCUDA, else libcuda.so.1), once per path, and
 * returns its table, which is never freed.  PL_EUNSUPPORTED if there is no libcuda, it
 * is too old, or it finds no device; PL_ESTATE in a child forked after CUDA was
 * initialised.  The message says what to do.  Thread-safe. */
pl_status pli_driver_open(const char *path, const pli_driver **out) PL_MUST_USE;

/* Turns a result into a status: PL_ENOMEM for out of memory, else PL_ESYS.  The message
 * is `doing`, such as "creating a CUDA event", and the driver's text. */
pl_status pli_driver_check(const pli_driver *driver, pli_cu_result result,
                           const char *doing) PL_MUST_USE;

#define PL_CUDA(driver, call, doing)                                                   \
    PL_TRY(pli_driver_check((driver), (driver)->call, (doing)))

#endif
