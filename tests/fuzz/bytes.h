/* bytes.h - what the targets of tests/fuzz share: an input that is taken apart, and
 * what must hold after each.
 *
 * A target gives the bytes of an input to the code that reads them from another
 * process, by the same memory and sockets.  `make fuzz-bytes` has libFuzzer look for
 * inputs; tests/c/test_fuzz_corpus.c runs those that were kept.
 */
#ifndef PLT_BYTES_H
#define PLT_BYTES_H

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct bytes {
    const uint8_t *at;
    size_t n;
} bytes;

/* The first n of them, or all that there are. */
static inline bytes bytes_take(bytes *from, size_t n)
{
    const bytes taken = {from->at, n < from->n ? n : from->n};
    from->at += taken.n;
    from->n -= taken.n;
    return taken;
}

/* Writes the first n of them; what is missing stays as it is. */
static inline void bytes_copy(bytes *from, void *to, size_t n)
{
    const bytes taken = bytes_take(from, n);
    if (taken.n > 0)
        memcpy(to, taken.at, taken.n);
}

static inline unsigned bytes_number(bytes *from)
{
    uint8_t number = 0;
    bytes_copy(from, &number, 1);
    return number;
}

static inline void must(int is_so)
{
    if (!is_so)
        abort();
}

/* A file in memory, as long as is said. */
static inline int bytes_file(bytes content, size_t n_bytes)
{
    const int fd = memfd_create("bytes", MFD_CLOEXEC);
    must(fd >= 0 && ftruncate(fd, (off_t)n_bytes) == 0);
    must(pwrite(fd, content.at, content.n, 0) == (ssize_t)content.n);
    return fd;
}

/* The same before and after, where no descriptor is left open. */
static inline int n_descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 64; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

#endif
