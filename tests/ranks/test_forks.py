"""Forked children of a rank: torch's objects stay as they are, whatever a child frees.

A Gloo group ends its threads as it is destroyed.  A forked child does not have them, so
it must not destroy a group, however it comes to be the last to hold one.
"""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._ddp import peers
from support.groups import Over
from support.ranks import run_ranks, values
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = 20.0
BATCH = torch.arange(6.0).reshape(3, 2)


# ---- kinds of group -----------------------------------------------------------------


def gloo():
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    return group, group


def over():
    inner = dist.new_group(timeout=timedelta(seconds=SECONDS))
    return Over(inner), inner


def own_gloo():
    """Return a group for GPUs alone: Paceline makes one for messages between hosts."""
    group = dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=SECONDS))
    return group, group


# ---- states of a wrapper ------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def train(model):
    model.zero_grad()
    model(BATCH).sum().backward()
    assert model.module.weight.grad.tolist() == [[6.0, 9.0]]


def wrap(make_group):
    """Return a wrapper that has taken a step, and the group that torch registered."""
    group, registered = make_group()
    model = paceline.DistributedDataParallel(net(), process_group=group)
    train(model)
    return model, registered


def live(make_group):
    return [wrap(make_group)[0]]


def its_group_destroyed(make_group):
    model, registered = wrap(make_group)
    dist.destroy_process_group(registered)
    return [model]


def dropped(make_group):
    model, registered = wrap(make_group)
    kept = [model.process_group]
    dist.destroy_process_group(registered)
    return kept


def in_a_cycle(make_group):
    model, registered = wrap(make_group)
    model.itself = [model]
    dist.destroy_process_group(registered)
    return []


def failed(make_group):
    """Keep the error of a construction, whose frames hold the group and its store."""
    group, registered = make_group()
    with pytest.raises(TypeError) as caught:
        paceline.DistributedDataParallel(3, process_group=group)
    dist.destroy_process_group(registered)
    return [caught]


def wrapped_anew(make_group):
    model, registered = wrap(make_group)
    group, second = make_group()
    model._update_process_group(group)
    old = model._session.world
    train(model)
    for each in (registered, second):
        dist.destroy_process_group(each)
    return [old, model]


def with_a_hook_on_it(make_group):
    """Return a wrapper whose hook alone holds another group, and has work in flight."""
    model, registered = wrap(make_group)
    other = dist.new_group(timeout=timedelta(seconds=SECONDS))
    works = []

    def average(group, bucket):
        works.append(group.allreduce([bucket.buffer().clone()]))
        return works[-1].get_future().then(lambda _: bucket.buffer())

    model.register_comm_hook(other, average)
    train(model)
    for each in (registered, other):
        dist.destroy_process_group(each)
    return [model]


STATES = (
    *(live, its_group_destroyed, dropped, in_a_cycle, failed, wrapped_anew),
    with_a_hook_on_it,
)


# ---- what a child does --------------------------------------------------------------

held = []


def collect():
    held.clear()
    gc.collect()
    os._exit(0)


def evaluate():
    for model in held:
        if isinstance(model, nn.Module):
            with torch.no_grad():
                assert torch.equal(model.eval()(BATCH), net()(BATCH))
    collect()


def leave():
    os._exit(0)


def end_as_a_program():
    gc.disable()  # what is garbage now stays so until the interpreter ends
    ctypes.pythonapi.Py_Exit(0)


def drop_and_end():
    held.clear()
    end_as_a_program()


def fork_again():
    """Let a child of the child free all."""
    code = run_child(collect)
    os._exit(code & 0xFF)


ENDS = (collect, evaluate, leave, fork_again)
SLOW_ENDS = (end_as_a_program, drop_and_end)  # tenths of a second each


def run_child(end):
    """Fork a child; return how it ended: 0 if well, -11 after a SIGSEGV."""
    pid = os.fork()
    if pid == 0:
        try:
            end()
        finally:
            sys.stdout.flush()
            os._exit(3)
    until = time.monotonic() + SECONDS
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


def evaluate_and_free(index):
    with torch.no_grad():
        is_right = [
            torch.equal(model.eval()(BATCH), net()(BATCH))
            for model in held
            if isinstance(model, nn.Module)
        ]
    held.clear()
    gc.collect()
    return torch.tensor(all(is_right))


def of_a_pool():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        answer = pool.map_async(evaluate_and_free, [0]).get(SECONDS)
    return 0 if all(answer) else 3


class Freeing(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return evaluate_and_free(index)


def of_a_loader():
    loader = DataLoader(Freeing(), num_workers=1, timeout=SECONDS)
    return 0 if all(answer.all() for answer in loader) else 3


def started(start):
    try:
        return start()
    except (RuntimeError, multiprocessing.TimeoutError) as error:
        return repr(error)[:80]


# ---- the table ----------------------------------------------------------------------


def run_table(rank, n_ranks, kind, is_long):
    """Return the cells of the table that did not end well."""
    if kind is own_gloo:
        peers.Host.shares_memory_with = lambda host, other: host.pid == other.pid
        peers.count_by_host = lambda hosts: []
    faulthandler.cancel_dump_traceback_later()  # its thread would hang a child's end
    found = {}
    for state in STATES[: None if n_ranks > 1 or kind is over else -2]:
        gc.disable()
        held[:] = state(kind)
        is_whole = is_long or state is its_group_destroyed
        ends = [*ENDS, *SLOW_ENDS] if is_whole else ENDS
        codes = {end.__name__: run_child(end) for end in ends}
        for start in (of_a_pool, of_a_loader) if is_whole else ():
            codes[start.__name__] = started(start)
        found |= {(state.__name__, end): c for end, c in codes.items() if c != 0}
        if state is live:
            train(held[0])
        held.clear()
        gc.enable()
        gc.collect()
        train(wrap(kind)[0])  # the parent goes on
        dist.barrier()
    return found


CELLS = [(gloo, 1), (gloo, 2), (over, 1), (over, 2), (own_gloo, 2)]


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "n_ranks"), CELLS, ids=[f"{kind.__name__}-{n}" for kind, n in CELLS]
)
def test_a_child_may_free_what_its_parent_has_wrapped(kind, n_ranks, is_long):
    found = values(run_ranks(run_table, n_ranks, kind, is_long, timeout=120))
    assert found == n_ranks * [{}]


# ---- a child of a backward ----------------------------------------------------------


def use_in_a_child():
    with pytest.raises(RuntimeError, match="is not a rank itself"):
        held[0](BATCH)
    os._exit(0)


def fork_in_backward(rank, n_ranks):
    """Fork in a thread of rank 0, in a step; return how the children ended."""
    held[:] = [wrap(over)[0]]
    codes = []

    def fork(_):
        if rank == 0:
            child = threading.Thread(
                target=lambda: codes.append(run_child(use_in_a_child))
            )
            child.start()
            child.join()

    for parameter in held[0].parameters():
        parameter.register_post_accumulate_grad_hook(fork)
    for _ in range(2):
        train(held[0])
    return codes


def test_a_child_of_a_backward_ends_no_step_of_its_parent():
    assert values(run_ranks(fork_in_backward, 2, timeout=60)) == [4 * [0], []]
