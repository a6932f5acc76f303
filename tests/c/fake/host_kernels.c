/* host_kernels.c - compiles kernels.cu as C, and calls its kernels.
 *
 * Every REACHED of the kernels puts its own note into one section of the program, so
 * that the list of branches is complete.
 */
#include "host_kernels.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef struct branch {
    const char *name;
    atomic_int is_taken;
} branch;

/* The linker's names for the ends of the section. */
extern branch __start_host_kernel_branches[]; /* NOLINT(bugprone-reserved-identifier) */
extern branch __stop_host_kernel_branches[];  /* NOLINT(bugprone-reserved-identifier) */

static _Thread_local unsigned block_number;

#define BLOCK block_number
/* A pointer to each note: the section is an array, whatever the notes' alignment. */
#define REACHED(words)                                                                 \
    do {                                                                               \
        static branch here                                                             \
            __attribute__((section("host_kernel_branches"), used)) = {words, 0};       \
        if (!atomic_load_explicit(&here.is_taken, memory_order_relaxed))               \
            atomic_store_explicit(&here.is_taken, 1, memory_order_relaxed);            \
    } while (0)

/* A vector that is not aligned makes a real kernel fail. */
static atomic_int has_fault;

static void *vec_at(const void *at, size_t alignment)
{
    static _Thread_local char elsewhere[64] __attribute__((aligned(64)));
    void *found = elsewhere;
    if ((uintptr_t)at % alignment == 0)
        memcpy(&found, &at, sizeof found); /* without its const */
    else
        atomic_store(&has_fault, 1);
    return found;
}
#define VEC_TOUCHED(at) vec_at((at), __alignof__(*(at)))

static atomic_ullong n_fetched;
#define FETCHED(n_bytes) ((void)atomic_fetch_add(&n_fetched, (n_bytes)))

#include "backend/kernels.cu"

#define KERNELS(X)                                                                     \
    X(pl_copy_small, pli_small_spans)                                                  \
    X(pl_copy_large, pli_large_spans)                                                  \
    X(pl_add_small, pli_small_spans)                                                   \
    X(pl_add_large, pli_large_spans)                                                   \
    X(pl_scale_small, pli_small_spans)                                                 \
    X(pl_scale_large, pli_large_spans)                                                 \
    X(pl_checksum_small, pli_small_spans)                                              \
    X(pl_checksum_large, pli_large_spans)                                              \
    X(pl_refresh_small, pli_small_spans)                                               \
    X(pl_refresh_large, pli_large_spans)                                               \
    X(pl_sum, pli_sum_span)

#define DEFINE_RUN(name, type)                                                         \
    static const size_t name##_bytes[1] = {sizeof(type)};                              \
    static void run_##name(void *const *args, const unsigned grid[3],                  \
                           const unsigned block[3])                                    \
    {                                                                                  \
        (void)block;                                                                   \
        for (block_number = 0; block_number < grid[0]; block_number++)                 \
            name((const type *)args[0]);                                               \
    }
KERNELS(DEFINE_RUN)

static const host_kernel kernels[] = {
#define ROW(name, type) {#name, 1, name##_bytes, run_##name},
    KERNELS(ROW)
#undef ROW
};

const host_kernel *host_kernel_find(const char *name)
{
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    return NULL;
}

int host_kernel_address(const char *name, const void *argument, size_t i,
                        const void **out)
{
    const pli_sum_span *sum = argument;
    const pli_large_spans *table = argument; /* a small one begins alike */
    if (strcmp(name, "pl_sum") == 0) {
        *out = i == 0 ? sum->to : sum->from;
        return i < 2;
    }
    if (strncmp(name, "pl_refresh", 10) == 0 && i < 2) {
        *out = i == 0 ? table->head.sums : table->head.wanted_sums;
        return 1;
    }
    if (strncmp(name, "pl_refresh", 10) == 0)
        i -= 2;
    if (i / 2 >= table->head.n_spans)
        return 0;
    *out = i % 2 == 0 ? table->spans[i / 2].to : table->spans[i / 2].from;
    return 1;
}

unsigned long long host_kernel_fetched(void)
{
    return atomic_load(&n_fetched);
}

int host_kernel_take_fault(void)
{
    return atomic_exchange(&has_fault, 0);
}

const char *host_kernel_branch(size_t n, int *is_taken)
{
    branch *const note = __start_host_kernel_branches + n;
    if (note >= __stop_host_kernel_branches)
        return NULL;
    *is_taken = atomic_load_explicit(&note->is_taken, memory_order_relaxed);
    return note->name;
}
