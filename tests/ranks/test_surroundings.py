"""Training without pidfds, /proc, shared memory, or enough descriptors."""

import errno
import gc
import logging
import os
import resource
import signal
import socket
import time

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._ddp import open_files, peers
from support.forbidden import forbid, is_known
from support.processes import descriptors, shared_mappings
from support.ranks import run_ranks, start_ranks, tell, values

needs_seccomp = pytest.mark.skipif(
    not is_known(), reason="the numbers of this machine's system calls are not known"
)


def module():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Linear(300, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape).float())
    return net


def inputs(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(-2, 3, (3, 4), generator=generator).float()


def train(model, rank, n_ranks, steps=2):
    """Compare each step's gradients with the plain module's for all ranks' data."""
    plain = module()
    for step in range(steps):
        model.zero_grad()
        plain.zero_grad()
        model(inputs(rank, step)).sum().backward()
        for peer in range(n_ranks):
            (plain(inputs(peer, step)).sum() / n_ranks).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(mine.grad, mean.grad) for mine, mean in pairs)


def log_lines():
    """Return a list that receives Paceline's log from now on."""
    lines = []

    class Keeper(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logging.getLogger("paceline").addHandler(Keeper())
    return lines


def train_without(rank, n_ranks, take, whose):
    """Train after `take` has withheld a resource from rank `whose`, or from all."""
    lines = log_lines()
    if whose in (rank, None):
        give_back = take(rank)
    model = paceline.DistributedDataParallel(module())
    train(model, rank, n_ranks)
    if whose in (rank, None) and give_back is not None:
        give_back()
    return not shared_mappings(), lines


# ---- pidfds -------------------------------------------------------------------------


def no_pidfd_in_python(rank):
    del os.pidfd_open
    del signal.pidfd_send_signal


def no_pidfd_in_kernel(rank):
    forbid("pidfd_open", errno.ENOSYS)


def pidfds_are_forbidden(rank):
    forbid("pidfd_open", errno.EPERM)


WITHOUT_PIDFDS = [
    no_pidfd_in_python,
    pytest.param(no_pidfd_in_kernel, marks=needs_seccomp),
    pytest.param(pidfds_are_forbidden, marks=needs_seccomp),
]


@pytest.mark.parametrize("take", WITHOUT_PIDFDS)
def test_ranks_share_memory_where_there_are_no_pidfds(take):
    for is_group_comm, lines in values(run_ranks(train_without, 2, take, None)):
        assert not is_group_comm
        assert lines == []


def lose_a_rank(rank, n_ranks, take, is_wrapped):
    take(rank)
    if rank == 1 and not is_wrapped:
        tell("ready")
        time.sleep(60)
    model = paceline.DistributedDataParallel(module())
    model(inputs(rank, 0)).sum().backward()
    if rank == 1:
        tell("ready")
        time.sleep(60)
    model(inputs(rank, 0)).sum().backward()


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("take", WITHOUT_PIDFDS)
def test_a_rank_that_dies_is_named_where_there_are_no_pidfds(take, is_wrapped):
    with start_ranks(lose_a_rank, 3, take, is_wrapped) as ranks:
        assert ranks.hear(1) == "ready"
        ranks.kill(1)
        outcomes = ranks.wait()
    for rank in (0, 2):
        error = outcomes[rank].error
        assert error.kind == "PeerError", error
        assert "rank 1" in error.message, error


# ---- hosts, users, namespaces -------------------------------------------------------


class changed_host:
    """Makes a rank describe its host differently from what it is."""

    def __init__(self, **fields):
        self.fields = fields

    def __call__(self, rank):
        here = peers.Host.here
        changed = {name: value + rank for name, value in self.fields.items()}
        peers.Host.here = classmethod(lambda cls: cls(**{**vars(here()), **changed}))


def no_proc(rank):
    def stat(path, *args, **kwargs):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "no /proc here", path)
        return real(path, *args, **kwargs)

    real, os.stat = os.stat, stat

    def give_back():
        os.stat = real

    return give_back


def test_ranks_in_pid_namespaces_of_their_own_share_memory():
    outcomes = values(run_ranks(train_without, 2, changed_host(processes=7), None))
    assert [is_group_comm for is_group_comm, _ in outcomes] == [False, False]


# ---- shared memory ------------------------------------------------------------------


def no_memfd(rank):
    forbid("memfd_create")


def no_word_on_callers(rank):
    forbid("getsockopt", third_argument=socket.SO_PEERCRED)


def no_large_files(rank):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def lowest_descriptor():
    """Return the lowest free descriptor."""
    lowest = os.dup(0)
    os.close(lowest)
    return lowest


def no_descriptors(rank):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_descriptor(), before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)


def few_descriptors_yet(rank):
    limits = lowest_descriptor() + 6, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def few_descriptors(rank):
    limits = (lowest_descriptor() + 6,) * 2
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_soft_limit_of_open_files_is_raised_as_the_world_needs():
    ranks = run_ranks(train_without, 4, few_descriptors_yet, None, rendezvous="tcp")
    assert values(ranks) == [(False, [])] * 4


def few_descriptors_unseen(rank):
    """Leave too few descriptors to meet four ranks, which is found too late."""
    open_files.make_room = lambda n_more: None
    few_descriptors(rank)


UNKNOWN = "ranks 0 and 1 are on unknown hosts"
SOCKETS = "): they talk by sockets between them"


@pytest.mark.parametrize(
    ("n_ranks", "take", "whose", "words", "end"),
    [
        (2, changed_host(user=1000), None, "ranks 0 and 1 are other users", SOCKETS),
        (2, changed_host(users=7), None, "ranks 0 and 1 are other users", SOCKETS),
        (
            2,
            changed_host(network=7),
            None,
            "ranks 0 and 1 are in other network namespaces",
            SOCKETS,
        ),
        (2, no_proc, None, UNKNOWN, SOCKETS),
        pytest.param(2, no_memfd, None, "rank 0: cannot make", "", marks=needs_seccomp),
        *(
            pytest.param(
                *(2, no_word_on_callers, whose),
                "rank 0: cannot learn which process connects",
                "Operation not permitted",
                marks=needs_seccomp,
            )
            for whose in (None, 0)
        ),
        (2, no_large_files, 0, "rank 0: cannot size shared memory", ""),
        (2, no_descriptors, 0, f"{UNKNOWN}: [Errno 24] Too many open files", ""),
        (2, no_descriptors, 1, f"{UNKNOWN}: [Errno 24] Too many open files", ""),
        (4, few_descriptors, 0, "rank 0: ", "limit"),
        (4, few_descriptors, 3, "rank 3: ", "limit"),
        (
            4,
            few_descriptors_unseen,
            0,
            "rank 0: cannot accept another rank's connection",
            "Too many open files",
        ),
    ],
)
def test_ranks_that_share_no_memory_train_by_other_ways(
    n_ranks, take, whose, words, end
):
    # A FileStore of torch opens its file for each operation.
    outcomes = values(run_ranks(train_without, n_ranks, take, whose, rendezvous="tcp"))
    assert all(is_without for is_without, _ in outcomes)
    (line,) = outcomes[0][1]
    assert line.startswith(f"the ranks share no memory ({words}"), line
    assert end in line
    assert all(lines == [] for _, lines in outcomes[1:])


def count_descriptors(rank, n_ranks):
    kept = [paceline.DistributedDataParallel(module())]
    before = len(descriptors())
    kept += [paceline.DistributedDataParallel(module()) for _ in range(5)]
    per_wrapper = (len(descriptors()) - before) / 5
    dist.barrier()
    kept.clear()
    gc.collect()
    left = [what for what in descriptors().values() if what == "anon_inode:[pidfd]"]
    return per_wrapper, left


def test_a_wrapper_needs_two_descriptors_however_many_ranks_there_are():
    for per_wrapper, left in values(run_ranks(count_descriptors, 4)):
        assert per_wrapper == 2  # its world's, and its recorder's
        assert left == []
