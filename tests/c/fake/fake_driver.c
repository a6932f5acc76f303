/* fake_driver.c - the driver itself: devices, contexts, names, modules. */
#include "state.h"

static _Thread_local struct {
    uint64_t generation;
    int depth;
    CUcontext contexts[FK_MAX_CONTEXTS];
} stack;

/* ---- contexts ------------------------------------------------------------------- */

static void freshen_stack(void)
{
    if (stack.generation != fk.generation) {
        stack.generation = fk.generation;
        stack.depth = 0;
    }
}

CUcontext fk_current(void)
{
    freshen_stack();
    return stack.depth > 0 ? stack.contexts[stack.depth - 1] : NULL;
}

int fk_need_context(CUcontext *out)
{
    if (!fk.is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    const CUcontext context = fk_current();
    if (context == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context->n_retained == 0)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *out = context;
    return CUDA_SUCCESS;
}

int fake_context_depth(void)
{
    (void)fk_current();
    return stack.depth;
}

static int push(CUcontext context)
{
    freshen_stack();
    if (stack.depth == FK_MAX_CONTEXTS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stack.contexts[stack.depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context)
{
    FAKE_CALL(cuCtxPushCurrent);
    if (context == NULL || context->n_retained == 0)
        return fk_leave(CUDA_ERROR_INVALID_CONTEXT);
    return fk_leave(push(context));
}

CUresult cuCtxPopCurrent(CUcontext *out)
{
    FAKE_CALL(cuCtxPopCurrent);
    if (fk_current() == NULL)
        return fk_leave(CUDA_ERROR_INVALID_CONTEXT);
    const CUcontext context = stack.contexts[--stack.depth];
    if (out != NULL)
        *out = context;
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *out)
{
    FAKE_CALL(cuCtxGetCurrent);
    *out = fk_current();
    return fk_leave(CUDA_SUCCESS);
}
CUresult cuCtxSynchronize(void)
{
    CUcontext context = NULL;
    FAKE_CALL(cuCtxSynchronize);
    FAKE_TRY(fk_need_context(&context));
    FAKE_TRY(fk_forbid_beside_captures(context->device, "cuCtxSynchronize"));
    return fk_leave(fk_wait_device(context->device, "cuCtxSynchronize"));
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CUcontext context = NULL;
    FAKE_CALL(cuCtxGetStreamPriorityRange);
    FAKE_TRY(fk_need_context(&context));
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return fk_leave(CUDA_SUCCESS);
}

/* ---- devices -------------------------------------------------------------------- */

static int check_device(CUdevice device)
{
    if (!fk.is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    return device >= 0 && device < fk.options.devices ? CUDA_SUCCESS
                                                      : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuInit(unsigned flags)
{
    FAKE_CALL(cuInit);
    if (flags != 0)
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    if (fk.options.devices == 0)
        return fk_leave(CUDA_ERROR_NO_DEVICE);
    fk.is_initialized = 1;
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *out)
{
    FAKE_CALL(cuDriverGetVersion);
    *out = fk.options.driver;
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetCount(int *out)
{
    FAKE_CALL(cuDeviceGetCount);
    if (!fk.is_initialized)
        return fk_leave(CUDA_ERROR_NOT_INITIALIZED);
    *out = fk.options.devices;
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    FAKE_CALL(cuDeviceGet);
    FAKE_TRY(check_device(ordinal));
    *out = ordinal;
    return fk_leave(CUDA_SUCCESS);
}
CUresult cuDeviceGetAttribute(int *out, int attribute, CUdevice device)
{
    FAKE_CALL(cuDeviceGetAttribute);
    FAKE_TRY(check_device(device));
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *out = FK_SLOTS;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *out = fk.options.compute / 10;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *out = fk.options.compute % 10;
        break;
    default:
        *out = 1;
        break;
    }
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    FAKE_CALL(cuDevicePrimaryCtxRetain);
    FAKE_TRY(check_device(device));
    fk.contexts[device].n_retained++;
    fk.n_live[FAKE_CONTEXTS]++;
    *out = &fk.contexts[device];
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    FAKE_CALL(cuDevicePrimaryCtxRelease);
    FAKE_TRY(check_device(device));
    if (fk.contexts[device].n_retained == 0)
        return fk_leave(CUDA_ERROR_INVALID_CONTEXT);
    fk.contexts[device].n_retained--;
    fk.n_live[FAKE_CONTEXTS]--;
    return fk_leave(CUDA_SUCCESS);
}
/* ---- names ---------------------------------------------------------------------- */

static const struct {
    int code;
    const char *words;
} texts[] = {
    {CUDA_SUCCESS, "no error"},
    {CUDA_ERROR_INVALID_VALUE, "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU,
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
     "the provided PTX was compiled with an unsupported toolchain."},
    {CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
     "operation failed due to a previous error during capture"},
};

CUresult cuGetErrorString(CUresult error, const char **out)
{
    FAKE_CALL(cuGetErrorString);
    *out = NULL;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        if (texts[i].code == error)
            *out = texts[i].words;
    return fk_leave(*out != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}
/* ---- functions by name ---------------------------------------------------------- */

typedef void (*any_fn)(void);

#define ROW(name, since, newest, suffix, arguments)                                    \
    {#name, since, newest, (any_fn)name##suffix},
static const struct {
    const char *name;
    int since;
    int newest;
    any_fn function;
} table[] = {FAKE_CUDA_MAP(ROW)};

/* *how: 0 found, 1 unknown, 2 the version is too low, as in CUDA. */
CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags,
                             int *how)
{
    int found = 1;
    FAKE_CALL(cuGetProcAddress);
    (void)flags;
    *out = NULL;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (strcmp(table[i].name, name) != 0 || fk_is_hidden(name) ||
            table[i].since > fk.options.driver)
            continue;
        found = version < table[i].since ? 2 : 0;
        if (found == 0 && version < table[i].newest)
            fk_error("cuGetProcAddress: %s of CUDA %d is an old variant, which takes "
                     "other arguments",
                     name, version);
        if (found == 0)
            memcpy(out, &table[i].function, sizeof *out);
    }
    if (how != NULL)
        *how = found;
    return fk_leave(found == 0 || how != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
}

/* The variant of CUDA 11.3, without the last argument. */
FAKE_EXPORT CUresult(cuGetProcAddress)(const char *name, void **out, int version,
                                       uint64_t flags);
CUresult(cuGetProcAddress)(const char *name, void **out, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
