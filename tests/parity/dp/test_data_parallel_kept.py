"""Replicas on GPUs that are kept from forward to forward equal new ones.

In each row a forward changes its replicas, or keeps references to their contents; every
forward compares its replicas with new ones (`kept.as_new`).  The drawn programs make
changes between forwards.
"""

import gc
import sys
import weakref
from functools import cached_property, lru_cache, partial

import pytest
import torch
from kept import as_new
from paceline._dp import shells, threads
from replicas import ON_EACH, Twin, Wrap, integers, loss_of
from support.threads import IS_FREE_THREADED
from support.waiting import once_collected
from torch import nn
from torch.utils.checkpoint import checkpoint

N = 3
X = integers(7, 3)


class Net(nn.Module):
    """Layers, and attributes of all kinds that replicas own or share."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.cells = nn.GRU(3, 3, batch_first=True)
        self.n, self.words, self.shared = 0, ["a"], {"key": object()}
        self.empty, self.apart, self.table = [], ([],), torch.arange(3.0)
        self.tables, self.cast = [self.table], partial(torch.Tensor.to)
        self.register_buffer("scale", torch.ones(3))
        self.inside = None  # what else forward does
        self.double()

    def note(self, *_):
        """Serve as a hook."""

    def forward(self, x):
        if self.inside is not None:
            self.inside(self)
        x = self.cells(self.norm(x)[:, None])[0][:, 0]
        return self.second(self.first(x)) * self.scale


def add_hook(m):
    m.first.register_forward_hook(lambda *_: None)


def swap(m, name, value):
    setattr(m, name, value)


class Hold:
    """Keeps something of one replica."""

    def __init__(self, what):
        self.what, self.kept = what, []

    def __call__(self, m):
        self.kept.append(self.what(m))


def delete(m):
    del m.words
    m.empty, m.words = [1], ["b"]


INSIDE = {
    "attribute set": lambda m: swap(m, "seen", torch.ones(1)),
    "attribute deleted": delete,
    "number counted": lambda m: swap(m, "n", m.n + 1),
    "child set": lambda m: m._modules.update(extra=nn.ReLU()),
    "child swapped": lambda m: m._modules.update(
        norm=m.norm, first=m._modules["first"]
    ),
    "hook put": add_hook,
    "hook of the whole": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "buffer put": lambda m: m._buffers.update(more=torch.ones(1)),
    "buffer set": lambda m: swap(m, "scale", m.scale * 1),
    "parameter swapped": lambda m: m.second._buffers.update(extra=m.second.running_var),
}
HELD = {
    "replica": lambda m: m,
    "part": lambda m: m.second,
    "dictionary": vars,
    "parameters": lambda m: m.first._parameters,
    "children": lambda m: m._modules,
    "weakly": lambda m: weakref.ref(m.second),
    "generator": lambda m: next(it := m.named_parameters()) and it,
}


@pytest.fixture
def compared(wrap_on_gpus, monkeypatch):
    # A thread that looks for waits holds frames for a moment, and so replicas.
    monkeypatch.setattr(threads, "_look", lambda: None)
    with as_new() as found:
        yield found


def wrapped(kind=Net):
    torch.manual_seed(0)
    return Wrap(is_gpu=True)(kind(), N)


def members(ours):
    return ours._engine._replicated._shells._members


def take_steps(ours, n):
    for _ in range(n):
        ours(X).sum().backward()


LEADING = {
    "method": lambda m: swap(m, "extra", m.first.forward),
    "partial": lambda m: swap(m, "extra", partial(torch.add, m.first)),
    "list": lambda m: swap(m, "extra", [m.first]),
    "dict": lambda m: swap(m, "extra", {"a": [m.first]}),
    "list filled": lambda m: m.empty.append(m.first),
    "tuple filled": lambda m: m.apart[0].append(m.first),
    "behind a tensor": lambda m: m.tables.append(m.first),
    "part": lambda m: m.__dict__.update(extra=m.first),
    "weak": lambda m: swap(m, "extra", weakref.ref(m.first)),
    "hook": lambda m: m.first.register_forward_hook(m.note),
}


@pytest.mark.parametrize("lead", LEADING.values(), ids=LEADING.keys())
def test_replicas_whose_parts_are_reached_by_attributes_are_made_anew(compared, lead):
    ours = wrapped()
    take_steps(ours, 1)
    assert members(ours)
    lead(ours.module)
    take_steps(ours, 2)
    assert not members(ours)
    assert len(compared) == N - 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_may_be_of_a_method_that_an_attribute_holds(
    wrap_on_gpus, use_reentrant
):
    class Runs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
            self.run = self.norm.forward

        def forward(self, x):
            x = self.linear(x)
            return checkpoint(self.run, x, use_reentrant=use_reentrant)

    twin = Twin(wrap_on_gpus, Runs().double(), N)
    for seed in range(3):
        twin.step(lambda m, x: loss_of(m(x)), integers(7, 3, seed=seed), exact=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE.keys())
def test_what_a_forward_does_to_a_replica_is_gone_in_the_next(
    compared, inside, request
):
    ours = wrapped()
    first = members_after_a_step(ours)
    ours.module.inside = lambda m: inside(m) if m is not ours.module else None
    take_steps(ours, 3)
    has_others = "child set" in request.node.name  # those are not counted
    is_kept = members(ours) == first  # without a GIL, counts may be too high
    assert is_kept is not has_others or (IS_FREE_THREADED and not is_kept)
    assert len(compared) == 4 * (N - 1)


def members_after_a_step(ours):
    take_steps(ours, 1)
    return list(members(ours))


@pytest.mark.parametrize("what", HELD.values(), ids=HELD.keys())
def test_a_replica_that_is_held_belongs_to_who_holds_it(compared, what):
    ours = wrapped()
    ours.module.inside = hold = Hold(what)
    first = members_after_a_step(ours)
    kept = hold.kept[1:]
    held = [dict(it) if isinstance(it, dict) else it for it in kept]
    take_steps(ours, 1)
    second = list(members(ours))
    assert not set(first) & set(second)
    assert held == kept
    hold.kept.clear()
    del kept, held
    take_steps(ours, 2)
    assert not set(second) & set(members(ours))  # each forward holds its own
    ours.module.inside = None
    hold.kept.clear()
    last = members_after_a_step(ours)
    take_steps(ours, 2)
    assert members(ours) == last


def test_who_holds_a_replica_is_seen_although_a_frame_was_held_as_it_was_made(
    compared, monkeypatch
):
    class Holds(nn.Linear):
        def forward(self, x):
            frames.clear()
            held.append(self)
            return super().forward(x)

    def fill_parts(member, *args):
        real(member, *args)
        frames.append(sys._getframe(1))  # as a profiler does, in another thread

    frames, held, real = [], [], shells._Member._fill_parts
    monkeypatch.setattr(shells._Member, "_fill_parts", fill_parts)
    ours = wrapped(lambda: Holds(3, 3).double())
    take_steps(ours, 2)
    assert len(set(map(id, held))) == 2 * N - 1  # replica 0 is the module


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_holds_a_replica_until_its_backward(compared, use_reentrant):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Net()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    ours = wrapped(Again)
    x = X.clone().requires_grad_()
    ours(x).sum().backward()
    first = list(members(ours))
    ours(x).sum().backward()
    assert members(ours) == first
    outs = [ours(x) for _ in range(2)]
    assert not set(first) & set(members(ours))
    sum(out.sum() for out in outs).backward()


def test_replicas_are_made_once(compared):
    ours = wrapped()
    first = members_after_a_step(ours)
    take_steps(ours, 5)
    ours.eval()
    with torch.no_grad():
        ours(X[:2])  # one replica fewer
        ours(X)
    assert members(ours) == first
    shell = first[0].shells[0]
    assert set(shell.first._parameters.values()) == {None}
    assert shell.table is None


def test_a_forward_that_fails_leaves_nothing(compared):
    ours = wrapped()
    first = members_after_a_step(ours)

    def fail(m):
        m.left = 1
        raise KeyError("in forward")

    ours.module.inside = fail
    with pytest.raises(KeyError, match="in forward"):
        ours(X)
    ours.module.inside = None
    gc.collect()
    take_steps(ours, 2)
    assert members(ours) == first


def test_what_has_more_than_a_dictionary_is_made_anew(wrap_on_gpus):
    class Slots(nn.Module):
        __slots__ = ("extra",)

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2).double()
            self.extra = 1

        def forward(self, x):
            return self.layer(x) * self.extra

    class Copies(Net):
        def _replicate_for_data_parallel(self):
            self.shared["n"] = self.shared.get("n", 0) + 1
            return super()._replicate_for_data_parallel()

    for kind in (Slots, Copies):
        ours = wrapped(kind)
        take_steps(ours, 2)
        assert not members(ours)
    assert ours.module.shared["n"] == 2 * (N - 1)


class ByProperty(nn.Linear):
    """Caches a table as the documents advise."""

    @cached_property
    def table(self):
        return torch.ones(3, device=self.weight.device)

    def forward(self, x):
        return super().forward(x) * self.table


class ByStaticMethod(ByProperty):
    @staticmethod
    @lru_cache
    def made(n, device):
        return torch.ones(n, device=device)

    @property
    def table(self):
        return self.made(3, self.weight.device)


class ByMethod(ByProperty):
    @lru_cache  # noqa: B019
    def made(self, n):
        return torch.ones(n, device=self.weight.device)

    @property
    def table(self):
        return self.made(3)


@ON_EACH
@pytest.mark.parametrize("kind", [ByProperty, ByStaticMethod, ByMethod])
def test_a_cache_keeps_replicas_only_if_they_are_among_its_keys(wrap, kind):
    ours = wrap(kind(3, 3).double(), 2)
    for _ in range(5):
        ours(X).sum().backward()
    n_kept = 6 if kind is ByMethod else 2
    gc.collect()  # what is kept outlives one
    assert once_collected(
        lambda: sum(type(each) is kind for each in gc.get_objects()) == n_kept
    )
    ByMethod.made.cache_clear()
