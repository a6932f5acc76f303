"""Forwards that write parameters, and that draw from generators of the model.

The reference is what torch's class does: replica 0 is the module, each other one a copy
that was made before the forward; outputs are joined, and gradients added up.  What
replica 0 writes stays, so the next step computes with it; what the others write goes to
their copies and is lost.  Where a forward writes the same whatever its rows are, that
is the plain module on all rows.
"""

import copy
import functools
import random
import threading

import numpy as np
import pytest
import torch
from replicas import (
    Twin,
    assert_close,
    assert_same_grads,
    assert_same_state,
    integer_weights,
    integers,
    linear,
    loss_of,
    step,
)
from torch import nn

X = integers(7, 3)
MOMENTUM = 0.5


def step_by_copies(module, x, n=2):
    """Take a step as torch's class does, on the CPU; return the output."""
    copies = [copy.deepcopy(module) for _ in range(n - 1)]
    for each in copies:
        each.zero_grad()
    parts = x.tensor_split(n)
    outputs = [each(part) for each, part in zip([module, *copies], parts, strict=True)]
    output = torch.cat(outputs)
    loss_of(output).backward()
    for each in copies:
        for p, q in zip(module.parameters(), each.parameters(), strict=True):
            if q.grad is not None:
                p.grad = q.grad if p.grad is None else p.grad + q.grad
    return output


def step_alone(module, x):
    output = module(x)
    loss_of(output).backward()
    return output


BEGINS = pytest.mark.parametrize("begins", [0, 2], ids=["always", "third call"])


def assert_trains_as(wrap, module, step, n=2, begins=0):
    """Compare steps of the module behind a wrapper with `step(module, x)`.

    The module's forward writes from call `begins` on.
    """
    theirs, ours = module, wrap(copy.deepcopy(module), n)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (ours, theirs)]
    for number in range(begins + 4):
        theirs.is_writing = ours.module.is_writing = number >= begins
        x = integers(7, 3, seed=number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = step(theirs, x)
        output = step_alone(ours, x)
        assert_close(output, expected, f"step {number}")
        assert_same_grads(ours, theirs, f"step {number}")
        assert_same_state(ours, theirs, f"step {number}")
        if number % 3 < 2:  # steps of one keep the numbers small
            for model in (ours, theirs):
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.sign_()
            for optimizer in optimizers:
                optimizer.step()


# ---- parameters that a forward writes -----------------------------------------------


class Momentum(nn.Module):
    """A layer, and a frozen one that follows it in each forward: MoCo, BYOL."""

    def __init__(self, follow):
        super().__init__()
        self.query = integer_weights(nn.Linear(3, 2), 1)
        self.key = integer_weights(nn.Linear(3, 2), 2).requires_grad_(False)
        self.model_pairs = [[self.query, self.key]]
        self.follow = follow

    def forward(self, x):
        for query, key in self.pairs() if self.is_writing else ():
            for q, k in zip(query.parameters(), key.parameters(), strict=True):
                self.follow(q, k)
        return self.query(x) * self.key(x)

    def pairs(self):
        return [[self.query, self.key]]


class Paired(Momentum):
    """The same, by a list of pairs, as ALBEF has it."""

    def pairs(self):
        return self.model_pairs


@torch.no_grad()
def in_place(q, k):
    k.mul_(MOMENTUM).add_(q, alpha=1 - MOMENTUM)


def by_data(q, k):
    k.data = k.data * MOMENTUM + q.data * (1 - MOMENTUM)


def inside_data(q, k):
    k.data.mul_(MOMENTUM).add_(q.data, alpha=1 - MOMENTUM)


@torch.no_grad()
def by_copy(q, k):
    k.copy_(torch.lerp(q, k, MOMENTUM))


def by_numpy(q, k):
    array = k.detach().numpy()
    array *= MOMENTUM
    array += q.detach().numpy() * (1 - MOMENTUM)


FOLLOW = [in_place, by_data, inside_data, by_copy, by_numpy]


@pytest.mark.parametrize("kind", [Momentum, Paired])
@pytest.mark.parametrize("follow", FOLLOW, ids=lambda f: f.__name__)
@BEGINS
def test_momentum_encoders_follow_once_a_call(wrap, kind, follow, begins):
    assert_trains_as(wrap, kind(follow), step_alone, 3, begins)


class Counting(nn.Module):
    """Counts its calls in a frozen parameter, and uses the number."""

    def __init__(self):
        super().__init__()
        self.layer = integer_weights(nn.Linear(3, 2))
        self.n = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        if self.is_writing:
            self.n += 1
        return self.layer(x) * self.n


class Codebook(nn.Module):
    """Moves a codebook towards the rows that it saw, as a VQ-VAE with EMA does."""

    def __init__(self):
        super().__init__()
        self.layer = integer_weights(nn.Linear(3, 2))
        self.codes = nn.Parameter(integers(4, 2, seed=3), requires_grad=False)

    def forward(self, x):
        z = self.layer(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        out = z + self.codes[nearest]
        if self.is_writing:
            with torch.no_grad():
                self.codes.index_add_(0, nearest, z.round())
        return out


class Assigned(Codebook):
    """Gives itself a new codebook in each forward, as some VQ-VAEs do."""

    def forward(self, x):
        out = self.layer(x) + self.codes.sum(0)
        if self.is_writing:
            self.codes = nn.Parameter(self.codes.detach() + 1, requires_grad=False)
        return out


class Clipped(nn.Module):
    """Clips the weights that it trains, before it uses them: Wasserstein's critic."""

    def __init__(self):
        super().__init__()
        self.layer = integer_weights(nn.Linear(3, 2))

    def forward(self, x):
        if self.is_writing:
            for p in self.layer.parameters():
                p.data.clamp_(-1, 1)
        return self.layer(x)


class ClippedByNumpy(Clipped):
    def forward(self, x):
        if self.is_writing:
            for p in self.layer.parameters():
                array = p.detach().numpy()
                array.clip(-1, 1, out=array)
        return self.layer(x)


class ClippedByRows(Clipped):
    """Clips them by what the rows are: each replica has others."""

    def forward(self, x):
        if self.is_writing:
            with torch.no_grad():
                self.layer.weight.clamp_(max=float(len(x) % 3))
        return self.layer(x)


class Recurrent(nn.Module):
    """Writes a weight that also lies in a list of the layer's own."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(3, 2, nonlinearity="relu", batch_first=True).double()
        integer_weights(self.rnn)

    def forward(self, x):
        if self.is_writing:
            with torch.no_grad():
                self.rnn.weight_ih_l0.add_(1.0)
        return self.rnn(x[:, None])[0][:, 0]


class Tied(nn.Module):
    """Writes a weight that two parts have."""

    def __init__(self):
        super().__init__()
        self.first = integer_weights(nn.Linear(3, 3))
        self.second = nn.Linear(3, 3).double()
        self.second.weight = self.first.weight
        integer_weights(self.second)

    def forward(self, x):
        if self.is_writing:
            with torch.no_grad():
                self.first.weight.clamp_(-1, 1)
        return self.second(self.first(x))


WRITING = [
    Counting,
    Codebook,
    Assigned,
    Clipped,
    ClippedByNumpy,
    ClippedByRows,
    Recurrent,
    Tied,
]


@pytest.mark.parametrize("kind", WRITING, ids=lambda kind: kind.__name__)
@BEGINS
@pytest.mark.parametrize("n", [2, 3])
def test_each_replica_writes_to_a_copy_and_the_module_has_replica_zeros(
    wrap, kind, n, begins
):
    """What replica 0 writes stays, and the next step computes with it, as in torch."""
    assert_trains_as(wrap, kind(), functools.partial(step_by_copies, n=n), n, begins)


def test_copies_are_parameters_with_their_attributes(wrap):
    seen = []

    class Listing(nn.Linear):
        def forward(self, x):
            seen.extend([isinstance(self.weight, nn.Parameter), self.weight.mark])
            assert len(list(self.parameters())) == 2
            return super().forward(x)

    module = Listing(3, 2).double()
    module.weight.mark = "mine"
    ours = wrap(module)
    for _ in range(2):
        ours(X)
    assert seen == [True, "mine"] * 4


def test_a_write_of_another_replica_alone_is_lost(wrap):
    class Late(Counting):
        def forward(self, x):
            if x[0, 0] == 9:
                self.n += 1
            return self.layer(x) * self.n

    ours = wrap(Late())
    x = X.clone()
    x[4:, 0] = 9
    for _ in range(2):
        assert_close(ours(x)[4:], ours.module.layer(x)[4:])
        assert ours.module.n.item() == 0


def test_a_scripted_module_may_write_its_parameters(wrap_on_cpu):
    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(integers(3, 2))
            self.n = nn.Parameter(torch.zeros(1, dtype=torch.float64), False)

        def forward(self, x):
            self.n.add_(1)
            return x @ self.weight * self.n

    ours = wrap_on_cpu(torch.jit.script(Scripted()))
    for number in range(1, 4):
        ours.zero_grad()
        output = step_alone(ours, X)
        assert_close(output.detach(), X @ ours.module.weight.detach() * number)
        assert ours.module.n.item() == number
        x = X.clone().requires_grad_(False)
        weight = ours.module.weight.detach().clone().requires_grad_()
        loss_of(x @ weight * number).backward()
        assert_close(ours.module.weight.grad, weight.grad)


# ---- tensors that a forward makes require a gradient --------------------------------


class Thawing(nn.Module):
    """Thaws a tensor in each training forward, as libraries do with a codebook."""

    def __init__(self, name):
        super().__init__()
        self.name, self.layer = name, linear()
        self.register_buffer("codes", integers(3))
        self.frozen = nn.Parameter(integers(3, seed=1), requires_grad=False)

    def forward(self, x):
        if self.training:
            getattr(self, self.name).requires_grad_()
        return self.layer(x * self.codes + self.frozen)


@pytest.mark.parametrize("is_first", [True, False], ids=["first call", "later"])
@pytest.mark.parametrize("name", ["codes", "frozen"])
@pytest.mark.parametrize("n", [2, 3])
def test_a_tensor_that_forward_thaws_collects_the_plain_gradient(
    wrap, name, is_first, n
):
    twin = Twin(wrap, Thawing(name), n)
    if not is_first:
        for model in twin.models:
            model.eval()
        twin.step(step, integers(7, 3))
        for model in twin.models:
            model.train()
    for seed in range(3):
        twin.step(step, integers(7, 3, seed=seed))
        mine, theirs = [getattr(m, name).grad for m in (twin.inner, twin.plain)]
        assert theirs is not None
        assert_close(mine, theirs)


def test_a_tensor_that_forward_thaws_without_gradients_has_none(wrap):
    twin = Twin(wrap, Thawing("codes"))
    with torch.no_grad():
        twin.compare(lambda model, x: model(x), integers(7, 3))
    assert twin.inner.codes.grad is None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_trained_buffer_requires_its_gradient_in_every_replica(wrap, mode):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", integers(3).requires_grad_())

        def forward(self, x):
            return x + float(self.codes.requires_grad)

    with mode():
        assert torch.equal(wrap(Asking())(X), X + 1)


# ---- weights that lookups write -----------------------------------------------------


class Lookup(nn.Module):
    """An embedding with a largest norm, and what is made of it."""

    def __init__(self, make, is_tied=False):
        super().__init__()
        self.table = make().double()
        with torch.no_grad():
            self.table.weight.copy_(integers(9, 2, seed=5))
        self.out = integer_weights(nn.Linear(2, 9, bias=False))
        if is_tied:
            self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.table(x))


TABLES = {
    "embedding": lambda: nn.Embedding(9, 2, max_norm=1.0),
    "by the largest entry": lambda: nn.Embedding(
        9, 2, max_norm=1.5, norm_type=float("inf")
    ),
    "bag": lambda: nn.EmbeddingBag(9, 2, max_norm=1.0, mode="sum"),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("is_tied", [False, True], ids=["alone", "tied"])
def test_lookups_with_a_largest_norm_have_the_bits_of_the_plain_module(
    wrap, name, is_tied
):
    plain = Lookup(TABLES[name], is_tied)
    ours = wrap(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.25) for m in (plain, ours)]
    for number in range(4):
        rows = integers(7, 3, seed=number, low=0, high=8).long()
        outputs = []
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.set_grad_enabled(number != 2):
                outputs.append(model(rows))
            if outputs[-1].requires_grad:
                loss_of(outputs[-1]).backward()
                optimizer.step()
        assert_close(outputs[1], outputs[0])
        assert_same_grads(ours, plain)
        assert_same_state(ours, plain)


# ---- models of inference mode -------------------------------------------------------


def test_a_model_of_inference_mode_stays_whole(wrap):
    with torch.inference_mode():
        module = integer_weights(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        module.eval()
        x = X.clone()
        expected = module(x)
    ours = wrap(module)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        for rows in (x, X):
            with mode():
                assert torch.equal(ours(rows), expected)
                assert torch.equal(module(rows), expected)
    with torch.inference_mode():
        assert torch.equal(module(x), expected)


# ---- generators of the model's own --------------------------------------------------

ours_torch = torch.Generator()


class Drawing(nn.Module):
    """Adds a number to each row that it draws by `self.draw()`."""

    def __init__(self, draw, **held):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.draw = draw
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x):
        return torch.full((len(x),), float(self.draw(self)), dtype=torch.float64)


def of_a_global(module):
    return torch.rand((), generator=ours_torch)


def seeded(seed):
    """Return models that draw from generators with this seed, by where these are."""
    ours_torch.manual_seed(seed)
    own = torch.Generator().manual_seed(seed)
    rng, plain = np.random.default_rng(seed), random.Random(seed)
    return {
        "torch": Drawing(lambda m: torch.rand((), generator=m.g), g=own),
        "numpy": Drawing(lambda m: m.rng.random(), rng=rng),
        "python": Drawing(lambda m: m.rng.random(), rng=plain),
        "a dict": Drawing(lambda m: m.all["a"][0].random(), all={"a": [rng]}),
        "a bound method": Drawing(lambda m: m.roll(), roll=rng.random),
        "a global": Drawing(of_a_global),
        "a closure": Drawing(lambda m: rng.random()),
    }


@pytest.mark.parametrize("name", list(seeded(0)))
def test_generators_of_the_model_are_drawn_from_in_order(wrap, name):
    runs = []
    for _ in range(2):
        ours = wrap(seeded(5)[name], 3)
        runs.append([ours(X).tolist() for _ in range(6)])
        drawn = [run[i] for run in runs[-1] for i in (0, 3, 5)]
        assert len(set(drawn)) == len(drawn)
    assert runs[0] == runs[1]
    theirs = seeded(5)[name]
    in_order = [theirs(X[:1]).item() for _ in range(18)]
    assert drawn == in_order


def test_a_generator_that_is_drawn_from_later_is_drawn_from_in_order(wrap):
    rng = np.random.default_rng(3)
    active = []
    ours = wrap(Drawing(lambda m: m.rng.random() if active else 0.0, rng=rng))
    for _ in range(2):
        ours(X)
    active.append(True)
    theirs = np.random.default_rng(3)
    assert ours(X).tolist() == [theirs.random()] * 4 + [theirs.random()] * 3


def test_a_generator_that_each_forward_seeds_is_drawn_from_in_order(wrap):
    """Its state is the same after a forward as before: only turns keep them apart."""
    threads = []

    def draw(module):
        threads.append(threading.get_ident())
        return torch.rand((), generator=module.g.manual_seed(3))

    ours = wrap(Drawing(draw, g=torch.Generator().manual_seed(3)), 3)
    draw(ours.module)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            for _ in range(2):
                assert len(set(ours(X).tolist())) == 1
    assert set(threads) == {threading.get_ident()}
