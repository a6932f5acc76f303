"""`mixed_precision`, against torch's own class with the same argument.

torch's records events of a device, of which the CPU has none: here an event does
nothing.  That class (torch 2.13) averages in its first step memory that was never
written, and with gradient_as_bucket_view gives each step the second one's gradients; it
raises where a parameter is tied, after `no_sync()`, for reentrant checkpoints, and for
a part that is used but not called, as in MultiheadAttention.  So it is compared from
the second step on; all else with the same arithmetic by hand.
"""

import contextlib
import copy
import gc
import inspect
import os
import random
import weakref
from types import SimpleNamespace
from unittest import mock

import paceline
import pytest
import torch
from cases import (
    as_torch,
    assert_equal,
    grads_of,
    integer_weights,
    mean_over,
    on_gpus_too,
    on_ranks,
    run_drawn,
)
from support.copies import pickled
from support.failing import FailsInBackward
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

HALF, WIDE, BRAIN = torch.float16, torch.float32, torch.bfloat16
STREAM = "current_stream"


@contextlib.contextmanager
def mixed(wrap, module, param=HALF, reduce=HALF, buffer=HALF, **options):
    """Wrap a module; torch's class on a CPU that has streams and events."""
    config = _MixedPrecision(param, reduce, buffer)
    with contextlib.ExitStack() as stack:
        if wrap.__name__ == "wrap_by_torch":
            theirs = torch.nn.parallel.DistributedDataParallel
            if "torch.Event" not in inspect.getsource(theirs._root_copy_hook):
                pytest.skip(f"torch {torch.__version__} takes CUDA's events")
            names = (torch, "Stream"), (torch, "Event"), (torch.accelerator, STREAM)
            for owner, name in names:
                stack.enter_context(mock.patch.object(owner, name, mock.MagicMock()))
        yield wrap(module, mixed_precision=config, **options)


def net():
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
    module[3].bias.requires_grad_(False)
    return module


def data(ranks, step, rows=4):
    return torch.randn(rows, 6, generator=ranks.generator("data", step))


def dtypes(tensors):
    return [t if t is None else t.dtype for t in tensors]


# ---- as torch -----------------------------------------------------------------------


@as_torch(param=[HALF, BRAIN], reduce=[HALF, WIDE, BRAIN, torch.float64, None])
def test_a_training_has_the_bits_of_torch(ranks, wrap, param, reduce):
    with mixed(wrap, net(), param, reduce, bucket_cap_mb=0.0001) as model:
        model(data(ranks, "spoilt")).float().sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step != 2)
            out = model(data(ranks, step))
            out.float().square().mean().backward()
            yield [out, *grads_of(model)]
            optimizer.step()
            yield [*model.parameters()]


class Takes(nn.Module):
    """Takes inputs of all kinds; says of what dtypes all that it uses is."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, pair, *, other):
        (x, rows), told = pair, [*self.part.parameters(), self.scale]
        self.told = dtypes([x, rows, other["y"], *told])
        return {"out": [self.part(x)[rows] * self.scale.to(x.dtype) + other["y"]]}


@as_torch(param=[HALF, BRAIN], buffer=[None, BRAIN, torch.float64])
def test_inputs_and_buffers_are_cast_as_by_torch(ranks, wrap, param, buffer):
    module = integer_weights(Takes())
    with mixed(wrap, module, param, WIDE, buffer) as model:
        for step in range(3):
            model.zero_grad()
            x = ranks.integers(4, 6, key=step).requires_grad_()
            rows, y = torch.tensor([0, 2]), ranks.integers(3, key=("y", step)).double()
            out = model((x, rows), other={"y": y})["out"][0]
            out.float().sum().backward()
            if step > 0:
                yield [out, x.grad, module.scale, *grads_of(model)]
            yield module.told


class Marked(nn.Parameter):
    def scaled(self):
        return self * self.factor


class Odd(nn.Module):
    """Uses its parameter by its class, its attributes and its name."""

    def __init__(self):
        super().__init__()
        self.own = Marked(torch.randn(6, 6) / 3)
        self.own.factor = 2

    def forward(self, x):
        own = self.get_parameter("own")
        assert isinstance(own, Marked)
        assert own is self.own
        assert own.dtype == x.dtype, (own.dtype, x.dtype)
        own.seen = getattr(own, "seen", 0) + 1
        return (x @ own.scaled()).tanh()


class Attends(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(6, 2)

    def forward(self, x):
        x = x.unsqueeze(1)
        return super().forward(x, x, x)[0].squeeze(1)


class Keeps(nn.Module):
    """Runs parts, in checkpoints or not, and puts the output where no wrapper looks."""

    def __init__(self, parts, reentrant, place="module"):
        super().__init__()
        self.first, self.parts = nn.Linear(6, 6), nn.ModuleList(parts)
        self.reentrant, self.place, self.fails = reentrant, place, False

    def forward(self, x):
        x = self.first(x)
        for part, how in zip(self.parts, self.reentrant, strict=True):
            x = part(x) if how is None else checkpoint(part, x, use_reentrant=how)
        if self.fails:
            raise KeyError("on purpose")
        self.kept = x if self.place == "module" else None
        return {"tensor": x, "module": None, "object": SimpleNamespace(x=x)}[self.place]


def output_of(model, *inputs):
    """Return a tensor from wherever the module has put it."""
    out = model(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    if out is None:
        return getattr(model, "module", model).kept
    return getattr(out, "x", out)


MODELS = {
    "LSTM": (lambda: nn.LSTM(6, 5, num_layers=2), (2, 4, 6)),
    "BatchNorm": (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), (4, 6)),
    "checkpoint, loss kept": (lambda: Keeps([Odd(), Odd()], [None, False]), (4, 6)),
    "odd parameters": (Odd, (4, 6)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 3)), (4, 6)),
    "GRU": (lambda: nn.GRU(6, 5), (2, 4, 6)),
}


@as_torch(name=[*MODELS])
def test_a_model_has_the_bits_of_torch(ranks, wrap, name):
    make, shape = MODELS[name]
    torch.manual_seed(4)
    with mixed(wrap, make(), BRAIN, BRAIN, BRAIN) as model:
        for step in range(3):
            model.zero_grad()
            out = output_of(model, torch.randn(shape, generator=ranks.generator(step)))
            out.float().square().sum().backward()
            if step > 0:
                yield [out, *grads_of(model)]


# ---- more than torch ----------------------------------------------------------------


def by_hand(ranks, module, loss, param, reduce):
    """Return gradients as they must be: of copies, averaged in float32, by rank."""
    low = copy.deepcopy(module).to(param)
    loss(low).backward()
    rows = ranks.all([p.grad.to(WIDE).to(reduce) for p in low.parameters()])
    return [mean_over(column).to(WIDE) for column in zip(*rows, strict=True)]


@on_gpus_too()
@on_ranks(2, 4, param=[BRAIN, HALF], reduce=[BRAIN, HALF])
def test_the_first_step_is_the_mean_of_all_ranks(ranks, param, reduce):
    """Of four ranks, too: a sum is taken in float32, and rounded once."""
    torch.manual_seed(6)
    module, x = nn.Linear(6, 3), data(ranks, 0).to(param)
    kept = copy.deepcopy(module)
    options = {"gradient_as_bucket_view": param is reduce}
    with mixed(ranks.wrap, module, param, reduce, **options) as model:
        for _ in range(2):
            model.zero_grad()
            model(x).float().square().sum().backward()
            means = by_hand(
                ranks, kept, lambda low: low(x).float().square().sum(), param, reduce
            )
            for mine, mean in zip(grads_of(model), means, strict=True):
                assert_equal(mine, mean, "a gradient")


@on_gpus_too(4)
@on_ranks(2, 4, dtype=[BRAIN, HALF], view=[False, True])
def test_a_module_in_16_bits_may_be_averaged_in_float32_alone(ranks, dtype, view):
    """Its tensors keep their dtype; of four ranks NCCL would round each sum."""
    torch.manual_seed(6)
    module, x = nn.Linear(6, 300).to(dtype), data(ranks, 0).to(dtype)
    kept = copy.deepcopy(module)
    options = {"gradient_as_bucket_view": view}
    with mixed(ranks.wrap, module, None, WIDE, None, **options) as model:
        for _ in range(2):
            model.zero_grad()
            out = model(x)
            out.float().square().sum().backward()
            found = [out, *model.parameters(), *grads_of(model)]
            assert dtypes(found) == [dtype] * 5
            means = by_hand(
                ranks, kept, lambda low: low(x).float().square().sum(), dtype, dtype
            )
            for mine, mean in zip(grads_of(model), means, strict=True):
                assert_equal(mine.float(), mean, "a gradient")


@on_ranks(reentrant=[True, False])
def test_a_wrapper_in_a_checkpoint_has_the_same_gradients(ranks, reentrant):
    """In the recomputation the wrapper's forward finds copies in its module."""
    found = []
    for inside in (False, True):
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        with mixed(ranks.wrap, module) as model:
            for step in range(2):
                model.zero_grad()
                x = data(ranks, step).requires_grad_()
                args = {"use_reentrant": reentrant}
                out = checkpoint(model, x, **args) if inside else model(x)
                out.float().square().sum().backward()
        found.append(grads_of(model))
    for one, other in zip(*found, strict=True):
        assert_equal(one, other, "a gradient")


@on_ranks()
def test_parameters_are_whole_whenever_the_module_does_not_run(ranks):
    with mixed(ranks.wrap, nn.BatchNorm1d(6)) as model:
        out = model(data(ranks, 0))
        assert dtypes(model.parameters()) == [WIDE] * 2
        assert [type(p) for p in model.parameters()] == [nn.Parameter] * 2
        model.zero_grad()
        out.float().sum().backward()
        with torch.no_grad():
            assert model.eval()(data(ranks, 1)).dtype == HALF
        state = model.state_dict()
        assert state["module.num_batches_tracked"].dtype == torch.int64
        assert state["module.weight"].dtype == WIDE
        with model.no_sync():
            model(data(ranks, 2)).float().sum().backward()
        assert dtypes(grads_of(model)) == [WIDE] * 2


@on_ranks()
def test_a_step_after_a_backward_that_failed_is_right(ranks):
    class Fails(nn.Linear):
        fails = False

        def forward(self, x):
            out = super().forward(x)
            return FailsInBackward.apply(out, KeyError) if self.fails else out

    module = integer_weights(Fails(6, 3))
    kept, x = copy.deepcopy(module), ranks.integers(2, 6, key=1)
    with mixed(ranks.wrap, module) as model:
        for module.fails in (False, True, False, True, False):
            model.zero_grad()
            fails = pytest.raises((KeyError, paceline.PeerError))
            with fails if module.fails else contextlib.nullcontext():
                model(x).sum().backward()
                means = by_hand(
                    ranks, kept, lambda low: low(x.half()).sum(), HALF, HALF
                )
                for mine, mean in zip(grads_of(model), means, strict=True):
                    assert_equal(mine, mean, "a gradient")


@on_gpus_too()
@on_ranks()
def test_a_communication_hook_gets_buckets_of_reduce_dtype(ranks):
    seen = []

    def hook(state, bucket):
        seen.append((bucket.buffer().dtype, dtypes(bucket.parameters())))
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 3)
        return future

    with mixed(ranks.wrap, integer_weights(nn.Linear(6, 3)), reduce=BRAIN) as model:
        model.register_comm_hook(None, hook)
        x = ranks.integers(2, 6)
        model(x).sum().backward()
        assert seen == [(BRAIN, [WIDE] * 2)]
        assert_equal(model.module.weight.grad, 3 * x.sum(0).expand(3, 6), "a gradient")


def double(parameter):
    parameter.grad *= 2


@on_ranks()
def test_hooks_of_parameters_see_whole_gradients(ranks):
    seen = []
    with mixed(ranks.wrap, integer_weights(nn.Linear(6, 3, bias=False))) as model:
        weight = model.module.weight
        weight.register_post_accumulate_grad_hook(double)
        weight.register_hook(lambda gradient: seen.append(gradient.dtype))
        for step in range(3):
            model.zero_grad(set_to_none=step == 1)
            x = ranks.integers(2, 6, key=step)
            model(x).sum().backward()
            total = sum(ranks.all(x.sum(0).expand(3, 6)))
            assert_equal(weight.grad, total, f"step {step}")
        assert seen == [WIDE] * 3


@on_ranks()
def test_gradients_of_gradients_keep_their_graph(ranks):
    with mixed(ranks.wrap, integer_weights(nn.Linear(6, 1, bias=False))) as model:
        weight = model.module.weight
        for step in range(2):
            model.zero_grad()
            x = ranks.integers(1, 6, key=step)
            model(x).square().sum().backward(create_graph=True)
            assert weight.grad.grad_fn is not None
            rows = ranks.all(2 * (x @ weight.detach().T) * x)
            assert_equal(weight.grad, mean_over(rows), f"step {step}")


@on_ranks(view=[False, True])
def test_what_a_rank_leaves_out_keeps_what_it_has(ranks, view):
    """A parameter that only some rank uses, or none, with gradients accumulated."""
    module = integer_weights(nn.ModuleList([nn.Linear(6, 1, bias=False)] * 0))
    module.extend(integer_weights(nn.Linear(6, 1, bias=False)) for _ in range(3))
    module.forward = lambda x, *used: sum(module[i](x) for i in used)
    options = {"gradient_as_bucket_view": view}
    with mixed(ranks.wrap, module, **options) as model:
        x, odd = ranks.integers(1, 6), torch.full((1, 6), 1 / 3)
        with model.no_sync():
            model(odd, 2).backward()  # accumulated, in 16 bits
        local = module[2].weight.grad.clone()
        used = (0, 1) if ranks.rank == 0 else (0,)
        model(x, *used).sum().backward()
        xs = ranks.all(x)
        assert_equal(module[0].weight.grad, mean_over(xs), "used by both")
        assert_equal(module[1].weight.grad, mean_over([xs[0], None]), "used by one")
        assert_equal(module[2].weight.grad, local, "accumulated by both")
        before = module[1].weight.grad.clone()
        model(x, 0).sum().backward()
        assert_equal(module[1].weight.grad, before, "used by none")


@on_ranks()
def test_optimizers_in_backward_step_by_the_mean(ranks):
    module = integer_weights(nn.Linear(6, 1, bias=False))
    before, x = module.weight.detach().clone(), ranks.integers(1, 6)
    with mixed(ranks.wrap, module) as model:
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
        model(x).sum().backward()
        assert_equal(module.weight, before - mean_over(ranks.all(x)), "the weight")
        assert module.weight.grad is None


@on_ranks()
def test_sparse_gradients_are_refused_on_every_rank(ranks):
    words = pytest.raises(NotImplementedError, match="for modules with sparse=True")
    with words, mixed(ranks.wrap, nn.Embedding(5, 2, sparse=True)):
        pass


@on_ranks(has_method=[False, True])
def test_what_is_ignored_keeps_its_dtype(ranks, has_method):
    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(6, 3)
            self.some = nn.ParameterDict({"own": torch.ones(3)})
            self.register_buffer("kept", torch.ones(3))

        def forward(self, x):
            told = self.some.own.dtype, self.kept.dtype, self.used.weight.dtype
            assert told == (WIDE, WIDE, HALF)
            return self.used(x) * self.some.own

    module, ignored = integer_weights(Ignores()), ["some.own", "kept"]
    if has_method:
        theirs = torch.nn.parallel.DistributedDataParallel
        theirs._set_params_and_buffers_to_ignore_for_model(module, ignored)
    else:
        module._ddp_params_and_buffers_to_ignore = ignored
    with mixed(ranks.wrap, module) as model:
        x = ranks.integers(2, 6)
        model(x).sum().backward()
        row = module.some.own.detach()[:, None] * x.sum(0)
        assert_equal(module.used.weight.grad, mean_over(ranks.all(row)), "averaged")
        local = (x @ module.used.weight.detach().T + module.used.bias.detach()).sum(0)
        assert_equal(module.some.own.grad, local, "ignored")


@on_ranks()
def test_ranks_with_other_numbers_of_batches_join(ranks):
    with mixed(ranks.wrap, integer_weights(nn.Linear(6, 1, bias=False))) as model:
        x = ranks.integers(1, 6)
        with model.join():
            for _ in range(1 + ranks.rank):
                model.zero_grad()
                model(x).sum().backward()
        if ranks.rank == 1:
            assert_equal(model.module.weight.grad, x / 2, "the last one's")


@on_ranks(how=[copy.deepcopy, pickled])
def test_a_copy_of_the_wrapper_does_the_same(ranks, how):
    kept = integer_weights(nn.LSTM(6, 2))
    x = ranks.integers(2, 6, key=1)
    with mixed(ranks.ours, copy.deepcopy(kept)) as model:  # by the default group
        model(x)[0].sum().backward()
        copied = how(model)
        assert dtypes(copied.parameters()) == [WIDE] * 4
        for each in (model, copied):
            each.zero_grad()
            each(x)[0].sum().backward()
        for mine, other in zip(grads_of(model), grads_of(copied), strict=True):
            assert_equal(mine, other, "a gradient")


@on_ranks()
def test_a_module_that_keeps_its_output_goes_with_its_wrapper(ranks):
    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = super().forward(x)
            return self.kept

    with mixed(ranks.wrap, Keeps(6, 1)) as model:
        model(data(ranks, 0)).sum().backward()
        model(data(ranks, 1))
    known = weakref.ref(model.module)
    del model
    gc.collect()
    assert known() is None


@on_ranks(n_forwards=[1, 2])
def test_what_is_left_of_a_graph_keeps_no_copies(ranks, n_forwards):
    """Of losses that a loop adds up, say, for a mean of the epoch."""
    copies = []

    class Tells(nn.Linear):
        def forward(self, x):
            copies.append(weakref.ref(self.weight))
            return super().forward(x)

    with mixed(ranks.wrap, Tells(6, 1)) as model:
        outs = [model(data(ranks, i)).sum() for i in range(n_forwards)]
        sum(outs).backward()
        assert [copy() for copy in copies] == [None] * n_forwards


@on_ranks()
def test_a_parameter_that_a_forward_replaces_stays_replaced(ranks):
    class Replaces(nn.Linear):
        def forward(self, x):
            self.bias = nn.Parameter(self.bias.detach() + 1)
            return super().forward(x)

    module = integer_weights(Replaces(6, 1))
    with mixed(ranks.wrap, module) as model, torch.no_grad():
        weight, bias = module.weight, module.bias.clone()
        model(data(ranks, 0))
        assert module.weight is weight
        assert_equal(module.bias.detach(), (bias + 1).half(), "the new one")


@on_ranks(has_param_dtype=[False, True])
def test_parameters_name_both_dtypes_as_by_torch(ranks, has_param_dtype):
    low = HALF if has_param_dtype else None
    with mixed(ranks.wrap, nn.Linear(6, 1), low) as model:
        for p in pickled(model.module).parameters(), model.parameters():
            both = [(each._mp_param.dtype, each._fp_param.dtype) for each in p]
            assert both == [(low or WIDE, WIDE)] * 2


# ---- programs -----------------------------------------------------------------------

N_PROGRAMS = int(os.environ.get("FUZZ", "6"))  # FUZZ_SEED=12 begins with seed 12
PARTS = {
    "odd": Odd,
    "linear": lambda: nn.Linear(6, 6),
    "norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "attention": Attends,
    "GRU": lambda: Recurs(6, 6),
    "tied": lambda: tied(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))),
}


class Recurs(nn.GRU):
    def forward(self, x):
        return super().forward(x.unsqueeze(1))[0].squeeze(1)


def tied(parts):
    parts[2].weight = parts[0].weight
    return parts


class Program:
    """Every statement on a wrapped module, in a drawn order, and the same by hand."""

    def __init__(self, ranks, seed):
        self.ranks, self.seed, self.n_data = ranks, seed, 0
        self.same = random.Random(seed)
        self.names = [[*PARTS][seed % len(PARTS)]]
        self.names += self.same.choices([*PARTS], k=self.same.randint(0, 3))
        self.reentrant = [
            # Of a parameter with two uses each adds to .grad: rounded by itself.
            self.same.choice([None, False, *([True] if name != "tied" else [])])
            for name in self.names
        ]
        self.place = ["tensor", "module", "object"][seed // 2 % 3]
        self.reduce = self.same.choice([BRAIN, WIDE])
        self.view = self.same.choice([False, True])
        self.master = self.make()
        self.sums = [None for _ in self.master.parameters()]

    def make(self):
        torch.manual_seed(self.seed)
        parts = [PARTS[name]() for name in self.names]
        return Keeps(parts, self.reentrant, self.place)

    def by_hand(self, x):
        low = self.make()
        low.load_state_dict(self.master.state_dict())
        out = output_of(low.to(BRAIN).train(self.model.training), x.to(BRAIN))
        if out.requires_grad:
            out.float().square().sum().backward()
        return out, [
            p.grad if p.grad is None else p.grad.to(WIDE) for p in low.parameters()
        ]

    def forward(self):
        self.n_data += 1
        x = data(self.ranks, (self.seed, self.n_data))
        out, (expected, grads) = output_of(self.model, x), self.by_hand(x)
        assert_equal(out.detach(), expected.detach(), "the output")
        return out.float().square().sum(), grads

    def add(self, grads):
        pairs = zip(self.sums, grads, strict=True)
        self.sums = [new if old is None else old + new for old, new in pairs]

    def average(self):
        rows = self.ranks.all([each.to(self.reduce) for each in self.sums])
        self.sums = [mean_over(row).to(WIDE) for row in zip(*rows, strict=True)]

    def step(self, **options):
        loss, grads = self.forward()
        loss.backward(**options)
        self.add(grads)
        self.average()
        return loss, grads

    def twice(self):
        loss, grads = self.step(retain_graph=True)
        loss.backward()
        self.add(grads)
        if self.place == "tensor":  # otherwise a second one is not seen, as in torch
            self.average()

    def both(self):
        """Two forwards, one backward."""
        (one, first), (other, second) = self.forward(), self.forward()
        with self.model.no_sync():
            one.backward()
        other.backward()
        self.add(first)
        self.add(second)
        self.average()

    def micro(self):
        with self.model.no_sync():
            loss, grads = self.forward()
            loss.backward()
        self.add(grads)

    def fail(self):
        self.model.module.fails = True
        with pytest.raises(KeyError, match="on purpose"):
            self.model(data(self.ranks, "any"))
        self.model.module.fails = False

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            self.forward()
        self.model.train()

    def copy(self):
        self.model.module.kept = None
        # torch pickles no module with parametrizations.
        for copied in [copy.deepcopy, *([pickled] if "norm" not in self.names else [])]:
            for mine, other in zip(
                copied(self.model.module).parameters(),
                self.master.parameters(),
                strict=True,
            ):
                assert_equal(mine.detach(), other.detach(), "a copy")
        self.model.load_state_dict(self.model.state_dict())

    def optimize(self):
        for model in (self.model, self.master):
            if model is self.master:
                for p, total in zip(model.parameters(), self.sums, strict=True):
                    p.grad = total
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        self.sums = [None for _ in self.sums]

    def run(self):
        each = self.step, self.twice, self.both, self.micro, self.optimize
        each += self.fail, self.evaluate, self.copy
        options = {"gradient_as_bucket_view": self.view, "bucket_cap_mb": 0.0001}
        wrapped = mixed(
            self.ranks.wrap, self.make(), BRAIN, self.reduce, BRAIN, **options
        )
        with wrapped as self.model:
            for statement in [*self.same.sample(each, len(each)), self.step]:
                statement()
                found = dtypes(self.model.parameters())
                assert found == [WIDE] * len(found)
                for mine, total in zip(grads_of(self.model), self.sums, strict=True):
                    assert_equal(mine, total, f"after {statement}")


@on_ranks()
def test_drawn_programs_do_the_same_as_by_hand(ranks):
    run_drawn(ranks, N_PROGRAMS, lambda seed: Program(ranks, seed).run())
