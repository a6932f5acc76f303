/* cuda_peers.c - peer access, and copies that work with and without it.
 *
 * A copy names both contexts.  This also reaches memory that torch maps itself
 * (expandable segments), where a copy by unified addresses fails without peer access.
 */
#include "cuda_peers.h"

pl_status pli_cuda_copy_between(pli_cuda_place to, pli_cuda_place from, size_t n_bytes,
                                pl_backend *by, pl_stream *stream)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = pli_cuda_driver(by);
    pli_cuda_scope scope;
    const pl_move whole = {to.memory, from.memory, PL_U8, n_bytes};
    if (n_bytes == 0 || to.memory == from.memory)
        goto done;
    if (to.backend == from.backend && to.backend == by) {
        PL_TRY(by->ops->copy(by, &whole, 1, stream));
        goto done;
    }
    PL_TRY(pli_cuda_enter(by, &scope));
    const pli_cu_result result = driver->cuMemcpyPeerAsync(
        pli_as_cu_memory(to.memory), pli_cuda_context(to.backend),
        pli_as_cu_memory(from.memory), pli_cuda_context(from.backend), n_bytes,
        pli_as_cu_stream(stream));
    pli_cuda_leave(by, &scope);
    PL_TRY(pli_driver_check(driver, result, "copying between two devices"));
done:
    return st;
}

/* Gives `backend`'s device access to the peer's memory; sets *out if it has access. */
static pl_status give_access(pl_backend *backend, pl_backend *peer, int *out)
{
    pl_status st = PL_OK;
    const pli_driver *const driver = pli_cuda_driver(backend);
    pli_cu_device device = 0, peer_device = 0;
    pli_cuda_scope scope;
    int can = 0;
    PL_CUDA(driver, cuDeviceGet(&device, pli_cuda_device(backend)),
            "opening a CUDA device");
    PL_CUDA(driver, cuDeviceGet(&peer_device, pli_cuda_device(peer)),
            "opening a CUDA device");
    PL_CUDA(driver, cuDeviceCanAccessPeer(&can, device, peer_device),
            "asking whether a device can access a peer's memory");
    if (!can)
        goto done;
    PL_TRY(pli_cuda_enter(backend, &scope));
    const pli_cu_result result =
        driver->cuCtxEnablePeerAccess(pli_cuda_context(peer), 0);
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
    const pli_driver *const driver = pli_cuda_driver(backend);
    pli_cuda_scope scope;
    int are_legacy = 1;
    PL_TRY(pli_cuda_enter(backend, &scope));
    for (size_t i = 0; i < n_moves && are_legacy; i++) {
        int is_legacy = 0; /* stays 0 if the driver returns an error */
        are_legacy =
            moves[i].n_elems == 0 ||
            (driver->cuPointerGetAttribute(&is_legacy, IS_LEGACY,
                                           pli_as_cu_memory(moves[i].from)) == 0 &&
             is_legacy);
    }
    pli_cuda_leave(backend, &scope);
    *out = are_legacy;
done:
    return st;
}
