/* contexts.c - a CUDA driver that shows further contexts of GPU 0 as GPUs 1 to 3.
 *
 * It replaces libcuda (PACELINE_LIBCUDA) on a machine with one GPU.  Copies between
 * "GPUs", and waits for events of another "GPU", then go from context to context, as
 * with several GPUs.  No "GPU" can access the memory of another one directly.
 * The real driver, which CONTEXTS_DRIVER names, does everything else.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN __attribute__((visibility("default")))

enum { N_DEVICES = 4, ERROR_NOT_FOUND = 500 };

typedef int (*get_address)(const char *name, void **out, int version, uint64_t flags,
                           int *why);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static get_address ask;
static int (*retain)(void **out, int device);
static int (*release)(int device);
static int (*attribute)(int *out, int attribute, int device);
static int (*create)(void **out, unsigned flags, int device);
static int (*pop)(void **out);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *contexts[N_DEVICES]; /* needs the lock; they live as long as the process */

SHOWN int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                              int *why);

static void open_driver(void)
{
    const char *path = getenv("CONTEXTS_DRIVER");
    void *library = dlopen(path != NULL ? path : "libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        return;
    *(void **)&ask = dlsym(library, "cuGetProcAddress_v2");
    *(void **)&retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&release = dlsym(library, "cuDevicePrimaryCtxRelease_v2");
    *(void **)&attribute = dlsym(library, "cuDeviceGetAttribute");
    *(void **)&create = dlsym(library, "cuCtxCreate_v2");
    *(void **)&pop = dlsym(library, "cuCtxPopCurrent_v2");
}

static int device_count(int *out)
{
    *out = N_DEVICES;
    return 0;
}

static int device_get(int *out, int ordinal)
{
    *out = ordinal;
    return 0;
}

static int device_attribute(int *out, int what, int device)
{
    (void)device;
    return attribute(out, what, 0);
}

static int can_access(int *out, int device, int peer)
{
    (void)device, (void)peer;
    *out = 0;
    return 0;
}

static int context_retain(void **out, int device)
{
    int result = 0;
    void *popped;
    if (device == 0 || create == NULL) /* simulated CUDA has several devices itself */
        return retain(out, device);
    pthread_mutex_lock(&lock);
    if (contexts[device] == NULL) {
        result = create(&contexts[device], 0, 0);
        if (result == 0)
            result = pop(&popped);
    }
    *out = contexts[device];
    pthread_mutex_unlock(&lock);
    return result;
}

static int context_release(int device)
{
    return device == 0 || create == NULL ? release(device) : 0;
}

static const struct {
    const char *name;
    void *function;
} own[] = {
    {"cuDeviceGetCount", (void *)device_count},
    {"cuDeviceGet", (void *)device_get},
    {"cuDeviceGetAttribute", (void *)device_attribute},
    {"cuDeviceCanAccessPeer", (void *)can_access},
    {"cuDevicePrimaryCtxRetain", (void *)context_retain},
    {"cuDevicePrimaryCtxRelease", (void *)context_release},
};

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                        int *why)
{
    pthread_once(&once, open_driver);
    if (ask == NULL || retain == NULL)
        return ERROR_NOT_FOUND;
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        if (strcmp(name, own[i].name) == 0) {
            *out = own[i].function;
            return 0;
        }
    return ask(name, out, version, flags, why);
}
