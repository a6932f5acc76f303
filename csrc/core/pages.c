/* pages.c - a private copy takes a mapping's place. */
#include "pages.h"

#include <string.h>
#include <sys/mman.h>

#include "alloc.h"

pl_status pli_pages_make_private(void *base, size_t n_bytes)
{
    pl_status st = PL_OK;
    void *copy = PL_SYS_PTR(
        mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
        MAP_FAILED);
    if (copy == MAP_FAILED)
        PL_FAIL_ERRNO("no memory for a copy of %zu bytes", n_bytes);
    memcpy(copy, base, n_bytes);
    if (PL_SYS_PTR(mremap(copy, n_bytes, n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, base),
                   MAP_FAILED) == MAP_FAILED)
        PL_FAIL_ERRNO("cannot put a copy of %zu bytes in its place", n_bytes);
    copy = MAP_FAILED;
done:
    if (copy != MAP_FAILED)
        (void)munmap(copy, n_bytes);
    return st;
}
