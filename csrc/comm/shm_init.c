/* shm_init.c - makes, sends, maps and fills the segment of ranks that are processes. */
#include "shm_init.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/alloc.h"
#include "handshake.h"
#include "shm_comm.h"

static pl_status watch_everybody(const pli_shm_options *options, pli_watch *watch)
{
    pl_status st = PL_OK;
    for (int r = 0; r < options->world_size; r++)
        if (r != options->rank && options->pids[r] > 0)
            PL_TRY(pli_watch_add(watch, options->processes, r, options->pids[r]));
done:
    return st;
}

/* Rank 0: makes the segment and sends it to all, or tells all that it could not. */
static pl_status lead(const pli_shm_options *options, const pli_listener *listener,
                      pli_watch *watch, pli_shm_segment *out)
{
    pl_status st = PL_OK;
    pli_shm_segment segment = {.fd = -1};
    pli_handshake_reply reply = {.status = PL_OK};
    PL_TRY(pli_handshake_accept(options, listener, watch));
    PL_TRY(pli_segment_create(PLI_SEGMENT_FILE, options->world_size,
                              options->arena_bytes, pli_ring_ops(options->n_ops),
                              &segment));
    for (int r = 1; r < options->world_size; r++) {
        reply.is_sure = pli_watch_is_sure(watch, r);
        /* A rank that is gone by now is found, and named, when the ranks meet. */
        const pl_status answered =
            pli_handshake_answer(watch->ranks[r].socket, &reply, segment.fd);
        if (answered != PL_EPEER)
            PL_TRY(answered);
    }
    *out = segment;
    segment = (pli_shm_segment){.fd = -1};
done:
    if (st != PL_OK) {
        reply.status = st;
        pli_text_print(reply.message, sizeof reply.message, "%s", pl_error_message());
        for (int r = 1; r < options->world_size; r++)
            if (watch->ranks[r].socket >= 0)
                (void)!pli_handshake_answer(watch->ranks[r].socket, &reply, -1);
        (void)!pli_fail(st, "%s",
                        reply.message); /* keep the first message, not an answer's */
    }
    pli_segment_fini(&segment);
    return st;
}

static pl_status follow(const pli_shm_options *options, const char *address,
                        pli_watch *watch, pli_shm_segment *out)
{
    pl_status st = PL_OK;
    int fd = -1;
    PL_TRY(pli_handshake_request(options, address, watch, &fd));
    PL_TRY(pli_segment_adopt(fd, options->world_size, options->arena_bytes,
                             pli_ring_ops(options->n_ops), out));
    fd = -1;
done:
    if (fd >= 0)
        (void)close(fd);
    return st;
}

/* The first operation of every world: after it, all ranks have mapped the segment and
 * have their pages. */
static pl_status meet(const pli_shm_options *options, pl_comm *comm)
{
    pl_status st = PL_OK;
    pl_ticket ticket = 0;
    const pl_op barrier = {.kind = PL_BARRIER};
    PL_TRY(pl_comm_issue(comm, &barrier, &ticket));
    while ((st = pl_comm_wait(comm, ticket, 100 * INT64_C(1000000))) == PL_EAGAIN)
        if (options->is_interrupted != NULL &&
            options->is_interrupted(options->context))
            break;
done:
    return st;
}

pl_status pli_shm_create(const pli_shm_options *options, pli_listener *listener,
                         const char *address, pl_comm **out)
{
    pl_status st = PL_OK;
    pli_shm_segment *made = NULL;
    pli_shm_comm *comm = NULL;
    pli_watch watch;
    PL_TRY(pli_watch_init(&watch, options->world_size));
    PL_TRY(pli_calloc(1, sizeof *made, "a world of processes", &made));
    made->fd = -1;
    PL_TRY(watch_everybody(options, &watch));
    if (options->world_size > 1 && options->prove == NULL)
        PL_FAIL(PL_EINVAL, "several processes need a secret to share memory");
    if (options->world_size == 1)
        PL_TRY(pli_segment_create(PLI_SEGMENT_ANONYMOUS, 1, options->arena_bytes,
                                  pli_ring_ops(options->n_ops), made));
    else if (options->rank == 0)
        PL_TRY(lead(options, listener, &watch, made));
    else
        PL_TRY(follow(options, address, &watch, made));
    atomic_store(&made->n_users, 1);
    made->first_rank = options->first_rank;
    PL_TRY(
        pli_shm_comm_create(&(pli_shm_comm_options){.segment = made,
                                                    .progress = options->progress,
                                                    .rank = options->rank,
                                                    .deadline_ns = options->deadline_ns,
                                                    .pid = getpid()},
                            &comm));
    made = NULL; /* owned by the comm from here on */
    comm->watch = watch;
    watch = (pli_watch){.n_ranks = 0};
    PL_TRY(pli_segment_populate(comm->segment, options->rank));
    pli_segment_keep_from_children(comm->segment, options->rank);
    PL_TRY(meet(options, &comm->super));
    pli_watch_drop_sockets(&comm->watch);
    *out = &comm->super;
    comm = NULL;
done:
    if (comm != NULL) {
        pli_comm_set_failure_message(&comm->super, pl_error_message());
        pl_comm_destroy(&comm->super);
    }
    pli_listener_close(listener);
    pli_watch_fini(&watch);
    pli_segment_release(made);
    return st;
}
