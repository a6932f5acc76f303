"""The native module's groups of devices, on simulated CUDA with CPU tensors."""

import ctypes
import gc

import pytest
import torch
from natives_on_device import count, fake, fake_device, make_device, synchronize
from paceline import _native
from paceline._compat import torch_core, torch_cuda
from support.leaks import assert_leaves_nothing

N = 3
STREAMS = (0,) * N
# Memory that outlives all enqueued work.
RING = torch.empty(3 * 1024, dtype=torch.uint8)
ROOMS = [None, *(torch.empty(4096, dtype=torch.uint8) for _ in range(N - 1))]
PAIR = torch.ones(2)


def make_group(n=N):
    return _native.DeviceGroup([make_device(index) for index in range(n)])


def block(n_bytes):
    return torch.zeros(n_bytes, dtype=torch.uint8)


def add_up(group, rows, to):
    """Enqueue the sum of members' tensors; return objects that must outlive it."""
    slot = torch.empty_like(rows[0])
    made = group.gradient_sum(1, [slot], [0], slot.nbytes)
    group.fence(STREAMS)
    packed = [torch.empty_like(row) for row in rows]
    for member, (row, block) in enumerate(zip(rows, packed, strict=True), 1):
        assert made.pack(0, member, [row], block) == []
    made.begin(ROOMS, to)
    made.end(0)
    group.settle(STREAMS)
    return made, packed


@pytest.fixture
def group():
    with fake_device("schedule=late"):
        yield make_group()


# ---- operations ---------------------------------------------------------------------


def test_streams_are_the_current_ones_by_member(group):
    assert group.streams() == STREAMS
    torch_cuda.current_stream = lambda index: 100 + index
    torch_core.attach()
    assert group.streams() == (100, 101, 102)


def test_streams_that_torch_cannot_tell_are_an_error(group):
    def fail(index):
        raise OSError(f"no stream {index}")

    torch_cuda.current_stream = fail
    torch_core.attach()
    with pytest.raises(OSError, match="no stream 0"):
        group.streams()


def test_tensors_of_a_torch_without_the_exchange_table_are_read_by_capsules():
    with fake_device(exchange=False):
        group, one, other = make_group(), torch.arange(5.0), torch.zeros(5)
        to = torch.zeros(5)
        group.copy(STREAMS, 0, [one], 1, [other])
        made = group.gradient_sum(1, [torch.zeros(5)], [0], 20)
        assert made.pack(0, 1, [other], to) == []
        synchronize()
        assert to.tolist() == one.tolist()


def test_tensors_are_copied_sent_and_summed_and_the_group_keeps_its_devices(group):
    gc.collect()
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(7), torch.empty(0)]
    places = [torch.zeros(2, 3).t(), torch.tensor(0), torch.empty(0)]
    source, blocks = torch.arange(3.0), [None, block(12), block(12)]
    rows, to = [torch.ones(2).half(), torch.ones(2).half()], torch.zeros(2).half()
    group.copy(STREAMS, 2, tensors, 1, places)
    group.broadcast(STREAMS, RING, [([source], [0], 12, blocks)])
    packed = add_up(group, rows, to)
    assert to.tolist() == [0, 0]
    synchronize()
    assert all(map(torch.equal, tensors, places))
    assert [b.view(torch.float32).tolist() for b in blocks[1:]] == [[0, 1, 2]] * 2
    del packed
    assert to.tolist() == [2, 2]


def test_gradients_are_packed_with_zeros_for_none(group):
    slots = [torch.zeros(3), torch.zeros(2, 2).t(), torch.zeros(1)]
    grads = [torch.arange(3.0), torch.tensor([[1.0, 2], [3, 4]]).t(), None]
    to = torch.full((10,), 9.0)
    assert group.gradient_sum(1, slots, [0, 16, 32], 40).pack(0, 1, grads, to) == []
    synchronize()
    assert to.tolist() == [0, 1, 2, 9, 1, 2, 3, 4, 0, 9]


def test_gradients_are_packed_on_the_stream_that_is_named():
    with fake_device("schedule=late") as stream:
        stream.new()
        group = _native.DeviceGroup([make_device(), make_device()])
        number, (grad, slot, to) = stream.now, torch.tensor([[5.0], [0], [0]])
        made = group.gradient_sum(1, [slot], [0], 4)
        assert made.pack(number, 1, [grad], to) == []
        fake().cuStreamSynchronize(ctypes.c_void_p(0))
        assert to.tolist() == [0]
        fake().cuStreamSynchronize(ctypes.c_void_p(number))
        assert to.tolist() == [5]


def test_gradients_that_are_laid_out_in_another_way_are_told_and_nothing_is_packed(
    group,
):
    grads = [
        torch.ones(2, 2),
        torch.ones(2, 2).t(),
        torch.ones(4),
        None,
        torch.ones(2, 2, dtype=torch.float64),
        torch.ones(1).expand(2, 2),
        torch.eye(2).to_sparse(),
    ]
    to = torch.full((28,), 9.0)
    made = group.gradient_sum(1, [torch.zeros(2, 2)] * 7, list(range(0, 112, 16)), 112)
    before = count("cuLaunchKernel")
    assert made.pack(0, 2, grads, to) == [1, 2, 4, 5, 6]
    synchronize()
    assert count("cuLaunchKernel") == before
    assert to.unique().tolist() == [9]


def test_a_lazy_conjugate_is_laid_out_in_another_way(group):
    made = group.gradient_sum(1, [torch.zeros(2, dtype=torch.complex64)], [0], 16)
    grads = [torch.ones(2, dtype=torch.complex64).conj()]
    assert made.pack(0, 1, grads, torch.zeros(2, dtype=torch.complex64)) == [0]


# ---- refusals -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "kind", "words"),
    [
        (lambda: [], ValueError, "a group of 0 devices: give 1 to 64"),
        (lambda: [make_device()] * 65, ValueError, "a group of 65 devices"),
        (lambda: [make_device(), 3], TypeError, r"devices\[1\] is 3: give a Device"),
        (lambda: 3, TypeError, "not iterable"),
    ],
)
def test_what_is_no_list_of_devices_is_refused(devices, kind, words):
    with fake_device():
        given = devices()
        with pytest.raises(kind, match=words):
            _native.DeviceGroup(given)


CALLS = {
    "copy": lambda g, s: g.copy(s, 0, [], 1, []),
    "broadcast": lambda g, s: g.broadcast(s, RING, []),
    "fence": lambda g, s: g.fence(s),
    "settle": lambda g, s: g.settle(s),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_streams_are_a_tuple_of_a_number_a_member(group, call):
    for streams in ((0, 0), (0, 0, 0, 0), [0, 0, 0], None):
        with pytest.raises(TypeError, match="give a tuple of 3 numbers"):
            call(group, streams)
    with pytest.raises(TypeError, match="integer"):
        call(group, ("a", "b", 0))
    call(group, STREAMS)


def ones(*shape):
    return torch.ones(shape)


BAD_COPIES = [
    ((3, [], 0, []), IndexError, "member 3 of 3"),
    ((-1, [], 0, []), IndexError, "member -1 of 3"),
    ((0, [], 3, []), IndexError, "member 3 of 3"),
    ((0, [ones(2)], 1, []), ValueError, "lists of 1 and 0"),
    ((0, ones(2), 1, [ones(2)]), TypeError, "list"),
    ((0, [ones(2)], 1, (ones(2),)), TypeError, "list"),
    ((0, [ones(2)], 1, [3]), TypeError, "a tensor is not a strided tensor in memory"),
    ((0, [ones(2)], 1, [ones(3)]), ValueError, "are not alike"),
    ((0, [ones(2)], 1, [ones(2).double()]), ValueError, "are not alike"),
    ((0, [ones(2, 3)], 1, [ones(3, 2).t()]), ValueError, "are not alike"),
    ((0, [ones(4)[::2]], 1, [ones(4)[::2]]), ValueError, "not one block of memory"),
    ((0, [ones(1).expand(2)], 1, [ones(2)]), ValueError, "not one block of memory"),
    ((0, [ones(2).to("meta")], 1, [ones(2)]), (TypeError, ValueError), "a tensor "),
]


def segment(sources=None, offsets=(0,), n_bytes=8, blocks=None):
    sources = [ones(2)] if sources is None else sources
    blocks = [None, block(8), None] if blocks is None else blocks
    return (sources, list(offsets), n_bytes, blocks)


BAD_SEGMENTS = [
    ([], TypeError, "a segment is"),
    ((1, 2, 3), TypeError, "a segment is"),
    (((), [], 0, []), TypeError, "a segment is"),
    (([], 3, 0, []), TypeError, "list"),
    (segment(offsets=()), ValueError, "lists of 1 and 0"),
    (segment(offsets=["a"]), TypeError, "integer"),
    (segment(offsets=[-1]), OverflowError, "negative"),
    (segment(offsets=[1]), ValueError, "reaches beyond its block"),
    (segment(offsets=[2**63]), ValueError, "reaches beyond its block"),
    (segment(n_bytes=7), ValueError, "reaches beyond its block"),
    (segment(n_bytes=-1), ValueError, "a segment of -1 bytes with 3 blocks"),
    (segment(n_bytes="8"), TypeError, "int"),
    (segment(blocks=[None, None]), ValueError, "with 2 blocks: give one for each of 3"),
    (segment(blocks=[None, block(7), None]), ValueError, "7 bytes, of a segment of 8"),
    (segment(blocks=[None, None, block(9)]), ValueError, "9 bytes, of a segment of 8"),
    (segment(blocks=[None, 3, None]), TypeError, "not a strided tensor"),
    (segment(sources=[ones(4)[::2]]), ValueError, "not one block of memory"),
    (segment(sources=[None]), TypeError, "not a strided tensor"),
    (
        segment([ones(300)], [4], 1204, [None, block(1204), None]),
        ValueError,
        "a segment of 1204 bytes does not fit into a slot of 1024",
    ),
]


BAD_ROOMS = [
    (RING, TypeError, "list"),
    (tuple(ROOMS), TypeError, "list"),
    (ROOMS[:2], ValueError, "memory of 2 members, of 3"),
    ([*ROOMS, None], ValueError, "memory of 4 members, of 3"),
    ([None] * 3, ValueError, "0 bytes of member 1 have no room for 2 rows"),
    ([None, ones(31), None], ValueError, "124 bytes of member 1 have no room for 2"),
    ([None, 3, None], TypeError, "not a strided tensor"),
    ([None, None, ones(64)[::2]], ValueError, "not one block of memory"),
    ([ones(64)[::2], *ROOMS[1:]], ValueError, "not one block of memory"),
]


BAD_SUMS = [
    ((3, [], [], 0), IndexError, "member 3 of 3"),
    ((1, [ones(2)], [], 8), ValueError, "lists of 1 and 0"),
    ((1, (ones(2),), [0], 8), TypeError, "list"),
    ((1, [None], [0], 8), TypeError, "a tensor is not a strided tensor"),
    ((1, [ones(2)], ["a"], 8), TypeError, "integer"),
    ((1, [ones(2)], [-1], 8), OverflowError, "negative"),
    ((1, [ones(2)], [9], 16), ValueError, "beyond its block"),
    ((1, [ones(2)], [17], 16), ValueError, "beyond its block"),
    ((1, [ones(5)], [0], 16), ValueError, "beyond its block"),
    ((1, [ones(2)], [0], -1), ValueError, "beyond its block"),
    ((1, [ones(4)[::2]], [0], 16), ValueError, "not one block"),
]


BAD_PACKS = [
    ((0, 3, [None], ones(2)), IndexError, "member 3 of 3"),
    ((0, -1, [None], ones(2)), IndexError, "member -1 of 3"),
    ((0, 0, [None], ones(2)), ValueError, "member 0 packs 1 gradients"),
    (("a", 1, [None], ones(2)), TypeError, "integer"),
    ((0, 1, [], ones(2)), ValueError, "packs 0 gradients of 1 tensors"),
    ((0, 1, 3, ones(2)), TypeError, "list"),
    ((0, 1, [None], ones(3)), ValueError, "a block of 12 bytes, of a segment of 8"),
    ((0, 1, [None], ones(4)[::2]), ValueError, "not one block"),
    ((0, 1, [None], 3), TypeError, "not a strided tensor"),
]


BAD_BEGINS = [
    *(((rooms, ones(2)), *words) for rooms, *words in BAD_ROOMS),
    ((ROOMS, ones(3)), ValueError, "a block of 12 bytes, of a segment of 8"),
    ((ROOMS, ones(4)[::2]), ValueError, "not one block of memory"),
    ((ROOMS, None), TypeError, "not a strided tensor"),
]


BAD_RINGS = [
    ((None, []), TypeError, "not a strided tensor"),
    ((torch.ones(64)[::2], []), ValueError, "not one block of memory"),
    ((RING, (segment(),)), TypeError, "list"),
]
REFUSED = [
    *(("copy", given, *words) for given, *words in BAD_COPIES),
    *(("broadcast", given, *words) for given, *words in BAD_RINGS),
    *(("broadcast", (RING, [item]), *words) for item, *words in BAD_SEGMENTS),
]


@pytest.mark.parametrize(("call", "given", "kind", "words"), REFUSED)
def test_what_cannot_be_is_refused_and_nothing_is_enqueued(
    group, call, given, kind, words
):
    with pytest.raises(kind, match=words):
        getattr(group, call)(STREAMS, *given)
    assert fake().fake_pending() == 0


REFUSED_OF_SUMS = [
    *(("pack", given, *words) for given, *words in BAD_PACKS),
    *(("begin", given, *words) for given, *words in BAD_BEGINS),
    ("end", ("a",), TypeError, "integer"),
]


@pytest.mark.parametrize(("given", "kind", "words"), BAD_SUMS)
def test_what_cannot_be_added_up_is_refused(group, given, kind, words):
    with pytest.raises(kind, match=words):
        group.gradient_sum(*given)


@pytest.mark.parametrize(("call", "given", "kind", "words"), REFUSED_OF_SUMS)
def test_a_sum_refuses_what_cannot_be(group, call, given, kind, words):
    made, rows = group.gradient_sum(1, [ones(2)], [0], 8), [ones(2), ones(2)]
    for member, row in enumerate(rows, 1):
        made.pack(0, member, [None], row)
    synchronize()
    with pytest.raises(kind, match=words):
        getattr(made, call)(*given)
    assert fake().fake_pending() == 0


def test_tensors_elsewhere_are_refused():
    with fake_device():
        group = _native.DeviceGroup([make_device(), make_device(1, dlpack_type=2)])
        with pytest.raises(ValueError, match=r"is on the CPU, .* on cuda:1"):
            group.copy((0, 0), 0, [ones(2)], 1, [ones(2)])
        with pytest.raises(ValueError, match="a tensor is on the CPU"):
            group.gradient_sum(1, [ones(2)], [0], 8)
        with pytest.raises(ValueError, match="a tensor is on the CPU"):
            group.gradient_sum(0, [ones(2)], [0], 8).pack(0, 1, [None], ones(2))


def test_a_driver_that_fails_is_quoted(group):
    fake().fake_fail(b"cuMemcpyPeerAsync", 1, 719)
    with pytest.raises(OSError, match=r"copying between two devices.*719"):
        group.copy(STREAMS, 0, [ones(2)], 1, [ones(2)])
    made = group.gradient_sum(1, [ones(2)], [0], 8)
    fake().fake_fail(b"cuLaunchKernel", 1, 719)
    with pytest.raises(OSError, match="719"):
        made.pack(0, 1, [ones(2)], ones(2))
    for call in (make_group, lambda: group.gradient_sum(1, [PAIR], [0], 8)):
        fake().fake_fail(b"cuEventCreate", 2, 719)
        with pytest.raises(OSError, match="719"):
            call()


# ---- references ---------------------------------------------------------------------


def test_no_call_keeps_or_loses_a_reference(group):
    source, place, bad, memory = ones(6), ones(6), ones(7), RING
    blocks = [None, block(24), block(24)]
    items = [source, place, bad, memory, *blocks[1:], STREAMS, group]
    lists = [[source], [place], [bad], [0], blocks, [source] * 2]
    rooms = list(ROOMS)
    kept = [*items, *lists, rooms, *rooms[1:]]

    def calls():
        sources, places, bads, zero, _, rows = lists
        group.streams()
        group.copy(STREAMS, 0, sources, 1, places)
        group.broadcast(STREAMS, memory, [(sources, zero, 24, blocks)])
        made, _packed = add_up(group, rows, place)
        assert made.pack(0, 1, bads, place) == [0]
        assert made.pack(0, 1, zero, place) == [0]
        synchronize()  # before the blocks are freed
        for call in (
            lambda: group.copy(STREAMS, 0, sources, 1, bads),
            lambda: group.broadcast(STREAMS, memory, [(bads, zero, 24, blocks)]),
            lambda: made.begin(rooms, bad),
            lambda: made.begin([*rooms[:2], 3], place),
            lambda: made.pack(0, 1, sources, bad),
            lambda: group.gradient_sum(1, [place, 3], [0, 0], 24),
        ):
            with pytest.raises((ValueError, TypeError)):
                call()

    assert_leaves_nothing(calls, *kept, n=200, c_bytes=8192)
    synchronize()


def test_a_thousand_groups_leave_nothing():
    with fake_device():
        devices = [make_device(index) for index in range(N)]
        n_objects = fake().fake_live_objects()

        def make():
            _native.DeviceGroup(devices)
            with pytest.raises(TypeError):
                _native.DeviceGroup([*devices, None])
            with pytest.raises(ValueError, match="0 devices"):
                _native.DeviceGroup([])

        assert_leaves_nothing(make, *devices, c_bytes=1024)
        assert fake().fake_live_objects() == n_objects


def test_what_calls_read_is_freed(group):
    single = make_group(1)  # the fake makes nothing for its sums
    made = group.gradient_sum(1, [PAIR], [0], 8)
    unlike = ones(1, 2)

    def calls():
        single.gradient_sum(0, [PAIR], [0], 8)
        assert made.pack(0, 1, [unlike], PAIR) == [0]
        for call in (
            lambda: group.copy(STREAMS, 0, [PAIR], 1, [unlike]),
            lambda: group.broadcast(STREAMS, RING, [segment(), segment(n_bytes=7)]),
        ):
            with pytest.raises(ValueError, match=r"alike|beyond"):
                call()

    assert_leaves_nothing(calls, PAIR, unlike)
