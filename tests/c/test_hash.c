/* test_hash.c - hashes of bytes: each byte and the length count. */
#include <stdlib.h>

#include "check.h"
#include "core/hash.h"

enum { N_BYTES = 5000, MOST_BITS = 64, N_NUMBERS = 4000 };

static int compare(const void *left, const void *right)
{
    const uint64_t first = *(const uint64_t *)left, other = *(const uint64_t *)right;
    return (first > other) - (first < other);
}

static int all_differ(uint64_t *hashes, size_t n)
{
    qsort(hashes, n, sizeof *hashes, compare);
    for (size_t i = 1; i < n; i++)
        if (hashes[i] == hashes[i - 1])
            return 0;
    return 1;
}

TEST(each_byte_changes_the_hash)
{
    static unsigned char bytes[N_BYTES], copy[N_BYTES];
    static uint64_t hashes[N_BYTES + 1];
    for (size_t i = 0; i < N_BYTES; i++)
        copy[i] = bytes[i] = (unsigned char)(i * 7);
    hashes[N_BYTES] = pli_hash_bytes(bytes, N_BYTES);
    CHECK(pli_hash_bytes(copy, N_BYTES) == hashes[N_BYTES]);
    for (size_t i = 0; i < N_BYTES; i++) {
        bytes[i] ^= 1;
        hashes[i] = pli_hash_bytes(bytes, N_BYTES);
        bytes[i] ^= 1;
    }
    CHECK(all_differ(hashes, N_BYTES + 1));
}

TEST(each_length_has_a_hash_of_its_own)
{
    static const unsigned char zeros[200];
    uint64_t hashes[sizeof zeros + 1];
    for (size_t n = 0; n <= sizeof zeros; n++)
        hashes[n] = pli_hash_bytes(zeros, n);
    CHECK(all_differ(hashes, sizeof zeros + 1));
}

/* A bit count outside these bounds is 8 standard deviations off. */
TEST(each_bit_is_drawn_evenly)
{
    int n_set[MOST_BITS] = {0};
    for (uint64_t i = 0; i < N_NUMBERS; i++) {
        const uint64_t hash = pli_hash_bytes(&i, sizeof i);
        for (int bit = 0; bit < MOST_BITS; bit++)
            n_set[bit] += (int)(hash >> bit & 1);
    }
    for (int bit = 0; bit < MOST_BITS; bit++)
        if (!CHECK(abs(n_set[bit] - N_NUMBERS / 2) < 253))
            CHECK_MORE("bit %d: %d of %d", bit, n_set[bit], N_NUMBERS);
}
