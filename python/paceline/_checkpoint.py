"""Checkpoints: rank 0 writes a whole file or none; keys load with any prefix."""

from __future__ import annotations

import logging
import os
import random
import reprlib
import struct
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, Generic, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import TypeVar  # torch depends on it

from paceline import _messages
from paceline._checksum import damage_of, save_summed
from paceline._compat import torch_core, torch_groups
from paceline._files import write_whole

PREFIX = "module."
_PARTS = (PREFIX, "_orig_mod.")
_RECORD = "_paceline_prefix"  # of a state dict in a file: the prefix of its keys
_RNG = "rng"
_log = logging.getLogger("paceline")

Wrapped = TypeVar("Wrapped", bound=torch.nn.Module, default=Any)


def inside(obj: Any) -> tuple[Any, str]:
    """Return the module inside all wrappers, and the prefix that its keys have."""
    prefix = ""
    while name := torch_core.name_inside(obj):
        obj, prefix = getattr(obj, name), f"{prefix}{name}."
    return obj, prefix


def _prefixes(state: Any) -> list[str]:
    """Return what all keys may have from wrappers: "", and ever longer prefixes."""
    keys = list(state) if isinstance(state, Mapping) else []
    if not keys or not all(isinstance(key, str) for key in keys):
        return [""]
    words = takewhile(_PARTS.__contains__, (f"{w}." for w in keys[0].split(".")))
    found = accumulate(words, initial="")
    return [p for p in found if all(key.startswith(p) for key in keys)]


def _bare_keys(state: Any) -> Any:
    """Return a state dict without its prefix, by the file's record or by the keys."""
    # Without a record: the module may have a child called `module`, so each one once.
    fits = _prefixes(state)
    once = [p for p in fits if max(map(p.count, _PARTS)) < 2]
    record = getattr(state, _RECORD, None)  # other keys may have been set since
    return strip(state, record if record in fits else once[-1])


def strip(state: Any, prefix: str) -> Any:
    """Return a state dict without a prefix of its keys, in its metadata too."""
    if not prefix:
        return state
    stripped = OrderedDict(
        (key.removeprefix(prefix), value) for key, value in state.items()
    )
    setattr(stripped, _RECORD, "")
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # "" is the wrapper's entry; the entry of the wrapped module replaces it.
        stripped._metadata = OrderedDict(  # type: ignore[attr-defined]
            (f"{key}.".removeprefix(prefix)[:-1], value)
            for key, value in metadata.items()
            if f"{key}.".startswith(prefix)
        )
    return stripped


def is_of_bare(module: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Tell whether keys fit the module itself better than its wrapper."""
    own = set(module.state_dict())
    n_bare = len(own.intersection(state))
    return n_bare > sum(PREFIX + key in state for key in own)


class LoadsEither(torch.nn.Module, Generic[Wrapped]):
    """Base of both wrappers: skips torch's constructor, and loads keys of either form.

    A subclass that skips our constructor calls this one, where torch's class would call
    ``torch.nn.Module``'s.
    """

    module: Wrapped
    _is_ours = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch_core.attach()
        torchs: Any = next(k for k in type(self).__mro__ if k in torch_core.WRAPPERS)
        super(torchs, self).__init__(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Load a state dict whose keys may have the prefix ``module.``.

        Parameters
        ----------
        state_dict : mapping of str to tensor
            The state of this wrapper or of the bare module.
        *args, **kwargs
            As for ``torch.nn.Module.load_state_dict``.

        Returns
        -------
        NamedTuple
            The missing and the unexpected keys.
        """
        module = self._modules.get("module")  # or a subclass has none
        if module is not None and is_of_bare(module, state_dict):
            return module.load_state_dict(state_dict, *args, **kwargs)
        return super().load_state_dict(state_dict, *args, **kwargs)


def _keys_for(bare: torch.nn.Module, state: Any) -> Any:
    """Return a state dict with the keys that a bare model loads."""
    fits = _prefixes(state)
    if fits == [""]:
        return state
    own = set(bare.state_dict())
    # Of prefixes that fit alike, max() returns the first, which is the shortest.
    best = max(fits, key=lambda p: sum(key.removeprefix(p) in own for key in state))
    return strip(state, best)


def _plain(obj: Any, is_stripped: bool) -> Any:
    """Return an object's state dict; in a container, do so for each entry."""
    kind = type(obj)
    if callable(getattr(obj, "state_dict", None)) and not isinstance(obj, type):
        state, prefix = obj.state_dict(), inside(obj)[1]
        if prefix not in _prefixes(state):
            prefix = ""  # a subclass of a wrapper may return other keys
        state = strip(state, prefix) if is_stripped else state
        if isinstance(obj, torch.nn.Module) and type(state) is OrderedDict:
            setattr(state, _RECORD, "" if is_stripped else prefix)
        return state
    if is_stripped and isinstance(obj, dict) and len(_prefixes(obj)) > 1:
        return _bare_keys(obj)
    if kind in (dict, OrderedDict) and not hasattr(obj, "_metadata"):
        return kind((key, _plain(value, is_stripped)) for key, value in obj.items())
    if kind in (list, tuple):
        return kind(_plain(value, is_stripped) for value in obj)
    return obj


def _pairs(name: str, target: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield an object, or those in a list, with their states; raise if any misfits."""
    is_optimizer = isinstance(target, torch.optim.Optimizer)
    loads = callable(getattr(target, "load_state_dict", None))
    is_list = isinstance(target, list | tuple) and isinstance(state, list | tuple)
    if not loads and is_list and len(target) == len(state):
        for i, one in enumerate(target):
            yield from _pairs(f"{name}[{i}]", one, state[i])
        return
    has_groups = isinstance(state, dict) and "param_groups" in state
    if not loads or (is_optimizer and not has_groups):
        raise TypeError(
            f"{name}={type(target).__name__} does not fit the file's "
            f"{type(state).__name__}: give an object with load_state_dict(), a list of "
            "as many, or omit it: load() then returns the entry"
        )
    if is_optimizer:
        groups = target.param_groups, state["param_groups"]
        here, there = ([len(group["params"]) for group in side] for side in groups)
        if here != there:
            raise ValueError(
                f"{name} does not fit the file: its parameter groups have {here} "
                f"parameters, those in the file {there}"
            )
    yield target, state


def _put_back(target: Any, state: Any) -> None:
    if isinstance(target, torch.nn.Module):
        target = inside(target)[0]
        state = _keys_for(target, state)
    target.load_state_dict(state)


# ---- random states ------------------------------------------------------------------


def _random_states(process_group: dist.ProcessGroup | None) -> list[Any]:
    """Return the random states of all ranks in plain containers; used on rank 0."""
    rank, n_ranks = torch_groups.rank_and_size(process_group)
    cuda: list[Tensor] = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all()
        if n_ranks > 1:  # a rank's GPU may have a different number after a restart
            cuda = [torch.cuda.get_rng_state()]
    # Philox has arrays in two places.
    of_numpy = _lists(np.random.get_state(legacy=False))
    mine = _RandomState(torch.get_rng_state(), cuda, of_numpy, random.getstate())
    if n_ranks <= 1:
        return [vars(mine)]
    message = _messages.pack(("save(rng=True)", mine))
    told = _messages.exchange("save(rng=True)", message, _RandomState, process_group)
    return [vars(state) for state in told] if rank == 0 else []


@dataclass(frozen=True)
class _RandomState:
    """The random states of a rank, as sent to rank 0."""

    torch: Tensor
    cuda: list[Tensor]
    numpy: dict[str, Any]
    python: tuple[int, tuple[int, ...], float | None]


def _lists(value: Any) -> Any:
    """Return a dict with lists in place of arrays."""
    if isinstance(value, dict):
        return {name: _lists(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _takes(name: str, state: Any) -> bool:
    """Set a state in a copy of a generator; tell whether the generator can use it."""
    if name == "cuda":  # a seed and an offset for each GPU
        pairs = [struct.unpack("<QQ", one.cpu().numpy()) for one in state]
        return type(state) is list and all(offset % 4 == 0 for _, offset in pairs)
    if name == "torch":
        torch.Generator().set_state(state.cpu())
        # If these two do not belong together, torch reads other memory.
        _, left, _, used = struct.unpack_from("<QiiQ", state.cpu().numpy())
        return left + used == 625 or (left, used) == (1, 0)
    if name == "python":
        copy = random.Random()
        copy.setstate(state)
        return copy.getstate() == state and isinstance(state[2], float | None)
    current = getattr(np.random, "get_bit_generator", np.random.MT19937)()
    of_numpy: Any = np.random.RandomState(type(current)())
    of_numpy.set_state(state)
    # NumPy does not check these; it reads other memory if a position is wrong.
    most = {"pos": 624, "buffer_pos": 4, "has_gauss": 1, "has_uint32": 1}
    numbers = {**state, **state["state"]}
    are_right = all(0 <= numbers.get(key, 0) <= most[key] for key in most)
    return are_right and _lists(of_numpy.get_state(legacy=False)) == state


def _check_random_states(path: Any, of_ranks: Any) -> None:
    """Raise ValueError unless the states of all ranks in a file can be set."""
    for rank, states in enumerate(of_ranks if type(of_ranks) is list else [of_ranks]):
        for name in ("torch", "cuda", "numpy", "python"):
            state = states.get(name) if type(states) is dict else states
            is_right, why = False, None
            try:
                is_right = _takes(name, state)
            except Exception as error:  # the file may hold anything
                why = error
            if not is_right:
                raise ValueError(
                    f"{path}: {_RNG}[{rank}][{name!r}] is {reprlib.repr(state)}, which "
                    "the random number generator here cannot use: omit rng=True"
                ) from why


def _set_random_states(path: Any, of_ranks: list[Any]) -> None:
    rank, n_ranks = torch_groups.rank_and_size()
    if n_ranks != len(of_ranks):
        warnings.warn(
            f"{path} has the random states of {len(of_ranks)} rank(s), and {n_ranks} "
            "load it: random numbers will differ from those of an uninterrupted run",
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
    """Save models, optimizers and other state from rank 0.

    The file gets its name only when it is complete and on the disk.  A reader never
    sees half of it.  A crash leaves the old file, and may leave a hidden ``.part`` file
    beside it, which the same user's next save to the same path removes.  Whatever other
    users put into the folder, a save does not wait for it or write to it.  The other
    ranks write nothing and return at once: call ``torch.distributed.barrier()`` before
    they read the file.

    Parameters
    ----------
    obj : object
        If it has a ``state_dict()``, like a model, an optimizer or a scheduler, that is
        saved.  A dict, list or tuple is saved in this way entry by entry.  Anything
        else is saved as it is, with a warning if :func:`load` refuses it by default.
    path : path-like
        The file to write.  Its folder must exist and be writable.  If it is a link, its
        target is written, if the kernel lets this user follow the link.  A file that is
        replaced keeps its permissions.  A pipe must have a reader.
    prefix : {"keep", "strip"}, default "keep"
        Whether the keys of a wrapper's parameters keep the prefix: ``module.``, or
        ``_orig_mod.`` of ``torch.compile``.  The bare model loads stripped keys.
    rng : bool, default False
        Add the random states of torch, NumPy, Python and the GPUs to the dict `obj`,
        under the key ``"rng"``.  Each rank has its own: every rank must call `save`.
    process_group : torch.distributed.ProcessGroup, optional
        The group whose rank 0 writes; by default torch's default group.

    Raises
    ------
    ValueError
        If `prefix` is another word; if `rng` is set and `obj` is not a dict or has the
        key ``"rng"`` already; in a rank (by ``WORLD_SIZE``) without a process group.
    OSError
        If the file cannot be written: no space, no permission, no folder.
    paceline.PeerError, paceline.PeerTimeoutError
        With `rng`, if a rank ends or does not call `save` within the group's timeout.

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
    The format is that of ``torch.save``, with a checksum in the comment of the zip
    archive.  ``torch.load`` reads it too.  :func:`load` refuses the file if any byte
    has changed, or if the checksum was removed.
    """
    if prefix not in ("keep", "strip"):
        raise ValueError(f"prefix is {prefix!r}: give 'keep' or 'strip'")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is a {type(path).__name__}: give save(obj, path)")
    if rng:
        if not isinstance(obj, dict) or _RNG in obj:
            raise ValueError(f"rng=True needs a dict without the key {_RNG!r}")
        obj = {**obj, _RNG: _random_states(process_group)}
    if torch_groups.rank_and_size(process_group)[0] != 0:
        return
    state = _plain(obj, prefix == "strip")
    write_whole(Path(path), lambda file: save_summed(state, file))
    # Warn now, not at the restart, if load() would refuse the file.
    find = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
    if find and os.path.isfile(path) and (refused := find(str(path))):
        warnings.warn(
            f"{path} holds {', '.join(sorted(refused))}: load() reads it only with "
            "weights_only=False; save a state_dict() or plain values instead",
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
    """Read a file of :func:`save` or ``torch.save``, with any prefix of keys.

    Files of ``torch.save``, and file objects, have no checksum that is compared: their
    content may have changed.  Each such load logs this for the logger ``"paceline"``,
    at the level INFO.

    Parameters
    ----------
    path : path-like
        The file to read.
    module : torch.nn.Module, optional
        A wrapper or a bare model to load the state dict in the file into.
    map_location : optional
        As for ``torch.load``.  With `objects` the default is ``"cpu"``: each object
        copies its state to its own device.
    weights_only : bool, default True
        As for ``torch.load``: refuse anything but tensors and plain containers.
    rng : bool, default False
        Restore this rank's random states from the file.  A rank without an entry in the
        file keeps its own.  If the number of ranks has changed, warn.
    **objects
        Objects with ``load_state_dict()``, or lists of them, each under the key that it
        was saved under.  Each one loads its entry of the file.

    Returns
    -------
    object
        The content of the file; a state dict comes without the prefix that :func:`save`
        recorded, else without ``module.`` and ``_orig_mod.``.  With `module`,
        the state dict that it loaded.  With `objects` or `rng`, the other entries.

    Raises
    ------
    RuntimeError
        If the file is damaged.  Also if its parameters do not match the model, with
        torch's list of differences; parameters that match, and optimizers, are loaded.
    ValueError
        If the file has no entry for one of `objects`, if an optimizer has other numbers
        of parameters than its entry, or if a rank's random states cannot be restored.
        Nothing is changed then.

    Examples
    --------
    >>> import tempfile, torch, paceline
    >>> path = tempfile.mkdtemp() + "/model.pt"
    >>> model = torch.nn.Linear(2, 1)
    >>> paceline.save(model, path)
    >>> _ = paceline.load(path, model)
    """
    if module is not None and (objects or rng):
        raise ValueError("name the model by its key: load(path, model=model, ...)")
    is_path = isinstance(path, str | os.PathLike)
    damage = damage_of(path) if is_path else ""
    if damage:
        raise RuntimeError(
            f"{os.fspath(path)} is damaged: {damage}. Load an earlier checkpoint, or "
            "delete this one and start over."
        )
    if damage is not None:
        _log.info("%s has no checksum: torch may load changed bytes as they are", path)
    if objects and map_location is None:
        map_location = "cpu"
    state = torch.load(path, map_location=map_location, weights_only=weights_only)
    parts = state if isinstance(state, dict) else {}
    if objects or rng:
        wanted = [*objects, *([_RNG] if rng else [])]
        for name in wanted:
            if name not in parts:
                raise ValueError(f"{path} has no {name!r}: it holds {list(parts)}")
        if rng:
            torch_groups.rank_and_size()  # raises in a rank without a group
            _check_random_states(path, state[_RNG])
        pairs = [pair for n in objects for pair in _pairs(n, objects[n], state[n])]
        # Optimizers first: they are loaded even if a model then raises.
        pairs.sort(key=lambda pair: not isinstance(pair[0], torch.optim.Optimizer))
        for target, its in pairs:
            _put_back(target, its)
        if rng:
            _set_random_states(path, state[_RNG])
        return {name: parts[name] for name in parts if name not in wanted}
    if module is None:
        return _bare_keys(state)
    bare = inside(module)[0]
    state = _keys_for(bare, state)
    nested = [name for name in parts if isinstance(parts[name], dict)]
    if nested and bare.state_dict().keys().isdisjoint(state):
        raise RuntimeError(
            f"{path} holds {list(parts)}: name one, as in load(path, model=model), or "
            f"use load(path)[{nested[0]!r}]"
        )
    bare.load_state_dict(state)
    return state
