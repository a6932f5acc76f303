/* secret.h - proofs of a secret for tests, in place of HMAC-SHA256: a hash under a key
 * that all ranks of a test have. */
#ifndef PLT_SECRET_H
#define PLT_SECRET_H

#include <stdint.h>

#include "comm/shm_init.h"

static inline pl_status secret_prove(void *context, const void *message, size_t n_bytes,
                                     unsigned char out[PLI_PROOF_BYTES])
{
    uint64_t hash = UINT64_C(0x9e3779b97f4a7c15);
    (void)context;
    for (size_t i = 0; i < n_bytes; i++)
        hash = (hash ^ ((const unsigned char *)message)[i]) * UINT64_C(0x100000001b3);
    for (int i = 0; i < PLI_PROOF_BYTES; i++) {
        hash = hash * UINT64_C(6364136223846793005) + 1;
        out[i] = (unsigned char)(hash >> 56);
    }
    return PL_OK;
}

#endif
