/* fake_peers.c - access between the memory of several devices in one process. */
#include "state.h"

enum { MOST_PEERS = 8 }; /* as without NVSwitch */

static int can_access(int device, int other)
{
    return device != other && fk.options.peers &&
           (fk.contexts[device].strange >> other & 1) == 0;
}

int fk_has_access(int device, int other)
{
    return device == other || other < 0 ||
           (fk.contexts[device].peers >> other & 1) != 0;
}

int fk_is_corrupt(int device, int other)
{
    return fk.options.corrupt_peers != 0 && device != other &&
           (fk_has_access(device, other) || fk_has_access(other, device));
}

void fake_part(int device, int other)
{
    (void)pthread_mutex_lock(&fk.lock);
    fk.contexts[device].strange |= 1U << other;
    fk.contexts[other].strange |= 1U << device;
    (void)pthread_mutex_unlock(&fk.lock);
}

static int is_there(CUdevice device)
{
    return device >= 0 && device < fk.options.devices;
}

CUresult cuDeviceCanAccessPeer(int *out, CUdevice device, CUdevice peer)
{
    FAKE_CALL(cuDeviceCanAccessPeer);
    if (!fk.is_initialized)
        return fk_leave(CUDA_ERROR_NOT_INITIALIZED);
    if (!is_there(device) || !is_there(peer))
        return fk_leave(CUDA_ERROR_INVALID_DEVICE);
    *out = can_access(device, peer);
    return fk_leave(CUDA_SUCCESS);
}

/* Gives kernels of the current context access to the other's memory, not vice versa. */
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    CUcontext context = NULL;
    FAKE_CALL(cuCtxEnablePeerAccess);
    FAKE_TRY(fk_need_context(&context));
    if (flags != 0)
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    if (peer == NULL || peer->n_retained == 0 || peer == context)
        return fk_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (!can_access(context->device, peer->device))
        return fk_leave(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    if (fk.options.peers > 1)
        return fk_leave(fk.options.peers);
    if (fk_has_access(context->device, peer->device))
        return fk_leave(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    if (__builtin_popcount(context->peers) >= MOST_PEERS)
        return fk_leave(CUDA_ERROR_TOO_MANY_PEERS);
    context->peers |= 1U << peer->device;
    return fk_leave(CUDA_SUCCESS);
}
