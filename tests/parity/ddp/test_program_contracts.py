"""What programs do round a wrapper goes as with torch's class, or fails with words."""

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from cases import assert_equal, on_ranks
from torch import nn

# ---- whole steps under torch.compile ------------------------------------------------


@on_ranks(2, hook=[False, True])
def test_a_whole_compiled_step_is_compiled_once(ranks, hook):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch._dynamo.reset()
    wrapper = ranks.wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    if hook:
        wrapper.register_comm_hook(ranks.group, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)

    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def step(x):
        optimizer.zero_grad()
        wrapper(x).sum().backward()
        optimizer.step()

    seen = []
    for _ in range(6):
        step(torch.ones(3, 4))
        seen.append(len(compiled))
    assert seen[0] > 0
    assert seen[1:] == seen[1:2] * 5, seen


# ---- a model that keeps what it has returned -----------------------------------------


class Keeping(nn.Module):
    """Keeps its output, where gc cannot see that it leads back: in torch's graph."""

    def __init__(self, where):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.where = where

    def forward(self, x):
        output = self.layer(x)
        if self.where == "itself":
            self.kept = output
        elif self.where == "a tuple":
            self.kept = (output,)
        elif self.where == "a child":
            self.layer.kept = output
        return output


@on_ranks(2, where=["itself", "a tuple", "a child", "its loss"])
def test_a_model_that_keeps_its_output_is_freed(ranks, where):
    gone = []
    for _ in range(3):
        model = Keeping(where)
        wrapper = ranks.wrap(model)
        loss = wrapper(torch.ones(2, 3)).sum()
        if where == "its loss":
            model.kept = wrapper.kept = loss
        loss.backward()
        gone += [weakref.ref(model), weakref.ref(model.layer.weight)]
        del wrapper, model, loss
    gc.collect()
    assert [each() is None for each in gone] == [True] * 6


# ---- a slice of a mesh --------------------------------------------------------------


@on_ranks(4)
def test_a_slice_of_a_mesh_averages_over_its_own_ranks(ranks):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = ranks.integers(2, 3)
    grads = []
    for wrap in (ranks.ours, nn.parallel.DistributedDataParallel):
        wrapper = wrap(copy.deepcopy(model), device_mesh=mesh["dp"])
        wrapper(x).sum().backward()
        grads.append(wrapper.module.weight.grad)
    assert_equal(grads[0], grads[1], "the gradient")


# ---- a hook that returns no future --------------------------------------------------


@on_ranks(2)
def test_a_hook_without_a_future_is_refused_on_its_own_rank(ranks):
    called = dist.distributed_c10d._get_default_store()
    key = "a hook was called"

    def hook(_, bucket):
        if ranks.rank == 1:
            called.set(key, "1")

    wrapper = ranks.wrap(nn.Linear(3, 2))
    wrapper.register_comm_hook(None, hook)
    loss = wrapper(torch.ones(1, 3)).sum()
    if ranks.rank == 0:
        called.wait([key])
    with pytest.raises(RuntimeError, match="DDP communication hook's callback"):
        loss.backward()


# ---- a group whose Work does its part in wait() -------------------------------------


class LazyWork(dist.Work):
    def __init__(self, run):
        super().__init__()
        self._run = run
        self._future = torch.futures.Future()

    def wait(self, timeout=None):
        if not self._future.done():
            self._future.set_result(self._run())
        return True

    def get_future(self):
        return self._future


def test_a_work_that_makes_progress_in_wait_is_waited_for():
    from paceline._ddp.group_comm import wait_for

    done = []
    work = LazyWork(lambda: done.append(1))
    wait_for(work)
    assert done == [1]


# ---- the end of the program ---------------------------------------------------------

LATE = """
import builtins, torch, torch.distributed as dist
from paceline import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
class Late:
    def __init__(self, model):
        self.model, self.x = model, torch.ones(1, 2)
    def __del__(self):
        self.model(self.x).sum().backward()
builtins.late = Late(DistributedDataParallel(torch.nn.Linear(2, 1)))
"""


def test_training_while_the_interpreter_ends_does_not_abort():
    ran = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Python is ending" in ran.stderr
