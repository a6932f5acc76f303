"""Training loops on ranks: second derivatives, compiled steps, and program ends."""

import contextlib
import copy
import gc
import subprocess
import sys
import warnings
import weakref

import paceline
import pytest
import torch
from cases import (
    Twin,
    assert_equal,
    integer_weights,
    mean_over,
    net,
    on_gpus_too,
    on_ranks,
    train,
)
from support.failing import FailsInBackward
from support.threads import in_threads
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

# ---- higher order, anomaly, autocast ------------------------------------------------


@on_gpus_too(how=["recorded"])
@on_ranks(how=["recorded", "recorded, with a hook", "under anomaly detection"])
def test_backwards_of_this_kind_give_the_same_values(ranks, how):
    twin = Twin(ranks, net())
    is_recorded = how != "under anomaly detection"
    if how == "recorded, with a hook":  # it fails with torch's class
        twin.ours.register_comm_hook(ranks.group, default_hooks.allreduce_hook)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(not is_recorded):
        warnings.simplefilter("ignore")
        train(twin, ranks, create_graph=is_recorded)
    twin.zero()


def test_second_gradients_averaged_are_those_of_the_mean_loss(ranks):
    """Values are means, derivatives are local.  torch 2.13 itself raises here."""
    module = integer_weights(nn.Sequential(nn.Linear(150, 90), nn.Linear(90, 2)), 1, 3)
    rows = ranks.all(ranks.integers(3, 150))
    plain, ours = copy.deepcopy(module), ranks.wrap(module)

    def second(model, loss):
        params = list(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward(create_graph=True)
        total = sum(p.grad.square().sum() for p in params)
        return torch.autograd.grad(total, params, allow_unused=True)

    expected = second(plain, sum(plain(x).sum() for x in rows) / ranks.n)
    mine = ranks.all(second(ours, ours(rows[ranks.rank]).sum()))
    for i, one in enumerate(expected):
        assert_equal(mean_over([row[i] for row in mine]), one, "a second gradient")


def test_a_graph_that_has_saved_a_local_gradient_does_not_go_backward(ranks):
    """The mean overwrites the local gradient in place: autograd detects that."""
    module = integer_weights(nn.Sequential(nn.Linear(150, 90), nn.Linear(90, 2)), 1, 3)
    model = ranks.wrap(module)
    totals = []
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: totals.append(p.grad.square().sum())
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(ranks.integers(3, 150)).sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(sum(totals), module[0].weight)


# ---- compiled -----------------------------------------------------------------------


def compiled_autograd(step=0, compiler=lambda graph: graph):
    """Capture backwards; by default run their graphs as they are, in less time."""
    if step == 0:  # later steps may use what was compiled
        torch._dynamo.reset()
    module = torch._dynamo.compiled_autograd
    enable = getattr(module, "_enable", None) or module.enable
    return enable(compiler)


@on_ranks(unused=["none", "by all", "by rank 1"])
def test_a_compiled_backward_is_averaged(ranks, unused):
    module = net(6, 130, 2)
    module[0].rare = nn.Linear(6, 130)
    twin, options = Twin(ranks, module), {}
    if unused == "by rank 1":  # the graphs of both other values, one on each rank
        options["compiler"] = torch.compile(backend="eager", dynamic=False)
    for step in range(2):
        twin.zero()
        x = ranks.integers(3, 6, key=step)
        uses_all = unused == "none" or (unused == "by rank 1" and ranks.rank == 0)

        def loss(model, x=x, uses_all=uses_all):
            bare = getattr(model, "module", model)
            return model(x).sum() + (bare[0].rare(x).sum() if uses_all else 0)

        loss(twin.plain).backward()
        with compiled_autograd(step, **options):
            loss(twin.ours).backward()
        twin.average()
        twin.check()


def test_a_compiled_backward_whose_end_cannot_be_seen_is_an_error(ranks):
    """In another thread, with unused parameters, no callback can run at its end."""
    module = net(6, 130, 2)
    module[0].rare = nn.Linear(6, 130)
    model = ranks.wrap(module)

    def run(_):
        for _ in range(3):
            out = model(ranks.integers(3, 6))
            with compiled_autograd():
                out.sum().backward()

    with pytest.raises(RuntimeError) as caught:
        in_threads(run, 1)
    told = isinstance(caught.value, paceline.PeerError)
    assert told or "main thread" in str(caught.value)


class Middle(nn.Module):
    """Its backward fails on request."""

    fails = False

    def forward(self, x):
        return FailsInBackward.apply(x, ValueError("out of luck")) if self.fails else x


def test_a_compiled_backward_that_fails_is_told_to_the_peers(ranks):
    """It fails at its begin, in a hook of the output, or in its middle."""
    failures = {1: "at once", 3: "in the middle"}

    def explode(_):
        raise ValueError("out of luck")

    first, *rest = net(6, 130, 2)
    first.rare = nn.Linear(6, 130)
    middle = Middle()
    model = ranks.wrap(nn.Sequential(first, middle, *rest))
    for step in range(5):
        model.zero_grad()
        middle.fails = ranks.rank == 1 and failures.get(step) == "in the middle"
        out = model(ranks.integers(3, 6))
        if ranks.rank == 1 and failures.get(step) == "at once":
            out.register_hook(explode)
        ranks.all(step)  # else a peer may receive the failure in its forward
        kind = ValueError if ranks.rank else paceline.PeerError
        fails = pytest.raises(kind, match="out of luck")
        does = fails if step in failures else contextlib.nullcontext()
        with does, compiled_autograd(step):
            out.sum().backward()
        if step not in failures:
            ranks.assert_same([p.grad for p in rest[-1].parameters()], "gradients")


@on_ranks(hook=[False, True])
def test_a_whole_compiled_step_is_compiled_once(ranks, hook):
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


# ---- a model that keeps its output ---------------------------------------------------


class Keeping(nn.Module):
    """Keeps its output: a cycle through torch's graph, which gc cannot see."""

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


@on_ranks(where=["itself", "a tuple", "a child", "its loss"])
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
