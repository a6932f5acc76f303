"""Programs drawn from a grammar do the same by torch's class and by Paceline.

A program is a list of statements that torch's class allows: steps, backwards in no_sync
and of the bare module, on all ranks or on some, evaluation, exceptions, hooks, frozen
layers, unused branches.  Both classes run it in the same ranks, and every gradient and
buffer that it looks at must have the same bits.  FUZZ=5000 draws that many programs
(`make fuzz`), and FUZZ_SEED=12 begins with the one that was named in a failure.
"""

import os
import random

import pytest
import torch
from cases import assert_equal, integer_weights, on_ranks
from torch import nn

N_PROGRAMS = int(os.environ.get("FUZZ", "200")) // 2  # for each number of ranks
N_STATEMENTS = 8


class Model(nn.Module):
    def __init__(self, rank, n_ranks, has_buffer):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 3)
        self.last = nn.Linear(6, 3)
        self.large = nn.Linear(4, 1100)
        if has_buffer:
            self.register_buffer("mark", torch.tensor([float(rank), 0.0]))
        self.rank, self.n_ranks, self.fails = rank, n_ranks, False

    def forward(self, x, branches=("first", "second", "large")):
        if "mark" in self._buffers and self.training:
            self.write()
        if self.fails:
            raise ArithmeticError("as the program says")
        total = self.last(self.first(x)).sum() if "first" in branches else 0
        for name in branches:
            if name != "first":
                total = total + getattr(self, name)(x).sum()
        return total * self.n_ranks  # means are exact

    def write(self):
        self.mark.copy_(torch.stack([self.mark[0] + self.rank, self.mark[1] + 1]))


class Program:
    """One drawn program: `same` draws what concerns all ranks, `own` the rest."""

    def __init__(self, ranks, wrap, seed):
        self.ranks, self.seed = ranks, seed
        self.same = random.Random(seed)
        self.own = random.Random(f"{seed} {ranks.rank}")
        self.found = []
        self.n_inputs = 0
        draw = self.same.random
        self.has_buffer = draw() < 0.5
        self.evaluates = draw() < 0.5
        self.is_unused = draw() < 0.3  # some branches, on some ranks
        module = integer_weights(Model(ranks.rank, ranks.n, self.has_buffer))
        if draw() < 0.3:
            module.second.requires_grad_(False)
        if draw() < 0.3:
            module.first.weight.register_hook(lambda g: g * 2)
        options = {
            "find_unused_parameters": self.is_unused,
            "gradient_as_bucket_view": draw() < 0.5,
            "static_graph": not self.is_unused and draw() < 0.2,
        }
        self.is_static = options["static_graph"]
        self.model = wrap(module, **options)
        if draw() < 0.3:
            module.last.weight.register_hook(lambda g: g * 2)

    def x(self, rows=2):
        self.n_inputs += 1
        return self.ranks.integers(rows, 4, key=(self.seed, self.n_inputs))

    def look(self):
        self.found += [
            None if p.grad is None else p.grad.clone() for p in self.model.parameters()
        ]
        self.found += [b.clone() for b in self.model.buffers()]

    def branches(self):
        if not self.is_unused:
            return ("first", "second", "large")
        return ("first", *self.own.sample(["second", "large"], self.own.randint(0, 2)))

    # ---- statements ----

    def step(self):
        self.model(self.x(), self.branches()).backward()

    def micro(self):
        with self.model.no_sync():
            self.model(self.x(), self.branches()).backward()

    def bare(self):
        if self.own.random() < 0.5:
            self.model.module(self.x()).backward()

    def bare_everywhere(self):
        self.model.module(self.x()).backward()

    def gradient_of_input(self):
        x = self.x().requires_grad_()
        torch.autograd.grad(self.model.module(x), x)

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            self.model(self.x())
        self.model.train()

    def write(self):
        self.model.module.write()

    def fail(self):
        self.model.module.fails = True
        with pytest.raises(ArithmeticError):
            self.model(self.x())
        self.model.module.fails = False

    def parts(self):
        """As many as each rank likes, for one backward."""
        n = self.own.randint(1, 3)
        sum(self.model(self.x(), self.branches()) for _ in range(n)).backward()

    def beside(self):
        x = self.x()
        (self.model(x) + self.model.module(x)).backward()

    def statements(self):
        if self.is_unused:  # torch wants what a bare backward has used
            names = ["step", "step", "micro"]
        elif self.is_static:  # ... and counts each parameter's gradients
            names = ["step"]
        else:
            names = ["step", "step", "micro", "bare_everywhere", "gradient_of_input"]
            names += ["bare", "bare", "beside"]
            # Unused parameters are looked for in the last forward alone.
            names += [] if self.has_buffer else ["parts"]
        if not self.has_buffer:
            return [*names, "fail", "evaluate"]
        if not self.evaluates:
            return [*names, "write"]
        # An evaluation does not ask rank 0 for what was written after the last step.
        return [name for name in names if name in ("step", "micro")] + ["evaluate"]

    def run(self):
        for _ in range(N_STATEMENTS):
            name = self.same.choice(self.statements())
            reset = self.same.choice([True, False])
            getattr(self, name)()
            self.look()
            if self.is_unused and name != "step":
                continue  # torch wants the gradients of what was used
            # An average of averages is exact on 2 ranks alone.
            if reset or (self.ranks.n > 2 and name in ("step", "parts", "beside")):
                self.model.zero_grad()
        self.step()
        self.look()
        return self.found


def compare_programs(ranks):
    drawn = int(os.environ.get("FUZZ_SEED", random.randrange(1 << 30)))
    first = ranks.all(drawn)[0]
    print(f"programs from FUZZ_SEED={first}", flush=True)
    for seed in range(first, first + N_PROGRAMS):
        theirs = Program(ranks, ranks.wrap_by_torch, seed).run()
        ours = Program(ranks, ranks.wrap, seed).run()
        assert len(ours) == len(theirs)
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(mine, other, f"FUZZ_SEED={seed}, tensor {i}")


@on_ranks(2, 3)
def test_programs_of_a_grammar_do_the_same_as_with_torch(ranks):
    compare_programs(ranks)
