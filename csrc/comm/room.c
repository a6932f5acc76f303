/* room.c - a memfd, a wide mapping, and pages on demand. */
#include "room.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../core/alloc.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* Addresses for a room that grows: asked for the most, content with the least. */
#define MOST_RESERVED_BYTES ((size_t)256 << 30)
#define LEAST_RESERVED_BYTES ((size_t)1 << 30)

#define WORTH_A_LOOK_BYTES ((size_t)16 << 20)

static size_t round_to_pages(size_t n_bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (n_bytes + page - 1) / page * page;
}

static void *map_shared(const pli_room *room, size_t n_bytes)
{
    return PL_SYS_PTR(mmap(NULL, n_bytes, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_NORESERVE, room->fd, 0),
                      MAP_FAILED);
}

static pl_status map_room(pli_room *room)
{
    pl_status st = PL_OK;
    void *base = MAP_FAILED;
    const int grows = room->kind == PLI_ROOM_GROWS;
    size_t n_bytes = grows ? MOST_RESERVED_BYTES : room->n_bytes;
    while (base == MAP_FAILED) {
        base = map_shared(room, n_bytes);
        if (base != MAP_FAILED)
            break;
        /* A limit of addresses (ulimit -v) may leave room for less. */
        if (!grows || n_bytes / 2 < LEAST_RESERVED_BYTES || n_bytes / 2 < room->n_bytes)
            PL_FAIL_ERRNO("cannot map %zu bytes of shared memory", n_bytes);
        n_bytes /= 2;
    }
    room->base = base;
    room->reserved_bytes = n_bytes;
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
    if (n_bytes < WORTH_A_LOOK_BYTES)
        return 1;
    const int fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 1;
    const ssize_t n = read(fd, text, sizeof text - 1);
    (void)close(fd);
    const size_t available = read_kilobytes(text, "MemAvailable:");
    return n <= 0 || available == 0 ||
           n_bytes <= available + read_kilobytes(text, "SwapFree:");
}

static pl_status give_pages(const pli_room *room, size_t from, size_t n_bytes)
{
    pl_status st = PL_OK;
    int result = -1;
    if (!is_there_memory(n_bytes))
        PL_FAIL(
            PL_ENOMEM,
            "no memory for %zu bytes that processes are to share: less is available",
            n_bytes);
    do
        result = PL_SYS(fallocate(room->fd, 0, (off_t)from, (off_t)n_bytes));
    while (result != 0 && errno == EINTR);
    if (result != 0)
        PL_FAIL(PL_ENOMEM, "no memory for %zu bytes that processes are to share",
                n_bytes);
    /* The pages are there; an older kernel maps them one by one when touched. */
    (void)madvise(room->base + from, n_bytes, MADV_POPULATE_WRITE);
done:
    return st;
}

static pl_status make_room(pli_room_kind kind, pli_room **out)
{
    pl_status st = PL_OK;
    pli_room *room = NULL;
    PL_TRY(pli_calloc(1, sizeof *room, "shared memory", &room));
    atomic_store(&room->n_users, 1);
    room->kind = kind;
    room->fd = -1;
    room->owner_pid = getpid();
    *out = room;
done:
    return st;
}

pl_status pli_room_create(pli_room_kind kind, size_t n_bytes, pli_room **out)
{
    pl_status st = PL_OK;
    pli_room *room = NULL;
    if (n_bytes > PTRDIFF_MAX / 2)
        PL_FAIL(PL_ENOMEM, "%zu bytes of shared memory are more than there can be",
                n_bytes);
    PL_TRY(make_room(kind, &room));
    room->fd = PL_SYS(memfd_create("paceline", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (room->fd < 0)
        PL_FAIL_ERRNO("cannot make shared memory (memfd_create)");
    if (PL_SYS(fcntl(room->fd, F_ADD_SEALS, F_SEAL_SHRINK)) != 0)
        PL_FAIL_ERRNO("cannot seal the size of shared memory");
    room->n_bytes = round_to_pages(n_bytes > 0 ? n_bytes : 1);
    PL_TRY(map_room(room));
    PL_TRY(give_pages(room, 0, room->n_bytes));
    *out = room;
    room = NULL;
done:
    pli_room_release(room);
    return st;
}

pl_status pli_room_adopt(pli_room_kind kind, int fd, pli_room **out)
{
    pl_status st = PL_OK;
    pli_room *room = NULL;
    struct stat file;
    PL_TRY(make_room(kind, &room));
    room->fd = PL_SYS(fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (room->fd < 0)
        PL_FAIL_ERRNO("cannot take over shared memory (descriptor %d)", fd);
    if (PL_SYS(fstat(room->fd, &file)) != 0)
        PL_FAIL_ERRNO("cannot look at shared memory (descriptor %d)", fd);
    if (!S_ISREG(file.st_mode) || file.st_size == 0)
        PL_FAIL(PL_EINVAL, "descriptor %d is no shared memory", fd);
    room->n_bytes = (size_t)file.st_size;
    PL_TRY(map_room(room));
    *out = room;
    room = NULL;
done:
    pli_room_release(room);
    return st;
}

pl_status pli_room_grow(pli_room *room, size_t n_bytes)
{
    pl_status st = PL_OK;
    if (n_bytes <= room->n_bytes)
        goto done;
    if (n_bytes > room->reserved_bytes - room->n_bytes)
        PL_FAIL(PL_ENOMEM,
                "%zu bytes to share, but this process could get addresses for %zu only "
                "(ulimit -v)",
                n_bytes, room->reserved_bytes);
    /* Twice as much as before, so that it is seldom; just enough where that fails. */
    const size_t just_enough = round_to_pages(n_bytes);
    size_t larger = 2 * room->n_bytes;
    if (larger < just_enough)
        larger = just_enough;
    st = give_pages(room, room->n_bytes, larger - room->n_bytes);
    if (st != PL_OK && larger > just_enough) {
        larger = just_enough;
        st = give_pages(room, room->n_bytes, larger - room->n_bytes);
    }
    if (st == PL_OK)
        room->n_bytes = larger;
done:
    return st;
}

void pli_room_hold(pli_room *room)
{
    atomic_fetch_add(&room->n_users, 1);
}

void pli_room_release(pli_room *room)
{
    if (room == NULL || atomic_fetch_sub(&room->n_users, 1) > 1)
        return;
    /* A forked child has nothing there, or by now something of its own. */
    const int is_mapped = room->kind == PLI_ROOM_FIXED || room->owner_pid == getpid();
    if (room->base != NULL && is_mapped)
        (void)munmap(room->base, room->reserved_bytes);
    if (room->fd >= 0)
        (void)close(room->fd);
    pli_free(room);
}

void pli_room_forget(pli_room *room)
{
    if (room->fd >= 0)
        (void)close(room->fd);
    room->fd = -1;
}
