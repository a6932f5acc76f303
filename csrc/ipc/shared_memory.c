/* shared_memory.c - a memfd, a wide mapping, and pages on demand; what becomes of it at
 * a fork.
 */
#include "shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/alloc.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* Addresses for memory that grows: asked for the most, content with the least. */
#define MOST_RESERVED_BYTES ((size_t)256 << 30)
#define LEAST_RESERVED_BYTES ((size_t)1 << 30)

#define WORTH_A_CHECK_BYTES ((size_t)16 << 20)

enum { PAGES_A_READ = 1024 };

/* All shared memory of this process but what grows.  Who remaps it holds the lock, so
 * that a fork finds each in one state. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t has_handlers = PTHREAD_ONCE_INIT;
static int handlers_error = 0;
static pli_shared_memory *memories = NULL;

static size_t round_to_pages(size_t n_bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (n_bytes + page - 1) / page * page;
}

static void *map_file(const pli_shared_memory *memory, size_t n_bytes)
{
    const int is_copied = memory->kind == PLI_MEMORY_COPIED;
    const int flags = (is_copied ? MAP_PRIVATE : MAP_SHARED) | MAP_NORESERVE;
    return PL_SYS_PTR(mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, flags, memory->fd, 0),
                      MAP_FAILED);
}

static pl_status map_memory(pli_shared_memory *memory)
{
    pl_status st = PL_OK;
    void *base = MAP_FAILED;
    const int grows = memory->kind == PLI_MEMORY_GROWS;
    size_t n_bytes = grows ? MOST_RESERVED_BYTES : memory->n_bytes;
    while (base == MAP_FAILED) {
        base = map_file(memory, n_bytes);
        if (base != MAP_FAILED)
            break;
        /* A limit of addresses (ulimit -v) may allow less. */
        if (!grows || n_bytes / 2 < LEAST_RESERVED_BYTES ||
            n_bytes / 2 < memory->n_bytes)
            PL_FAIL_ERRNO("cannot map %zu bytes of shared memory", n_bytes);
        n_bytes /= 2;
    }
    memory->base = base;
    memory->reserved_bytes = n_bytes;
    if (grows) { /* in a forked child, and in a core dump, nobody needs it */
        (void)madvise(base, n_bytes, MADV_DONTFORK);
        (void)madvise(base, n_bytes, MADV_DONTDUMP);
    }
done:
    return st;
}

/* A number of kilobytes of a file of the kernel's, in bytes; 0 where there is none. */
static size_t read_kilobytes(const char *text, const char *name)
{
    const char *at = strstr(text, name);
    return at != NULL ? strtoull(at + strlen(name), NULL, 10) << 10 : 0;
}

/* The kernel gives shared pages until a process must be killed for the last of them, so
 * what cannot be there is not asked for. */
static int is_there_memory(size_t n_bytes)
{
    char text[4096] = {0};
    if (n_bytes < WORTH_A_CHECK_BYTES)
        return 1;
    const int fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 1;
    /* The kernel answers at once. NOLINTNEXTLINE(clang-analyzer-unix.*) */
    const ssize_t n = read(fd, text, sizeof text - 1);
    (void)close(fd);
    const size_t available = read_kilobytes(text, "MemAvailable:");
    return n <= 0 || available == 0 ||
           n_bytes <= available + read_kilobytes(text, "SwapFree:");
}

static pl_status give_pages(const pli_shared_memory *memory, size_t from,
                            size_t n_bytes)
{
    pl_status st = PL_OK;
    int result = -1;
    if (!is_there_memory(n_bytes))
        PL_FAIL(
            PL_ENOMEM,
            "no memory for %zu bytes that processes are to share: less is available",
            n_bytes);
    do
        result = PL_SYS(fallocate(memory->fd, 0, (off_t)from, (off_t)n_bytes));
    while (result != 0 && errno == EINTR);
    if (result != 0)
        PL_FAIL(PL_ENOMEM, "no memory for %zu bytes that processes are to share",
                n_bytes);
    /* The pages are there; an older kernel maps them one by one when touched. */
    (void)madvise(memory->base + from, n_bytes, MADV_POPULATE_WRITE);
done:
    return st;
}

/* ---- forks ---------------------------------------------------------------------- */

static void before_fork(void)
{
    (void)pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    (void)pthread_mutex_unlock(&lock);
}

/* What the child writes is to stay in the child. */
static void after_fork_in_child(void)
{
    for (pli_shared_memory *memory = memories; memory != NULL; memory = memory->next) {
        memory->n_sharers = 0;
        if (memory->kind != PLI_MEMORY_FIXED)
            continue;
        memory->kind = PLI_MEMORY_COPIED;
        if (mmap(memory->base, memory->reserved_bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, memory->fd, 0) == MAP_FAILED)
            (void)mprotect(memory->base, memory->reserved_bytes, PROT_READ);
    }
    (void)pthread_mutex_unlock(&lock);
}

static void set_handlers(void)
{
    handlers_error = pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

static pl_status add_to_list(pli_shared_memory *memory)
{
    pl_status st = PL_OK;
    (void)pthread_once(&has_handlers, set_handlers);
    if (handlers_error != 0)
        PL_FAIL(PL_ENOMEM, "no memory for a handler of forks (pthread_atfork)");
    (void)pthread_mutex_lock(&lock);
    memory->next = memories;
    if (memories != NULL)
        memories->previous = memory;
    memories = memory;
    (void)pthread_mutex_unlock(&lock);
done:
    return st;
}

static void take_off_list(pli_shared_memory *memory)
{
    (void)pthread_mutex_lock(&lock);
    if (memory->previous != NULL)
        memory->previous->next = memory->next;
    else if (memories == memory)
        memories = memory->next;
    if (memory->next != NULL)
        memory->next->previous = memory->previous;
    (void)pthread_mutex_unlock(&lock);
}

pli_shared_memory *pli_shared_memory_find(const void *address)
{
    const char *at = address;
    (void)pthread_mutex_lock(&lock);
    pli_shared_memory *memory = memories;
    while (memory != NULL &&
           (at < memory->base || at >= memory->base + memory->n_bytes))
        memory = memory->next;
    int n = memory != NULL ? atomic_load(&memory->n_users) : 0;
    while (n > 0 && !atomic_compare_exchange_weak(&memory->n_users, &n, n + 1))
        continue;
    (void)pthread_mutex_unlock(&lock);
    return n > 0 ? memory : NULL; /* else its last user is about to leave */
}

/* ---- life ----------------------------------------------------------------------- */

static pl_status make_memory(pli_shared_memory_kind kind, pli_shared_memory **out)
{
    pl_status st = PL_OK;
    pli_shared_memory *memory = NULL;
    PL_TRY(pli_calloc(1, sizeof *memory, "shared memory", &memory));
    atomic_store(&memory->n_users, 1);
    memory->kind = kind;
    memory->fd = -1;
    memory->owner_pid = getpid();
    *out = memory;
done:
    return st;
}

pl_status pli_shared_memory_create(pli_shared_memory_kind kind, size_t n_bytes,
                                   pli_shared_memory **out)
{
    pl_status st = PL_OK;
    pli_shared_memory *memory = NULL;
    if (n_bytes > PTRDIFF_MAX / 2)
        PL_FAIL(PL_ENOMEM, "%zu bytes of shared memory are more than there can be",
                n_bytes);
    PL_TRY(make_memory(kind, &memory));
    memory->fd = PL_SYS(memfd_create("paceline", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (memory->fd < 0)
        PL_FAIL_ERRNO("cannot make shared memory (memfd_create)");
    if (PL_SYS(fcntl(memory->fd, F_ADD_SEALS, F_SEAL_SHRINK)) != 0)
        PL_FAIL_ERRNO("cannot seal the size of shared memory");
    memory->n_bytes = round_to_pages(n_bytes > 0 ? n_bytes : 1);
    PL_TRY(map_memory(memory));
    PL_TRY(give_pages(memory, 0, memory->n_bytes));
    if (kind != PLI_MEMORY_GROWS)
        PL_TRY(add_to_list(memory));
    *out = memory;
    memory = NULL;
done:
    pli_shared_memory_release(memory);
    return st;
}

pl_status pli_shared_memory_adopt(pli_shared_memory_kind kind, int fd,
                                  pli_shared_memory **out)
{
    pl_status st = PL_OK;
    pli_shared_memory *memory = NULL;
    struct stat file;
    PL_TRY(make_memory(kind, &memory));
    memory->fd = PL_SYS(fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (memory->fd < 0)
        PL_FAIL_ERRNO("cannot take over shared memory (descriptor %d)", fd);
    if (PL_SYS(fstat(memory->fd, &file)) != 0)
        PL_FAIL_ERRNO("cannot stat shared memory (descriptor %d)", fd);
    if (!S_ISREG(file.st_mode) || file.st_size == 0)
        PL_FAIL(PL_EINVAL, "descriptor %d is no shared memory", fd);
    memory->n_bytes = (size_t)file.st_size;
    PL_TRY(map_memory(memory));
    if (memory->n_bytes > memory->reserved_bytes)
        PL_FAIL(PL_ENOMEM, "%zu bytes of shared memory, but addresses for %zu only",
                memory->n_bytes, memory->reserved_bytes);
    if (kind != PLI_MEMORY_GROWS)
        PL_TRY(add_to_list(memory));
    *out = memory;
    memory = NULL;
done:
    pli_shared_memory_release(memory);
    return st;
}

pl_status pli_shared_memory_grow(pli_shared_memory *memory, size_t n_bytes)
{
    pl_status st = PL_OK;
    if (n_bytes <= memory->n_bytes)
        goto done;
    if (n_bytes > memory->reserved_bytes - memory->n_bytes)
        PL_FAIL(PL_ENOMEM,
                "%zu bytes to share, but this process could get addresses for %zu only "
                "(ulimit -v)",
                n_bytes, memory->reserved_bytes);
    /* Twice as much as before, so that it is seldom; just enough where that fails. */
    const size_t just_enough = round_to_pages(n_bytes);
    size_t larger = 2 * memory->n_bytes;
    if (larger < just_enough)
        larger = just_enough;
    st = give_pages(memory, memory->n_bytes, larger - memory->n_bytes);
    if (st != PL_OK && larger > just_enough) {
        larger = just_enough;
        st = give_pages(memory, memory->n_bytes, larger - memory->n_bytes);
    }
    if (st == PL_OK)
        memory->n_bytes = larger;
done:
    return st;
}

void pli_shared_memory_see_growth(pli_shared_memory *memory)
{
    struct stat file;
    if (PL_SYS(fstat(memory->fd, &file)) == 0 &&
        (size_t)file.st_size > memory->n_bytes &&
        (size_t)file.st_size <= memory->reserved_bytes)
        memory->n_bytes = (size_t)file.st_size;
}

void pli_shared_memory_shrink(pli_shared_memory *memory, size_t n_bytes)
{
    const size_t kept = round_to_pages(n_bytes);
    if (kept >= memory->n_bytes)
        return;
    if (PL_SYS(fallocate(memory->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                         (off_t)kept, (off_t)(memory->n_bytes - kept))) == 0)
        memory->n_bytes = kept;
}

/* ---- kinds ---------------------------------------------------------------------- */

/* Maps the memory of `fresh`, with the contents of `memory`, at its addresses. */
static pl_status move_to_locked(pli_shared_memory *memory, pli_shared_memory *fresh)
{
    pl_status st = PL_OK;
    const int fd = memory->fd;
    memcpy(fresh->base, memory->base, memory->n_bytes);
    if (PL_SYS_PTR(mmap(memory->base, memory->n_bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fresh->fd, 0),
                   MAP_FAILED) == MAP_FAILED)
        PL_FAIL_ERRNO("cannot share %zu bytes", memory->n_bytes);
    memory->fd = fresh->fd;
    memory->kind = PLI_MEMORY_FIXED;
    fresh->fd = fd;
done:
    return st;
}

static int is_shared(const pli_shared_memory *memory)
{
    (void)pthread_mutex_lock(&lock);
    const int is_so = memory->kind == PLI_MEMORY_FIXED;
    (void)pthread_mutex_unlock(&lock);
    return is_so;
}

pl_status pli_shared_memory_share(pli_shared_memory *memory)
{
    pl_status st = PL_OK;
    pli_shared_memory *fresh = NULL;
    if (!is_shared(memory))
        PL_TRY(pli_shared_memory_create(PLI_MEMORY_FIXED, memory->n_bytes, &fresh));
    (void)pthread_mutex_lock(&lock);
    if (memory->kind != PLI_MEMORY_FIXED && fresh != NULL)
        st = move_to_locked(memory, fresh);
    if (st == PL_OK)
        memory->n_sharers++;
    (void)pthread_mutex_unlock(&lock);
done:
    pli_shared_memory_release(fresh);
    return st;
}

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

static pl_status make_own_locked(pli_shared_memory *memory)
{
    pl_status st = PL_OK;
    const size_t n_bytes = memory->reserved_bytes;
    if (!is_there_memory(n_bytes))
        PL_FAIL(PL_ENOMEM, "no memory for a copy of %zu bytes", n_bytes);
    PL_TRY(pli_pages_make_private(memory->base, n_bytes));
    memory->kind = PLI_MEMORY_OWN;
    pli_shared_memory_forget(memory);
done:
    return st;
}

pl_status pli_shared_memory_unshare(pli_shared_memory *memory)
{
    pl_status st = PL_OK;
    (void)pthread_mutex_lock(&lock);
    memory->n_sharers--;
    if (memory->kind == PLI_MEMORY_FIXED && memory->n_sharers <= 0)
        st = make_own_locked(memory);
    (void)pthread_mutex_unlock(&lock);
    return st;
}

void pli_shared_memory_share_ends(pli_shared_memory *memory)
{
    (void)pthread_mutex_lock(&lock);
    memory->n_sharers--;
    (void)pthread_mutex_unlock(&lock);
}

/* Whether an entry of /proc/self/pagemap is of a page that is this process's own: not
 * of a file, and in memory or swapped out. */
static int is_own_page(uint64_t entry)
{
    return (entry >> 61 & 1) == 0 && (entry >> 62 & 3) != 0;
}

/* Drops the own ones of pages [first, first + n). */
static void drop_own_pages(const pli_shared_memory *memory, const uint64_t *entries,
                           size_t first, size_t n, size_t page)
{
    for (size_t i = 0; i < n; i++) {
        const size_t begin = i;
        while (i < n && is_own_page(entries[i]))
            i++;
        if (i > begin)
            (void)madvise(memory->base + (first + begin) * page, (i - begin) * page,
                          MADV_DONTNEED);
    }
}

void pli_shared_memory_reload(const pli_shared_memory *memory)
{
    uint64_t entries[PAGES_A_READ];
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t n_pages = round_to_pages(memory->reserved_bytes) / page;
    if (memory->kind != PLI_MEMORY_COPIED)
        return;
    const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    for (size_t at = 0; at < n_pages;) {
        const size_t wanted = n_pages - at < PAGES_A_READ ? n_pages - at : PAGES_A_READ;
        const off_t from =
            (off_t)(((uintptr_t)memory->base / page + at) * sizeof *entries);
        const ssize_t got = pread(fd, entries, wanted * sizeof *entries, from);
        if (got < (ssize_t)sizeof *entries) { /* nobody tells: any may be its own */
            (void)madvise(memory->base + at * page, (n_pages - at) * page,
                          MADV_DONTNEED);
            break;
        }
        drop_own_pages(memory, entries, at, (size_t)got / sizeof *entries, page);
        at += (size_t)got / sizeof *entries;
    }
    if (fd >= 0)
        (void)close(fd);
}

void pli_shared_memory_retain(pli_shared_memory *memory)
{
    atomic_fetch_add(&memory->n_users, 1);
}

void pli_shared_memory_release(pli_shared_memory *memory)
{
    if (memory == NULL || atomic_fetch_sub(&memory->n_users, 1) > 1)
        return;
    /* A forked child has nothing there, or by now something of its own. */
    const int is_mapped =
        memory->kind != PLI_MEMORY_GROWS || memory->owner_pid == getpid();
    if (memory->kind != PLI_MEMORY_GROWS)
        take_off_list(memory);
    if (memory->base != NULL && is_mapped)
        (void)munmap(memory->base, memory->reserved_bytes);
    if (memory->fd >= 0)
        (void)close(memory->fd);
    pli_free(memory);
}

void pli_shared_memory_forget(pli_shared_memory *memory)
{
    if (memory->fd >= 0)
        (void)close(memory->fd);
    memory->fd = -1;
}
