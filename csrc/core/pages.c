/* pages.c - replaces a shared mapping by a private copy. */
#include "pages.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "alloc.h"

/* Writes to each private page of the file, which makes the kernel copy it. */
static pl_status map_privately(void *base, size_t n_bytes, int fd, off_t at)
{
    pl_status st = PL_OK;
    const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    if (PL_SYS_PTR(mmap(base, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
                        fd, at),
                   MAP_FAILED) == MAP_FAILED)
        PL_FAIL_ERRNO("no memory for a private copy of %zu bytes", n_bytes);
    for (size_t i = 0; i < n_bytes; i += page_bytes)
        (void)atomic_fetch_or((atomic_char *)base + i, 0);
done:
    return st;
}

pl_status pli_pages_make_private(void *base, size_t n_bytes, int fd, off_t at)
{
    pl_status st = PL_OK;
    if (fd >= 0)
        return map_privately(base, n_bytes, fd, at);
    void *copy = PL_SYS_PTR(
        mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
        MAP_FAILED);
    if (copy == MAP_FAILED)
        PL_FAIL_ERRNO("no memory for a private copy of %zu bytes", n_bytes);
    memcpy(copy, base, n_bytes);
    if (PL_SYS_PTR(mremap(copy, n_bytes, n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, base),
                   MAP_FAILED) == MAP_FAILED)
        PL_FAIL_ERRNO("cannot make %zu bytes of shared memory private", n_bytes);
    copy = MAP_FAILED;
done:
    if (copy != MAP_FAILED)
        (void)munmap(copy, n_bytes);
    return st;
}
