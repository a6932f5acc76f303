/* nccl_library.c - finds the NCCL library and loads its functions. */
#include "nccl_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "core/alloc.h"
#include "core/config.h"

#define SONAME "libnccl.so.2"

#define WHAT_TO_DO                                                                     \
    "install torch with its CUDA packages, which bring NCCL (nvidia-nccl-cu12 or "     \
    "-cu13), or give the path of a libnccl.so.2 in PACELINE_LIBNCCL"

/* The places tried so far, for the message. */
typedef struct library_search {
    char tried[1024];
    size_t n;
} library_search;

static void add_tried(library_search *self, const char *what, const char *why)
{
    const size_t room = sizeof self->tried - self->n;
    const int n =
        snprintf(self->tried + self->n, room, "%s%s (%s)", self->n > 0 ? "; " : "",
                 what, why != NULL ? why : "not there");
    self->n += n > 0 && (size_t)n < room ? (size_t)n : 0;
    self->tried[self->n] = '\0';
}

static void *try_path(library_search *self, const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        add_tried(self, path, dlerror());
    return handle;
}

/* torch's copy: by its soname, or linked into torch's libraries. */
static void *try_loaded(library_search *self)
{
    void *handle = dlopen(SONAME, RTLD_NOW | RTLD_NOLOAD);
    if (handle == NULL && dlsym(RTLD_DEFAULT, "ncclGetVersion") != NULL)
        handle = dlopen(NULL, RTLD_NOW);
    if (handle == NULL)
        add_tried(self, "torch's copy", "none is loaded");
    return handle;
}

static void *find(const char *path, library_search *self)
{
    const char *chosen = pli_config_word("PACELINE_LIBNCCL");
    if (chosen != NULL)
        return try_path(self, chosen);
    void *handle = try_loaded(self);
    if (handle == NULL && path != NULL)
        handle = try_path(self, path);
    return handle != NULL ? handle : try_path(self, SONAME);
}

/* Up to 2.8, version 2804 is 2.8.4; since then, 20908 is 2.9.8. */
static pl_status check_version(pli_nccl_library *library)
{
    pl_status st = PL_OK;
    const pli_nccl_result result = library->GetVersion(&library->version);
    const int v = library->version;
    const int of_major = v < 10000 ? 1000 : 10000;
    if (result != PLI_NCCL_SUCCESS)
        PL_FAIL(PL_EUNSUPPORTED,
                "NCCL reports no version (error %d): reinstall it, or another one",
                result);
    if (v < PLI_NCCL_OLDEST)
        PL_FAIL(PL_EUNSUPPORTED,
                "NCCL %d.%d.%d is too old, 2.19 or later is needed: " WHAT_TO_DO,
                v / of_major, v % of_major / 100, v % 100);
done:
    return st;
}

static pl_status take_symbols(pli_nccl_library *library)
{
    pl_status st = PL_OK;
    const char *lacks = NULL;
    void *symbol = NULL;
#define TAKE(name, result, arguments)                                                  \
    symbol = dlsym(library->handle, "nccl" #name);                                     \
    memcpy(&library->name, &symbol, sizeof symbol);                                    \
    lacks = symbol == NULL && lacks == NULL ? "nccl" #name : lacks;
    PLI_NCCL_MAP(TAKE)
#undef TAKE
    if (library->GetVersion != NULL)
        PL_TRY(check_version(library)); /* says more of an old library */
    if (lacks != NULL)
        PL_FAIL(PL_EUNSUPPORTED, "this NCCL has no %s: " WHAT_TO_DO, lacks);
done:
    return st;
}

pl_status pli_nccl_library_open(const char *path, pli_nccl_library **out)
{
    pl_status st = PL_OK;
    pli_nccl_library *library = NULL;
    library_search tried = {.n = 0};
    PL_TRY(pli_calloc(1, sizeof *library, "NCCL's functions", &library));
    atomic_store(&library->n_users, 1);
    library->handle = find(path, &tried);
    if (library->handle == NULL)
        PL_FAIL(PL_EUNSUPPORTED,
                "gradients on GPUs need NCCL, and none was found: " WHAT_TO_DO
                ".  Tried: %s",
                tried.tried);
    PL_TRY(take_symbols(library));
    *out = library;
    library = NULL;
done:
    pli_nccl_library_release(library);
    return st;
}

void pli_nccl_library_retain(pli_nccl_library *library)
{
    if (library != NULL)
        atomic_fetch_add(&library->n_users, 1);
}

void pli_nccl_library_release(pli_nccl_library *library)
{
    /* Keep the handle open: NCCL's threads may run its code. */
    if (library != NULL && atomic_fetch_sub(&library->n_users, 1) == 1)
        pli_free(library);
}
