"""Forwards that write parameters and draw random numbers, by replicas that are threads.

The reference is what torch's class does: replica 0 is the module, each other one a copy
that was made before the forward; outputs are joined, and gradients added up.  Where a
forward writes the same whatever its rows are, that is the plain module on all rows.
"""

import copy
import functools
import random
import threading

import numpy as np
import paceline
import pytest
import torch
from paceline._replicas.generators import generators_of
from replicas import (
    Wrap,
    assert_close,
    assert_same_grads,
    assert_same_state,
    integer_weights,
    integers,
    loss_of,
)
from torch import nn

X = integers(7, 3)
MOMENTUM = 0.5


@pytest.fixture
def wrap():
    """Return a function that wraps a module for n replicas that are threads."""
    torch.manual_seed(0)
    wrap = Wrap("thread")
    yield wrap
    wrap.close()


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


def assert_trains_as(wrap, module, step, n=2, n_steps=4):
    """Compare steps of the module behind a wrapper with `step(module, x)`."""
    theirs, ours = module, wrap(copy.deepcopy(module), n)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (ours, theirs)]
    for number in range(n_steps):
        x = integers(7, 3, seed=number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = step(theirs, x)
        output = step_alone(ours, x)
        assert_close(output, expected, f"step {number}")
        assert_same_grads(ours, theirs, f"step {number}")
        assert_same_state(ours, theirs, f"step {number}")
        if number < 2:  # two steps keep the numbers small
            for optimizer in optimizers:
                optimizer.step()
    return ours


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
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            self.follow(q, k)
        return self.query(x) * self.key(x)


class Paired(Momentum):
    """The same, by a list of pairs, as ALBEF has it."""

    def forward(self, x):
        for query, key in self.model_pairs:
            for q, k in zip(query.parameters(), key.parameters(), strict=True):
                self.follow(q, k)
        return self.query(x) * self.key(x)


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


FOLLOW = [in_place, by_data, inside_data, by_copy]


@pytest.mark.parametrize("kind", [Momentum, Paired])
@pytest.mark.parametrize("follow", FOLLOW, ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [2, 3])
def test_momentum_encoders_follow_once_a_call(wrap, kind, follow, n):
    assert_trains_as(wrap, kind(follow), step_alone, n)


class Counting(nn.Module):
    """Counts its calls in a frozen parameter, and uses the number."""

    def __init__(self):
        super().__init__()
        self.layer = integer_weights(nn.Linear(3, 2))
        self.n = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)

    def forward(self, x):
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
        with torch.no_grad():
            self.codes.index_add_(0, nearest, z.round())
        return out


class Clipped(nn.Module):
    """Clips the weights that it trains, before it uses them: Wasserstein's critic."""

    def __init__(self):
        super().__init__()
        self.layer = integer_weights(nn.Linear(3, 2))

    def forward(self, x):
        for p in self.layer.parameters():
            p.data.clamp_(-1, 1)
        return self.layer(x)


class ClippedByRows(Clipped):
    """Clips them by what the rows are: each replica has others."""

    def forward(self, x):
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
        with torch.no_grad():
            self.first.weight.clamp_(-1, 1)
        return self.second(self.first(x))


WRITING = [Counting, Codebook, Clipped, ClippedByRows, Recurrent, Tied]


@pytest.mark.parametrize("kind", WRITING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("n", [2, 3])
def test_each_replica_writes_to_a_copy_and_the_module_has_replica_zeros(wrap, kind, n):
    assert_trains_as(wrap, kind(), functools.partial(step_by_copies, n=n), n)


def test_only_what_is_written_is_copied_after_the_first_call(wrap):
    seen = []

    class Listing(Counting):
        def forward(self, x):
            seen.append((self.layer.weight, self.n))
            return super().forward(x)

    ours = wrap(Listing())
    for _ in range(3):
        seen.clear()
        ours(X)
    assert [weight is ours.module.layer.weight for weight, _ in seen] == [True] * 2
    assert sorted(n is ours.module.n for _, n in seen) == [False, True]
    assert all(isinstance(n, nn.Parameter) for _, n in seen)


def test_copies_of_the_first_call_are_parameters_with_their_attributes(wrap):
    seen = []

    class Listing(nn.Linear):
        def forward(self, x):
            seen.extend([isinstance(self.weight, nn.Parameter), self.weight.mark])
            assert len(list(self.parameters())) == 2
            return super().forward(x)

    module = Listing(3, 2).double()
    module.weight.mark = "mine"
    wrap(module)(X)
    assert seen == [True, "mine"] * 2


@pytest.mark.parametrize("write", [in_place, by_data], ids=lambda f: f.__name__)
def test_a_parameter_that_is_written_later_on_is_one_error(wrap, write):
    active = []
    module = Momentum(lambda q, k: write(q, k) if active else None)
    ours = wrap(copy.deepcopy(module))
    for _ in range(2):
        step_alone(ours, X)
    active.append(True)
    with pytest.raises(RuntimeError, match=r"wrote to 'key\.weight', 'key\.bias'"):
        ours(X)
    ours.module.load_state_dict(module.state_dict())
    ours.zero_grad()
    for _ in range(2):
        module.zero_grad()
        ours.zero_grad()
        assert_close(step_alone(ours, X), step_alone(module, X))
        assert_same_grads(ours, module)
        assert_same_state(ours, module)


def test_a_write_of_another_replica_alone_is_one_error_and_then_lost(wrap):
    class Late(Counting):
        def forward(self, x):
            if x[0, 0] == 9:
                self.n += 1
            return self.layer(x)

    ours = wrap(Late())
    for _ in range(2):
        ours(X)
    x = X.clone()
    x[4:, 0] = 9
    with pytest.raises(RuntimeError, match="wrote to 'n'"):
        ours(x)
    ours.module.n.zero_()
    ours(x)
    assert ours.module.n.item() == 0


def test_a_way_to_the_module_past_its_attributes_is_one_error(wrap):
    module = Counting()
    module.followers = {frozenset(): lambda: module.n}

    def forward(x):
        module.followers[frozenset()]().add_(1)
        return x

    module.forward = forward
    with pytest.raises(RuntimeError, match="reaches them by something else"):
        wrap(module)(X)


def test_a_scripted_module_may_write_its_parameters(wrap):
    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(integers(3, 2))
            self.n = nn.Parameter(torch.zeros(1, dtype=torch.float64), False)

        def forward(self, x):
            self.n.add_(1)
            return x @ self.weight * self.n

    ours = wrap(torch.jit.script(Scripted()))
    for number in range(1, 4):
        ours.zero_grad()
        output = step_alone(ours, X)
        assert_close(output.detach(), X @ ours.module.weight.detach() * number)
        assert ours.module.n.item() == number
        x = X.clone().requires_grad_(False)
        weight = ours.module.weight.detach().clone().requires_grad_()
        loss_of(x @ weight * number).backward()
        assert_close(ours.module.weight.grad, weight.grad)


def test_evaluation_and_training_are_told_apart(wrap):
    class Trained(Counting):
        def forward(self, x):
            return super().forward(x) if self.training else self.layer(x)

    ours = wrap(Trained())
    for number in range(1, 4):
        ours.eval()
        with torch.no_grad():
            ours(X)
        ours.train()
        ours(X)
        assert ours.module.n.item() == number


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
def test_lookups_with_a_largest_norm_have_the_bits_of_the_plain_module(name, is_tied):
    plain = Lookup(TABLES[name], is_tied)
    with paceline.DataParallel(copy.deepcopy(plain), ["cpu"] * 2) as ours:
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
        assert "max_norm" in ours.engine_reason


# ---- models of inference mode -------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "thread", "process"])
def test_a_model_of_inference_mode_stays_whole(engine):
    with torch.inference_mode():
        module = integer_weights(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        module.eval()
        x = X.clone()
        expected = module(x)
    with paceline.DataParallel(module, ["cpu"] * 2, engine=engine) as ours:
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            for rows in (x, X):
                with mode():
                    assert torch.equal(ours(rows), expected)
                    assert torch.equal(module(rows), expected)
        assert "inference_mode" in ours.engine_reason
    with torch.inference_mode():
        assert torch.equal(module(x), expected)


# ---- generators of the model's own --------------------------------------------------

ours_torch = torch.Generator()
ours_numpy = np.random.default_rng()


class Held:
    def __init__(self, generator):
        self.generator = generator


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


def of_global_torch(module):
    return torch.rand((), generator=ours_torch)


def of_global_numpy(module):
    return ours_numpy.random()


def seeded(seed):
    """Return models that draw from generators with this seed, by where these are."""
    ours_torch.manual_seed(seed)
    ours_numpy.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    own = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    legacy = np.random.RandomState(seed)
    plain = random.Random(seed)

    def of_closure(module):
        return rng.random()

    return {
        "torch": Drawing(lambda m: torch.rand((), generator=m.g), g=own),
        "numpy": Drawing(lambda m: m.rng.random(), rng=rng),
        "legacy numpy": Drawing(lambda m: m.rng.random_sample(), rng=legacy),
        "python": Drawing(lambda m: m.rng.random(), rng=plain),
        "a list": Drawing(lambda m: m.all[1].random(), all=[3, rng]),
        "a dict": Drawing(lambda m: m.all["a"][0].random(), all={"a": [rng]}),
        "an object": Drawing(lambda m: m.o.generator.random(), o=Held(rng)),
        "a bound method": Drawing(lambda m: m.roll(), roll=rng.random),
        "a global of torch": Drawing(of_global_torch),
        "a global of numpy": Drawing(of_global_numpy),
        "a closure": Drawing(of_closure),
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


def test_generators_are_found_where_code_reads_them_alone():
    models = seeded(0)
    for name, model in models.items():
        found = generators_of(list(model.modules()))
        assert len(found) == 1, name
    assert not generators_of([nn.Dropout(), Counting(), nn.LSTM(1, 1)])
    shared = Drawing(lambda m: random.random() + torch.rand(()) + np.random.rand())
    assert not generators_of([shared])


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
