"""Gradients of gradients: create_graph=True through the wrapper, of any order."""

import threading
import warnings

import pytest
import torch
from replicas import (
    Power,
    Twin,
    assert_same,
    integer_weights,
    leaf,
    loss_of,
    reals,
    slopes_of,
    small,
    smooth_net,
    squares_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---- orders -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_every_order_is_exact(wrap, n):
    twin = Twin(wrap, Power(), n)

    def run(model, x, y):
        seen = []
        targets = [x, y, *model.parameters()]
        value = loss_of(model(x) * model(y))
        for _ in range(3):
            slopes = slopes_of(value, targets)
            seen += [slope for slope in slopes if slope is not None]
            value = sum(slope.sum() for slope in slopes if slope is not None)
        value.backward()
        return seen, x.grad, y.grad

    for step in range(2):  # the second time foretells from the first
        x, y = [small(7, 3, seed=s + step).requires_grad_() for s in (1, 2)]
        twin.zero()
        seen, _, _ = twin.compare(run, x, y)
        assert len(seen) == 18
        assert all(slope.requires_grad for slope in seen)
        twin.assert_same()


TARGETS = {
    "input": lambda model, x: [x],
    "weights": lambda model, x: list(model.parameters()),
    "one weight": lambda model, x: [next(iter(model.parameters()))],
    "both": lambda model, x: [x, *model.parameters()],
}


@pytest.mark.parametrize("second", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("first", TARGETS.values(), ids=TARGETS)
def test_what_is_asked_for_may_differ_by_order(wrap, first, second):
    twin = Twin(wrap, Power())

    def run(model, x):
        out = model(x)
        penalty = squares_of(slopes_of(loss_of(out), first(model, x)))
        again = slopes_of(penalty, second(model, x), retain_graph=True)
        (penalty + loss_of(out)).backward(inputs=second(model, x))
        return again, x.grad

    for _ in range(2):
        twin.zero()
        twin.compare(run, small(7, 3).requires_grad_())
        twin.assert_same()


def test_products_with_the_hessian_take_two_backwards(wrap):
    twin = Twin(wrap, Power())
    directions = [small(*p.shape, seed=9) for p in twin.plain.parameters()]

    def run(model, x):
        weights = list(model.parameters())
        slopes = slopes_of(loss_of(model(x)), weights)
        dot = sum(
            (s * v).sum()
            for s, v in zip(slopes, directions, strict=True)
            if s is not None
        )
        return torch.autograd.grad(dot, weights, allow_unused=True)

    assert twin.compare(run, small(7, 3))[0].abs().sum() > 0


FUNCTIONAL = {
    "hessian": lambda f, x: torch.autograd.functional.hessian(f, x),
    "hessian at once": lambda f, x: torch.autograd.functional.hessian(
        f, x, vectorize=True
    ),
    "hvp": lambda f, x: torch.autograd.functional.hvp(f, x, torch.ones_like(x)),
    "vhp": lambda f, x: torch.autograd.functional.vhp(f, x, torch.ones_like(x)),
    "jacobian with a graph": lambda f, x: torch.autograd.functional.jacobian(
        f, x, create_graph=True
    ),
    "jvp by two backwards": lambda f, x: torch.autograd.functional.jvp(
        f, x, torch.ones_like(x), create_graph=True
    ),
}


@pytest.mark.parametrize("function", FUNCTIONAL.values(), ids=FUNCTIONAL)
def test_the_functional_api_gives_what_it_gives_plainly(wrap, function):
    twin = Twin(wrap, Power())
    twin.compare(
        lambda model, x: function(lambda y: loss_of(model(y)), x),
        small(5, 3).requires_grad_(),
    )


def test_gradgradcheck_finds_no_fault(wrap):
    model = smooth_net()
    ours = wrap(model)
    x = reals(3, 3).requires_grad_()
    weights = list(model.parameters())
    assert torch.autograd.gradgradcheck(lambda x, *_: ours(x).exp(), (x, *weights))


# ---- loops --------------------------------------------------------------------------


class Critic(nn.Module):
    """Normalises its weight by a vector that every forward in training improves."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.register_buffer("direction", torch.ones(4))

    def forward(self, x):
        weight = self.first.weight
        if self.training:
            with torch.no_grad():
                step = weight @ (weight.T @ self.direction)
                self.direction.copy_(nn.functional.normalize(step, dim=0))
        size = (weight.T @ self.direction.clone()).norm()
        return self.last(torch.tanh(self.norm(x @ (weight / size).T)))


def penalty_of(critic, mixed):
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def test_a_gan_with_a_gradient_penalty_trains_as_plainly(wrap):
    torch.manual_seed(3)
    twin = Twin(wrap, Critic().double())
    makers = [smooth_maker() for _ in twin.models]
    for critic, maker in zip(twin.models, makers, strict=True):
        slow = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5)
        fast = torch.optim.SGD(maker.parameters(), lr=0.1)
        for step in range(4):
            real, noise = reals(7, 3, seed=step), reals(7, 2, seed=step)
            fake = maker(noise)
            mixed = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
            loss = critic(fake.detach()).mean() - critic(real).mean()
            slow.zero_grad()
            (loss + 10 * penalty_of(critic, mixed)).backward()
            slow.step()
            fast.zero_grad()
            (penalty_of(critic, maker(noise)) - critic(maker(noise)).mean()).backward()
            fast.step()
    twin.assert_same(exact=False)
    for p, q in zip(makers[1].parameters(), makers[0].parameters(), strict=True):
        assert_same(p, q, exact=False)


def smooth_maker():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def test_gradients_in_place_may_have_a_graph(wrap):
    twin = Twin(wrap, Power())

    def run(model, x):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using backward.. with create_g")
            loss_of(model(x)).backward(create_graph=True)
        slopes = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(slope.requires_grad for slope in slopes)
        again = torch.autograd.grad(squares_of([*slopes, x.grad]), x)
        seen = [slope.detach() for slope in [*slopes, x.grad]]
        model.zero_grad()
        x.grad = None  # a cycle
        return seen, again

    for step in range(2):
        twin.compare(run, small(7, 3, seed=step).requires_grad_())


def test_calls_of_every_size_may_go_into_one_graph(wrap):
    twin = Twin(wrap, Power())

    def loss(model, *batches):
        total = 0
        for x in batches:
            (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
            total = total + squares_of([slope]) + loss_of(model(x.detach()))
        return total

    sizes = (7, 1, 2, 7, 4)  # of one row, only replica 0 has a part
    for _ in range(2):
        twin.zero()
        batches = [small(n, 3, seed=n).requires_grad_() for n in sizes]
        twin.step(loss, *batches)


def test_wrappers_in_a_row_pass_graphs_on(wrap):
    twins = [Twin(wrap, Power(seed), n) for seed, n in ((1, 2), (5, 3))]
    rows = []
    for which in ("plain", "ours"):
        first, last = [getattr(twin, which) for twin in twins]
        x = small(7, 3).requires_grad_()
        middle = first(x)
        out = last(torch.cat([middle, x[:, :1]], 1))
        slopes = slopes_of(loss_of(out), [x, middle, *first.parameters()])
        squares_of(slopes).backward()
        rows.append((slopes, x.grad))
    assert_same(*reversed(rows))
    for twin in twins:
        twin.assert_same()


def test_second_orders_may_run_in_another_thread(wrap):
    twin = Twin(wrap, Power())

    def run(model, x):
        seen = []

        def work():
            (slope,) = slopes_of(loss_of(model(x)), [x])
            seen.extend(torch.autograd.grad(squares_of([slope]), x))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return seen

    assert len(twin.compare(run, small(7, 3).requires_grad_())) == 1


# ---- models -------------------------------------------------------------------------


class Straight(nn.Module):
    """Linear: its slope depends on its weights, and not on its input."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x):
        return self.linear(x)


def test_what_a_slope_does_not_depend_on_has_no_gradient(wrap):
    twin = Twin(wrap, Straight())
    fired = {model: [] for model in twin.models}

    def run(model, x):
        x.register_hook(lambda grad: fired[model].append(grad.clone()))
        weights = list(model.parameters())
        weights[1].register_hook(lambda grad: fired[model].append(grad.clone()))
        (slope,) = slopes_of(loss_of(model(x)), [x])
        seen = torch.autograd.grad(
            squares_of([slope]), [x, *weights], allow_unused=True, retain_graph=True
        )
        squares_of([slope]).backward()
        assert x.grad is None
        return seen

    for step in range(2):
        seen = twin.compare(run, small(7, 3, seed=step).requires_grad_())
        assert [grad is None for grad in seen] == [True, False, True]
    assert_same(fired[twin.ours], fired[twin.plain])
    slope = slopes_of(loss_of(twin.ours(x := leaf(small(7, 3).requires_grad_()))), [x])
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(squares_of(slope), x)


class Partly(nn.Module):
    """Uses `rarely` only where a row asks for it, and its rows may need no gradient."""

    def __init__(self):
        super().__init__()
        self.always = integer_weights(nn.Linear(3, 2), 1)
        self.rarely = integer_weights(nn.Linear(3, 2), 2)

    def forward(self, x):
        out = self.always(x).square()
        if (x[:, 0] > 50).any():
            out = out + (x[:, :1] > 50) * self.rarely(x).square()
        return out.detach() if (x[:, 0] < -50).all() else out


@pytest.mark.parametrize("rows", [[], [1], [6], [1, 6]], ids=str)
def test_replicas_may_use_different_weights(wrap, rows):
    twin = Twin(wrap, Partly())

    def run(model, x):
        weights = list(model.parameters())
        slopes = slopes_of(loss_of(model(x)), [x, *weights])
        again = slopes_of(squares_of(slopes), [x, *weights])
        squares_of(slopes).backward()
        return slopes, again, x.grad

    for used in (rows, [], rows):  # and the use of one step says nothing of the next
        x = small(7, 3)
        x[used, 0] = 60
        twin.zero()
        twin.compare(run, x.requires_grad_())
        twin.assert_same()


@pytest.mark.parametrize("order", [1, 2])
def test_a_replica_may_need_no_gradient(wrap, order):
    twin = Twin(wrap, Partly(), 3)
    x = small(7, 3)
    x[3:5, 0] = -60  # all rows of replica 1; the plain module sees no such batch
    x.requires_grad_()
    rows = torch.tensor([0, 1, 2, 5, 6])
    weights = torch.tensor([1.0, 2, 3, 0, 0, 4, 5], dtype=x.dtype)[:, None]

    def run(model, x, weights):
        targets = [x, *model.parameters()]
        slopes = torch.autograd.grad(
            (weights * model(x)).sum(),
            targets,
            create_graph=order == 2,
            allow_unused=True,
        )
        if order == 2:
            slopes += slopes_of(squares_of(slopes), targets)
        return slopes

    for _ in range(2):
        theirs = run(twin.plain, leaf(x[rows].detach().requires_grad_()), weights[rows])
        mine = list(run(twin.ours, leaf(x), weights))
        for i in range(0, len(mine), 5):
            assert not mine[i][3:5].any()
            mine[i] = mine[i][rows]
        assert_same(mine, list(theirs))


class Shift(nn.Module):
    """Passes the gradient of its output on as it is."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(small(3))

    def forward(self, x):
        return x + self.by


def test_a_gradient_may_be_that_of_the_output_itself(wrap):
    twin = Twin(wrap, Shift())

    def run(model, x):
        slopes = slopes_of(model(x).pow(3).sum(), [x])
        return slopes, slopes_of(squares_of(slopes), [x])

    for _ in range(2):
        twin.compare(run, small(7, 3).requires_grad_())


class Looked(nn.Module):
    """Two embeddings, one of which has sparse gradients, multiplied."""

    def __init__(self):
        super().__init__()
        self.sparse = integer_weights(nn.Embedding(6, 3, sparse=True), 1)
        self.dense = integer_weights(nn.Embedding(6, 3), 2)

    def forward(self, words):
        return (self.sparse(words) * self.dense(words)).square().sum(1)


def test_sparse_gradients_have_gradients(wrap):
    twin = Twin(wrap, Looked())
    words = torch.tensor([[0, 1], [1, 2], [5, 0], [1, 1], [0, 1], [2, 2], [5, 3]])

    def run(model):
        weights = list(model.parameters())
        sparse, dense = slopes_of(loss_of(model(words)), weights)
        assert sparse.is_sparse
        (again,) = torch.autograd.grad(
            squares_of([dense]), weights[1:], retain_graph=True
        )
        return sparse.to_dense().detach(), dense, again

    for _ in range(2):
        twin.compare(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_other_dtypes_have_second_orders(wrap, dtype):
    twin = Twin(wrap, Power().to(dtype))
    x = torch.complex(small(7, 3), small(7, 3, seed=1)) if dtype.is_complex else None
    x = (small(7, 3) if x is None else x).to(dtype)

    def run(model, x):
        out = model(x)
        slopes = slopes_of((out * out.conj()).real.sum(), [x, *model.parameters()])
        value = sum((s * s.conj()).real.sum() for s in slopes if s is not None)
        return slopes, torch.autograd.grad(value, [x, *model.parameters()][:3])

    for _ in range(2):
        twin.compare(run, x.requires_grad_())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.power = Power()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.power, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("place", ["inside", "around"])
def test_checkpoints_have_second_orders(wrap, place):
    is_inside = place == "inside"
    twin = Twin(wrap, Checkpointed(False) if is_inside else Power())

    def run(model, x):
        out = model(x) if is_inside else checkpoint(model, x, use_reentrant=False)
        slopes = slopes_of(loss_of(out), [x, *model.parameters()])
        squares_of(slopes).backward()
        return slopes, x.grad

    for _ in range(2):
        twin.zero()
        twin.compare(run, small(7, 3).requires_grad_())
        twin.assert_same()


def test_reentrant_checkpoints_say_that_they_cannot(wrap):
    ours = wrap(Checkpointed(True))
    x = small(7, 3).requires_grad_()
    loss = loss_of(ours(x))
    with pytest.raises(RuntimeError, match="use_reentrant"):
        torch.autograd.grad(loss, x, create_graph=True)
    loss_of(ours(x)).backward()
