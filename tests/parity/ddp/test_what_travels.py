"""What ranks synchronise may change on all of them; what they do not, on any."""

import copy
import time

import paceline
import pytest
import torch
from cases import assert_equal, integer_weights, on_ranks, skip_without_argument
from support.ranks import run_ranks
from torch import nn


def module():
    return integer_weights(
        nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
    )


class Both:
    """The same model, wrapped by us and by torch, on the same data."""

    def __init__(self, ranks, net=None, **options):
        net = net or module()
        self.ranks = ranks
        self.ours = ranks.wrap(copy.deepcopy(net), **options)
        self.theirs = ranks.wrap_by_torch(net, **options)

    def step(self, key):
        for model in (self.ours, self.theirs):
            model.zero_grad()
            model(self.ranks.integers(4, 6, key=key)).sum().backward()
        theirs = dict(self.theirs.module.named_parameters())
        for name, p in self.ours.module.named_parameters():
            assert_equal(p.grad, theirs[name].grad, f"step {key}: {name}")


class Metric(nn.Module):
    """Counts, in no buffer."""

    def forward(self, x):
        return x


def frozen():
    return nn.Linear(2, 2).requires_grad_(False)


ADDED = {
    "a metric": lambda net: net[0].add_module("metric", Metric()),
    "a frozen teacher": lambda net: net[0].add_module("teacher", frozen()),
    "a cached mask": lambda net: net.register_buffer("mask", torch.ones(3)),
    "an empty cache": lambda net: net.register_buffer("cache", None),
}


@on_ranks(2, what=[*ADDED], whose=[0, 1])
def test_what_does_not_travel_may_be_added_on_one_rank(ranks, what, whose):
    both = Both(ranks, broadcast_buffers=False)
    world = both.ours._session.world
    for step in range(4):
        if step == 2 and ranks.rank == whose:
            for model in (both.ours, both.theirs):
                ADDED[what](model.module)
        both.step(step)
    assert both.ours._session.world is world


@on_ranks(2)
def test_a_buffer_that_one_rank_registers_later_does_not_travel_as_in_torch(ranks):
    both = Both(ranks)
    world = both.ours._session.world
    for step in range(3):
        if step == 1 and ranks.rank == 1:
            for model in (both.ours, both.theirs):
                model.module.register_buffer("mask", torch.full((2,), 7.0))
        for model in (both.ours, both.theirs):
            model(ranks.integers(4, 6, key=step)).sum().backward()
    assert both.ours._session.world is world
    assert hasattr(both.ours.module, "mask") == (ranks.rank == 1)


class Rotary(nn.Module):
    """Has a table that grows with the longest input, in the forward."""

    def __init__(self, dtype):
        super().__init__()
        self.line = integer_weights(nn.Linear(6, 2))
        self.dtype = dtype
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        if len(x) > len(self.table):
            self.table = torch.arange(len(x)).to(self.dtype)
        return self.line(x) + self.table[: len(x), None]


@on_ranks(2, dtype=["float32", "float64"])
def test_a_buffer_that_all_ranks_let_grow_is_trained_on(ranks, dtype):
    both = Both(ranks, Rotary(getattr(torch, dtype)))
    for step, n_rows in enumerate((2, 5, 5, 9, 9, 3)):
        for model in (both.ours, both.theirs):
            model.zero_grad()
            model.module.seen.fill_(ranks.rank + step)
            model(ranks.integers(n_rows, 6, key=step)).sum().backward()
        pairs = zip(both.ours.parameters(), both.theirs.parameters(), strict=True)
        for mine, theirs in pairs:
            assert_equal(mine.grad, theirs.grad, f"step {step}")
        assert_equal(both.ours.module.seen, torch.full((2,), 0.0 + step), "rank 0's")
        ranks.assert_same([both.ours.module.table], "the table")


# ---- one rank alone -----------------------------------------------------------------

CHANGES = {
    "a parameter is added": lambda net: net.add_module("more", nn.Linear(2, 2)),
    "a parameter is replaced": lambda net: net.__setitem__(2, nn.Linear(40, 2)),
    "a buffer is gone": lambda net: delattr(net, "scale"),
}


def change_alone(rank, n_ranks, what, whose):
    net = module()
    net.register_buffer("scale", torch.ones(2))
    model = paceline.DistributedDataParallel(net)
    seen = []
    for step in range(4):
        if step == 2 and rank == whose:
            CHANGES[what](model.module)
        try:
            model(torch.ones(3, 6)).sum().backward()
        except RuntimeError as error:
            seen.append((step, type(error).__name__, str(error)))
            break
    return seen, time.monotonic()


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("what", [*CHANGES])
def test_a_rank_that_alone_changes_what_travels_is_an_error_on_all(what, whose):
    outcomes = run_ranks(change_alone, 2, what, whose, group_timeout=600.0)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome
        ((step, kind, words),) = outcome.value[0]
        assert (step, kind) == (2, "MismatchError"), words
        assert "changed" in words
        assert f"rank {whose}" in words or rank == whose


# ---- from the start ------------------------------------------------------------------


def hold(net, name, tensor):
    if isinstance(tensor, nn.Parameter):
        net.register_parameter(name, tensor)
    else:
        net.register_buffer(name, tensor)


OF_A_RANK = {
    "a longer buffer": lambda rank: torch.ones(3 + rank),
    "a wider buffer": lambda rank: torch.ones(
        3, dtype=[torch.float32, torch.int64][rank]
    ),
    "no buffer": lambda rank: torch.ones(3) if rank else None,
    "a frozen parameter": lambda rank: nn.Parameter(torch.ones(2 + rank), False),
}


@on_ranks(2, what=[*OF_A_RANK])
def test_a_ranks_own_is_accepted_where_it_does_not_travel_as_in_torch(ranks, what):
    net, own = module(), OF_A_RANK[what](ranks.rank)
    hold(net, "own", own)
    options = {"broadcast_buffers": False}
    if "parameter" in what:
        skip_without_argument("init_sync")
        options["init_sync"] = False
    both = Both(ranks, net, **options)
    for key in range(3):
        both.step(key)
    assert own is None or torch.equal(both.ours.module.own, own)


@on_ranks(2, what=[*OF_A_RANK])
def test_a_ranks_own_is_refused_where_it_travels(ranks, what):
    net = module()
    hold(net, "own", OF_A_RANK[what](ranks.rank))
    with pytest.raises(paceline.MismatchError, match="own"):
        ranks.wrap(net)
