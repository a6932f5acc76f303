/* test_crc32c.c - checksums, by the processor's instructions and without. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "core/crc32c.h"

enum { N_BYTES = 100000, N_DRAWN = 400 };

static unsigned char bytes[N_BYTES];

static void fill(void)
{
    uint32_t state = 7;
    for (size_t i = 0; i < N_BYTES; i++) {
        state = state * 1664525 + 1013904223;
        bytes[i] = (unsigned char)(state >> 24);
    }
}

/* From RFC 3720, B.4, and the check value of the catalogue of CRCs. */
TEST(known_messages_have_their_known_checksums)
{
    unsigned char block[32];
    for (int which = 0; which < 2; which++) {
        uint32_t (*crc)(uint32_t, const void *, size_t) =
            which == 0 ? pli_crc32c : pli_crc32c_plain;
        CHECK(crc(0, "", 0) == 0);
        CHECK(crc(0, "123456789", 9) == 0xe3069283);
        memset(block, 0, sizeof block);
        CHECK(crc(0, block, sizeof block) == 0x8a9136aa);
        memset(block, 0xff, sizeof block);
        CHECK(crc(0, block, sizeof block) == 0x62a8ab43);
        for (unsigned char i = 0; i < sizeof block; i++)
            block[i] = i;
        CHECK(crc(0, block, sizeof block) == 0x46dd794e);
    }
}

TEST(instructions_and_table_agree_at_any_size_and_address)
{
    uint32_t state = 3;
    fill();
    for (size_t n = 0; n < 1100; n++)
        CHECK(pli_crc32c(1, bytes + n % 13, n) ==
              pli_crc32c_plain(1, bytes + n % 13, n));
    for (int i = 0; i < N_DRAWN; i++) {
        state = state * 1664525 + 1013904223;
        const size_t at = state % 64;
        const size_t n = (state >> 6) % (N_BYTES - 64);
        CHECK(pli_crc32c(state, bytes + at, n) ==
              pli_crc32c_plain(state, bytes + at, n));
    }
}

TEST(a_checksum_can_be_continued_anywhere)
{
    fill();
    const uint32_t whole = pli_crc32c(0, bytes, N_BYTES);
    for (size_t cut = 0; cut <= N_BYTES; cut += 997)
        CHECK(pli_crc32c(pli_crc32c(0, bytes, cut), bytes + cut, N_BYTES - cut) ==
              whole);
}

TEST(every_flipped_bit_changes_the_checksum)
{
    fill();
    const uint32_t whole = pli_crc32c(0, bytes, N_BYTES);
    for (size_t bit = 0; bit < (size_t)8 * N_BYTES; bit += 4099) {
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK(pli_crc32c(0, bytes, N_BYTES) != whole);
        bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
}
