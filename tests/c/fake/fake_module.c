/* fake_module.c - modules, and kernels that are functions of the host. */
#include "state.h"

#include "host_kernels.h"

static const fk_kernel *find_kernel(const char *name)
{
    for (const fk_kernel *it = fk.kernels; it != NULL; it = it->next)
        if (strcmp(it->name, name) == 0)
            return it;
    const host_kernel *found = host_kernel_find(name);
    if (found == NULL)
        return NULL;
    fk_kernel *it = fk_new(sizeof *it);
    (void)snprintf(it->name, sizeof it->name, "%s", name);
    it->n_args = found->n_args;
    it->arg_bytes = found->arg_bytes;
    it->run = found->run;
    it->is_ours = 1;
    it->next = fk.kernels;
    fk.kernels = it;
    return it;
}

void fake_register_kernel(const char *name, size_t n_args, const size_t *arg_bytes,
                          fake_kernel_fn run)
{
    fk_kernel *it = fk_new(sizeof *it);
    (void)snprintf(it->name, sizeof it->name, "%s", name);
    it->n_args = n_args;
    it->arg_bytes = arg_bytes;
    it->run = run;
    (void)pthread_mutex_lock(&fk.lock);
    it->next = fk.kernels;
    fk.kernels = it;
    (void)pthread_mutex_unlock(&fk.lock);
}

/* NVRTC's code names its architecture; a cubin runs on devices of the same major
 * version and the same or a later minor version. */
static int check_image(const char *image)
{
    int arch = 0;
    const int compute = fk.options.compute;
    if (image == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (sscanf(image, "fake cubin for --gpu-architecture=sm_%d", &arch) == 1)
        return arch / 10 == compute / 10 && arch <= compute
                   ? CUDA_SUCCESS
                   : CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (sscanf(image, "fake PTX for --gpu-architecture=compute_%d", &arch) == 1)
        return arch <= compute ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    CUcontext context = NULL;
    FAKE_CALL(cuModuleLoadData);
    FAKE_TRY(fk_need_context(&context));
    FAKE_TRY(fk_forbid_unsafe("cuModuleLoadData"));
    FAKE_TRY(check_image(image));
    CUmodule module = fk_new(sizeof *module);
    module->device = context->device;
    fk_object_add(&module->object, FAKE_MODULES);
    *out = module;
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuModuleUnload(CUmodule module)
{
    FAKE_CALL(cuModuleUnload);
    if (module == NULL || module->object.is_dead)
        return fk_leave(CUDA_ERROR_INVALID_HANDLE);
    FAKE_TRY(fk_forbid_unsafe("cuModuleUnload"));
    (void)fk_wait_device(module->device, "cuModuleUnload");
    fk_object_kill(&module->object);
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
    FAKE_CALL(cuModuleGetFunction);
    if (module == NULL || module->object.is_dead)
        return fk_leave(CUDA_ERROR_INVALID_HANDLE);
    const fk_kernel *kernel = find_kernel(name);
    if (kernel == NULL)
        return fk_leave(CUDA_ERROR_NOT_FOUND);
    if (fk.options.lazy_load)
        FAKE_TRY(fk_wait_device(module->device, "cuModuleGetFunction"));
    CUfunction function = fk_new(sizeof *function);
    function->module = module;
    function->kernel = kernel;
    fk_object_add(&function->object, FK_FUNCTION);
    *out = function;
    return fk_leave(CUDA_SUCCESS);
}

size_t fk_args_bytes(const fk_kernel *kernel)
{
    size_t n_bytes = 0;
    for (size_t i = 0; i < kernel->n_args; i++)
        n_bytes += (kernel->arg_bytes[i] + 15) / 16 * 16;
    return n_bytes;
}

/* Any word of the arguments of a test's kernel may be an address: such arguments have
 * no padding. */
int fk_kernel_address(const fk_op *op, size_t i, const void **out)
{
    if (op->kernel->is_ours)
        return host_kernel_address(op->kernel->name, op->args, i, out);
    if ((i + 1) * sizeof *out > fk_args_bytes(op->kernel))
        return 0;
    memcpy(out, op->args + i * sizeof *out, sizeof *out);
    return 1;
}

/* A context in which a kernel has failed cannot be used any more. */
static void fail(const fk_op *op, const char *why, int result)
{
    fk_error("%s: %s", op->kernel->name, why);
    fk.sticky = result;
}

int fk_kernel_may_run(const fk_op *op)
{
    const void *at = NULL;
    for (size_t i = 0; fk_kernel_address(op, i, &at); i++) {
        const int owner = fk_owner_of(at);
        if (fk_has_access(op->device, owner) &&
            (owner == op->device || owner < 0 || fk_is_shared(at)))
            continue;
        fail(op, "the memory is another device's, without access",
             CUDA_ERROR_ILLEGAL_ADDRESS);
        return 0;
    }
    return 1;
}

void fk_kernel_check(const fk_op *op)
{
    if (op->kernel->is_ours && host_kernel_take_fault())
        fail(op, "a vector is not aligned", CUDA_ERROR_MISALIGNED_ADDRESS);
}

static char *copy_args(const fk_kernel *kernel, void *const *arguments)
{
    char *args = fk_new(fk_args_bytes(kernel));
    char *at = args;
    for (size_t i = 0; i < kernel->n_args; i++) {
        memcpy(at, arguments[i], kernel->arg_bytes[i]);
        at += (kernel->arg_bytes[i] + 15) / 16 * 16;
    }
    return args;
}

static int check_launch(CUfunction function, const unsigned grid[3],
                        const unsigned block[3], void *const *arguments)
{
    if (function == NULL || function->object.is_dead ||
        function->module->object.is_dead)
        return CUDA_ERROR_INVALID_HANDLE;
    const uint64_t n_threads = (uint64_t)block[0] * block[1] * block[2];
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[0] > INT32_MAX ||
        grid[1] > 65535 || grid[2] > 65535 || n_threads == 0 || n_threads > 1024 ||
        block[2] > 64)
        return CUDA_ERROR_INVALID_VALUE;
    if (function->kernel->n_args > 0 && arguments == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    size_t n_bytes = 0;
    for (size_t i = 0; i < function->kernel->n_args; i++)
        n_bytes += function->kernel->arg_bytes[i];
    const size_t most = fk.options.driver >= 12010 ? 32764 : 4096;
    return n_bytes > most ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                        unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared_bytes, CUstream handle,
                        void **arguments, void **extra)
{
    const unsigned grid[3] = {grid_x, grid_y, grid_z};
    const unsigned block[3] = {block_x, block_y, block_z};
    CUstream stream = NULL;
    FAKE_CALL(cuLaunchKernel);
    FAKE_TRY(fk_stream(handle, &stream));
    FAKE_TRY(check_launch(function, grid, block, arguments));
    if (extra != NULL || shared_bytes > 49152)
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    if (function->module->device != stream->device ||
        fk_current()->device != stream->device)
        return fk_leave(CUDA_ERROR_INVALID_HANDLE);
    fk_op *op = fk_op_new(FK_KERNEL, stream->device, function->kernel->name);
    op->kernel = function->kernel;
    memcpy(op->grid, grid, sizeof grid);
    memcpy(op->block, block, sizeof block);
    op->args = copy_args(function->kernel, arguments);
    return fk_leave(fk_enqueue(op, stream));
}
