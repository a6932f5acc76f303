"""Run training recipes as users write them with paceline and torch; compare bits.

If torch's class cannot run a recipe, or is wrong, the reference is the plain module,
averaged by hand, on small integers, so that sums are exact.  There are two ranks: both
libraries round a mean of two once.
"""

import copy
import shutil
import warnings

import paceline
import torch
import torch.distributed as dist
from cases import (
    Twin,
    as_torch,
    assert_equal,
    assert_same_grads,
    grads_of,
    integer_weights,
    on_gpus_too,
    on_ranks,
    step_of,
)
from hook_cases import mlp, trained
from support.copies import pickled, saved_and_loaded
from support.threads import in_threads
from torch import nn
from torch.optim import swa_utils

# ---- recipes that torch can run -----------------------------------------------------


@as_torch()
def test_weights_may_be_averaged_over_the_steps(ranks, wrap):
    ddp = nn.parallel.DistributedDataParallel
    kind = paceline.DistributedDataParallel if wrap == ranks.wrap else ddp
    model = kind(nn.Sequential(nn.Linear(6, 130), nn.BatchNorm1d(130)))
    average = swa_utils.AveragedModel(model)
    for found in trained(ranks, model):
        average.update_parameters(model)
        yield [*found, *average.parameters()]
    swa_utils.update_bn([ranks.integers(4, 6, key=i) for i in range(3)], average)
    # torch sends rank 0's statistics here too; paceline sends them only with gradients.
    yield [*average.buffers()] if ranks.rank == 0 else []


@as_torch()
def test_a_penalty_of_gradients_by_the_input_is_trained_on(ranks, wrap):
    def loss(model, x):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return model(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    yield from trained(ranks, wrap(mlp()), loss=loss)


OPTIMIZERS = {
    "foreach Adam": lambda p: torch.optim.Adam(p, foreach=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, foreach=False),
    "foreach RMSprop": lambda p: torch.optim.RMSprop(p, foreach=True),
}


@on_gpus_too()
@as_torch(kind=[*OPTIMIZERS])
def test_every_kind_of_optimizer_gives_the_bits_of_torch(ranks, wrap, kind):
    model = wrap(mlp())
    yield from trained(ranks, model, optimizer=OPTIMIZERS[kind](model.parameters()))


def in_bfloat16(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    return out.float().square().mean()


class InAThread:
    """A loss whose backward runs in another thread."""

    def __init__(self, model, x):
        self.loss = model(x).square().sum()

    def backward(self):
        in_threads(lambda _: self.loss.backward(), 1)


@as_torch(loss=[in_bfloat16, InAThread])
def test_a_backward_of_this_kind_gives_the_bits_of_torch(ranks, wrap, loss):
    yield from trained(ranks, wrap(mlp()), loss=loss)


class Tiny(nn.Module):
    """Five hundred tiny parameters."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(i % 3 + 1) for i in range(500))

    def forward(self, x):
        return torch.cat(list(self.parts)).sin().sum() * x.mean()


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(6, 130), nn.BatchNorm1d(130)))


class Masked(nn.Linear):
    """Its buffers are slices of larger tensors."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("mask", torch.ones(8, 8).tril()[:6, :6])
        self.register_buffer("seen", torch.zeros(8, 8)[::2, 1::2])

    def forward(self, x):
        self.seen += x.detach().sum()
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


@as_torch(make=[Tiny, scripted, Masked])
def test_a_model_of_this_kind_gives_the_bits_of_torch(ranks, wrap, make):
    model = wrap(make())
    yield from trained(ranks, model)
    yield [*model.buffers()] if ranks.rank == 0 else []


@on_gpus_too()
@as_torch()
def test_hooks_on_modules_and_tensors_see_what_those_of_torch_see(ranks, wrap):
    model, seen = wrap(mlp()), []
    model.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    model.register_forward_hook(lambda m, args, out: out * 2)
    part = model.module[2]
    part.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
    part.register_full_backward_hook(lambda m, gi, go: (gi[0] + 1,))
    part.weight.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    yield from trained(ranks, model)
    yield seen


# ---- recipes that torch cannot run, or runs wrong ------------------------------------


def exact():
    layers = nn.Linear(6, 130), nn.Hardtanh(-9, 9), nn.Linear(130, 90), nn.Linear(90, 2)
    return integer_weights(nn.Sequential(*layers), -1, 2)


def step(twin, key):
    """Take a step of both models, and check it."""
    twin.step(lambda model: model(x_of(twin.ranks, key)).sum())


def x_of(ranks, key):
    return ranks.integers(3, 6, key=key)


def test_the_module_inside_may_be_replaced_as_a_whole(ranks):
    twin = Twin(ranks, exact())
    step(twin, 0)
    twin.plain = integer_weights(nn.Sequential(nn.Linear(6, 120), nn.Linear(120, 1)))
    twin.ours.module = copy.deepcopy(twin.plain)
    for key in range(2):
        twin.zero()
        step(twin, key)


def test_a_model_frozen_as_a_whole_runs_and_is_trained_again(ranks):
    """It need not be wrapped anew: some loops do this in every step."""
    twin = Twin(ranks, exact())
    world = twin.ours._session.world
    for key in range(3):
        twin.zero()
        twin.ours.requires_grad_(False)
        x = x_of(ranks, key).requires_grad_()
        twin.ours(x).sum().backward()
        assert x.grad is not None
        twin.ours.requires_grad_(True)
        step(twin, key)
    assert twin.ours._session.world is world


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        self.a, self.b = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x):
        hidden = self.body(x)
        return self.a(hidden), self.b(hidden)


def test_a_forward_of_two_outputs_awaits_its_backward_once(ranks):
    """Rank 0's statistics must not overwrite tensors that the other forward saved."""
    torch.manual_seed(0)
    model = ranks.wrap(TwoHeads())
    for step in range(3):
        model.zero_grad()
        x, y = torch.randn(2, 6, 6, generator=ranks.generator(step)) + ranks.rank
        first, second = model(x), model(y)
        (first[0].sum() + first[1].square().sum()).backward()
        (second[0].sum() + second[1].square().sum()).backward()
        ranks.assert_same([p.grad for p in model.parameters()], f"step {step}")


# ---- compilers -----------------------------------------------------------------------

COMPILED = [("module", "eager"), ("wrapper", "aot_eager"), ("method compile", "eager")]
COMPILED += [("wrapper", "inductor")] * bool(shutil.which("g++"))


@on_ranks(how=COMPILED)
def test_a_compiled_model_gives_the_gradients_of_the_plain_one(ranks, how):
    what, backend = how
    torch._dynamo.reset()
    twin = Twin(ranks, exact())
    module, ours = twin.ours.module, twin.ours
    if what == "module":
        ours = ranks.wrap(torch.compile(module, backend=backend))
    elif what == "method compile":
        ours.compile(backend=backend)
    else:
        ours = torch.compile(ours, backend=backend)
    for key in range(3):
        twin.zero()
        for model in (twin.plain, ours):
            model(x_of(ranks, key)).sum().backward()
        twin.average()
        assert_same_grads(module, twin.plain, key)


def traced_files():
    """The files of the frames that dynamo has compiled, or tried to."""
    from torch._dynamo.convert_frame import input_codes

    codes = [reference() for reference in input_codes.seen]
    return {code.co_filename for code in codes if code is not None}


class Around(nn.Module):
    """A forward of the user's own: dynamo may skip those of torch's containers."""

    def __init__(self):
        super().__init__()
        self.inner = exact()

    def forward(self, x):
        return self.inner(x)


COMPILES = {
    "plain": {},
    "fullgraph": {"fullgraph": True},
    "few": {"dynamic": False},
}


@on_ranks(options=[*COMPILES])
def test_dynamo_traces_nothing_of_ours_wherever_it_is_reset(ranks, options):
    from torch._dynamo import config

    few = {"cache_size_limit": 1} if options == "few" else {}
    torch._dynamo.reset()
    twin = Twin(ranks, Around())
    ours = torch.compile(twin.ours, backend="eager", **COMPILES[options])
    files = set()
    with config.patch(**few):
        for step in range(5):
            twin.zero()
            x = x_of(ranks, step)[: 2 + step % 2]
            for at in range(4):
                if at == step:
                    files |= traced_files()
                    torch._dynamo.reset()
                if at == 0:
                    loss = ours(x).sum()
                elif at == 1:
                    loss.backward()
                elif at == 2:
                    with torch.no_grad():
                        ours.eval()(x)
                else:
                    ours(x)
                    ours.train()
            twin.plain(x).sum().backward()
            twin.average()
            assert_same_grads(twin.ours.module, twin.plain, step)
    files |= traced_files()
    assert files
    assert not [file for file in files if "paceline" in file]


# ---- copies --------------------------------------------------------------------------


@on_ranks(how=[copy.deepcopy, pickled, saved_and_loaded])
def test_rank_0_alone_copies_and_evaluates_a_wrapper(ranks, how):
    """A copy meets its peers only if it is trained, and outlives the original."""
    model = paceline.DistributedDataParallel(exact())
    model(x_of(ranks, 0)).sum().backward()
    if ranks.rank == 0:
        best = how(model).eval()
        with torch.no_grad():
            assert_equal(
                best(x_of(ranks, 1)), model(x_of(ranks, 1)), "the copy's output"
            )
    dist.barrier(group=ranks.group)
    other = how(model)
    assert type(other) is paceline.DistributedDataParallel
    for one in (model, other):
        step_of(one, x_of(ranks, 1))
    assert_same_grads(other, model)
    del model, one
    step_of(other, x_of(ranks, 2))
    ranks.assert_same(grads_of(other), "gradients")


def test_a_copy_may_begin_in_no_sync_or_stay_frozen(ranks):
    model = paceline.DistributedDataParallel(exact())
    teacher = copy.deepcopy(model).requires_grad_(False)
    teacher(x_of(ranks, 0))  # with grad mode on, but no parameter needs a gradient
    other = copy.deepcopy(model)
    with other.no_sync():
        other(x_of(ranks, 0)).sum().backward()
    assert not torch.equal(*ranks.all(other.module[0].weight.grad))
    assert other.require_backward_grad_sync is True
    other(x_of(ranks, 1)).sum().backward()
    ranks.assert_same([p.grad for p in other.parameters()], "gradients")


def test_a_copy_called_with_other_tensors_meets_nobody(ranks):
    """torch.func.functional_call replaces parameters by tensors that are not leaves."""
    model = paceline.DistributedDataParallel(exact())
    other = copy.deepcopy(model)
    if ranks.rank == 0:
        twice = {name: 2 * p for name, p in other.named_parameters()}
        loss = torch.func.functional_call(other, twice, (x_of(ranks, 0),)).sum()
        plain = copy.deepcopy(model.module)
        twice = {name: 2 * p for name, p in plain.named_parameters()}
        torch.func.functional_call(plain, twice, (x_of(ranks, 0),)).sum().backward()
        loss.backward()
        assert_same_grads(other, plain, "rank 0's own")
    for one in (model, other):
        step_of(one, x_of(ranks, 1))
    assert_same_grads(other, model)


@on_ranks(width=[2, 300], is_run=[False, True])
def test_an_output_kept_from_before_a_change_disturbs_no_step(ranks, width, is_run):
    body = integer_weights(nn.Linear(width, width), -1, 2)
    twin = Twin(ranks, nn.Sequential(body, integer_weights(nn.Linear(width, 1))))
    x = torch.full((1, width), 2.0 * ranks.rank + 1)
    kept = twin.ours(x).sum()
    head = integer_weights(nn.Linear(width, 2))
    for module in (twin.plain, twin.ours.module):
        module[1] = copy.deepcopy(head)
    for key in range(3):
        twin.zero()
        twin.step(lambda model: model(x).sum())
        if key == 0 and is_run:
            kept.backward()  # the head that it used was replaced


# ---- refusals, and surroundings ------------------------------------------------------


def test_a_model_is_wrapped_while_another_device_is_the_default(ranks):
    module = exact()
    with torch.device("meta"):
        twin = Twin(ranks, module)
    step(twin, 0)


def test_counting_and_profiling_a_step_changes_nothing(ranks):
    from torch.utils.flop_counter import FlopCounterMode

    twin = Twin(ranks, exact())
    for key in range(2):
        twin.zero()
        with FlopCounterMode(display=False), torch.profiler.profile():
            step(twin, key)


def test_transforms_of_functions_leave_the_wrapper_as_it_was(ranks):
    twin = Twin(ranks, exact())
    x = x_of(ranks, 0)
    params = {name: p.detach() for name, p in twin.ours.named_parameters()}

    def loss(params, x):
        return torch.func.functional_call(twin.ours, params, (x,)).sum()

    grads = torch.func.grad(loss)(params, x)
    rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    own = torch.autograd.grad(twin.plain(x).sum(), list(twin.plain.parameters()))
    for name, mine in zip(grads, own, strict=True):
        assert_equal(grads[name], mine, name)
        assert_equal(rows[name].sum(0), mine, name)
    assert_equal(
        torch.func.grad(lambda x: twin.ours(x).sum())(x),
        torch.func.grad(lambda x: twin.plain(x).sum())(x),
        "the slope by the input",
    )
    for key in range(2):
        twin.zero()
        step(twin, key)
