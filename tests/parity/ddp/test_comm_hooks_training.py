"""Communication hooks in models, options and loops of all kinds, as in torch."""

import contextlib
import copy
import warnings

import torch
from cases import (
    assert_equal,
    integer_weights,
    mean_over,
    net,
    on_ranks,
    skip_without_complex,
)
from hook_cases import OWN, both, by_hand, chain, check, mlp, reduced, train_both
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
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


@on_ranks(options=[*OPTIONS])
def test_an_option_gives_the_bits_of_torch_with_a_hook(ranks, options):
    given = OPTIONS[options]
    theirs = {} if "bucket_cap_mb_list" in given else given  # not every torch has it
    models = [ranks.wrap(mlp(), **given), ranks.wrap_by_torch(mlp(), **theirs)]
    for model in models:
        model.register_comm_hook(ranks.group, default_hooks.fp16_compress_hook)
    train_both(ranks, models)


class Odd(nn.Module):
    """Parameters of many kinds."""

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


@on_ranks(hook=["allreduce", "fp16", "set_buffer", "chain", "float64"])
def test_odd_parameters_give_the_bits_of_torch_with_a_hook(ranks, hook):
    skip_without_complex()
    hooks = {
        **OWN,
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
    }
    models = both(ranks, Odd(), hooks[hook])
    train_both(
        ranks,
        models,
        data=lambda step: torch.randn(
            2, 3, 8, 8, generator=ranks.generator("images", step)
        ).contiguous(memory_format=torch.channels_last),
    )
    buffers = zip(models[0].buffers(), models[1].buffers(), strict=True)
    if ranks.rank == 0:
        assert all(torch.equal(mine, theirs) for mine, theirs in buffers)


def test_views_of_odd_gradients_have_the_shapes_and_strides_of_parameters(ranks):
    """torch's views of complex gradients show half of them."""

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
            # Times a half: an early torch divides complex numbers inexactly.
            mean = sum(row * 0.5 for row in ranks.all(p.grad * 2))
            assert_equal(mine.grad, mean, f"the gradient of {name}")


class Branches(nn.Module):
    """Of two branches a rank takes one, or none."""

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


def test_parameters_that_a_rank_leaves_out_give_the_bits_of_torch(ranks):
    hook = default_hooks.allreduce_hook
    models = both(ranks, Branches(), hook, find_unused_parameters=True)

    def loss(model, x):
        model.module.choice = int(x[0, 0].item()) % 3
        return model(x).square().sum()

    def data(step):
        x = torch.randn(3, 6, generator=ranks.generator("data", step))
        x[0, 0] = abs(step + ranks.rank)
        return x

    train_both(ranks, models, steps=7, loss=loss, data=data)
    assert models[0].module.never.weight.grad is None


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.EmbeddingBag(50, 8, sparse=True, mode="sum")
        self.more = nn.Embedding(20, 8, sparse=True)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        # torch's hooks change the gradients of two tables that are added twice over.
        return self.out(self.table(x).tanh() + self.more(x[:, 0] % 20) * 2)


@on_ranks(hook=["allreduce", "sparse alone"])
def test_sparse_gradients_give_the_values_of_torch_with_a_hook(ranks, hook):
    def own(state, bucket):
        future = state.allreduce([bucket.buffer()]).get_future()
        return future.then(lambda fut: fut.value()[0] / state.size())

    hooks = {"allreduce": default_hooks.allreduce_hook, "sparse alone": own}
    models = both(ranks, Words(), hooks[hook])
    train_both(
        ranks,
        models,
        data=lambda step: torch.randint(
            50, (4, 3), generator=ranks.generator("words", step)
        ),
    )
    assert models[0].module.table.weight.grad.is_sparse


def test_sparse_gradients_of_the_same_memory_are_averaged_once_each(ranks):
    """With torch a hook that divides in place divides both of them twice."""

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
    """Torch has no gradient to give its hook there, and fails."""
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


@on_ranks(zero=["none", "zeros", "not"])
def test_accumulation_gives_the_bits_of_torch_with_a_hook(ranks, zero):
    models = both(ranks, mlp(), default_hooks.fp16_compress_hook)
    for step in range(3):
        for model in models:
            if zero != "not":
                model.zero_grad(set_to_none=zero == "none")
            for micro in range(3):
                x = torch.randn(3, 6, generator=ranks.generator(step, micro))
                quiet = model.no_sync() if micro < 2 else contextlib.nullcontext()
                with quiet:
                    model(x).square().sum().backward()
        check(*models, f"step {step}")


def test_two_models_with_hooks_of_their_own_train_together(ranks):
    first = both(ranks, mlp(), default_hooks.fp16_compress_hook)
    second = both(ranks, nn.Linear(2, 3), chain)
    for step in range(3):
        x = torch.randn(3, 6, generator=ranks.generator(step))
        for one, two in zip(first, second, strict=True):
            one.zero_grad()
            two.zero_grad()
            two(one(x)).square().sum().backward()
        check(*first, f"first, step {step}")
        check(*second, f"second, step {step}")


def test_a_hook_may_come_after_some_steps(ranks):
    """The order in which gradients come is known by then."""
    models = [ranks.wrap(mlp()), ranks.wrap_by_torch(mlp())]
    train_both(ranks, models, steps=3)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.index())
        return reduced(state, bucket)

    models[0].register_comm_hook(ranks.group, hook)
    train_both(ranks, models, steps=3)
    assert len(seen) >= 3


@on_ranks(context=["join()", "Join([])"], initial=[True, False])
def test_uneven_inputs_give_the_bits_of_torch_with_a_hook(ranks, context, initial):
    models = both(ranks, mlp(), default_hooks.allreduce_hook)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        joined = (
            model.join(divide_by_initial_world_size=initial)
            if context == "join()"
            else Join([model], divide_by_initial_world_size=initial)
        )
        with joined:
            for step in range(2 + 2 * ranks.rank):
                optimizer.zero_grad()
                x = torch.randn(3, 6, generator=ranks.generator(step))
                model(x).square().sum().backward()
                optimizer.step()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    for mine, theirs in pairs:
        assert_equal(mine, theirs, "a parameter after the join")


@on_ranks(reentrant=[False, True])
def test_checkpoints_work_with_a_hook(ranks, reentrant):
    class Saved(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            for part in self.body:
                x = checkpoint(part, x, use_reentrant=reentrant)
            return x

    models = both(ranks, Saved(), default_hooks.allreduce_hook)
    train_both(
        ranks,
        models,
        data=lambda step: torch.randn(
            3, 6, generator=ranks.generator("data", step)
        ).requires_grad_(),
    )


def test_a_recorded_backward_works_with_a_hook(ranks):
    models = [ranks.wrap(net()), copy.deepcopy(net())]
    models[0].register_comm_hook(ranks.group, default_hooks.allreduce_hook)
    for step in range(3):
        for model in models:
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(ranks.integers(3, 6, key=step)).sum().backward(create_graph=True)
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        for mine, p in pairs:
            assert_equal(mine.grad, mean_over(ranks.all(p.grad.detach())), "a gradient")
    for model in models:
        model.zero_grad(set_to_none=True)


def test_a_compiled_model_works_with_a_hook(ranks):
    models = both(ranks, mlp(), default_hooks.fp16_compress_hook)
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    train_both(
        ranks, models, steps=3, loss=lambda m, x: compiled[m is models[1]](x).sum()
    )
