/* shared_memory.h - memory that two processes share, and that grows without being
 * mapped anew.
 *
 * It is one memfd, mapped over a range of addresses far larger than the file:
 *
 *     base                base + n_bytes                     base + reserved_bytes
 *     |=== the file's pages ===|- - - - - addresses alone - - - - -|
 *
 * Growing gives the file more pages (an error where there is no memory, never a
 * SIGBUS); both sides see them at once at the addresses that they have.  Shrinking
 * takes pages away, and leaves the file as long as it is.  Addresses beyond the file
 * cost nothing and count nowhere.
 *
 * Its users are counted: views of it keep it mapped.
 *
 * FIXED memory changes its kind, at the same addresses and with the same contents:
 *
 *     FIXED --- the process forks, in the child ---> COPIED
 *     FIXED --- pli_shared_memory_unshare -----------------> OWN
 *     FIXED <-- pli_shared_memory_share -------------------- COPIED, OWN
 */
#ifndef PLI_SHARED_MEMORY_H
#define PLI_SHARED_MEMORY_H

#include <stdatomic.h>

#include "core/status.h"

typedef enum pli_shared_memory_kind {
    PLI_MEMORY_GROWS,  /* a large range; absent in forked children */
    PLI_MEMORY_FIXED,  /* just its bytes, with pages */
    PLI_MEMORY_COPIED, /* a peer's FIXED one: what is written here reaches nobody */
    PLI_MEMORY_OWN,    /* this process's alone, without a descriptor */
} pli_shared_memory_kind;

typedef struct pli_shared_memory {
    atomic_int n_users;
    pli_shared_memory_kind kind;
    int fd; /* -1: forgotten */
    int owner_pid;
    char *base;
    size_t reserved_bytes;
    size_t n_bytes;                     /* with pages, as far as this process knows */
    int n_sharers;                      /* see pli_shared_memory_share() */
    struct pli_shared_memory *previous; /* of all but those that grow */
    struct pli_shared_memory *next;
} pli_shared_memory;

/* New memory of at least n_bytes, zeroed; the caller's share is for
 * pli_shared_memory_release(). */
pl_status pli_shared_memory_create(pli_shared_memory_kind kind, size_t n_bytes,
                                   pli_shared_memory **out) PL_MUST_USE;

/* Maps what a peer made.  The descriptor stays the caller's. */
pl_status pli_shared_memory_adopt(pli_shared_memory_kind kind, int fd,
                                  pli_shared_memory **out) PL_MUST_USE;

/* Makes it at least n_bytes.  A failure changes nothing. */
pl_status pli_shared_memory_grow(pli_shared_memory *memory, size_t n_bytes) PL_MUST_USE;

/* Finds out how large the other side has made it. */
void pli_shared_memory_see_growth(pli_shared_memory *memory);

/* Gives the kernel back what lies beyond n_bytes, rounded up to pages. */
void pli_shared_memory_shrink(pli_shared_memory *memory, size_t n_bytes);

/* Drops what this process has written into COPIED memory, so that it shows the peer's
 * memory again.  The cost is 8 us a MiB where nothing was written. */
void pli_shared_memory_reload(const pli_shared_memory *memory);

/* Makes FIXED what is not; its contents are copied, and its other side is
 * another one than before.  Each success is for one pli_shared_memory_unshare(). Nobody
 * may write meanwhile. */
pl_status pli_shared_memory_share(pli_shared_memory *memory) PL_MUST_USE;

/* Gives pages of its own to FIXED memory that nobody else has shared, and closes its
 * descriptor.  Nobody may write meanwhile.  On failure it stays FIXED. */
pl_status pli_shared_memory_unshare(pli_shared_memory *memory) PL_MUST_USE;

/* What pli_shared_memory_unshare() does to the count alone. */
void pli_shared_memory_share_ends(pli_shared_memory *memory);

/* The memory of this process that an address is in, retained; NULL: none, or one
 * that grows. */
pli_shared_memory *pli_shared_memory_find(const void *address);

/* One user more, and one less; from any thread.  NULL may be released. */
void pli_shared_memory_retain(pli_shared_memory *memory);
void pli_shared_memory_release(pli_shared_memory *memory);

/* Turns a mapping's pages into private ones, in place. */
pl_status pli_pages_make_private(void *base, size_t n_bytes) PL_MUST_USE;

/* In a forked child: closes its copy of the descriptor. */
void pli_shared_memory_forget(pli_shared_memory *memory);

#endif
