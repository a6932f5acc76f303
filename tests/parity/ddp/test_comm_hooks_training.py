"""Communication hooks in all kinds of models, options and loops, as in torch.

torch's own tests in ../upstream cover accumulation and uneven inputs with a hook.
"""

import warnings

import torch
from cases import (
    Twin,
    as_torch,
    assert_equal,
    integer_weights,
    net,
    skip_without_complex,
    train,
)
from hook_cases import OWN, by_hand, hooked, mlp, reduced, trained
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

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

    def hook(state, bucket):
        for gradient, parameter in zip(
            bucket.gradients(), bucket.parameters(), strict=True
        ):
            assert gradient.shape == parameter.shape
            assert gradient.stride() == parameter.stride()
            assert gradient.dtype == parameter.dtype
            gradient.mul_(2)
        return reduced(state, bucket)

    plain = Odd()
    ours = ranks.wrap(Odd())
    ours.register_comm_hook(ranks.group, hook)
    x = torch.randn(2, 3, 8, 8, generator=ranks.generator("images"))
    for model in (plain, ours):
        model(x).square().sum().backward()
    for (name, p), mine in zip(
        plain.named_parameters(), ours.parameters(), strict=True
    ):
        if p.requires_grad:
            # Multiply by a half: old torch versions divide complex numbers inexactly.
            mean = sum(row * 0.5 for row in ranks.all(p.grad * 2))
            assert_equal(mine.grad, mean, f"the gradient of {name}")


class Branches(nn.Module):
    """Has two branches; a rank uses one of them, or none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(6, 100)
        self.left, self.right = nn.Linear(100, 100), nn.Linear(100, 2)
        self.never = nn.Linear(2, 2)
        self.choice = 0

    def forward(self, x):
        x = self.trunk(x).tanh()
        if self.choice == 0:
            return self.left(x)
        return self.right(x) if self.choice == 1 else x


@as_torch()
def test_parameters_that_a_rank_leaves_out_give_the_bits_of_torch(ranks, wrap):
    def loss(model, x):
        model.module.choice = int(x[0, 0].item()) % 3
        return model(x).square().sum()

    def data(step):
        x = torch.randn(3, 6, generator=ranks.generator("data", step))
        x[0, 0] = abs(step + ranks.rank)
        return x

    hook = default_hooks.allreduce_hook
    model = hooked(ranks, wrap, Branches(), hook, find_unused_parameters=True)
    yield from trained(ranks, model, steps=7, loss=loss, data=data)
    assert model.module.never.weight.grad is None


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.EmbeddingBag(50, 8, sparse=True, mode="sum")
        self.more = nn.Embedding(20, 8, sparse=True)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        # A plain sum would give both tables gradients in one memory, divided twice.
        return self.out(self.table(x).tanh() + self.more(x[:, 0] % 20) * 2)


def sparse_alone(state, bucket):
    future = state.allreduce([bucket.buffer()]).get_future()
    return future.then(lambda fut: fut.value()[0] / state.size())


@as_torch(hook=[default_hooks.allreduce_hook, sparse_alone])
def test_sparse_gradients_give_the_values_of_torch_with_a_hook(ranks, wrap, hook):
    def data(step):
        return torch.randint(50, (4, 3), generator=ranks.generator("words", step))

    model = hooked(ranks, wrap, Words(), hook)
    yield from trained(ranks, model, data=data)
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

    table = nn.Embedding(10, 2, sparse=True)
    module = integer_weights(nn.ModuleDict({"table": table, "out": nn.Linear(2, 1)}))
    model = ranks.wrap(Halves(module))
    model.register_comm_hook(ranks.group, hook)
    for step in range(3):
        model.zero_grad()
        kinds.clear()
        model(torch.tensor([step, 5]), ranks.rank == 0).backward()
        assert kinds == [(False, False), (True, True)]
        row = table.weight.grad.to_dense()[5]
        expected = module["out"].weight[0] / 2
        assert torch.equal(row, expected)


class Halves(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, uses_table):
        rows = self.parts["table"](x) if uses_table else torch.ones(2, 2)
        return self.parts["out"](rows).sum()


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


class Saved(nn.Module):
    """A module with each part checkpointed."""

    def __init__(self, reentrant):
        super().__init__()
        self.body, self.reentrant = mlp(), reentrant

    def forward(self, x):
        for part in self.body:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@as_torch(reentrant=[False, True])
def test_checkpoints_work_with_a_hook(ranks, wrap, reentrant):
    def data(step):
        x = torch.randn(3, 6, generator=ranks.generator("data", step))
        return x.requires_grad_()

    model = hooked(ranks, wrap, Saved(reentrant), default_hooks.allreduce_hook)
    yield from trained(ranks, model, data=data)


def test_a_recorded_backward_works_with_a_hook(ranks):
    """It fails with torch's class."""
    twin = Twin(ranks, net())
    twin.ours.register_comm_hook(ranks.group, default_hooks.allreduce_hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(twin, ranks, create_graph=True)
    twin.zero()


@as_torch()
def test_a_compiled_model_works_with_a_hook(ranks, wrap):
    model = hooked(ranks, wrap, mlp(), default_hooks.fp16_compress_hook)
    compiled = torch.compile(model, backend="aot_eager")
    yield from trained(ranks, model, 3, lambda _, x: compiled(x).sum())
