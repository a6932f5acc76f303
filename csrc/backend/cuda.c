/* cuda.c - one device's memory, events and moves.
 *
 * The calls of every step (moves, event_record, event_wait) only enqueue: they make the
 * device's context current if it is not, which costs one query, and call the driver.
 * Calls that could wait for the device (allocate and free memory, create and query
 * events) are forbidden while another thread captures; they run in a scope that relaxes
 * this thread's capture mode.
 *
 * The backends of a process are in a list, so that all worlds on a device share one
 * side stream.  A forked child inherits them but cannot use CUDA: there `destroy` does
 * nothing.
 */
#include "cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include "core/alloc.h"
#include "kernels.h"

enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 }; /* CUdevice_attribute */
enum { EVENT_DISABLE_TIMING = 2, CAPTURE_RELAXED = 2 };

typedef struct cuda_backend {
    pl_backend super;
    const pli_driver *driver;
    int ordinal;
    pid_t pid;
    int n_users; /* under lock */
    struct cuda_backend *next;
    pli_cu_device device;
    pli_cu_context context; /* NULL: not retained */
    pli_cu_stream side;
    pli_kernels *kernels;
} cuda_backend;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cuda_backend *all_backends; /* under lock */

static cuda_backend *as_cuda(pl_backend *backend)
{
    return (cuda_backend *)backend;
}

static pli_cu_stream stream_as_cu(pl_stream *stream)
{
    return (pli_cu_stream)(void *)stream;
}

static pli_cu_memory memory_as_cu(const void *memory)
{
    return (pli_cu_memory)(uintptr_t)memory;
}

static pli_cu_event event_as_cu(pl_event *event)
{
    return (pli_cu_event)(void *)event;
}

/* ---- the context, in this thread ------------------------------------------------ */

/* Makes the context current; *is_pushed: whether another one was current before. */
static pl_status make_current(const cuda_backend *self, int *is_pushed)
{
    pl_status st = PL_OK;
    pli_cu_context current = NULL;
    PL_CUDA(self->driver, cuCtxGetCurrent(&current), "asking for the CUDA context");
    if (current != self->context)
        PL_CUDA(self->driver, cuCtxPushCurrent(self->context),
                "making the CUDA context current");
    *is_pushed = current != self->context;
done:
    return st;
}

static void give_back(const cuda_backend *self, int is_pushed)
{
    pli_cu_context ours = NULL;
    if (is_pushed)
        (void)self->driver->cuCtxPopCurrent(&ours);
}

pl_status pli_cuda_enter(pl_backend *backend, pli_cuda_scope *out)
{
    pl_status st = PL_OK;
    const cuda_backend *const self = as_cuda(backend);
    pli_cuda_scope scope = {.capture_mode = CAPTURE_RELAXED};
    PL_TRY(make_current(self, &scope.is_pushed));
    PL_CUDA(self->driver, cuThreadExchangeStreamCaptureMode(&scope.capture_mode),
            "relaxing the CUDA capture mode");
    *out = scope;
    scope.is_pushed = 0;
done:
    give_back(self, scope.is_pushed);
    return st;
}

void pli_cuda_leave(pl_backend *backend, const pli_cuda_scope *scope)
{
    const cuda_backend *const self = as_cuda(backend);
    int mode = scope->capture_mode;
    (void)self->driver->cuThreadExchangeStreamCaptureMode(&mode);
    give_back(self, scope->is_pushed);
}

/* ---- memory --------------------------------------------------------------------- */

static pl_status cuda_alloc(pl_backend *backend, size_t n_bytes, void **out)
{
    pl_status st = PL_OK;
    const cuda_backend *const self = as_cuda(backend);
    pli_cu_memory memory = 0;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result =
        self->driver->cuMemAlloc(&memory, n_bytes > 0 ? n_bytes : PL_CACHE_LINE);
    size_t n_free = 0, n_total = 0;
    if (result == PLI_CU_OUT_OF_MEMORY &&
        self->driver->cuMemGetInfo(&n_free, &n_total) != 0)
        n_total = 0;
    pli_cuda_leave(backend, &scope);
    if (result == PLI_CU_OUT_OF_MEMORY)
        PL_FAIL(PL_ENOMEM,
                "device %d is out of memory: %zu bytes for gradients and buffers are "
                "needed, and %zu of its %zu are free",
                self->ordinal, n_bytes, n_free, n_total);
    PL_TRY(pli_driver_check(self->driver, result, "allocating device memory"));
    *out = (void *)(uintptr_t)memory; /* NOLINT(performance-no-int-to-ptr) */
done:
    return st;
}

static void cuda_free(pl_backend *backend, void *memory)
{
    const cuda_backend *const self = as_cuda(backend);
    pli_cuda_scope scope;
    if (memory == NULL || self->pid != getpid() ||
        pli_cuda_enter(backend, &scope) != PL_OK)
        return;
    (void)self->driver->cuMemFree(memory_as_cu(memory));
    pli_cuda_leave(backend, &scope);
}

/* Waits for the copy whose enqueueing gave `result`, and leaves the scope. */
static pl_status finish_copy(pl_backend *backend, const pli_cuda_scope *scope,
                             pli_cu_result result, pli_cu_stream stream,
                             const char *doing)
{
    const pli_driver *const driver = as_cuda(backend)->driver;
    if (result == 0)
        result = driver->cuStreamSynchronize(stream);
    pli_cuda_leave(backend, scope);
    return pli_driver_check(driver, result, doing);
}

pl_status pli_cuda_read(pl_backend *backend, void *to, const void *from, size_t n_bytes,
                        pl_stream *stream)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = as_cuda(backend)->driver;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result = driver->cuMemcpyDtoHAsync(
        to, memory_as_cu(from), n_bytes, stream_as_cu(stream));
    PL_TRY(finish_copy(backend, &scope, result, stream_as_cu(stream),
                       "copying from the device"));
done:
    return st;
}

pl_status pli_cuda_write(pl_backend *backend, void *to, const void *from,
                         size_t n_bytes, pl_stream *stream)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = as_cuda(backend)->driver;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result = driver->cuMemcpyHtoDAsync(
        memory_as_cu(to), from, n_bytes, stream_as_cu(stream));
    PL_TRY(finish_copy(backend, &scope, result, stream_as_cu(stream),
                       "copying to the device"));
done:
    return st;
}

/* Uses a new stream, so that it does not wait for long work on others. */
pl_status pli_cuda_clear(pl_backend *backend, void *memory, size_t n_bytes)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = as_cuda(backend)->driver;
    pli_cu_stream stream = NULL;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    pli_cu_result result =
        driver->cuStreamCreateWithPriority(&stream, PLI_CU_STREAM_NON_BLOCKING, 0);
    if (result == 0)
        result = driver->cuMemsetD8Async(memory_as_cu(memory), 0, n_bytes, stream);
    st = finish_copy(backend, &scope, result, stream, "clearing device memory");
    if (stream != NULL)
        (void)driver->cuStreamDestroy(stream);
done:
    return st;
}

/* ---- moves ---------------------------------------------------------------------- */

/* Returns the status of `call`, made with the context current. */
#define IN_CONTEXT(backend, call)                                                      \
    do {                                                                               \
        const cuda_backend *const self = as_cuda(backend);                             \
        int is_pushed = 0;                                                             \
        pl_status st = make_current(self, &is_pushed);                                 \
        if (st == PL_OK)                                                               \
            st = (call);                                                               \
        give_back(self, is_pushed);                                                    \
        return st;                                                                     \
    } while (0)
#define LAUNCH(backend, name, ...)                                                     \
    IN_CONTEXT(backend, pli_kernels_##name(self->kernels, __VA_ARGS__))

static pl_status cuda_copy(pl_backend *backend, const pl_move *moves, size_t n_moves,
                           pl_stream *stream)
{
    LAUNCH(backend, copy, moves, n_moves, stream);
}

static pl_status cuda_add(pl_backend *backend, const pl_move *moves, size_t n_moves,
                          pl_stream *stream)
{
    LAUNCH(backend, add, moves, n_moves, stream);
}

static pl_status cuda_scale(pl_backend *backend, const pl_move *moves, size_t n_moves,
                            int numerator, int denominator, pl_stream *stream)
{
    LAUNCH(backend, scale, moves, n_moves, numerator, denominator, stream);
}

static pl_status cuda_sum(pl_backend *backend, const pl_rank_ranges *ranges,
                          pl_stream *stream)
{
    LAUNCH(backend, sum, ranges, stream);
}

pl_status pli_cuda_checksum(pl_backend *backend, const pli_piece *pieces,
                            size_t n_pieces, uint64_t *sums, pl_stream *stream)
{
    LAUNCH(backend, checksum, pieces, n_pieces, sums, stream);
}

pl_status pli_cuda_refresh(pl_backend *backend, const pli_piece *pieces,
                           size_t n_pieces, const uint64_t *sums,
                           const uint64_t *wanted_sums, pl_stream *stream)
{
    LAUNCH(backend, refresh, pieces, n_pieces, sums, wanted_sums, stream);
}

/* ---- order ---------------------------------------------------------------------- */

static pl_status cuda_event_create(pl_backend *backend, pl_event **out)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = as_cuda(backend)->driver;
    pli_cu_event event = NULL;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result = driver->cuEventCreate(&event, EVENT_DISABLE_TIMING);
    pli_cuda_leave(backend, &scope);
    PL_TRY(pli_driver_check(driver, result, "creating a CUDA event"));
    *out = (pl_event *)(void *)event;
done:
    return st;
}

static pl_status cuda_event_record(pl_backend *backend, pl_event *event,
                                   pl_stream *stream)
{
    IN_CONTEXT(backend, pli_driver_check(self->driver,
                                         self->driver->cuEventRecord(
                                             event_as_cu(event), stream_as_cu(stream)),
                                         "recording a CUDA event"));
}

static pl_status cuda_event_wait(pl_backend *backend, pl_event *event,
                                 pl_stream *stream)
{
    IN_CONTEXT(backend,
               pli_driver_check(self->driver,
                                self->driver->cuStreamWaitEvent(stream_as_cu(stream),
                                                                event_as_cu(event), 0),
                                "having a stream wait for a CUDA event"));
}

static pl_status cuda_event_is_done(pl_backend *backend, pl_event *event, int *out)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = as_cuda(backend)->driver;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result = driver->cuEventQuery(event_as_cu(event));
    pli_cuda_leave(backend, &scope);
    if (result != PLI_CU_NOT_READY)
        PL_TRY(pli_driver_check(driver, result, "querying a CUDA event"));
    *out = result == 0;
done:
    return st;
}

static void cuda_event_destroy(pl_backend *backend, pl_event *event)
{
    const cuda_backend *const self = as_cuda(backend);
    pli_cuda_scope scope;
    if (event == NULL || self->pid != getpid() ||
        pli_cuda_enter(backend, &scope) != PL_OK)
        return;
    (void)self->driver->cuEventDestroy(event_as_cu(event));
    pli_cuda_leave(backend, &scope);
}

static pl_status cuda_synchronize(pl_backend *backend, pl_stream *stream)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = as_cuda(backend)->driver;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result = driver->cuStreamSynchronize(stream_as_cu(stream));
    pli_cuda_leave(backend, &scope);
    PL_TRY(pli_driver_check(driver, result, "waiting for the device"));
done:
    return st;
}

pl_status pli_cuda_is_capturing(pl_backend *backend, pl_stream *stream, int *out)
{
    IN_CONTEXT(backend, pli_driver_check(self->driver,
                                         self->driver->cuStreamIsCapturing(
                                             stream_as_cu(stream), out),
                                         "asking whether a CUDA stream is captured"));
}

/* ---- two devices ---------------------------------------------------------------- */

/* A copy names both contexts.  This also reaches memory that torch maps itself
 * (expandable segments), where a copy by unified addresses fails without peer access.
 */
pl_status pli_cuda_copy_between(pli_cuda_place to, pli_cuda_place from, size_t n_bytes,
                                pl_backend *backend, pl_stream *stream)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = as_cuda(backend)->driver;
    pli_cuda_scope scope;
    const pl_move whole = {to.memory, from.memory, PL_U8, n_bytes};
    if (n_bytes == 0 || to.memory == from.memory)
        goto done;
    if (to.backend == from.backend && to.backend == backend) {
        PL_TRY(backend->ops->copy(backend, &whole, 1, stream));
        goto done;
    }
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result = driver->cuMemcpyPeerAsync(
        memory_as_cu(to.memory), as_cuda(to.backend)->context,
        memory_as_cu(from.memory), as_cuda(from.backend)->context, n_bytes,
        stream_as_cu(stream));
    pli_cuda_leave(backend, &scope);
    PL_TRY(pli_driver_check(driver, result, "copying between two devices"));
done:
    return st;
}

/* Gives `backend`'s device access to the peer's memory; sets *out if it has access. */
static pl_status give_access(pl_backend *backend, pl_backend *peer, int *out)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = as_cuda(backend)->driver;
    pli_cu_device device = 0, peer_device = 0;
    pli_cuda_scope scope;
    int can = 0;
    PL_CUDA(driver, cuDeviceGet(&device, as_cuda(backend)->ordinal),
            "opening a CUDA device");
    PL_CUDA(driver, cuDeviceGet(&peer_device, as_cuda(peer)->ordinal),
            "opening a CUDA device");
    PL_CUDA(driver, cuDeviceCanAccessPeer(&can, device, peer_device),
            "asking whether a device can access a peer's memory");
    if (!can)
        goto done;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result =
        driver->cuCtxEnablePeerAccess(as_cuda(peer)->context, 0);
    pli_cuda_leave(backend, &scope);
    /* Some devices refuse access, and each can access only so many others.  A context
     * that is no longer usable refuses too, and then the next call fails. */
    *out = result == 0 || result == PLI_CU_PEERS_ALREADY;
done:
    return st;
}

pl_status pli_cuda_join_peers(pl_backend *one, pl_backend *other, int *can_read)
{
    pl_status st = PL_OK;
    int ignored = 0;
    *can_read = one == other;
    if (one == other)
        goto done;
    PL_TRY(give_access(one, other, &ignored));
    PL_TRY(give_access(other, one, can_read));
done:
    return st;
}

pl_status pli_cuda_are_shared(pl_backend *backend, const pl_move *moves, size_t n_moves,
                              int *out)
{
    enum { IS_LEGACY = 10 }; /* CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE */
    pl_status st = PL_OK;
    const pli_driver *const driver = as_cuda(backend)->driver;
    pli_cuda_scope scope;
    int are_legacy = 1;
    PL_TRY(pli_cuda_enter(backend, &scope));
    for (size_t i = 0; i < n_moves && are_legacy; i++) {
        int is_legacy = 0; /* stays 0 if the driver returns an error */
        are_legacy = moves[i].n_elems == 0 ||
                     (driver->cuPointerGetAttribute(&is_legacy, IS_LEGACY,
                                                    memory_as_cu(moves[i].from)) == 0 &&
                      is_legacy);
    }
    pli_cuda_leave(backend, &scope);
    *out = are_legacy;
done:
    return st;
}

/* ---- life ----------------------------------------------------------------------- */

/* Frees what was created, and ignores the driver's errors. */
static void tear_down(cuda_backend *self)
{
    if (self->context != NULL) {
        pli_cuda_scope scope;
        const int is_inside = pli_cuda_enter(&self->super, &scope) == PL_OK;
        pli_kernels_unload(self->kernels);
        if (self->side != NULL)
            (void)self->driver->cuStreamDestroy(self->side);
        if (is_inside)
            pli_cuda_leave(&self->super, &scope);
        (void)self->driver->cuDevicePrimaryCtxRelease(self->device);
    }
    pli_free(self);
}

static void cuda_destroy(pl_backend *backend)
{
    cuda_backend *const self = as_cuda(backend);
    if (self->pid != getpid())
        return; /* a thread of the parent may hold the lock */
    (void)pthread_mutex_lock(&lock);
    if (--self->n_users == 0) {
        cuda_backend **at = &all_backends;
        while (*at != self)
            at = &(*at)->next;
        *at = self->next;
        tear_down(self);
    }
    (void)pthread_mutex_unlock(&lock);
}

static const pl_backend_ops cuda_ops = {
    .name = "cuda",
    .batching = PL_MOVE_BY_BUCKET,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .copy = cuda_copy,
    .add = cuda_add,
    .scale = cuda_scale,
    .sum = cuda_sum,
    .event_create = cuda_event_create,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_is_done = cuda_event_is_done,
    .event_destroy = cuda_event_destroy,
    .synchronize = cuda_synchronize,
    .destroy = cuda_destroy,
};

static pl_status find_device(cuda_backend *self)
{
    pl_status st = PL_OK;
    int n_devices = 0;
    PL_CUDA(self->driver, cuDeviceGetCount(&n_devices), "counting CUDA devices");
    if (self->ordinal < 0 || self->ordinal >= n_devices)
        PL_FAIL(PL_EINVAL,
                "device %d is out of range: the CUDA driver shows %d device%s here, "
                "counted from 0 (see CUDA_VISIBLE_DEVICES)",
                self->ordinal, n_devices, n_devices == 1 ? "" : "s");
    PL_CUDA(self->driver, cuDeviceGet(&self->device, self->ordinal),
            "opening a CUDA device");
done:
    return st;
}

/* Creates what lives in the context; called inside a scope. */
static pl_status furnish(cuda_backend *self, const char *nvrtc)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = self->driver;
    int major = 0, minor = 0, least = 0, greatest = 0;
    PL_CUDA(driver, cuDeviceGetAttribute(&major, CAPABILITY_MAJOR, self->device),
            "asking for a device's capability");
    PL_CUDA(driver, cuDeviceGetAttribute(&minor, CAPABILITY_MINOR, self->device),
            "asking for a device's capability");
    PL_TRY(pli_kernels_load(driver, major * 10 + minor, nvrtc, &self->kernels));
    PL_CUDA(driver, cuCtxGetStreamPriorityRange(&least, &greatest),
            "asking for the priorities of streams");
    PL_CUDA(
        driver,
        cuStreamCreateWithPriority(&self->side, PLI_CU_STREAM_NON_BLOCKING, greatest),
        "creating the stream for communication");
done:
    return st;
}

static pl_status create_locked(const pli_cuda_options *options,
                               const pli_driver *driver, cuda_backend **out)
{
    pl_status st = PL_OK;
    cuda_backend *self = NULL;
    pli_cuda_scope scope;
    PL_TRY(pli_calloc(1, sizeof *self, "CUDA backend", &self));
    self->super.ops = &cuda_ops;
    self->driver = driver;
    self->ordinal = options->device;
    self->pid = getpid();
    PL_TRY(find_device(self));
    PL_CUDA(driver, cuDevicePrimaryCtxRetain(&self->context, self->device),
            "starting a CUDA device");
    PL_TRY(pli_cuda_enter(&self->super, &scope));
    st = furnish(self, options->nvrtc);
    pli_cuda_leave(&self->super, &scope);
    PL_TRY(st);
    *out = self;
    self = NULL;
done:
    if (self != NULL)
        tear_down(self);
    return st;
}

pl_status pli_cuda_backend_create(const pli_cuda_options *options, pl_backend **out)
{
    pl_status st = PL_OK;
    const pli_driver *driver = NULL;
    PL_TRY(pli_driver_open(options->driver, &driver));
    (void)pthread_mutex_lock(&lock);
    cuda_backend *self = all_backends;
    while (self != NULL && (self->driver != driver || self->ordinal != options->device))
        self = self->next;
    if (self == NULL) {
        st = create_locked(options, driver, &self);
        if (st == PL_OK) {
            self->next = all_backends;
            all_backends = self;
        }
    }
    if (st == PL_OK) {
        self->n_users++;
        *out = &self->super;
    }
    (void)pthread_mutex_unlock(&lock);
done:
    return st;
}

void pli_cuda_backend_retain(pl_backend *backend)
{
    (void)pthread_mutex_lock(&lock);
    as_cuda(backend)->n_users++;
    (void)pthread_mutex_unlock(&lock);
}

int pli_cuda_device(const pl_backend *backend)
{
    return ((const cuda_backend *)backend)->ordinal;
}

const char *pli_cuda_kernels(const pl_backend *backend)
{
    return pli_kernels_origin(((const cuda_backend *)backend)->kernels);
}

const pli_driver *pli_cuda_driver(const pl_backend *backend)
{
    return ((const cuda_backend *)backend)->driver;
}

pl_stream *pli_cuda_side_stream(pl_backend *backend)
{
    return (pl_stream *)(void *)as_cuda(backend)->side;
}
