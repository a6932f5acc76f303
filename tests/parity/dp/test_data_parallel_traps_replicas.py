"""Traps in how replicas run: graphs, sizes, failures, threads, forks, groups."""

import os
import signal
import threading
import time

import paceline
import pytest
import torch
from replicas import (
    Twin,
    assert_close,
    assert_same_grads,
    integer_weights,
    integers,
    linear,
    loss_of,
    modules_of,
    net,
    step,
)
from support.ranks import run_ranks, values
from torch import nn
from torch.utils.checkpoint import checkpoint

BAD = 99.0


# ---- graphs and hooks ---------------------------------------------------------------


class Checkpointing(nn.Module):
    """Hides its second layer from the graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear(2)

    def forward(self, x):
        return checkpoint(self.b, self.a(x), use_reentrant=True)


def test_hooks_see_parameters_that_a_reentrant_checkpoint_hides(wrap):
    twin = Twin(wrap, Checkpointing())
    for module in modules_of(twin):
        for p in module.parameters():
            p.register_hook(lambda grad: grad * 2)
    for _ in range(2):
        twin.step(step, integers(7, 3))


class Decaying(nn.Module):
    """Replaces its buffer in forward, by a new tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(integers(3, low=1))
        self.register_buffer("scale", torch.full((3,), 64.0, dtype=torch.float64))

    def forward(self, x):
        out = x * (self.weight * self.scale)
        self.scale = self.scale * 0.5
        return out


def test_a_graph_keeps_the_buffer_that_forward_has_replaced(wrap):
    twin = Twin(wrap, Decaying())
    for _ in range(2):
        twin.step(lambda model, x: step(model, x) + step(model, x), integers(7, 3))


def test_a_graph_keeps_the_buffer_that_the_user_has_replaced(wrap):
    twin = Twin(wrap, Decaying())
    x = integers(7, 3)
    losses = []
    for model, module in zip(twin.models, modules_of(twin), strict=True):
        first = step(model, x)
        module.scale = torch.full((3,), 3.0, dtype=torch.float64)
        losses.append(first + step(model, x))
    for loss in losses:
        loss.backward()
    twin.assert_same()


@pytest.mark.parametrize("is_kept", [False, True], ids=["no .grad", ".grad"])
def test_a_parameter_frozen_before_backward_gets_no_gradient(wrap, is_kept):
    twin = Twin(wrap, net())
    x = integers(7, 3)
    if is_kept:
        twin.step(step, x)
    losses = [step(model, x) for model in twin.models]
    for module, loss in zip(modules_of(twin), losses, strict=True):
        module[0].weight.requires_grad_(False)
        loss.backward()
    twin.assert_same()
    for module in modules_of(twin):
        module[0].weight.requires_grad_(True)
    twin.step(step, x)


class Force(nn.Module):
    """Takes the gradient of an energy in forward, and tells the grad mode."""

    def __init__(self):
        super().__init__()
        self.energy = linear(1)

    def forward(self, x):
        mode = torch.full((len(x),), float(torch.is_grad_enabled()))
        x = x.detach().requires_grad_()
        if torch.is_grad_enabled():
            energy = self.energy(x).pow(3).sum()
        else:
            with torch.enable_grad():
                energy = self.energy(x).square().sum()
        return torch.autograd.grad(energy, x)[0], mode


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_frozen_module_runs_in_the_grad_mode_of_the_caller(wrap, mode):
    module = Force()
    module.requires_grad_(False)
    twin = Twin(wrap, module)
    for _ in range(2):
        with mode():
            twin.compare(lambda model, x: model(x), integers(7, 3))


# ---- calls of different sizes -------------------------------------------------------


@pytest.mark.parametrize("sizes", [(7, 2), (2, 7), (7, 1, 7), (1, 2, 7)])
def test_calls_of_different_sizes_may_share_a_backward(wrap, sizes):
    twin = Twin(wrap, net(), 3)
    x = integers(7, 3)
    for _ in range(3):
        twin.zero()
        twin.step(lambda model, x: sum(step(model, x[:n]) for n in sizes), x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_different_sizes_may_share_a_backward(wrap, use_reentrant):
    twin = Twin(wrap, net(), 3)

    def loss(model, x):
        parts = (x, x[:2])
        outs = [checkpoint(model, part, use_reentrant=use_reentrant) for part in parts]
        return sum(map(loss_of, outs))

    for _ in range(3):
        twin.step(loss, integers(7, 3).requires_grad_())


# ---- buffers and parts --------------------------------------------------------------


class Late(nn.Module):
    """Makes a buffer in its first forward, from its rows."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("first", None)

    def forward(self, x):
        if self.first is None:
            self.first = x[0].detach() * 2
        return self.linear(x) - self.first


def test_a_buffer_made_in_forward_is_that_of_the_first_replica(wrap):
    twin = Twin(wrap, Late())
    x = integers(7, 3)
    twin.ours(x)
    twin.plain(x)
    assert torch.equal(twin.inner.first, x[0] * 2)
    twin.step(step, x)
    for module in modules_of(twin):
        module.first = integers(3, seed=2)
    twin.step(step, x)


class Sharing(nn.Module):
    """Has one buffer in two places."""

    def __init__(self):
        super().__init__()
        self.linear, self.x, self.y = linear(), nn.Module(), nn.Module()
        table = integers(3)
        self.x.register_buffer("table", table)
        self.y.register_buffer("table", table)

    def forward(self, x):
        return self.linear(x) * self.x.table + self.y.table


@pytest.mark.parametrize("order", ["xy", "yx", "y", "xx"])
def test_owners_of_one_buffer_may_part(wrap, order):
    twin = Twin(wrap, Sharing())
    x = integers(7, 3)
    twin.step(step, x)
    for seed, owner in enumerate(order, start=5):
        for module in modules_of(twin):
            getattr(module, owner).table = integers(3, seed=seed)
        twin.step(step, x)
        for module in modules_of(twin):
            getattr(module, owner).table.add_(1)
        twin.step(step, x)


def own_parameter(tensor):
    class Own(nn.Parameter):
        pass

    return Own(tensor)


def parameter_with_a_function(tensor):
    parameter = nn.Parameter(tensor)
    parameter.load = lambda tensor: tensor
    return parameter


@pytest.mark.parametrize("make", [own_parameter, parameter_with_a_function])
def test_parameters_may_hold_code_of_the_script(wrap, make):
    twin = [linear(), linear()]
    for module in twin:
        module.weight = make(module.weight.detach())
    models = [wrap(twin[0]), twin[1]]
    for model in models:
        step(model, integers(7, 3)).backward()
    assert_same_grads(*models)


# ---- failures -----------------------------------------------------------------------


class Failing(torch.autograd.Function):
    """Passes numbers on, and fails at gradients that are not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if not grad.isfinite().all():
            raise ValueError("not finite")
        return grad


class Sparse(nn.Module):
    """Fails in backward after one of its sparse gradients is there."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(5, 3, sparse=True)
        self.second = nn.Embedding(5, 3, sparse=True)
        integer_weights(self)

    def forward(self, i):
        return Failing.apply(self.first(i)) + self.second(i)


@pytest.mark.parametrize("row", [1, 5])
def test_a_backward_that_fails_leaves_no_sparse_gradient_behind(wrap, row):
    twin = Twin(wrap, Sparse())
    i = torch.arange(7) % 5
    for model, module in zip(twin.models, modules_of(twin), strict=True):
        out = model(i)
        gradient = torch.ones_like(out)
        gradient[row] = float("inf")
        with pytest.raises(ValueError, match="not finite"):
            out.backward(gradient)
        module.zero_grad()
        step(model, i).backward()
    for mine, theirs in zip(*(m.parameters() for m in modules_of(twin)), strict=True):
        assert mine.grad.is_sparse
        assert_close(mine.grad.to_dense(), theirs.grad.to_dense())


# ---- other replicas, other wrappers -------------------------------------------------


def test_the_number_of_replicas_may_change_between_calls(wrap):
    twin = Twin(wrap, net())
    for n in (2, 3):
        names = wrap.devices(n)
        twin.ours.device_ids = names if wrap.is_gpu else [*map(torch.device, names)]
        twin.step(step, integers(7, 3))


# ---- threads, forks, process groups -------------------------------------------------


def in_threads(function, n=4):
    """Run `function(i)` in n threads at once; return what they return."""
    results = [None] * n
    barrier = threading.Barrier(n)

    def run(i):
        barrier.wait()
        try:
            results[i] = function(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_forwards_in_several_threads_keep_their_outputs_apart(wrap):
    ours = wrap(nn.Identity())

    def count_wrong(i):
        x = torch.full((256, 2048), float(i))
        with torch.no_grad():
            return sum(not torch.equal(ours(x), x) for _ in range(8))

    assert in_threads(count_wrong) == [0] * 4


def test_backwards_in_several_threads_add_up(wrap):
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    twin = Twin(wrap, integer_weights(module))
    x = integers(64, 64)
    for _ in range(8):
        twin.zero()
        in_threads(lambda i: twin.ours(x * i).sum().backward())
        for i in range(4):
            twin.plain(x * i).sum().backward()
        twin.assert_same()


def test_training_in_several_threads_is_no_error_and_keeps_outputs_apart(wrap):
    """BatchNorm of replica 0 writes to the module while another call looks at it."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    ours = wrap(module)
    batches = [integers(8, 3, seed=seed) for seed in range(4)]
    halves = [[module(half) for half in x.chunk(2)] for x in batches]

    def count_wrong(i):
        expected = torch.cat(halves[i])
        return sum(not torch.allclose(ours(batches[i]), expected) for _ in range(20))

    assert in_threads(count_wrong) == [0] * 4


class Waiting(nn.Module):
    """Waits in forward until somebody says so."""

    def __init__(self):
        super().__init__()
        self.linear, self.waits, self.has_begun = linear(), False, False

    def forward(self, x):
        self.has_begun = True
        while self.waits and x[0, 0] == BAD:
            time.sleep(0.01)
        return self.linear(x)


def test_a_child_forked_during_a_forward_may_use_the_wrapper_or_is_told(wrap):
    module = Waiting()
    ours = wrap(module)
    x = integers(7, 3)
    expected = ours(x)
    module.waits, module.has_begun = True, False
    held = x.clone()
    held[0, 0] = BAD
    thread = threading.Thread(target=ours, args=(held,))
    thread.start()
    while not module.has_begun:
        time.sleep(0.01)
    child = os.fork()
    if not child:
        signal.alarm(20)
        is_right = False
        try:
            if wrap.is_gpu:  # CUDA cannot be used in a forked process
                with pytest.raises(RuntimeError, match="called in a forked process"):
                    ours(x)
                is_right = True
            else:
                is_right = torch.equal(ours(x), expected)
        finally:
            os._exit(0 if is_right else 1)
    status = os.waitpid(child, 0)[1]
    module.waits = False
    thread.join()
    assert status == 0
    assert torch.equal(ours(x), expected)


class Outer(nn.Module):
    """Holds a wrapper, or what one would hold."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def train_inside_ddp(rank, _):
    """Return gradients of two steps: of the plain module, and of the wrapped one."""
    plain, inner = net(), net()
    ours = paceline.DataParallel(inner, ["cpu"] * 2)
    ddp = nn.parallel.DistributedDataParallel
    models = [ddp(Outer(model)) for model in (plain, ours)]
    grads = []
    for _ in range(2):
        for model, module in zip(models, (plain, inner), strict=True):
            step(model, integers(7, 3, seed=rank)).backward()
            grads.append([p.grad.clone() for p in module.parameters()])
    return grads


def test_gradients_inside_ddp_of_torch_are_those_of_all_replicas():
    for grads in values(run_ranks(train_inside_ddp, 2)):
        for begin in (0, 2):
            for mine, theirs in zip(grads[begin + 1], grads[begin], strict=True):
                assert_close(mine, theirs)
