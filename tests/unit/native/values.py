"""Containers as models take and return them, and comparisons of values."""

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    scale: float = 2.0
    made: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        object.__setattr__(self, "made", self.x + 1)


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x", "y")
    x: Any
    y: Any


@dataclasses.dataclass
class Wanting:
    """Its __init__ needs an argument that is not a field, and counts its calls."""

    x: Any
    seed: dataclasses.InitVar[int]
    n_made = 0

    def __post_init__(self, seed):
        type(self).n_made += 1


class Odd(list):
    """It is never made again: `__new__` makes something else."""

    def __new__(cls, *_):
        return []

    @classmethod
    def of(cls, *items):
        value = list.__new__(cls)
        value.extend(items)
        return value


class Output(OrderedDict):
    """Like the base of Hugging Face's model outputs, reduced to what tests need."""

    def __init_subclass__(cls):
        _pytree.register_pytree_node(
            cls,
            lambda output: (list(output.values()), list(output.keys())),
            lambda values, keys: cls(**dict(zip(keys, values, strict=True))),
        )

    def __post_init__(self):
        fields = dataclasses.fields(self)
        first = getattr(self, fields[0].name)
        others = [getattr(self, field.name) for field in fields[1:]]
        if all(other is None for other in others) and isinstance(first, tuple):
            for name, value in first:  # pairs, as in the original
                setattr(self, name, value)
                self[name] = value
            return
        for field in fields:
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self):
        return tuple(self[key] for key in self.keys())


@dataclasses.dataclass
class Classified(Output):
    loss: Any = None
    logits: Any = None
    hidden_states: Any = None


class Noted(defaultdict):
    """Its note is in a slot; the default of its base is in C."""

    __slots__ = ("note",)


class Box:
    """A type in torch's registry of pytrees."""

    def __init__(self, inside, label):
        self.inside = inside
        self.label = label


def flatten_box(box):
    return [box.inside], box.label


def make_box(children, label):
    return Box(children[0], label)


_pytree.register_pytree_node(Box, flatten_box, make_box)


class Attributed(dict):
    """A dict whose keys are its attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


def rows(n, *rest, start=0):
    """Return a tensor of small integers, all different."""
    size = n * int(np.prod(rest))
    return torch.arange(start, start + size, dtype=torch.float32).reshape(n, *rest)


def same(left, right):
    """Tell whether two values have equal types, nesting and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    for name in ("note", "default_factory"):
        if getattr(left, name, None) != getattr(right, name, None):
            return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return all(same(getattr(left, n), getattr(right, n)) for n in names)
    if hasattr(left, "__dict__"):
        return same(left.__dict__, right.__dict__)
    return left == right


def chunk(scattered, k):
    """Return (args, kwargs) of replica k."""
    tree, _, leaves = scattered
    return tree.unflatten(leaves[k])
