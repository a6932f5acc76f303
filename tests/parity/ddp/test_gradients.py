"""Gradients have the bits of torch where sums are exact, and are equal over ranks."""

import copy
import gc
import os
import time

import torch
from cases import (
    Twin,
    assert_equal,
    assert_same_grads,
    bits,
    factors,
    gloo_takes_complex,
    on_ranks,
)
from paceline import _native
from torch import nn

SHAPES = [(3,), (100, 50), (1,), (200, 100), (7, 5), (300, 90), (64,), (2, 3, 4, 5)]


class Linear(nn.Module):
    """A module whose forward uses each parameter once, times a factor: its gradient."""

    def forward(self, factors, used=None):
        total = 0
        for i, (p, f) in enumerate(zip(self.parameters(), factors, strict=True)):
            if used is None or i in used:
                term = (p * f).sum()
                term = term.real + 3 * term.imag if p.is_complex() else term
                total = total + term.double()
        return total


class Wide(Linear):
    """Parameters of many sizes."""

    def __init__(self, shapes=SHAPES, dtypes=(torch.float32,)):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.zeros(shape, dtype=dtypes[i % len(dtypes)])
            for i, shape in enumerate(shapes)
        )


def linear_loss(ranks, key):
    return lambda model: model(factors(ranks, model, key))


def normal(ranks, model, key):
    generator = ranks.generator(key)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def mlp():
    return nn.Sequential(
        nn.Linear(8, 130), nn.Tanh(), nn.Linear(130, 90), nn.Tanh(), nn.Linear(90, 3)
    )


# ---- against torch ------------------------------------------------------------------


def assert_agree(ours, theirs, tolerance=None):
    for (name, mine), p in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        if tolerance is None:
            assert_equal(mine.grad, p.grad, f"the gradient of {name}")
            assert_equal(mine.data, p.data, name)
        else:
            torch.testing.assert_close(mine.grad, p.grad, **tolerance)
            torch.testing.assert_close(mine.data, p.data, **tolerance)


@on_ranks(cap=[None, 0.01])
def test_steps_of_a_deep_model_on_two_ranks_give_the_bits_of_torch(ranks, cap):
    torch.manual_seed(0)
    model = mlp()
    ours = ranks.wrap(copy.deepcopy(model), bucket_cap_mb=cap)
    theirs = ranks.wrap_by_torch(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, theirs)]
    for step in range(4):
        x = torch.randn(5, 8, generator=ranks.generator(step))
        for model, one in zip((ours, theirs), optimizers, strict=True):
            one.zero_grad()
            model(x).square().mean().backward()
            one.step()
        assert_agree(ours, theirs)


@on_ranks(3)
def test_steps_on_three_ranks_agree_with_torch_to_rounding(ranks):
    """Three roundings (two sums, a third) of 2^-24 each, in another order than Gloo's.

    What cancels is bounded by the size of the terms, about 1 here: hence atol.
    """
    torch.manual_seed(0)
    model = mlp()
    ours, theirs = ranks.wrap(copy.deepcopy(model)), ranks.wrap_by_torch(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for step in range(4):
        x = torch.randn(5, 8, generator=ranks.generator(step))
        for model, one in zip((ours, theirs), optimizers, strict=True):
            one.zero_grad()
            model(x).square().mean().backward()
            one.step()
        assert_agree(ours, theirs, {"rtol": 1e-5, "atol": 1e-6})


# ---- the same bits on every rank ----------------------------------------------------


@on_ranks(3, cap=[1e-5, 0.013, 1000])
def test_random_gradients_have_the_same_bits_on_every_rank(ranks, cap):
    model = ranks.wrap(Wide(), bucket_cap_mb=cap)
    naps = ranks.generator("naps")

    def nap(gradient):
        if torch.rand((), generator=naps) < 0.3:
            time.sleep(0.004 * torch.rand((), generator=naps).item())

    for p in model.parameters():
        p.register_hook(nap)
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        model(normal(ranks, model, step)).backward()
        ranks.assert_same([p.grad for p in model.parameters()], f"step {step}")


@on_ranks(3)
def test_sums_are_taken_in_rank_order(ranks):
    """So that two runs give the same bits."""
    twin = Twin(ranks, Wide())
    tensors = normal(ranks, twin.plain, 0)
    for _ in range(2):
        twin.zero()
        twin.step(lambda model: model(tensors))


FLOATS = ["float32", "float64", "bfloat16", "float16", "complex64", "complex128"]


def available_isas():
    words = []
    for word in ("plain", "neon", "avx2", "avx512"):
        os.environ["PACELINE_ISA"] = word
        try:
            words.append(_native.isa())
        except (ValueError, NotImplementedError):
            continue
    del os.environ["PACELINE_ISA"]
    return words


@on_ranks(3)
def test_every_instruction_set_gives_the_same_bits(ranks):
    """Of one model with every type; tests/c/test_cpu_sum.c has each by itself."""
    isas = available_isas()
    assert "plain" in isas
    kinds = [getattr(torch, word) for word in FLOATS]
    runs = {}
    for isa in isas:
        os.environ["PACELINE_ISA"] = isa
        model = ranks.wrap(Wide(SHAPES * 3, kinds), bucket_cap_mb=0.05)
        for step in range(2):
            model.zero_grad()
            drawn = zip(normal(ranks, model, step), model.parameters(), strict=True)
            model([f.to(p.dtype) for f, p in drawn]).backward()
        runs[isa] = [bits(p.grad) for p in model.parameters()]
        ranks.assert_same([p.grad for p in model.parameters()], isa)
    assert all(run == runs["plain"] for run in runs.values()), list(runs)


# ---- types and layouts --------------------------------------------------------------


@on_ranks(dtype=FLOATS)
def test_every_type_is_averaged_exactly_and_as_torch_averages_it(ranks, dtype):
    kind = getattr(torch, dtype)
    twin = Twin(ranks, Wide(dtypes=[kind]), bucket_cap_mb=0.1)
    theirs = None
    if not kind.is_complex or gloo_takes_complex():
        theirs = ranks.wrap_by_torch(Wide(dtypes=[kind]))
    for step in range(3):
        twin.zero(set_to_none=step != 1)
        twin.step(linear_loss(ranks, step))
        if theirs is not None:
            theirs.zero_grad()
            linear_loss(ranks, step)(theirs).backward()
            assert_same_grads(twin.ours, theirs, dtype)


@on_ranks(cap=[None, 0.01])
def test_types_may_be_mixed_in_one_model(ranks, cap):
    kinds = [getattr(torch, word) for word in FLOATS]
    twin = Twin(ranks, Wide(SHAPES * 2, kinds), bucket_cap_mb=cap)
    for step in range(3):
        twin.zero()
        twin.step(linear_loss(ranks, step))


def strides(tensor):
    """Return the strides that matter: of one element there is nowhere to go."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size != 1]


def test_a_gradient_keeps_the_strides_that_torch_would_give_it(ranks):
    def make():
        net = Linear()
        net.convolutions = nn.ModuleList([nn.Conv2d(8, 64, 3), nn.Conv2d(3, 2, 1)])
        net = net.to(memory_format=torch.channels_last)
        net.turned = nn.Parameter(torch.zeros(200, 100).t())
        net.small = nn.Parameter(torch.zeros(3, 4).t())
        net.third = nn.Parameter(torch.zeros(4, 5, 600).permute(2, 0, 1))
        net.scalar = nn.Parameter(torch.zeros(()))
        return net

    twin, theirs = Twin(ranks, make()), ranks.wrap_by_torch(make())
    for step in range(3):
        twin.zero(set_to_none=step != 1)
        theirs.zero_grad(set_to_none=step != 1)
        twin.step(linear_loss(ranks, step))
        linear_loss(ranks, step)(theirs).backward()
    for (name, mine), p in zip(
        twin.ours.named_parameters(), theirs.parameters(), strict=True
    ):
        assert_equal(mine.grad, p.grad, name)
        assert strides(mine.grad) == strides(p.grad) == strides(mine), name


def test_a_gradient_that_arrives_in_other_strides_is_averaged(ranks):
    def loss(model):
        turned = [ranks.integers(*p.shape[::-1]).t() for p in model.parameters()]
        return model(turned)

    twin = Twin(ranks, Wide([(200, 100), (3, 4), (90, 100)]))
    for step in range(3):
        twin.zero(set_to_none=step != 1)
        twin.step(loss)


def test_an_expanded_gradient_is_averaged(ranks):
    """The gradient of a sum is one number, expanded: strides of zero."""

    class Sums(Wide):
        def forward(self):
            return sum(p.sum() for p in self.parameters())

    twin = Twin(ranks, Sums([(200, 100), (3, 4)]))
    for step in range(3):
        twin.zero(set_to_none=step != 1)
        twin.step(lambda model: model() * (ranks.rank + 1))


def test_parameters_without_elements_and_without_dimensions_are_averaged(ranks):
    twin = Twin(ranks, Wide([(), (0,), (3, 0), (5,), (0, 7)]))
    for step in range(2):
        twin.zero()
        twin.step(linear_loss(ranks, step))


def test_infinite_and_missing_numbers_reach_every_rank(ranks):
    model = ranks.wrap(Wide([(4,), (100, 100)]))
    odd = torch.tensor([float("inf"), float("nan"), -float("inf"), 1.0])
    plain = torch.ones(4)
    small = odd if ranks.rank == 0 else plain
    large = small.repeat(2500).reshape(100, 100)
    model([small, large]).backward()
    for p in model.parameters():
        row = p.grad.flatten()[:4]
        assert row[0] == float("inf")
        assert row[1].isnan()
        assert row[2] == -float("inf")
        assert row[3] == 1


# ---- whether gradients are kept as tensors ------------------------------------------


def test_backwards_add_up_as_with_torch(ranks):
    ours, theirs = ranks.wrap(Wide()), ranks.wrap_by_torch(Wide())
    for step in range(4):
        for model in (ours, theirs):
            model(factors(ranks, model, step)).backward()
        assert_agree(ours, theirs)


@on_ranks(strides=["its own", "others"])
def test_a_gradient_of_the_users_own_is_added_to(ranks, strides):
    twin = Twin(ranks, Wide([(200, 100), (3, 4)]))
    for step in range(3):
        for model in (twin.plain, twin.ours):
            for p in model.parameters():
                p.grad = torch.full_like(p, 2.0)
                if strides == "others":
                    p.grad = torch.full(tuple(p.shape[::-1]), 2.0).t()
        twin.step(linear_loss(ranks, step))


def test_a_long_training_gives_the_bits_of_torch_and_keeps_no_tensor(ranks):
    module = nn.Sequential(nn.Linear(6, 130), nn.Linear(130, 130), nn.Linear(130, 2))
    models = [ranks.wrap(copy.deepcopy(module)), ranks.wrap_by_torch(module)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    n_tensors = []
    for step in range(30):  # longer than the trial of when to free what was copied
        x = torch.randn(4, 6, generator=ranks.generator(step, (4, 6)))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert_same_grads(*models, step)
        gc.collect()
        n_tensors.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert n_tensors[3:] == n_tensors[3:4] * 27
