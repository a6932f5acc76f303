"""Random programs give the same bits with Paceline as with torch's class or by hand.

A program is a list of statements that torch's class allows: steps, backwards in no_sync
and of the bare module, on all ranks or on some, evaluation, exceptions, hooks, frozen
layers, unused branches, ignored tensors, late buffers, wrappers of a subclass, losses
that raise in their own backward, tensor-parallel layers.  Both classes run it on the
same ranks, and every gradient and buffer that it reads must have the same bits.

A loop does what torch's class does not allow: each rank uses any of its parameters, any
number of times, resets, keeps and replaces gradients, and accumulates in any style.
The reference is the plain module, averaged by hand.

FUZZ=5000 draws 5000 programs and 5000 loops (`make fuzz`).  FUZZ_SEED=12 begins with
seed 12; a failure names its seed.
"""

import contextlib
import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from cases import (
    ON_HOSTS,
    PARTS,
    Ranks,
    Twin,
    assert_equal,
    drawn_seeds,
    integer_weights,
    mean_over,
    on_gpus_too,
    on_ranks,
)
from paceline import MismatchError
from support.failing import FailsInBackward
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

N_DRAWN = int(os.environ.get("FUZZ", "24"))  # programs, and as many loops
N_STATEMENTS = 8


def seeds_of(ranks):
    """Return the seeds to run: three of four on 2 ranks, the others on 4 ranks."""
    return drawn_seeds(ranks, N_DRAWN * (3 if ranks.n == 2 else 1) // 4)


# ---- programs -----------------------------------------------------------------------

AVERAGED = ["step", "parts", "views", "beside", "lose"]
DIMS = ("dp", "tp")
SPLIT = {"first": ColwiseParallel(), "last": RowwiseParallel()}
IGNORED = ["first.bias", "second.weight", "large.weight", "mark", "late0"]


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
    """One random program: `same` draws values for all ranks, `own` for this rank."""

    def __init__(self, ranks, mesh, kind, seed):
        self.seed, self.is_ours = seed, kind is not TorchDDP
        self.same = random.Random(seed)
        draw = self.same.random
        self.ranks, self.mesh = ranks, mesh
        self.own = random.Random(f"{seed} {ranks.rank}")
        self.found = []
        self.n_inputs = 0
        self.has_buffer = draw() < 0.5
        # Tensor-parallel parts break after a forward that fails or has no gradients.
        self.evaluates = draw() < 0.5 and mesh is None
        self.is_unused = draw() < 0.3  # some branches are unused, on some ranks
        module = integer_weights(Model(ranks.rank, ranks.n, self.has_buffer))
        if draw() < 0.3:
            module.second.requires_grad_(False)
        if draw() < 0.3:
            module.first.weight.register_hook(lambda g: g * 2)
        ignored = self.same.sample(IGNORED, self.same.choice([0, 0, 1, 2]))
        TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ignored)
        part = self.same.choice([None, None, *PARTS])
        if part is not None:
            kind = type("Own", (kind,), PARTS[part])
        where = {"process_group": ranks.group}
        if mesh is not None:
            parallelize_module(module, mesh["tp"], SPLIT)
            where = {"device_mesh": mesh["dp"]}
        options = {
            **where,
            "find_unused_parameters": self.is_unused,
            "gradient_as_bucket_view": draw() < 0.5,
            "static_graph": not self.is_unused and draw() < 0.2,
        }
        self.is_static = options["static_graph"]
        self.model = kind(module, **options)
        self.parameters = [*self.model.parameters()]
        if draw() < 0.3:
            module.last.weight.register_hook(lambda g: g * 2)

    def x(self, rows=2):
        self.n_inputs += 1
        return self.ranks.integers(rows, 4, key=(self.seed, self.n_inputs))

    def look(self):
        self.found += [
            None if p.grad is None else p.grad.clone() for p in self.parameters
        ]
        self.found += [b.clone() for b in self.model.buffers()]

    def zero(self):
        for p in self.parameters:
            p.grad = None

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
        """Run each rank's own number of forwards before one backward."""
        self.sum_of(self.own.randint(1, 3))

    def views(self):
        """Run the same number of forwards, which all take over rank 0's buffers."""
        self.sum_of(self.same.randint(2, 3))

    def sum_of(self, n):
        sum(self.model(self.x(), self.branches()) for _ in range(n)).backward()

    def beside(self):
        x = self.x()
        (self.model(x) + self.model.module(x)).backward()

    def register(self):
        name, n = f"late{self.same.randint(0, 1)}", self.same.randint(1, 3)
        self.model.module.register_buffer(name, torch.full((n,), 1.0 + self.ranks.rank))

    def lose(self):
        """Have a loss raise before its backward reaches the wrapper's output."""
        self.fail_in(self.model(self.x(), self.branches()))
        self.step()  # torch takes any backward of the module as that of the forward

    def fail_in(self, out):
        with pytest.raises(ArithmeticError):
            FailsInBackward.apply(out, ArithmeticError()).backward()

    def lose_micro(self):
        with self.model.no_sync():
            out = self.model(self.x(), self.branches())
            if self.own.random() < 0.5:
                self.fail_in(out)
            else:
                out.backward()

    def lose_alone(self):
        """Lose one rank's step: torch averages its next one with this one of peers."""
        self.step()
        steps = [(self.x(), self.branches()) for _ in range(2)]
        is_loser = self.same.randrange(self.ranks.n) == self.ranks.rank
        if self.is_ours:
            out = self.model(*steps[0])
            if is_loser:
                self.fail_in(out)
                out = self.model(*steps[1])
            with pytest.raises(MismatchError):
                out.backward()
        self.zero()

    def statements(self):
        if self.is_unused:  # torch waits for parameters that a bare backward has used
            names = ["step", "step", "micro", "lose_micro"]
        elif self.is_static:  # torch counts the gradients of each parameter
            names = ["step"]
        else:
            names = ["step", "step", "micro", "bare_everywhere", "gradient_of_input"]
            names += ["bare", "bare", "beside", "lose_micro"]
            # torch searches only the last forward for unused parameters.
            names += ["parts"] if not self.has_buffer else [] if ON_HOSTS else ["views"]
        if not self.has_buffer:
            names += [] if self.is_static else ["lose", "lose_alone"]
            names += ["fail", "evaluate"] if self.mesh is None else []
            return [*names, "register"]
        if not self.evaluates:
            return [*names, "write", "register"]
        # An evaluation does not fetch rank 0's writes after the last step.
        return [name for name in names if name in ("step", "micro")] + ["evaluate"]

    def run(self):
        for _ in range(N_STATEMENTS):
            name = self.same.choice(self.statements())
            reset = self.same.choice([True, False])
            getattr(self, name)()
            self.look()
            if self.is_unused and name != "step":
                continue  # torch waits for the gradients of used parameters
            # An average of averages is exact only on 2 ranks.
            if reset or (self.ranks.n > 2 and name in AVERAGED):
                self.zero()
        self.step()
        self.look()
        return self.found


@on_ranks(2, 4)
def test_programs_of_a_grammar_do_the_same_as_with_torch(ranks):
    mesh = ranks.n == 4 and dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=DIMS)
    for seed in seeds_of(ranks):
        place = ranks, None
        if mesh and seed % 2 == 0:  # two ranks share one copy of the model
            dp = mesh["dp"]
            place = Ranks(dp.get_local_rank(), 2, dp.get_group()), mesh
        theirs = Program(*place, TorchDDP, seed).run()
        ours = Program(*place, ranks.ours, seed).run()
        assert len(ours) == len(theirs)
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(mine, other, f"FUZZ_SEED={seed}, tensor {i}")


# ---- loops --------------------------------------------------------------------------

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
        """Sum parameters times each of their factors, each use in a separate graph."""
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
    """One random loop: `same` draws values for all ranks, `own` for this rank."""

    def __init__(self, ranks, seed):
        self.ranks, self.seed = ranks, seed
        self.same = random.Random(seed)
        self.own = random.Random(f"{seed} {ranks.rank}")
        cap = self.same.choice([None, 1e-5, 0.01, 0.2])
        self.twin = Twin(ranks, Bag(self.same), bucket_cap_mb=cap)
        self.touched = set()  # parameters that this rank used since the last average
        self.kept = []

    def both(self):
        return self.twin.plain, self.twin.ours

    def pairs(self):
        theirs = self.twin.plain.parameters()
        return enumerate(zip(self.twin.ours.parameters(), theirs, strict=True))

    # ---- statements between backwards ----

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
        # A tensor that still is a gradient will rightly be accumulated into.
        live = {p.grad.data_ptr() for _, (p, _) in self.pairs() if p.grad is not None}
        self.kept = [row for row in self.kept if row[0].data_ptr() not in live]

    def keep(self):
        if self.own.random() < 0.4:
            for p in self.twin.ours.parameters():
                if p.grad is not None and self.own.random() < 0.5:
                    self.kept.append((p.grad.detach(), p.grad.clone()))
        for tensor, values in self.kept[-20:]:
            assert_equal(tensor, values, f"FUZZ_SEED={self.seed}: a kept gradient")
        if self.own.random() < 0.3:
            self.kept.clear()

    def scale(self):
        """Change gradients in place, as clipping does; kept references change too."""
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
            what = f"FUZZ_SEED={self.seed}, gradient {i} at step {step}"
            assert_equal(mine.grad, theirs.grad, what)

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


@on_gpus_too()
@on_ranks(2, 4)
def test_drawn_loops_are_those_of_the_plain_module(ranks):
    for seed in seeds_of(ranks):
        Loop(ranks, seed).run()
