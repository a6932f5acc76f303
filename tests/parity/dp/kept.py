"""Checks that kept replicas equal new ones.

    with as_new() as n_compared:
        ...  # each forward on GPUs compares all that its replicas have

A kept replica must have the same names in the same order, the same tensors, and
replicas of the same parts: anything else is missing, or left from an earlier forward.
"""

import contextlib
import weakref
from functools import partial
from types import MethodType

import torch
from paceline._dp import replicate
from paceline._dp.shells import Shells
from torch.nn import Module


@contextlib.contextmanager
def as_new():
    """Compare in each forward inside the context; yield a list, one entry a replica."""
    compared, original = [], Shells.replicas

    def replicas(self, parts, entries, tensors, flat, bring):
        made = original(self, parts, entries, tensors, flat, bring)
        for root, own, way in zip(made or (), flat, bring, strict=False):
            copies = dict(zip(map(id, tensors), own, strict=True))
            anew = replicate.replica_of(parts, entries.dicts(), copies, way)
            compare(root, anew)
            compared.append(type(root))
        return made

    Shells.replicas = replicas
    try:
        yield compared
    finally:
        Shells.replicas = original


def compare(root, anew):
    """Check a replica against a new one with the same tensors."""
    kept, new = replicate.parts_of(root), replicate.parts_of(anew)
    stand_in = {id(b): a for a, b in zip(kept, new, strict=True)}
    for part, fresh in zip(kept, new, strict=True):
        assert type(part) is type(fresh)
        assert list(part.__dict__) == list(fresh.__dict__), type(part)
        for name, value in part.__dict__.items():
            where = f"{type(part).__name__}.{name}"
            same(value, fresh.__dict__[name], stand_in, where)


def same(kept, new, stand_in, where):
    """Check a value: the same object, or a replica of the same."""
    if kept is new:
        return
    assert type(kept) is type(new), where
    if isinstance(new, Module):
        assert kept is stand_in.get(id(new)), where
    elif isinstance(new, torch.Tensor):
        assert kept.device == new.device, where
        assert torch.equal(kept, new), where
    elif isinstance(new, dict):
        assert list(kept) == list(new), where
        for key, value in new.items():
            same(kept[key], value, stand_in, f"{where}[{key!r}]")
    elif isinstance(new, (list, tuple)):
        assert len(kept) == len(new), where
        for one, other in zip(kept, new, strict=True):
            same(one, other, stand_in, where)
    elif isinstance(new, MethodType):
        assert kept.__func__ is new.__func__, where
        same(kept.__self__, new.__self__, stand_in, where)
    elif isinstance(new, partial):
        same(kept.func, new.func, stand_in, where)
        same(kept.args, new.args, stand_in, where)
        same(kept.keywords, new.keywords, stand_in, where)
    elif isinstance(new, weakref.ref):
        same(kept(), new(), stand_in, where)
    else:
        raise AssertionError(f"{where} is {kept!r}, and anew {new!r}")
