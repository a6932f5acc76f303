/* fake_nvrtc.c - an NVRTC that checks its input, and compiles nothing. */
#include "fake_nvrtc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6 };

typedef struct program {
    char image[128];
} program;

static struct {
    int newest;
    int n_live;
    int n_compiled;
    int major, minor;
    char failing[64];
    int result;
} fake = {.newest = 120, .major = 12, .minor = 4};

static int result_of(const char *name)
{
    return strcmp(name, fake.failing) == 0 ? fake.result : 0;
}

void fake_nvrtc_reset(int newest)
{
    fake.newest = newest;
    fake.n_compiled = 0;
    fake.failing[0] = '\0';
    fake_nvrtc_set_version(12, 4);
}

void fake_nvrtc_fail(const char *name, int result)
{
    (void)snprintf(fake.failing, sizeof fake.failing, "%s", name);
    fake.result = result;
}

void fake_nvrtc_set_version(int major, int minor)
{
    fake.major = major;
    fake.minor = minor;
}

int fake_nvrtc_compiled(void)
{
    return fake.n_compiled;
}

int fake_nvrtc_live(void)
{
    return fake.n_live;
}

/* ---- NVRTC's functions ---------------------------------------------------------- */

#define EXPORT(type, name, ...)                                                        \
    FAKE_NVRTC_API type name(__VA_ARGS__);                                             \
    type name(__VA_ARGS__)

EXPORT(const char *, nvrtcGetErrorString, int result)
{
    return result == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}

EXPORT(int, nvrtcVersion, int *major, int *minor)
{
    *major = fake.major;
    *minor = fake.minor;
    return result_of(__func__);
}

EXPORT(int, nvrtcGetNumSupportedArchs, int *out)
{
    *out = 3;
    return result_of(__func__);
}

EXPORT(int, nvrtcGetSupportedArchs, int *out)
{
    out[0] = 75;
    out[1] = fake.newest;
    out[2] = 80;
    return result_of(__func__);
}

EXPORT(int, nvrtcCreateProgram, program **out, const char *text, const char *name,
       int n_headers, const char *const *headers, const char *const *names)
{
    const int result = result_of(__func__);
    if (result != 0)
        return result;
    if (strstr(text, "pl_copy_") == NULL || strcmp(name, "kernels.cu") != 0)
        return INVALID_INPUT;
    for (int i = 0; i < n_headers; i++)
        if (strstr(text, names[i]) == NULL && strstr(headers[i], "PLI_") == NULL)
            return INVALID_INPUT;
    *out = calloc(1, sizeof **out);
    fake.n_live++;
    return *out != NULL ? 0 : INVALID_INPUT;
}

EXPORT(int, nvrtcDestroyProgram, program **it)
{
    free(*it);
    *it = NULL;
    fake.n_live--;
    return 0;
}

EXPORT(int, nvrtcCompileProgram, program *it, int n_options, const char *const *options)
{
    int arch = 0;
    const int is_real =
        n_options > 0 && sscanf(options[0], "--gpu-architecture=sm_%d", &arch) == 1;
    if (n_options < 1 ||
        (!is_real && sscanf(options[0], "--gpu-architecture=compute_%d", &arch) != 1))
        return INVALID_INPUT;
    if (arch < 75 || arch > fake.newest)
        return INVALID_OPTION;
    int takes_large = 1;
    if (n_options > 2)
        (void)sscanf(options[2], "-DPLI_TAKES_LARGE=%d", &takes_large);
    (void)snprintf(it->image, sizeof it->image, "fake %s for %s%s",
                   is_real ? "cubin" : "PTX", options[0],
                   takes_large ? "" : ", small parameters");
    fake.n_compiled++;
    return result_of(__func__);
}

EXPORT(int, nvrtcGetProgramLogSize, const program *it, size_t *out)
{
    (void)it;
    *out = sizeof "kernels.cu(1): what is this";
    return 0;
}

EXPORT(int, nvrtcGetProgramLog, const program *it, char *out)
{
    (void)it;
    memcpy(out, "kernels.cu(1): what is this", sizeof "kernels.cu(1): what is this");
    return 0;
}

EXPORT(int, nvrtcGetCUBINSize, const program *it, size_t *out)
{
    *out = strlen(it->image);
    return result_of(__func__);
}

EXPORT(int, nvrtcGetCUBIN, const program *it, char *out)
{
    memcpy(out, it->image, strlen(it->image));
    return result_of(__func__);
}

EXPORT(int, nvrtcGetPTXSize, const program *it, size_t *out)
{
    *out = strlen(it->image);
    return result_of(__func__);
}

EXPORT(int, nvrtcGetPTX, const program *it, char *out)
{
    memcpy(out, it->image, strlen(it->image));
    return result_of(__func__);
}
