/* reducer_check.c - checks that all ranks get the same means.
 *
 * After each step a rank computes a checksum of means that it got, and sends it with
 * the flags of the next step.  The ranks count the steps that they took together, and
 * each step has a window on the means: 1/16 of them and at least 64 KiB, so that this
 * costs less than 1 % of an exchange; or all of them.  Ranks with other bits have other
 * weights from then on, so no further step can be taken.
 */
#include <string.h>

#include "comm/hierarchy.h"
#include "core/crc32c.h"
#include "reducer.h"
#include "reducer_state.h"

enum { WINDOWS = 16, WINDOW_LEAST_BYTES = 1 << 16 };

/* A world of one host has no network.  Over a process group, sums are the group's. */
static int is_checked(const pl_reducer *self)
{
    const pl_comm *comm = self->comm;
    const int is_between_hosts = comm->host == NULL && !comm->is_group_comm;
    return comm->world_size > 1 && comm->backend == NULL &&
           self->comm_hook.post == NULL &&
           (self->check.kind == PLI_CHECK_ALL ||
            (self->check.kind == PLI_CHECK_ROTATE && is_between_hosts));
}

void pli_reducer_sum_means(pl_reducer *self)
{
    means_check *check = &self->check;
    const size_t n_all = self->plan->n_bytes;
    size_t n_window = n_all / WINDOWS + PL_CACHE_LINE;
    if (n_window < WINDOW_LEAST_BYTES)
        n_window = WINDOW_LEAST_BYTES;
    if (check->kind == PLI_CHECK_ALL)
        n_window = n_all;
    check->crc = 0;
    check->step = self->step;
    if (!is_checked(self) || n_all == 0)
        return;
    const size_t n_windows = (n_all + n_window - 1) / n_window;
    const size_t begin = check->n_steps++ % n_windows * n_window;
    for (size_t b = 0; b < self->plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &self->plan->buckets[b];
        size_t from = bucket->offset_bytes;
        size_t end = from + bucket->n_elems * pl_dtype_bytes(bucket->dtype);
        from = from > begin ? from : begin;
        end = end < begin + n_window ? end : begin + n_window;
        if (end <= from)
            continue;
        check->first_bucket = check->crc == 0 ? b : check->first_bucket;
        check->last_bucket = b;
        check->crc =
            pli_crc32c(check->crc, self->arena + self->at.buckets + from, end - from);
        check->crc += check->crc == 0; /* 0: a rank has none */
    }
}

pl_status pli_reducer_compare_means(pl_reducer *self)
{
    pl_status st = PL_OK;
    int first = 0;
    uint32_t first_crc = 0;
    for (int r = 0; r < pl_comm_world_size(self->comm); r++) {
        uint32_t crc;
        memcpy(&crc, flags_of(self, r)->check, sizeof crc);
        if (first_crc == 0) {
            first = r;
            first_crc = crc;
        }
        if (crc == 0 || crc == first_crc)
            continue;
        self->check.has_failed = 1;
        PL_FAIL(PL_EMISMATCH,
                "rank %d: rank %d (host %d) and rank %d (host %d) got different means "
                "at the end of step %llu, in buckets %zu to %zu of %zu, so their "
                "weights differ: look for errors of memory and network on these "
                "hosts, load a checkpoint, and wrap the model anew on every rank",
                pl_comm_rank(self->comm), r, pli_hierarchy_host_of(self->comm, r),
                first, pli_hierarchy_host_of(self->comm, first),
                (unsigned long long)self->check.step, self->check.first_bucket + 1,
                self->check.last_bucket + 1, self->plan->n_buckets);
    }
done:
    return st;
}
