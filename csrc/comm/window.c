/* window.c - makes windows, counts their views, and leaves retired memory to the
 * views. */
#include "window.h"

#include <sys/mman.h>

#include "core/alloc.h"

void pli_window_release(pli_window *window)
{
    if (window == NULL || atomic_fetch_sub(&window->n_users, 1) > 1)
        return;
    if (window->base != NULL)
        (void)munmap(window->base, window->n_bytes);
    pli_free(window->n_views);
    pli_free(window);
}

pl_status pli_window_create(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                            size_t n_slots, pli_window **out)
{
    pl_status st = PL_OK;
    pli_window *window = NULL;
    void *base = NULL;
    PL_TRY(pli_calloc(1, sizeof *window, "window", &window));
    atomic_store(&window->n_users, 1);
    window->n_slots = n_slots;
    window->offset_bytes = offset_bytes;
    window->n_bytes = n_bytes;
    PL_TRY(pli_calloc(n_slots, sizeof *window->n_views, "window's views",
                      &window->n_views));
    window->comm = comm;
    pl_comm *lowest = pli_comm_lowest(comm);
    PL_TRY(lowest->host->map_own(lowest, offset_bytes, n_bytes, &base));
    window->base = base;
    *out = window;
    window = NULL;
done:
    pli_window_release(window);
    return st;
}

pl_status pli_window_retire(pli_window *window)
{
    pl_status st = PL_OK;
    pl_comm *comm = window->comm;
    if (comm == NULL || pli_window_n_views(window) == 0)
        return PL_OK;
    pl_comm *lowest = pli_comm_lowest(comm);
    PL_TRY(lowest->host->unshare_own(lowest, window->offset_bytes, window->n_bytes,
                                     window->base));
    window->comm = NULL;
done:
    return st;
}

void pli_window_see(pli_window *window, size_t slot)
{
    atomic_fetch_add(&window->n_users, 1);
    atomic_fetch_add(&window->n_views[slot], 1);
}

void pli_window_unsee(pli_window *window, size_t slot)
{
    atomic_fetch_sub(&window->n_views[slot], 1);
    pli_window_release(window);
}

size_t pli_window_n_views(const pli_window *window)
{
    return atomic_load(&window->n_users) - 1;
}
