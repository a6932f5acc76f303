/* host_kernels.h - the kernels of csrc/backend/kernels.cu, compiled for the host.
 *
 * A launch runs its blocks one after the other, and a block its threads.  Any thread
 * may launch.  Each branch of the kernels that was ever taken is noted.
 */
#ifndef PLT_HOST_KERNELS_H
#define PLT_HOST_KERNELS_H

#include <stddef.h>

#define HOST_KERNEL_API __attribute__((visibility("default")))

typedef struct host_kernel {
    const char *name;
    size_t n_args;
    const size_t *arg_bytes;
    /* args[i]: the address of the i-th argument */
    void (*run)(void *const *args, const unsigned grid[3], const unsigned block[3]);
} host_kernel;

/* NULL if there is none of that name. */
HOST_KERNEL_API const host_kernel *host_kernel_find(const char *name);

/* The i-th address that a launch with this argument reads or writes from; 0 after the
 * last. */
HOST_KERNEL_API int host_kernel_address(const char *name, const void *argument,
                                        size_t i, const void **out);

/* Whether a launch since the last call has touched a vector that is not aligned. */
HOST_KERNEL_API int host_kernel_take_fault(void);

/* Bytes that refreshes have copied, in this process. */
HOST_KERNEL_API unsigned long long host_kernel_fetched(void);

/* The n-th branch's name and whether it was taken in this process; NULL after the
 * last. */
HOST_KERNEL_API const char *host_kernel_branch(size_t n, int *is_taken);

#endif
