"""Native types of the process engine: SharedTensors, ReplicaGrads, and the hash."""

import gc
import weakref

import pytest
import torch
from paceline import _native
from support.leaks import assert_leaves_nothing
from torch import nn

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
        assert placed.trainable()
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
    assert_leaves_nothing(once, *things)


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

    assert_leaves_nothing(once, x, holes)
