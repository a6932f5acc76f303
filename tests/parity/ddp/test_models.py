"""Kinds of modules, their buffers, and ways to call them.

The reference is the plain module; for buffers it is torch's class.
"""

import copy
import itertools
import os
import random
import warnings
from functools import partial
from unittest import mock

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import (
    ON_HOSTS,
    Counting,
    Twin,
    as_torch,
    assert_equal,
    compare_with_torch,
    grads_of,
    integer_weights,
    mean_over,
    net,
    on_gpus_too,
    on_ranks,
    run_drawn,
    skip_without_complex,
    step_of,
    train,
)
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

# ---- modules ------------------------------------------------------------------------


def test_a_wrapper_in_a_wrapper_takes_the_mean_once(ranks):
    ddp = nn.parallel.DistributedDataParallel
    for outer, inner in [
        (ddp, ddp),
        (ranks.wrap, ranks.wrap),
        (ranks.wrap, nn.DataParallel),
        (ranks.wrap, paceline.DataParallel),
        (nn.DataParallel, ranks.wrap),
        (paceline.DataParallel, ranks.wrap),
    ]:
        plain = net()
        model = outer(inner(copy.deepcopy(plain)))
        assert next(iter(model.state_dict())).startswith("module.module.")
        for _ in range(3):
            x = ranks.integers(3, 6)
            for each in (plain, model):
                step_of(each, x)
            rows = ranks.all([p.grad for p in plain.parameters()])
            for p, *grads in zip(model.parameters(), *rows, strict=True):
                assert_equal(p.grad, mean_over(grads), f"{outer} of {inner}")


def test_a_wrapper_of_torchs_inside_or_around_is_an_error(ranks):
    ddp = nn.parallel.DistributedDataParallel
    for module in (ddp(net()), nn.Sequential(nn.Linear(6, 6), ddp(net()))):
        with pytest.raises(ValueError, match="wrapped by torch's Distributed"):
            ranks.wrap(module)
    x = ranks.integers(3, 6)
    inner = ranks.wrap(net())
    model = ddp(nn.Sequential(inner, nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"torch's Distributed.* is around this"):
        model(x)
    with torch.no_grad():
        model(x)  # this averages nothing
    inner(x).sum().backward()
    elsewhere = ddp(Calls(inner))  # it has no parameter of the inner one
    (elsewhere(x) + 0 * x.sum()).backward()


class Calls(nn.Module):
    """Uses a wrapper that is not registered as its child."""

    def __init__(self, other):
        super().__init__()
        self.others = [other]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.others[0](x).sum()


@on_ranks()
def test_one_rank_may_export_the_wrapper_between_two_steps(ranks):
    if not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("torch < 2.7")
    model = ranks.wrap(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    x = ranks.integers(3, 6)
    step_of(model, x)
    torch.export.export(model.module, (x,))  # the first import takes seconds
    if ranks.rank == 0:
        program = torch.export.export(model.eval(), (x,))
        assert_equal(program.module()(x), model.module(x), "exported")
        model.train()
    ranks.all(None)
    twin = Twin(ranks, integer_weights(nn.Linear(6, 4)))
    with mock.patch.object(torch.compiler, "_is_exporting_flag", True):
        twin.step(lambda model: model(x).sum())  # as another thread exports
    ranks.assert_same(grads_of(model), "gradients")


@on_gpus_too(3)
@on_ranks(init_sync=[True, False])
def test_parameters_and_buffers_are_those_of_rank_0_if_asked_for(ranks, init_sync):
    module = nn.Sequential(nn.Linear(90, 100), nn.BatchNorm1d(100))
    module = module.to(torch.float64)
    module.register_buffer("kept", torch.full((3,), ranks.rank, dtype=torch.int16))
    module.register_buffer("flag", torch.tensor(ranks.rank == 0))
    module.register_buffer("none", None)
    module.register_buffer("passing", torch.tensor(float(ranks.rank)), persistent=False)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(ranks.rank)
    ranks.wrap(module, init_sync=init_sync)
    from_rank = 0 if init_sync else ranks.rank
    assert all(p.unique().tolist() == [from_rank] for p in module.parameters())
    assert module.kept.tolist() == [from_rank] * 3
    assert module.flag.item() == (from_rank == 0)
    assert module.passing.item() == from_rank


class Counts(nn.Module):
    """Adds the sum of the batches so far, a buffer, to its input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x):
        y = x + self.total
        if self.training:
            self.total += x.detach().sum(dim=(0, 1))
        return y


class Activated(nn.BatchNorm1d):
    """A norm with a forward of its own, as timm's are."""

    def forward(self, x):
        return super().forward(x).relu()


def one_loss_of_all(wrappers, x):
    sum(wrapper(x).square().sum() for wrapper in wrappers).backward()


def a_loss_each(wrappers, x):
    for wrapper in wrappers:
        wrapper(x).square().sum().backward()


def one_in_evaluation(wrappers, x):
    first, other, *_ = wrappers
    frozen = other.eval()(x).square().sum()
    other.train()
    (first(x).square().sum() + frozen).backward()


def two_views(wrappers, x):
    """Compare two forwards of each wrapper, as contrastive losses do."""
    views = x, x.flip(0) + 1
    outs = [[wrapper(view).relu() for view in views] for wrapper in wrappers]
    sum((first - 2 * second).square().sum() for first, second in outs).backward()


def second_view_in_evaluation(wrappers, x):
    """Compare with a forward that must not move the statistics."""
    whole = wrappers[0]
    first, second = whole(x), whole.eval()(x + 1)
    whole.train()
    (first * second).sum().backward()


two_views_on_a_host = [] if ON_HOSTS else [two_views, second_view_in_evaluation]


class NamedBefore(nn.Module):
    """A norm whose statistics have another name, which comes first."""

    def __init__(self, n, **options):
        super().__init__()
        norm = nn.BatchNorm1d(n, **options)
        self.register_buffer("center", norm.running_mean)
        self.norm = norm

    def forward(self, x):
        return self.norm(x)


@as_torch(
    part=[nn.BatchNorm1d, nn.InstanceNorm1d, Activated, NamedBefore, Counts],
    losses=[one_loss_of_all, a_loss_each, one_in_evaluation, *two_views_on_a_host],
)
def test_wrappers_may_share_a_backbone_with_buffers(ranks, wrap, part, losses):
    """Rank 0's statistics come while the graph of another wrapper has saved them."""
    norm = part() if part is Counts else part(5, track_running_stats=True, affine=True)
    backbone = nn.Sequential(nn.Linear(6, 6), norm)
    wholes = [nn.Sequential(backbone, nn.Linear(6, n)) for n in (1, 2)]
    wrappers = [wrap(module) for module in (*wholes, backbone)]
    for step in range(3):
        x = torch.randn(4, 5, 6, generator=ranks.generator(step)) + ranks.rank
        for wrapper in wrappers:
            wrapper.zero_grad()
        losses(wrappers, x)
        yield [p.grad for wrapper in wrappers for p in wrapper.parameters()]
        yield list(backbone.buffers())


@on_ranks()
def test_an_evaluation_may_precede_the_backward_of_a_retained_graph(ranks):
    model = ranks.wrap(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
    x = torch.randn(6, 4, generator=ranks.generator(0))
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model.eval()(x)
    model.train()
    loss.backward()
    ranks.assert_same(grads_of(model), "the second step")


def swap(buffer, average):
    buffer.data, average.data = average.data, buffer.data


def copy_past_autograd(buffer, average):
    buffer.data.copy_(average)


def write_by_numpy(buffer, average):
    buffer.numpy()[:] = average.numpy()


@as_torch(write=[swap, copy_past_autograd, write_by_numpy])
def test_an_evaluation_uses_what_was_written_past_autograd(ranks, wrap, write):
    norm = nn.BatchNorm1d(4)
    model, average = wrap(norm), torch.full((4,), 7.0)
    x = torch.randn(6, 4, generator=ranks.generator(0))
    model(x).square().sum().backward()
    write(norm.running_mean, average)
    with torch.no_grad():
        yield model.eval()(torch.ones(2, 4))
    write(norm.running_mean, average)
    yield [*norm.buffers()] if ranks.rank == 0 else [norm.running_var]
    yield average if write is not swap else None


class Joined(nn.Module):
    """Some of the shared parts, perhaps in checkpoints; its output may be hidden."""

    def __init__(self, parts, chance):
        super().__init__()
        n = chance.randint(1, len(parts))
        self.parts = nn.ModuleList(chance.sample(parts, n))
        self.last = nn.Linear(6, chance.randint(1, 3))
        self.recomputed = [chance.random() < 0.4 for _ in self.parts]
        self.is_hidden = chance.random() < 0.4

    def forward(self, x):
        for part, is_recomputed in zip(self.parts, self.recomputed, strict=True):
            x = checkpoint(part, x, use_reentrant=False) if is_recomputed else part(x)
        x = self.last(x)
        return Hidden(x) if self.is_hidden else x


class Hidden:
    def __init__(self, x):
        self.relu, self.square = x.relu, x.square


N_PROGRAMS = int(os.environ.get("FUZZ", "12"))  # FUZZ_SEED=12 begins with seed 12


@on_ranks()
def test_drawn_wrappers_over_shared_parts_do_as_torch(ranks):
    run_drawn(
        ranks, N_PROGRAMS, partial(compare_with_torch, ranks, run_over_shared_parts)
    )


def run_over_shared_parts(ranks, wrap, seed):
    chance = random.Random(seed)
    norms = [nn.BatchNorm1d, nn.InstanceNorm1d, Activated]
    parts = [chance.choice(norms)(5, track_running_stats=True, affine=True)]
    kinds = [Counts, partial(nn.Linear, 6, 6), partial(nn.LayerNorm, 6)]
    parts += [chance.choice(kinds)() for _ in range(chance.randint(1, 3))]
    wholes = [Joined(parts, chance) for _ in range(chance.randint(1, 3))]
    wrappers = [wrap(whole) for whole in wholes]
    for step in range(5):
        x = torch.randn(4, 5, 6, generator=ranks.generator((seed, step))) + ranks.rank
        losses = [one_loss_of_all, a_loss_each, *two_views_on_a_host[:1]]
        chance.choice(losses)(wrappers, x)
        tensors = [t for w in wrappers for t in (*w.parameters(), *w.buffers())]
        yield [t.grad if t.requires_grad else t for t in tensors]
        if chance.random() < 0.6:
            for wrapper in wrappers:
                wrapper.zero_grad()


class Boxed(torch.Tensor):
    """A tensor without memory, whose values are in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def plain(self):
        return self.inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        opened = tree_map_only(cls, cls.plain, (args, kwargs or {}))
        out = function(*opened[0], **opened[1])
        if function is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, Boxed, out)


class Scaled(Boxed):
    """Small integers and a scale, like quantised weights; results are plain tensors."""

    def plain(self):
        return self.inner / 4

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].inner)
        args, kwargs = tree_map_only(Boxed, lambda t: t.plain(), (args, kwargs or {}))
        return function(*args, **kwargs)


class Wrapping(nn.Module):
    def __init__(self, ranks, kind, trained, n):
        super().__init__()
        weight = kind(ranks.integers(n, 100))
        self.weight = nn.Parameter(weight, requires_grad=trained)
        self.other = nn.Parameter(torch.ones(100))

    def forward(self, x, uses_both):
        out = x * self.other
        return out @ self.weight.t() if uses_both else out


@as_torch(kind=[Boxed, Scaled], trained=[False, True], n=[3, 100])
def test_parameters_that_wrap_other_tensors(ranks, wrap, kind, trained, n):
    view = trained == (n == 100)
    options = {"gradient_as_bucket_view": view, "find_unused_parameters": True}
    model = wrap(Wrapping(ranks, kind, trained, n), **options)
    for step, users in enumerate(["01", "0", "01"]):
        out = model(ranks.integers(2, 100, key=step), str(ranks.rank) in users)
        out.backward(torch.ones_like(out))
        grads = [p.grad for p in model.parameters()]
        yield [type(grad).__name__ for grad in grads]
        yield [g.inner if isinstance(g, Boxed) else g for g in grads]
        if step == 0:
            model.zero_grad()
    yield model.module.weight.inner


@as_torch()
def test_a_buffer_that_never_travels_may_be_sparse(ranks, wrap):
    module = net()
    module.register_buffer("words", torch.eye(3).to_sparse())
    model = wrap(module, broadcast_buffers=False, init_sync=False)
    yield step_of(model, ranks.integers(3, 6))


def test_a_graph_that_has_saved_overwritten_parameters_does_not_go_backward(ranks):
    module = net()
    x = ranks.integers(3, 6).requires_grad_()
    out = module(x).sum()
    ranks.wrap(module)
    if ranks.rank != 0:  # rank 0's parameters are unchanged
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, x)
    else:
        torch.autograd.grad(out, x)


# ---- buffers ------------------------------------------------------------------------


def x_of(ranks, key):
    return ranks.integers(2, 4, key=key)


def look(model):
    return [model.module.taken, model.module.mark]


class Turning(nn.Linear):
    """Some ranks replace a complex buffer by its lazy conjugate in each forward.

    torch's class copies such a buffer rightly if it is not alone.
    """

    def __init__(self, turns):
        super().__init__(3, 2)
        self.turns = turns
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 4j]))
        self.register_buffer("constant", torch.ones(2, dtype=torch.complex64))

    def forward(self, x):
        if self.turns:
            self.phase = self.phase.conj()
        return super().forward(x) * (self.phase + self.constant).imag


class OfHalves(nn.Linear):
    """Each rank has its own frozen parameter and buffer of complex32."""

    def __init__(self, value):
        super().__init__(3, 2)
        halves = torch.full((2, 2, 2), value + 0.5, dtype=torch.float16)
        frozen, phase = torch.view_as_complex(halves)
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.register_buffer("phase", phase)

    def forward(self, x):
        with torch.no_grad():
            torch.view_as_real(self.phase).add_(x.sum().half())
        return super().forward(x)


@as_torch(kind=[Turning, OfHalves], who=[(0,), (1,), (0, 1)])
def test_complex_buffers_come_from_rank_0(ranks, wrap, kind, who):
    skip_without_complex()
    warnings.simplefilter("ignore")  # ComplexHalf is experimental
    model = wrap(kind(ranks.rank + 1 if ranks.rank in who else 0))
    for step in range(4):
        model(torch.full((1, 3), float(ranks.rank + step))).sum().backward()
        tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_complex()]
        yield [
            *grads_of(model),
            *(torch.view_as_real(t.resolve_conj()) for t in tensors),
        ]


class ByConjugate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("phase", torch.tensor([1 - 2j, 3 + 1j, -2j]).conj())

    def forward(self, x):
        return torch.view_as_real((self.weight * self.phase * x).sum())


@as_torch()
def test_a_lazily_conjugated_buffer_that_stays_is_not_written(ranks, wrap):
    skip_without_complex()
    model = wrap(ByConjugate()).eval()
    first = model(torch.tensor(1.0)).sum()
    second = model.train()(torch.tensor(2.0 + ranks.rank)).sum()
    (first + second).backward()  # the graphs hold the buffer
    yield grads_of(model)


@as_torch(who=["all ranks", "rank 0", "rank 1"])
def test_a_part_that_runs_after_backward_leaves_its_own_statistics(ranks, wrap, who):
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    for step in range(4):
        model(x_of(ranks, step)).sum().backward()
        if who in ("all ranks", f"rank {ranks.rank}"):
            with torch.no_grad():
                model.module[:2](x_of(ranks, (step, "again")))
        yield [*model.buffers()]


def leave(state, buffers):
    return None


def take_greatest(state, buffers):
    for buffer in buffers.values():
        dist.all_reduce(buffer, dist.ReduceOp.MAX)


@as_torch(hook=[leave, take_greatest], when=["PRE_FORWARD", "POST_FORWARD"])
def test_a_buffer_hook_takes_the_place_of_the_broadcast(ranks, wrap, hook, when):
    model = wrap(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    place = nn.parallel.distributed._BufferCommHookLocation[when]
    model._register_buffer_comm_hook(None, hook, place)
    for step in range(3):
        model(x_of(ranks, step)).sum().backward()
        yield [*model.buffers()]


@as_torch(pattern=["yns", "nns", "yyn", "nyny"])
def test_buffers_beside_no_sync_are_those_of_torch(ranks, wrap, pattern):
    """y: a step; n: a backward in no_sync; s: only a forward."""
    model = wrap(Counting(ranks.rank))
    for step, kind in enumerate(itertools.chain.from_iterable([pattern] * 3)):
        model.require_backward_grad_sync = kind == "y"
        out = model(x_of(ranks, step))
        if kind != "s":
            out.backward()
        model.require_backward_grad_sync = True
        yield look(model)
    model(x_of(ranks, "end")).backward()
    yield look(model)


@on_gpus_too()
@as_torch()
def test_evaluation_on_all_ranks_has_the_buffers_of_torch(ranks, wrap):
    model = wrap(Counting(ranks.rank))
    for step in range(4):
        model.train()
        model(x_of(ranks, step)).backward()
        model.eval()
        with torch.no_grad():
            model(x_of(ranks, step))
        yield look(model)


@on_ranks(use=["grad", "none"])
def test_a_forward_that_rank_0_has_not_is_an_error_and_no_hang(ranks, use):
    if ON_HOSTS:
        pytest.skip("rank 0 leaves no notice for other hosts")
    model = ranks.wrap(Counting(ranks.rank))
    model(x_of(ranks, 0)).backward()
    out = model(x_of(ranks, 1))
    if ranks.rank == 1:
        if use == "grad":
            torch.autograd.grad(out, model.module.linear.weight)
        with pytest.raises(paceline.MismatchError, match="rank 0 has not had"):
            model(x_of(ranks, 2))
    else:
        with pytest.raises(paceline.MismatchError, match="rank 1 issued another"):
            out.backward()
    model(x_of(ranks, 3)).backward()
    ranks.assert_same([p.grad for p in model.parameters()], "the next step")


@on_gpus_too(2, 3)
@as_torch()
def test_statistics_of_batch_norm_are_those_of_torch(ranks, wrap):
    model = wrap(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    for step in range(4):
        x = torch.randn(6, 4, generator=ranks.generator(step))
        model(x).square().sum().backward()
        yield [*model.buffers()]
    yield [value for name, value in model.state_dict().items() if "0." in name]
    assert model.module[0].num_batches_tracked.item() == 4


def test_outputs_may_be_changed_in_place(ranks):
    def loss(out):
        out += 1
        out *= 2
        return out.sum()

    train(Twin(ranks, net()), ranks, loss=loss)


# ---- checkpointing ------------------------------------------------------------------


class Blocks(nn.Module):
    """Checkpointed blocks; the number of uses may differ between steps."""

    def __init__(self, reentrant, width=100, shared=False):
        super().__init__()
        first = nn.Linear(width, width)
        second = first if shared else nn.Linear(width, width)
        self.blocks = nn.ModuleList([first, second, nn.Linear(width, width)])
        self.reentrant = reentrant
        self.uses = 1

    def forward(self, x):
        x = x.detach().requires_grad_()
        for _ in range(self.uses):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
                x = x.clamp(-2, 2) if not self.reentrant else self.clip(x)
        return x

    def clip(self, x):
        return checkpoint(partial(torch.clamp, min=-2, max=2), x, use_reentrant=True)


@on_gpus_too(shared=[True])
@on_ranks(reentrant=[True, False], width=[100, 5], shared=[False, True])
def test_every_block_may_be_checkpointed_and_used_more_often_from_step_to_step(
    ranks, reentrant, width, shared
):
    """If hooks fire more often than before, gradients come after their bucket left."""
    twin = Twin(ranks, integer_weights(Blocks(reentrant, width, shared), -1, 2))
    for step, uses in enumerate([1, 1, 1, 2, 1, 3, 1, 1, 2, 2]):
        uses += ranks.rank % 2 * (step % 2)  # and differs between ranks
        twin.plain.uses = twin.ours.module.uses = uses
        twin.zero(set_to_none=step % 3 != 1)
        x = ranks.integers(2, width, key=step)
        twin.step(lambda model, x=x: model(x).sum())


@on_gpus_too()
def test_expanded_parameters_and_buffers_are_taken_from_rank_0(ranks):
    module = nn.Linear(2, 2)
    module.spread = nn.Parameter(torch.full((1, 3), float(ranks.rank)).expand(4, 3))
    module.register_buffer("mask", torch.full((3, 1), ranks.rank + 5.0).expand(3, 2))
    model = ranks.wrap(module)
    assert_equal(module.spread, torch.zeros(4, 3), "the parameter")
    assert_equal(module.mask, torch.full((3, 2), 5.0), "the buffer")
    (model(torch.ones(1, 2)).sum() + (ranks.rank + 1) * module.spread.sum()).backward()
    assert_equal(module.spread.grad, torch.full((4, 3), 1.5), "the gradient")
