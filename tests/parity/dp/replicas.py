"""Shared by the tests of DataParallel: exact data, and a module with its twin.

    twin = Twin(wrap, integer_weights(nn.Linear(3, 2)))
    twin.step(lambda model, x: model(x).square().sum(), integers(7, 3))

takes one step on the plain module and one on its copy behind a wrapper, and compares
outputs, gradients and buffers.  Weights and data are small integers in float64, so
every sum is exact in any order and results must be equal.  If results cannot be exact,
a test passes `exact=False`: 1e-12, relative to the largest number of the tensor.  Seven
rows on two replicas are four and three: so no half can pass for the other.
"""

import contextlib
import copy
import dataclasses
import gc
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import paceline
import pytest
import torch
from paceline._dp import devices
from support.devices import KIND
from torch import nn
from torch.utils import _pytree as pytree

F64 = {"dtype": torch.float64}
RELATIVE = 1e-12  # float64, sums of some hundred numbers in another order


# ---- data ---------------------------------------------------------------------------


def integers(*shape, seed=0, dtype=torch.float64, low=-3, high=3):
    """Return small integers that depend only on the seed and the shape."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    options = {"generator": generator, "device": "cpu"}
    return torch.randint(low, high + 1, shape, **options).to(_here(), dtype)


def reals(*shape, seed=0):
    """Return normal numbers in float64 that depend only on the seed and the shape."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cpu", **F64).to(_here())


def _here():
    """Return the device on which torch makes new tensors."""
    return torch.empty(0).device


def integer_weights(module, seed=0, dtype=torch.float64):
    """Set a module's dtype, and weights that are small integers; return it."""
    module.to(dtype)
    with torch.no_grad():
        for number, p in enumerate(module.parameters()):
            p.copy_(integers(*p.shape, seed=seed + 7 * number + 1, low=-2, high=2))
    return module


def net(seed=0):
    """Return two layers whose gradients are exact, of 3 inputs and 2 outputs."""
    return integer_weights(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), seed
    )


def smooth_net():
    """Return two layers whose gradients depend on all numbers, none of them exact."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss_of(out):
    """Return a loss that weighs every row differently, and exactly."""
    options = {"dtype": out.dtype, "device": out.device}
    weights = torch.arange(1.0, out.numel() + 1, **options).reshape(out.shape)
    return (weights * out).sum()


def loss_of_all(out):
    """Return a loss of every tensor of an output that has a gradient."""
    reals = [torch.view_as_real(t) if t.is_complex() else t for t in graphs_of(out)]
    dense = [t.to_dense() if t.layout != torch.strided else t for t in reals]
    return sum((i + 1) * loss_of(t.double()) for i, t in enumerate(dense))


def graphs_of(out):
    """Return the tensors of an output that have a graph, at any depth."""
    if isinstance(out, torch.Tensor):
        return [out] if out.requires_grad else []
    if isinstance(out, (tuple, list)):
        values = out
    elif isinstance(out, Mapping):
        values = out.values()
    elif dataclasses.is_dataclass(out):
        values = [getattr(out, field.name) for field in dataclasses.fields(out)]
    else:
        leaves = pytree.tree_leaves(out)
        values = [] if len(leaves) == 1 and leaves[0] is out else leaves
    return [tensor for value in values for tensor in graphs_of(value)]


def bare(model):
    """Return the module itself, with or without a wrapper."""
    return getattr(model, "module", model)


def here(model, x):
    """Return a tensor on the device where a model is."""
    return x.to(next(model.parameters()).device)


def moved(module, device):
    """Return a module, moved to a device; its parameters stay the same objects.

    So does `to()` with GPUs of torch.  Buffers that parts share stay shared, and so do
    gradients that they require.
    """
    parts = list(module.modules())
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        return module.to(device)
    for part in parts:
        if isinstance(part, nn.RNNBase):
            part._flat_weight_refs = []  # nothing else may refer to what is swapped
        for held in (part._parameters, part._buffers):
            for name, p in held.items():
                if isinstance(p, nn.Parameter) and p.device != device:
                    held[name] = _there(p, device)
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()
    there = {}
    for part in parts:
        for name, b in part._buffers.items():
            if b is not None and b.device != device:
                part._buffers[name] = there.setdefault(b, leaf(b.to(device), like=b))
    return module


def _there(parameter, device):
    """Return a parameter with its memory on a device: itself, if torch allows it."""
    copy_ = leaf(parameter.to(device), like=parameter)
    made = torch.Tensor._make_subclass(type(parameter), copy_, copy_.requires_grad)
    vars(made).update(vars(parameter))
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    try:
        torch.utils.swap_tensors(parameter, made)
    except RuntimeError:  # a graph or a weak reference leads to it
        return made
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks
    return parameter


def leaf(tensor, like=None):
    """Return a copy that is a leaf, and requires a gradient if the tensor does."""
    like = tensor if like is None else like
    return tensor.detach().clone().requires_grad_(like.requires_grad)


# ---- wrappers -----------------------------------------------------------------------


class Wrap:
    """Wraps modules for n replicas: on the CPU, or on simulated GPUs."""

    def __init__(self, *, is_gpu=False):
        self.is_gpu = is_gpu

    def device(self, k=0):
        """Return the device of replica `k`."""
        return torch.device(KIND, k) if self.is_gpu else torch.device("cpu")

    def devices(self, n):
        """Return `device_ids` for n replicas."""
        return list(range(n)) if self.is_gpu else ["cpu"] * n

    def __call__(self, module, n=2, kind=paceline.DataParallel, **options):
        """Return the module behind a wrapper of class `kind`, with n replicas.

        It moves to the device of replica 0; inputs may be on the CPU.
        """
        options = {"device_ids": self.devices(n), **options}
        if self.is_gpu:
            module = moved(module, devices.read(options["device_ids"], None).source)
        return kind(module, **options)


ON_EACH = pytest.mark.parametrize("wrap", ["cpu", "gpu"], indirect=True)
ON_GPUS = pytest.mark.parametrize("wrap", ["gpu"], indirect=True)


# ---- comparison ---------------------------------------------------------------------


def assert_close(mine, theirs, what="", *, exact=True):
    """Check two tensors, or None: dtype, shape, whether it requires grad, values."""
    if mine is None or theirs is None:
        assert mine is theirs, f"{what}: {mine} against {theirs}"
        return
    assert mine.dtype == theirs.dtype, what
    assert mine.shape == theirs.shape, what
    assert mine.requires_grad == theirs.requires_grad, what
    assert mine.layout == theirs.layout, what
    mine, theirs = mine.detach().cpu(), theirs.detach().cpu()
    if theirs.layout == torch.sparse_coo:
        mine, theirs = mine.to_dense(), theirs.to_dense()
    if exact:
        assert torch.equal(mine, theirs), f"{what}: {mine} against {theirs}"
        return
    if theirs.numel():
        limit = RELATIVE * float(theirs.abs().max())
        away = float((mine - theirs).abs().max())
        assert away <= limit, f"{what}: {away} away, {limit} allowed"


def assert_same(mine, theirs, what="output", *, exact=True):
    """Check two values of any nesting: types, keys, tensors, arrays, constants."""
    assert type(mine) is type(theirs), f"{what}: {type(mine)} against {type(theirs)}"
    if isinstance(theirs, torch.Tensor):
        assert_close(mine, theirs, what, exact=exact)
    elif isinstance(theirs, np.ndarray):
        assert mine.dtype == theirs.dtype, what
        np.testing.assert_array_equal(mine, theirs, what, strict=True)
    elif isinstance(theirs, Mapping):
        assert list(mine) == list(theirs), what
        for key in theirs:
            assert_same(mine[key], theirs[key], f"{what}[{key!r}]", exact=exact)
    elif isinstance(theirs, (tuple, list)):
        assert len(mine) == len(theirs), what
        for i, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_same(*pair, f"{what}[{i}]", exact=exact)
    elif dataclasses.is_dataclass(theirs):
        for field in dataclasses.fields(theirs):
            pair = (getattr(mine, field.name), getattr(theirs, field.name))
            assert_same(*pair, f"{what}.{field.name}", exact=exact)
    elif hasattr(theirs, "__dict__"):
        assert_same(vars(mine), vars(theirs), what, exact=exact)
    else:
        assert mine == theirs, what


def assert_same_grads(mine, theirs, what="", *, exact=True):
    """Check the gradients of two modules, parameter by parameter."""
    ours = [p for _, p in bare(mine).named_parameters()]
    for p, (name, q) in zip(ours, bare(theirs).named_parameters(), strict=True):
        assert_close(p.grad, q.grad, f"{what} {name}.grad", exact=exact)


def assert_same_state(mine, theirs, what="", *, exact=True):
    """Check the parameters and buffers of two modules."""
    ours = bare(mine).state_dict()
    for name, tensor in bare(theirs).state_dict().items():
        if isinstance(tensor, torch.Tensor):  # a quantised module has other entries
            assert_close(ours[name], tensor, f"{what} {name}", exact=exact)


class Twin:
    """A plain module, and its copy behind a wrapper: `plain` and `ours`."""

    def __init__(self, wrap, module, n=2, **options):
        self.plain = module
        self.inner = copy.deepcopy(module)
        self.ours = wrap(self.inner, n, **options)

    @property
    def models(self):
        """The plain module, then the wrapper."""
        return self.plain, self.ours

    def zero(self, *, set_to_none=True):
        for model in self.models:
            model.zero_grad(set_to_none=set_to_none)

    def run(self, function, *tensors):
        """Return [plain's, ours] of `function(model, *leaves)`, each with its own.

        Replicas return constants as lists: equal ones are reduced to one.
        """
        plain, ours = [function(m, *[leaf(t) for t in tensors]) for m in self.models]
        return [plain, alike(ours)]

    def compare(self, function, *tensors, exact=True):
        """Check that `function(model, *leaves)` is the same for both; return it."""
        theirs, mine = self.run(function, *tensors)
        assert_same(mine, theirs, exact=exact)
        return mine

    def step(self, loss, *tensors, exact=True):
        """Run `loss(model, *leaves).backward()` on both; compare all that it leaves."""
        rows = []
        for model in self.models:
            own = [leaf(t) for t in tensors]
            value = loss(model, *own)
            value.backward()
            rows.append([value.detach(), *[t.grad for t in own]])
        for i, pair in enumerate(zip(*reversed(rows), strict=True)):
            assert_close(*pair, f"input {i - 1}" if i else "loss", exact=exact)
        self.assert_same(exact=exact)

    def assert_same(self, *, exact=True):
        assert_same_grads(self.ours, self.plain, exact=exact)
        assert_same_state(self.ours, self.plain, exact=exact)


def alike(value):
    """Return an output with equal constants of replicas reduced to one: [3, 3] is 3."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value) is list and value and not _holds_tensors(value):
        is_one = all(type(v) is type(value[0]) and v == value[0] for v in value)
        return value[0] if is_one else value
    if type(value) in (tuple, list):
        return type(value)(map(alike, value))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, alike(v)) for key, v in value.items())
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            object.__setattr__(value, field.name, alike(held))
    return value


def _holds_tensors(value):
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return isinstance(value, (torch.Tensor, np.ndarray)) or hasattr(
            value, "__dataclass_fields__"
        )
    return any(map(_holds_tensors, value))


def step(model, x):
    return loss_of(model(x))


def accumulate(model, n=2, **options):
    """Run n backwards, of different batches, whose gradients add up."""
    for seed in range(n):
        step(model, integers(7, 3, seed=seed, **options)).backward()


def grow(model, factor=2):
    """Multiply all weights of a model in place."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)


def grads_of(model):
    """Return copies of the gradients of a model."""
    return [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]


def beside(model, other, ids=None):
    """Return another module, behind a wrapper if the model is behind one."""
    if model is bare(model):
        return other
    return type(model)(other, ids or model.device_ids)


def resident_bytes():
    """Return the memory of this process."""
    n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return n_pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def without_collector():
    """Free by reference counts alone; collect earlier garbage first."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def linear(rows=3, columns=3):
    return integer_weights(nn.Linear(columns, rows))


class Parent(nn.Module):
    """A module around a model: torch refuses functional calls of a wrapper itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


# ---- gradients of gradients ----------------------------------------------------------


class Power(nn.Module):
    """A polynomial of its inputs and weights: all its derivatives are integers."""

    def __init__(self, seed=0):
        super().__init__()
        self.first = integer_weights(nn.Linear(3, 4), seed + 1)
        self.idle = integer_weights(nn.Linear(2, 2), seed + 2)
        self.last = integer_weights(nn.Linear(4, 2), seed + 3)

    def forward(self, x):
        return self.last(self.first(x).square()) * x[:, :2]


def small(*shape, seed=0):
    """Return integers so small that high powers of them are exact."""
    return integers(*shape, seed=seed, low=-1, high=1)


def slopes_of(value, targets, **options):
    return torch.autograd.grad(
        value, targets, create_graph=True, allow_unused=True, **options
    )


def squares_of(gradients):
    return sum((g * g).sum() for g in gradients if g is not None)


def penalty_on(model, x):
    """Return the sum of squares of an output's slope by its input."""
    return squares_of(slopes_of(loss_of(model(x)), [x]))
