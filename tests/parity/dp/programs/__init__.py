"""A table of programs: each runs with a module and with replicas of it.

    @program(layer=linear(3, 2), n=buffer(torch.zeros(1, **F64)))
    def a_buffer_counts_calls(m, x):
        m.n += 1
        return m.layer(x) * m.n

adds a row: the function is the forward of a module that holds the layer and the buffer.
By default the row takes two training steps and an evaluation (`steps`).  Their results
must equal the plain module's to the bit.

    @uses(net)
    def two_forwards_go_into_one_backward(model):
        (loss_of(model(X)) + loss_of(model(X + 1))).backward()

adds a row for an existing module.  The function is the program; it runs once with the
plain module and once with a wrapper (`bare` returns the module).  First its result is
compared, then gradients and state.

Each row runs on two CPU replicas, and on either two simulated GPUs or three without
peer access; `on` names others.  tests/gpu/check_programs.py runs the rows on one GPU,
which two or three replicas share.  A forward that looks at all of its rows computes
something else in replicas.  With `in_parts` it is compared with a plain module that
runs each replica's rows separately, as torch's class does (`InParts`).
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import paceline
import pytest
import torch
from paceline import _gpu
from paceline._dp import devices as devices_
from replicas import (
    alike,
    assert_same,
    assert_same_grads,
    assert_same_state,
    bare,
    integers,
    leaf,
    loss_of_all,
    moved,
)
from support import fake_gpus
from torch import nn

from programs._where import is_on_the_cpu_alone, makes_on_the_cpu

DEVICES = {
    "cpu": (2, None),
    "cpu3": (3, None),
    "gpu2": (2, ()),
    "gpu3": (3, ("peers=0",)),
}
EVERYWHERE = "cpu gpu"  # gpu2 or gpu3: rows of one function take both
CPU, GPUS = "cpu", "gpu2 gpu3"
THREE = "cpu cpu3 gpu"

X = integers(7, 3)


@dataclass(frozen=True)
class Row:
    """A program; `use(model)` runs it with a module from `make`.

    `broken_on`: the devices on which it fails, with reasons.
    """

    name: str
    make: Callable[[], nn.Module]
    use: Callable[..., Any]
    on: str = EVERYWHERE
    exact: bool = True
    in_parts: bool = False
    broken_on: dict[str, str] = field(default_factory=dict)

    def run(self, model: nn.Module) -> Any:
        """Run the program with a module or a wrapper."""
        if isinstance(self.use, Steps):
            return self.use(model, exact=self.exact)
        return self.use(model)


ROWS: list[Row] = []


# ---- modules ------------------------------------------------------------------------


class Buffer(NamedTuple):
    """A tensor that a module holds as a buffer."""

    tensor: torch.Tensor | None
    persistent: bool = True


buffer = Buffer


def parameter(tensor: torch.Tensor, *, trained: bool = True) -> nn.Parameter:
    """Return a parameter."""
    return nn.Parameter(tensor, requires_grad=trained)


class Made(nn.Module):
    """A module whose forward calls a function with the module and the inputs."""

    def __init__(self, code: Callable[..., Any], held: dict[str, Any]) -> None:
        super().__init__()
        self.code = code
        for name, value in held.items():
            if isinstance(value, Buffer):
                self.register_buffer(name, *value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.code(self, *args, **kwargs)


def module(code: Callable[..., Any], init: Any = None, **held: Any) -> nn.Module:
    """Return a module with this forward, and copies of its parts and attributes."""
    made = Made(code, copy.deepcopy(held))
    if init is not None:
        init(made)
    return made


# ---- uses ---------------------------------------------------------------------------


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    return (integers(7, 3, seed=seed, low=-2, high=2),)


def grown(x: torch.Tensor = X) -> torch.Tensor:
    """Return a separate leaf that requires a gradient."""
    return x.clone().requires_grad_()


def snapshot(model: nn.Module) -> list[Any]:
    """Return copies of parameters and buffers of a model, and of their gradients."""
    inner = bare(model)
    leaves = [t for t in (*inner.parameters(), *inner.buffers()) if t.is_leaf]
    grads = [t.grad if t.grad is None else t.grad.detach().clone() for t in leaves]
    grads = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    return [grads, [t.detach().clone() for t in (*leaves, *inner.buffers())]]


def descend(model: nn.Module, *, exact: bool) -> None:
    """Make a step that keeps integers, or one that is smooth in the gradient."""
    with torch.no_grad():
        for p in bare(model).parameters():
            if p.grad is not None and p.requires_grad and p.dtype.is_floating_point:
                grad = p.grad.to_dense()
                p.sub_(grad.sign() if exact else grad / 256)


class Steps:
    """A use: `n` training steps, one after each change, and an evaluation.

    `x(seed)` gives the inputs of a step, `call` calls the model.  Without `zero`,
    gradients add up; without `descends`, the weights stay.
    """

    def __init__(
        self,
        *changes: Callable[[nn.Module], Any],
        x: Callable[[int], tuple[Any, ...]] = batch,
        call: Callable[..., Any] = lambda model, *args: model(*args),
        n: int = 2,
        zero: bool = True,
        evaluates: bool = True,
        needs_grad: bool = True,
        descends: bool = True,
    ) -> None:
        self.changes = [lambda m: None] * n + list(changes)
        self.x, self.call, self.zero = x, call, zero
        self.evaluates, self.needs_grad = evaluates, needs_grad
        self.descends = descends

    def __call__(self, model: nn.Module, *, exact: bool = True) -> list[Any]:
        seen = []
        for seed, change in enumerate(self.changes):
            change(bare(model))
            if self.zero:
                model.zero_grad()
            args = [leaf(a) if torch.is_tensor(a) else a for a in self.x(seed)]
            floats = [a for a in args if torch.is_tensor(a) and a.is_floating_point()]
            for a in floats:
                a.requires_grad_(self.needs_grad)
            out = alike(self.call(model, *args))
            loss = loss_of_all(out)
            if torch.is_tensor(loss) and loss.requires_grad:
                loss.backward()
            seen.append([out, [a.grad for a in floats], snapshot(model)])
            if self.descends:
                descend(model, exact=exact)
        if self.evaluates:
            with torch.no_grad():
                seen.append(alike(self.call(model, *self.x(len(seen)))))
        return seen


steps = Steps


# ---- rows ---------------------------------------------------------------------------

OPTIONS = "on", "exact", "in_parts", "broken_on"  # fields of `Row`


def _labelled(cases: dict[str, Any] | Iterable[Any] | None) -> dict[str, Any]:
    """Return cases by the label that they add to the name of their row."""
    if cases is None:
        return {"": {}}
    if not isinstance(cases, dict):
        cases = {str(case): case for case in cases}
    return {f"[{label}]": case for label, case in cases.items()}


def pairs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return all pairs of cases of two dictionaries."""
    return {f"{a}, {b}": (first[a], second[b]) for a in first for b in second}


def program(
    use: Callable[[nn.Module], Any] | None = None,
    cases: dict[str, dict[str, Any]] | None = None,
    **given: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a row whose forward is the function, for a module that holds `given`.

    `init` runs on each new module.  A case adds to `given`, or sets `use`.
    """

    def add(code: Callable[..., Any]) -> Callable[..., Any]:
        for label, more in _labelled(cases).items():
            held = {"use": use, **given, **dict(more)}
            options = {name: held.pop(name) for name in OPTIONS if name in held}
            use_here = held.pop("use") or steps()
            make = functools.partial(module, code, **held)
            ROWS.append(Row(code.__name__ + label, make, use_here, **options))
        return code

    return add


def uses(
    make: Callable[[], nn.Module] | nn.Module,
    cases: dict[str, Any] | Iterable[Any] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a row whose use is the function; with cases, one for the values of each."""
    if isinstance(make, nn.Module):
        make = functools.partial(copy.deepcopy, make)

    def add(use: Callable[..., Any]) -> Callable[..., Any]:
        for label, case in _labelled(cases).items():
            values = case if isinstance(case, tuple) else (case,)
            values = () if cases is None else values
            use_it = functools.partial(_used, use, values)
            ROWS.append(Row(use.__name__ + label, make, use_it, **options))
        return use

    return add


def _used(use: Callable[..., Any], values: tuple[Any, ...], model: nn.Module) -> Any:
    """Call a use; if it takes a leaf, pass one, and return its gradient too."""
    if "x" not in inspect.signature(use).parameters:
        return use(model, *values)
    x = grown()
    return [use(model, x, *values), x.grad]


def trains(
    modules: dict[str, Callable[[], nn.Module]],
    *changes: Callable[[nn.Module], Any],
    **options: Any,
) -> None:
    """Add a row for each of these modules; it takes a step after each change."""
    of_row = {name: options.pop(name) for name in OPTIONS if name in options}
    for name, make in modules.items():
        ROWS.append(Row(name, make, steps(*changes, **options), **of_row))


def cases() -> list[Any]:
    """Return all cases: rows, each with a device."""
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        rows_of(path.stem)
    return [_case(row, device) for row in ROWS for device in devices_of(row)]


def rows_of(file: str) -> list[Row]:
    """Import a file of this folder; return the rows that this adds."""
    n_before = len(ROWS)
    importlib.import_module(f"programs.{file}")
    return ROWS[n_before:]


def devices_of(row: Row) -> list[str]:
    """Return the devices on which a row runs."""
    is_for_gpus = not is_on_the_cpu_alone(row.name)
    gpus = "gpu3" if sum(row.name.encode()) % 2 else "gpu2"
    named = [gpus if d == "gpu" else d for d in row.on.split()]
    return [d for d in named if d.startswith("cpu") or is_for_gpus]


def _case(row: Row, device: str) -> Any:
    reason = row.broken_on.get(device)
    marks = []
    if reason:
        kinds = (AssertionError, NotImplementedError)
        marks = [pytest.mark.xfail(strict=True, raises=kinds, reason=reason)]
    return pytest.param(row, device, id=f"{row.name}-{device}", marks=marks)


# ---- running ------------------------------------------------------------------------


class InParts(nn.Module):
    """A plain module that runs the rows of each of `n` replicas separately.

    Replica 0 is the module.  Each other replica is a copy made before the call, whose
    parameters are copies in the graph: what it writes is lost.
    """

    def __init__(self, inner: nn.Module, n: int) -> None:
        super().__init__()
        self.module, self.n = inner, n

    def forward(self, *args: Any) -> Any:
        n_rows = next((len(a) for a in args if torch.is_tensor(a) and a.dim()), 1)
        n = max(1, min(self.n, n_rows))
        parts = [
            [a] * n if not torch.is_tensor(a) or not a.dim() else a.tensor_split(n)
            for a in args
        ]
        made = [self.module, *(self.copied() for _ in range(n - 1))]
        outs = [one(*mine) for one, *mine in zip(made, *parts, strict=True)]
        return joined(outs)

    def copied(self) -> nn.Module:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return copy.deepcopy(self.module, {id(p): p.clone() for p in trained})


def joined(outs: list[Any]) -> Any:
    """Return outputs of replicas as one, as torch joins them."""
    first = outs[0]
    if torch.is_tensor(first):
        return torch.cat(outs) if first.dim() else torch.stack(outs)
    if isinstance(first, dict):
        return {key: joined([out[key] for out in outs]) for key in first}
    if isinstance(first, tuple):
        return tuple(joined(list(entries)) for entries in zip(*outs, strict=True))
    return outs


@contextmanager
def replicas_on(device: str) -> Iterator[list[Any]]:
    """Provide a row's devices inside the context; yield their `device_ids`."""
    n, options = DEVICES[device]
    if options is None:
        yield ["cpu"] * n
        return
    with fake_gpus.several(n, *options):
        yield list(range(n))


def new_tensors(name: str, device_ids: list[Any]) -> AbstractContextManager[Any]:
    """Put new tensors on the current device; in a replica, on the replica's."""
    is_here = device_ids[0] == "cpu" or makes_on_the_cpu(name)
    return nullcontext() if is_here else torch.device(_gpu.machine.device_type)


def check(row: Row, device: str) -> None:
    """Run a row with the plain module and with replicas, and compare."""
    with replicas_on(device) as device_ids:
        compare(row, device_ids)


def check_on_a_gpu(row: Row, device: str) -> None:
    """Do the same with replicas that share the first GPU of this process."""
    n, _ = DEVICES[device]
    compare(row, [0] * n, prepare=take_weights)


def seed(number: int) -> None:
    """Do as `torch.manual_seed`, which also formats a stack for each kind of GPU."""
    torch.default_generator.manual_seed(number)
    torch.random._seed_custom_device(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def take_weights(made: nn.Module, plain: nn.Module) -> None:
    """Copy parameters and buffers: a GPU draws other random numbers than the CPU."""
    ours, theirs = ([*m.parameters(), *m.buffers()] for m in (made, plain))
    for mine, right in zip(ours, theirs, strict=True):
        if not nn.parameter.is_lazy(right):
            mine.data.copy_(right.detach())


def compare(
    row: Row,
    device_ids: list[Any],
    prepare: Callable[[nn.Module, nn.Module], None] = lambda made, plain: None,
) -> None:
    """Run a row with the plain module on the CPU and with replicas, and compare."""
    seed(0)
    plain = row.make()
    seed(0)
    with new_tensors(row.name, device_ids):
        made = moved(row.make(), devices_.read(device_ids, None).source)
    prepare(made, plain)
    ours = paceline.DataParallel(made, device_ids)
    reference = InParts(plain, len(device_ids)) if row.in_parts else plain
    seed(3)
    expected = row.run(reference)
    seed(3)
    with new_tensors(row.name, device_ids):
        found = row.run(ours)
    assert_same(found, expected, exact=row.exact)
    assert_same_grads(ours, plain, exact=row.exact)
    assert_same_state(ours, plain, exact=row.exact)
