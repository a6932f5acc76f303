"""Kinds of models by engine="auto": who runs in processes, and who falls to threads.

Each takes some steps beside the plain module.  What a forward means over its rows is
left out, as replicas mean over their own, in torch too.
"""

import types

import numpy as np
import pytest
import torch
from replicas import (
    Twin,
    Wrap,
    assert_close,
    integer_weights,
    integers,
    linear,
    pair_of,
)
from torch import nn

N_STEPS = 4


@pytest.fixture
def wrap(idle_workers):
    """Return a function that wraps a module by the engine that suits it."""
    wrap = Wrap("auto")
    yield wrap
    wrap.close()


def train(twin, loss=lambda out: (out * out).sum(), columns=3, before=None):
    """Take steps that keep all numbers small integers; compare all that they leave."""
    for number in range(N_STEPS):
        if before is not None:
            for module in (twin.plain, twin.inner):
                before(module, number)
        twin.zero()
        twin.step(lambda m, x: loss(m(x)), integers(7, columns, seed=number))
        for module in (twin.plain, twin.inner):
            with torch.no_grad():
                for p in module.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad.sign())


# ---- classes of the script ----------------------------------------------------------


SCRIPT = """
import collections, dataclasses, typing
import torch
from torch import nn

Named = collections.namedtuple("Named", "x y")


class Typed(typing.NamedTuple):
    x: torch.Tensor
    y: int = 3


@dataclasses.dataclass
class Out:
    x: torch.Tensor
    y: dict = dataclasses.field(default_factory=dict, metadata={"why": "it may"})


@dataclasses.dataclass(frozen=True)
class Options:
    gain: int = 2


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.kind, self.options, self.pair = kind, Options(), Named(1, [2])

    def forward(self, x):
        y = self.linear(x) * self.options.gain + self.pair.x + self.pair.y[0]
        return {"named": Named(y, y), "typed": Typed(y), "data": Out(y)}[self.kind]
"""


@pytest.mark.parametrize("kind", ["named", "typed", "data"])
def test_a_script_may_have_named_tuples_and_dataclasses(wrap, kind):
    names = {"__name__": "__main__"}
    exec(compile(SCRIPT, "<script>", "exec"), names)
    net = names["Net"](kind)
    integer_weights(net.linear)
    ours = wrap(net)
    for number in range(3):
        if number == 2:
            net.options, net.pair = names["Options"](3), names["Named"](4, [5])
        x = integers(7, 3, seed=number)
        mine, theirs = ours(x), net(x)
        assert type(mine) is type(theirs)
        assert_close(mine.x, theirs.x)
        assert ours.engine == "process", ours.engine_reason


class Reading(nn.Module):
    """Reads a table that it cannot write."""

    def __init__(self):
        super().__init__()
        self.linear = linear(2)
        self.table = {"a": [1]}
        self.view = types.MappingProxyType(self.table)

    def forward(self, x):
        return self.linear(x) + sum(self.view["a"]) * len(self.view)


READING = (
    lambda m: m.table["a"].append(2),
    lambda m: m.table.update(b=1),
    lambda m: m.table.update(a=[7]),
    lambda m: setattr(m, "view", types.MappingProxyType({"a": [3]})),
)


def test_what_a_view_of_a_dictionary_shows_is_followed(wrap):
    twin = pair_of(wrap, Reading)
    train(twin, before=lambda module, number: READING[number](module))
    assert twin.ours.engine == "process", twin.ours.engine_reason


# ---- what forwards write ------------------------------------------------------------


class Assigning(nn.Module):
    """Gives itself a new codebook in each forward, as some of VQ-VAE do."""

    def __init__(self):
        super().__init__()
        self.encode = linear(3)
        self.codes = nn.Parameter(integers(5, 3), requires_grad=False)

    def forward(self, x):
        y = self.encode(x)
        at = (y[:, None] - self.codes).abs().sum(2).argmin(1)
        found = self.codes[at]
        if self.training:
            self.codes = nn.Parameter(self.codes.detach() + 1, requires_grad=False)
        return y - found


class Averaging(Assigning):
    """The same in place, which is written to a parameter that all replicas share."""

    def forward(self, x):
        y = self.encode(x)
        at = (y[:, None] - self.codes).abs().sum(2).argmin(1)
        found = self.codes[at]
        if self.training:
            self.codes.data.mul_(-1).add_(1)
        return y - found


class InBuffers(Averaging):
    """The same with buffers, as is usual."""

    def __init__(self):
        super().__init__()
        codes = self.codes.detach().clone()
        del self.codes
        self.register_buffer("codes", codes)
        self.register_buffer("n_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.n_steps += 1
        return super().forward(x)


class Target(nn.Module):
    """BYOL's and MoCo's: a target network follows the online one in forward."""

    def __init__(self):
        super().__init__()
        self.online = linear(3)
        self.target = linear(3).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(
                self.online.parameters(), self.target.parameters(), strict=True
            ):
                q.mul_(-1).add_(p)
        return self.online(x) - self.target(x).detach()


WRITERS = {
    "assigned codebook": (Assigning, "thread", "'codes'"),
    "codebook in place": (Averaging, "thread", "'codes'"),
    "codebook in buffers": (InBuffers, "process", ""),
    "target network": (Target, "thread", "'target.weight'"),
}


@pytest.mark.parametrize(
    ("make", "engine", "reason"), WRITERS.values(), ids=list(WRITERS)
)
def test_what_forwards_write_is_written_once(wrap, make, engine, reason):
    twin = Twin(wrap, make())
    train(twin)
    assert twin.ours.engine == engine, twin.ours.engine_reason
    assert reason in twin.ours.engine_reason
    for module in (twin.plain, twin.inner):
        module.eval()
    train(twin)


# ---- generators, tables, outputs, hooks ---------------------------------------------


class Drawing(nn.Module):
    """Draws the same numbers in each forward, by generators that it holds."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = linear(3), kind
        self.torchs, self.numpys = None, None
        if kind == "torch":
            self.torchs = torch.Generator()
        else:
            self.numpys = np.random.default_rng(3)
            self.state = self.numpys.bit_generator.state

    def forward(self, x):
        if self.kind == "torch":
            self.torchs.manual_seed(3)
            return self.linear(x) + torch.randint(0, 5, (3,), generator=self.torchs)
        self.numpys.bit_generator.state = self.state
        return self.linear(x) + torch.from_numpy(self.numpys.integers(0, 5, 3))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_models_with_generators_of_their_own_fall_to_threads(wrap, kind):
    twin = pair_of(wrap, lambda: Drawing(kind))
    train(twin)
    assert twin.ours.engine == "thread"
    assert "random generator" in twin.ours.engine_reason


class Outputs(nn.Module):
    """Returns constants, a cache, and what it holds."""

    def __init__(self):
        super().__init__()
        self.linear = linear(3)
        self.cache = {}

    def forward(self, x):
        y = self.linear(x)
        self.cache = {"last": 3, "n": self.cache.get("n", 0) + 1}
        return {"y": y, "pairs": [y, y + 1], "words": "same", "cache": self.cache}


def test_constants_and_caches_in_outputs_are_those_of_the_plain_module(wrap):
    twin = Twin(wrap, Outputs())
    for number in range(3):
        twin.compare(lambda model, x: model(x), integers(7, 3, seed=number))
    assert twin.ours.engine == "process", twin.ours.engine_reason


def test_a_hook_for_a_moment_takes_threads_for_that_moment(wrap):
    twin = Twin(wrap, nn.Sequential(linear(3), linear(3)))
    train(twin)
    assert twin.ours.engine == "process"
    hooks = [
        module[0].register_forward_hook(lambda mod, inputs, out: out * 2)
        for module in (twin.plain, twin.inner)
    ]
    train(twin)
    assert twin.ours.engine == "thread"
    assert "has hooks" in twin.ours.engine_reason
    for hook in hooks:
        hook.remove()
    train(twin)
    assert twin.ours.engine == "process"
