/* links_state.h - state of the links; for links*.c only. */
#ifndef PLI_LINKS_STATE_H
#define PLI_LINKS_STATE_H

#include <stdatomic.h>
#include <stddef.h>

#include "core/crc32c.h"
#include "links.h"

enum { LINK_NAME_BYTES = 160 };

typedef enum notice_kind {
    NOTICE_FAILED,   /* a rank of that host failed the step */
    NOTICE_FOLLOWED, /* a rank of another host failed it */
    NOTICE_ENDED,    /* the host cannot go on */
    NOTICE_WAITS     /* the host waits for another */
} notice_kind;

/* One message of PLI_LINK_NOTICE. */
typedef struct notice {
    uint32_t crc;     /* CRC-32C of what follows */
    uint32_t host;    /* of NOTICE_WAITS: the host it waits for */
    uint64_t epoch;   /* of NOTICE_WAITS: the operation's number */
    uint32_t kind;    /* notice_kind */
    uint32_t n_bytes; /* of `text`, as sent */
    char text[PLI_NOTICE_BYTES];
} notice;

enum { NOTICE_HEAD_BYTES = offsetof(notice, text) };

typedef struct connection {
    const pli_links *owner;
    int fds[PLI_N_LINK_STREAMS];
    char name[LINK_NAME_BYTES];
    notice sent;   /* by this host */
    size_t n_sent; /* bytes of it already sent */
    notice coming;
    size_t n_coming;
    notice last; /* the last complete one, except NOTICE_WAITS */
    int has_notice;
    notice waits;     /* the last complete NOTICE_WAITS */
    int has_ended;    /* nothing more will come */
    atomic_int error; /* of the stream of notices; 0: none.  Any thread may send */
} connection;

struct pli_links {
    int n_hosts;
    int host;
    int rank;
    int owner_pid; /* a forked child sends nothing */
    int has_ended;
    int limit_s;            /* how long a host may not answer */
    uint64_t epoch;         /* from 0 */
    atomic_flag is_sending; /* any thread may send, or end */
    connection *links;
};

/* Bytes of a notice as sent. */
static inline size_t notice_bytes(const notice *self)
{
    return NOTICE_HEAD_BYTES + self->n_bytes;
}

static inline uint32_t notice_crc(const notice *self)
{
    return pli_crc32c(0, &self->host, notice_bytes(self) - offsetof(notice, host));
}

/* Fails because a connection has ended, with `error` or, if 0, without one.  The
 * message has the reason that the host sent, or is about to send (links_notices.c). */
pl_status pli_links_fail_by_end(connection *link, int error) PL_MUST_USE;

#endif
