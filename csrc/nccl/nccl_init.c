/* nccl_init.c - making a communicator, and trying it.
 *
 * NCCL may connect two ranks in the first operation that needs it, which then waits for
 * its peers on the host.  So one of each kind is done here, where all ranks wait
 * anyway, and what the first sum gives is checked: a machine whose GPUs cannot reach
 * one another's memory is known to give wrong numbers, and no error.
 */
#include <string.h>
#include <unistd.h>

#include "backend/cuda.h"
#include "core/alloc.h"
#include "core/backoff.h"
#include "core/config.h"
#include "nccl_state.h"

pl_status pli_nccl_new_id(const pli_nccl_library *library, pl_backend *backend,
                          char id[PLI_NCCL_ID_BYTES])
{
    pl_status st = PL_OK;
    pli_nccl_id made;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_nccl_result result = library->GetUniqueId(&made);
    pli_cuda_leave(backend, &scope);
    if (result != PLI_NCCL_SUCCESS)
        PL_TRY(pli_nccl_fail(library, NULL, result, "making an id"));
    memcpy(id, &made, PLI_NCCL_ID_BYTES);
done:
    return st;
}

/* ---- trying it ------------------------------------------------------------------ */

enum { BLOCKS_AT = 16 }; /* a cache line behind the sum */

/* A few elements of the device's, and what is done with them. */
typedef struct trial {
    pli_nccl *nccl;
    pl_stream *stream;
    pl_event *event;
    int32_t *memory; /* [0]: the sum; then a block a rank, and one more a rank */
} trial;

static int32_t *blocks_of(const trial *it)
{
    return it->memory + BLOCKS_AT;
}

static pl_status enqueue_one_of_each(const trial *it)
{
    pl_status st = PL_OK;
    const size_t n_ranks = (size_t)it->nccl->world_size;
    const pl_op sum = {.kind = PL_ALL_REDUCE, .dtype = PL_I32, .n_elems = 1};
    const pl_op spread = {.kind = PL_BROADCAST, .dtype = PL_I32, .n_elems = 1};
    const pl_op collect = {.kind = PL_ALL_GATHER, .dtype = PL_I32, .n_elems = n_ranks};
    const pli_nccl_swap swap = {.from = (const char *)blocks_of(it),
                                .to = (char *)(blocks_of(it) + n_ranks),
                                .from_stride_bytes = sizeof(int32_t),
                                .to_stride_bytes = sizeof(int32_t),
                                .n_bytes = sizeof(int32_t)};
    PL_TRY(pli_nccl_enqueue(it->nccl, &sum, it->memory, it->stream));
    PL_TRY(pli_nccl_enqueue(it->nccl, &spread, it->memory, it->stream));
    PL_TRY(pli_nccl_enqueue(it->nccl, &collect, blocks_of(it), it->stream));
    PL_TRY(pli_nccl_swap_blocks(it->nccl, &swap, it->stream));
done:
    return st;
}

static pl_status run_trial(const trial *it)
{
    pl_status st = PL_OK;
    const pli_nccl *nccl = it->nccl;
    pl_backend *backend = nccl->backend;
    const int32_t mine = nccl->rank;
    const int32_t expected = nccl->world_size * (nccl->world_size - 1) / 2;
    int32_t found = -1;
    pli_backoff waiting =
        pli_backoff_begin(nccl->deadline_ns, nccl->poll, nccl->context);
    PL_TRY(pli_cuda_write(backend, it->memory, &mine, sizeof mine, it->stream));
    PL_TRY(enqueue_one_of_each(it));
    PL_TRY(backend->ops->event_record(backend, it->event, it->stream));
    PL_TRY(pli_backend_await(backend, it->event, &waiting, "NCCL's first operation"));
    PL_TRY(pli_cuda_read(backend, &found, it->memory, sizeof found, it->stream));
    if (found != expected)
        PL_FAIL(PL_ESYS,
                "NCCL adds wrongly on this machine: %d came in place of %d (GPUs that "
                "cannot reach one another's memory? NCCL_P2P_DISABLE=1 may help)",
                found, expected);
done:
    return st;
}

static pl_status try_it(pli_nccl *self)
{
    pl_status st = PL_OK;
    const size_t n_bytes =
        PL_CACHE_LINE + 2 * sizeof(int32_t) * (size_t)self->world_size;
    void *memory = NULL;
    trial it = {.nccl = self, .stream = pli_cuda_side_stream(self->backend)};
    PL_TRY(self->backend->ops->alloc(self->backend, n_bytes, &memory));
    it.memory = memory;
    PL_TRY(self->backend->ops->event_create(self->backend, &it.event));
    PL_TRY(run_trial(&it));
done:
    if (st != PL_OK)
        pli_nccl_abort(self); /* or memory that is still in use would be freed */
    self->backend->ops->event_destroy(self->backend, it.event);
    self->backend->ops->free(self->backend, memory);
    return st;
}

/* ---- making it ------------------------------------------------------------------ */

static pl_status meet(pli_nccl *self, const char *id)
{
    pl_status st = PL_OK;
    static const char doing[] = "meeting the other ranks";
    const pli_nccl_library *lib = self->library;
    pli_nccl_config config = {.size = sizeof config,
                              .magic = (unsigned)PLI_NCCL_MAGIC,
                              .version = PLI_NCCL_CONFIG_VERSION,
                              .is_blocking = 0};
    pli_nccl_comm comm = NULL;
    pli_nccl_id as_nccl;
    pli_cuda_scope scope;
    memcpy(&as_nccl, id, sizeof as_nccl);
    PL_TRY(pli_cuda_enter(self->backend, &scope));
    const pli_nccl_result result =
        self->is_blocking
            ? lib->CommInitRank(&comm, self->world_size, as_nccl, self->rank)
            : lib->CommInitRankConfig(&comm, self->world_size, as_nccl, self->rank,
                                      &config);
    if (!pli_nccl_is_taken(result))
        st = pli_nccl_fail(lib, NULL, result, doing);
    pli_cuda_leave(self->backend, &scope);
    PL_TRY(st);
    self->comm = comm; /* no other thread knows of it yet */
    PL_TRY(pli_nccl_settle(self, doing));
done:
    return st;
}

/* Whether calls are to return when they are done: where NCCL knows no other way, where
 * the user wants it, and for 2.26, whose other way has been reported to hang. */
static int is_to_block(const pli_nccl_library *library)
{
    return library->CommInitRankConfig == NULL || library->version / 100 == 226 ||
           pli_config_nccl_blocks();
}

pl_status pli_nccl_create(const pli_nccl_options *options, pli_nccl **out)
{
    pl_status st = PL_OK;
    pli_nccl *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self, "a communicator", &self));
    self->library = options->library;
    self->backend = options->backend;
    self->rank = options->rank;
    self->world_size = options->world_size;
    self->deadline_ns = options->deadline_ns;
    self->poll = options->poll;
    self->context = options->context;
    self->is_blocking = is_to_block(options->library);
    self->owner_pid = getpid();
    (void)pthread_mutex_init(&self->lock, NULL); /* cannot fail on Linux */
    PL_TRY(meet(self, options->id));
    PL_TRY(try_it(self));
    *out = self;
    self = NULL;
done:
    pli_nccl_destroy(self);
    return st;
}
