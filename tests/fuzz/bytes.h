/* bytes.h - helpers of the targets of tests/fuzz: they take an input apart and check
 * what must hold after each one.
 *
 * A target passes the bytes of an input to code that reads data of another process, by
 * the same memory and sockets.  With `make fuzz-bytes`, libFuzzer searches for inputs;
 * tests/c/test_fuzz_corpus.c runs the kept ones.
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

/* Takes the first n bytes, or all if there are fewer. */
static inline bytes bytes_take(bytes *from, size_t n)
{
    const bytes taken = {from->at, n < from->n ? n : from->n};
    from->at += taken.n;
    from->n -= taken.n;
    return taken;
}

/* Writes the first n bytes; leaves the rest of `to` unchanged if there are fewer. */
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

/* Makes a file in memory of n_bytes, which begins with `content`. */
static inline int bytes_file(bytes content, size_t n_bytes)
{
    const int fd = memfd_create("bytes", MFD_CLOEXEC);
    must(fd >= 0 && ftruncate(fd, (off_t)n_bytes) == 0);
    must(pwrite(fd, content.at, content.n, 0) == (ssize_t)content.n);
    return fd;
}

/* Counts open descriptors: equal before and after unless one was left open. */
static inline int n_descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 64; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

#endif
