/* hierarchy_exchange.c - moves operations up, between leaders, and down, in order. */
#include <poll.h>

#include "core/alloc.h"
#include "core/crc32c.h"
#include "hierarchy_state.h"

enum {
    SHARED_LEAST_BYTES = 1 << 16, /* that adding up in parts must save */
    PART_BYTES = 1 << 17, /* sent or received at a time: still in cache for its CRC */
    POLL_MS = 10,         /* for the links alone */
    POLL_BOTH_NS = 100 * 1000 /* ... if this host's ranks are awaited, too */
};

static char *range_of(const hierarchy *self, const pl_op *op)
{
    return self->super.arena + op->offset_bytes;
}

/* Whether means are weighed by the hosts' numbers of ranks, because these differ. */
static int is_weighed(const hierarchy *self, const pl_op *op)
{
    return op->kind == PL_ALL_REDUCE && op->reduction == PL_MEAN && !self->is_even;
}

/* Scales by at most 1 before the addition, so that nothing overflows. */
static void weigh(const hierarchy *self, const pl_op *op)
{
    if (!is_weighed(self, op))
        return;
    const pl_move move = {
        .to = range_of(self, op), .dtype = op->dtype, .n_elems = op->n_elems};
    pli_cpu_scale(&move, self->peers[self->host].n_ranks, self->super.world_size);
}

/* Finds which operations have gone up, in order. */
static void see_reduced(hierarchy *self)
{
    while (self->n_reduced < self->n_up) {
        const operation *entry = operation_at(self, self->n_reduced + 1);
        if (entry->up != 0 && !pli_base_is_done(&self->super, entry->up))
            return;
        weigh(self, &entry->op);
        self->n_reduced++;
    }
}

/* ---- what is sent --------------------------------------------------------------- */

static size_t bytes_of(const pl_op *op)
{
    return op->kind == PL_BARRIER ? 0 : op->n_elems * pl_dtype_bytes(op->dtype);
}

/* Whether each leader adds up one part of the range instead of the whole: n hosts then
 * send about 2 ranges each instead of n - 1, but every rank waits twice. */
static int is_shared_out(const hierarchy *self, const pl_op *op)
{
    return op->kind == PL_ALL_REDUCE && self->n_hosts > 2 &&
           bytes_of(op) * (size_t)(self->n_hosts - 2) >= SHARED_LEAST_BYTES;
}

/* The part of a range that a host's leader adds up, cut at cache lines. */
static pl_op part_of(const hierarchy *self, const pl_op *op, int host)
{
    pl_op part = *op;
    const size_t elem_bytes = pl_dtype_bytes(op->dtype);
    size_t first = 0;
    pli_part_of(op->n_elems, elem_bytes, self->n_hosts, host, &first, &part.n_elems);
    part.offset_bytes += first * elem_bytes;
    return part;
}

/* What `host` contributes to a range with one block per rank. */
static pl_op blocks_of(const hierarchy *self, const pl_op *op, int host)
{
    pl_op blocks = *op;
    const size_t block = op->n_elems / (size_t)self->super.world_size;
    blocks.n_elems = (size_t)self->peers[host].n_ranks * block;
    blocks.offset_bytes +=
        (size_t)self->peers[host].first_rank * block * pl_dtype_bytes(op->dtype);
    return blocks;
}

/* What leader `from` sends to leader `to` for an operation, after the head. */
static pl_op sent_of(const hierarchy *self, const pl_op *op, int from, int to)
{
    pl_op nothing = *op;
    nothing.n_elems = 0;
    switch (op->kind) {
    case PL_ALL_REDUCE:
        return is_shared_out(self, op) ? part_of(self, op, to) : *op;
    case PL_BROADCAST:
        return host_of_rank(self, op->root) == from ? *op : nothing;
    case PL_ALL_GATHER:
        return blocks_of(self, op, from);
    case PL_REDUCE:
    case PL_BARRIER:
    case PL_N_OP_KINDS:
        break;
    }
    return nothing;
}

static message_flow *flow_of(hierarchy *self, int host, int is_out,
                             pli_link_stream link)
{
    peer *other = &self->peers[host];
    return is_out ? &other->out[link - PLI_LINK_DATA]
                  : &other->in[link - PLI_LINK_DATA];
}

/* ---- messages ------------------------------------------------------------------- */

static size_t message_bytes(const message_flow *flow)
{
    const size_t n_bytes = flow->head.n_bytes;
    return sizeof flow->head + (n_bytes > 0 ? n_bytes + sizeof flow->crc : 0);
}

static int is_whole(const message_flow *flow)
{
    return flow->at == message_bytes(flow);
}

static head head_of(uint64_t number, uint64_t hash, uint64_t n_bytes)
{
    head made = {.number = number, .hash = hash, .n_bytes = n_bytes};
    made.crc = pli_crc32c(0, &made, offsetof(head, crc));
    return made;
}

static pl_status check_crc(const hierarchy *self, int host, const message_flow *flow,
                           uint64_t received, uint64_t crc)
{
    if (received == crc)
        return PL_OK;
    return pli_fail(
        PL_EPEER,
        "rank %d: %s sent a message that arrived damaged (operation %llu, checksum "
        "%08llx, expected %08llx): look for errors of network cards, cables and "
        "memory on these hosts and between them",
        self->super.rank, pli_links_name(self->links, host),
        (unsigned long long)flow->head.number, (unsigned long long)received,
        (unsigned long long)crc);
}

/* PL_EPEER if a head that has arrived is damaged. */
static pl_status check_head_crc(const hierarchy *self, int host,
                                const message_flow *flow)
{
    return check_crc(self, host, flow, flow->head.crc,
                     pli_crc32c(0, &flow->head, offsetof(head, crc)));
}

/* Adds data up to byte `end` to the message's checksum. */
static void sum_until(message_flow *flow, size_t end)
{
    if (flow->n_summed == 0)
        flow->crc = (uint32_t)flow->head.crc;
    flow->crc =
        pli_crc32c(flow->crc, flow->data + flow->n_summed, end - flow->n_summed);
    flow->n_summed = end;
}

/* Continues a message in parts, so that data is still in cache for its checksum. */
static pl_status go_on(hierarchy *self, int host, pli_link_stream link, int is_out)
{
    pl_status st = PL_OK;
    message_flow *flow = flow_of(self, host, is_out, link);
    const size_t head_bytes = sizeof flow->head, before = flow->at;
    const size_t n_bytes = flow->head.n_bytes;
    size_t end;
    do {
        const size_t n_done = flow->at > head_bytes ? flow->at - head_bytes : 0;
        const size_t next = (n_done / PART_BYTES + 1) * PART_BYTES;
        end = next < n_bytes ? next : n_bytes;
        const struct iovec pieces[] = {
            {.iov_base = &flow->head, .iov_len = head_bytes},
            {.iov_base = flow->data, .iov_len = end},
            {.iov_base = is_out ? &flow->crc : &flow->received,
             .iov_len = end > 0 && end == n_bytes ? sizeof flow->crc : 0}};
        if (is_out)
            sum_until(flow, end);
        PL_TRY((is_out ? pli_links_send : pli_links_receive)(self->links, host, link,
                                                             pieces, 3, &flow->at));
        if (!is_out)
            sum_until(flow, flow->at < head_bytes + end ? flow->at - head_bytes : end);
    } while (end < n_bytes && flow->at == head_bytes + end);
done:
    if (flow->at != before)
        self->silence = (pli_stopwatch){0};
    return st;
}

/* Continues a message, its head and its data, as far as possible without waiting. */
static pl_status send_more(hierarchy *self, int host, pli_link_stream link)
{
    message_flow *flow = flow_of(self, host, 1, link);
    if (flow->at == 0) /* the head may have become another since the last call */
        flow->n_summed = 0;
    return go_on(self, host, link, 1);
}

/* Begins or continues to send a host `range`, the data of operation `number`. */
static pl_status send_range(hierarchy *self, int host, pli_link_stream link,
                            uint64_t number, const pl_op *range)
{
    pl_status st = PL_OK;
    message_flow *flow = flow_of(self, host, 1, link);
    flow->data = range_of(self, range);
    flow->head =
        head_of(number, pli_op_hash(&operation_at(self, number)->op), bytes_of(range));
    PL_TRY(send_more(self, host, link));
    if (is_whole(flow))
        *flow = (message_flow){.n_done = number};
done:
    return st;
}

/* Sends a host what has gone up here. */
static pl_status send_data(hierarchy *self, int host)
{
    pl_status st = PL_OK;
    const message_flow *flow = flow_of(self, host, 1, PLI_LINK_DATA);
    uint64_t before = flow->n_done - 1;
    while (flow->n_done < self->n_reduced && flow->n_done != before) {
        before = flow->n_done;
        const uint64_t number = before + 1;
        const pl_op sent =
            sent_of(self, &operation_at(self, number)->op, self->host, host);
        PL_TRY(send_range(self, host, PLI_LINK_DATA, number, &sent));
    }
done:
    return st;
}

static pl_status make_room(peer *other, size_t n_bytes)
{
    pl_status st = PL_OK;
    if (n_bytes <= other->staging_bytes)
        goto done;
    pli_free(other->staging);
    other->staging = NULL;
    other->staging_bytes = 0;
    PL_TRY(pli_calloc(n_bytes, 1, "what other hosts send", &other->staging));
    other->staging_bytes = n_bytes;
done:
    return st;
}

static pl_status check_head(const hierarchy *self, int host, const head *in,
                            uint64_t number, size_t n_bytes)
{
    pl_status st = PL_OK;
    const pl_op *op = &operation_at(self, number)->op;
    if (in->number != number || in->hash != pli_op_hash(op) || in->n_bytes != n_bytes)
        PL_FAIL(PL_EMISMATCH,
                "rank %d: %s issued another operation than this rank (number %llu "
                "there, %llu here: %s of %zu %s): the ranks must run the same steps",
                self->super.rank, pli_links_name(self->links, host),
                (unsigned long long)in->number, (unsigned long long)number,
                pli_op_kind_text(op->kind), op->n_elems, pl_dtype_text(op->dtype));
done:
    return st;
}

/* Receives a host's data for operation `number` into `to`. */
static pl_status receive_range(hierarchy *self, int host, pli_link_stream link,
                               uint64_t number, char *to, size_t n_bytes)
{
    pl_status st = PL_OK;
    message_flow *flow = flow_of(self, host, 0, link);
    const size_t before = flow->at;
    const struct iovec piece = {.iov_base = &flow->head, .iov_len = sizeof flow->head};
    /* Receive the head alone first: data of another operation must not reach `to`. */
    if (flow->at < sizeof flow->head) {
        PL_TRY(pli_links_receive(self->links, host, link, &piece, 1, &flow->at));
        if (flow->at < sizeof flow->head)
            goto done;
        PL_TRY(check_head_crc(self, host, flow));
        PL_TRY(check_head(self, host, &flow->head, number, n_bytes));
    }
    flow->data = to;
    PL_TRY(go_on(self, host, link, 0));
    if (!is_whole(flow))
        goto done;
    if (n_bytes > 0)
        PL_TRY(check_crc(self, host, flow, flow->received, flow->crc));
    *flow = (message_flow){.n_done = number};
done:
    if (flow->at != before)
        self->silence = (pli_stopwatch){0};
    return st;
}

/* Receives a host's part of operation n_exchanged + 1. */
static pl_status receive_data(hierarchy *self, int host, const pl_op *op)
{
    pl_status st = PL_OK;
    peer *other = &self->peers[host];
    const uint64_t number = self->n_exchanged + 1;
    const pl_op sent = sent_of(self, op, host, self->host);
    const size_t n_bytes = bytes_of(&sent);
    char *to = range_of(self, &sent);
    if (flow_of(self, host, 0, PLI_LINK_DATA)->n_done == number)
        goto done;
    if (op->kind == PL_ALL_REDUCE) {
        PL_TRY(make_room(other, n_bytes));
        to = other->staging;
    }
    PL_TRY(receive_range(self, host, PLI_LINK_DATA, number, to, n_bytes));
done:
    return st;
}

/* For a range that is shared out: sends this leader's part, and receives a host's. */
static pl_status exchange_back(hierarchy *self, int host, const pl_op *op)
{
    pl_status st = PL_OK;
    const uint64_t number = self->n_exchanged + 1;
    const pl_op mine = part_of(self, op, self->host);
    const pl_op theirs = part_of(self, op, host);
    if (flow_of(self, host, 1, PLI_LINK_BACK)->n_done < number &&
        self->n_added == number)
        PL_TRY(send_range(self, host, PLI_LINK_BACK, number, &mine));
    if (flow_of(self, host, 0, PLI_LINK_BACK)->n_done < number)
        PL_TRY(receive_range(self, host, PLI_LINK_BACK, number, range_of(self, &theirs),
                             bytes_of(&theirs)));
done:
    return st;
}

/* Adds up the hosts' ranges, or this leader's part of them, in the order of hosts. */
static void add_up(const hierarchy *self, const pl_op *op)
{
    const void *in[PLI_MAX_HOSTS];
    const pl_op part = is_shared_out(self, op) ? part_of(self, op, self->host) : *op;
    const pl_reduction reduction = is_weighed(self, op) ? PL_SUM : op->reduction;
    void *out[] = {range_of(self, &part)};
    if (part.n_elems == 0)
        return;
    for (int h = 0; h < self->n_hosts; h++)
        in[h] = h == self->host ? out[0] : self->peers[h].staging;
    self->sums->fn[op->dtype][reduction](&(pli_sum_args){.in = in,
                                                         .n_in = self->n_hosts,
                                                         .out = out,
                                                         .n_out = 1,
                                                         .n_elems = part.n_elems});
}

/* Whether all hosts have sent this leader their part of an operation, and have been
 * sent theirs. */
static int has_exchanged(hierarchy *self, pli_link_stream link, uint64_t number)
{
    for (int h = 0; h < self->n_hosts; h++)
        if (h != self->host && (flow_of(self, h, 0, link)->n_done < number ||
                                flow_of(self, h, 1, link)->n_done < number))
            return 0;
    return 1;
}

/* Does what can be done for operation n_exchanged + 1; *is_done is 0 unless it is
 * finished. */
static pl_status exchange(hierarchy *self, int *is_done)
{
    pl_status st = PL_OK;
    const uint64_t number = self->n_exchanged + 1;
    const pl_op *op = &operation_at(self, number)->op;
    const int is_shared = is_shared_out(self, op);
    *is_done = 0;
    for (int h = 0; h < self->n_hosts; h++)
        if (h != self->host)
            PL_TRY(receive_data(self, h, op));
    if (self->n_added < number && has_exchanged(self, PLI_LINK_DATA, number)) {
        if (op->kind == PL_ALL_REDUCE)
            add_up(self, op);
        self->n_added = number;
    }
    for (int h = 0; is_shared && h < self->n_hosts; h++)
        if (h != self->host)
            PL_TRY(exchange_back(self, h, op));
    if (self->n_added < number ||
        (is_shared && !has_exchanged(self, PLI_LINK_BACK, number)))
        goto done;
    self->n_exchanged = number;
    *is_done = 1;
done:
    return st;
}

/* Finds what has gone up, sends it, and receives what other hosts have sent. */
static pl_status exchange_all(hierarchy *self)
{
    pl_status st = PL_OK;
    int is_done = 1;
    see_reduced(self);
    for (int h = 0; h < self->n_hosts; h++)
        if (h != self->host)
            PL_TRY(send_data(self, h));
    /* Receive data once its operation is issued here, even if it is added up later. */
    while (is_done && self->n_exchanged < self->n_up)
        PL_TRY(exchange(self, &is_done));
done:
    if (st != PL_OK)
        pli_hierarchy_fail_between(self);
    return st;
}

/* ---- inside the host ------------------------------------------------------------ */

/* The part of `op` that the host's own world does first; 0 if it does none. */
static int op_up(const hierarchy *self, const pl_op *op, pl_op *out)
{
    const peer *here = &self->peers[self->host];
    *out = *op;
    switch (op->kind) {
    case PL_ALL_REDUCE:
        out->kind = PL_REDUCE;
        out->root = 0;
        return 1;
    case PL_BROADCAST:
        out->root = op->root - here->first_rank;
        return host_of_rank(self, op->root) == self->host;
    case PL_ALL_GATHER: {
        const size_t block = op->n_elems / (size_t)self->super.world_size;
        out->offset_bytes +=
            (size_t)here->first_rank * block * pl_dtype_bytes(op->dtype);
        out->n_elems = (size_t)here->n_ranks * block;
        return 1;
    }
    case PL_BARRIER:
        return 1;
    case PL_REDUCE:
    case PL_N_OP_KINDS:
        break;
    }
    return 0;
}

/* ... and the part that it does last. */
static int op_down(const hierarchy *self, const pl_op *op, pl_op *out)
{
    *out = *op;
    out->root = 0;
    if (op->kind == PL_BARRIER)
        return 1;
    out->kind = PL_BROADCAST;
    return op->kind != PL_BROADCAST || host_of_rank(self, op->root) != self->host;
}

static pl_status issue_inside(hierarchy *self, const pl_op *op)
{
    const pl_status st = pl_comm_issue(self->super.base, op, &self->last_inner);
    return st == PL_OK ? st : pli_hierarchy_fail_as_inside(self, st);
}

static pl_status go_up(hierarchy *self, operation *entry)
{
    pl_status st = PL_OK;
    pl_op op;
    entry->up = 0;
    if (!is_alone_on_host(self) && op_up(self, &entry->op, &op)) {
        PL_TRY(issue_inside(self, &op));
        entry->up = self->last_inner;
    }
    self->n_up++;
done:
    return st;
}

static pl_status go_down(hierarchy *self, operation *entry)
{
    pl_status st = PL_OK;
    pl_op op;
    if (!is_alone_on_host(self) && op_down(self, &entry->op, &op))
        PL_TRY(issue_inside(self, &op));
    entry->whole = self->last_inner;
    self->n_down++;
done:
    return st;
}

pl_status pli_hierarchy_pass_on(hierarchy *self)
{
    pl_status st = PL_OK;
    uint64_t before;
    do {
        before = self->n_up + self->n_down;
        while (self->n_up < self->n_issued &&
               (is_alone_on_host(self) || self->n_down == self->n_up ||
                operation_at(self, self->n_up)->op.is_followed))
            PL_TRY(go_up(self, operation_at(self, self->n_up + 1)));
        if (self->links != NULL)
            PL_TRY(exchange_all(self));
        while (self->n_down < self->n_up &&
               (is_alone_on_host(self) || self->n_down < self->n_whole) &&
               (self->links == NULL || self->n_down < self->n_exchanged))
            PL_TRY(go_down(self, operation_at(self, self->n_down + 1)));
    } while (self->n_up + self->n_down != before);
done:
    return st;
}

/* ---- waiting -------------------------------------------------------------------- */

static void list_stream(const hierarchy *self, pli_links_waited *waited, int host,
                        pli_link_stream link, int is_sending, int is_receiving)
{
    const int events = (is_sending ? POLLOUT : 0) | (is_receiving ? POLLIN : 0);
    if (events != 0)
        pli_links_poll_add(self->links, waited, host, link, (short)events);
}

int64_t pli_hierarchy_list_waited(const hierarchy *self, pli_links_waited *waited)
{
    const uint64_t number = self->n_exchanged + 1;
    pli_links_poll_init(self->links, waited);
    for (int h = 0; h < self->n_hosts; h++) {
        const peer *other = &self->peers[h];
        const message_flow *out = other->out, *in = other->in;
        if (h == self->host)
            continue;
        list_stream(self, waited, h, PLI_LINK_DATA, out[0].n_done < self->n_reduced,
                    in[0].n_done < number);
        if (self->n_added == number)
            list_stream(self, waited, h, PLI_LINK_BACK, out[1].n_done < number,
                        in[1].n_done < number);
    }
    return self->n_reduced < self->n_up ? POLL_BOTH_NS : POLL_MS * PLI_MS;
}

/* A host that this leader waits for: the last that has not sent its part, else the last
 * that has not sent back its result. */
static int late_host(hierarchy *self)
{
    for (pli_link_stream link = PLI_LINK_DATA; link <= PLI_LINK_BACK; link++)
        for (int h = self->n_hosts; h-- > 0;)
            if (h != self->host &&
                flow_of(self, h, 0, link)->n_done <= self->n_exchanged)
                return h;
    return self->host == 0 ? 1 : 0; /* a host that does not receive */
}

pl_status pli_hierarchy_check_deadline(hierarchy *self)
{
    pl_status st = PL_OK;
    const uint64_t number = self->n_exchanged + 1;
    if (self->n_reduced < self->n_up)
        self->silence = (pli_stopwatch){0}; /* it waits for this host's ranks */
    const int host = late_host(self);
    const int64_t silent_ns = pli_elapsed_ns(&self->silence);
    if (silent_ns > self->deadline_ns / 2 &&
        self->sent_waiting_ns != self->silence.started_ns) {
        pli_links_send_waiting(self->links, number, host);
        self->sent_waiting_ns = self->silence.started_ns;
    }
    if (silent_ns > self->deadline_ns)
        PL_FAIL(PL_ETIMEOUT,
                "rank %d: %s kept this rank waiting for %.3g seconds: it is stopped, "
                "cut off or slower than the timeout, or runs fewer steps, or other "
                "wrappers first",
                self->super.rank,
                pli_links_name(self->links,
                               pli_links_waited_for(self->links, number, host)),
                (double)self->deadline_ns / 1e9);
done:
    return st;
}
