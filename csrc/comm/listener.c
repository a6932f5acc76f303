/* listener.c - the Unix socket at which the ranks of a host meet. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "core/alloc.h"
#include "handshake.h"

socklen_t pli_listener_name(const char *address, struct sockaddr_un *out)
{
    const size_t n = strnlen(address, PLI_ADDRESS_BYTES - 1);
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path + 1, address, n); /* after a zero: abstract, no file */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

pl_status pli_listener_create(char address[PLI_ADDRESS_BYTES], pli_listener **out)
{
    pl_status st = PL_OK;
    pli_listener *listener = NULL;
    uint64_t noise[2];
    struct sockaddr_un name;
    PL_TRY(pli_calloc(1, sizeof *listener, "listener", &listener));
    listener->fd = PL_SYS(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (listener->fd < 0)
        PL_FAIL_ERRNO("cannot make a Unix socket");
    if (PL_SYS(getrandom(noise, sizeof noise, 0)) != (ssize_t)sizeof noise)
        PL_FAIL_ERRNO("cannot draw a random name");
    (void)snprintf(address, PLI_ADDRESS_BYTES, "paceline-%016llx%016llx",
                   (unsigned long long)noise[0], (unsigned long long)noise[1]);
    const socklen_t name_len = pli_listener_name(address, &name);
    if (PL_SYS(bind(listener->fd, (struct sockaddr *)&name, name_len)) != 0)
        PL_FAIL_ERRNO("cannot name a Unix socket");
    if (PL_SYS(listen(listener->fd, 2 * PL_MAX_RANKS)) != 0)
        PL_FAIL_ERRNO("cannot listen on a Unix socket");
    *out = listener;
    listener = NULL;
done:
    pli_listener_destroy(listener);
    return st;
}

void pli_listener_close(pli_listener *listener)
{
    if (listener == NULL || listener->fd < 0)
        return;
    (void)close(listener->fd);
    listener->fd = -1;
}

void pli_listener_destroy(pli_listener *listener)
{
    pli_listener_close(listener);
    pli_free(listener);
}

pl_status pli_read_peer(int fd, struct ucred *out)
{
    pl_status st = PL_OK;
    socklen_t n = sizeof *out;
    int status = 0;
    PLI_UNTIL_DONE(status, getsockopt(fd, SOL_SOCKET, SO_PEERCRED, out, &n));
    if (status != 0)
        PL_FAIL_ERRNO("cannot learn which process connects, which a sandbox may forbid "
                      "(SO_PEERCRED)");
done:
    return st;
}
