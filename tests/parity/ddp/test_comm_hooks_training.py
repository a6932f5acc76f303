"""Communication hooks in all kinds of models, options and loops, as in torch.

torch's own tests in ../upstream cover accumulation and uneven inputs with a hook.
"""

import torch
from cases import (
    Branches,
    as_torch,
    assert_equal,
    integer_weights,
    skip_without_complex,
)
from hook_cases import OWN, by_hand, hooked, mlp, reduced, trained
from sparse_cases import ByHand, Optional, Words, words_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

# ---- models and options -------------------------------------------------------------


OPTIONS = {
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "no buffers": {"broadcast_buffers": False},
    "small buckets": {"bucket_cap_mb": 0.01},
    "a list of sizes": {"bucket_cap_mb_list": [0.001, 0.01]},
}


@as_torch(options=[*OPTIONS])
def test_an_option_gives_the_bits_of_torch_with_a_hook(ranks, wrap, options):
    given = OPTIONS[options]
    if "bucket_cap_mb_list" in given and wrap == ranks.wrap_by_torch:
        given = {}  # not every torch has this option
    hook = default_hooks.fp16_compress_hook
    yield from trained(ranks, hooked(ranks, wrap, mlp(), hook, **given))


class Odd(nn.Module):
    """Has parameters of many kinds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(3, 40, 3).to(memory_format=torch.channels_last)
        self.turn = nn.Parameter(torch.randn(5, 40, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.randn(0, 4))
        self.wide = nn.Linear(5, 3).double()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm2d(40)

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3)) + self.nothing.sum()
        x = (x.to(torch.complex64) @ self.turn.t()).abs()
        return self.frozen(self.wide(x.double()).float()) * self.scalar


@as_torch(hook=["allreduce", "fp16", "set_buffer", "chain", "float64"])
def test_odd_parameters_give_the_bits_of_torch_with_a_hook(ranks, wrap, hook):
    skip_without_complex()
    hooks = {
        **OWN,
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
    }

    def data(step):
        x = torch.randn(2, 3, 8, 8, generator=ranks.generator("images", step))
        return x.contiguous(memory_format=torch.channels_last)

    model = hooked(ranks, wrap, Odd(), hooks[hook])
    yield from trained(ranks, model, data=data)
    if ranks.rank == 0:
        yield [*model.buffers()]


def test_views_of_odd_gradients_have_the_shapes_and_strides_of_parameters(ranks):
    """torch's views of complex gradients have only half of their elements."""
    seen = []

    def hook(state, bucket):
        for gradient, parameter in zip(
            bucket.gradients(), bucket.parameters(), strict=True
        ):
            assert gradient.shape == parameter.shape
            assert gradient.stride() == parameter.stride()
            assert gradient.dtype == parameter.dtype
            gradient.fill_(3)
            seen.append(parameter)
        return by_hand(state, bucket)

    model = hooked(ranks, ranks.wrap, Odd(), hook)
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert {*seen} == {p for p in model.parameters() if p.requires_grad}
    for p in seen:
        assert_equal(p.grad, torch.full_like(p, 3), "what the hook has written")


@as_torch()
def test_parameters_that_a_rank_leaves_out_give_the_bits_of_torch(ranks, wrap):
    """The second layer is used by both ranks, by either of them, or by none."""

    def loss(model, step):
        x = ranks.integers(3, 2, key=step)
        return model(x, both=not step >> ranks.rank & 1).square().sum()

    hook = default_hooks.allreduce_hook
    model = hooked(ranks, wrap, Branches(), hook, find_unused_parameters=True)
    yield from trained(ranks, model, steps=7, loss=loss, data=lambda step: step)


def sparse_alone(state, bucket):
    future = state.allreduce([bucket.buffer()]).get_future()
    return future.then(lambda fut: fut.value()[0] / state.size())


@as_torch(hook=[default_hooks.allreduce_hook, sparse_alone])
def test_sparse_gradients_give_the_values_of_torch_with_a_hook(ranks, wrap, hook):
    model = hooked(ranks, wrap, Words(), hook)
    yield from trained(ranks, model, data=lambda step: words_of(ranks, key=step))
    assert model.module.table.weight.grad.is_sparse


def test_sparse_gradients_of_the_same_memory_are_averaged_once_each(ranks):
    """In torch, a hook that divides in place divides both of them twice."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Embedding(4, 2, sparse=True)
            self.two = nn.Embedding(4, 2, sparse=True)

        def forward(self, x):
            return self.one(x) + self.two(x)

    model = ranks.wrap(integer_weights(Sum()))
    model.register_comm_hook(ranks.group, default_hooks.allreduce_hook)
    (model(torch.tensor([ranks.rank, 3])) * 4).sum().backward()
    for table in (model.module.one, model.module.two):
        rows = table.weight.grad.to_dense()[:, 0]
        assert rows.tolist() == [2.0, 2.0, 0.0, 4.0]


def test_a_sparse_parameter_left_out_by_a_rank_counts_as_zeros(ranks):
    """torch fails: it has no gradient for its hook."""
    kinds = []

    def hook(state, bucket):
        kinds.append((bucket.buffer().is_sparse, bucket.is_last()))
        return by_hand(state, bucket)

    both = ByHand(ranks, Optional())
    both.ours.register_comm_hook(ranks.group, hook)
    for step in range(3):
        both.zero()
        kinds.clear()
        both.step(words_of(ranks, n=12 * (ranks.rank == 0), key=step))
        assert kinds == [(False, False), (True, True)]


# ---- loops --------------------------------------------------------------------------


@as_torch()
def test_a_hook_may_come_after_some_steps(ranks, wrap):
    """By then the order in which gradients arrive is known."""
    model = wrap(mlp())
    yield from trained(ranks, model, steps=3)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.index())
        return reduced(state, bucket)

    if wrap == ranks.wrap:
        model.register_comm_hook(ranks.group, hook)
    yield from trained(ranks, model, steps=3)
    assert len(seen) >= 3 or wrap != ranks.wrap
