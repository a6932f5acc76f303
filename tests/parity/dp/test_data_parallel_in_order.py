"""CPU replicas run in order on the caller's thread: what that makes work, and how.

Each case runs beside the plain module; replicas have copies of parameters and buffers.
"""

import functools
import sqlite3
import threading
import warnings
import weakref
from contextlib import nullcontext

import paceline
import pytest
import torch
from replicas import (
    Twin,
    assert_same,
    assert_same_grads,
    integer_weights,
    integers,
    linear,
    loss_of,
    net,
    pair_of,
    step,
)
from torch import nn

CPU = torch.device("cpu")


@pytest.fixture
def wrap(wrap_on_cpu):
    return wrap_on_cpu


# ---- ways to the module itself ------------------------------------------------------


class Child(nn.Module):
    """Leads to its parent by a weak reference."""

    def __init__(self, parent):
        super().__init__()
        self.find = weakref.ref(parent)

    def forward(self, x):
        return self.find().last(x)


class Leading(nn.Module):
    """Reaches its BatchNorm by something that leads to the module and not to `self`."""

    def __init__(self, way):
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.layer = linear()
        if way == "weak reference":
            self.call = Child(self)
        elif way == "partial":
            self.call = functools.partial(self.last)
        else:
            self.call = lambda x: self.last(x)

    def last(self, x):
        return self.norm(x)

    def forward(self, x):
        return self.layer(self.call(x))


def test_a_replica_that_writes_to_the_module_itself_is_one_error(wrap):
    ours = wrap(Leading("lambda"), 3)
    words = r"^replica 1 of .* wrote to 'norm\.\w+' \(of a BatchNorm1d\)"
    with pytest.raises(RuntimeError, match=words):
        ours(integers(7, 3))
    assert ours.module.norm.num_batches_tracked == 2  # of replica 0, and of replica 1
    ours.eval()
    assert ours(integers(7, 3)).shape == (7, 3)


@pytest.mark.parametrize("way", ["weak reference", "partial", "lambda"])
def test_a_replica_may_read_the_module_itself(wrap, way):
    twin = pair_of(wrap, lambda: Leading(way).eval())
    for seed in range(2):
        x = integers(7, 3, seed=seed).requires_grad_()
        twin.step(step, x, exact=False)


@pytest.mark.parametrize("way", ["weak reference", "partial"])
def test_partials_and_weak_references_lead_to_the_replica(wrap, way):
    ours = wrap(Leading(way), 3)
    ours(integers(7, 3))
    assert ours.module.norm.num_batches_tracked == 1


class SetsAnAttribute(nn.Module):
    """Sets an attribute of the module itself, of which a hook knows."""

    def __init__(self, way):
        super().__init__()
        self.layer = linear()
        self.n_calls = 0
        count = self.count if way == "bound method" else lambda *_: self.count()
        self.layer.register_forward_hook(count)

    def count(self, *_):
        self.n_calls += 1

    def forward(self, x):
        return self.layer(x) * (1 + self.n_calls)


def test_attributes_that_a_bound_hook_sets_are_the_replicas_own(wrap):
    twin = pair_of(wrap, lambda: SetsAnAttribute("bound method"))
    for seed in range(3):
        twin.step(step, integers(7, 3, seed=seed))
    assert twin.inner.n_calls == 3


def test_attributes_that_a_replica_sets_in_the_module_are_an_error():
    ours = paceline.DataParallel(SetsAnAttribute("lambda"), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match="an attribute of a SetsAnAttribute"):
        ours(integers(7, 3))


# ---- what belongs to a thread, or to the call ---------------------------------------


class Slotted(nn.Module):
    """Has slots: of a number, a tensor, and a part that is registered too."""

    __slots__ = ("factor", "part", "table")

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.factor, self.table, self.part = 2, integers(3), self.layer

    def forward(self, x):
        return self.part(self.layer(x) % 5) * self.factor + self.table


class Heir(Slotted):
    """Has slots of its own, and a dictionary."""

    __slots__ = ("shift",)

    def __init__(self):
        super().__init__()
        self.shift = 3

    def forward(self, x):
        assert self.part is self.layer
        return super().forward(x) + self.shift


class OfThread(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.local = linear(), threading.local()
        self.local.factor = 2

    def forward(self, x):
        return self.layer(x) * self.local.factor


class Locking(nn.Module):
    """Takes a lock in forward."""

    def __init__(self, lock):
        super().__init__()
        self.layer, self.lock = linear(), lock

    def forward(self, x):
        assert self.lock.acquire(timeout=10)
        try:
            return self.layer(x)
        finally:
            self.lock.release()


class Querying(nn.Module):
    """Asks a database that only the thread that has opened it may ask."""

    def __init__(self):
        super().__init__()
        self.layer, self.base = linear(), sqlite3.connect(":memory:")
        self.base.execute("CREATE TABLE factors (value INTEGER)")
        self.base.execute("INSERT INTO factors VALUES (3)")

    def forward(self, x):
        ((factor,),) = self.base.execute("SELECT value FROM factors")
        return self.layer(x) * factor


OF_A_THREAD = {
    "slots": Slotted,
    "slots of an heir": Heir,
    "threading.local": OfThread,
    "a lock": lambda: Locking(threading.Lock()),
    "a lock that is held": lambda: Locking(threading.RLock()),
    "sqlite": Querying,
}


@pytest.mark.parametrize("kind", OF_A_THREAD)
def test_what_belongs_to_a_thread_works_in_a_hundred_calls(wrap, kind):
    twin = pair_of(wrap, OF_A_THREAD[kind])
    x = integers(7, 3)
    expected = twin.plain(x)
    n_threads = threading.active_count()
    for number in range(100):
        if kind == "a lock that is held":
            with twin.inner.lock:
                out = twin.ours(x)
        else:
            out = twin.ours(x)
        assert torch.equal(out, expected)
        if number % 10 == 0:
            twin.zero()
            twin.step(step, integers(7, 3, seed=number))
    assert threading.active_count() == n_threads


# ---- hidden state that a forward resets ---------------------------------------------


class Neuron(nn.Module):
    """Has a membrane that decays, spikes, and begins with the shape of its input."""

    def __init__(self, is_buffer):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        start = torch.zeros(0, dtype=torch.float64)
        if is_buffer:
            self.register_buffer("state", start, persistent=False)
        else:
            self.state = start

    def reset(self):
        self.state = torch.zeros_like(self.state)

    def forward(self, x):
        if self.state.shape != x.shape:
            self.state = torch.zeros_like(x)
        self.state = self.state * self.rate + x
        return (self.state > 1) + self.state - self.state.detach()


class Spiking(nn.Module):
    """Resets its neurons before it runs them over some steps, as snnTorch's do."""

    def __init__(self, is_buffer):
        super().__init__()
        self.first, self.last = linear(4), integer_weights(nn.Linear(4, 2))
        self.neurons = nn.ModuleList([Neuron(is_buffer) for _ in range(2)])

    def forward(self, x):
        for neuron in self.neurons:
            neuron.reset()
        out = 0
        for _ in range(3):
            out = out + self.neurons[1](self.last(self.neurons[0](self.first(x))))
        return out


@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffer", "attribute"])
def test_a_forward_may_reset_its_hidden_state(wrap, is_buffer):
    twin = Twin(wrap, Spiking(is_buffer))
    optimizers = [torch.optim.SGD(m.parameters(), lr=2.0**-8) for m in twin.models]
    for rows in (7, 7, 1, 7):
        twin.zero()
        for model in twin.models:
            loss_of(model(integers(rows, 3))).backward()
        assert_same_grads(twin.ours, twin.plain, exact=False)
        for optimizer in optimizers:
            optimizer.step()


# ---- what comes out -----------------------------------------------------------------


class Counting(nn.Module):
    """Returns a count, a name, a truth, and a loss."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        loss = self.layer(x).sum()
        return {"n": len(x), "name": "a", "ok": True, "loss": loss}


@pytest.mark.filterwarnings("ignore:Was asked to gather")
@pytest.mark.parametrize(
    ("n_rows", "sizes"), [(1, [1]), (2, [1, 1]), (6, [3, 3]), (7, [4, 3])]
)
def test_constants_and_losses_have_one_entry_per_replica(wrap, n_rows, sizes):
    twin = Twin(wrap, Counting())
    x = integers(n_rows, 3)
    out = twin.ours(x)
    loss = out.pop("loss")
    n = len(sizes)
    assert out == {"n": sizes, "name": ["a"] * n, "ok": [True] * n}
    assert loss.shape == (n,)
    assert torch.equal(loss.sum(), twin.plain(x)["loss"])


class Calls(nn.Module):
    """Notes how many rows its calls have."""

    def __init__(self):
        super().__init__()
        self.n_rows = []

    def forward(self, x):
        self.n_rows.append(len(x))
        return x


def test_there_are_no_more_replicas_than_rows():
    ours, x = paceline.DataParallel(Calls(), ["cpu"] * 64), integers(6, 3)
    assert torch.equal(ours(x), x)
    assert ours.module.n_rows == [1] * 6


# ---- a backward inside forward ------------------------------------------------------


class Descending(nn.Module):
    """Runs backwards in forward; clears gradients between them, and after, or not."""

    def __init__(self, n_backwards, clears):
        super().__init__()
        self.first, self.last = linear(), linear(2)
        self.n_backwards, self.clears = n_backwards, clears

    def forward(self, x):
        for _ in range(self.n_backwards):
            if self.clears == "before":
                self.clear()
            self.last(self.first(x)).square().sum().backward()
            if self.clears == "after":
                self.clear()
        return self.last(self.first(x))

    def clear(self):
        for p in self.parameters():
            p.grad = None


@pytest.mark.parametrize(
    ("n_backwards", "clears"), [(1, "after"), (3, "after"), (1, "never"), (3, "never")]
)
def test_a_backward_inside_forward_leaves_the_plain_gradients(
    wrap, n_backwards, clears
):
    twin = Twin(wrap, Descending(n_backwards, clears))
    for seed in range(2):
        twin.zero()
        twin.step(step, integers(7, 3, seed=seed))


def test_gradients_that_are_cleared_between_backwards_are_warned_of(wrap):
    """Those of the other replicas are added up, as they cannot clear the module's."""
    ours = wrap(Descending(3, "before"))
    with pytest.warns(UserWarning, match=r"p\.grad = None has no effect"):
        ours(integers(7, 3))


# ---- what a review has found --------------------------------------------------------


class Adding(nn.Module):
    """Changes an argument in place that is not split."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x, t):
        t.add_(1)
        return self.layer(x) + t


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_an_argument_that_is_not_split_may_be_changed_in_place(
    wrap, shape, is_recorded
):
    twin = Twin(wrap, Adding())
    with torch.set_grad_enabled(is_recorded):
        theirs = twin.plain(integers(7, 3), torch.zeros(shape, dtype=torch.float64))
        t = paceline.replicate(torch.zeros(shape, dtype=torch.float64))
        mine = twin.ours(integers(7, 3), t)
    assert_same(mine, theirs)


def test_a_module_that_compiles_itself_has_replicas(wrap):
    def make():
        module = nn.Sequential(linear(), nn.BatchNorm1d(3).double())
        module.compile(backend="eager")
        return module

    ours, plain = make(), make()
    wrapped = wrap(ours)
    halves = [plain(half) for half in integers(8, 3).split(4)]
    assert_same(wrapped(integers(8, 3)), torch.cat(halves))
    assert ours[1].num_batches_tracked == 1


class Wanting(nn.Module):
    """Computes by whether its buffer requires a gradient."""

    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.ones(3, dtype=torch.float64).requires_grad_())

    def forward(self, x):
        return x + float(self.b.requires_grad)


def test_a_buffer_requires_a_gradient_without_recording_too(wrap):
    twin = Twin(wrap, Wanting())
    with torch.no_grad():
        assert_same(twin.ours(integers(7, 3)), twin.plain(integers(7, 3)))


class KeywordError(Exception):
    """Can be made by a keyword alone."""

    def __new__(cls, *, code):
        return super().__new__(cls, code)

    def __init__(self, *, code):
        super().__init__(code)


class FailingLate(nn.Module):
    def forward(self, x):
        if x.max() > 4:
            raise KeywordError(code=3)
        return x


def test_an_exception_that_cannot_be_made_again_keeps_its_words(wrap):
    ours = wrap(FailingLate())
    with pytest.raises(RuntimeError, match=r"Caught KeywordError in replica 1"):
        ours(torch.arange(6.0))


# ---- devices and wrappers -----------------------------------------------------------


def messages_of(caught):
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


@pytest.mark.parametrize("device_ids", [[0, 1], ["cuda:0", "cuda:1"], (1, 0)])
def test_gpus_that_are_not_there_are_warned_of_once(monkeypatch, device_ids):
    monkeypatch.delenv("PACELINE_CPU_REPLICAS", raising=False)
    module, x = net(), integers(7, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = paceline.DataParallel(module, device_ids)
        for _ in range(2):
            assert torch.equal(ours(x), module(x))
    (words,) = messages_of(caught)
    assert "there is no GPU: the module is called plainly" in words
    assert ours.device_ids == []


def test_no_word_is_said_where_no_gpu_was_named(monkeypatch):
    monkeypatch.delenv("PACELINE_CPU_REPLICAS", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paceline.DataParallel(net())(integers(7, 3))
        paceline.DataParallel(net(), ["cpu"])(integers(7, 3))


@pytest.fixture
def _one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "DataParallel": lambda m: paceline.DataParallel(m, ["cpu"] * 2),
    "DistributedDataParallel": paceline.DistributedDataParallel,
}


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_a_wrapper_in_a_wrapper_is_warned_of_once(outer, inner):
    plain, module = net(), net()
    wrapped = WRAPPERS[inner](module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = WRAPPERS[outer](wrapped)
        for model in (plain, ours):
            loss_of(model(integers(7, 3))).backward()
    words = [w for w in messages_of(caught) if "module is a" in w]
    assert words == [
        f"{outer}(module): module is a {inner} already, and one wrapper is enough; "
        "give the module inside it, module.module"
    ]
    assert_same_grads(module, plain)


# ---- PACELINE_CPU_REPLICAS ----------------------------------------------------------

FORMS = {
    "no devices": ({}, 2),
    "three GPUs": ({"device_ids": [0, 1, 2], "output_device": 1}, 3),
    "names of GPUs": ({"device_ids": ["cuda:1", "cuda:0"], "output_device": "cuda"}, 2),
    "one GPU": ({"device_ids": [0], "output_device": 0}, 1),
}


@pytest.mark.parametrize("name", ["paceline", "torch"])
@pytest.mark.parametrize("form", FORMS)
def test_cpu_replicas_stand_for_gpus(monkeypatch, form, name):
    monkeypatch.setenv("PACELINE_CPU_REPLICAS", "2")
    options, n = FORMS[form]

    def wrap(module, _):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this very file holds torch's class
            installation = paceline.install() if name == "torch" else nullcontext()
        with installation, warnings.catch_warnings():
            warnings.simplefilter("error")
            kind = nn.DataParallel if name == "torch" else paceline.DataParallel
            return kind(module, **options)

    twin = Twin(wrap, net())
    assert type(twin.ours) is paceline.DataParallel
    assert twin.ours.device_ids == [CPU] * n
    assert twin.ours.output_device == CPU
    n_rows = []
    twin.inner[0].register_forward_hook(lambda m, args, out: n_rows.append(len(out)))
    for _ in range(2):
        n_rows.clear()
        twin.zero()
        twin.step(step, integers(7, 3).requires_grad_())
        assert n_rows == {1: [7], 2: [4, 3], 3: [3, 2, 2]}[n]
