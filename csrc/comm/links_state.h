/* links_state.h - what links hold; for the files links*.c alone. */
#ifndef PLI_LINKS_STATE_H
#define PLI_LINKS_STATE_H

#include <stdatomic.h>
#include <stddef.h>

#include "links.h"

enum { LINK_NAME_BYTES = 160 };

typedef enum notice_kind {
    NOTICE_FAILED,   /* a rank of that host failed the step */
    NOTICE_FOLLOWED, /* ... of yet another host */
    NOTICE_ENDED,    /* the host can do no more */
    NOTICE_WAITS     /* ... waits for another */
} notice_kind;

/* One message of PLI_LINK_NOTICE. */
typedef struct notice {
    uint64_t epoch;   /* NOTICE_WAITS: the operation's number */
    uint32_t host;    /* ... which one it waits for */
    uint32_t kind;    /* notice_kind */
    uint32_t n_bytes; /* of the text that is sent */
    char text[PLI_NOTICE_BYTES];
} notice;

enum { NOTICE_HEAD_BYTES = offsetof(notice, text) };

typedef struct connection {
    const pli_links *owner;
    int fds[PLI_N_LINK_STREAMS];
    char name[LINK_NAME_BYTES];
    notice sent;   /* by this host */
    size_t n_sent; /* bytes of it that have been sent */
    notice coming;
    size_t n_coming;
    notice last; /* the last that came whole */
    int has_notice;
    notice waits;  /* the last of that kind, which is not among those */
    int has_ended; /* nothing more will come */
} connection;

struct pli_links {
    int n_hosts;
    int host;
    int rank;
    int owner_pid; /* a forked child says nothing */
    int has_ended;
    uint64_t epoch;         /* from 0 */
    atomic_flag is_sending; /* any thread may send, or end */
    connection *links;
};

/* How many bytes of a notice are sent. */
static inline size_t notice_bytes(const notice *self)
{
    return NOTICE_HEAD_BYTES + self->n_bytes;
}

/* A connection has ended, by an error or, 0, without one: says what that host had to
 * say, or is about to (links_notices.c). */
pl_status pli_links_fail_by_end(connection *link, int error) PL_MUST_USE;

#endif
