/* fake_memory.c - device memory: host memory with a watch on it.
 *
 * All of it lies in one range of addresses, from the bottom up.  Each allocation has
 * its own pages, with an inaccessible page behind; addresses are not reused before
 * fake_reset().  Freed memory is never accessible: SIGSEGV shows an operation that
 * touches it, or touches memory between allocations, and a host that touches protected
 * memory.  The page is then made accessible, and the program goes on.
 */
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

enum {
    MAX_ALLOCATIONS = 65536,
    ALIGNMENT = 512,
    POISON_NEW = 0xff, /* not a number in any type of float */
    POISON_SLACK = 0x3c,
};
#define REGION_BYTES ((size_t)1 << 36)

typedef struct allocation {
    char *base;
    size_t n_bytes;
    char *pages;
    size_t n_page_bytes;
    int device;
    int is_unshared;
    int is_dead;
} allocation;

typedef struct pinned {
    struct pinned *next;
    char *base;
    size_t n_bytes;
    int is_ours;
} pinned;

static char *region;
static size_t region_used;
static allocation allocations[MAX_ALLOCATIONS];
static size_t n_allocations;
static pinned *pins;
static int is_open; /* operations may touch it; used with options.protect only */
static int is_shown;
static struct sigaction old_action;

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* ---- lookup --------------------------------------------------------------------- */

static int is_device_memory(const void *at)
{
    return region != NULL && (const char *)at >= region &&
           (const char *)at < region + REGION_BYTES;
}

/* The allocation that holds the address, or the one below it; NULL if there is none. */
static allocation *find(const void *at)
{
    if (!is_device_memory(at))
        return NULL;
    size_t low = 0;
    size_t high = n_allocations;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (allocations[middle].pages <= (const char *)at)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 ? &allocations[low - 1] : NULL;
}

int fk_check_range(const void *at, size_t n_bytes, const char *what)
{
    const char *first = at;
    if (n_bytes == 0)
        return 1;
    if (!is_device_memory(at)) {
        if (!fk.options.foreign)
            fk_error("%s: %p is not device memory", what, at);
        return fk.options.foreign;
    }
    const allocation *it = find(first);
    if (it == NULL || first >= it->pages + it->n_page_bytes) {
        fk_error("%s: %p is in no allocation", what, at);
        return 0;
    }
    if (it->is_dead) {
        fk_error("%s: %p was freed", what, at);
        return 0;
    }
    if (first < it->base || first + n_bytes > it->base + it->n_bytes) {
        fk_error("%s: %zu bytes from byte %td on are not within the allocation's %zu",
                 what, n_bytes, first - it->base, it->n_bytes);
        return 0;
    }
    return 1;
}

int fk_check_copy(const fk_op *op)
{
    int is_fine = 1;
    if (op->is_to_device)
        is_fine = fk_check_range(op->to, op->n_bytes, op->what);
    if (op->is_from_device && is_fine)
        is_fine = fk_check_range(op->from, op->n_bytes, op->what);
    return is_fine;
}

/* ---- the watch ------------------------------------------------------------------ */

/* Runs in the thread that touched the memory. */
static void on_fault(int number, siginfo_t *info, void *context)
{
    char *at = info->si_addr;
    if (!is_device_memory(at)) {
        if ((old_action.sa_flags & SA_SIGINFO) != 0 && old_action.sa_sigaction != NULL)
            old_action.sa_sigaction(number, info, context);
        else
            (void)sigaction(number, &old_action, NULL);
        return;
    }
    const allocation *it = find(at);
    const long page = sysconf(_SC_PAGESIZE);
    const char *whose = is_open ? "an operation" : "the host";
    if (it == NULL || at >= it->pages + it->n_page_bytes)
        fk_error("%s touched %p, which is in no allocation", whose, (void *)at);
    else
        fk_error("%s touched byte %td of the %zu of %s", whose, at - it->base,
                 it->n_bytes, it->is_dead ? "freed device memory" : "device memory");
    (void)mprotect((void *)((uintptr_t)at / (size_t)page * (size_t)page), (size_t)page,
                   PROT_READ | PROT_WRITE);
}

static int reserve(void)
{
    if (region != NULL)
        return 1;
    void *memory = mmap(NULL, REGION_BYTES, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return 0;
    region = memory;
    const struct sigaction action = {.sa_sigaction = on_fault,
                                     .sa_flags = SA_SIGINFO | SA_NODEFER};
    (void)sigaction(SIGSEGV, &action, &old_action);
    return 1;
}

static void protect(int may_touch)
{
    for (size_t i = 0; i < n_allocations; i++)
        if (!allocations[i].is_dead)
            (void)mprotect(allocations[i].pages, allocations[i].n_page_bytes,
                           may_touch ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void fk_memory_open(void)
{
    if (!is_open && fk.options.protect && !is_shown)
        protect(1);
    is_open = 1;
}

void fk_memory_close(void)
{
    if (is_open && fk.options.protect && !is_shown)
        protect(0);
    is_open = 0;
}

void fake_show_memory(void)
{
    (void)pthread_mutex_lock(&fk.lock);
    fk_memory_open();
    is_shown = 1;
    (void)pthread_mutex_unlock(&fk.lock);
}

void fake_hide_memory(void)
{
    (void)pthread_mutex_lock(&fk.lock);
    is_shown = 0;
    is_open = 1;
    fk_memory_close();
    (void)pthread_mutex_unlock(&fk.lock);
}

/* ---- allocations ---------------------------------------------------------------- */

int fk_alloc(int device, size_t n_bytes, void **out)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t n_rounded = round_up(n_bytes, ALIGNMENT);
    const size_t n_page_bytes = round_up(n_rounded, page);
    struct CUctx_st *context = &fk.contexts[device];
    if (context->n_bytes + (int64_t)n_rounded > fk.options.capacity ||
        n_allocations == MAX_ALLOCATIONS || !reserve() ||
        region_used + n_page_bytes + page > REGION_BYTES)
        return CUDA_ERROR_OUT_OF_MEMORY;
    allocation *it = &allocations[n_allocations];
    *it = (allocation){.pages = region + region_used,
                       .n_page_bytes = n_page_bytes,
                       .n_bytes = n_bytes,
                       .device = device};
    if (mprotect(it->pages, n_page_bytes, PROT_READ | PROT_WRITE) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    it->base = it->pages + (n_page_bytes - n_rounded); /* its end meets the next page */
    memset(it->pages, POISON_SLACK, n_page_bytes);
    memset(it->base, POISON_NEW, n_bytes);
    region_used += n_page_bytes + page;
    n_allocations++;
    context->n_bytes += (int64_t)n_rounded;
    fk.n_live[FAKE_ALLOCATIONS]++;
    if (fk.options.protect && !is_open && !is_shown)
        (void)mprotect(it->pages, n_page_bytes, PROT_NONE);
    *out = it->base;
    return CUDA_SUCCESS;
}

static void check_slack(const allocation *it)
{
    for (const char *at = it->pages; at < it->pages + it->n_page_bytes; at++) {
        const int is_slack = at < it->base || at >= it->base + it->n_bytes;
        if (is_slack && *(const unsigned char *)at != POISON_SLACK) {
            fk_error("byte %td of an allocation of %zu was written", at - it->base,
                     it->n_bytes);
            return;
        }
    }
}

int fk_free(void *memory)
{
    allocation *it = find(memory);
    if (it == NULL || it->base != memory) {
        fk_error("%p was freed, which is no allocation", memory);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (it->is_dead) {
        fk_error("%p was freed twice", memory);
        return CUDA_ERROR_INVALID_VALUE;
    }
    fk_memory_open();
    check_slack(it);
    it->is_dead = 1;
    fk.contexts[it->device].n_bytes -= (int64_t)round_up(it->n_bytes, ALIGNMENT);
    fk.n_live[FAKE_ALLOCATIONS]--;
    (void)madvise(it->pages, it->n_page_bytes, MADV_DONTNEED);
    (void)mprotect(it->pages, it->n_page_bytes, PROT_NONE);
    return CUDA_SUCCESS;
}

int fk_op_address(const fk_op *op, size_t i, const void **out)
{
    switch (op->kind) {
    case FK_KERNEL:
        return fk_kernel_address(op, i, out);
    case FK_LAUNCH:
        return fk_launch_address(op, i, out);
    case FK_COPY:
    case FK_FILL:
        *out = i == 0 ? op->to : op->from;
        return i == 0 || (i == 1 && op->is_from_device);
    default:
        return 0;
    }
}

int fk_op_touches(const fk_op *op, const char *low, const char *high)
{
    const void *at = NULL;
    for (size_t i = 0; fk_op_address(op, i, &at); i++)
        if ((const char *)at >= low && (const char *)at < high)
            return 1;
    return 0;
}

const fk_op *fk_in_flight(const void *memory)
{
    const allocation *it = find(memory);
    for (const fk_op *op = fk.first; op != NULL && it != NULL; op = op->next)
        if (fk_op_touches(op, it->base, it->base + it->n_bytes))
            return op;
    return NULL;
}

int fk_device_of(const void *memory)
{
    const allocation *it = find(memory);
    return it != NULL ? it->device : -1;
}

int fk_owner_of(const void *at)
{
    const char *byte = at;
    const allocation *it = find(byte);
    return it != NULL && !it->is_dead && byte >= it->base &&
                   byte < it->base + it->n_bytes
               ? it->device
               : -1;
}

int fk_is_shared(const void *at)
{
    return fk_owner_of(at) >= 0 ? !find(at)->is_unshared : fk.options.foreign == 1;
}

void fake_unshare(const void *memory)
{
    (void)pthread_mutex_lock(&fk.lock);
    if (fk_owner_of(memory) >= 0)
        find(memory)->is_unshared = 1;
    (void)pthread_mutex_unlock(&fk.lock);
}

CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr memory)
{
    CUcontext context = NULL;
    const void *at = (const void *)(uintptr_t)memory;
    FAKE_CALL(cuPointerGetAttribute);
    FAKE_TRY(fk_need_context(&context));
    const int is_known = fk_owner_of(at) >= 0 || fk.options.foreign;
    const int is_legacy = fk_is_shared(at);
    if (attribute != CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE || !is_known)
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    memcpy(out, &is_legacy, sizeof is_legacy);
    return fk_leave(CUDA_SUCCESS);
}

FAKE_GETTER(int64_t, fake_bytes_in_use, (int device),
            (fk_torch_reuse(), fk.contexts[device].n_bytes))

void fk_memory_reset(void)
{
    if (region != NULL && region_used > 0) {
        (void)mprotect(region, region_used, PROT_NONE);
        (void)madvise(region, region_used, MADV_DONTNEED);
    }
    fk_torch_reset();
    region_used = 0;
    n_allocations = 0;
    is_open = 0;
    is_shown = 0;
    while (pins != NULL) {
        pinned *it = pins;
        pins = it->next;
        if (it->is_ours)
            free(it->base);
        free(it);
    }
}

/* ---- pinned memory -------------------------------------------------------------- */

int fk_is_pinned(const void *at)
{
    for (const pinned *it = pins; it != NULL; it = it->next)
        if ((const char *)at >= it->base && (const char *)at < it->base + it->n_bytes)
            return 1;
    return 0;
}

void fk_pin(void *memory, size_t n_bytes, int is_ours)
{
    pinned *it = fk_new(sizeof *it);
    *it =
        (pinned){.next = pins, .base = memory, .n_bytes = n_bytes, .is_ours = is_ours};
    pins = it;
    fk.n_live[FAKE_PINNED]++;
}

int fk_unpin(void *memory, int is_ours)
{
    for (pinned **at = &pins; *at != NULL; at = &(*at)->next) {
        pinned *it = *at;
        if (it->base != memory || it->is_ours != is_ours)
            continue;
        *at = it->next;
        if (is_ours)
            free(memory);
        free(it);
        fk.n_live[FAKE_PINNED]--;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}
