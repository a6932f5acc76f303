"""One table of programs: each runs with a module and with replicas of it.

    @program(layer=linear(3, 2), n=buffer(torch.zeros(1, **F64)))
    def a_buffer_counts_calls(m, x):
        m.n += 1
        return m.layer(x) * m.n

adds a row: the function is the forward of a module that holds the layer and the buffer.
By default the row takes two training steps and an evaluation (`steps`), and what these
return must be the plain module's, to the bit.

    @uses(net)
    def two_forwards_go_into_one_backward(model):
        (loss_of(model(X)) + loss_of(model(X + 1))).backward()

adds one for a module that there is already; the function is what is done with it, once
with the plain module and once with a wrapper (`bare` finds the module).  What it
returns is compared, then gradients and state.

Each row runs on two CPU replicas, on two simulated GPUs, and on three without peer
access; `on` names others.  `in_parts`: it is compared with a plain module that runs
each replica's rows by itself, as torch's class does (`InParts`), since a forward that
looks at all of its rows does something else with replicas.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import paceline
import pytest
import torch
from replicas import (
    alike,
    assert_same,
    assert_same_grads,
    assert_same_state,
    bare,
    integers,
    leaf,
    loss_of_all,
)
from support import fake_gpus
from torch import nn

DEVICES = {
    "cpu": (2, None),
    "cpu3": (3, None),
    "gpu2": (2, ()),
    "gpu3": (3, ("peers=0",)),
}
EVERYWHERE = "cpu gpu2 gpu3"
CPU, GPUS = "cpu", "gpu2 gpu3"
THREE = "cpu cpu3 gpu2 gpu3"

X = integers(7, 3)


@dataclass(frozen=True)
class Row:
    """A program; `use(model)` does it with a module that `make` makes.

    `broken_on`: devices with which it does not work, with reasons.
    """

    name: str
    make: Callable[[], nn.Module]
    use: Callable[[nn.Module], Any]
    on: str = EVERYWHERE
    is_exact: bool = True
    in_parts: bool = False
    broken_on: dict[str, str] = field(default_factory=dict)


ROWS: list[Row] = []


# ---- modules ------------------------------------------------------------------------


class Buffer(NamedTuple):
    """A tensor that a module is to hold as a buffer."""

    tensor: torch.Tensor | None
    persistent: bool = True


buffer = Buffer


def parameter(tensor: torch.Tensor, *, trained: bool = True) -> nn.Parameter:
    """Return a parameter."""
    return nn.Parameter(tensor, requires_grad=trained)


class Made(nn.Module):
    """A module whose forward is a function of it and of its inputs."""

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


def module(code: Callable[..., Any], **held: Any) -> nn.Module:
    """Return a module of a function, and of copies of what it is to hold."""
    return Made(code, copy.deepcopy(held))


# ---- uses ---------------------------------------------------------------------------


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    return (integers(7, 3, seed=seed, low=-2, high=2),)


def plainly(model: nn.Module, *args: Any) -> Any:
    return model(*args)


def snapshot(model: nn.Module) -> list[Any]:
    """Return copies of parameters and buffers of a model, and of their gradients."""
    inner = bare(model)
    leaves = [t for t in (*inner.parameters(), *inner.buffers()) if t.is_leaf]
    grads = [t.grad if t.grad is None else t.grad.detach().clone() for t in leaves]
    grads = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
    return [grads, [t.detach().clone() for t in (*leaves, *inner.buffers())]]


def by_signs(model: nn.Module) -> None:
    """Make a step that leaves integers integers."""
    with torch.no_grad():
        for p in bare(model).parameters():
            if p.grad is not None and p.requires_grad and p.dtype.is_floating_point:
                p.sub_(p.grad.to_dense().sign())


def slowly(model: nn.Module) -> None:
    """Make a step whose size depends on the gradient smoothly."""
    with torch.no_grad():
        for p in bare(model).parameters():
            if p.grad is not None and p.requires_grad:
                p.sub_(p.grad.to_dense() / 256)


def steps(
    *changes: Callable[[nn.Module], Any],
    x: Callable[[int], tuple[Any, ...]] = batch,
    call: Callable[..., Any] = plainly,
    n: int = 2,
    zero: bool = True,
    evaluates: bool = True,
    needs_grad: bool = True,
    descend: Callable[[nn.Module], None] | None = by_signs,
) -> Callable[[nn.Module], Any]:
    """Return a use: `n` training steps, one after each change, and an evaluation.

    `x(seed)` gives the inputs of a step, `descend` changes the weights after it.
    Without `zero`, gradients add up.
    """

    def use(model: nn.Module) -> list[Any]:
        seen = []
        for seed, change in enumerate([None] * n + list(changes)):
            if change is not None:
                change(bare(model))
            if zero:
                model.zero_grad()
            args = [leaf(a) if torch.is_tensor(a) else a for a in x(seed)]
            floats = [a for a in args if torch.is_tensor(a) and a.is_floating_point()]
            for a in floats:
                a.requires_grad_(needs_grad)
            out = alike(call(model, *args))
            loss = loss_of_all(out)
            if torch.is_tensor(loss) and loss.requires_grad:
                loss.backward()
            seen.append([out, [a.grad for a in floats], snapshot(model)])
            if descend is not None:
                descend(model)
        if evaluates:
            with torch.no_grad():
                seen.append(alike(call(model, *x(len(seen)))))
        return seen

    return use


def default(is_exact: bool) -> Callable[[nn.Module], Any]:
    return steps(descend=by_signs if is_exact else slowly)


# ---- rows ---------------------------------------------------------------------------


def program(
    use: Callable[[nn.Module], Any] | None = None,
    *,
    label: str = "",
    init: Callable[[nn.Module], Any] | None = None,
    on: str = EVERYWHERE,
    exact: bool = True,
    in_parts: bool = False,
    broken_on: dict[str, str] | None = None,
    **held: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a row whose forward is the function; `init` is run on each new module."""

    def add(code: Callable[..., Any]) -> Callable[..., Any]:
        def make() -> nn.Module:
            made = module(code, **held)
            if init is not None:
                init(made)
            return made

        name = code.__name__ + (f"[{label}]" if label else "")
        rest = on, exact, in_parts, broken_on or {}
        ROWS.append(Row(name, make, use or default(exact), *rest))
        return code

    return add


def uses(
    make: Callable[[], nn.Module] | nn.Module,
    cases: dict[str, Any] | None = None,
    *,
    on: str = EVERYWHERE,
    exact: bool = True,
    in_parts: bool = False,
    broken_on: dict[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a row whose use is the function; for each case, given its value, if any."""
    if isinstance(make, nn.Module):
        original = make
        make = lambda: copy.deepcopy(original)  # noqa: E731

    def add(use: Callable[..., Any]) -> Callable[..., Any]:
        rest = on, exact, in_parts, broken_on or {}
        if cases is None:
            ROWS.append(Row(use.__name__, make, use, *rest))
        for label, value in (cases or {}).items():
            name = f"{use.__name__}[{label}]"
            of_case = lambda model, value=value: use(model, value)  # noqa: E731
            ROWS.append(Row(name, make, of_case, *rest))
        return use

    return add


def trains(
    modules: dict[str, Callable[[], nn.Module]],
    use: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> None:
    """Add a row for each of these modules; they take steps, or what `use` says."""
    on, exact = options.pop("on", EVERYWHERE), options.pop("exact", True)
    in_parts = options.pop("in_parts", False)
    use = use or steps(**{"descend": by_signs if exact else slowly, **options})
    for name, make in modules.items():
        ROWS.append(Row(name, make, use, on, exact, in_parts))


def rows_on(kind: str) -> list[Any]:
    """Return the cases of a kind of device: rows, each with a device."""
    _import_all()
    return [
        _case(row, device)
        for row in ROWS
        for device in row.on.split()
        if device.startswith(kind)
    ]


def _import_all() -> None:
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        importlib.import_module(f"programs.{path.stem}")


def _case(row: Row, device: str) -> Any:
    reason = row.broken_on.get(device)
    marks = []
    if reason:
        kinds = (AssertionError, NotImplementedError)
        marks = [pytest.mark.xfail(strict=True, raises=kinds, reason=reason)]
    return pytest.param(row, device, id=f"{row.name}-{device}", marks=marks)


# ---- running ------------------------------------------------------------------------


class InParts(nn.Module):
    """A plain module that runs the rows of each of `n` replicas by themselves.

    Replica 0 is the module, each other a copy made before, whose parameters are copies
    in the graph: what these write is lost.
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
    """Have the devices of this name within, and give `device_ids` of them."""
    n, options = DEVICES[device]
    if options is None:
        yield ["cpu"] * n
        return
    with fake_gpus.several(n, *options):
        yield list(range(n))


def check(row: Row, device: str) -> None:
    """Run a row with the plain module and with replicas, and compare."""
    with replicas_on(device) as device_ids:
        torch.manual_seed(0)
        plain = row.make()
        torch.manual_seed(0)
        ours = paceline.DataParallel(row.make(), device_ids)
        reference = InParts(plain, len(device_ids)) if row.in_parts else plain
        torch.manual_seed(3)
        expected = row.use(reference)
        torch.manual_seed(3)
        found = row.use(ours)
        assert_same(found, expected, exact=row.is_exact)
        assert_same_grads(ours, plain, exact=row.is_exact)
        assert_same_state(ours, plain, exact=row.is_exact)
        del ours, reference, expected, found
