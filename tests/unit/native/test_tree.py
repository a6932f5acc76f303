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
    chunk,
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
    found, has_mark = _native.leaves(value)
    assert (sorted(map(id, found)), has_mark) == (sorted(map(id, leaves)), False)

    def once():
        tree, found = _native.flatten(value)
        tree.unflatten(found)
        _native.leaves(value)

    node = torch.utils._pytree.SUPPORTED_NODES.get(type(value))
    read = getattr(type(value), "_fields", None), getattr(node, "unflatten_fn", None)
    assert_leaves_nothing(once, type(value), *leaves, *filter(None, read))


class Fields(dict):
    """Unpacks into its values, as some models' outputs do."""

    def __iter__(self):
        return iter(self.values())


def test_a_dict_has_the_leaves_that_its_class_calls_values():
    first, second = rows(2), rows(3)
    assert _native.leaves([Fields(a=first, b=[second])]) == ([first, second], False)


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


def linked():
    t, ends = rows(2, 3), Attributed(t=rows(1))
    box, first, second = Rows([t]), Wanting(t, 3), Wanting(rows(2), 3)
    first.next, second.x = second, [second.x, (first, {"itself": box})]
    first.x, ends["list"] = (first.x, second), box
    box += [first, box, ends, ends]
    return box


def test_a_container_that_leads_back_to_itself_comes_back_so():
    value = linked()
    tree, leaves = _native.flatten(value)
    paths = ["[0]", "[1].x[0]", "[1].x[1].x[0]", "[3]['t']"]
    assert [tree.path(i) for i in range(len(leaves))] == paths
    again = tree.unflatten([leaf + 1 for leaf in leaves])
    assert torch.equal(again[0], value[0] + 1)
    first = again[1]
    assert first.x[1].x[1] == (first, {"itself": again})
    assert again[2] is again
    assert again[3] is again[4]
    assert again[4].list is again
    assert first is not value[1]


def test_values_that_lead_back_to_themselves_leave_nothing():
    value = linked()

    def once():
        tree, leaves = _native.flatten(value)
        again = tree.unflatten(leaves)
        del again[1].x, again[1].next, again[3]["list"], again[2]

    assert_leaves_nothing(once, value, value[0], value[1], Rows, Wanting)


def test_what_cannot_lead_back_to_itself_is_an_error():
    inside, ordered = [], collections.OrderedDict()
    value = (rows(2), inside)
    inside.append(value)
    ordered["itself"] = [rows(2), ordered]
    marker = Replicated(None)
    marker.value = marker
    for wrong in (value, ordered):
        tree, leaves = _native.flatten(wrong)
        assert len(leaves) == 1
        with pytest.raises(ValueError, match=f"{type(wrong).__name__} contains itself"):
            tree.unflatten(leaves)
    with pytest.raises(ValueError, match="Replicated contains itself"):
        chunk(_native.scatter((marker,), {}, 1, 0), 0)
    deep = rows(2)
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError, match="nested containers"):
        _native.flatten(deep)
    assert len(_native.leaves(deep)[0]) == 1


def test_containers_of_many_links_are_walked_once_each():
    value = rows(2)
    for _ in range(100):
        value = [value, (value, {"a": value})]
    tree, leaves = _native.flatten(value)
    again = tree.unflatten(leaves)
    assert len(leaves) == 3
    assert again[0] is again[1][0] is again[1][1]["a"]


def test_objects_without_tensors_may_be_linked_in_any_number():
    thing = None
    for _ in range(100_000):
        thing = Slotted(thing, [thing, {"other": thing}])
    x = rows(4)
    for k in range(2):
        args, kwargs = chunk(_native.scatter((x, thing), {"a": [thing]}, 2, 0), k)
        assert args[1] is kwargs["a"][0] is thing
    while thing is not None:  # Python's own end of such a chain would be too deep
        thing.y.clear()
        thing = thing.x


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
