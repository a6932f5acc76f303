"""Changes in containers of classes of one's own, in odd arrays, and between errors."""

import collections

import numpy as np
import pytest
import torch
from replicas import integers, linear, modules_of, pair_of
from torch import nn


class Table(dict):
    """Answers with more than it holds, as models' outputs do."""

    def __getitem__(self, key):
        return super().__getitem__(key), "more"


class Rows(list):
    pass


class Marks(set):
    pass


class Window(collections.deque):
    pass


class Pair(tuple):
    pass


class Unreadable:
    """Says nothing about its attributes."""

    @property
    def __dict__(self):
        raise RuntimeError("ask me not")

    def __reduce__(self):
        return Unreadable, ()


KINDS = (Table, Rows, Marks, Window, Pair)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear(2)
        self.held = [Table(a=1), Rows([1]), Marks([1]), Window([1, 2], 3), Pair((1, 2))]
        for held in self.held:
            held.extra = [1]
        self.sets = [{1, 2}, {"a"}]
        self.boxes = [{"a": [1]}, {"b": [2]}]
        grid = np.arange(24.0).reshape(4, 6)
        self.arrays = [grid[:, ::2], grid[1:, 1:].T, np.asfortranarray(grid * 2)]
        self.arrays += [grid.copy().view(np.recarray), np.ma.array([1.0, 2.0])]
        self.arrays += [np.array([3], "M8[s]")]
        self.odd = None

    def numbers(self):
        table, *others = self.held
        yield sum(dict.values(table)) + len(table)
        for at, held in enumerate(others, start=1):
            yield sum(2 * x for x in held) + at * len(held)
        for at, held in enumerate(self.held, start=3):
            yield at * sum(held.extra) + getattr(held, "gain", 0)
        yield sum(len(some) for some in self.sets)
        yield sum(sum(next(iter(box.values()))) for box in self.boxes)
        for array in self.arrays[:-1]:
            yield float(array.sum() + array.flat[-1])
        yield int(self.arrays[-1].view("i8")[0])

    def forward(self, x, fails=None):
        if fails is not None and bool((x == 9).any()):
            raise LookupError("as asked")
        return self.linear(x) + sum(self.numbers())


def _held(at, change):
    return lambda m: change(m.held[at])


CHANGES = {
    "an item of a dict": _held(0, lambda held: held.update(b=4)),
    "a member of a list": _held(1, lambda held: held.append(4)),
    "a member of a set": _held(2, lambda held: held.add(4)),
    "a member of a deque": _held(3, lambda held: held.append(4)),
    "a deque that is full": _held(3, lambda held: held.extend([6, 7])),
    **{
        f"an attribute of {kind.__name__}": _held(
            at, lambda held: setattr(held, "gain", 5)
        )
        for at, kind in enumerate(KINDS)
    },
    **{
        f"a list that {kind.__name__} has": _held(at, lambda held: held.extra.append(3))
        for at, kind in enumerate(KINDS)
    },
    "an attribute less": _held(1, lambda held: delattr(held, "gain")),
    "a set": lambda m: (m.sets[0].discard(1), m.sets[0].update(range(90))),
    "a set that shrinks": lambda m: m.sets[0].difference_update(range(50)),
    "a list that lost its first": lambda m: m.boxes.pop(0),
    "what it held, and holds": lambda m: m.boxes[0]["b"].append(7),
    "a list in another order": lambda m: m.boxes.insert(0, {"c": [4]}),
    "what came later": lambda m: m.boxes[0]["c"].append(8),
    "what was there": lambda m: m.boxes[1]["b"].append(9),
    **{
        f"array {at}": lambda m, at=at: m.arrays[at].flat.__setitem__(-1, at + 50)
        for at in range(5)
    },
    "an array of times": lambda m: m.arrays[5].__setitem__(0, 8),
}


def test_containers_and_arrays_of_any_kind_may_change(wrap):
    twin = pair_of(wrap, Holder)
    x = integers(7, 3)
    twin.compare(lambda model, x: model(x), x)
    for name, change in CHANGES.items():
        for model in modules_of(twin):
            change(model)
        theirs, mine = twin.run(lambda model, x: model(x), x)
        assert torch.equal(mine, theirs), name


def test_every_such_change_shows():
    """Or the test above could not fail."""
    model = Holder()
    for name, change in CHANGES.items():
        before = sum(model.numbers())
        change(model)
        assert sum(model.numbers()) != before, name


def test_an_object_that_says_nothing_of_itself_may_be_held(wrap_by_default):
    twin = pair_of(wrap_by_default, Holder)
    x = integers(7, 3)
    for odd in (1, Unreadable(), [Unreadable()]):
        for model in modules_of(twin):
            model.odd = odd
        twin.compare(lambda model, x: model(x), x)


def test_forwards_that_fail_one_after_the_other_lose_no_news(wrap):
    """What is told twice may name things that are gone since."""
    twin = pair_of(wrap, Holder)
    x = integers(8, 3)
    last = x.clone()
    last[-1] = 9  # only the last replica fails
    twin.compare(lambda model, x: model(x), x)
    for step in range(3):
        for change in (
            lambda m, step=step: m.boxes[0].update(a=[step]),
            lambda m, step=step: setattr(m, "boxes", [{"a": [1]}, {"b": [step]}]),
            lambda m: m.boxes[1]["b"].append(2),
        ):
            for model in modules_of(twin):
                change(model)
            with pytest.raises(LookupError):
                twin.ours(last, fails=True)
        twin.compare(lambda model, x: model(x), x)
