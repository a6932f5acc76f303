/* hash.h - 64-bit numbers that stand for bytes, or for a few numbers.
 *
 * Not for keys that somebody else chooses.  The values may differ between versions: all
 * ranks run the same one, and a file of another one is taken for no file.
 */
#ifndef PLI_HASH_H
#define PLI_HASH_H

#include <stddef.h>
#include <stdint.h>

/* The finaliser of SplitMix64: every bit of the input moves every bit. */
static inline uint64_t pli_hash_mix(uint64_t value)
{
    value = (value ^ value >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ value >> 27) * UINT64_C(0x94d049bb133111eb);
    return value ^ value >> 31;
}

/* The hash of what `hash` stands for, and then `value`. */
static inline uint64_t pli_hash_with(uint64_t hash, uint64_t value)
{
    return pli_hash_mix(hash * UINT64_C(0x9e3779b97f4a7c15) ^ value);
}

/* Of all n_bytes. */
uint64_t pli_hash_bytes(const void *bytes, size_t n_bytes);

#endif
