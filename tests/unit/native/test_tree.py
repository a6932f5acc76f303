"""Values are split into a tree and its leaves, and put together again."""

import collections
import dataclasses
import functools
import gc
import weakref

import numpy as np
import pytest
import torch
from paceline import _native
from paceline._compat import torch_core
from paceline._compat.packed_sequence import Replicated
from support.leaks import assert_leaves_nothing
from support.programs import run_python
from torch.nn.utils.rnn import pack_sequence
from values import (
    Attributed,
    Box,
    Classified,
    Frozen,
    Noted,
    Odd,
    Pair,
    Slotted,
    Wanting,
    rows,
    same,
)

torch_core.attach()


class Rows(list):
    pass


def containers():
    t = rows(2, 3)
    cyclic, in_slots = Rows([t]), Noted(list, a=t)
    cyclic.note = in_slots.note = "kept"
    return {
        "tensor": t,
        "parameter": torch.nn.Parameter(t),
        "array": np.arange(3),
        "none": None,
        "nothing": (),
        "nested": ([t, {"a": (t, None)}], {"b": [np.arange(2)], 3: "x"}),
        "namedtuple": Pair(t, [1, t]),
        "structseq": torch.max(t, 0),
        "size": t.shape,
        "ordered": collections.OrderedDict(b=t, a=t),
        "default": collections.defaultdict(list, a=t),
        "slots": in_slots,
        "slotted": Slotted(t, None),
        "counter": collections.Counter(a=2),
        "deque": collections.deque([t, 1]),
        "list subclass": cyclic,
        "frozen": Frozen(t),
        "model output": Classified(logits=t, hidden_states=(t, t)),
        "registered": Box({"a": t}, "label"),
        "packed": pack_sequence([rows(3, 2), rows(2, 2)]),
        "unsorted": pack_sequence([rows(2, 2), rows(3, 2)], enforce_sorted=False),
    }


@pytest.mark.parametrize("name", containers())
def test_each_container_comes_back_as_it_was_and_nothing_is_left(name):
    value = containers()[name]
    tree, leaves = _native.flatten(value)
    assert same(tree.unflatten(leaves), value)
    assert same(tree.unflatten(tuple(leaves)), value)

    def once():
        tree, found = _native.flatten(value)
        tree.unflatten(found)

    node = torch.utils._pytree.SUPPORTED_NODES.get(type(value))
    read = getattr(type(value), "_fields", None), getattr(node, "unflatten_fn", None)
    assert_leaves_nothing(once, type(value), *leaves, *filter(None, read))


def test_paths_name_attributes_and_items():
    t = rows(1)
    value = (1, {"mask": [Classified(logits=t), Frozen(t), Box(t, 1)]})
    tree, leaves = _native.flatten(value)
    assert [tree.path(i) for i in range(len(leaves))] == [
        "[1]['mask'][0]['logits']",
        "[1]['mask'][1].x",
        "[1]['mask'][1].made",
        "[1]['mask'][2][0]",
    ]
    assert _native.flatten(t)[0].path(0) == ""
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="4 leaves"):
            tree.path(wrong)


def test_a_dataclass_is_rebuilt_without_its_constructor():
    t = rows(2)
    before = Wanting.n_made
    value = Wanting(t, 3)
    value.extra = "kept"
    tree, leaves = _native.flatten(value)
    again = tree.unflatten([leaves[0] + 1])
    assert Wanting.n_made == before + 1
    assert again.extra == "kept"
    assert torch.equal(again.x, t + 1)
    del value.x  # a field that this instance lacks
    tree, leaves = _native.flatten([t, value])
    assert tree.unflatten(leaves)[1] is value


def test_a_cached_property_is_computed_anew():
    @dataclasses.dataclass
    class Cached:
        x: torch.Tensor

        @functools.cached_property
        def twice(self):
            return self.x * 2

    value = Cached(rows(2))
    assert value.twice.tolist() == [0.0, 2.0]
    tree, leaves = _native.flatten(value)
    assert tree.unflatten([leaves[0] + 1]).twice.tolist() == [2.0, 4.0]


def test_a_model_output_of_pairs_is_not_taken_for_pairs():
    t = rows(2)
    value = Classified(loss=t, logits=t)
    value.loss = (("a", t), ("b", t))
    tree, leaves = _native.flatten(value)
    again = tree.unflatten(leaves)
    assert [name for name, _ in again.loss] == ["a", "b"]
    assert list(again) == ["loss", "logits"]


def test_a_dict_that_is_a_dataclass_keeps_its_entries_as_attributes():
    @dataclasses.dataclass
    class Both(dict):
        x: torch.Tensor

        def __post_init__(self):
            self["x"] = self.x

    tree, leaves = _native.flatten(Both(rows(2)))
    again = tree.unflatten([leaves[0] + 1])
    assert again.x is again["x"]


def test_an_order_that_was_changed_is_kept():
    value = collections.OrderedDict(a=rows(1), b=rows(2))
    value.move_to_end("a")
    tree, leaves = _native.flatten(value)
    assert [len(leaf) for leaf in leaves] == [2, 1]
    assert list(tree.unflatten(leaves)) == ["b", "a"]


def test_a_dict_that_is_its_own_attributes_stays_so():
    t = rows(2)
    tree, leaves = _native.flatten(Attributed(a=t, b=1))
    again = tree.unflatten(leaves)
    assert again.a is t
    again.c = 4
    assert again["c"] == 4


def test_a_mark_stays_where_it_is():
    tree, leaves = _native.flatten([{"a": Replicated((rows(2), 1))}])
    assert tree.path(0) == "[0]['a'][0]"
    (again,) = tree.unflatten([leaves[0] + 1])
    assert type(again["a"]) is Replicated
    assert torch.equal(again["a"].value[0], rows(2) + 1)


def test_leaves_must_be_as_many_as_there_were():
    tree, leaves = _native.flatten([rows(2), rows(3)])
    with pytest.raises(ValueError, match="1 leaves for a tree of 2"):
        tree.unflatten(leaves[:1])


def test_a_container_that_holds_itself_is_an_error():
    value = [rows(2)]
    value.append(value)
    with pytest.raises(RecursionError):
        _native.flatten(value)
    marker = Replicated(None)
    marker.value = marker
    with pytest.raises(RecursionError):
        _native.flatten(marker)


def fail(*_):
    raise KeyError("mine")


class Failing:
    pass


class Unread(dict):
    __iter__ = fail


class Sealed(dict):
    __setitem__ = fail


@dataclasses.dataclass
class Unset:
    x: int = dataclasses.field(init=False)
    __getattr__ = fail


def register(kind, flatten):
    torch.utils._pytree.register_pytree_node(kind, flatten, fail)


register(Failing, fail)
register(Unread, lambda value: (list(dict.values(value)), None))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (Failing, KeyError, "mine"),
        (lambda: Unread(a=1), KeyError, "mine"),
        (Unset, KeyError, "mine"),
        (lambda: Sealed(a=1), KeyError, "mine"),
        (lambda: Odd.of(1), TypeError, "Odd.__new__ made a list"),
    ],
)
def test_an_error_in_a_container_comes_out_and_leaves_nothing(make, kind, words):
    value = [rows(2), {"a": (Pair(rows(3), 1), make())}]

    def build_again():
        tree, leaves = _native.flatten(value)
        tree.unflatten(leaves)

    def once():
        with pytest.raises(kind, match=words):
            build_again()

    assert_leaves_nothing(once, value, value[0], type(value[1]["a"][1]))


def test_trees_need_no_numpy():
    code = """
import collections, sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
from paceline import _native
import torch
from paceline._compat import torch_core
torch_core.attach()
tree, leaves = _native.flatten(collections.OrderedDict(a=torch.ones(2)))
assert len(leaves) == 1
"""
    run_python(code)


def test_a_tree_in_a_cycle_is_collected():
    class Holder:
        pass

    holder = Holder()
    holder.tree, _ = _native.flatten([holder])
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None
