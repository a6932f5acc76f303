"""Random training loops do what the plain module does, averaged by hand.

Each seed makes a loop of its own: which parameters each rank uses, and how often; how
gradients are reset, kept, replaced; what is accumulated and in which style; how large
the buckets are.  Values are small integers: means over 2 and 4 ranks are exact.
"""

import contextlib
import random
import time

import torch
from cases import Twin, assert_equal, mean_over, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

SHAPES = [(120, 100), (7,), (90, 91), (), (64, 128), (3, 5), (8191,), (8192,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
N_STEPS = 14


class Bag(nn.Module):
    def __init__(self, chance):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.zeros(chance.choice(SHAPES), dtype=chance.choice(DTYPES))
            for _ in range(chance.randint(2, 9))
        )

    def forward(self, uses, reentrant):
        """Use each parameter times each of its factors, each in a graph of its own."""
        start = torch.zeros((), dtype=torch.float64, requires_grad=True)
        total = start * 1
        for p, factors in zip(self.weights, uses, strict=True):
            for f in factors:
                if reentrant:
                    total = checkpoint(use, total, p, f, use_reentrant=True)
                else:
                    total = use(total, p, f)
        return total


def use(total, p, f):
    return total + (p * f).sum().double()


class Loop:
    """One random loop: `same` draws what concerns all ranks, `own` the rest."""

    def __init__(self, ranks, seed):
        self.ranks = ranks
        self.same = random.Random(seed)
        self.own = random.Random(f"{seed} {ranks.rank}")
        cap = self.same.choice([None, 1e-5, 0.01, 0.2])
        self.twin = Twin(ranks, Bag(self.same), bucket_cap_mb=cap)
        self.touched = set()  # since the last average, by this rank
        self.kept = []

    def both(self):
        return self.twin.plain, self.twin.ours

    def pairs(self):
        theirs = self.twin.plain.parameters()
        return enumerate(zip(self.twin.ours.parameters(), theirs, strict=True))

    # ---- what may happen between backwards ----

    def reset(self):
        way = self.own.choice(["none", "zero", "nothing", "some", "own"])
        for i, pair in self.pairs():
            some = self.own.random() < 0.5
            for p in pair:
                if way == "none" or (way == "some" and some):
                    p.grad = None
                elif way == "zero" and p.grad is not None:
                    p.grad.zero_()
                elif way == "own" and some:
                    p.grad = torch.full_like(p, i + self.ranks.rank)
        # What is still a parameter's gradient will rightly be added to.
        live = {p.grad.data_ptr() for _, (p, _) in self.pairs() if p.grad is not None}
        self.kept = [row for row in self.kept if row[0].data_ptr() not in live]

    def keep(self):
        if self.own.random() < 0.4:
            for p in self.twin.ours.parameters():
                if p.grad is not None and self.own.random() < 0.5:
                    self.kept.append((p.grad.detach(), p.grad.clone()))
        for tensor, values in self.kept[-20:]:
            assert_equal(tensor, values, "a kept gradient")
        if self.own.random() < 0.3:
            self.kept.clear()

    def scale(self):
        """Change gradients in place, as clipping does; what is kept changes too."""
        if self.same.random() < 0.2:
            self.kept.clear()
            for model in self.both():
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(2)

    # ---- backwards ----

    def draw_uses(self, step):
        some = self.own.choice(["all", "some", "one"])
        n = len(self.twin.plain.weights)
        only = self.own.randrange(n)
        uses = []
        for i, p in enumerate(self.twin.plain.weights):
            is_used = some == "all" or i == only or self.own.random() < 0.5
            is_used = is_used and (some != "one" or i == only)
            times = self.own.choice([1, 1, 1, 2, 3]) if is_used else 0
            rows = [
                self.ranks.integers(*p.shape, dtype=p.dtype, key=(step, i, t))
                for t in range(times)
            ]
            uses.append(rows)
            if rows:
                self.touched.add(i)
        return uses

    def local(self, step):
        uses, reentrant = self.draw_uses(step), self.own.random() < 0.4
        self.twin.plain(uses, reentrant).backward()
        ours = self.twin.ours
        style = self.same.choice(["both", "forward", "backward"])
        inside = contextlib.nullcontext
        with ours.no_sync() if style != "backward" else inside():
            out = ours(uses, reentrant)
            if style == "both":
                out.backward()
        if style != "both":
            with ours.no_sync() if style == "backward" else inside():
                out.backward()

    def averaged(self, step):
        uses, reentrant = self.draw_uses(step), self.own.random() < 0.4
        if self.own.random() < 0.2:
            time.sleep(0.005)
        self.twin.plain(uses, reentrant).backward()
        self.twin.ours(uses, reentrant).backward()
        rows = self.ranks.all(
            (self.touched, [p.grad for p in self.twin.plain.parameters()])
        )
        touched = set().union(*(row[0] for row in rows))
        for i, p in enumerate(self.twin.plain.parameters()):
            if i in touched:
                p.grad = mean_over([row[1][i] for row in rows])
        self.touched.clear()

    def check(self, step):
        for i, (mine, theirs) in self.pairs():
            assert_equal(mine.grad, theirs.grad, f"gradient {i} at step {step}")

    def run(self):
        for step in range(N_STEPS):
            self.reset()
            for micro in range(self.same.choice([0, 0, 0, 1, 2])):
                self.local((step, micro))
                self.check((step, micro))
            self.averaged(step)
            self.check(step)
            self.scale()
            self.keep()


@on_ranks(2, seed=range(20))
def test_random_loops_on_two_ranks_are_those_of_the_plain_module(ranks, seed):
    Loop(ranks, seed).run()


@on_ranks(4, seed=range(100, 106))
def test_random_loops_on_four_ranks_are_those_of_the_plain_module(ranks, seed):
    Loop(ranks, seed).run()
