"""Buffers are those of torch's class on every rank, wherever a program may look."""

import itertools

import paceline
import pytest
import torch
from cases import compare_with_torch, on_ranks
from torch import nn


class Counting(nn.Module):
    """A buffer that tells whose it is, and how often it was written."""

    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        with torch.no_grad():
            for p in self.linear.parameters():
                p.fill_(1)
        self.register_buffer("mark", torch.tensor([float(rank), 0.0]))
        self.rank = rank
        self.taken = None

    def forward(self, x):
        self.taken = self.mark.clone()
        if self.training:
            self.update()
        return self.linear(x).sum()

    def update(self):
        self.mark.copy_(torch.tensor([float(self.rank), self.mark[1].item() + 1]))


def x_of(ranks, key):
    return ranks.integers(2, 4, key=key)


def look(model):
    return [model.module.taken.clone(), model.module.mark.clone()]


@on_ranks(2, 3)
def test_a_rank_keeps_its_own_buffers_until_its_next_forward(ranks):
    def program(ranks, wrap):
        model, found = wrap(Counting(ranks.rank)), []
        for step in range(4):
            model(x_of(ranks, step)).backward()
            found += look(model)
            found += [t.clone() for t in model.state_dict().values()][-1:]
        return found

    compare_with_torch(ranks, program)


WRITES = {
    "before the first forward": lambda step: step == 0,
    "before some forwards": lambda step: step in (2, 3, 5),
    "before each forward": lambda step: True,
}


@on_ranks(2, 3, when=[*WRITES])
def test_what_rank_0_writes_between_steps_reaches_the_next_forward(ranks, when):
    def program(ranks, wrap):
        model, found = wrap(Counting(ranks.rank)), []
        for step in range(6):
            if WRITES[when](step):
                model.module.update()
                model.module.mark.mul_(ranks.rank + 2)
            model(x_of(ranks, step)).backward()
            found += look(model)
        return found

    compare_with_torch(ranks, program)


@on_ranks(2, who=["all ranks", "rank 0", "rank 1"])
def test_a_part_that_runs_after_backward_leaves_its_own_statistics(ranks, who):
    def program(ranks, wrap):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model, found = wrap(module), []
        for step in range(4):
            model(x_of(ranks, step)).sum().backward()
            if who in ("all ranks", f"rank {ranks.rank}"):
                with torch.no_grad():
                    model.module[:2](x_of(ranks, (step, "again")))
            found += [b.clone() for b in model.buffers()]
        return found

    compare_with_torch(ranks, program)


@on_ranks(2, pattern=["yns", "nns", "yyn", "nyny"])
def test_buffers_beside_no_sync_are_those_of_torch(ranks, pattern):
    """y: a step; n: a backward in no_sync; s: a forward alone."""

    def program(ranks, wrap):
        model, found = wrap(Counting(ranks.rank)), []
        kinds = itertools.chain.from_iterable([pattern] * 3)
        for step, kind in enumerate(kinds):
            model.require_backward_grad_sync = kind == "y"
            out = model(x_of(ranks, step))
            if kind != "s":
                out.backward()
            model.require_backward_grad_sync = True
            found += look(model)
        model(x_of(ranks, "end")).backward()
        return found + look(model)

    compare_with_torch(ranks, program)


@on_ranks(2)
def test_evaluation_on_all_ranks_has_the_buffers_of_torch(ranks):
    def program(ranks, wrap):
        model, found = wrap(Counting(ranks.rank)), []
        for step in range(4):
            model.train()
            model(x_of(ranks, step)).backward()
            model.eval()
            with torch.no_grad():
                model(x_of(ranks, step))
                found += look(model)
        return found

    compare_with_torch(ranks, program)


@on_ranks(2)
def test_a_forward_that_rank_0_has_not_is_an_error_and_no_hang(ranks):
    model = ranks.wrap(Counting(ranks.rank))
    model(x_of(ranks, 0)).backward()
    out = model(x_of(ranks, 1))
    if ranks.rank == 1:
        del out
        model(x_of(ranks, 2))  # takes nothing over: another awaits its backward
        with pytest.raises(paceline.MismatchError, match="2 of them without"):
            model(x_of(ranks, 3)).backward()
    else:
        with pytest.raises(paceline.MismatchError, match="2 of them without"):
            out.backward()
    model(x_of(ranks, 4)).backward()
    ranks.assert_same([p.grad for p in model.parameters()], "the next step")


@on_ranks(2)
def test_a_forward_that_waits_for_rank_0_in_its_backward_is_an_error(ranks):
    model = ranks.wrap(Counting(ranks.rank))
    model(x_of(ranks, 0)).backward()
    out = model(x_of(ranks, 1))
    if ranks.rank == 1:
        torch.autograd.grad(out, model.module.linear.weight)
        with pytest.raises(paceline.MismatchError, match="rank 0 has not had"):
            model(x_of(ranks, 2))
    else:
        with pytest.raises(paceline.PeerError, match="rank 0 has not had"):
            out.backward()
    model(x_of(ranks, 3)).backward()
    ranks.assert_same([p.grad for p in model.parameters()], "the next step")
