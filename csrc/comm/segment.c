/* segment.c - one memfd, mapped by every rank. */
#include "segment.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/alloc.h"

#define SEGMENT_MAGIC UINT64_C(0x656e696c65636170) /* "paceline" */
enum { SEGMENT_VERSION = 3 };

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static pl_status lay_out(int world_size, size_t arena_bytes, uint32_t ring_ops,
                         pli_shm_segment *out)
{
    /* The sizes below are sums and products of these two. */
    if (arena_bytes > PTRDIFF_MAX / ((size_t)world_size + 1)) {
        (void)pli_fail(PL_ENOMEM,
                       "%d x %zu bytes of shared memory exceed the address space",
                       world_size, arena_bytes);
        return PL_ENOMEM;
    }
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t n = (size_t)world_size;
    const size_t header_bytes =
        sizeof(pli_header) + n * sizeof(pli_rank) + n * ring_ops * sizeof(uint64_t);
    *out = (pli_shm_segment){
        .fd = -1,
        .world_size = world_size,
        .ring_ops = ring_ops,
        .arena_bytes = round_up(arena_bytes > 0 ? arena_bytes : 1, page),
        .arenas_at = round_up(header_bytes, page),
    };
    out->map_bytes = out->arenas_at + n * out->arena_bytes;
    return PL_OK;
}

static pl_status map_segment(pli_shm_segment *segment)
{
    pl_status st = PL_OK;
    const int flags = MAP_SHARED | (segment->fd < 0 ? MAP_ANONYMOUS : 0);
    void *base = PL_SYS_PTR(
        mmap(NULL, segment->map_bytes, PROT_READ | PROT_WRITE, flags, segment->fd, 0),
        MAP_FAILED);
    if (base == MAP_FAILED)
        PL_FAIL_ERRNO("cannot map %zu bytes of shared memory", segment->map_bytes);
    segment->base = base;
    segment->owner_pid = getpid();
done:
    return st;
}

static pl_status make_file(pli_shm_segment *segment)
{
    pl_status st = PL_OK;
    segment->fd = PL_SYS(memfd_create("paceline", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (segment->fd < 0)
        PL_FAIL_ERRNO("cannot make shared memory (memfd_create)");
    if (PL_SYS(ftruncate(segment->fd, (off_t)segment->map_bytes)) != 0)
        PL_FAIL_ERRNO("cannot size shared memory to %zu bytes", segment->map_bytes);
    if (PL_SYS(fcntl(segment->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) != 0)
        PL_FAIL_ERRNO("cannot seal the size of shared memory");
done:
    return st;
}

pl_status pli_segment_create(pli_segment_kind kind, int world_size, size_t arena_bytes,
                             uint32_t ring_ops, pli_shm_segment *out)
{
    pl_status st = PL_OK;
    pli_shm_segment segment = {.fd = -1};
    PL_TRY(lay_out(world_size, arena_bytes, ring_ops, &segment));
    if (kind == PLI_SEGMENT_FILE)
        PL_TRY(make_file(&segment));
    PL_TRY(map_segment(&segment));
    pli_header *header = pli_header_of(&segment);
    header->magic = SEGMENT_MAGIC;
    header->version = SEGMENT_VERSION;
    header->world_size = (uint32_t)world_size;
    header->ring_ops = ring_ops;
    header->arena_bytes = segment.arena_bytes;
    *out = segment;
    segment = (pli_shm_segment){.fd = -1};
done:
    pli_segment_fini(&segment);
    return st;
}

static pl_status check_header(const pli_shm_segment *segment)
{
    pl_status st = PL_OK;
    const pli_header *header = pli_header_of(segment);
    if (header->magic != SEGMENT_MAGIC || header->version != SEGMENT_VERSION)
        PL_FAIL(PL_EMISMATCH,
                "the ranks run different versions of paceline (shared memory has "
                "version %u, this rank expects %d): install the same one for all",
                header->version, SEGMENT_VERSION);
    if (header->world_size != (uint32_t)segment->world_size ||
        header->ring_ops != segment->ring_ops ||
        header->arena_bytes != segment->arena_bytes)
        PL_FAIL(PL_EMISMATCH,
                "the ranks ask for different shared memory: %u ranks of %zu bytes "
                "there, %d of %zu here",
                header->world_size, (size_t)header->arena_bytes, segment->world_size,
                segment->arena_bytes);
done:
    return st;
}

pl_status pli_segment_adopt(int fd, int world_size, size_t arena_bytes,
                            uint32_t ring_ops, pli_shm_segment *out)
{
    pl_status st = PL_OK;
    pli_shm_segment segment = {.fd = -1};
    struct stat file;
    PL_TRY(lay_out(world_size, arena_bytes, ring_ops, &segment));
    segment.fd = fd;
    if (PL_SYS(fstat(fd, &file)) != 0)
        PL_FAIL_ERRNO("cannot inspect the shared memory that a peer sent");
    if ((size_t)file.st_size != segment.map_bytes)
        PL_FAIL(PL_EMISMATCH,
                "the ranks ask for different shared memory: %zu bytes there, %zu here",
                (size_t)file.st_size, segment.map_bytes);
    PL_TRY(map_segment(&segment));
    PL_TRY(check_header(&segment));
    *out = segment;
    segment = (pli_shm_segment){.fd = -1};
done:
    if (st != PL_OK)
        segment.fd = -1; /* still owned by the caller */
    pli_segment_fini(&segment);
    return st;
}

pl_status pli_segment_populate(const pli_shm_segment *segment, int rank)
{
    pl_status st = PL_OK;
    const off_t at = (off_t)(segment->arenas_at + (size_t)rank * segment->arena_bytes);
    if (PL_SYS(madvise(pli_arena_of(segment, rank), segment->arena_bytes,
                       MADV_POPULATE_WRITE)) == 0)
        goto done;
    /* Older kernel: at least reserve the pages. */
    if (segment->fd < 0) {
        memset(pli_arena_of(segment, rank), 0, segment->arena_bytes);
        goto done;
    }
    if (PL_SYS(fallocate(segment->fd, 0, at, (off_t)segment->arena_bytes)) != 0)
        PL_FAIL_ERRNO("no memory for this rank's %zu bytes of shared gradients",
                      segment->arena_bytes);
done:
    return st;
}

void pli_segment_keep_from_children(const pli_shm_segment *segment, int rank)
{
    /* A child keeps its copy of this rank's own arena, because its parent's tensors
     * show gradients there.  If the call fails, it only costs the child memory. */
    char *own = pli_arena_of(segment, rank);
    char *end = segment->base + segment->map_bytes;
    (void)madvise(segment->base, (size_t)(own - segment->base), MADV_DONTFORK);
    if (own + segment->arena_bytes < end)
        (void)madvise(own + segment->arena_bytes,
                      (size_t)(end - own - (ptrdiff_t)segment->arena_bytes),
                      MADV_DONTFORK);
}

void pli_segment_enter(const pli_shm_segment *segment, int rank, int pid,
                       uint64_t process, uint32_t thread)
{
    pli_rank *state = pli_rank_of(segment, rank);
    atomic_store(&state->pid, pid);
    atomic_store(&state->process, process);
    atomic_store(&state->thread, thread);
    atomic_store(&state->life, PLI_PRESENT);
}

static off_t arena_offset(const pli_shm_segment *segment, int rank, size_t offset_bytes)
{
    return (off_t)(segment->arenas_at + (size_t)rank * segment->arena_bytes +
                   offset_bytes);
}

pl_status pli_segment_map_again(const pli_shm_segment *segment, int rank,
                                size_t offset_bytes, size_t bytes, void **out)
{
    pl_status st = PL_OK;
    const off_t at = arena_offset(segment, rank, offset_bytes);
    /* Without a file, mremap() with an old size of 0 maps the same pages again. */
    void *memory =
        segment->fd >= 0
            ? PL_SYS_PTR(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                              segment->fd, at),
                         MAP_FAILED)
            : PL_SYS_PTR(mremap(segment->base + at, 0, bytes, MREMAP_MAYMOVE),
                         MAP_FAILED);
    if (memory == MAP_FAILED)
        PL_FAIL_ERRNO("cannot map %zu bytes of gradients", bytes);
    (void)madvise(memory, bytes, 22 /* MADV_POPULATE_READ: no faults later */);
    *out = memory;
done:
    return st;
}

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

pl_status pli_segment_unshare(const pli_shm_segment *segment, int rank,
                              size_t offset_bytes, size_t bytes, void *memory)
{
    pl_status st = PL_OK;
    if (segment->fd >= 0)
        return map_privately(memory, bytes, segment->fd,
                             arena_offset(segment, rank, offset_bytes));
    void *copy = PL_SYS_PTR(
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
        MAP_FAILED);
    if (copy == MAP_FAILED)
        PL_FAIL_ERRNO("no memory for a private copy of %zu bytes", bytes);
    memcpy(copy, memory, bytes);
    if (PL_SYS_PTR(mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, memory),
                   MAP_FAILED) == MAP_FAILED)
        PL_FAIL_ERRNO("cannot make %zu bytes of shared memory private", bytes);
    copy = MAP_FAILED;
done:
    if (copy != MAP_FAILED)
        (void)munmap(copy, bytes);
    return st;
}

void pli_segment_fini(pli_shm_segment *segment)
{
    if (segment->base != NULL && segment->owner_pid != getpid())
        return;
    if (segment->base != NULL)
        (void)munmap(segment->base, segment->map_bytes);
    if (segment->fd >= 0)
        (void)close(segment->fd);
    *segment = (pli_shm_segment){.fd = -1};
}

void pli_segment_release(pli_shm_segment *segment)
{
    if (segment == NULL || atomic_fetch_sub(&segment->n_users, 1) > 1)
        return;
    pli_segment_fini(segment);
    pli_free(segment);
}

uint32_t pli_ring_ops(size_t n_ops)
{
    uint32_t ring_ops = 64;
    while (ring_ops < n_ops && ring_ops < UINT32_C(1) << 20)
        ring_ops *= 2;
    return ring_ops;
}
