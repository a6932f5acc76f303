"""What is a replica's own by nature: statistics of its rows, and random numbers."""

import copy
import threading
from functools import partial

import pytest
import torch
from replicas import (
    Twin,
    assert_same,
    assert_same_grads,
    assert_same_state,
    integers,
    loss_of,
    reals,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---- batch norm ---------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.double()

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def in_parts(model, x, sizes):
    """Run the plain module on each replica's rows; only the first leaves statistics."""
    first, *parts = x.split(sizes)
    parameters = dict(model.named_parameters())
    others = [
        torch.func.functional_call(copy.deepcopy(model), parameters, (part,))
        for part in parts
    ]
    return torch.cat([model(first), *others])


@pytest.mark.parametrize(("n", "sizes"), [(2, [4, 3]), (3, [3, 2, 2])])
def test_batch_norm_keeps_the_statistics_of_the_first_replica(wrap, n, sizes):
    plain, module = Normed(), Normed()
    ours = wrap(module, n)
    for step in range(3):
        x, y = [integers(7, 3, seed=step).requires_grad_() for _ in range(2)]
        theirs, mine = in_parts(plain, x, sizes), ours(y)
        assert_same(mine, theirs, exact=False)
        for out in (theirs, mine):
            loss_of(out).square().backward()
        assert_same(y.grad, x.grad, exact=False)
        assert_same_state(module, plain, f"step {step}", exact=False)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert_same(p.grad, q.grad, exact=False)
    assert module.norm.num_batches_tracked == 3
    assert module.norm.running_mean.abs().min() > 0


def test_second_gradients_go_through_batch_norm(wrap):
    plain, module = Normed(), Normed()
    ours = wrap(module)
    for step in range(2):
        grads = []
        for call in (partial(in_parts, plain, sizes=[4, 3]), ours):
            x = reals(7, 3, seed=step).requires_grad_()
            out = call(x).exp().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            slope.square().sum().backward()
            grads.append(x.grad)
        assert_same(*reversed(grads), exact=False)
        assert_same_state(module, plain, exact=False)
    assert_same_grads(module, plain, exact=False)
    assert module.norm.num_batches_tracked == 2


def test_evaluation_uses_the_statistics_of_training(wrap):
    module = Normed()
    ours = wrap(module)
    for step in range(3):
        ours(integers(7, 3, seed=step)).sum().backward()
        ours.eval()
        plain = copy.deepcopy(module)
        x = integers(8, 3, seed=7)
        assert_same(ours(x), plain(x), exact=False)
        assert_same_state(module, plain)
        assert module.norm.num_batches_tracked == step + 1
        ours.train()


def test_batch_norm_in_evaluation_is_exact(wrap):
    plain = nn.BatchNorm1d(3, eps=0).double()
    plain.running_mean.copy_(integers(3))
    plain.running_var.fill_(4)
    twin = Twin(wrap, plain.eval())
    for _ in range(2):
        twin.zero()
        x = integers(7, 3).requires_grad_()
        twin.compare(lambda model, x: model(x), x)
        twin.step(lambda model, x: loss_of(model(x)), x)
    assert twin.inner.num_batches_tracked == 0


class Counter(nn.Module):
    """Writes its buffers in three ways."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("replaced", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        self.largest.copy_(x.amax(0))
        self.replaced = torch.full((2,), float(len(x)))
        return x * self.calls


def test_buffers_of_the_first_replica_survive(wrap):
    module = Counter()
    ours = wrap(module, 3)
    for step in range(3):
        x = integers(7, 3, seed=step)
        assert torch.equal(ours(x), x * (step + 1))
        assert module.calls == step + 1
        assert torch.equal(module.largest, x[:3].amax(0))
        assert module.replaced.tolist() == [3, 3]
    module.calls.fill_(10)
    assert torch.equal(ours(x), x * 11)
    module.calls = torch.tensor(20)
    assert torch.equal(ours(x), x * 21)


# ---- random numbers -----------------------------------------------------------------


class Dropped(nn.Module):
    """Drops in two places; weights of 2 tell a kept zero from a dropped one."""

    def __init__(self, p=0.5):
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 2.0))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.drop(self.drop(x) * self.scale)


ONES = torch.ones(8, 64)


def test_dropout_is_repeatable_by_the_seed(wrap):
    ours = wrap(Dropped(), 3)

    def outputs(seed):
        torch.manual_seed(seed)
        return [ours(ONES) for _ in range(3)]

    ours(ONES)  # whatever was drawn before
    first, again, other = outputs(5), outputs(5), outputs(6)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        for rows in (slice(0, 3), slice(3, 6), slice(6, 8)):
            assert not torch.equal(a[rows], c[rows])
    for rows in (slice(0, 3), slice(3, 6), slice(6, 8)):
        assert not torch.equal(first[0][rows], first[1][rows])
        assert not torch.equal(first[1][rows], first[2][rows])


def test_replicas_draw_different_masks(wrap):
    ours = wrap(Dropped(), 4)
    for _ in range(3):
        parts = ours(ONES).split(2)
        masks = {tuple((part != 0).flatten().tolist()) for part in parts}
        assert len(masks) == 4


def test_the_first_replica_draws_from_the_users_numbers(wrap):
    twin = Twin(wrap, Dropped())
    for seed in range(3):
        torch.manual_seed(seed)
        theirs = twin.plain(ONES[:4])
        torch.manual_seed(seed)
        assert_same(twin.ours(ONES)[:4], theirs)


def test_the_users_numbers_go_on_as_after_the_first_replica(wrap):
    twin = Twin(wrap, Dropped())
    for seed in range(3):
        torch.manual_seed(seed)
        twin.plain(ONES[:4])
        theirs = torch.rand(3)
        torch.manual_seed(seed)
        twin.ours(ONES)
        assert_same(torch.rand(3), theirs)


def test_gradients_belong_to_the_masks_that_were_drawn(wrap):
    module = Dropped()
    ours = wrap(module)
    for _ in range(3):
        x = ONES.clone().requires_grad_()
        out = ours(x)
        out.sum().backward()
        assert torch.equal(x.grad, out.detach())
        assert torch.equal(module.scale.grad * 2, out.detach().sum(0))
        module.zero_grad()


def test_second_gradients_belong_to_the_same_masks(wrap):
    module = Dropped()
    ours = wrap(module)
    for _ in range(2):
        x = ONES.clone().requires_grad_()
        out = ours(x)
        torch.rand(5)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        assert torch.equal(slope, out)
        slope.sum().backward()
        assert torch.equal(module.scale.grad * 2, out.detach().sum(0))
        module.zero_grad()


class CheckpointedDropout(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.inner = Dropped()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("place", ["inside", "around"])
@pytest.mark.parametrize(
    "use_reentrant", [False, True], ids=["saved tensors", "reentrant"]
)
def test_checkpoints_draw_the_same_masks_again(wrap, place, use_reentrant):
    is_inside = place == "inside"
    ours = wrap(CheckpointedDropout(use_reentrant) if is_inside else Dropped())
    around = partial(checkpoint, ours, use_reentrant=use_reentrant)
    for _ in range(3):
        x = ONES.clone().requires_grad_()
        out = ours(x) if is_inside else around(x)
        torch.rand(5)  # the stream goes on before backward
        out.sum().backward()
        assert torch.equal(x.grad, out.detach())


def test_evaluation_draws_nothing(wrap):
    twin = Twin(wrap, Dropped())
    for model in twin.models:
        model.eval()
    before = torch.get_rng_state()
    twin.compare(lambda model, x: model(x), ONES)
    assert torch.equal(torch.get_rng_state(), before)


class Noisy(nn.Module):
    """Draws in every way that forwards do."""

    def forward(self, x):
        own = torch.Generator().manual_seed(len(x))
        fixed = torch.rand(len(x), 3, generator=own)
        noise = torch.randn_like(x) + torch.rand(len(x), 1)
        return x + noise, fixed, torch.randperm(100)[: len(x)]


def test_all_ways_to_draw_are_repeatable(wrap):
    ours = wrap(Noisy())
    x = torch.zeros(7, 3)
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append([ours(x) for _ in range(3)])
    assert_same(*outputs)
    noise, fixed, permuted = outputs[0][0]
    assert not torch.equal(noise[:3], noise[4:])
    assert torch.equal(
        fixed[4:], torch.rand(3, 3, generator=torch.Generator().manual_seed(3))
    )
    assert not torch.equal(permuted[:3], permuted[4:])


class Place(nn.Module):
    """Says in which thread it runs, and how many threads operators have there."""

    def forward(self, x):
        return threading.get_ident(), torch.get_num_threads()


def test_replicas_on_the_cpu_run_in_the_callers_thread_with_all_of_torchs(wrap):
    """On GPUs the first one does."""
    ours = wrap(Place(), 3)
    for _ in range(3):
        idents, n_threads = ours(torch.zeros(7, 3))
        assert idents[0] == threading.get_ident()
        if not wrap.is_gpu:
            assert idents == [threading.get_ident()] * 3
            assert n_threads == [torch.get_num_threads()] * 3


class DrawsByRows(nn.Module):
    """Draws numbers, and replica 0 more of them where its rows say so."""

    def forward(self, x):
        torch.rand(int(x[0, 0]))
        return torch.rand(len(x))


def test_the_numbers_of_a_replica_do_not_depend_on_those_before(wrap):
    ours, drawn = wrap(DrawsByRows()), []
    for n in (0, 5):
        x = torch.zeros(8, 3)
        x[0, 0] = n
        torch.manual_seed(3)
        drawn.append(ours(x))
    assert torch.equal(drawn[0][4:], drawn[1][4:])
    assert not torch.equal(drawn[0][:4], drawn[1][:4])


class DrawsAndFails(nn.Module):
    """Draws a number; fails where a row is 9."""

    def forward(self, x):
        drawn = torch.rand(())
        if (x == 9).any():
            raise ValueError("a row of 9")
        return x * drawn


def test_the_users_numbers_go_on_after_a_failure(wrap):
    ours, x = wrap(DrawsAndFails()), torch.ones(4, 2)
    ours(x)
    x[3] = 9
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="a row of 9"):
        ours(x)
    mine = torch.rand(())
    torch.manual_seed(3)
    torch.rand(())
    assert torch.equal(mine, torch.rand(()))
