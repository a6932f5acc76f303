"""Communication hooks, against torch's own class with the same hook.

Two ranks: a sum of two is rounded once, in whichever order, so that even real data give
the same bits.  What a hook does wrong is test_comm_hook_failures.py's.
"""

import contextlib
import copy
import gc
import pickle
import warnings
import weakref

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import (
    assert_equal,
    integer_weights,
    mean_over,
    net,
    on_ranks,
    skip_without_complex,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

MIB = 1 << 20


def both(ranks, module, hook, state=lambda ranks: ranks.group, **options):
    """Return our wrapper and torch's of equal models, each with the hook."""
    models = []
    for wrap in (ranks.wrap, ranks.wrap_by_torch):
        model = wrap(copy.deepcopy(module), **options)
        model.register_comm_hook(state(ranks), hook)
        models.append(model)
    return models


def check(ours, theirs, what):
    pairs = zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True)
    for (name, mine), p in pairs:
        grads = [
            t.grad.to_dense() if t.grad is not None and t.grad.is_sparse else t.grad
            for t in (mine, p)
        ]
        assert_equal(*grads, f"{what}: the gradient of {name}")
        assert_equal(mine, p, f"{what}: {name}")


def train_both(ranks, models, steps=4, loss=None, data=None):
    """Take the steps of both, and check each; every step moves the parameters."""
    loss = loss or (lambda model, x: model(x).square().sum())
    data = data or (
        lambda step: torch.randn(3, 6, generator=ranks.generator("data", step))
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    for step in range(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss(model, data(step)).backward()
            optimizer.step()
        check(*models, f"step {step}")


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 150), nn.Tanh(), nn.Linear(150, 70), nn.Tanh(), nn.Linear(70, 2)
    )


# ---- torch's own hooks --------------------------------------------------------------


def power_sgd(ranks):
    return powerSGD_hook.PowerSGDState(
        ranks.group, matrix_approximation_rank=2, start_powerSGD_iter=2
    )


def local_sgd(ranks):
    return post_localSGD_hook.PostLocalSGDState(
        ranks.group,
        subgroup=None,
        start_localSGD_iter=2,
        post_local_gradient_allreduce=False,
    )


def group(ranks):
    return ranks.group


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, group),
    "fp16": (default_hooks.fp16_compress_hook, group),
    "fp16 wrapper": (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        group,
    ),
    "noop": (debugging_hooks.noop_hook, group),
    "PowerSGD": (powerSGD_hook.powerSGD_hook, power_sgd),
    "fp16 wrapper of PowerSGD": (
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        power_sgd,
    ),
    "post_localSGD": (post_localSGD_hook.post_localSGD_hook, local_sgd),
}


@on_ranks(1, 2, name=[*HOOKS])
def test_a_hook_of_torch_gives_its_bits(ranks, name):
    hook, state = HOOKS[name]
    train_both(ranks, both(ranks, mlp(), hook, state), steps=6)


def bf16_by_hand(ranks, gradient):
    """What bf16_compress_hook does: both rank's, divided, rounded, summed."""
    rows = [(row.to(torch.bfloat16) / ranks.n) for row in ranks.all(gradient)]
    return (rows[0] + rows[1]).to(gradient.dtype)


@on_ranks(2, kind=["plain", "wrapper"])
def test_bf16_compression_works_on_the_cpu_too(ranks, kind):
    """Torch refuses it there."""
    hook = default_hooks.bf16_compress_hook
    if kind == "wrapper":
        hook = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    module = mlp()
    plain = copy.deepcopy(module)
    ours = ranks.wrap(module)
    ours.register_comm_hook(ranks.group, hook)
    for step in range(3):
        x = torch.randn(3, 6, generator=ranks.generator("data", step))
        for model in (plain, ours):
            model.zero_grad()
            model(x).square().sum().backward()
        for p, mine in zip(plain.parameters(), module.parameters(), strict=True):
            assert_equal(mine.grad, bf16_by_hand(ranks, p.grad), f"step {step}")


NOT_ON_THE_CPU = {
    "quantization per tensor": (quantization_hooks.quantization_pertensor_hook, group),
    "quantization per channel": (
        quantization_hooks.quantization_perchannel_hook,
        group,
    ),
    "batched PowerSGD": (powerSGD_hook.batched_powerSGD_hook, power_sgd),
}


@on_ranks(2, name=[*NOT_ON_THE_CPU])
def test_what_fails_in_a_hook_of_torch_fails_here_too(ranks, name):
    """Some need CUDA, some have mistakes of their own; all that counts is the same."""
    hook, state = NOT_ON_THE_CPU[name]
    outcomes = []
    for wrap in (ranks.wrap, ranks.wrap_by_torch):
        model = wrap(net())
        model.register_comm_hook(state(ranks), hook)
        try:
            for step in range(4):
                model(ranks.integers(3, 6, key=step)).sum().backward()
            outcomes.append([p.grad.tolist() for p in model.parameters()])
        except Exception as error:
            outcomes.append((type(error), str(error).splitlines()[:1]))
        finally:
            dist.barrier(ranks.group)
    if outcomes[0][0] is not paceline.PeerError:  # the other rank was the first to fail
        assert outcomes[0] == outcomes[1]


@on_ranks(1, 2, kind=["ALLREDUCE", "FP16_COMPRESS"])
def test_a_builtin_hook_gives_the_bits_of_torch(ranks, kind):
    models = [ranks.wrap(mlp()), ranks.wrap_by_torch(mlp())]
    for model in models:
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    train_both(ranks, models)


# ---- hooks of a user's own ----------------------------------------------------------


def reduced(state, bucket, then=None):
    tensor = bucket.buffer().div_(state.size())
    future = state.allreduce([tensor]).get_future()
    return future.then(then or (lambda fut: fut.value()[0]))


def chain(state, bucket):
    twice = reduced(state, bucket).then(lambda fut: fut.value() * 2)
    return twice.then(lambda fut: fut.value() + 1)


def chain_with_a_second_collective(state, bucket):
    def again(future):
        largest = future.value()[0].abs().max().reshape(1)
        state.allreduce([largest]).wait()
        return future.value()[0] + largest

    return reduced(state, bucket, again)


def by_hand(state, bucket):
    """Finish at once, without a future of a collective's."""
    state.allreduce([bucket.buffer()]).wait()
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / state.size())
    return future


def exchanged(state, bucket):
    bucket.set_buffer(bucket.buffer() * 3)
    return reduced(state, bucket)


def by_parameter(state, bucket):
    """Scale each gradient in place, through its own view."""
    pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
    for gradient, parameter in pairs:
        assert gradient.shape == parameter.shape
        gradient.mul_(1.5 + parameter.dim())
    return reduced(state, bucket)


def as_doubles(state, bucket):
    """Come back with another dtype: it is converted."""
    bucket.set_buffer(bucket.buffer().double())
    return reduced(state, bucket)


class Countdown:
    """A callable object; it makes of gradients what depends on the bucket's number."""

    def __init__(self):
        self.__name__ = self.__qualname__ = "countdown"  # torch asks for them

    def __call__(self, state, bucket):
        bucket.buffer().mul_(2.0 + bucket.index() + 10 * bucket.is_last())
        return reduced(state, bucket)


OWN = {
    "chain": chain,
    "chain with a second collective": chain_with_a_second_collective,
    "by hand": by_hand,
    "set_buffer": exchanged,
    "gradients() and parameters()": by_parameter,
    "float64": as_doubles,
    "object": Countdown(),
}


@on_ranks(2, name=[*OWN])
def test_a_hook_of_ones_own_gives_the_bits_of_torch(ranks, name):
    train_both(ranks, both(ranks, mlp(), OWN[name]))


@on_ranks(2)
def test_a_bucket_is_one_of_torch_and_says_what_it_holds(ranks):
    seen = []

    def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert isinstance(bucket, dist.GradBucket)
        assert bucket.buffer().dim() == 1
        total = sum(p.numel() for p in bucket.parameters())
        assert bucket.buffer().numel() == total
        pointers = [g.data_ptr() for g in bucket.gradients()]
        assert pointers[0] == bucket.buffer().data_ptr()
        assert len(pointers) == len(bucket.parameters())
        seen.append((bucket.index(), bucket.is_last(), bucket.parameters()))
        return reduced(state, bucket)

    module = net(6, 150, 70, 2)
    model = ranks.wrap(module, bucket_cap_mb=0.001)
    model.register_comm_hook(ranks.group, hook)
    for step in range(3):
        seen.clear()
        model(ranks.integers(2, 6, key=step)).sum().backward()
        assert [index for index, _, _ in seen] == [*range(len(seen))]
        assert len(seen) > 2
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        all_of_them = [id(p) for _, _, some in seen for p in some]
        assert sorted(all_of_them) == sorted(id(p) for p in module.parameters())
        assert all(id(p) in {*map(id, module.parameters())} for p in seen[0][2])


@on_ranks(2, options=["bucket_cap_mb", "bucket_cap_mb_list", "neither"])
def test_buckets_are_as_large_as_was_asked_for(ranks, options):
    module = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(10)])
    quarter = 256 * 256 * 4 / MIB
    given = {
        "bucket_cap_mb": {"bucket_cap_mb": 2 * quarter},
        "bucket_cap_mb_list": {"bucket_cap_mb_list": [quarter, 3 * quarter]},
        "neither": {},
    }[options]
    sizes = []

    def hook(state, bucket):
        sizes.append(len(bucket.parameters()))
        return reduced(state, bucket)

    model = ranks.wrap(integer_weights(module, 0, 1), **given)
    model.register_comm_hook(ranks.group, hook)
    for step in range(3):
        sizes.clear()
        model(ranks.integers(2, 256, key=step)).sum().backward()
        expected = {
            "bucket_cap_mb": [2] * 5,
            "bucket_cap_mb_list": [1, 3, 3, 3],
            "neither": [6, 4],  # the last has a mebibyte
        }
        assert sizes == expected[options]


@on_ranks(2, wrapped=["default_hooks", "own"])
def test_annotations_of_torch_are_accepted_as_objects_and_as_words(ranks, wrapped):
    def words(state, bucket: "dist.GradBucket") -> "torch.futures.Future[torch.Tensor]":
        return reduced(state, bucket)

    hook = words if wrapped == "own" else default_hooks.allreduce_hook
    model = ranks.wrap(net())
    model.register_comm_hook(ranks.group, hook)
    model(ranks.integers(3, 6)).sum().backward()
    ranks.assert_same([p.grad for p in model.parameters()], "gradients")


@on_ranks(2)
def test_what_a_hook_keeps_of_earlier_steps_stays_as_it_was(ranks):
    kept = []

    def hook(state, bucket):
        kept.append((bucket, bucket.buffer(), bucket.buffer().clone()))
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    model = ranks.wrap(net())
    model.register_comm_hook(None, hook)
    for step in range(4):
        model.zero_grad()
        model(ranks.integers(2, 6, key=step)).sum().backward()
    assert len(kept) >= 4
    for bucket, buffer, copied in kept:
        assert bucket.buffer() is buffer
        assert torch.equal(buffer, copied)


# ---- models and options -------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "no buffers": {"broadcast_buffers": False},
    "small buckets": {"bucket_cap_mb": 0.01},
}


@on_ranks(2, options=[*OPTIONS])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_an_option_gives_the_bits_of_torch_with_a_hook(ranks, options):
    hook = default_hooks.fp16_compress_hook
    train_both(ranks, both(ranks, mlp(), hook, **OPTIONS[options]))


@on_ranks(2)
def test_a_list_of_bucket_sizes_gives_the_bits_of_torch_with_a_hook(ranks):
    hook = default_hooks.fp16_compress_hook
    theirs = ranks.wrap_by_torch(mlp())
    theirs.register_comm_hook(ranks.group, hook)
    ours = ranks.wrap(mlp(), bucket_cap_mb_list=[0.001, 0.01])
    ours.register_comm_hook(ranks.group, hook)
    train_both(ranks, [ours, theirs])


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


@on_ranks(2, hook=["allreduce", "fp16", "set_buffer", "chain", "float64"])
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


@on_ranks(2)
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


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
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


@on_ranks(2, hook=["allreduce", "sparse alone"])
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


@on_ranks(2)
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


@on_ranks(2)
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


@on_ranks(2, zero=["none", "zeros"])
def test_accumulation_gives_the_bits_of_torch_with_a_hook(ranks, zero):
    models = both(ranks, mlp(), default_hooks.fp16_compress_hook)
    for step in range(3):
        for model in models:
            model.zero_grad(set_to_none=zero == "none")
            for micro in range(3):
                x = torch.randn(3, 6, generator=ranks.generator(step, micro))
                quiet = model.no_sync() if micro < 2 else contextlib.nullcontext()
                with quiet:
                    model(x).square().sum().backward()
        check(*models, f"step {step}")


@on_ranks(2)
def test_gradients_accumulate_over_synchronised_backwards_as_in_torch(ranks):
    models = both(ranks, mlp(), default_hooks.allreduce_hook)
    for step in range(3):
        for model in models:
            x = torch.randn(3, 6, generator=ranks.generator(step))
            model(x).square().sum().backward()
        check(*models, f"step {step}")


@on_ranks(2)
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


@on_ranks(2)
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


@on_ranks(2, context=["join()", "Join([])"], initial=[True, False])
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


@on_ranks(2, reentrant=[False, True])
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


@on_ranks(2)
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


@on_ranks(2)
def test_a_compiled_model_works_with_a_hook(ranks):
    models = both(ranks, mlp(), default_hooks.fp16_compress_hook)
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    train_both(
        ranks, models, steps=3, loss=lambda m, x: compiled[m is models[1]](x).sum()
    )


# ---- copies and changes -------------------------------------------------------------


def counted(state, bucket):
    """A hook that pickles; the state counts its calls."""
    state["n"] += 1
    return default_hooks.allreduce_hook(None, bucket)


@on_ranks(2, how=["deepcopy", "pickle"])
def test_a_copy_keeps_the_hook_and_has_a_state_of_its_own(ranks, how):
    state = {"n": 0}
    wrapper = paceline.DistributedDataParallel(net())
    wrapper.register_comm_hook(state, counted)
    wrapper(ranks.integers(2, 6)).sum().backward()
    n = state["n"]
    assert n > 0
    clone = (
        copy.deepcopy(wrapper)
        if how == "deepcopy"
        else pickle.loads(pickle.dumps(wrapper))
    )
    clone.zero_grad()
    clone(ranks.integers(2, 6, key=1)).sum().backward()
    ranks.assert_same([p.grad for p in clone.parameters()], "gradients")
    assert state["n"] == n
    assert clone._comm_hooks[0][1]["n"] > n
    with pytest.raises(RuntimeError, match="can only be called once"):
        clone.register_comm_hook(None, counted)


@on_ranks(2, hook=["fp16", "builtin"])
def test_a_wrapper_whose_hook_has_the_default_group_can_be_copied(ranks, hook):
    wrapper = paceline.DistributedDataParallel(net())
    if hook == "builtin":
        wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        wrapper.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    wrapper(ranks.integers(2, 6)).sum().backward()
    for clone in (copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        clone.zero_grad()
        clone(ranks.integers(2, 6, key=1)).sum().backward()
        ranks.assert_same([p.grad for p in clone.parameters()], "gradients")
        assert len(clone._comm_hooks) == 1


@on_ranks(1, 2)
def test_a_model_that_is_changed_keeps_its_hook(ranks):
    seen = []

    def hook(state, bucket):
        seen.append(sum(p.numel() for p in bucket.parameters()))
        return by_hand(state, bucket)

    module = integer_weights(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
    model = ranks.wrap(module)
    model.register_comm_hook(ranks.group, hook)
    for _ in range(2):
        model(ranks.integers(2, 6)).sum().backward()
    module.append(integer_weights(nn.Linear(2, 2)))
    module.double()
    seen.clear()
    model.zero_grad()
    model(ranks.integers(2, 6, dtype=torch.float64)).sum().backward()
    assert sum(seen) == sum(p.numel() for p in module.parameters())
    ranks.assert_same([p.grad for p in model.parameters()], "gradients")


@on_ranks(1)
def test_a_hook_of_one_rank_alone_is_called(ranks):
    def hook(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    model = ranks.wrap(nn.Linear(2, 1))
    model.require_backward_grad_sync = False
    model.register_comm_hook(None, hook)
    assert model.require_backward_grad_sync is False
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]
    model.require_backward_grad_sync = True
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[4.0, 4.0]]


# ---- what stays behind --------------------------------------------------------------


@on_ranks(2)
def test_a_thousand_steps_with_a_hook_leave_nothing(ranks):
    def grow(model):
        for _ in range(100):
            model(x).sum().backward()
        gc.collect()
        return len(gc.get_objects())

    class State:
        pass

    def hook(state, bucket):
        return reduced(ranks.group, bucket)

    state = State()
    model = ranks.wrap(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1)))
    state.owner = model  # a cycle through the native reducer
    model.register_comm_hook(state, hook)
    x = torch.ones(2, 6)
    grow(model)
    before = grow(model)
    for _ in range(8):
        after = grow(model)
    assert abs(after - before) < 50
    gone = [
        weakref.ref(thing)
        for thing in (state, model, model._session.reducer, model._session.world)
    ]
    del state, model
    gc.collect()
    assert [thing() for thing in gone] == [None] * 4
