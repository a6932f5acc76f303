/* cuda_api.h - the part of CUDA's driver API that the fake has.
 *
 * Written from the documentation, independently of the prototypes in the library
 * itself, so that a mistake in one of the two shows.  As in CUDA's own header, a name
 * whose meaning has changed stands for its newest variant.
 */
#ifndef FAKE_CUDA_API_H
#define FAKE_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_EXPORT __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_TOO_MANY_PEERS = 711,
    CUDA_ERROR_MISALIGNED_ADDRESS = 716,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_UNKNOWN = 999,
};

enum {
    CU_STREAM_DEFAULT = 0,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
};

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

/* name, first CUDA version, CUDA version and suffix of its newest variant, arguments */
#define FAKE_CUDA_MAP(X)                                                               \
    X(cuInit, 2000, 2000, , (unsigned flags))                                          \
    X(cuDriverGetVersion, 2020, 2020, , (int *out))                                    \
    X(cuGetErrorString, 6000, 6000, , (CUresult error, const char **out))              \
    X(cuDeviceGetCount, 2000, 2000, , (int *out))                                      \
    X(cuDeviceGet, 2000, 2000, , (CUdevice * out, int ordinal))                        \
    X(cuDeviceGetAttribute, 2000, 2000, , (int *out, int attribute, CUdevice device))  \
    X(cuDeviceCanAccessPeer, 4000, 4000, , (int *out, CUdevice device, CUdevice peer)) \
    X(cuDevicePrimaryCtxRetain, 7000, 7000, , (CUcontext * out, CUdevice device))      \
    X(cuDevicePrimaryCtxRelease, 7000, 11000, _v2, (CUdevice device))                  \
    X(cuCtxPushCurrent, 2000, 4000, _v2, (CUcontext context))                          \
    X(cuCtxPopCurrent, 2000, 4000, _v2, (CUcontext * out))                             \
    X(cuCtxGetCurrent, 4000, 4000, , (CUcontext * out))                                \
    X(cuCtxSynchronize, 2000, 2000, , (void))                                          \
    X(cuCtxEnablePeerAccess, 4000, 4000, , (CUcontext peer, unsigned flags))           \
    X(cuCtxGetStreamPriorityRange, 5050, 5050, , (int *least, int *greatest))          \
    X(cuStreamCreate, 2000, 2000, , (CUstream * out, unsigned flags))                  \
    X(cuStreamCreateWithPriority, 5050, 5050, ,                                        \
      (CUstream * out, unsigned flags, int priority))                                  \
    X(cuStreamDestroy, 2000, 4000, _v2, (CUstream stream))                             \
    X(cuStreamSynchronize, 2000, 2000, , (CUstream stream))                            \
    X(cuStreamQuery, 2000, 2000, , (CUstream stream))                                  \
    X(cuStreamWaitEvent, 3020, 3020, ,                                                 \
      (CUstream stream, CUevent event, unsigned flags))                                \
    X(cuStreamIsCapturing, 10000, 10000, , (CUstream stream, int *out))                \
    X(cuStreamBeginCapture, 10000, 10010, _v2, (CUstream stream, int mode))            \
    X(cuStreamEndCapture, 10000, 10000, , (CUstream stream, CUgraph * out))            \
    X(cuThreadExchangeStreamCaptureMode, 10010, 10010, , (int *mode))                  \
    X(cuGraphInstantiate, 10000, 12000, WithFlags,                                     \
      (CUgraphExec * out, CUgraph graph, uint64_t flags))                              \
    X(cuGraphLaunch, 10000, 10000, , (CUgraphExec graph, CUstream stream))             \
    X(cuGraphDestroy, 10000, 10000, , (CUgraph graph))                                 \
    X(cuGraphExecDestroy, 10000, 10000, , (CUgraphExec graph))                         \
    X(cuEventCreate, 2000, 2000, , (CUevent * out, unsigned flags))                    \
    X(cuEventDestroy, 2000, 4000, _v2, (CUevent event))                                \
    X(cuEventRecord, 2000, 2000, , (CUevent event, CUstream stream))                   \
    X(cuEventQuery, 2000, 2000, , (CUevent event))                                     \
    X(cuEventSynchronize, 2000, 2000, , (CUevent event))                               \
    X(cuMemAlloc, 2000, 3020, _v2, (CUdeviceptr * out, size_t n_bytes))                \
    X(cuMemFree, 2000, 3020, _v2, (CUdeviceptr memory))                                \
    X(cuMemGetInfo, 2000, 3020, _v2, (size_t *available, size_t *total))               \
    X(cuPointerGetAttribute, 4000, 4000, ,                                             \
      (void *out, int attribute, CUdeviceptr memory))                                  \
    X(cuMemHostAlloc, 2020, 2020, , (void **out, size_t n_bytes, unsigned flags))      \
    X(cuMemFreeHost, 2000, 2000, , (void *memory))                                     \
    X(cuMemHostRegister, 4000, 6050, _v2,                                              \
      (void *memory, size_t n_bytes, unsigned flags))                                  \
    X(cuMemHostUnregister, 4000, 4000, , (void *memory))                               \
    X(cuMemcpyHtoDAsync, 2000, 3020, _v2,                                              \
      (CUdeviceptr to, const void *from, size_t n_bytes, CUstream stream))             \
    X(cuMemcpyDtoHAsync, 2000, 3020, _v2,                                              \
      (void *to, CUdeviceptr from, size_t n_bytes, CUstream stream))                   \
    X(cuMemcpyDtoDAsync, 3000, 3020, _v2,                                              \
      (CUdeviceptr to, CUdeviceptr from, size_t n_bytes, CUstream stream))             \
    X(cuMemcpyPeerAsync, 4000, 4000, ,                                                 \
      (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, \
       size_t n_bytes, CUstream stream))                                               \
    X(cuMemsetD8Async, 3020, 3020, ,                                                   \
      (CUdeviceptr to, unsigned char value, size_t n_bytes, CUstream stream))          \
    X(cuModuleLoadData, 2000, 2000, , (CUmodule * out, const void *image))             \
    X(cuModuleUnload, 2000, 2000, , (CUmodule module))                                 \
    X(cuModuleGetFunction, 2000, 2000, ,                                               \
      (CUfunction * out, CUmodule module, const char *name))                           \
    X(cuLaunchKernel, 4000, 4000, ,                                                    \
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,         \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,    \
       CUstream stream, void **arguments, void **extra))                               \
    X(cuGetProcAddress, 11030, 12000, _v2,                                             \
      (const char *name, void **out, int version, uint64_t flags, int *how))

#define FAKE_CUDA_DECLARE(name, since, newest, suffix, arguments)                      \
    FAKE_EXPORT CUresult name##suffix arguments;
FAKE_CUDA_MAP(FAKE_CUDA_DECLARE)
#undef FAKE_CUDA_DECLARE

#define cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
#define cuCtxPushCurrent cuCtxPushCurrent_v2
#define cuCtxPopCurrent cuCtxPopCurrent_v2
#define cuStreamDestroy cuStreamDestroy_v2
#define cuStreamBeginCapture cuStreamBeginCapture_v2
#define cuGraphInstantiate cuGraphInstantiateWithFlags
#define cuEventDestroy cuEventDestroy_v2
#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#define cuMemGetInfo cuMemGetInfo_v2
#define cuMemHostRegister cuMemHostRegister_v2
#define cuMemcpyHtoDAsync cuMemcpyHtoDAsync_v2
#define cuMemcpyDtoHAsync cuMemcpyDtoHAsync_v2
#define cuMemcpyDtoDAsync cuMemcpyDtoDAsync_v2

#endif
