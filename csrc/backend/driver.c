/* driver.c - opens libcuda, and finds each function by name and version.
 *
 * A name alone is ambiguous: libcuda keeps every old form of a function under the plain
 * name, and exports the current one as name_v2.  cuGetProcAddress takes the CUDA
 * version of the wanted form.  In drivers older than it (before CUDA 11.3), name_v2 is
 * looked up first, as their header maps the plain name to name_v2.
 *
 * Opened drivers stay in a list until the process ends, because their contexts, streams
 * and memory may live that long.
 */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/config.h"

enum { LEGACY_STREAM = 1 }; /* stream 0 is the legacy one, which waits for all others */
enum { MAX_SYMBOL = 64 };

typedef pli_cu_result (*get_address_12000)(const char *name, void **out, int version,
                                           uint64_t flags, int *why);
typedef pli_cu_result (*get_address_11030)(const char *name, void **out, int version,
                                           uint64_t flags);

/* How to look up functions in a library; a member is NULL if the library lacks it. */
typedef struct finder {
    void *library;
    get_address_12000 by_12000;
    get_address_11030 by_11030;
} finder;

typedef struct opened_library {
    pli_driver driver;
    pid_t pid;
    struct opened_library *next;
    char path[];
} opened_library;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static opened_library *all_opened; /* under lock */

static const struct entry {
    const char *name;
    int version;
    size_t offset;
} entries[] = {
#define ENTRY(name, version, arguments) {#name, version, offsetof(pli_driver, name)},
    PLI_DRIVER_MAP(ENTRY)
#undef ENTRY
};

static finder finder_of(void *library)
{
    finder self = {.library = library};
    void *const newer = dlsym(library, "cuGetProcAddress_v2");
    void *const older = dlsym(library, "cuGetProcAddress");
    memcpy(&self.by_12000, &newer, sizeof newer);
    memcpy(&self.by_11030, &older, sizeof older);
    return self;
}

static void *find(const finder *self, const char *name, int version)
{
    void *found = NULL;
    int why = 0;
    if (self->by_12000 != NULL)
        return self->by_12000(name, &found, version, LEGACY_STREAM, &why) == 0 ? found
                                                                               : NULL;
    if (self->by_11030 != NULL)
        return self->by_11030(name, &found, version, LEGACY_STREAM) == 0 ? found : NULL;
    char newer[MAX_SYMBOL];
    (void)snprintf(newer, sizeof newer, "%s_v2", name);
    found = dlsym(self->library, newer);
    return found != NULL ? found : dlsym(self->library, name);
}

/* The driver's text of a result, or a substitute if it has none. */
static const char *error_text(const pli_driver *driver, pli_cu_result result)
{
    const char *text = NULL;
    if (driver->cuGetErrorString(result, &text) != 0 || text == NULL)
        return "an error for which the driver has no text";
    return text;
}

static pl_status resolve(void *library, const char *path, pli_driver *out)
{
    pl_status st = PL_OK;
    const finder asked = finder_of(library);
    pli_driver driver = {.library = library};
    const char *lacks = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        void *const found = find(&asked, entries[i].name, entries[i].version);
        if (found == NULL && lacks == NULL)
            lacks = entries[i].name;
        memcpy((char *)&driver + entries[i].offset, &found, sizeof found);
    }
    if (driver.cuDriverGetVersion == NULL)
        PL_FAIL(PL_EUNSUPPORTED,
                "%s is no CUDA driver: it has no cuDriverGetVersion; set "
                "PACELINE_LIBCUDA to the path of libcuda.so.1",
                path);
    if (driver.cuDriverGetVersion(&driver.version) != 0)
        driver.version = 0;
    if (lacks != NULL)
        PL_FAIL(PL_EUNSUPPORTED,
                "the CUDA driver %s is too old: it serves CUDA %d.%d and has no %s; "
                "install a driver for CUDA 11.0 or later",
                path, driver.version / 1000, driver.version % 1000 / 10, lacks);
    *out = driver;
done:
    return st;
}

static pl_status start(const opened_library *self)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = &self->driver;
    const int is_forked = self->pid != getpid();
    const pli_cu_result result = is_forked ? PLI_CU_NOT_INITIALIZED : driver->cuInit(0);
    if (result == PLI_CU_NOT_INITIALIZED)
        PL_FAIL(PL_ESTATE, "CUDA was started before this process was forked, and "
                           "cannot be used in the child: start processes by spawn");
    if (result == PLI_CU_NO_DEVICE)
        PL_FAIL(PL_EUNSUPPORTED,
                "the CUDA driver sees no device: is there a GPU that `nvidia-smi` "
                "lists, and does CUDA_VISIBLE_DEVICES show it?");
    if (result != 0)
        PL_FAIL(PL_EUNSUPPORTED,
                "the CUDA driver does not start: %s (CUDA error %d); does `nvidia-smi` "
                "work here?",
                error_text(driver, result), result);
done:
    return st;
}

static pl_status load(const char *path, pli_driver *out)
{
    pl_status st = PL_OK;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        PL_FAIL(PL_EUNSUPPORTED,
                "no CUDA driver (%s): install NVIDIA's driver, or give the container "
                "its GPUs (docker run --gpus all), or set PACELINE_LIBCUDA to the path "
                "of libcuda.so.1",
                dlerror());
    PL_TRY(resolve(library, path, out));
    library = NULL;
done:
    if (library != NULL)
        (void)dlclose(library);
    return st;
}

static opened_library *find_locked(const char *path)
{
    opened_library *self = all_opened;
    while (self != NULL && strcmp(self->path, path) != 0)
        self = self->next;
    return self;
}

pl_status pli_driver_open(const char *path, const pli_driver **out)
{
    pl_status st = PL_OK;
    opened_library *fresh = NULL;
    if (path == NULL)
        path = pli_config_word("PACELINE_LIBCUDA");
    if (path == NULL)
        path = "libcuda.so.1";
    (void)pthread_mutex_lock(&lock);
    const opened_library *self = find_locked(path);
    if (self == NULL) {
        const size_t path_bytes = strlen(path) + 1;
        PL_TRY(pli_calloc(1, sizeof *fresh + path_bytes, "CUDA driver", &fresh));
        PL_TRY(load(path, &fresh->driver));
        memcpy(fresh->path, path, path_bytes);
        fresh->pid = getpid();
        fresh->next = all_opened;
        self = all_opened = fresh;
        fresh = NULL;
    }
    PL_TRY(start(self));
    *out = &self->driver;
done:
    (void)pthread_mutex_unlock(&lock);
    pli_free(fresh);
    return st;
}

pl_status pli_driver_check(const pli_driver *driver, pli_cu_result result,
                           const char *doing)
{
    if (result == 0)
        return PL_OK;
    return pli_fail(result == PLI_CU_OUT_OF_MEMORY ? PL_ENOMEM : PL_ESYS,
                    "%s: %s (CUDA error %d)", doing, error_text(driver, result),
                    result);
}
