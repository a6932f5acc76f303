/* nccl_api.h - the part of NCCL's API that the fake has.
 *
 * Written independently of the prototypes in the library itself.
 */
#ifndef FAKE_NCCL_API_H
#define FAKE_NCCL_API_H

#include "cuda_api.h"

typedef struct ncclComm *ncclComm_t;

enum { NCCL_UNIQUE_ID_BYTES = 128 };
typedef struct ncclUniqueId {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum ncclResult {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclTimeout = 8, /* 2.32 */
} ncclResult_t;

/* The ones that the library uses. */
typedef enum ncclRedOp { ncclSum = 0, ncclAvg = 4 } ncclRedOp_t;

typedef enum ncclDataType {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
} ncclDataType_t;

/* name, first version, arguments */
#define FAKE_NCCL_MAP(X)                                                               \
    X(ncclGetVersion, 2304, (int *out))                                                \
    X(ncclGetUniqueId, 2000, (ncclUniqueId * out))                                     \
    X(ncclCommInitRank, 2000,                                                          \
      (ncclComm_t * out, int n_ranks, ncclUniqueId id, int rank))                      \
    X(ncclCommGetAsyncError, 2400, (ncclComm_t comm, ncclResult_t * out))              \
    X(ncclCommAbort, 2400, (ncclComm_t comm))                                          \
    X(ncclCommDestroy, 2000, (ncclComm_t comm))                                        \
    X(ncclCommFinalize, 21400, (ncclComm_t comm))                                      \
    X(ncclAllReduce, 2000,                                                             \
      (const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op, \
       ncclComm_t comm, CUstream stream))                                              \
    X(ncclReduce, 2000,                                                                \
      (const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op, \
       int root, ncclComm_t comm, CUstream stream))                                    \
    X(ncclAllGather, 2000,                                                             \
      (const void *from, void *to, size_t count, ncclDataType_t dtype,                 \
       ncclComm_t comm, CUstream stream))                                              \
    X(ncclBroadcast, 2200,                                                             \
      (const void *from, void *to, size_t count, ncclDataType_t dtype, int root,       \
       ncclComm_t comm, CUstream stream))                                              \
    X(ncclGroupStart, 2000, (void))                                                    \
    X(ncclGroupEnd, 2000, (void))

#define FAKE_NCCL_DECLARE(name, since, arguments)                                      \
    FAKE_EXPORT ncclResult_t name arguments;
FAKE_NCCL_MAP(FAKE_NCCL_DECLARE)
#undef FAKE_NCCL_DECLARE

FAKE_EXPORT const char *ncclGetErrorString(ncclResult_t result);
FAKE_EXPORT const char *ncclGetLastError(ncclComm_t comm);

#endif
