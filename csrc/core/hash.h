/* hash.h - 64-bit hashes of bytes and of a few numbers.
 *
 * They do not resist keys that an attacker chooses.  Their values may change between
 * versions: all ranks run the same version, and a cached file of another is not used.
 */
#ifndef PLI_HASH_H
#define PLI_HASH_H

#include <stddef.h>
#include <stdint.h>

/* The finaliser of SplitMix64: every input bit affects every output bit. */
static inline uint64_t pli_hash_mix(uint64_t value)
{
    value = (value ^ value >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ value >> 27) * UINT64_C(0x94d049bb133111eb);
    return value ^ value >> 31;
}

/* Extends `hash` by `value`. */
static inline uint64_t pli_hash_with(uint64_t hash, uint64_t value)
{
    return pli_hash_mix(hash * UINT64_C(0x9e3779b97f4a7c15) ^ value);
}

/* The hash of n_bytes bytes. */
uint64_t pli_hash_bytes(const void *bytes, size_t n_bytes);

#endif
