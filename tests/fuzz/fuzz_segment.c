/* fuzz_segment.c - rank 1 of two in a segment that rank 0 has written: its header, the
 * failed ranks, and rank 0's counters, messages and tags.
 */
#include "bytes.h"
#include "comm/failure.h"
#include "comm/shm_comm.h"
#include "core/alloc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { SEGMENT_RANKS = 2, SEGMENT_ARENA = 4096, SEGMENT_OPS = 64 };

/* The flags of the input's first byte. */
enum {
    SEGMENT_IS_RAW = 1,
    SEGMENT_IS_CUT = 2,
    SEGMENT_HAS_NO_END = 8 /* the other rank's message does not end */
};

/* Ends the wait for messages that are announced: here they never come. */
static void settle_words(pli_rank *rank)
{
    rank->n_writes &= ~1u;
    if (rank->message_state == PLI_MESSAGE_FOLLOWS)
        rank->message_state = PLI_MESSAGE_READY;
}

/* Makes a segment with a valid header, except for the parts that the input writes. */
static int write_segment(unsigned flags, bytes *from)
{
    pli_shm_segment made;
    must(pli_segment_create(PLI_SEGMENT_FILE, SEGMENT_RANKS, SEGMENT_ARENA, SEGMENT_OPS,
                            &made) == PL_OK);
    if (flags & SEGMENT_IS_RAW) {
        bytes_copy(from, made.base, made.arenas_at);
    } else {
        bytes_copy(from, pli_tags_of(&made, 0) + 1, sizeof(uint64_t));
        bytes_copy(from, pli_rank_of(&made, 0), sizeof(pli_rank));
    }
    if (flags & SEGMENT_HAS_NO_END)
        memset(pli_rank_of(&made, 0)->message, 'x', PLI_MESSAGE_BYTES);
    settle_words(pli_rank_of(&made, 0));
    const size_t cut = flags & SEGMENT_IS_CUT ? bytes_number(from) * 64 : 0;
    const bytes content = {(const uint8_t *)made.base, made.map_bytes - cut};
    const int fd = bytes_file(content, made.map_bytes - cut);
    pli_segment_fini(&made);
    return fd;
}

static int is_failed(const pli_shm_comm *comm)
{
    pli_failure failure;
    return pli_failure_get(comm->segment, &failure);
}

/* Calls all functions that read data of the other rank. */
static void use_comm(pli_shm_comm *comm, unsigned flags, uint64_t failure)
{
    const pl_op op = {.kind = PL_ALL_REDUCE, .dtype = PL_F32, .n_elems = 10};
    pl_comm *world = &comm->super;
    pl_ticket ticket = 0;
    unsigned bit = 0;
    (void)!pl_comm_issue(world, &op, &ticket);
    if (!(flags & SEGMENT_IS_RAW))
        atomic_store(&pli_header_of(comm->segment)->failure, failure);
    (void)!pl_comm_progress(world);
    for (int what = PLI_QUERY_GONE; what <= PLI_QUERY_WORLD; what++)
        (void)!pli_comm_query(world, (pli_query)what);
    if (world->ops->is_done(world, ticket) || is_failed(comm)) {
        (void)!pl_comm_wait(world, ticket, 0);
        (void)!world->host->await_notice(world, 0, 1, 0, &bit);
    }
    (void)!pli_comm_check_peers(world);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    bytes from = {data, n};
    const int n_before = n_descriptors();
    const unsigned flags = bytes_number(&from);
    uint64_t failure = 0;
    if (!(flags & SEGMENT_IS_RAW))
        bytes_copy(&from, &failure, sizeof failure);
    const int fd = write_segment(flags, &from);
    pli_shm_segment *shared = NULL;
    pli_shm_comm *comm = NULL;
    must(pli_calloc(1, sizeof *shared, "a segment", &shared) == PL_OK);
    if (pli_segment_adopt(fd, SEGMENT_RANKS, SEGMENT_ARENA, SEGMENT_OPS, shared) !=
        PL_OK) {
        (void)close(fd);
        pli_free(shared);
    } else {
        atomic_store(&shared->n_users, 1);
        must(pli_shm_comm_create(&(pli_shm_comm_options){.segment = shared,
                                                         .rank = 1,
                                                         .deadline_ns = PLI_MS},
                                 &comm) == PL_OK);
        use_comm(comm, flags, failure);
        pl_comm_destroy(&comm->super);
    }
    must(n_descriptors() == n_before);
    return 0;
}
