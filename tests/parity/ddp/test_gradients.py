"""If sums are exact, gradients have torch's bits; they are equal on all ranks."""

import gc
import time

import torch
from cases import (
    Terms,
    Twin,
    as_torch,
    factors,
    grads_of,
    on_gpus_too,
    on_ranks,
)
from torch import nn

SHAPES = [(3,), (100, 50), (1,), (200, 100), (7, 5), (300, 90), (64,), (2, 3, 4, 5)]


def linear_loss(ranks, key):
    return lambda model: model(factors(ranks, model, key))


def normal(ranks, model, key):
    generator = ranks.generator(key)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


# ---- the same bits on every rank ----------------------------------------------------


@on_gpus_too(3, cap=[0.013])
@on_ranks(3, 8, cap=[1e-5, 0.013, 1000])
def test_random_gradients_have_the_same_bits_on_every_rank(ranks, cap):
    model = ranks.wrap(Terms(SHAPES), bucket_cap_mb=cap)
    naps = ranks.generator("naps")

    def nap(gradient):
        chance, length = torch.rand(2, generator=naps, device=naps.device).tolist()
        if chance < 0.3:
            time.sleep(0.004 * length)

    for p in model.parameters():
        p.register_hook(nap)
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        model(normal(ranks, model, step)).backward()
        ranks.assert_same([p.grad for p in model.parameters()], f"step {step}")


@on_ranks(3)
def test_sums_are_taken_in_rank_order(ranks):
    """Then two runs give the same bits."""
    twin = Twin(ranks, Terms(SHAPES))
    tensors = normal(ranks, twin.plain, 0)
    for _ in range(2):
        twin.zero()
        twin.step(lambda model: model(tensors))


FLOATS = ["float32", "float64", "bfloat16", "float16", "complex64", "complex128"]


# ---- types and layouts --------------------------------------------------------------


class Turned(Terms):
    """Gets gradients in the opposite memory order."""

    def forward(self, factors):
        return super().forward([f.t().contiguous().t() for f in factors])


class Sums(Terms):
    """Gets gradients that are one expanded number: their strides are zero."""

    def forward(self, factors):
        return factors[0].sum() * sum(p.sum() for p in self.parameters())


ODD = {
    "of mixed types": lambda: Terms(SHAPES * 2, [getattr(torch, f) for f in FLOATS]),
    "in other strides": lambda: Turned([(200, 100), (3, 4), (90, 100)]),
    "that are expanded": lambda: Sums([(200, 100), (3, 4)]),
    "without elements or dimensions": lambda: Terms([(), (0,), (3, 0), (5,), (0, 7)]),
}


@on_gpus_too()
@on_ranks(gradients=[*ODD], cap=[None, 0.01])
def test_odd_gradients_are_averaged(ranks, gradients, cap):
    twin = Twin(ranks, ODD[gradients](), bucket_cap_mb=cap)
    for step in range(3):
        twin.zero(set_to_none=step != 1)
        twin.step(linear_loss(ranks, step))


def strides(tensor):
    """Return the strides, except of dimensions of size 1, which do not matter."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in pairs if size != 1]


@on_gpus_too()
@as_torch()
def test_a_gradient_keeps_the_strides_that_torch_would_give_it(ranks, wrap):
    net = Terms([])
    net.convolutions = nn.ModuleList([nn.Conv2d(8, 64, 3), nn.Conv2d(3, 2, 1)])
    net = net.to(memory_format=torch.channels_last)
    net.turned = nn.Parameter(torch.zeros(200, 100).t())
    net.small = nn.Parameter(torch.zeros(3, 4).t())
    net.third = nn.Parameter(torch.zeros(4, 5, 600).permute(2, 0, 1))
    net.scalar = nn.Parameter(torch.zeros(()))
    model = wrap(net)
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        linear_loss(ranks, step)(model).backward()
        yield grads_of(model)
    for name, p in model.named_parameters():
        assert strides(p.grad) == strides(p), name


# ---- gradients set by the user, and tensors that are kept ---------------------------


@on_gpus_too()
def test_a_gradient_of_the_users_own_in_other_strides_is_added_to(ranks):
    twin = Twin(ranks, Terms([(200, 100), (3, 4)]))
    for step in range(3):
        for model in (twin.plain, twin.ours):
            for p in model.parameters():
                p.grad = torch.full(tuple(p.shape[::-1]), 2.0).t()
        twin.step(linear_loss(ranks, step))


@as_torch()
def test_a_long_training_gives_the_bits_of_torch_and_keeps_no_tensor(ranks, wrap):
    module = nn.Sequential(nn.Linear(6, 130), nn.Linear(130, 130), nn.Linear(130, 2))
    model = wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    n_tensors = []
    for step in range(30):  # longer than the trial that decides when to free copies
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=ranks.generator(step, (4, 6)))
        model(x).square().mean().backward()
        optimizer.step()
        gc.collect()
        n_tensors.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    yield [*grads_of(model), *model.parameters()]
    assert n_tensors[3:] == n_tensors[3:4] * 27
