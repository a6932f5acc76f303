/* alloc.c - the one allocator, and the faults that tests inject. */
#include "alloc.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#ifdef PL_FAULTS
#include <stdatomic.h>

static atomic_long fault_at[PLI_N_FAULTS];
static atomic_long fault_seen[PLI_N_FAULTS];
static atomic_int fault_errno = ENOMEM;

void pli_fault_arm(enum pli_fault_kind kind, long n)
{
    atomic_store(&fault_seen[kind], 0);
    atomic_store(&fault_at[kind], n);
}

void pli_fault_set_errno(int error)
{
    atomic_store(&fault_errno, error);
}

long pli_fault_count(enum pli_fault_kind kind)
{
    return atomic_load(&fault_seen[kind]);
}

int pli_fault_hit(enum pli_fault_kind kind)
{
    const long now = atomic_fetch_add(&fault_seen[kind], 1) + 1;
    if (now != atomic_load(&fault_at[kind]))
        return 0;
    errno = atomic_load(&fault_errno);
    return 1;
}
#endif

pl_status pli_calloc(size_t count, size_t size, const char *purpose, void *out)
{
    pl_status st = PL_OK;
    void *memory = NULL;
    if (size != 0 && count > (SIZE_MAX - PL_CACHE_LINE) / size)
        PL_FAIL(PL_ENOMEM, "%s: %zu x %zu bytes exceed the address space", purpose,
                count, size);
    /* aligned_alloc needs a size that is a multiple of the alignment and not zero */
    const size_t bytes = pli_line_up(count * size + 1);
#ifdef PL_FAULTS
    if (pli_fault_hit(PLI_FAULT_ALLOC))
        PL_FAIL(PL_ENOMEM, "%s: no memory for %zu bytes (injected by a test)", purpose,
                bytes);
#endif
    memory = aligned_alloc(PL_CACHE_LINE, bytes);
    if (memory == NULL)
        PL_FAIL(PL_ENOMEM, "%s: no memory for %zu bytes", purpose, bytes);
    memset(memory, 0, bytes);
#ifdef __SANITIZE_ADDRESS__ /* so that it sees an access behind the last element */
    ASAN_POISON_MEMORY_REGION((char *)memory + count * size, bytes - count * size);
#endif
    memcpy(out, &memory, sizeof memory); /* out is the address of any pointer */
done:
    return st;
}

void pli_free(void *memory)
{
    free(memory);
}

pl_status pli_grow(size_t n, size_t size, const char *purpose, size_t *capacity,
                   void *array)
{
    pl_status st = PL_OK;
    void *old = NULL, *grown = NULL;
    if (n < *capacity)
        goto done;
    PL_TRY(pli_calloc(2 * n + 4, size, purpose, &grown));
    memcpy(&old, array, sizeof old);
    if (old != NULL && grown != NULL) /* the second test is for static analysis */
        memcpy(grown, old, n * size);
    pli_free(old);
    memcpy(array, &grown, sizeof grown);
    *capacity = 2 * n + 4;
done:
    return st;
}
