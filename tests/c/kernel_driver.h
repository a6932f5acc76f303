/* kernel_driver.h - a table of driver functions, just enough for kernels.c.
 *
 * A launch runs the host build of its kernel at once.  The program's one `driver_said`
 * counts the calls, and holds the failures that a test has ordered.
 */
#ifndef PLT_KERNEL_DRIVER_H
#define PLT_KERNEL_DRIVER_H

#include <stdio.h>
#include <string.h>

#include "backend/driver.h"
#include "backend/kernels.h"
#include "backend/kernels_table.h"
#include "fake/host_kernels.h"

static struct {
    int n_loads;
    int n_live_modules;
    int n_launches;
    unsigned long long n_blocks; /* of all launches */
    unsigned n_spans;            /* of the last launch of many spans */
    char kernel[32];             /* of the last launch */
    char image[64];              /* beginning of the last loaded image */
    /* orders */
    int load_results[2]; /* of the first load, and of later ones */
    const char *missing; /* a kernel that no module has */
    int launch_result;
    int is_idle; /* launches do nothing */
} driver_said;

static pli_cu_result driver_error_string(pli_cu_result error, const char **out)
{
    (void)error;
    *out = "words of the driver";
    return 0;
}

static pli_cu_result driver_load(pli_cu_module *out, const void *image)
{
    const int result = driver_said.load_results[driver_said.n_loads++ > 0];
    (void)snprintf(driver_said.image, sizeof driver_said.image, "%s",
                   (const char *)image);
    if (result == 0) {
        driver_said.n_live_modules++;
        *out = (pli_cu_module)(void *)&driver_said;
    }
    return result;
}

static pli_cu_result driver_unload(pli_cu_module module)
{
    (void)module;
    driver_said.n_live_modules--;
    return 0;
}

static pli_cu_result driver_get(pli_cu_function *out, pli_cu_module module,
                                const char *name)
{
    const host_kernel *found = host_kernel_find(name);
    (void)module;
    if (found == NULL ||
        (driver_said.missing != NULL && strcmp(driver_said.missing, name) == 0))
        return 500;
    *out = (pli_cu_function)(void *)found;
    return 0;
}

static pli_cu_result driver_launch(pli_cu_function function, unsigned grid_x,
                                   unsigned grid_y, unsigned grid_z, unsigned block_x,
                                   unsigned block_y, unsigned block_z,
                                   unsigned shared_bytes, pli_cu_stream stream,
                                   void **arguments, void **extra)
{
    const host_kernel *kernel = (const host_kernel *)(const void *)function;
    const unsigned grid[3] = {grid_x, grid_y, grid_z};
    const unsigned block[3] = {block_x, block_y, block_z};
    (void)stream;
    driver_said.n_launches++;
    driver_said.n_blocks += grid_x;
    (void)snprintf(driver_said.kernel, sizeof driver_said.kernel, "%s", kernel->name);
    if (strcmp(kernel->name, "pl_sum") != 0)
        driver_said.n_spans = ((const pli_spans_head *)arguments[0])->n_spans;
    if (grid_y != 1 || grid_z != 1 || block_x != PLI_THREADS || block_y != 1 ||
        block_z != 1 || shared_bytes != 0 || extra != NULL || grid_x == 0)
        return 1;
    if (driver_said.launch_result == 0 && !driver_said.is_idle)
        kernel->run(arguments, grid, block);
    if (host_kernel_take_fault())
        return 716; /* MISALIGNED_ADDRESS */
    return driver_said.launch_result;
}

static const pli_driver kernel_driver = {
    .version = 13000,
    .cuGetErrorString = driver_error_string,
    .cuModuleLoadData = driver_load,
    .cuModuleUnload = driver_unload,
    .cuModuleGetFunction = driver_get,
    .cuLaunchKernel = driver_launch,
};

#endif
