/* alloc.h - all allocations and system calls pass here, so that a test can fail any.
 *
 * In a build with -DPL_FAULTS a test can make the process's n-th allocation, or its
 * n-th guarded system call, fail.  In other builds the guards compile to nothing.
 */
#ifndef PLI_ALLOC_H
#define PLI_ALLOC_H

#include <stddef.h>

#include "status.h"

/* Zeroed memory for `count` elements of `size` bytes, aligned to a cache line.  The
 * caller frees *out by pli_free().  PL_ENOMEM names the purpose. */
pl_status pli_calloc(size_t count, size_t size, const char *purpose,
                     void *out) PL_MUST_USE;
void pli_free(void *memory);

/* Rounds up to whole cache lines. */
static inline size_t pli_line_up(size_t n_bytes)
{
    return (n_bytes + PL_CACHE_LINE - 1) / PL_CACHE_LINE * PL_CACHE_LINE;
}

/* Makes room for one more element: if all *capacity elements of the array that `array`
 * points to are used (`n` of them, of `size` bytes), moves it to a longer one. */
pl_status pli_grow(size_t n, size_t size, const char *purpose, size_t *capacity,
                   void *array) PL_MUST_USE;

#ifdef PL_FAULTS
enum pli_fault_kind { PLI_FAULT_ALLOC, PLI_FAULT_SYSCALL, PLI_N_FAULTS };

/* From now on the n-th call of this kind fails (1: the next); 0: no call fails. */
void pli_fault_arm(enum pli_fault_kind kind, long n);

/* The errno that a failing call sets from now on; ENOMEM at first. */
void pli_fault_set_errno(int error);

/* Calls of this kind since it was last armed. */
long pli_fault_count(enum pli_fault_kind kind);

/* Counts a call; non-zero, with errno set, if this call must fail. */
int pli_fault_hit(enum pli_fault_kind kind);

/* A system call that returns -1 on failure. */
#define PL_SYS(call) (pli_fault_hit(PLI_FAULT_SYSCALL) ? -1 : (call))
/* A system call that returns a pointer, or `bad` on failure. */
#define PL_SYS_PTR(call, bad) (pli_fault_hit(PLI_FAULT_SYSCALL) ? (bad) : (call))
#else
#define PL_SYS(call) (call)
#define PL_SYS_PTR(call, bad) (call)
#endif

#endif
