/* world_hosts.c - the ranks of each host, and the sockets between host leaders. */
#include "world_hosts.h"

#include <limits.h>

int pli_read_ints(PyObject *sequence, const char *what, int least, int *out,
                  Py_ssize_t n_most)
{
    PyObject *fast =
        PySequence_Fast(sequence, "pids, hosts: give sequences of integers");
    if (fast == NULL)
        return -1;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    int status = n <= n_most ? (int)n : -1;
    if (status < 0)
        PyErr_Format(PyExc_ValueError, "%s: %zd, at most %zd", what, n, n_most);
    for (Py_ssize_t k = 0; status >= 0 && k < n; k++) {
        int overflow = 0;
        PyObject *item = PySequence_Fast_GET_ITEM(fast, k);
        const long number =
            PyLong_Check(item) ? PyLong_AsLongAndOverflow(item, &overflow) : LONG_MIN;
        if (overflow != 0 || number < least || number > INT_MAX)
            status = pli_error(PyExc_ValueError,
                               "%s[%zd] is %R: give an integer from %d to %d", what, k,
                               item, least, INT_MAX);
        out[k] = (int)number;
    }
    Py_DECREF(fast);
    return status;
}

/* The tuple owns the strings. */
static int read_names(PyObject *names, pli_world_hosts *out)
{
    if (!PyTuple_Check(names) || PyTuple_GET_SIZE(names) != out->n_hosts)
        return pli_error(PyExc_ValueError, "hosts: give a tuple of %d names",
                         out->n_hosts);
    for (int h = 0; h < out->n_hosts; h++)
        if ((out->names[h] = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, h))) == NULL)
            return -1;
    return 0;
}

/* Finds a rank's host, and its number there. */
static int find_rank(int rank, int world_size, pli_world_hosts *out)
{
    int first = 0;
    out->host = -1;
    for (int h = 0; h < out->n_hosts; h++) {
        if (rank >= first && rank < first + out->n_ranks[h]) {
            out->host = h;
            out->first_rank = first;
            out->inner_rank = rank - first;
            out->inner_size = out->n_ranks[h];
        }
        first += out->n_ranks[h];
    }
    if (first == world_size && out->host >= 0)
        return 0;
    return pli_error(PyExc_ValueError, "hosts list %d ranks, but the world has %d",
                     first, world_size);
}

int pli_world_hosts_read(PyObject *hosts, int rank, int world_size,
                         pli_world_hosts *out)
{
    PyObject *n_ranks, *names, *fds;
    *out = (pli_world_hosts){.inner_rank = rank, .inner_size = world_size};
    if (hosts == NULL || hosts == Py_None)
        return 0;
    if (!PyTuple_Check(hosts) ||
        !PyArg_ParseTuple(hosts, "OOO:hosts", &n_ranks, &names, &fds))
        return pli_error(PyExc_TypeError, "hosts is %R: give (n_ranks, names, fds)",
                         hosts);
    out->n_hosts =
        pli_read_ints(n_ranks, "hosts: ranks", 1, out->n_ranks, PLI_MAX_HOSTS);
    if (out->n_hosts < 0 || read_names(names, out) != 0 ||
        find_rank(rank, world_size, out) != 0)
        return -1;
    const int n_fds = pli_read_ints(fds, "hosts: sockets", -1, out->fds,
                                    (Py_ssize_t)out->n_hosts * PLI_N_LINK_STREAMS);
    if (n_fds < 0)
        return -1;
    out->has_links = n_fds > 0;
    if (out->has_links != (out->inner_rank == 0) ||
        (out->has_links && n_fds != out->n_hosts * PLI_N_LINK_STREAMS))
        return pli_error(
            PyExc_ValueError,
            "hosts: %d sockets for rank %d of %d hosts: the first rank of a "
            "host gives %d a host, others none",
            n_fds, rank, out->n_hosts, PLI_N_LINK_STREAMS);
    return 0;
}

pl_status pli_world_hosts_join(const pli_world_hosts *hosts,
                               pli_hierarchy_options *options, pl_comm **comm)
{
    pl_status st = PL_OK;
    pli_links *links = NULL;
    const pli_links_options of_links = {.n_hosts = hosts->n_hosts,
                                        .host = hosts->host,
                                        .rank = hosts->first_rank,
                                        .fds = hosts->fds,
                                        .names = hosts->names};
    if (hosts->has_links)
        PL_TRY(pli_links_create(&of_links, &links));
    options->n_hosts = hosts->n_hosts;
    options->n_ranks = hosts->n_ranks;
    options->inner = *comm;
    options->links = links;
    PL_TRY(pli_hierarchy_create(options, comm));
    links = NULL;
done:
    pli_links_destroy(links);
    return st;
}
