/* old_driver.c - a libcuda of CUDA 11.3, or older: only names.
 *
 * A name whose meaning has changed has both forms: the old one under the name, the
 * present one under name_v2.  Built twice: with -DOLD_plain, without cuGetProcAddress,
 * and with -DOLD_asked, where that has its first form.
 */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default"), noinline))

/* Each has a different body, so that no two are merged into one function. */
#define ONE_FORM(name)                                                                 \
    EXPORT int name(void);                                                             \
    int name(void)                                                                     \
    {                                                                                  \
        static volatile int n_calls;                                                   \
        n_calls++;                                                                     \
        return 0;                                                                      \
    }
#define TWO_FORMS(name)                                                                \
    ONE_FORM(name)                                                                     \
    ONE_FORM(name##_v2)

#define ALL(ONE, TWO)                                                                  \
    ONE(cuInit)                                                                        \
    ONE(cuGetErrorString)                                                              \
    ONE(cuDeviceGetCount)                                                              \
    ONE(cuDeviceGet)                                                                   \
    ONE(cuDeviceGetAttribute)                                                          \
    ONE(cuDeviceCanAccessPeer)                                                         \
    ONE(cuDevicePrimaryCtxRetain)                                                      \
    TWO(cuDevicePrimaryCtxRelease)                                                     \
    TWO(cuCtxPushCurrent)                                                              \
    TWO(cuCtxPopCurrent)                                                               \
    ONE(cuCtxGetCurrent)                                                               \
    ONE(cuCtxEnablePeerAccess)                                                         \
    ONE(cuCtxGetStreamPriorityRange)                                                   \
    ONE(cuStreamCreateWithPriority)                                                    \
    TWO(cuStreamDestroy)                                                               \
    ONE(cuStreamSynchronize)                                                           \
    ONE(cuStreamWaitEvent)                                                             \
    ONE(cuStreamIsCapturing)                                                           \
    ONE(cuThreadExchangeStreamCaptureMode)                                             \
    ONE(cuEventCreate)                                                                 \
    TWO(cuEventDestroy)                                                                \
    ONE(cuEventRecord)                                                                 \
    ONE(cuEventQuery)                                                                  \
    TWO(cuMemAlloc)                                                                    \
    TWO(cuMemFree)                                                                     \
    TWO(cuMemGetInfo)                                                                  \
    ONE(cuPointerGetAttribute)                                                         \
    TWO(cuMemcpyHtoDAsync)                                                             \
    TWO(cuMemcpyDtoHAsync)                                                             \
    TWO(cuMemcpyDtoDAsync)                                                             \
    ONE(cuMemcpyPeerAsync)                                                             \
    ONE(cuMemsetD8Async)                                                               \
    ONE(cuModuleLoadData)                                                              \
    ONE(cuModuleUnload)                                                                \
    ONE(cuModuleGetFunction)                                                           \
    ONE(cuLaunchKernel)

ALL(ONE_FORM, TWO_FORMS)

EXPORT int cuDriverGetVersion(int *out);
int cuDriverGetVersion(int *out)
{
    *out = 11030;
    return 0;
}

#ifdef OLD_asked
typedef int (*any)(void);

static const struct form {
    const char *name;
    any old, present;
} forms[] = {
#define SAME(name) {#name, name, name},
#define BOTH(name) {#name, name, name##_v2},
    ALL(SAME, BOTH)};

/* The present forms are of CUDA 3.2, 4.0 and 11.0; asked for an older version, or for
 * per-thread streams, it returns the wrong form. */
EXPORT int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags);
int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    any found = NULL;
    int (*const version_of_driver)(int *) = cuDriverGetVersion;
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++)
        if (strcmp(forms[i].name, name) == 0)
            found = version >= 3020 && flags == 1 ? forms[i].present : forms[i].old;
    memcpy(out, &found, sizeof found);
    if (strcmp(name, "cuDriverGetVersion") == 0)
        memcpy(out, &version_of_driver, sizeof version_of_driver);
    return *out != NULL ? 0 : 500;
}
#endif
