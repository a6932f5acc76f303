"""Both ends of a channel, in two threads of one process; and arenas."""

import gc
import mmap
import os
import sys
import threading

import numpy as np
import pytest
import torch
from natives import torch_core  # hands torch to the native module
from paceline import _native
from support.processes import new_mappings, shared_mappings
from torch import nn

QUIT = 0
assert torch_core

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
MORE_DTYPES = [
    getattr(torch, name)
    for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
]


class Pair:
    """A caller's end, and a worker's in a thread that answers what it is sent."""

    def __init__(self, answer=None):
        self.caller = _native.Channel()
        self.worker = _native.Channel(*self.caller.fds)
        self.got = []
        self.failures = []
        self._answer = answer or (lambda kind, words, tensors, flags: tensors)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        kind = None
        while kind != QUIT:
            kind, words, tensors, flags = self.worker.next()
            self.got.append((kind, words, flags))
            try:
                reply = self._answer(kind, words, tensors, flags)
                self.worker.answer(kind, words, reply)
            except BaseException as error:
                self.failures.append(error)
                self.worker.answer(255, b"failed", [])

    def ask(self, tensors, *, kind=7, words=b"words", copy=True):
        self.caller.post(kind, words, tensors)
        return self.caller.wait(copy=copy)

    def echo(self, tensors, copy=True):
        return self.ask(tensors, copy=copy)[2]

    def close(self):
        self.ask([], kind=QUIT)
        self._thread.join()
        self.caller.close()
        self.worker.close()


@pytest.fixture
def pair():
    it = Pair()
    yield it
    it.close()


def example(dtype, shape=(3, 4)):
    n = int(np.prod(shape))
    numbers = torch.arange(n, dtype=torch.int64).reshape(shape) % 3
    if dtype.is_complex:
        return torch.complex(numbers.double(), -numbers.double()).to(dtype)
    return numbers.to(dtype)


def assert_same(got, sent):
    assert type(got) is torch.Tensor
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    detached = sent.detach()
    if "float8" in str(sent.dtype):
        got, detached = got.view(torch.uint8), detached.view(torch.uint8)
    assert torch.equal(got, detached)


# ---- what travels -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES + MORE_DTYPES, ids=str)
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
def test_every_dtype_arrives_with_its_bits(pair, dtype, copy):
    sent = example(dtype)
    (got,) = pair.echo([sent], copy)
    assert_same(got, sent)
    assert not pair.failures


LAYOUTS = {
    "scalar": lambda x: x[0, 0, 0],
    "row-major": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(1, 2, 0),
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, 1:2],
    "every second": lambda x: x[:, :, ::2],
    "inner": lambda x: x[:, 1:, 1:3],
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "empty": lambda x: x[:0],
    "empty inside": lambda x: x[:, :, :0],
    "one by one": lambda x: x[:1, :1, :1],
    "overlapping": lambda x: x.as_strided((3, 4), (1, 1)),
    "unsqueezed": lambda x: x.unsqueeze(0).transpose(0, 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.complex128])
def test_every_layout_arrives(pair, name, dtype):
    sent = LAYOUTS[name](example(dtype, (4, 3, 5)))
    (got,) = pair.echo([sent])
    assert_same(got, sent)


@pytest.mark.parametrize("name", ["row-major", "transposed", "permuted", "rows"])
def test_dense_strides_are_kept(pair, name):
    sent = LAYOUTS[name](example(torch.float32, (4, 3, 5)))
    (got,) = pair.echo([sent])
    assert got.stride() == sent.stride()


def test_channels_last_stays_channels_last(pair):
    sent = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (got,) = pair.echo([sent])
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert_same(got, sent)


def test_lazily_negated_and_conjugated_tensors_arrive_as_what_they_mean(pair):
    numbers = torch.complex(torch.arange(3.0), torch.ones(3))
    sent = [numbers.conj(), numbers.conj().imag, numbers.conj().conj()]
    assert sent[0].is_conj()
    assert sent[1].is_neg()
    for got, want in zip(pair.echo(sent), sent, strict=True):
        assert_same(got, want)


def test_sparse_tensors_arrive(pair):
    sent = torch.eye(3).to_sparse().requires_grad_()
    _, _, (got,), _ = pair.ask([sent])
    assert got.is_sparse
    assert torch.equal(got.to_dense(), torch.eye(3))
    assert [flags for _, _, flags in pair.got] == [b"\1"]


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.arange(6.0).reshape(2, 3).T,
    np.arange(10, dtype=np.int16)[::-2],
    np.arange(8, dtype=np.uint32)[1:5],
    np.array([True, False]),
    np.array(2.5),
    np.array([], dtype=np.float32),
    np.array([1 + 2j, 3], dtype=np.complex64),
    np.array([1.5, 2.5], dtype=np.float16),
    np.arange(3, dtype=">i4"),
    np.array(["a", "bcd"]),
    np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.array([{"any": "thing"}, None], dtype=object),
    np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
]


@pytest.mark.parametrize("sent", ARRAYS, ids=lambda array: str(array.dtype))
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
def test_arrays_arrive_as_arrays(pair, sent, copy):
    (got,) = pair.echo([sent], copy)
    assert type(got) is type(sent)
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert got.tolist() == sent.tolist()


def test_a_read_only_array_arrives(pair):
    sent = np.arange(4)
    sent.flags.writeable = False
    (got,) = pair.echo([sent])
    assert got.tolist() == [0, 1, 2, 3]


def test_nothing_and_many_things_arrive_in_order(pair):
    assert pair.echo([]) == []
    assert pair.echo([None]) == [None]
    sent = [torch.full((k % 7,), k) if k % 3 else None for k in range(500)]
    got = pair.echo(sent)
    for one, want in zip(got, sent, strict=True):
        assert one is None if want is None else torch.equal(one, want)


def test_kind_and_words_arrive(pair):
    words = bytes(range(256)) * 300
    kind, got, tensors, flags = pair.ask([], kind=2**32 - 1, words=words)
    assert (kind, got, tensors, flags) == (2**32 - 1, words, [], b"")


def test_flags_tell_which_tensors_require_gradients():
    def answer(kind, words, tensors, flags):
        assert not any(t.requires_grad for t in tensors if t is not None)
        return [
            t.requires_grad_() if flag else t
            for t, flag in zip(tensors, flags, strict=True)
        ]

    pair = Pair(answer)
    leaf = torch.ones(3, requires_grad=True)
    sent = [leaf, torch.ones(3), None, leaf * 2, nn.Parameter(torch.ones(2))]
    _, _, got, flags = pair.ask(sent)
    assert pair.got[0][2] == flags == bytes([1, 0, 0, 1, 1])
    assert not any(t.requires_grad for t in got if t is not None)
    assert not pair.failures
    pair.close()


# ---- memory -------------------------------------------------------------------------


def test_messages_of_any_size_follow_each_other(pair):
    for n in (10, 70_000, 5, 3_000_000, 1, 200_000):
        (got,) = pair.echo([torch.arange(n)])
        assert got.numel() == n
        assert got[-1] == n - 1


def test_a_worker_owns_what_it_is_given():
    kept = []

    def keep(kind, words, tensors, flags):
        kept.extend(tensors)
        return []

    pair = Pair(keep)
    for k in range(5):
        pair.ask([torch.full((50_000,), k), np.full(3, k)])
    pair.close()
    assert [int(t[0]) for t in kept[::2]] == [0, 1, 2, 3, 4]
    assert all(bool((t == t[0]).all()) for t in kept[::2])
    assert [array.tolist() for array in kept[1::2]] == [[k] * 3 for k in range(5)]
    kept[0].resize_(60_000)  # as of any tensor that torch made


def test_views_are_of_the_channel_and_copies_are_not(pair):
    (view,) = pair.echo([torch.ones(4)], copy=False)
    (copy,) = pair.echo([torch.full((4,), 2.0)])
    assert view.tolist() == [2.0] * 4  # overwritten by the second answer
    pair.echo([torch.full((4,), 3.0)])
    assert copy.tolist() == [2.0] * 4


def test_a_view_keeps_the_memory_of_a_closed_channel():
    before = shared_mappings()
    pair = Pair()
    (view,) = pair.echo([torch.ones(4)], copy=False)
    pair.ask([torch.ones(4)], kind=QUIT)
    pair._thread.join()
    pair.caller.close()
    pair.worker.close()
    del pair
    gc.collect()
    assert view.tolist() == [1.0] * 4
    assert len(new_mappings(before)) == 1
    del view
    gc.collect()
    assert new_mappings(before) == []


# ---- order, and what is refused -----------------------------------------------------


def test_an_answer_that_nobody_waited_for_is_dropped(pair):
    pair.caller.post(1, b"first", [torch.ones(2)])
    assert pair.caller.is_busy
    pair.caller.post(2, b"second", [])
    assert pair.caller.wait(copy=True)[:2] == (2, b"second")
    assert not pair.caller.is_busy
    assert [words for _, words, _ in pair.got] == [b"first", b"second"]


@pytest.mark.parametrize(
    "bad",
    [[1], ["text"], [b"bytes"], [memoryview(b"x")], [[torch.ones(1)]], [object()]],
    ids=lambda bad: type(bad[0]).__name__,
)
def test_what_is_no_tensor_is_refused_and_the_channel_goes_on(pair, bad):
    with pytest.raises(TypeError, match="tensors, arrays and None"):
        pair.caller.post(1, b"", [torch.ones(2), *bad])
    assert not pair.caller.is_busy
    assert pair.echo([torch.ones(2)])[0].tolist() == [1.0, 1.0]


def test_a_fake_tensor_is_refused(pair):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises((TypeError, RuntimeError)):
        pair.caller.post(1, b"", [fake])
    assert pair.echo([torch.ones(1)])[0].tolist() == [1.0]


def test_a_meta_tensor_arrives_as_one(pair):
    (got,) = pair.echo([torch.ones(3, device="meta")])
    assert (got.device.type, got.shape) == ("meta", (3,))


@pytest.mark.parametrize(
    ("at", "number"),
    [
        (136, 1 << 40),  # the message's bytes
        (196, 1 << 20),  # leaves, and half of the payload's bytes
        (208, 1 << 40),  # where the payload lies
        (216 + 4, 0),  # the leaf's dtype
        (216 + 16, 0),  # its bytes
        (216 + 24, 1 << 40),  # where they lie
        (216 + 32, 1 << 40),  # its size
        (216 + 40, -1),  # its stride
    ],
)
def test_a_message_that_was_overwritten_is_refused(at, number):
    caller = _native.Channel()
    worker = _native.Channel(*caller.fds)
    caller.post(1, b"payload", [torch.arange(6)])
    with mmap.mmap(caller.fds[0], 4096) as lane:
        lane[at : at + 8] = number.to_bytes(8, "little", signed=True)
    with pytest.raises(_native.MismatchError, match="overwritten"):
        worker.next()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((1, b""), TypeError),
        ((1, b"", [], None), TypeError),
        (("a", b"", []), TypeError),
        ((-1, b"", []), OverflowError),
        ((2**32, b"", []), ValueError),
        ((1, "text", []), TypeError),
        ((1, b"", (torch.ones(1),)), TypeError),
        ((1, b"", None), TypeError),
    ],
)
def test_a_post_of_wrong_arguments_is_refused(pair, arguments, error):
    with pytest.raises(error):
        pair.caller.post(*arguments)
    assert pair.echo([]) == []


@pytest.mark.parametrize("keywords", [{}, {"how": 1}, {"copy": 1, "how": 1}], ids=str)
def test_a_wait_of_wrong_arguments_is_refused(pair, keywords):
    pair.caller.post(1, b"", [])
    with pytest.raises(TypeError, match="copy"):
        pair.caller.wait(**keywords)
    assert pair.caller.wait(copy=True)[0] == 1


def test_a_wait_without_a_post_is_refused(pair):
    with pytest.raises(RuntimeError, match="nothing was posted"):
        pair.caller.wait(copy=True)


def test_each_end_has_its_own_calls():
    caller = _native.Channel()
    worker = _native.Channel(*caller.fds)
    with pytest.raises(RuntimeError, match="caller's end"):
        caller.next()
    with pytest.raises(RuntimeError, match="worker's end"):
        worker.post(1, b"", [])
    with pytest.raises(RuntimeError, match="no request"):
        worker.answer(1, b"", [])
    caller.post(1, b"", [])
    worker.next()
    with pytest.raises(RuntimeError, match="not answered"):
        worker.next()


def test_an_answer_that_fails_can_be_given_again():
    caller = _native.Channel()
    worker = _native.Channel(*caller.fds)
    caller.post(1, b"", [])
    worker.next()
    with pytest.raises(TypeError):
        worker.answer(1, b"", [object()])
    worker.answer(2, b"instead", [])
    assert caller.wait(copy=True)[:2] == (2, b"instead")


def test_a_closed_channel_says_so_and_closes_again():
    caller = _native.Channel()
    caller.close()
    caller.close()
    assert caller.fds == ()
    with pytest.raises(RuntimeError, match="closed"):
        caller.post(1, b"", [])
    with pytest.raises(RuntimeError, match="closed"):
        caller.wait(copy=True)


def test_closing_ends_a_wait_in_another_thread():
    caller = _native.Channel()
    caller.post(1, b"", [])
    caught = []

    def wait():
        try:
            caller.wait(copy=True)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not caught and thread.is_alive():
        caller.close()
        thread.join(0.01)
    thread.join()
    assert "closed" in caught[0]
    assert caller.fds == ()


def test_a_second_thread_is_refused_while_one_waits(pair):
    go = threading.Event()
    caught = []

    def answer(kind, words, tensors, flags):
        go.wait(30)
        return tensors

    slow = Pair(answer)
    slow.caller.post(1, b"", [])
    thread = threading.Thread(target=lambda: slow.caller.wait(copy=True))
    thread.start()
    while not caught:
        try:
            slow.caller.watch(os.getpid(), "myself")
        except RuntimeError as error:
            caught.append(str(error))
    go.set()
    thread.join()
    assert "another thread" in caught[0]
    slow.close()


def test_a_signal_handlers_exception_ends_a_wait_and_the_answer_stays():
    import signal

    go = threading.Event()

    def answer(kind, words, tensors, flags):
        go.wait(30)
        return tensors

    class Enough(Exception):
        pass

    def on_alarm(number, frame):
        raise Enough

    slow = Pair(answer)
    slow.caller.post(1, b"late", [torch.ones(2)])
    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Enough):
            slow.caller.wait(copy=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert slow.caller.is_busy
    go.set()
    assert slow.caller.wait(copy=True)[1] == b"late"
    slow.close()


# ---- what is left -------------------------------------------------------------------


def test_references_are_as_before(pair):
    tensor, array, words = torch.ones(3), np.ones(3), b"some words" * 10
    sent = [tensor, array, tensor.t(), None, torch.ones(2, 2)[:, :1]]
    things = [tensor, array, words, sent, *[x for x in sent if x is not None]]

    def once():
        pair.ask(sent, words=words)
        pair.ask(sent, words=words, copy=False)
        with pytest.raises(TypeError):
            pair.caller.post(1, words, [tensor, array, object()])

    once()
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(300):
        once()
    assert [sys.getrefcount(thing) for thing in things] == before


def test_a_thousand_channels_and_arenas_leave_nothing():
    before = shared_mappings()

    def once():
        caller = _native.Channel()
        worker = _native.Channel(*caller.fds)
        caller.post(1, b"", [torch.ones(2)])
        worker.next()
        _native.SharedMemory(100).view(0, torch.ones(2))
        with pytest.raises(OSError, match="descriptor"):
            _native.Channel(12345, 12346)

    once()
    gc.collect()
    types = [_native.Channel, _native.SharedMemory]
    fds, references = os.listdir("/proc/self/fd"), [sys.getrefcount(t) for t in types]
    for _ in range(1000):
        once()
    gc.collect()
    assert os.listdir("/proc/self/fd") == fds
    assert [sys.getrefcount(t) for t in types] == references
    assert new_mappings(before) == []


# ---- arenas -------------------------------------------------------------------------


def test_a_view_has_the_layout_of_its_model_and_the_arenas_memory():
    arena = _native.SharedMemory(4096)
    like = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1)
    view = arena.view(64, like)
    assert (view.dtype, view.shape, view.stride()) == (
        like.dtype,
        like.shape,
        like.stride(),
    )
    assert view.data_ptr() == arena.address + 64
    assert not view.any()
    view.copy_(like)
    assert torch.equal(
        arena.view(64, torch.empty(24, dtype=torch.int16)).sort()[0],
        torch.arange(24, dtype=torch.int16),
    )


@pytest.mark.parametrize("dtype", DTYPES + MORE_DTYPES, ids=str)
def test_an_arena_holds_every_dtype(dtype):
    like = example(dtype)
    try:
        like.__dlpack__()
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__}: {error}")
    view = _native.SharedMemory(4096).view(0, like)
    view.copy_(like)
    assert_same(view, like)


def test_two_arenas_of_one_descriptor_are_one_memory():
    first = _native.SharedMemory(10_000)
    second = _native.SharedMemory(10_000, first.fd)
    first.view(16, torch.ones(3)).fill_(5.0)
    assert second.view(16, torch.ones(3)).tolist() == [5.0] * 3
    assert second.fd != first.fd
    assert first.n_bytes == second.n_bytes == 10_000


def pages_of(arena):
    """Return the arena's memory as numbers: each is at the beginning of a page."""
    return arena.view(0, torch.zeros(arena.n_bytes // 8, dtype=torch.int64))[::512]


def test_what_is_written_by_copy_on_write_reaches_nobody():
    caller = _native.SharedMemory(4 * 4096)
    ours = pages_of(caller)
    ours.copy_(torch.tensor([1, 2, 3, 4]))
    replica = _native.SharedMemory(4 * 4096, caller.fd, copy_on_write=True)
    theirs = pages_of(replica)
    pid = os.fork()
    if pid == 0:  # another process than the caller's
        theirs[1] = 20
        theirs[2] = 30
        os._exit(0 if theirs.tolist() == [1, 20, 30, 4] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert ours.tolist() == [1, 2, 3, 4]
    theirs[3] = 40
    assert ours.tolist() == [1, 2, 3, 4]
    ours += 100
    assert theirs.tolist() == [101, 102, 103, 40]  # follows, where it has not written


def test_what_was_written_by_copy_on_write_can_be_dropped():
    caller = _native.SharedMemory(3000 * 4096)
    replica = _native.SharedMemory(3000 * 4096, caller.fd, copy_on_write=True)
    ours, theirs = pages_of(caller), pages_of(replica)
    for written in ([0], [1, 2, 1023, 1024, 1025, 2999], list(range(3000)), []):
        theirs[written] = -1
        ours += 1
        replica.reload()
        assert torch.equal(ours, theirs)
    caller.reload()  # it has nothing of its own to drop
    assert ours[0] == 4


def test_copy_on_write_needs_memory_to_copy():
    with pytest.raises(ValueError, match="copy_on_write is for a descriptor"):
        _native.SharedMemory(4096, copy_on_write=True)


def test_a_view_outlives_its_arena():
    before = shared_mappings()
    arena = _native.SharedMemory(4096)
    view = arena.view(0, torch.ones(4))
    other = view[1:]
    del arena, view
    gc.collect()
    other.fill_(3.0)
    assert other.tolist() == [3.0] * 3
    del other
    gc.collect()
    assert new_mappings(before) == []


def test_a_view_is_saved_without_the_rest_of_its_arena(tmp_path):
    view = _native.SharedMemory(1 << 20).view(0, torch.ones(4))
    torch.save(view, tmp_path / "view.pt")
    assert (tmp_path / "view.pt").stat().st_size < 10_000


@pytest.mark.parametrize(
    ("offset", "like", "words"),
    [
        (-16, torch.ones(1), "beyond"),
        (4096, torch.ones(1), "beyond"),
        (4080, torch.ones(5), "beyond"),
        (2**62, torch.ones(1), "beyond"),
        (8, torch.ones(1), "multiple of 16"),
        (0, torch.ones(4, 4)[:, :2], "one block"),
    ],
)
def test_a_view_that_cannot_be_is_refused(offset, like, words):
    arena = _native.SharedMemory(4096)
    with pytest.raises(ValueError, match=words):
        arena.view(offset, like)


def test_a_view_up_to_the_last_byte_is_allowed():
    arena = _native.SharedMemory(4096)
    assert arena.view(4080, torch.ones(4)).numel() == 4
    assert arena.view(4096, torch.ones(0)).numel() == 0


@pytest.mark.parametrize("n_bytes", [0, -1])
def test_an_arena_of_no_bytes_is_refused(n_bytes):
    with pytest.raises(ValueError, match="positive"):
        _native.SharedMemory(n_bytes)


def test_an_arena_larger_than_its_descriptor_is_refused():
    arena = _native.SharedMemory(4096)
    with pytest.raises(ValueError, match="descriptor"):
        _native.SharedMemory(10_000, arena.fd)


def test_too_large_an_arena_is_an_error_and_no_signal():
    before = shared_mappings()
    with pytest.raises(MemoryError, match="available"):
        _native.SharedMemory(1 << 46)
    assert new_mappings(before) == []


def test_too_large_a_message_is_an_error_and_the_channel_goes_on(pair):
    huge = torch.ones(1).expand(1 << 34)
    with pytest.raises(MemoryError):
        pair.caller.post(1, b"", [huge, torch.ones(3)])
    assert not pair.caller.is_busy
    assert pair.echo([torch.ones(3)])[0].tolist() == [1.0] * 3
