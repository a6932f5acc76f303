"""The end of a wrapper: hooks, descriptors, memory, children."""

import atexit
import gc
import os
import sys
from pathlib import Path

import paceline
import pytest
import torch
import torch.distributed as dist
from support.processes import descriptors, shared_mappings, shared_names
from support.ranks import run_ranks, values
from torch.utils.data import DataLoader, TensorDataset

N_CYCLES = 20


def make_module():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 128)
    )


def step(model, rank):
    inputs = torch.arange(32.0).reshape(4, 8).remainder(5.0) + rank
    model(inputs).sum().backward()


def n_hooks(module):
    hooks = [p._post_accumulate_grad_hooks for p in module.parameters()]
    return [len(of_one) if of_one else 0 for of_one in hooks]


def n_descriptors():
    gc.collect()
    return len(descriptors())


def wrap_again_and_again(rank, n_ranks):
    module = make_module()
    step(paceline.DistributedDataParallel(module), rank)  # torch opens descriptors
    gc.collect()
    before, hooks = n_descriptors(), []
    for _ in range(N_CYCLES):
        model = paceline.DistributedDataParallel(module)
        step(model, rank)
        hooks.append(n_hooks(module))
        del model
        hooks.append(n_hooks(module))
        step(module, rank)  # the bare module can still train
    module.zero_grad()
    return {"hooks": hooks, "more": n_descriptors() - before, "maps": shared_mappings()}


def test_wrapping_again_leaves_one_set_of_hooks_and_nothing_else():
    for value in values(run_ranks(wrap_again_and_again, 2)):
        assert value["hooks"] == N_CYCLES * [[1] * 6, [0] * 6]
        assert value["more"] == 0
        assert value["maps"] == []


# ---- actions of single ranks ---------------------------------------------------------


def fork_children(rank, n_ranks):
    """Fork a child for each kind of end; return the results of them and this rank."""
    held = [paceline.DistributedDataParallel(make_module())]
    step(held[0], rank)
    before = n_descriptors()
    found = []
    for end in ENDS:
        gradients = [p.grad.clone() for p in held[0].parameters()]
        pid = os.fork()
        if pid == 0:
            run_child(held, end)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pairs = zip(held[0].parameters(), gradients, strict=True)
        is_same = all(torch.equal(p.grad, was) for p, was in pairs)
        for _ in range(3):
            step(held[0], rank)
        dist.barrier()
        found.append((code, is_same, n_descriptors() - before))
    return found


def use_the_wrapper(held):
    with pytest.raises(RuntimeError, match="forked from rank"):
        step(held[0], 0)
    with pytest.raises(RuntimeError, match=r"is not a rank itself|mat1 and mat2"):
        held[0](torch.ones(1, 1))


def write_gradients(held):
    for parameter in held[0].parameters():
        parameter.grad.add_(1.0)


def train_the_bare_model(held):
    step(held[0].module, 0)


def collect(held):
    parameters = list(held[0].parameters())
    gradients = [p.grad.clone() for p in parameters]
    held.clear()
    gc.collect()
    # The child's new memory fills the addresses that the world left unmapped.
    kept = [torch.full((1 << 15,), 3.0) for _ in range(200)]
    pairs = zip(parameters, gradients, strict=True)
    assert all(torch.equal(p.grad, grad) for p, grad in pairs)
    del parameters, pairs
    gc.collect()
    assert all(bool((tensor == 3.0).all()) for tensor in kept)


ENDS = [use_the_wrapper, write_gradients, train_the_bare_model, collect]


def run_child(held, end):
    """Act as an ordinary forked child; never return."""
    code = 3
    try:
        end(held)
        held.clear()
        gc.collect()
        atexit._run_exitfuncs()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def test_forked_children_leave_their_rank_and_its_gradients_alone():
    for found in values(run_ranks(fork_children, 2)):
        assert found == [(0, True, 0)] * len(ENDS)


def train_with_workers(rank, n_ranks, start):
    # Loaders before and after the wrapper, whose processes end while it trains.
    data = TensorDataset(torch.arange(256.0).reshape(32, 8))
    model = paceline.DistributedDataParallel(make_module())
    n_workers = 1 if start == "spawn" else 2  # each one imports torch
    loader = DataLoader(
        data, batch_size=8, num_workers=n_workers, multiprocessing_context=start
    )
    for _ in range(2):
        for (inputs,) in loader:
            model.zero_grad()
            model(inputs + rank).sum().backward()
    return model.module[2].weight.grad.clone()


@pytest.mark.parametrize(
    "start", ["fork", pytest.param("spawn", marks=pytest.mark.long)]
)
def test_dataloader_workers_come_and_go(start):
    first, second = values(run_ranks(train_with_workers, 2, start, timeout=120))
    assert torch.equal(first, second)


def test_nothing_is_left_in_shared_memory():
    assert shared_names() == []
    assert not list(Path("/tmp").glob("*paceline-*.sock"))
