"""paceline.check: compares a model in replicas with the model alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline import _gpu, _native
from paceline._checkpoint import inside
from paceline._compat import torch_core
from paceline._dp.data_parallel import DataParallel
from paceline._dp.marker import unmarked

# Relative to the largest entry: float sums in another order round differently.
_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2}
_RTOL_OTHERWISE = 5e-2
_ATOL = {torch.float64: 1e-12, torch.float32: 1e-7}
_ATOL_OTHERWISE = 1e-4
_SEED = 0


@dataclass(frozen=True)
class Row:
    """One tensor of a :class:`Report`.

    Attributes
    ----------
    name : str
        ``output`` with the path of a leaf in it, or ``grad`` with a parameter's name.
    plain, replicas : str
        The largest magnitude in the plain module's tensor and in the wrapper's, or a
        description of what stands in place of a tensor.
    max_abs, max_rel : float
        The largest difference, and its ratio to the largest magnitude.
    ok : bool
        Whether the difference is within the tolerance.
    """

    name: str
    plain: str
    replicas: str
    max_abs: float
    max_rel: float
    ok: bool


@dataclass(frozen=True)
class Report:
    """What :func:`paceline.check` found; printed, it is a table.

    Attributes
    ----------
    rows : list of Row
        Outputs first, then gradients.
    n_replicas : int
        The number of replicas in the comparison.
    notes : list of str
        Why differences may be expected.
    ok : bool
        Whether all rows are within the tolerance.

    Examples
    --------
    >>> import paceline, torch
    >>> report = paceline.check(torch.nn.Linear(2, 1), torch.ones(4, 2))
    >>> [row.name for row in report.rows], report.ok
    (['output', 'grad weight', 'grad bias'], True)
    """

    __module__ = "paceline"

    rows: list[Row]
    n_replicas: int
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all rows are within the tolerance."""
        return all(row.ok for row in self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        cells = [("", "plain", "replicas", "max abs", "max rel", "")]
        cells += [
            (
                row.name,
                row.plain,
                row.replicas,
                f"{row.max_abs:.3g}",
                f"{row.max_rel:.3g}",
                "ok" if row.ok else "DIFFERS",
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [f"{self.n_replicas} replicas"]
        for first, *others in cells:
            columns = [first.ljust(widths[0])]
            columns += [w.rjust(n) for w, n in zip(others, widths[1:], strict=True)]
            lines.append("  ".join(columns).rstrip())
        n_off = sum(not row.ok for row in self.rows)
        lines.append(
            f"{n_off} of {len(self.rows)} tensors differ" if n_off else "all agree"
        )
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def check(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    replicas: int = 2,
    rtol: float | None = None,
    atol: float | None = None,
) -> Report:
    """Compare a model in a :class:`paceline.DataParallel` with the model alone.

    Copies of the model run one forward and one backward on the whole batch, with and
    without the wrapper.  The model itself, the batch and the random state stay
    unchanged.

    Parameters
    ----------
    model : torch.nn.Module
        The model, in the mode (training or evaluation) to compare.
    batch : tensor, tuple or dict
        One argument, positional arguments, or keyword arguments of the model.
    loss : callable, optional
        Computes a loss from the model's output, for the gradients.  By default all
        floating-point outputs are summed with fixed random weights.
    replicas : int, default 2
        The number of replicas: on the CPU, or on GPUs, the model's first.  If there
        are too few GPUs, each is used several times.
    rtol, atol : float, optional
        A tensor agrees if the largest difference is at most ``atol + rtol * m``, with
        ``m`` its largest magnitude.  The defaults allow for rounding: 1e-4 and 1e-7
        for float32, 1e-9 and 1e-12 for float64.

    Returns
    -------
    Report
        A table of outputs and gradients; ``.ok`` and ``bool(report)`` are the verdict.

    Raises
    ------
    ValueError
        If ``replicas`` is less than 1.

    Examples
    --------
    >>> import paceline, torch
    >>> report = paceline.check(torch.nn.Linear(3, 2), torch.ones(4, 3))
    >>> report.ok
    True
    >>> print(report)  # doctest: +ELLIPSIS
    2 replicas
     ...
    all agree
    """
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}: give a number from 1 on")
    torch_core.attach()
    model = inside(model)[0]
    devices, place = _devices(model, replicas)
    plain, wrapped = copy.deepcopy(model), copy.deepcopy(model)
    with torch.enable_grad():
        output, draws = _run(plain, *unmarked(*_arguments(batch, place)))
        _backward(output, loss, output)
        wrapper = DataParallel(wrapped, devices)
        joined, _ = _run(wrapper, *_arguments(batch, place))
        _backward(joined, loss, output)
    row = partial(_row, rtol=rtol, atol=atol)
    rows = [row(*named) for named in _named_outputs(output, joined)]
    pairs = zip(plain.named_parameters(), wrapped.parameters(), strict=True)
    rows += [row(f"grad {name}", own.grad, its.grad) for (name, own), its in pairs]
    return Report(rows, replicas, _notes(plain, draws))


def _devices(
    model: torch.nn.Module, replicas: int
) -> tuple[list[Any], torch.device | None]:
    """Return `device_ids` for replicas of a model, and the GPU that it is on."""
    machine = _gpu.machine
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    first = machine.index_of(device)
    if first is None:
        return ["cpu"] * replicas, None
    order = [first, *(i for i in range(machine.count()) if i != first)]
    return [order[k % len(order)] for k in range(replicas)], machine.device(first)


def _arguments(
    batch: Any, place: torch.device | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a copy of the batch as arguments, on a GPU if one is given."""
    tree, leaves = _native.flatten(batch)
    batch = tree.unflatten([_copied(leaf, place) for leaf in leaves])
    if isinstance(batch, dict):
        return (), batch
    return (batch if type(batch) is tuple else (batch,)), {}


def _copied(leaf: Any, place: torch.device | None) -> Any:
    """Return a copy outside the caller's graph; it is a leaf if the original is one."""
    if not isinstance(leaf, torch.Tensor):
        return leaf.copy()
    copied = leaf.detach().to(place or leaf.device, copy=True)
    copied.requires_grad_(leaf.requires_grad)
    return copied if leaf.is_leaf else copied.clone()


def _run(call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Return the output for a fixed seed, and whether the forward draws numbers."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(_SEED)  # not those of GPUs
        before = torch.get_rng_state()
        output = call(*args, **kwargs)
        return output, not torch.equal(before, torch.get_rng_state())


def _notes(module: torch.nn.Module, draws: bool) -> list[str]:
    """Return why outputs may differ."""
    notes = []
    if draws:
        notes.append(
            "the forward draws random numbers, which differ in each replica; compare "
            "in evaluation mode, after model.eval()"
        )
    norms = (m for m in module.modules() if isinstance(m, torch_core.BatchNorm))
    if any(norm.training for norm in norms):
        notes.append("BatchNorm in training mode sees each replica's rows alone")
    return notes


def _backward(
    output: Any, loss: Callable[[Any], torch.Tensor] | None, plain: Any
) -> None:
    """Run a backward; a number in the plain output counts by the mean over replicas."""
    if loss is not None:
        total: Any = loss(output)
    else:
        leaves, likes = _native.flatten(output)[1], _native.flatten(plain)[1]
        terms = [
            leaf.mean() if like.ndim == 0 else (leaf * _weights(leaf, seed)).sum()
            for seed, (leaf, like) in enumerate(zip(leaves, likes, strict=False))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        total = sum(terms, torch.zeros(()))
        if total.is_complex():
            total = torch.view_as_real(total).sum()
    if total.requires_grad:
        total.backward()


def _weights(leaf: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(leaf.shape, generator=generator).to(leaf)


def _named_outputs(plain: Any, joined: Any) -> list[tuple[str, Any, Any]]:
    """Return the name of each output, and its value on both sides."""
    tree, leaves = _native.flatten(plain)
    others = _native.flatten(joined)[1]
    if len(leaves) != len(others):
        return [("output", f"{len(leaves)} tensors", f"{len(others)} tensors")]
    rows = []
    for i, (ours, theirs) in enumerate(zip(leaves, others, strict=True)):
        name = f"output{tree.path(i)}"
        if ours.ndim == 0 and theirs.ndim == 1:
            name, theirs = f"{name} (mean of replicas)", theirs.mean()
        rows.append((name, ours, theirs))
    return rows


def _row(
    name: str, plain: Any, other: Any, rtol: float | None, atol: float | None
) -> Row:
    if plain is None or other is None:
        ours, theirs = ("none" if each is None else "some" for each in (plain, other))
        gap = 0.0 if plain is other else math.nan
        return Row(name, ours, theirs, gap, gap, plain is other)
    if isinstance(plain, str):
        return Row(name, plain, other, math.nan, math.nan, False)
    plain, other = (torch.as_tensor(each).detach() for each in (plain, other))
    if plain.shape != other.shape or plain.dtype != other.dtype:
        ours, theirs = (f"{list(t.shape)} {t.dtype}" for t in (plain, other))
        return Row(name, ours, theirs, math.nan, math.nan, False)
    one, two = _wide(plain), _wide(other)
    largest, both_nan = _largest(one), torch.isnan(one) & torch.isnan(two)
    gap = _largest((one - two).abs().masked_fill((one == two) | both_nan, 0.0))
    rtol = _RTOL.get(plain.dtype, _RTOL_OTHERWISE) if rtol is None else rtol
    atol = _ATOL.get(plain.dtype, _ATOL_OTHERWISE) if atol is None else atol
    return Row(
        name,
        f"{largest:.4g}",
        f"{_largest(two):.4g}",
        gap,
        gap / largest if largest else gap,
        gap <= atol + rtol * largest,
    )


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to_dense().to(dtype)
