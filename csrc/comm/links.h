/* links.h - connections between the leaders of hosts, one leader per host.
 *
 * Two leaders share three connected sockets.  On PLI_LINK_NOTICE a leader sends why its
 * host has failed, or that it has waited long.  Only pli_links_poll() waits; to send or
 * receive the rest of a message, call again.
 */
#ifndef PLI_LINKS_H
#define PLI_LINKS_H

#include <poll.h>
#include <sys/uio.h>

#include "core/status.h"

typedef enum pli_link_stream {
    PLI_LINK_NOTICE, /* why a leader's host has failed, or that it still waits */
    PLI_LINK_DATA,
    PLI_LINK_BACK, /* of a reduction that is cut up: the result of each part */
    PLI_N_LINK_STREAMS
} pli_link_stream;

enum { PLI_MAX_HOSTS = 1024, PLI_NOTICE_BYTES = 2048 };

typedef struct pli_links pli_links;

/* Messages name this leader by `rank` and other hosts by `names`. */
typedef struct pli_links_options {
    int n_hosts;
    int host;       /* number of this host */
    int rank;       /* rank of its leader */
    const int *fds; /* PLI_N_LINK_STREAMS sockets per host; duplicated.  Those of this
                       host are not read */
    const char *const *names; /* one per host, with its ranks; copied */
} pli_links_options;

pl_status pli_links_create(const pli_links_options *options,
                           pli_links **out) PL_MUST_USE;

/* Closes the sockets; NULL is allowed. */
void pli_links_destroy(pli_links *self);

/* Sends or receives, without waiting, bytes of a message in several pieces from byte
 * *at on, and advances *at.  PL_EPEER names a host that is gone, with the reason it
 * sent. */
pl_status pli_links_send(pli_links *self, int host, pli_link_stream stream,
                         const struct iovec *pieces, int n_pieces,
                         size_t *at) PL_MUST_USE;
pl_status pli_links_receive(pli_links *self, int host, pli_link_stream stream,
                            const struct iovec *pieces, int n_pieces,
                            size_t *at) PL_MUST_USE;

/* Reads what hosts have reported.  PL_EPEER if one does not answer: its kernel is
 * probed, and PACELINE_LINK_TIMEOUT is the limit. */
pl_status pli_links_check(pli_links *self) PL_MUST_USE;

/* Likewise; also if a host is gone, even one that has done its part, or has lost a
 * rank.  After a failure of the world, the reason is not that which the host then sent.
 */
pl_status pli_links_check_present(pli_links *self, int is_after_failure) PL_MUST_USE;

/* The fewest operations that a host had finished when it failed, of those that are
 * known to have failed; UINT64_MAX if none is. */
uint64_t pli_links_least_finished(const pli_links *self);

/* PL_EPEER with the reason of a host that is known to have failed. */
pl_status pli_links_report_failure(const pli_links *self) PL_MUST_USE;

/* Sends every host why this one has failed, after it had finished `n_finished`
 * operations, and whether it has lost a rank. */
void pli_links_send_failure(pli_links *self, const char *reason, uint64_t n_finished,
                            int has_lost);

/* Tells every host that this host has long waited for `host` in operation `number`.
 * pli_links_waited_for() follows such reports to a host that waits for none. */
void pli_links_send_waiting(pli_links *self, uint64_t number, int host);
int pli_links_waited_for(pli_links *self, uint64_t number, int host);

/* This host leaves: nothing can be sent afterwards. */
void pli_links_end(pli_links *self);

/* In a forked child: closes its copies, so that peers see when the parent ends. */
void pli_links_forget(pli_links *self);

/* What a sleep waits for: a notice of any host, and the streams added. */
typedef struct pli_links_waited {
    struct pollfd fds[PLI_MAX_HOSTS * (PLI_N_LINK_STREAMS + 1)];
    int n;
} pli_links_waited;

void pli_links_poll_init(const pli_links *self, pli_links_waited *waited);
void pli_links_poll_add(const pli_links *self, pli_links_waited *waited, int host,
                        pli_link_stream stream, short events);

/* Returns when one of them is ready, or after most_ns. */
void pli_links_poll(pli_links_waited *waited, int64_t most_ns);

/* "ranks 2, 3 (host 1)" */
const char *pli_links_name(const pli_links *self, int host);

#endif
