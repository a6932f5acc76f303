/* room.h - memory that two processes share, and that grows without being mapped anew.
 *
 * A room is one memfd, mapped over a range of addresses far larger than the file:
 *
 *     base                base + n_bytes                     base + reserved_bytes
 *     |=== the file's pages ===|- - - - - addresses alone - - - - -|
 *
 * Growing gives the file more pages (an error where there is no memory, never a
 * SIGBUS); both sides see them at once at the addresses that they have.  The file never
 * shrinks.  Addresses beyond the file cost nothing and count nowhere.
 *
 * A room is counted: views of its memory keep it mapped.
 */
#ifndef PLI_ROOM_H
#define PLI_ROOM_H

#include <stdatomic.h>

#include "../core/status.h"

typedef enum pli_room_kind {
    PLI_ROOM_GROWS, /* a large range; absent in forked children */
    PLI_ROOM_FIXED, /* just its bytes, with pages; forked children see it too */
} pli_room_kind;

typedef struct pli_room {
    atomic_int n_users;
    pli_room_kind kind;
    int fd; /* -1: forgotten */
    int owner_pid;
    char *base;
    size_t reserved_bytes;
    size_t n_bytes; /* of the file, as far as this process knows */
} pli_room;

/* A new room of at least n_bytes, zeroed; the caller's share is for
 * pli_room_release(). */
pl_status pli_room_create(pli_room_kind kind, size_t n_bytes,
                          pli_room **out) PL_MUST_USE;

/* Maps a room that a peer made.  The descriptor stays the caller's. */
pl_status pli_room_adopt(pli_room_kind kind, int fd, pli_room **out) PL_MUST_USE;

/* Makes room for n_bytes.  A failure changes nothing. */
pl_status pli_room_grow(pli_room *room, size_t n_bytes) PL_MUST_USE;

/* One user more, and one less; from any thread.  NULL may be released. */
void pli_room_hold(pli_room *room);
void pli_room_release(pli_room *room);

/* In a forked child: closes its copy of the descriptor. */
void pli_room_forget(pli_room *room);

#endif
