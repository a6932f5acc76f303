/* crc32c.h - the CRC-32C (Castagnoli) of bytes, as in iSCSI, ext4 and Btrfs.
 *
 * It finds every change of up to 32 successive bits, and any other change but one in
 * 2^32.  It does not resist attackers: they can compute it.
 */
#ifndef PLI_CRC32C_H
#define PLI_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Extends `crc`, 0 at first, by n_bytes more bytes. */
uint32_t pli_crc32c(uint32_t crc, const void *bytes, size_t n_bytes);

/* The same without instructions for CRCs, for tests and old processors. */
uint32_t pli_crc32c_plain(uint32_t crc, const void *bytes, size_t n_bytes);

#endif
