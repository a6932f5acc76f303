"""What the ranks' models must agree on, and whether it has changed since wrapping."""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import re
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from paceline import _native
from paceline._compat import torch_core, torch_graph, torch_groups
from paceline._ddp import placement

NO_GRADIENT = (
    "DistributedDataParallel is not needed when a module doesn't have any parameter "
    "that requires a gradient."
)

_TYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
}

WRAP_ONCE = (
    "paceline's wrapper takes gradients before torch's can read them. Wrap the module "
    "once, or with paceline both times."
)


_ANY = object()  # stands for any buffer

Description = list[tuple[str, str, str]]
"""The kind, name and text of each tensor."""


@dataclass(frozen=True)
class Model:
    """A module's tensors, as data parallelism handles them.

    Each set holds the ``id`` of parameters: with gradients expected to be sparse, that
    are only copied, or that are only averaged.
    """

    # All that are averaged, or copied at the start, each once.
    parameters: list[tuple[str, torch.nn.Parameter]]
    # All that are not ignored: full name, their `_buffers`, and the name there.
    buffers: list[tuple[str, dict[str, Any], str]] = field(repr=False)
    # Full names of norms' running statistics.  A forward in training writes them, which
    # autograd does not count: backward needs those of the batch.
    statistics: frozenset[str] = field(default=frozenset(), repr=False)
    declared_sparse: frozenset[int] = field(default=frozenset(), repr=False)
    unaveraged: frozenset[int] = field(default=frozenset(), repr=False)
    uncopied: frozenset[int] = field(default=frozenset(), repr=False)

    @classmethod
    def of(cls, module: torch.nn.Module) -> Model:
        """Collect the tensors of ``module``, by the rules of torch's class.

        Names in ``module._ddp_params_and_buffers_to_ignore`` are left out.  As in
        torch, averaged parameters are those that each submodule holds itself; any name
        of one will do, and those of the module itself are then called ``.name``.
        Tensors copied at the start are those that the module lists with all submodules;
        the first name counts, as for the buffers of a step.
        """
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        averaged: dict[int, tuple[str, torch.nn.Parameter]] = {}
        places: dict[int, tuple[dict[str, Any], str]] = {}
        statistics = set()
        listed = list(module.named_parameters())
        for prefix, part in module.named_modules():
            for name, p in torch_groups.own_parameters(part):
                full = f"{prefix}.{name}"
                if full not in ignored:
                    averaged.setdefault(id(p), (full.removeprefix("."), p))
            listed += [
                (f"{prefix}.{name}".removeprefix("."), p)
                for name, p in torch_groups.dtensor_parameters(part)
            ]
            held = _as_dict(part._buffers)
            if isinstance(part, torch_core.NORMS):
                statistics |= {id(held.get(f"running_{of}")) for of in ("mean", "var")}
            for name, buffer in held.items():
                places.setdefault(id(buffer), (held, name))
        copied = {id(p): (name, p) for name, p in listed if name not in ignored}
        buffers = []
        for full, buffer in module.named_buffers():
            if full in ignored:
                continue
            if id(buffer) not in places:
                raise NotImplementedError(
                    f"named_buffers() has '{full}', which no module has registered as "
                    "a buffer: register it, or name it in "
                    "module._ddp_params_and_buffers_to_ignore"
                )
            buffers.append((full, *places[id(buffer)]))
        return cls(
            list(averaged.values())
            + [named for key, named in copied.items() if key not in averaged],
            buffers,
            frozenset(f for f, of, name in buffers if id(of[name]) in statistics),
            _declared_sparse(module),
            unaveraged=frozenset(copied.keys() - averaged.keys()),
            uncopied=frozenset(averaged.keys() - copied.keys()),
        )

    @functools.cached_property
    def trainable(self) -> list[torch.nn.Parameter]:
        """The averaged parameters: those that required a gradient at construction."""
        return [
            p
            for _, p in self.parameters
            if p.requires_grad and id(p) not in self.unaveraged
        ]

    @property
    def sparse(self) -> list[int]:
        """The indices in :attr:`trainable` that are declared sparse."""
        return [
            i for i, p in enumerate(self.trainable) if id(p) in self.declared_sparse
        ]

    def tensors(self, has_buffers: bool = True) -> list[torch.Tensor]:
        """Return the tensors copied at the start, with buffers or without."""
        tensors: list[torch.Tensor] = [
            p for _, p in self.parameters if id(p) not in self.uncopied
        ]
        if has_buffers:
            tensors += [owner[name] for _, owner, name in self.buffers]
        return tensors

    def places(self) -> list[tuple[dict[str, Any], str, bool]]:
        """Return each buffer's dict, its name there, and if writes are uncounted."""
        return [
            (owner, name, full in self.statistics) for full, owner, name in self.buffers
        ]

    def without(self, *, frozen: bool, buffers: bool) -> Model:
        """Return the model without its frozen parameters, or without its buffers."""
        kept = [(n, p) for n, p in self.parameters if p.requires_grad or not frozen]
        return replace(self, parameters=kept, buffers=[] if buffers else self.buffers)

    def check(self) -> None:
        """Raise if this rank's model cannot be wrapped."""
        for name, tensor in self._named_tensors():
            if torch_core.is_lazy(tensor):
                raise RuntimeError(
                    "Modules with uninitialized parameters can't be used with "
                    f"`DistributedDataParallel`: '{name}' has no shape yet. Run a "
                    "dummy forward pass to correctly initialize the modules"
                )
        copied = self.tensors(has_buffers=False)  # torch's class checks these, too
        if not self.trainable or not any(p.requires_grad for p in copied):
            raise RuntimeError(
                f"{NO_GRADIENT} Use the module as it is, or set requires_grad."
            )
        kinds = sorted({p.device.type for _, p in self.parameters})
        if len(kinds) > 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of "
                f"devices, but input module parameters locate in {kinds}."
            )

    def check_travelling(self, has_peers: bool) -> None:
        """Raise ``NotImplementedError`` for a tensor that cannot be sent to peers."""
        for name, tensor in self._named_tensors():
            self._check_device(name, tensor)
            is_moved = tensor.dtype == torch.complex32 and not tensor.requires_grad
            if has_peers and tensor.dtype not in _TYPES and not is_moved:
                raise NotImplementedError(
                    f"'{name}' is of {tensor.dtype}, which paceline cannot send: "
                    "convert it, or name it in "
                    "module._ddp_params_and_buffers_to_ignore"
                )

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        first, parameter = self.parameters[0]
        device = parameter.device
        found = f"'{name}' is a {tensor.layout} tensor on device {tensor.device}"
        if torch_groups.is_dtensor(tensor):
            raise NotImplementedError(
                f"'{name}' is a DTensor: for a module of parallelize_module(), give "
                "device_mesh=, the slice of the mesh for data parallelism; "
                "fully_shard() averages by itself"
            )
        if "FakeTensor" in {kind.__name__ for kind in type(tensor).__mro__}:
            raise NotImplementedError(f"'{name}' is a fake tensor, which has no values")
        is_here = device.type == "cpu" or placement.is_gpu(device)
        if is_here and tensor.layout == torch.strided and tensor.device == device:
            return
        if is_here and device.type != "cpu" and tensor.device != device:
            raise NotImplementedError(
                f"{found}, and '{first}' is on {device}: paceline trains a module on "
                f"one GPU; move it as a whole, as in module.to('{device}'), or name in "
                "module._ddp_params_and_buffers_to_ignore what must not be averaged"
            )
        raise NotImplementedError(
            f"{found}: this version of paceline trains strided tensors, on the CPU or "
            "on one NVIDIA GPU; move the module there first, by .cpu() or "
            ".cuda(), or from device meta by .to_empty(device=...) and "
            "load_state_dict()"
        )

    def check_buffers(self) -> None:
        """Raise ``NotImplementedError`` for a buffer that cannot go with each step."""
        for name, owner, key in self.buffers:
            if not torch_core.has_memory(owner[key]):
                raise NotImplementedError(
                    f"buffer '{name}' wraps other tensors, which paceline cannot send "
                    "with each step: give broadcast_buffers=False"
                )

    def check_supported(self, module: torch.nn.Module) -> None:
        """Raise for a SyncBatchNorm on the CPU, or if torch's class wraps a part."""
        is_on_gpu = placement.is_gpu(self.parameters[0][1].device)
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.modules.SyncBatchNorm) and not is_on_gpu:
                raise ValueError(
                    "SyncBatchNorm layers only work with GPU modules: "
                    f"'{name}' is on the CPU; use BatchNorm"
                )
            if torch_core.is_torch_ddp(part):
                raise ValueError(
                    f"'{name or 'module'}' is wrapped by torch's "
                    f"DistributedDataParallel already: {WRAP_ONCE}"
                )

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        named: list[tuple[str, torch.Tensor]] = list(self.parameters)
        named += [(full, owner[name]) for full, owner, name in self.buffers]
        return named

    # ---- agreement ------------------------------------------------------------------

    def describe(self) -> Description:
        """Return (kind, name, text) of each tensor: all that ranks must agree on."""
        described = [
            ("parameter", name, _describe(p, p.requires_grad) + self._notes_on(p))
            for name, p in self.parameters
        ]
        described += [
            ("buffer", full, _describe(owner[name], None))
            for full, owner, name in self.buffers
        ]
        return described

    def _notes_on(self, parameter: torch.nn.Parameter) -> str:
        notes = {
            ", sparse gradients": self.declared_sparse
            if parameter.requires_grad
            else (),
            ", not averaged": self.unaveraged,
            ", not copied": self.uncopied,
        }
        return "".join(note for note, ids in notes.items() if id(parameter) in ids)

    def digest(self) -> str:
        """Return a hash of :meth:`describe`."""
        return hashlib.sha256(repr(self.describe()).encode()).hexdigest()


def _declared_sparse(module: torch.nn.Module) -> frozenset[int]:
    """Return the ids of the parameters that only sparse embeddings use.

    torch looks at the first module that has the parameter.  Here all such modules must
    agree: a weight tied to an output layer gets dense gradients, which go into buckets.
    """
    sparse: set[int] = set()
    dense: set[int] = set()
    for part in module.modules():
        is_embedding = isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        users = sparse if is_embedding and part.sparse else dense
        users.update(id(p) for p in part.parameters(recurse=False))
    return frozenset(sparse - dense)


class Watch:
    """Notices when a module gains, loses, swaps or converts parts.

    Each forward asks it, so it is cheap.  Modules replace buffers as they run: of
    buffers it watches only the names, and those that are None or have several names.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parts = list(module.modules())
        n_names = collections.Counter(
            id(buffer) for part in parts for buffer in part._buffers.values()
        )
        self._dicts: list[dict[str, Any]] = []
        self._expected: list[dict[str, Any]] = []
        self._noted: list[tuple[Any, Any, Any, bool]] = []
        for part in parts:
            children, own = _as_dict(part._modules), _as_dict(part._parameters)
            buffers = _as_dict(part._buffers)
            self._dicts += [children, own, buffers]
            fixed = {
                name: value if value is None or n_names[id(value)] > 1 else _ANY
                for name, value in buffers.items()
            }
            self._expected += [dict(children), dict(own), fixed]
            self._noted += [
                (p, p.dtype, p.__dict__, p.requires_grad)
                for p in own.values()
                if p is not None
            ]

    def changed(self) -> bool:
        """Tell whether anything differs from construction."""
        differing = _native.differing(self._dicts, self._expected, _ANY)
        return bool(differing) or _native.converted(self._noted)


def _as_dict(mapping: Any) -> dict[str, Any]:
    """Return a module's mapping as a dict, copied if TorchScript has fixed it."""
    return mapping if isinstance(mapping, dict) else dict(mapping.items())


def has_nothing_to_train(module: torch.nn.Module) -> bool:
    """Tell whether no parameter trains, as in a teacher."""
    return not Model.of(module).trainable


def is_stateless_call(module: torch.nn.Module) -> bool:
    """Tell whether ``functional_call`` has swapped the parameters for one call.

    A backward of ``mixed_precision`` swaps in copies, which are no leaves.  If a call
    swapped in parameters, too, nothing tells them from a change of the model.
    """
    return torch_graph.is_functional_call(module) or any(
        value is not None
        and not (isinstance(value, torch.nn.Parameter) and value.is_leaf)
        for part in module.modules()
        for value in part._parameters.values()
    )


def _describe(tensor: torch.Tensor, requires_grad: bool | None) -> str:
    layout = f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    if requires_grad is None:
        return layout
    return layout + (", trainable" if requires_grad else ", frozen")


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of an expanded tensor that has each of its elements once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def copy_model(
    world: _native.RankWorld,
    group: dist.ProcessGroup,
    tensors: list[torch.Tensor],
    root: int = 0,
) -> None:
    """Overwrite every rank's tensors with those of one rank, in place.

    Tensors that wrap others go as with torch's own class: only torch can copy them.
    """
    wrapping = [t.detach() for t in tensors if not torch_core.has_memory(t)]
    if wrapping and world.world_size > 1:
        torch_groups.broadcast(group, wrapping, root)
    tensors = [t for t in tensors if torch_core.has_memory(t)]
    plain = [_each_once(t.detach()) for t in tensors]
    resolved = [t.resolve_conj().resolve_neg() for t in plain]  # a no-op for most
    dense = [t if torch_core.is_dense(t) else t.contiguous() for t in resolved]
    world.broadcast(dense, root)
    if world.rank == root:
        return
    with torch.no_grad():
        for target, source in zip(plain, dense, strict=True):
            if target is not source:
                target.copy_(source)
    torch_core.increment_version(tensors)


def sum_over_ranks(world: _native.RankWorld, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' values; notice at once if a rank fails."""
    total = torch.zeros_like(values)
    for rank in range(world.world_size):
        of_rank = values.clone()
        world.broadcast([of_rank], rank)
        total += of_rank
    return total


def raise_first_difference(models: list[Description]) -> None:
    """Raise, alike on every rank, the first difference between rank 0 and another.

    `models` has each rank's :meth:`Model.describe`.
    """
    for rank, model in enumerate(models):
        counts = [
            sum(kind == "parameter" for kind, _, _ in m) for m in (models[0], model)
        ]
        for i, (mine, other) in enumerate(itertools.zip_longest(models[0], model)):
            if mine != other:
                shown = f"rank 0 has {counts[0]} params, rank {rank} has {counts[1]}"
                if mine and other and _layout_differs(mine, other):  # torch's words
                    shown += (
                        f"; params[{i}] of rank {rank} appears not to match sizes of "
                        "the same param in process 0"
                    )
                raise _native.MismatchError(
                    "DDP expects same model across all ranks, but rank 0 has "
                    f"{_entry_text(mine)} where rank {rank} has {_entry_text(other)} "
                    f"({shown}). "
                    "Build the same model, in the same order, on every rank."
                )


def _layout_differs(mine: tuple[str, str, str], other: tuple[str, str, str]) -> bool:
    """Tell whether two entries are one parameter with different shapes or strides."""
    layouts = [re.findall(r"\(.*?\)", what) for _, _, what in (mine, other)]
    same = mine[0] == "parameter" and mine[:2] == other[:2]
    return same and layouts[0] != layouts[1]


def _entry_text(entry: tuple[str, str, str] | None) -> str:
    if entry is None:
        return "nothing"
    kind, name, what = entry
    return f"{kind} '{name}' ({what})"


class Changes:
    """Notices changes since wrapping of the tensors that ranks synchronise.

    At each forward a watch tells cheaply if nothing has changed at all.  If
    something has, this compares what travels with what was wrapped: a module without
    parameters, for example, concerns its own rank only.  `buffers` are those that
    travel; the reducer reads them in each step.
    """

    def __init__(
        self,
        wrapper: Any,
        model: Model,
        buffers: list[tuple[str, dict[str, Any], str]],
        reducer: _native.Reducer,
    ) -> None:
        # The session, which owns this, has both; it may not keep them alive.
        self._wrapper: Any = weakref.proxy(wrapper)
        self._reducer: _native.Reducer = weakref.proxy(reducer)
        self._trained = {id(p): p for p in model.trainable}  # they may be frozen later
        self._sends_buffers = bool(buffers)
        self._was = self._travelling(model)
        # Keep alive objects that are compared by id, so that no other gets the id.
        self._kept = buffers, [p.__dict__ for p in model.trainable]
        self._watch = Watch(wrapper)
        self.wraps_anew = False  # even unchanged; no rank takes over parameters

    def changed(self) -> bool:
        """Tell whether the model must be wrapped anew."""
        if self.wraps_anew or self._reducer.has_other_buffers:
            return True
        if not self._watch.changed():
            return False
        if self._travelling(Model.of(self._wrapper.module)) != self._was:
            return True
        self._watch = Watch(self._wrapper)
        return False

    def parameters_changed(self) -> bool:
        """Tell whether parameters changed, so that rank 0's are copied."""
        return not self.wraps_anew and (
            self._travelling(Model.of(self._wrapper.module))[0] != self._was[0]
        )

    def _travelling(self, model: Model) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Return the parts of a model that ranks synchronise, of those wrapped."""
        parameters = {
            # When torch swaps two tensors, their __dict__ and hooks go along.
            key: (p.dtype, p.device, id(p.__dict__), key in model.declared_sparse)
            for _, p in model.parameters
            if (key := id(p)) in self._trained or p.requires_grad
        }
        buffers = {full: (id(owner), name) for full, owner, name in model.buffers}
        return parameters, buffers if self._sends_buffers else {}
