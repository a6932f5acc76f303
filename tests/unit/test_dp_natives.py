"""Native types of the process engine: Mirror, Placed, Slots, and the fingerprint."""

import array
import gc
import pickle
import sys
import weakref
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from natives import _torch  # hands torch to the native module
from paceline import _native
from test_native_life import assert_leaves_nothing
from torch import nn

assert _torch

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SIXTEEN_BITS = [
    (torch.float16, 2048.0),  # from here on, neighbours are 2 apart
    (torch.bfloat16, 256.0),
]


def assert_holds_nothing(things, make, n=1000):
    """Check that making something n times leaves reference counts as they were."""
    for _ in range(3):
        make()
    gc.collect()
    before = [sys.getrefcount(thing) for thing in things]
    assert_leaves_nothing(make, n)
    assert [sys.getrefcount(thing) for thing in things] == before


# ---- Mirror -------------------------------------------------------------------------


class AlwaysEqual:
    def __eq__(self, other):
        return True

    __hash__ = None


def test_a_mirror_finds_which_dictionaries_differ():
    dicts = [{"a": 1, "b": None}, {}, {"c": []}]
    mirror = _native.Mirror(dicts)
    assert list(mirror.differing()) == []
    dicts[2]["c"] = []
    dicts[0]["b"] = 0
    assert list(mirror.differing()) == [0, 2]
    mirror.accept()
    assert list(mirror.differing()) == []
    dicts[1]["new"] = 1
    assert list(mirror.differing()) == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(a=AlwaysEqual()),
        lambda d: d.update(z=d["a"]),
        lambda d: d.pop("b"),
        lambda d: d.clear(),
        lambda d: (d.pop("b"), d.update(z=d["a"])),
        lambda d: d.update(a=d.pop("a")),  # another order
    ],
    ids=["other value", "more", "less", "empty", "renamed", "reordered"],
)
def test_a_mirror_sees_every_kind_of_change(change):
    kept = AlwaysEqual()
    live = {"a": kept, "b": kept}
    mirror = _native.Mirror([{}, live])
    change(live)
    assert list(mirror.differing()) == [1]
    mirror.accept()
    assert list(mirror.differing()) == []


def test_a_mirror_compares_by_identity_and_calls_nothing():
    class Loud:
        def __eq__(self, other):
            raise AssertionError("compared")

        def __hash__(self):
            return 1

        def __bool__(self):
            raise AssertionError("asked")

    live = {Loud(): Loud()}
    mirror = _native.Mirror([live])
    assert list(mirror.differing()) == []
    live[next(iter(live))] = Loud()
    assert list(mirror.differing()) == [0]


def test_a_mirror_does_not_see_into_values():
    inner = [1]
    mirror = _native.Mirror([{"inner": inner}])
    inner.append(2)
    assert list(mirror.differing()) == []


def test_a_value_that_comes_back_is_no_difference():
    live = {"a": 1, "b": 2}
    mirror = _native.Mirror([live])
    live["b"] = 3
    live["b"] = 2
    assert list(mirror.differing()) == []


def test_a_delta_is_what_was_and_what_is():
    dicts = [{"a": 1}, {"b": 2}]
    mirror = _native.Mirror(dicts)
    dicts[1]["b"] = 3
    assert mirror.live(1) is dicts[1]
    assert mirror.delta(1) == (0, {"b": 2}, {"b": 3})
    mirror.accept()
    assert mirror.delta(1) == (0, {}, {})


def test_a_mirror_keeps_no_eye_on_the_list_it_was_given():
    dicts = [{"a": 1}]
    mirror = _native.Mirror(dicts)
    first = dicts.pop()
    assert mirror.live(0) is first


def test_a_mirror_of_attributes_follows_the_module():
    net = nn.Linear(2, 2)
    mirror = _native.Mirror([vars(net), net._parameters])
    net.eval()
    assert list(mirror.differing()) == [0]
    net.bias = None
    assert list(mirror.differing()) == [0, 1]


THINGS = {
    "append": (lambda: [1, 2], lambda v: v.append(3), (2, [], [3])),
    "item": (lambda: [1, 2, 3], lambda v: v.__setitem__(1, 7), (1, [2, 3], [7, 3])),
    "fewer": (lambda: [1, 2, 3], lambda v: v.pop(), (2, [3], [])),
    "all": (lambda: [1, 2], lambda v: v.clear(), (0, [1, 2], [])),
    "deque": (lambda: deque([1, 2]), lambda v: v.append(3), (2, [], [3])),
    "set": (lambda: {1}, lambda v: v.add(2), (1, [], [2])),
    "ordered": (
        lambda: OrderedDict(a=1, b=2),
        lambda v: v.update(a=v.pop("a")),
        (0, {"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ),
    "zero": (lambda: [0.0], lambda v: v.__setitem__(0, -0.0), (0, [0.0], [-0.0])),
    "kind": (lambda: [1], lambda v: v.__setitem__(0, True), (0, [1], [True])),
    "tensor": (lambda: torch.ones(3), lambda v: v.add_(1), None),
    "data": (lambda: torch.ones(3), lambda v: v.data.add_(1), None),
    "large": (lambda: torch.ones(10**5), lambda v: v.add_(1), None),
    "other data": (
        lambda: torch.ones(3),
        lambda v: setattr(v, "data", torch.ones(4)),
        None,
    ),
    "bytes": (lambda: bytearray(3), lambda v: v.__setitem__(1, 7), None),
    "array": (lambda: array.array("d", [1]), lambda v: v.append(2), None),
}


@pytest.mark.parametrize(("make", "change", "delta"), THINGS.values(), ids=THINGS)
def test_a_mirror_sees_what_becomes_of_anything_that_holds(make, change, delta):
    live = make()
    mirror = _native.Mirror([{}, live])
    assert list(mirror.differing()) == []
    change(live)
    assert list(mirror.differing()) == [1]
    assert mirror.delta(1) == (delta or (0, None, None))
    mirror.accept(1)
    assert list(mirror.differing()) == []


@pytest.mark.parametrize("value", [10**20, 2.5, float("nan"), "some words"])
def test_a_number_of_the_same_value_is_no_difference(value):
    things = [[value], {"a": value}, deque([value])]
    mirror = _native.Mirror(things)
    again = pickle.loads(pickle.dumps(value))
    assert again is not value
    things[0][0] = things[1]["a"] = things[2][0] = again
    assert list(mirror.differing()) == []


def test_a_mirror_sees_attributes_that_hot_code_assigns():
    class Counter:
        def __init__(self):
            self.count = 0

        def step(self):
            self.count += 1

    counter = Counter()
    mirror = _native.Mirror([])
    at = mirror.add(vars(counter), counter)
    for _ in range(1000):  # until the interpreter has specialised it
        counter.step()
        assert list(mirror.differing()) == [at]
        mirror.accept()
        assert list(mirror.differing()) == []


def test_a_mirror_sees_an_owner_of_another_class():
    class One:
        pass

    class Two:
        pass

    owner = One()
    mirror = _native.Mirror([])
    mirror.add(vars(owner), owner)
    owner.__class__ = Two
    assert list(mirror.differing()) == [0]
    assert mirror.owner(0) is owner
    mirror.accept()
    assert list(mirror.differing()) == []


def test_a_place_of_a_mirror_serves_the_next_thing():
    first, second = [1], [2]
    mirror = _native.Mirror([first, {}])
    mirror.drop(0)
    first.append(2)
    assert list(mirror.differing()) == []
    assert mirror.add(second) == 0
    second.append(3)
    assert list(mirror.differing()) == [0]


class Asking:
    """Has the mirror grow as it is dropped, so that its items move in memory."""

    def __init__(self, mirror):
        self.mirror = mirror

    def __del__(self):
        for _ in range(300):
            self.mirror.add({})


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (list, lambda live: live.clear()),
        (list, lambda live: live.__setitem__(0, 1)),
        (dict.fromkeys, lambda live: live.clear()),
        (set, lambda live: live.clear()),
    ],
    ids=["list", "member", "dict", "set"],
)
def test_members_that_ask_the_mirror_as_they_go_do_no_harm(make, change):
    mirror = _native.Mirror([])
    live = make([Asking(mirror), 2])
    at = mirror.add(live)
    change(live)
    mirror.accept(at)
    gc.collect()
    assert mirror.live(at) is live
    assert mirror.differing() == ()


def test_a_mirror_sees_what_comes_into_a_set_and_goes():
    live = set(range(0, 900, 3))
    mirror = _native.Mirror([])
    at = mirror.add(live)
    for change in (live.add, live.discard, live.add, live.discard):
        change(4)
        assert mirror.differing() == [at]
        mirror.accept(at)
        assert mirror.differing() == ()
    live.discard(3)
    live.add(3)  # the same members, be they in another order
    mirror.accept(at)
    assert mirror.differing() == ()


def test_a_mirror_sees_into_arrays_with_gaps():
    grid = np.zeros((4, 6))
    views = [grid[:, ::2], grid.T, grid[1:3, 1:]]
    mirror = _native.Mirror([])
    for view in views:
        mirror.add(view)
    assert mirror.differing() == ()
    grid[1, 1] = 1  # in a gap of the first
    assert mirror.differing() == [1, 2]
    mirror.accept()
    grid[3, 4] = 1
    assert mirror.differing() == [0, 1]


def test_a_mirror_of_no_dictionaries_never_differs():
    mirror = _native.Mirror([])
    assert list(mirror.differing()) == []
    mirror.accept()


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: _native.Mirror(({},)), TypeError, "must be list"),
        (lambda: _native.Mirror([{}, 1]), TypeError, "int"),
        (lambda: _native.Mirror([{}]).live(1), IndexError, "index is 1: this mirror h"),
        (lambda: _native.Mirror([{}]).delta(-1), IndexError, "index is -1"),
        (lambda: _native.Mirror([{}]).drop("a"), TypeError, "integer"),
    ],
    ids=["no list", "no container", "too large", "negative", "no number"],
)
def test_a_mirror_says_what_it_cannot_take(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_a_thousand_mirrors_leave_nothing():
    name, value, other = "kept-under-this-name", object(), object()
    live, owner, tensor = {name: value}, AlwaysEqual(), torch.zeros(3)

    def once():
        live[name] = value
        mirror = _native.Mirror([live, {}])
        live[name] = other
        assert list(mirror.differing()) == [0]
        mirror.delta(0)
        mirror.accept()
        mirror.drop(mirror.add([value, other], owner))
        for held in (deque([value]), {name}, tensor, bytearray(3)):
            mirror.add(held)
        mirror.delta(2)
        with pytest.raises(TypeError):
            _native.Mirror([live, None])

    kept = [live, name, value, other, owner, AlwaysEqual, tensor, _native.Mirror]
    assert_holds_nothing(kept, once)


def test_a_mirror_in_a_cycle_with_its_module_is_collected():
    net = nn.Linear(2, 2)
    net.mirror = _native.Mirror([vars(net)])
    net.mirror.accept()  # the copy holds the mirror too
    gone = weakref.ref(net.weight)
    del net
    gc.collect()
    assert gone() is None


# ---- Placed -------------------------------------------------------------------------


def placed_net():
    """Return a layer whose parameters lie in views of one memory, and the Placed."""
    net = nn.Linear(3, 2)
    memory = torch.zeros(64)
    views = [memory[:6].view(2, 3), memory[16:18]]
    for parameter, view in zip(net.parameters(), views, strict=True):
        view.copy_(parameter.data)
        parameter.data = view
    return net, _native.Placed(list(net.parameters()), views)


def test_a_parameter_in_its_place_has_not_moved():
    net, placed = placed_net()
    assert placed.moved() is False
    torch.optim.SGD(net.parameters(), 0.1).step()
    with torch.no_grad():
        net.weight.fill_(3)
    net.requires_grad_(False)
    assert placed.moved() is False


@pytest.mark.parametrize(
    "move",
    [
        lambda net: net.double(),
        lambda net: setattr(net.bias, "data", net.bias.data.clone()),
        lambda net: setattr(net.weight, "data", net.weight.data.t()),
        lambda net: setattr(net.weight, "data", net.weight.data.view(6)),
        lambda net: torch.utils.swap_tensors(
            net.weight, nn.Parameter(torch.zeros(2, 3).to_sparse())
        ),
        lambda net: setattr(net.weight, "data", net.weight.data.view(torch.int32)),
    ],
    ids=["dtype", "elsewhere", "strides", "shape", "sparse", "same bytes"],
)
def test_a_parameter_that_was_moved_is_noticed(move):
    net, placed = placed_net()
    net.requires_grad_(False)
    move(net)
    assert placed.moved() is True


def test_who_wants_a_gradient_is_a_byte_each():
    net, placed = placed_net()
    assert placed.trainable() == b"\1\1"
    net.weight.requires_grad_(False)
    assert placed.trainable() == b"\0\1"
    assert placed.is_trainable_as(b"\0\1") is True
    for other in (b"\1\1", b"\0\0", b"\0", b"\0\1\0", b"", "\0\1", None):
        assert placed.is_trainable_as(other) is False


class Counters(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("n", torch.tensor(3))
        self.register_buffer("grid", torch.arange(6.0).view(2, 3).t())

    def owners(self):
        return [(self._buffers, name) for name in self._buffers]


def test_buffers_are_saved_to_their_places():
    net = Counters()
    places = [torch.zeros_like(buffer) for buffer in net.buffers()]
    placed = _native.Placed(net.owners(), places)
    assert placed.save() is True
    assert all(map(torch.equal, places, net.buffers()))
    net.mean.add_(5)
    net.n = torch.tensor(9)
    assert placed.save() is True
    assert all(map(torch.equal, places, net.buffers()))


@pytest.mark.parametrize("value", [float("nan"), -0.0])
def test_buffers_are_compared_by_their_bytes(value):
    net = Counters()
    places = [torch.zeros_like(buffer) for buffer in net.buffers()]
    placed = _native.Placed(net.owners(), places)
    net.mean.fill_(0.0)
    placed.save()
    net.mean.fill_(value)
    placed.save()
    assert places[0].view(torch.int32).tolist() == net.mean.view(torch.int32).tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.double(),
        lambda net: setattr(net, "mean", torch.ones(3)),
        lambda net: setattr(net, "mean", None),
        lambda net: delattr(net, "mean"),
        lambda net: setattr(net, "grid", net.grid.contiguous()),
        lambda net: setattr(net, "mean", torch.ones(2).to_sparse()),
    ],
    ids=["dtype", "shape", "none", "gone", "strides", "sparse"],
)
def test_buffers_that_fit_no_longer_are_told_by_save(change):
    net = Counters()
    placed = _native.Placed(
        net.owners(), [torch.zeros_like(buffer) for buffer in net.buffers()]
    )
    change(net)
    assert placed.save() is False


def test_restoring_gives_buffers_their_places_values_and_objects():
    net = Counters()
    before = list(net.buffers())
    places = [buffer.clone() for buffer in before]
    placed = _native.Placed(net.owners(), places)
    net.mean.mul_(7)  # changed in place
    net.n = torch.tensor(100)  # replaced
    del net.grid
    places[1].fill_(4)
    placed.restore(False)
    after = [net.mean, net.n, net.grid]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert (net.mean.tolist(), net.n.item()) == ([1.0, 2.0], 4)
    assert net.grid.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_tensors_without_elements_have_places_too():
    net = nn.Module()
    net.register_buffer("none", torch.zeros(0, 3))
    placed = _native.Placed([(net._buffers, "none")], [torch.zeros(0, 3)])
    assert placed.save() is True
    placed.restore(False)
    assert net.none.shape == (0, 3)


@pytest.mark.parametrize(
    ("tensors", "places", "kind", "words"),
    [
        ((), [], TypeError, "must be list"),
        ([], (), TypeError, "must be list"),
        ([torch.ones(1)], [], ValueError, "1 tensors and 0 places: give one each"),
        ([({}, "a")], [torch.ones(1)], KeyError, "'a' is not in its dict"),
        ([([], "a")], [torch.ones(1)], TypeError, "must be dict"),
        ([({}, 1)], [torch.ones(1)], TypeError, "must be str"),
        ([torch.ones(1)], [1], TypeError, "a place is no strided tensor"),
        (
            [torch.ones(2)],
            [torch.ones(4)[::2]],
            ValueError,
            "a place has holes or overlaps",
        ),
        (
            [torch.ones(2)],
            [torch.ones(1).expand(2)],
            ValueError,
            "a place has holes or overlaps",
        ),
    ],
    ids=[
        "no list",
        "no list of places",
        "too few",
        "no such key",
        "no dict",
        "no name",
        "no tensor",
        "holes",
        "overlaps",
    ],
)
def test_placed_says_what_it_cannot_take(tensors, places, kind, words):
    with pytest.raises(kind, match=words):
        _native.Placed(tensors, places)


def test_a_thousand_placed_leave_nothing():
    net, _ = placed_net()
    counters = Counters()
    name, owner = "kept-under-this-name", {}
    owner[name] = torch.ones(3)
    owners = [*counters.owners(), (owner, name)]
    places = [torch.zeros_like(held[key]) for held, key in owners]
    views = [parameter.data for parameter in net.parameters()]

    def once():
        placed = _native.Placed(list(net.parameters()), views)
        assert not placed.moved()
        assert placed.is_trainable_as(placed.trainable())
        buffers = _native.Placed(owners, places)
        assert buffers.save()
        buffers.restore(False)
        with pytest.raises(KeyError):
            _native.Placed([(owner, name), ({}, "a")], [places[-1], places[-1]])

    things = [owner, name, owner[name], *places, *views, net.weight, _native.Placed]
    assert_holds_nothing(things, once)


def test_placed_in_cycles_is_collected():
    net, net.bias.placed = placed_net()
    counters = Counters()
    counters.n.placed = _native.Placed(counters.owners(), list(counters.buffers()))
    gone = [weakref.ref(thing) for thing in (net.bias, counters.n)]
    del net, counters
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# ---- Slots --------------------------------------------------------------------------


def make_slots(params, n_rows=1, like=None):
    """Return slots and their memory, of which every number is wrong at first."""
    memory = [
        [torch.full_like(x.detach(), 77) for x in (like or params)]
        for _ in range(n_rows)
    ]
    return _native.Slots(params, memory), memory


def tapped(params):
    """Return slots of one row that are the parameters' hooks, and their memory."""
    slots, memory = make_slots(params)
    for parameter, tap in zip(params, slots.taps(0), strict=True):
        parameter.register_post_accumulate_grad_hook(tap)
    return slots, memory[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tap_moves_the_gradient_into_its_slot(dtype):
    params = [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2))]
    slots, row = tapped(params)
    slots.open()
    (params[0] * 5).sum().abs().backward()
    assert row[0].tolist() == [5] * 3
    assert params[0].grad is None
    assert slots.sweep()[0] == b"\1\0"
    assert row[1].tolist() == [77.0] * 2  # nobody has touched it


def test_open_slots_are_overwritten_and_others_added_to():
    w = nn.Parameter(torch.ones(2))
    slots, (slot,) = tapped([w])
    slots.open()
    assert slots.sweep()[0] == b"\0"
    (w * 3).sum().backward()
    (w * 4).sum().backward()  # the same backward, as checkpointing makes it
    assert slot.tolist() == [7.0, 7.0]
    assert slots.sweep()[0] == b"\1"
    slots.open()
    assert slots.sweep()[0] == b"\0"
    (w * 2).sum().backward()
    assert slot.tolist() == [2.0, 2.0]


def test_a_gradient_that_fires_twice_in_one_backward_is_summed():
    from torch.utils.checkpoint import checkpoint

    w = nn.Parameter(torch.tensor([2.0, 3.0]))
    slots, (slot,) = tapped([w])
    slots.open()
    x = torch.ones(2, requires_grad=True)
    first = checkpoint(lambda x: x * w, x, use_reentrant=True)
    second = checkpoint(lambda x: x * w, first, use_reentrant=True)
    second.sum().backward()
    assert slot.tolist() == [4.0, 6.0]
    assert w.grad is None


def test_a_gradient_of_other_strides_is_put_as_what_it_means():
    w = nn.Parameter(torch.zeros(2, 3))
    slots, ((slot,),) = make_slots([w])
    (tap,) = slots.taps(0)
    slots.open()
    w.grad = torch.arange(6.0).view(3, 2).t()
    tap(w)
    assert slot.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    w.grad = torch.ones(2, 1).expand(2, 3)
    tap(w)  # added: strides are other ones again
    assert slot.tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert slots.sweep()[0] == b"\1"


def test_slots_of_other_strides_than_rows_hold_gradients():
    w = nn.Parameter(torch.zeros(2, 3).t())
    slots, ((slot,),) = make_slots([w])
    (tap,) = slots.taps(0)
    slots.open()
    w.grad = torch.arange(6.0).view(2, 3).t()
    tap(w)
    assert slot.stride() == (1, 3)
    assert slot.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_what_no_slot_can_hold_is_a_stray():
    table = nn.Parameter(torch.ones(4, 2))
    other = nn.Parameter(torch.ones(2))
    slots, row = tapped([table, other])
    slots.open()
    rows = nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
    (rows.sum() + other.sum()).backward()
    assert slots.sweep()[0] == b"\0\1"
    assert table.grad.is_sparse
    ((index, gradient),) = slots.strays()
    assert index == 0
    assert gradient.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]
    assert table.grad is None
    assert slots.strays() == []
    assert row[0].unique().tolist() == [77.0]


def test_gradients_of_another_dtype_are_strays():
    w = nn.Parameter(torch.ones(2), requires_grad=False)
    slots, ((slot,),) = make_slots([w])
    (tap,) = slots.taps(0)
    slots.open()
    w.data = w.data.double()  # converted since
    w.grad = torch.ones(2, dtype=torch.float64)
    tap(w)
    ((index, gradient),) = slots.strays()
    assert (index, gradient.dtype, gradient.tolist()) == (0, torch.float64, [1.0] * 2)
    assert slot.tolist() == [77.0] * 2


def test_a_tap_without_a_gradient_does_nothing():
    w = nn.Parameter(torch.ones(2))
    slots, ((slot,),) = make_slots([w])
    (tap,) = slots.taps(0)
    slots.open()
    assert tap(w) is None
    assert slots.sweep()[0] == b"\0"
    assert slot.tolist() == [77.0] * 2


def test_a_tap_outlives_its_slots_and_leaves_gradients_alone():
    w = nn.Parameter(torch.ones(2))
    slots, memory = make_slots([w])
    (tap,) = slots.taps(0)
    w.register_post_accumulate_grad_hook(tap)
    del slots, memory
    gc.collect()
    w.sum().backward()
    assert w.grad.tolist() == [1.0, 1.0]


def test_taps_asked_for_twice_serve_the_same_slots():
    w = nn.Parameter(torch.ones(2))
    slots, ((slot,),) = make_slots([w])
    slots.open()
    for tap in (*slots.taps(0), *slots.taps(0)):
        w.grad = torch.full((2,), 2.0)
        tap(w)
    assert slot.tolist() == [4.0, 4.0]


def filled(values, dtype=torch.float32, shape=(3,)):
    """Return a parameter, its slots, and rows filled with one value each."""
    w = nn.Parameter(torch.zeros(shape, dtype=dtype))
    slots, memory = make_slots([w], len(values))
    for (slot,), value in zip(memory, values, strict=True):
        slot.fill_(value)
    return w, slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [None, 10.0])
def test_every_row_is_added_to_the_gradient(dtype, held):
    w, slots = filled([1, 2, 3, 4], dtype)
    if held is not None:
        w.grad = torch.full_like(w, held)
    before = w.grad
    slots.add((b"\1",) * 4)
    assert w.grad.tolist() == [10 + (held or 0)] * 3
    assert w.grad.dtype == dtype
    assert held is None or w.grad is before
    assert not w.grad.requires_grad


@pytest.mark.parametrize(
    ("masks", "total"),
    [
        ((b"\1", b"\1", b"\1"), 111.0),
        ((b"\1", b"\0", b"\1"), 101.0),
        ((b"\0", b"\1", b"\0"), 10.0),
        ((b"\1", b"\1"), 11.0),
        ((b"\0", b"\0", b"\0"), None),
        ((), None),
    ],
)
def test_masks_say_which_rows_count(masks, total):
    w, slots = filled([1, 10, 100])
    (taken,) = slots.take(masks)
    slots.add(masks)
    for gradient in (w.grad, taken):
        assert gradient is None if total is None else gradient.tolist() == [total] * 3
    w.grad = torch.ones(3)
    slots.add(masks)
    assert w.grad.tolist() == [1 + (total or 0)] * 3


def test_wanted_says_which_parameters_count():
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    slots, memory = make_slots(params, 2)
    for row in memory:
        for slot, value in zip(row, (1.0, 2.0, 3.0), strict=True):
            slot.fill_(value)
    masks = (b"\1\1\0", b"\1\1\0")
    taken = slots.take(masks, b"\0\1\1")
    assert [None if t is None else t.tolist() for t in taken] == [None, [4.0] * 2, None]
    slots.add(masks, b"\1\0\1")
    assert params[0].grad.tolist() == [2.0] * 2
    assert params[1].grad is None
    assert params[2].grad is None


def test_what_is_taken_is_a_new_tensor_each_time():
    w, slots = filled([1, 2])
    (first,) = slots.take((b"\1", b"\1"))
    (second,) = slots.take((b"\1", b"\1"))
    first.add_(100)
    assert second.tolist() == [3.0] * 3
    assert w.grad is None


@pytest.mark.parametrize(("dtype", "edge"), SIXTEEN_BITS)
def test_sixteen_bit_rows_are_summed_with_one_rounding(dtype, edge):
    w, slots = filled([edge, 1, 1], dtype)  # edge + 1 rounds back to edge
    (taken,) = slots.take((b"\1",) * 3)
    assert taken.tolist() == [edge + 2] * 3
    w.grad = torch.full_like(w, edge)
    slots.add((b"\0", b"\1", b"\1"))
    assert w.grad.tolist() == [edge + 2] * 3


def test_rows_are_added_in_the_order_of_replicas():
    big = 2.0**24  # neighbours are 2 apart from here on
    _, slots = filled([1, 1, big])
    (taken,) = slots.take((b"\1",) * 3)
    assert taken.tolist() == [big + 2] * 3
    _, slots = filled([big, 1, 1])
    (taken,) = slots.take((b"\1",) * 3)
    assert taken.tolist() == [big] * 3


def test_gradients_of_other_strides_are_added_to_in_place():
    w, slots = filled([1, 2], shape=(2, 3))
    w.grad = torch.ones(3, 2).t()
    before = w.grad
    slots.add((b"\1", b"\1"))
    assert w.grad is before
    assert w.grad.stride() == (1, 2)
    assert w.grad.tolist() == [[4.0] * 3] * 2


@pytest.mark.parametrize("is_like", [True, False], ids=["by us", "by torch"])
def test_adding_in_place_counts_as_a_version(is_like):
    w, slots = filled([1], shape=(2, 3))
    w.grad = torch.ones(2, 3) if is_like else torch.ones(3, 2).t()
    before = w.grad._version
    slots.add((b"\1",))
    assert w.grad._version > before


def test_large_gradients_are_summed_to_the_last_element():
    n = 100_003
    w = nn.Parameter(torch.zeros(n))
    slots, memory = make_slots([w], 2)
    for (slot,) in memory:
        slot.copy_(torch.arange(n) % 7)
    slots.add((b"\1", b"\1"))
    assert torch.equal(w.grad, (torch.arange(n) % 7 * 2).float())


def test_parameters_without_elements_have_slots():
    w = nn.Parameter(torch.zeros(0, 2))
    slots, _ = tapped([w])
    slots.open()
    (w.sum() + torch.ones(1, requires_grad=True).sum()).backward()
    assert slots.sweep()[0] == b"\1"
    assert slots.take((b"\1",))[0].shape == (0, 2)
    slots.add((b"\1",))
    assert w.grad.shape == (0, 2)


def test_hooks_on_parameters_are_found():
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    slots, _ = make_slots(params)
    assert slots.hooked() is None
    first = params[2].register_hook(lambda g: None)
    assert slots.hooked() == b"\0\0\1"
    second = params[0].register_post_accumulate_grad_hook(lambda p: None)
    assert slots.hooked() == b"\1\0\1"
    first.remove()
    assert slots.hooked() == b"\1\0\0"
    second.remove()
    assert slots.hooked() is None


class Whole:
    """A parameter and slots of two rows, for calls that are wrong."""

    def __init__(self):
        self.params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        self.slots, self.memory = make_slots(self.params, 2)

    def rebuilt(self, row, i, view):
        memory = [list(views) for views in self.memory]
        memory[row][i] = view
        return _native.Slots(self.params, memory)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda w: _native.Slots((), []), TypeError, "must be list"),
        (lambda w: _native.Slots(w.params, ()), TypeError, "must be list"),
        (
            lambda w: _native.Slots(w.params, []),
            ValueError,
            r"memory has 0 rows: give 1 to \d+",
        ),
        (
            lambda w: _native.Slots([], [[]] * 1000),
            ValueError,
            r"memory has 1000 rows: give 1 to \d+",
        ),
        (
            lambda w: _native.Slots(w.params, [w.memory[0], ()]),
            ValueError,
            r"memory\[1\] is \(\): give a list of 2 views",
        ),
        (
            lambda w: _native.Slots(w.params, [w.memory[0][:1]]),
            ValueError,
            r"memory\[0\] is \[.*\]: give a list of 2 views",
        ),
        (lambda w: w.rebuilt(0, 1, 5), TypeError, "a slot is no strided tensor"),
        (
            lambda w: w.rebuilt(1, 0, torch.zeros(2).double()),
            ValueError,
            r"memory\[1\]\[0\]: give dense views of one layout",
        ),
        (
            lambda w: w.rebuilt(0, 1, torch.zeros(6)[::2]),
            ValueError,
            r"memory\[0\]\[1\]: give dense views of one layout",
        ),
        (
            lambda w: w.slots.add((b"\1\1",) * 3),
            ValueError,
            "masks has 3 entries: there are 2 rows",
        ),
        (
            lambda w: w.slots.take((b"\1\1", b"\1")),
            ValueError,
            r"masks\[1\] is b'\\x01': give 2 bytes",
        ),
        (
            lambda w: w.slots.take((None,)),
            ValueError,
            r"masks\[0\] is None: give 2 bytes",
        ),
        (lambda w: w.slots.add([b"\1\1"]), TypeError, "must be tuple"),
        (
            lambda w: w.slots.add((b"\1\1",), b"\1"),
            ValueError,
            r"wanted is b'\\x01': give 2 bytes, or None",
        ),
        (
            lambda w: w.slots.take((b"\1\1",), [1, 1]),
            ValueError,
            r"wanted is \[1, 1\]: give 2 bytes, or None",
        ),
        (lambda w: _native.Tap(), TypeError, "cannot create"),
    ],
    ids=[
        "no list",
        "no list of rows",
        "no rows",
        "many rows",
        "a row that is no list",
        "a short row",
        "no tensor",
        "another dtype",
        "holes",
        "more masks",
        "a short mask",
        "no mask",
        "masks in a list",
        "a short wanted",
        "no wanted",
        "a tap",
    ],
)
def test_slots_say_what_they_cannot_take(call, kind, words):
    whole = Whole()
    with pytest.raises(kind, match=words):
        call(whole)
    assert [p.grad for p in whole.params] == [None, None]


def test_a_thousand_slots_leave_nothing():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    memory = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(2)]
    bad = [memory[0], [torch.zeros(3), torch.zeros(5)]]

    def once():
        slots = _native.Slots(params, memory)
        taps = slots.taps(0)
        slots.open()
        for parameter, tap in zip(params, taps, strict=True):
            parameter.grad = torch.ones_like(parameter)
            tap(parameter)
        assert slots.take((slots.sweep()[0],))[1].tolist() == [[1.0, 1.0], [1.0, 1.0]]
        slots.add((b"\1\1", b"\1\0"))
        slots.add((b"\1\1", b"\1\0"), b"\0\1")
        assert len(slots.strays()) == 2
        assert slots.hooked() is None
        with pytest.raises(ValueError, match="layout"):
            _native.Slots(params, bad)
        with pytest.raises(ValueError, match="masks"):
            slots.add((b"",))

    things = [*params, *memory, *memory[0], *memory[1], bad, _native.Slots, _native.Tap]
    assert_holds_nothing(things, once)


def test_a_thousand_backwards_through_taps_leave_nothing():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(400))]
    slots, row = tapped(params)

    def once():
        slots.open()
        sum((p * p).sum() for p in params).backward()
        assert slots.sweep()[0] == b"\1\1"

    assert_holds_nothing([*params, *row, slots], once)
    assert [slot.unique().tolist() for slot in row] == [[2.0], [2.0]]


def test_slots_in_a_cycle_with_their_parameter_are_collected():
    w = nn.Parameter(torch.ones(2))
    w.slots, _ = tapped([w])
    gone = weakref.ref(w)
    del w
    gc.collect()
    assert gone() is None


# ---- fingerprint --------------------------------------------------------------------


def test_equal_bytes_have_equal_fingerprints():
    state = torch.default_generator.get_state()
    assert _native.fingerprint(state) == _native.fingerprint(state.clone())
    assert 0 <= _native.fingerprint(state) < 2**64


def test_every_single_byte_changes_the_fingerprint():
    state = torch.default_generator.get_state()
    found = {_native.fingerprint(state)}
    for i in range(len(state)):
        changed = state.clone()
        changed[i] ^= 1
        found.add(_native.fingerprint(changed))
    assert len(found) == len(state) + 1


def test_every_length_has_a_fingerprint_of_its_own():
    zeros = torch.zeros(200, dtype=torch.uint8)
    assert len({_native.fingerprint(zeros[:n]) for n in range(201)}) == 201


def test_every_bit_of_a_fingerprint_is_drawn_evenly():
    # 4,000 numbers: a bit that were set outside these bounds is 8 deviations away
    n = 4000
    found = [_native.fingerprint(torch.tensor([i])) for i in range(n)]
    for bit in range(64):
        n_set = sum(word >> bit & 1 for word in found)
        assert abs(n_set - n / 2) < 4 * n**0.5, bit


def test_a_fingerprint_leaves_the_tensor_as_it_is():
    x = torch.arange(50)
    _native.fingerprint(x)
    assert x.tolist() == list(range(50))
    assert x._version == 0


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: 5, TypeError, "the tensor is no strided tensor in memory"),
        (lambda: torch.zeros(2).to_sparse(), TypeError, "the tensor is no strided"),
        (lambda: torch.ones(4)[::2], ValueError, "holes or overlaps: give a contig"),
        (lambda: torch.ones(4, device="meta"), Exception, "the tensor"),
    ],
    ids=["number", "sparse", "holes", "meta"],
)
def test_a_fingerprint_says_what_it_cannot_take(make, kind, words):
    given = make()
    with pytest.raises(kind, match=words):
        _native.fingerprint(given)


def test_a_thousand_fingerprints_leave_nothing():
    x, holes = torch.arange(50), torch.ones(4)[::2]

    def once():
        _native.fingerprint(x)
        with pytest.raises(ValueError, match="holes"):
            _native.fingerprint(holes)

    assert_holds_nothing([x, holes], once)
