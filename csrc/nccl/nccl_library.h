/* nccl_library.h - NCCL, loaded at run time.
 *
 * This file declares the part of NCCL's API that we use, so that the build needs no
 * NCCL header; tests/unit/repository/test_nccl_prototypes.py compares these lines with
 * a real nccl.h if one is installed.
 *
 * The library is the one that PACELINE_LIBNCCL names.  If it is not set: torch's, if
 * loaded; else the one at the caller's path; else what the linker finds.
 */
#ifndef PLI_NCCL_LIBRARY_H
#define PLI_NCCL_LIBRARY_H

#include <stdatomic.h>

#include "core/status.h"

enum { PLI_NCCL_ID_BYTES = 128 };

#ifndef PLI_NCCL_TYPES /* the test takes these from nccl.h */
typedef int pli_nccl_result;
typedef int pli_nccl_dtype;
typedef int pli_nccl_reduction;
typedef struct ncclComm *pli_nccl_comm;
typedef struct CUstream_st *pli_nccl_stream;
typedef struct pli_nccl_id {
    char bytes[PLI_NCCL_ID_BYTES];
} pli_nccl_id;
#endif

enum { PLI_NCCL_OLDEST = 21900 }; /* the first that has all functions below */

/* ours, NCCL's, value */
#define PLI_NCCL_RESULT_MAP(X)                                                         \
    X(PLI_NCCL_SUCCESS, ncclSuccess, 0)                                                \
    X(PLI_NCCL_CUDA_ERROR, ncclUnhandledCudaError, 1)                                  \
    X(PLI_NCCL_SYSTEM_ERROR, ncclSystemError, 2)                                       \
    X(PLI_NCCL_INTERNAL_ERROR, ncclInternalError, 3)                                   \
    X(PLI_NCCL_INVALID_ARGUMENT, ncclInvalidArgument, 4)                               \
    X(PLI_NCCL_INVALID_USAGE, ncclInvalidUsage, 5)                                     \
    X(PLI_NCCL_REMOTE_ERROR, ncclRemoteError, 6)                                       \
    X(PLI_NCCL_IN_PROGRESS, ncclInProgress, 7)

/* ... and those of newer versions, in the same columns */
#define PLI_NCCL_NEW_RESULT_MAP(X) X(PLI_NCCL_TIMEOUT, ncclTimeout, 8) /* 2.32 */

#define PLI_NCCL_DTYPE_MAP(X)                                                          \
    X(PLI_NCCL_I8, ncclInt8, 0)                                                        \
    X(PLI_NCCL_U8, ncclUint8, 1)                                                       \
    X(PLI_NCCL_I32, ncclInt32, 2)                                                      \
    X(PLI_NCCL_I64, ncclInt64, 4)                                                      \
    X(PLI_NCCL_F16, ncclFloat16, 6)                                                    \
    X(PLI_NCCL_F32, ncclFloat32, 7)                                                    \
    X(PLI_NCCL_F64, ncclFloat64, 8)                                                    \
    X(PLI_NCCL_BF16, ncclBfloat16, 9)

#define PLI_NCCL_REDUCTION_MAP(X)                                                      \
    X(PLI_NCCL_SUM, ncclSum, 0)                                                        \
    X(PLI_NCCL_AVG, ncclAvg, 4)

#define PLI_NCCL_ENUM(ours, theirs, value) ours = (value),
enum { PLI_NCCL_RESULT_MAP(PLI_NCCL_ENUM) };
enum { PLI_NCCL_NEW_RESULT_MAP(PLI_NCCL_ENUM) };
enum { PLI_NCCL_DTYPE_MAP(PLI_NCCL_ENUM) };
enum { PLI_NCCL_REDUCTION_MAP(PLI_NCCL_ENUM) };
#undef PLI_NCCL_ENUM

/* name, result, arguments */
#define PLI_NCCL_MAP(X)                                                                \
    X(GetVersion, pli_nccl_result, (int *out))                                         \
    X(GetErrorString, const char *, (pli_nccl_result result))                          \
    X(GetUniqueId, pli_nccl_result, (pli_nccl_id * out))                               \
    X(CommInitRank, pli_nccl_result,                                                   \
      (pli_nccl_comm * out, int n_ranks, pli_nccl_id id, int rank))                    \
    X(CommDestroy, pli_nccl_result, (pli_nccl_comm comm))                              \
    X(CommAbort, pli_nccl_result, (pli_nccl_comm comm))                                \
    X(CommGetAsyncError, pli_nccl_result, (pli_nccl_comm comm, pli_nccl_result * out)) \
    X(AllReduce, pli_nccl_result,                                                      \
      (const void *from, void *to, size_t count, pli_nccl_dtype dtype,                 \
       pli_nccl_reduction reduction, pli_nccl_comm comm, pli_nccl_stream stream))      \
    X(Reduce, pli_nccl_result,                                                         \
      (const void *from, void *to, size_t count, pli_nccl_dtype dtype,                 \
       pli_nccl_reduction reduction, int root, pli_nccl_comm comm,                     \
       pli_nccl_stream stream))                                                        \
    X(AllGather, pli_nccl_result,                                                      \
      (const void *from, void *to, size_t count, pli_nccl_dtype dtype,                 \
       pli_nccl_comm comm, pli_nccl_stream stream))                                    \
    X(Broadcast, pli_nccl_result,                                                      \
      (const void *from, void *to, size_t count, pli_nccl_dtype dtype, int root,       \
       pli_nccl_comm comm, pli_nccl_stream stream))                                    \
    X(GetLastError, const char *, (pli_nccl_comm comm))                                \
    X(CommFinalize, pli_nccl_result, (pli_nccl_comm comm))

/* Reference-counted.  The code stays loaded: NCCL's memory may outlive all users. */
typedef struct pli_nccl_library {
    void *handle;
    int version; /* 22907 for 2.29.7 */
#define PLI_NCCL_FIELD(name, result, arguments) result(*name) arguments;
    PLI_NCCL_MAP(PLI_NCCL_FIELD)
#undef PLI_NCCL_FIELD
    atomic_int n_users;
} pli_nccl_library;

/* `path`: the caller's candidate, or NULL.  Release *out with
 * pli_nccl_library_release().  PL_EUNSUPPORTED if no library is found, or it is too
 * old; the message lists what was tried and what to do. */
pl_status pli_nccl_library_open(const char *path, pli_nccl_library **out) PL_MUST_USE;

/* Add a user; remove one.  NULL is allowed. */
void pli_nccl_library_retain(pli_nccl_library *library);
void pli_nccl_library_release(pli_nccl_library *library);

#endif
