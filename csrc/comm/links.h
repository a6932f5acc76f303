/* links.h - connections between the leaders of hosts: one rank of each host.
 *
 * Two leaders share three connected sockets.  PLI_LINK_NOTICE is silent until a
 * leader's step fails: it then says why, and in which epoch; after each failure that is
 * left behind a new epoch begins.  Nothing here waits but pli_links_poll(); whoever has
 * something to send or to receive comes by again.
 */
#ifndef PLI_LINKS_H
#define PLI_LINKS_H

#include <poll.h>
#include <sys/uio.h>

#include "core/status.h"

typedef enum pli_link_stream {
    PLI_LINK_NOTICE, /* why a leader's step has failed */
    PLI_LINK_DATA,
    PLI_LINK_BACK, /* of a reduction that is cut up: what has become of each part */
    PLI_N_LINK_STREAMS
} pli_link_stream;

enum { PLI_MAX_HOSTS = 1024, PLI_NOTICE_BYTES = 2048 };

typedef struct pli_links pli_links;

/* What a host's leader is called in messages: its host's number and ranks. */
typedef struct pli_links_options {
    int n_hosts;
    int host;       /* this one's number */
    int rank;       /* ... and its leader's */
    const int *fds; /* PLI_N_LINK_STREAMS sockets a host; this one's are not read.
                       Duplicated */
    const char *const *names; /* of each host, with its ranks; copied */
} pli_links_options;

pl_status pli_links_create(const pli_links_options *options,
                           pli_links **out) PL_MUST_USE;

/* Closes the sockets; NULL is allowed. */
void pli_links_destroy(pli_links *self);

/* Sends and receives what can be at once of a message in several pieces, behind the
 * first *at bytes of it, and moves *at on.  PL_EPEER names the host that is gone, with
 * what it had to say. */
pl_status pli_links_send(pli_links *self, int host, pli_link_stream stream,
                         const struct iovec *pieces, int n_pieces,
                         size_t *at) PL_MUST_USE;
pl_status pli_links_receive(pli_links *self, int host, pli_link_stream stream,
                            const struct iovec *pieces, int n_pieces,
                            size_t *at) PL_MUST_USE;

/* PL_EPEER where a host has said that it can do no more. */
pl_status pli_links_check(pli_links *self) PL_MUST_USE;

/* ... and where one has said that the step of this epoch has failed there. */
pl_status pli_links_check_step(pli_links *self) PL_MUST_USE;

/* ... and where one has gone, be it with its part done. */
pl_status pli_links_check_present(pli_links *self) PL_MUST_USE;

/* PL_EPEER with what a host has said, or is about to, of a step that failed there. */
pl_status pli_links_read_notice(pli_links *self, int host) PL_MUST_USE;

/* Sends every host why the step of this epoch fails here; maybe another failed it. */
void pli_links_send_failure(pli_links *self, const char *reason, int is_anothers);

/* Whether all of that has been sent to a host; sends what can be. */
int pli_links_has_sent_failure(pli_links *self, int host);

/* Sends every host which one this one has been waiting for, long, in operation
 * `number`; and the host at the end of such words: one that waits for none. */
void pli_links_send_waiting(pli_links *self, uint64_t number, int host);
int pli_links_waited_for(pli_links *self, uint64_t number, int host);

/* What hosts say of failures concerns the next epoch from now on. */
void pli_links_begin_epoch(pli_links *self, uint64_t epoch);

/* Sends every host why this one can do no more; nothing can be sent after it.  NULL: it
 * leaves as it should. */
void pli_links_end(pli_links *self, const char *reason);

/* In a forked child: closes its copies, so that others see when the parent ends. */
void pli_links_forget(pli_links *self);

/* What a sleep is for: a notice of any host, and what is added. */
typedef struct pli_links_waited {
    struct pollfd fds[PLI_MAX_HOSTS * (PLI_N_LINK_STREAMS + 1)];
    int n;
} pli_links_waited;

void pli_links_poll_init(const pli_links *self, pli_links_waited *waited);
void pli_links_poll_add(const pli_links *self, pli_links_waited *waited, int host,
                        pli_link_stream stream, short events);

/* Returns when one of them can go on, or most_ns have passed. */
void pli_links_poll(pli_links_waited *waited, int64_t most_ns);

/* "ranks 2, 3 (host 1)" */
const char *pli_links_name(const pli_links *self, int host);

#endif
