/* nccl_init.c - makes a communicator.
 *
 * NCCL's call waits for the other ranks, and never returns if one does not come.  So a
 * helper thread makes it, while the rank's thread checks its peers and signals.  If the
 * rank gives up, it leaves the helper behind; the helper then aborts any communicator
 * that it still gets.
 */
#include <string.h>
#include <unistd.h>

#include "backend/cuda.h"
#include "core/alloc.h"
#include "helper_thread.h"
#include "nccl_state.h"

static const char doing[] = "meeting the other ranks";

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

/* ---- in the helper thread ------------------------------------------------------- */

/* Arguments and result of the call that creates the communicator. */
typedef struct meeting {
    pli_nccl_library *library; /* retained */
    pl_backend *backend;       /* retained */
    int rank;
    int world_size;
    pli_nccl_id id;
    pli_nccl_comm comm;
} meeting;

static void free_meeting(meeting *self)
{
    if (self == NULL)
        return;
    pli_backend_destroy(self->backend);
    pli_nccl_library_release(self->library);
    pli_free(self);
}

static void drop_meeting(void *context)
{
    meeting *self = context;
    pli_cuda_scope scope;
    if (self->comm != NULL && pli_cuda_enter(self->backend, &scope) == PL_OK) {
        (void)self->library->CommAbort(self->comm);
        pli_cuda_leave(self->backend, &scope);
    }
    free_meeting(self);
}

static pl_status meet(void *context)
{
    pl_status st = PL_OK;
    meeting *self = context;
    const pli_nccl_library *lib = self->library;
    pli_cuda_scope scope;
    PL_TRY(pli_cuda_enter(self->backend, &scope));
    const pli_nccl_result result =
        lib->CommInitRank(&self->comm, self->world_size, self->id, self->rank);
    if (result != PLI_NCCL_SUCCESS)
        st = pli_nccl_fail(lib, NULL, result, doing);
    if (result != PLI_NCCL_SUCCESS && result != PLI_NCCL_IN_PROGRESS)
        self->comm = NULL; /* no function may be called on it */
    pli_cuda_leave(self->backend, &scope);
done:
    return st;
}

/* ---- in the rank's thread ------------------------------------------------------- */

static pl_status meet_aside(pli_nccl *self, const pli_nccl_options *options)
{
    pl_status st = PL_OK;
    meeting *met = NULL;
    pli_helper *helper = NULL;
    pli_backoff waiting =
        pli_backoff_begin(options->deadline_ns, options->poll, options->context);
    PL_TRY(pli_calloc(1, sizeof *met, "ranks that meet", &met));
    *met = (meeting){.library = options->library,
                     .backend = options->backend,
                     .rank = options->rank,
                     .world_size = options->world_size};
    memcpy(&met->id, options->id, sizeof met->id);
    pli_nccl_library_retain(met->library);
    pli_cuda_backend_retain(met->backend);
    PL_TRY(pli_helper_start(&(pli_helper_job){.run = meet,
                                              .drop = drop_meeting,
                                              .context = met,
                                              .name = "meets the other ranks"},
                            &helper));
    st = pli_helper_wait(helper, &waiting, doing);
    if (st == PL_OK)
        st = pli_helper_result(helper);
    if (pli_helper_end(helper) == PLI_HELPER_LEFT) {
        met = NULL;
        goto done;
    }
    /* No other thread has it yet.  There may be one even if this rank gave up, when the
     * ranks met at that moment: then destroying `self` aborts it. */
    self->comm = met->comm;
done:
    free_meeting(met);
    return st;
}

pl_status pli_nccl_create(const pli_nccl_options *options, pli_nccl **out)
{
    pl_status st = PL_OK;
    pli_nccl *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self, "a communicator", &self));
    *self = (pli_nccl){.library = options->library,
                       .backend = options->backend,
                       .rank = options->rank,
                       .world_size = options->world_size,
                       .deadline_ns = options->deadline_ns,
                       .owner_pid = getpid()};
    (void)pthread_mutex_init(&self->lock, NULL); /* cannot fail on Linux */
    PL_TRY(meet_aside(self, options));
    *out = self;
    self = NULL;
done:
    pli_nccl_destroy(self);
    return st;
}
