"""Checkpoints: written once, whole or not at all, read with either kind of keys."""

from __future__ import annotations

import os
import random
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import TypeVar  # torch depends on it

from paceline._checksum import ChecksumWriter, damage_of
from paceline._files import write_whole

PREFIX = "module."
_RNG = "rng"

Wrapped = TypeVar("Wrapped", bound=torch.nn.Module, default=Any)


def has_prefix(state: Any) -> bool:
    """Tell whether these look like a wrapper's: all keys begin with ``module.``."""
    return (
        isinstance(state, dict)
        and bool(state)
        and all(isinstance(key, str) and key.startswith(PREFIX) for key in state)
    )


def unwrap(module: Any) -> Any:
    """Return the module inside a data-parallel wrapper, or the object itself."""
    if isinstance(
        module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    ):
        return module.module
    return module


def strip_prefix(state: dict[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict without a wrapper's prefix, metadata included."""
    stripped = OrderedDict(
        (key.removeprefix(PREFIX), value) for key, value in state.items()
    )
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # "" is the wrapper's own entry; that of the module inside takes its place.
        stripped._metadata = OrderedDict(  # type: ignore[attr-defined]
            ("" if key == "module" else key.removeprefix(PREFIX), value)
            for key, value in metadata.items()
            if key == "module" or key.startswith(PREFIX)
        )
    return stripped


def is_of_bare(module: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Tell whether keys are those of the module itself, and not of its wrapper."""
    own = set(module.state_dict())
    n_bare = len(own.intersection(state))
    return n_bare > sum(PREFIX + key in state for key in own)


class LoadsEither(torch.nn.Module, Generic[Wrapped]):
    """A wrapper of a module that loads either kind of keys."""

    module: Wrapped

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Load a state dict whose keys have the prefix ``module.``, or have it not.

        Parameters
        ----------
        state_dict : mapping of str to tensor
            Of this wrapper, or of the bare module.
        *args, **kwargs
            As for ``torch.nn.Module.load_state_dict``.

        Returns
        -------
        NamedTuple
            Missing and unexpected keys.
        """
        if is_of_bare(self.module, state_dict):
            return self.module.load_state_dict(state_dict, *args, **kwargs)
        return super().load_state_dict(state_dict, *args, **kwargs)


def _keys_for(bare: torch.nn.Module, state: Any) -> Any:
    """Return a state dict with the keys that fit a bare model best."""
    is_wrapped = has_prefix(state) and not is_of_bare(bare, state)
    return strip_prefix(state) if is_wrapped else state


def _plain(obj: Any, is_stripped: bool) -> Any:
    """Return the state dict of an object, or a container with those of its objects."""
    kind = type(obj)
    if callable(getattr(obj, "state_dict", None)) and not isinstance(obj, type):
        # A bare model may have a part called `module`: those names are its own.
        is_stripped = is_stripped and unwrap(obj) is not obj
        obj = obj.state_dict()
        return strip_prefix(obj) if is_stripped else obj
    if is_stripped and has_prefix(obj):
        return strip_prefix(obj)
    if kind in (dict, OrderedDict) and not hasattr(obj, "_metadata"):
        return kind((key, _plain(value, is_stripped)) for key, value in obj.items())
    if kind in (list, tuple):
        return kind(_plain(value, is_stripped) for value in obj)
    return obj


def _put_back(name: str, target: Any, state: Any) -> None:
    """Load a state into an object, or a list of states into a list of objects."""
    if isinstance(target, torch.nn.Module):
        bare = unwrap(target)
        bare.load_state_dict(_keys_for(bare, state))
    elif callable(getattr(target, "load_state_dict", None)):
        target.load_state_dict(state)
    elif isinstance(target, list | tuple) and len(target) == len(state):
        for i, one in enumerate(target):
            _put_back(f"{name}[{i}]", one, state[i])
    else:
        raise TypeError(
            f"{name}={type(target).__name__} does not fit the file: give an object "
            "with load_state_dict(); load() returns what has none"
        )


# ---- random states ------------------------------------------------------------------


def _rank_and_ranks(process_group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def _random_states(process_group: dist.ProcessGroup | None) -> list[Any]:
    """Return the random states of all ranks, in plain containers, on rank 0."""
    rank, n_ranks = _rank_and_ranks(process_group)
    of_numpy: Any = np.random.get_state(legacy=False)
    for name, value in of_numpy["state"].items():
        of_numpy["state"][name] = value.tolist() if hasattr(value, "tolist") else value
    mine = {"torch": torch.get_rng_state(), "cuda": [], "numpy": of_numpy}
    mine["python"] = random.getstate()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        mine["cuda"] = torch.cuda.get_rng_state_all()
        if n_ranks > 1:  # a rank's GPU may have another number at the restart
            mine["cuda"] = [torch.cuda.get_rng_state()]
    if n_ranks <= 1:
        return [mine]
    states: list[Any] = [None] * n_ranks
    first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    dist.gather_object(mine, states if rank == 0 else None, first, process_group)
    return states


def _set_random_states(path: Any, of_ranks: list[Any]) -> None:
    rank, n_ranks = _rank_and_ranks()
    if n_ranks != len(of_ranks):
        warnings.warn(
            f"{path} has the random states of {len(of_ranks)} rank(s), and {n_ranks} "
            "load it: random numbers differ from those of an uninterrupted training",
            stacklevel=3,
        )
    if rank >= len(of_ranks):
        return
    states = of_ranks[rank]
    torch.set_rng_state(states["torch"].cpu())
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if torch.cuda.is_available():
        first = torch.cuda.current_device() if n_ranks > 1 else 0
        here = range(first, torch.cuda.device_count())
        for device, state in zip(here, states["cuda"], strict=False):
            torch.cuda.set_rng_state(state.cpu(), device)


# ---- save and load ------------------------------------------------------------------


def save(
    obj: Any,
    path: str | os.PathLike[str],
    *,
    prefix: Literal["keep", "strip"] = "keep",
    rng: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a training, or a part of it, from rank 0 alone, whole or not at all.

    The file appears under its name only once it is complete and on the disk: a reader
    never sees half of it, and a crash leaves the old file (and perhaps a hidden
    ``.part`` beside it, which the next save to that place removes).  The other ranks
    write nothing and return at once; put a ``torch.distributed.barrier()`` behind where
    they read the file next.

    Parameters
    ----------
    obj : object
        An object with a ``state_dict()`` is saved as that: a model, an optimizer, a
        scheduler.  In a dict, list or tuple this holds for each entry.  Anything else
        is saved as it is, with a warning if :func:`load` refuses it by default.
    path : path-like
        Where to; its folder must exist, and this process may write there.  Of a link
        the target is written, and a file that is replaced keeps its mode.
    prefix : {"keep", "strip"}, default "keep"
        Whether the keys of a wrapper's parameters keep ``module.`` in front; stripped,
        the bare model loads them.
    rng : bool, default False
        Add the random states of torch, NumPy, Python and the GPUs to the dict `obj`,
        under the key ``"rng"``.  Each rank has its own: every rank must call `save`.
    process_group : torch.distributed.ProcessGroup, optional
        Whose rank 0 writes: the default group's, where there is one.

    Raises
    ------
    ValueError
        If ``prefix`` is anything else, or `rng` is set and `obj` is not a dict without
        the key ``"rng"``.
    OSError
        If the file cannot be written: no room, no permission, no folder.

    Examples
    --------
    >>> import tempfile, torch, paceline
    >>> path = tempfile.mkdtemp() + "/training.pt"
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> paceline.save({"model": model, "optimizer": optimizer, "epoch": 3}, path)
    >>> paceline.load(path, model=model, optimizer=optimizer)
    {'epoch': 3}

    Notes
    -----
    The format is ``torch.save``'s, with a checksum in the comment of the zip archive:
    ``torch.load`` reads it too.
    """
    if prefix not in ("keep", "strip"):
        raise ValueError(f"prefix is {prefix!r}: give 'keep' or 'strip'")
    if rng:
        if not isinstance(obj, dict) or _RNG in obj:
            raise ValueError(f"rng=True needs a dict without the key {_RNG!r}")
        obj = {**obj, _RNG: _random_states(process_group)}
    if _rank_and_ranks(process_group)[0] != 0:
        return
    state = _plain(obj, prefix == "strip")

    def write(file: BinaryIO) -> None:
        summed: Any = ChecksumWriter(file)
        torch.save(state, summed)
        summed.finish()

    write_whole(Path(path), write)
    # What load() would refuse is said here, not at the restart.
    find = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
    if find and os.path.isfile(path) and (refused := find(str(path))):
        warnings.warn(
            f"{path} holds {', '.join(sorted(refused))}: load() reads it with "
            "weights_only=False alone; save a state_dict() or plain values instead",
            stacklevel=2,
        )


def load(
    path: str | os.PathLike[str],
    module: torch.nn.Module | None = None,
    *,
    map_location: Any = None,
    weights_only: bool = True,
    rng: bool = False,
    **objects: Any,
) -> Any:
    """Read what :func:`save` or ``torch.save`` has written, with either kind of keys.

    Parameters
    ----------
    path : path-like
        The file.
    module : torch.nn.Module, optional
        A wrapper or a bare model, whose parameters are set to those of the file.
    map_location : optional
        As for ``torch.load``; with `objects` the default is ``"cpu"``, from where each
        object takes its state to its own device.
    weights_only : bool, default True
        As for ``torch.load``: refuse anything but tensors and plain containers.
    rng : bool, default False
        Set the random states to those of this rank in the file.  A rank without any
        keeps its own; another number of ranks is a warning.
    **objects
        By the key that it was saved under, each object (or list of them) whose
        ``load_state_dict()`` is to be given its state.

    Returns
    -------
    object
        What the file holds; a state dict comes without the prefix.  With `objects` or
        `rng`: the dict without what was put back.

    Raises
    ------
    RuntimeError
        If the file is damaged; or if the parameters are not those of the model, with
        torch's list of them: those that fit, and optimizers, are loaded then.
    ValueError
        If the file has no entry for one of `objects`, or its optimizer has other
        parameters; then none is changed.

    Examples
    --------
    >>> import tempfile, torch, paceline
    >>> path = tempfile.mkdtemp() + "/model.pt"
    >>> model = torch.nn.Linear(2, 1)
    >>> paceline.save(model, path)
    >>> _ = paceline.load(path, model)
    """
    if module is not None and (objects or rng):
        raise ValueError("name the model as the others: load(path, model=model, ...)")
    is_path = isinstance(path, str | os.PathLike)
    if is_path and (damage := damage_of(path)) is not None:
        raise RuntimeError(
            f"{os.fspath(path)} is damaged: {damage}. Load an earlier checkpoint, or "
            "remove this one and begin anew."
        )
    if objects and map_location is None:
        map_location = "cpu"
    state = torch.load(path, map_location=map_location, weights_only=weights_only)
    parts = state if isinstance(state, dict) else {}
    if objects or rng:
        wanted = [*objects, *([_RNG] if rng else [])]
        for name in wanted:
            if name not in parts:
                raise ValueError(f"{path} has no {name!r}: it holds {list(parts)}")
        # An optimizer looks whether all fits before it takes anything.
        is_other = {
            n: not isinstance(objects[n], torch.optim.Optimizer) for n in objects
        }
        for name in sorted(objects, key=is_other.__getitem__):
            _put_back(name, objects[name], state[name])
        if rng:
            _set_random_states(path, state[_RNG])
        return {name: parts[name] for name in parts if name not in wanted}
    if module is None:
        return strip_prefix(state) if has_prefix(state) else state
    bare = unwrap(module)
    state = _keys_for(bare, state)
    nested = [name for name in parts if isinstance(parts[name], dict)]
    if nested and bare.state_dict().keys().isdisjoint(state):
        raise RuntimeError(
            f"{path} holds {list(parts)}: name one, as in load(path, model=model), or "
            f"take load(path)[{nested[0]!r}]"
        )
    bare.load_state_dict(state)
    return state
