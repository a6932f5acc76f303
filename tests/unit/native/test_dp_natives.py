"""Native types of the process engine: SharedTensors, ReplicaGrads, and the hash."""

import gc
import sys
import weakref

import pytest
import torch
from natives import torch_core  # hands torch to the native module
from paceline import _native
from test_native_life import assert_leaves_nothing
from torch import nn

assert torch_core

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


# ---- SharedTensors ------------------------------------------------------------------


def placed_net():
    """Return a layer over views of one memory, and the SharedTensors."""
    net = nn.Linear(3, 2)
    memory = torch.zeros(64)
    views = [memory[:6].view(2, 3), memory[16:18]]
    for parameter, view in zip(net.parameters(), views, strict=True):
        view.copy_(parameter.data)
        parameter.data = view
    return net, _native.SharedTensors(list(net.parameters()), views)


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


def test_parameters_that_are_written_in_place_are_found():
    net, placed = placed_net()
    placed.record_versions()
    assert placed.written() == []
    with torch.no_grad():
        net.bias.add_(1)
    assert placed.written() == [1]
    with torch.no_grad():
        net.weight[0].zero_()  # a view
    assert placed.written() == [0, 1]
    placed.record_versions()
    assert placed.written() == []
    net(torch.ones(1, 3)).sum().backward()  # reads alone
    net.requires_grad_(False)
    assert placed.written() == []


def test_an_optimizers_step_counts_as_written():
    net, placed = placed_net()
    placed.record_versions()
    net(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(net.parameters(), 1.0).step()
    assert placed.written() == [0, 1]


def test_writes_by_data_have_no_version():
    net, placed = placed_net()
    placed.record_versions()
    net.weight.data.zero_()  # which the replicas' hashes find
    assert placed.written() == []


class Versioned(torch.Tensor):
    """Has a version of its own."""

    number = 0

    @property
    def _version(self):
        return self.number


def test_tensors_whose_type_has_a_version_of_its_own_are_asked_for_it():
    tensors = [torch.zeros(3).as_subclass(Versioned), torch.zeros(3)]
    placed = _native.SharedTensors(tensors, tensors)
    placed.record_versions()
    tensors[0].number = 1
    tensors[1].add_(1)
    assert placed.written() == [0, 1]


def test_tensors_without_a_version_are_never_written():
    with torch.inference_mode():
        tensors = [torch.zeros(3)]
        placed = _native.SharedTensors(tensors, tensors)
        placed.record_versions()
        tensors[0].add_(1)
        assert placed.written() == []


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
    placed = _native.SharedTensors(net.owners(), places)
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
    placed = _native.SharedTensors(net.owners(), places)
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
    placed = _native.SharedTensors(
        net.owners(), [torch.zeros_like(buffer) for buffer in net.buffers()]
    )
    change(net)
    assert placed.save() is False


def test_restoring_gives_buffers_their_places_values_and_objects():
    net = Counters()
    before = list(net.buffers())
    places = [buffer.clone() for buffer in before]
    placed = _native.SharedTensors(net.owners(), places)
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
    placed = _native.SharedTensors([(net._buffers, "none")], [torch.zeros(0, 3)])
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
def test_shared_tensors_says_what_it_cannot_take(tensors, places, kind, words):
    with pytest.raises(kind, match=words):
        _native.SharedTensors(tensors, places)


def test_a_thousand_shared_tensors_leave_nothing():
    net, _ = placed_net()
    counters = Counters()
    name, owner = "kept-under-this-name", {}
    owner[name] = torch.ones(3)
    owners = [*counters.owners(), (owner, name)]
    places = [torch.zeros_like(held[key]) for held, key in owners]
    views = [parameter.data for parameter in net.parameters()]

    def once():
        placed = _native.SharedTensors(list(net.parameters()), views)
        assert not placed.moved()
        assert placed.is_trainable_as(placed.trainable())
        buffers = _native.SharedTensors(owners, places)
        assert buffers.save()
        buffers.restore(False)
        with pytest.raises(KeyError):
            _native.SharedTensors([(owner, name), ({}, "a")], [places[-1], places[-1]])

    things = [
        owner,
        name,
        owner[name],
        *places,
        *views,
        net.weight,
        _native.SharedTensors,
    ]
    assert_holds_nothing(things, once)


def test_shared_tensors_in_cycles_is_collected():
    net, net.bias.placed = placed_net()
    counters = Counters()
    counters.n.placed = _native.SharedTensors(
        counters.owners(), list(counters.buffers())
    )
    gone = [weakref.ref(thing) for thing in (net.bias, counters.n)]
    del net, counters
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# ---- ReplicaGrads -------------------------------------------------------------------


def make_slots(params, n_rows=1, like=None):
    """Return slots and their memory, of which every number is wrong at first."""
    memory = [
        [torch.full_like(x.detach(), 77) for x in (like or params)]
        for _ in range(n_rows)
    ]
    return _native.ReplicaGrads(params, memory), memory


def hooked_row(params):
    """Return slots of one row that are the parameters' hooks, and their memory."""
    slots, memory = make_slots(params)
    for parameter, hook in zip(params, slots.hooks(0), strict=True):
        parameter.register_post_accumulate_grad_hook(hook)
    return slots, memory[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hook_moves_the_gradient_into_its_slot(dtype):
    params = [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2))]
    slots, row = hooked_row(params)
    slots.open()
    (params[0] * 5).sum().abs().backward()
    assert row[0].tolist() == [5] * 3
    assert params[0].grad is None
    assert slots.sweep()[0] == b"\1\0"
    assert row[1].tolist() == [77.0] * 2  # nobody has touched it


def test_open_slots_are_overwritten_and_others_added_to():
    w = nn.Parameter(torch.ones(2))
    slots, (slot,) = hooked_row([w])
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


def test_hooks_that_are_shut_leave_the_gradient_where_it_is():
    w = nn.Parameter(torch.ones(2))
    slots, (slot,) = hooked_row([w])
    slots.shut(True)
    (w * 3).sum().backward()
    assert slot.tolist() == [77.0, 77.0]  # nobody has touched it
    ((index, gradient),) = slots.fallbacks()
    assert (index, gradient.tolist(), w.grad) == (0, [3.0, 3.0], None)
    slots.shut(False)
    slots.open()
    (w * 4).sum().backward()
    assert slot.tolist() == [4.0, 4.0]


def test_a_gradient_that_fires_twice_in_one_backward_is_summed():
    from torch.utils.checkpoint import checkpoint

    w = nn.Parameter(torch.tensor([2.0, 3.0]))
    slots, (slot,) = hooked_row([w])
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
    (hook,) = slots.hooks(0)
    slots.open()
    w.grad = torch.arange(6.0).view(3, 2).t()
    hook(w)
    assert slot.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    w.grad = torch.ones(2, 1).expand(2, 3)
    hook(w)  # added: strides are other ones again
    assert slot.tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert slots.sweep()[0] == b"\1"


def test_slots_of_other_strides_than_rows_hold_gradients():
    w = nn.Parameter(torch.zeros(2, 3).t())
    slots, ((slot,),) = make_slots([w])
    (hook,) = slots.hooks(0)
    slots.open()
    w.grad = torch.arange(6.0).view(2, 3).t()
    hook(w)
    assert slot.stride() == (1, 3)
    assert slot.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_what_no_slot_can_hold_is_a_stray():
    table = nn.Parameter(torch.ones(4, 2))
    other = nn.Parameter(torch.ones(2))
    slots, row = hooked_row([table, other])
    slots.open()
    rows = nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
    (rows.sum() + other.sum()).backward()
    assert slots.sweep()[0] == b"\0\1"
    assert table.grad.is_sparse
    ((index, gradient),) = slots.fallbacks()
    assert index == 0
    assert gradient.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]
    assert table.grad is None
    assert slots.fallbacks() == []
    assert row[0].unique().tolist() == [77.0]


def test_gradients_of_another_dtype_are_fallbacks():
    w = nn.Parameter(torch.ones(2), requires_grad=False)
    slots, ((slot,),) = make_slots([w])
    (hook,) = slots.hooks(0)
    slots.open()
    w.data = w.data.double()  # converted since
    w.grad = torch.ones(2, dtype=torch.float64)
    hook(w)
    ((index, gradient),) = slots.fallbacks()
    assert (index, gradient.dtype, gradient.tolist()) == (0, torch.float64, [1.0] * 2)
    assert slot.tolist() == [77.0] * 2


def test_a_hook_without_a_gradient_does_nothing():
    w = nn.Parameter(torch.ones(2))
    slots, ((slot,),) = make_slots([w])
    (hook,) = slots.hooks(0)
    slots.open()
    assert hook(w) is None
    assert slots.sweep()[0] == b"\0"
    assert slot.tolist() == [77.0] * 2


def test_a_hook_outlives_its_slots_and_leaves_gradients_alone():
    w = nn.Parameter(torch.ones(2))
    slots, memory = make_slots([w])
    (hook,) = slots.hooks(0)
    w.register_post_accumulate_grad_hook(hook)
    del slots, memory
    gc.collect()
    w.sum().backward()
    assert w.grad.tolist() == [1.0, 1.0]


def test_hooks_asked_for_twice_serve_the_same_slots():
    w = nn.Parameter(torch.ones(2))
    slots, ((slot,),) = make_slots([w])
    slots.open()
    for hook in (*slots.hooks(0), *slots.hooks(0)):
        w.grad = torch.full((2,), 2.0)
        hook(w)
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
    slots, _ = hooked_row([w])
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
        return _native.ReplicaGrads(self.params, memory)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda w: _native.ReplicaGrads((), []), TypeError, "must be list"),
        (lambda w: _native.ReplicaGrads(w.params, ()), TypeError, "must be list"),
        (
            lambda w: _native.ReplicaGrads(w.params, []),
            ValueError,
            r"memory has 0 rows: give 1 to \d+",
        ),
        (
            lambda w: _native.ReplicaGrads([], [[]] * 1000),
            ValueError,
            r"memory has 1000 rows: give 1 to \d+",
        ),
        (
            lambda w: _native.ReplicaGrads(w.params, [w.memory[0], ()]),
            ValueError,
            r"memory\[1\] is \(\): give a list of 2 views",
        ),
        (
            lambda w: _native.ReplicaGrads(w.params, [w.memory[0][:1]]),
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
        (lambda w: w.slots.add([b"\1\1"]), TypeError, "give a tuple"),
        (lambda w: _native.ReplicaGradHook(), TypeError, "cannot create"),
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
        "a hook",
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
        slots = _native.ReplicaGrads(params, memory)
        hooks = slots.hooks(0)
        slots.open()
        for parameter, hook in zip(params, hooks, strict=True):
            parameter.grad = torch.ones_like(parameter)
            hook(parameter)
        assert slots.take((slots.sweep()[0],))[1].tolist() == [[1.0, 1.0], [1.0, 1.0]]
        slots.add((b"\1\1", b"\1\0"))
        assert len(slots.fallbacks()) == 2
        assert slots.hooked() is None
        with pytest.raises(ValueError, match="layout"):
            _native.ReplicaGrads(params, bad)
        with pytest.raises(ValueError, match="masks"):
            slots.add((b"",))

    things = [
        *params,
        *memory,
        *memory[0],
        *memory[1],
        bad,
        _native.ReplicaGrads,
        _native.ReplicaGradHook,
    ]
    assert_holds_nothing(things, once)


def test_a_thousand_backwards_through_hooks_leave_nothing():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(400))]
    slots, row = hooked_row(params)

    def once():
        slots.open()
        sum((p * p).sum() for p in params).backward()
        assert slots.sweep()[0] == b"\1\1"

    assert_holds_nothing([*params, *row, slots], once)
    assert [slot.unique().tolist() for slot in row] == [[2.0], [2.0]]


def test_slots_in_a_cycle_with_their_parameter_are_collected():
    w = nn.Parameter(torch.ones(2))
    w.slots, _ = hooked_row([w])
    gone = weakref.ref(w)
    del w
    gc.collect()
    assert gone() is None


# ---- tensor_hash --------------------------------------------------------------------


def test_equal_bytes_have_equal_hashes():
    state = torch.default_generator.get_state()
    assert _native.tensor_hash(state) == _native.tensor_hash(state.clone())
    assert 0 <= _native.tensor_hash(state) < 2**64


def test_every_single_byte_changes_the_hash():
    state = torch.default_generator.get_state()
    found = {_native.tensor_hash(state)}
    for i in range(len(state)):
        changed = state.clone()
        changed[i] ^= 1
        found.add(_native.tensor_hash(changed))
    assert len(found) == len(state) + 1


def test_the_hash_of_a_tensor_reads_every_byte():
    long = torch.zeros(1 << 16, dtype=torch.uint8)
    found = {_native.tensor_hash(long)}
    for at in (0, 8191, 8192, 40_000, (1 << 16) - 1):
        changed = long.clone()
        changed[at] = 1
        found.add(_native.tensor_hash(changed))
    assert len(found) == 6
    assert _native.tensor_hash(long) == _native.tensor_hash(long.clone())


def test_the_hash_of_the_first_bytes_reads_no_others():
    long = torch.zeros(100, dtype=torch.uint8)
    changed = long.clone()
    changed[50] = 1
    assert _native.tensor_hash(long, 50) == _native.tensor_hash(changed, 50)
    assert _native.tensor_hash(long, 50) == _native.tensor_hash(long[:50])
    assert _native.tensor_hash(long, 51) != _native.tensor_hash(changed, 51)
    assert _native.tensor_hash(long, 1000) == _native.tensor_hash(long)
    for wrong in ((), (long, 1, 2), (long, "1"), (long, -1)):
        with pytest.raises((TypeError, OverflowError)):
            _native.tensor_hash(*wrong)


def test_every_length_has_a_hash_of_its_own():
    zeros = torch.zeros(200, dtype=torch.uint8)
    assert len({_native.tensor_hash(zeros[:n]) for n in range(201)}) == 201


def test_every_bit_of_a_hash_is_drawn_evenly():
    # 4,000 numbers: a bit that were set outside these bounds is 8 deviations away
    n = 4000
    found = [_native.tensor_hash(torch.tensor([i])) for i in range(n)]
    for bit in range(64):
        n_set = sum(word >> bit & 1 for word in found)
        assert abs(n_set - n / 2) < 4 * n**0.5, bit


def test_a_tensors_hash_leaves_the_tensor_as_it_is():
    x = torch.arange(50)
    _native.tensor_hash(x)
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
def test_a_tensors_hash_says_what_it_cannot_take(make, kind, words):
    given = make()
    with pytest.raises(kind, match=words):
        _native.tensor_hash(given)


def test_a_thousand_hashes_leave_nothing():
    x, holes = torch.arange(50), torch.ones(4)[::2]

    def once():
        _native.tensor_hash(x)
        with pytest.raises(ValueError, match="holes"):
            _native.tensor_hash(holes)

    assert_holds_nothing([x, holes], once)
