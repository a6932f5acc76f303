"""Checkpoints: written once, whole or not at all, read with either kind of keys."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from paceline._files import write_whole

PREFIX = "module."


def has_prefix(state: Any) -> bool:
    """Tell whether these look like a wrapper's: all keys begin with ``module.``."""
    return (
        isinstance(state, dict)
        and bool(state)
        and all(isinstance(key, str) and key.startswith(PREFIX) for key in state)
    )


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a data-parallel wrapper, or the module itself."""
    if isinstance(
        module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    ):
        bare: torch.nn.Module = module.module
        return bare
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


class LoadsEither(torch.nn.Module):
    """A wrapper of a module that loads either kind of keys."""

    module: Any

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


def _is_writer(process_group: dist.ProcessGroup | None) -> bool:
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return True
    return dist.get_rank(process_group) == 0


def save(
    obj: Any,
    path: str | os.PathLike[str],
    *,
    prefix: Literal["keep", "strip"] = "keep",
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model, or any object, from rank 0 alone, whole or not at all.

    The file appears under its name only once it is complete: a reader never sees half
    of it, and a crash leaves the old file (and perhaps a hidden ``.part`` beside it,
    which the next save to that place removes).  The other ranks return at once; put a
    ``torch.distributed.barrier()`` behind where they read the file next.

    Parameters
    ----------
    obj : torch.nn.Module or object
        A module is saved as its ``state_dict()``, anything else as it is.
    path : path-like
        Where to; its folder must exist, and this process may write there.  Of a link
        the target is written, and a file that is replaced keeps its mode.
    prefix : {"keep", "strip"}, default "keep"
        Whether the keys of a wrapper's parameters keep ``module.`` in front; stripped,
        the bare model loads them.  State dicts inside a dict keep them.
    process_group : torch.distributed.ProcessGroup, optional
        Whose rank 0 writes: the default group's, where there is one.

    Raises
    ------
    ValueError
        If ``prefix`` is anything else.
    OSError
        If the file cannot be written: no room, no permission, no folder.

    Notes
    -----
    The format is ``torch.save``'s: ``torch.load`` reads it too.

    Examples
    --------
    >>> import tempfile, torch, paceline
    >>> path = tempfile.mkdtemp() + "/model.pt"
    >>> paceline.save(torch.nn.Linear(2, 1), path)
    >>> sorted(paceline.load(path))
    ['bias', 'weight']
    """
    if prefix not in ("keep", "strip"):
        raise ValueError(f"prefix is {prefix!r}: give 'keep' or 'strip'")
    if not _is_writer(process_group):
        return
    is_module = isinstance(obj, torch.nn.Module)
    state = obj.state_dict() if is_module else obj
    # A bare model may have a part called `module`: those names are its own.
    is_wrapped = not is_module or unwrap(obj) is not obj
    if prefix == "strip" and is_wrapped and has_prefix(state):
        state = strip_prefix(state)
    write_whole(Path(path), lambda file: torch.save(state, file))


def load(
    path: str | os.PathLike[str],
    module: torch.nn.Module | None = None,
    *,
    map_location: Any = None,
    weights_only: bool = True,
) -> Any:
    """Read what :func:`save` or ``torch.save`` has written, with either kind of keys.

    Parameters
    ----------
    path : path-like
        The file.
    module : torch.nn.Module, optional
        A wrapper or a bare model, whose parameters are set to those of the file.
    map_location : optional
        As for ``torch.load``.
    weights_only : bool, default True
        As for ``torch.load``: refuse anything but tensors and plain containers.

    Returns
    -------
    object
        What the file holds; a state dict comes without the prefix.

    Raises
    ------
    RuntimeError
        If the parameters are not those of ``module``, with torch's list of them.

    Examples
    --------
    >>> import tempfile, torch, paceline
    >>> path = tempfile.mkdtemp() + "/model.pt"
    >>> model = torch.nn.Linear(2, 1)
    >>> paceline.save(model, path)
    >>> _ = paceline.load(path, model)
    """
    state = torch.load(path, map_location=map_location, weights_only=weights_only)
    bare = unwrap(module) if module is not None else None
    own = set(bare.state_dict()) if bare is not None else set()
    if has_prefix(state) and own.isdisjoint(state):
        state = strip_prefix(state)
    if bare is not None:
        bare.load_state_dict(state)
    return state
