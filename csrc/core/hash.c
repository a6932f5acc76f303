/* hash.c - hashes bytes in four lanes, and mixes the lanes at the end. */
#include "hash.h"

#include <string.h>

enum { N_LANES = 4 };
#define BLOCK_BYTES (N_LANES * sizeof(uint64_t))

uint64_t pli_hash_bytes(const void *bytes, size_t n_bytes)
{
    /* Separate lanes: the multiplications of one need not wait for another's. */
    uint64_t lanes[N_LANES] = {1, 2, 3, 4};
    uint64_t block[N_LANES];
    const unsigned char *at = bytes;
    for (; n_bytes >= BLOCK_BYTES; at += BLOCK_BYTES, n_bytes -= BLOCK_BYTES) {
        memcpy(block, at, BLOCK_BYTES);
        for (int lane = 0; lane < N_LANES; lane++)
            lanes[lane] = (lanes[lane] ^ block[lane]) * UINT64_C(0x9e3779b97f4a7c15) +
                          (lanes[lane] >> 32);
    }
    uint64_t hash = n_bytes;
    memset(block, 0, BLOCK_BYTES);
    memcpy(block, at, n_bytes);
    for (int lane = 0; lane < N_LANES; lane++)
        hash = pli_hash_mix(hash ^ pli_hash_mix(lanes[lane]) ^ block[lane]);
    return hash;
}
