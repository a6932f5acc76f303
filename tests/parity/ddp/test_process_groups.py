"""Process groups that are neither Gloo nor NCCL: their collectives carry all data.

Groups in Python over Gloo represent any other kind.  torch's class over the same group,
or over Gloo itself, is the reference.  Where bits are compared there are two ranks: a
sum of two is rounded once, in any implementation.
"""

import copy

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import (
    Branches,
    apart,
    as_torch,
    assert_equal,
    gloo_takes_complex,
    grads_of,
    integer_weights,
    net,
    on_gpus_too,
    on_ranks,
    step_of,
)
from support.copies import pickled
from support.groups import FutureOnly, Over, WaitAndFuture, WaitOnly, wrap_over
from support.ranks import run_ranks, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

KINDS = {
    "its own": (None, ()),
    "wait only": (WaitOnly, ["wait"]),
    "get_future only": (FutureOnly, ["get_future"]),
    "both": (WaitAndFuture, ["wait", "get_future"]),
}


class Net(nn.Module):
    """Has sparse, dense, small, large, unused and frozen parameters, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(30, 8, sparse=True)
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Linear(8, 1500)
        self.out = nn.Linear(1500, 2).double()
        kind = torch.complex64 if gloo_takes_complex() else torch.float32
        self.turn = nn.Parameter(torch.randn(2, dtype=kind))
        self.brief = nn.Parameter(torch.randn(3).bfloat16())
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        x = self.out(self.wide(self.norm(self.table(x))).tanh().double())
        x = (x.to(self.turn.dtype) * self.turn).abs()
        return self.frozen(x) * self.brief.float().sum()


def train(ranks, model, steps=3, key=()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        words = torch.randint(30, (5,), generator=ranks.generator("w", step, *key))
        model(words).square().sum().backward()
        optimizer.step()


def assert_alike(ours, theirs, has_buffers=True):
    named = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    for (name, mine), other in named:
        assert_equal(mine, other, name)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        if has_buffers:
            assert torch.equal(mine, other)


# ---- groups in Python ---------------------------------------------------------------


@on_ranks(works=[*KINDS])
def test_a_group_in_python_carries_all_and_gives_the_bits_of_torch(ranks, works):
    kind, called = KINDS[works]
    group = Over(ranks.group, kind)
    ours = wrap_over(group, Net())
    at_construction = dict(group.counts)
    theirs = ranks.wrap_by_torch(Net(), find_unused_parameters=True)
    train(ranks, ours)
    train(ranks, theirs)
    assert_alike(ours, theirs, ranks.rank == 0)
    assert group.counts["allreduce"] > 3
    assert group.counts["broadcast"] > at_construction["broadcast"]  # of buffers
    assert all(group.counts[name] > 3 for name in called)


def test_gradients_that_a_group_in_python_carries_are_averaged_once(ranks):
    """Also if they are views that stay in place and accumulate."""
    module = nn.Linear(200, 100, bias=False)
    nn.init.zeros_(module.weight)
    model = wrap_over(Over(ranks.group), module)
    for step in range(1, 4):
        model(torch.full((1, 200), 2.0 * ranks.rank)).sum().backward()
        assert module.weight.grad.unique().tolist() == [float(step)]
        with model.no_sync():
            model(torch.zeros(1, 200)).sum().backward()


class LazyWork(dist.Work):
    def __init__(self, run):
        super().__init__()
        self._run = run
        self._future = torch.futures.Future()

    def wait(self, timeout):
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


# ---- groups of some ranks -----------------------------------------------------------


@on_gpus_too(4)
@on_ranks(4)
def test_groups_of_some_ranks_are_averaged_apart(ranks):
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = nn.Linear(100, 100)
    wrapper = paceline.DistributedDataParallel(
        model, process_group=halves[ranks.rank % 2]
    )
    wrapper(torch.full((1, 100), float(ranks.rank))).sum().backward()
    assert model.weight.grad.unique().tolist() == [[1.0], [2.0]][ranks.rank % 2]


# ---- hosts that share no memory -----------------------------------------------------


@as_torch()
def test_ranks_that_share_no_memory_give_the_bits_of_torch(ranks, wrap):
    with apart():
        model = wrap(Net(), find_unused_parameters=True)
    train(ranks, model)
    yield [*model.parameters()]
    if ranks.rank == 0:
        yield [*model.buffers()]


# ---- all features of a wrapper ------------------------------------------------------

WORLDS = ["group in Python", "no shared memory"]


def over(ranks, wrap, world, module, **options):
    """Wrap over a group in Python or over separate hosts; torch's class over Gloo."""
    if wrap == ranks.wrap_by_torch:
        return wrap(module, **options)
    if world == "group in Python":
        return wrap_over(Over(ranks.group, FutureOnly), module, **options)
    with apart():
        return wrap(module, **options)


def test_hooks_that_issue_more_as_their_futures_come_have_the_group_alone(ranks):
    ends = []
    with apart():
        ours = ranks.wrap(net())
    for model in (ours, ranks.wrap_by_torch(net())):
        state = powerSGD_hook.PowerSGDState(
            ranks.group, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(5):
            step_of(model, ranks.integers(2, 6, key=step))
        ends.append([p.grad for p in model.parameters()])
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs)


def plain_step(ranks, model, step):
    model(ranks.integers(2, 6, key=step)).sum().backward()


def accumulating_step(ranks, model, step):
    with model.no_sync():
        plain_step(ranks, model, (step, 0))
    plain_step(ranks, model, step)


def step_of_one_branch(ranks, model, step):
    both = (step & 1) ^ (step >> 1 & ranks.rank)
    model(ranks.integers(2, 2, key=step), both=bool(both)).sum().backward()


LOOPS = {
    "accumulation": (net, accumulating_step),
    "a branch left out": (Branches, step_of_one_branch),
    "a communication hook": (net, plain_step),
}


@as_torch(world=WORLDS, loop=[*LOOPS])
def test_gradients_over_any_group_are_those_of_torch(ranks, wrap, world, loop):
    make, step_of = LOOPS[loop]
    options = {"find_unused_parameters": make is Branches}
    model = over(ranks, wrap, world, integer_weights(make()), **options)
    if loop == "a communication hook":
        model.register_comm_hook(ranks.group, default_hooks.fp16_compress_hook)
    for step in range(4):
        model.zero_grad()
        step_of(ranks, model, step)
        yield grads_of(model)


@as_torch(world=WORLDS, throws=[False, True])
def test_uneven_inputs_are_those_of_torch(ranks, wrap, world, throws):
    model = over(ranks, wrap, world, net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    try:
        with model.join(throw_on_early_termination=throws):
            for step in range(1 + 2 * ranks.rank):
                optimizer.zero_grad()
                model(ranks.integers(2, 6, key=step)).sum().backward()
                optimizer.step()
        yield [*model.parameters()]
    except RuntimeError as error:
        yield str(error).split(".")[0]


@on_ranks(world=WORLDS)
def test_a_model_that_is_changed_is_wrapped_anew(ranks, world):
    module = integer_weights(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
    with apart():
        model = over(ranks, ranks.wrap, world, module)
        model(ranks.integers(2, 6)).sum().backward()
        module.append(integer_weights(nn.Linear(2, 2)))
        module.double()
        step_of(model, ranks.integers(2, 6, dtype=torch.float64))
    ranks.assert_same([p.grad for p in module.parameters()], "gradients")
    assert module[2].weight.grad is not None


@on_ranks(how=[copy.deepcopy, pickled])
def test_a_copy_trains_over_ranks_that_share_no_memory(ranks, how):
    with apart():
        model = paceline.DistributedDataParallel(net())
        model(ranks.integers(2, 6)).sum().backward()
        clone = how(model)
        step_of(clone, ranks.integers(2, 6, key=1))
    ranks.assert_same([p.grad for p in clone.parameters()], "gradients")


# ---- the fake backend ---------------------------------------------------------------


def train_over_a_fake_group(rank, n_ranks):
    """Train over the fake backend of torch's own tests: its collectives do nothing.

    So the sum over two ranks is this rank's own part.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plain = copy.deepcopy(module)
    model = paceline.DistributedDataParallel(module)
    for step in range(3):
        for one in (model, plain):
            one.zero_grad()
            one(torch.randn(5, 6, generator=torch.Generator().manual_seed(step)))[
                0
            ].sum().backward()
    for mine, p in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, p)
        assert torch.equal(mine.grad, p.grad / 2)
    for mine, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, other)
    return True


def test_a_fake_group_carries_gradients_nowhere():
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    outcomes = run_ranks(train_over_a_fake_group, 2, rendezvous="none")
    assert values(outcomes) == [True, True]
