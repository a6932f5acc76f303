"""The native module: its errors, and a world of one rank."""

import copy
import os
import warnings

import paceline
import pytest
import torch
from natives import MIB, make_reducer, make_world, watched_net
from paceline import _native, _recorder
from paceline._compat import torch_core
from paceline._ddp.model_spec import Watch
from support.programs import run_python
from support.threads import in_threads
from torch import nn

# ---- bad arguments ------------------------------------------------------------------


def raised_by(call, *args, **kwargs):
    kinds = ValueError, TypeError, KeyError, NotImplementedError
    with pytest.raises(kinds) as caught:
        call(*args, **kwargs)
    words = str(caught.value)
    assert "\n" not in words, "one line"
    return words


def assert_named(words, *messages):
    for message in messages:
        assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 1}, ["rank 1", "world_size 1"]),
        ({"rank": -1}, ["rank -1", "world_size 1"]),
        ({"world_size": 0}, ["world_size 0"]),
        ({"world_size": 1025, "pids": [0] * 1025}, ["world_size 1025", "1024"]),
        ({"arena_bytes": -1}, ["arena_bytes", "-1"]),
        ({"n_ops": 0}, ["n_ops", "0"]),
        ({"n_ops": -3}, ["n_ops", "-3"]),
        ({"timeout": 0.0}, ["timeout", "0"]),
        ({"timeout": -2.5}, ["timeout", "-2.5"]),
        ({"timeout": float("nan")}, ["timeout", "nan"]),
        ({"pids": []}, ["pids", "0 entries", "1 rank"]),
        ({"pids": [0, 0]}, ["pids", "2 entries", "1 rank"]),
        ({"pids": 3}, ["pids", "sequence"]),
        ({"pids": ["a"]}, ["pids"]),
        ({"meeting": "somewhere"}, ["meeting", "Listener"]),
        ({"meeting": 3}, ["meeting", "Listener"]),
        ({"rank": 1, "world_size": 2, "pids": [0, 0]}, ["meeting", "address"]),
        ({"world_size": 2, "pids": [0, 0], "prove": None}, ["prove", "None"]),
    ],
    ids=str,
)
def test_a_bad_argument_of_a_world_is_named_with_its_value(changes, words):
    assert_named(words, raised_by(make_world, **changes))


@pytest.mark.parametrize(
    ("changes", "kinds", "words"),
    [
        ({"pids": [1 << 40]}, (ValueError, OverflowError), ""),
        (
            {"arena_bytes": 1 << 60},
            (MemoryError, OSError),
            r"\d+ bytes of shared memory",
        ),
        (
            {
                "rank": 1,
                "world_size": 2,
                "pids": [0, 0],
                "meeting": "x",
                "timeout": 0.2,
            },
            paceline.PeerError,
            "rank 0",
        ),
    ],
    ids=["a process id that is none", "too large an arena", "the address of nobody"],
)
def test_a_world_that_cannot_be_had_is_an_error(changes, kinds, words):
    with pytest.raises(kinds, match=words):
        make_world(**changes)


@pytest.mark.parametrize("timeout", [float("inf"), 1e30], ids=str)
def test_an_endless_timeout_waits_and_does_not_overflow(timeout):
    world = make_world(timeout=timeout, arena_bytes=MIB)
    world.wait(world.issue("all-reduce", "float32", "sum", 0, 1024))


GOOD_OP = ("all-reduce", "float32", "sum", 0, 4)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, "all_reduce", ["kind", "all_reduce"]),
        (1, "float31", ["dtype", "float31"]),
        (2, "median", ["reduction", "median"]),
        (3, -64, ["-64"]),
        (3, 4096, ["4096"]),
        (3, 1, ["1"]),
        (4, -4, ["-4"]),
        (4, 1025, ["1025"]),
        (4, 1 << 62, [str(1 << 62)]),
        (5, 1, ["root", "1"]),
        (5, -1, ["root", "-1"]),
        (slice(1, 3), ["float32", "max"], ["float32"]),
        (slice(1, 3), ["int32", "mean"], ["int32"]),
        (slice(1, 3), ["complex64", "max"], ["complex64"]),
    ],
    ids=str,
)
def test_a_bad_argument_of_an_operation_is_named_with_its_value(at, value, words):
    op = [*GOOD_OP, 0]
    op[at] = value
    if at == 5:
        op[0] = "broadcast"
    assert_named(words, raised_by(make_world().issue, *op))


def test_a_bad_operation_or_ticket_leaves_the_world_usable():
    world = make_world(timeout=1.0)
    raised_by(world.issue, "all-reduce", "float32", "sum", 0, 1 << 40)
    world.wait(world.issue(*GOOD_OP))
    assert "99" in raised_by(world.wait, 99)
    for call in (world.note_exception, world.fail, world.record):
        assert "is 3: give a" in raised_by(call, 3)
    world.wait(world.issue(*GOOD_OP))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (None, ["tensors", "sequence"]),
        ([3], ["a tensor to broadcast"]),
        ([torch.ones(4, 4)[:, :2]], ["tensors[0]", "holes"]),
        ([torch.ones(2), torch.ones(1).expand(3)], ["tensors[1]", "overlaps"]),
        ([torch.ones(2, device="meta")], ["a tensor to broadcast", "meta"]),
        ([torch.eye(2).to_sparse()], ["a tensor to broadcast"]),
        ([torch.zeros(2, dtype=torch.complex32).conj()], ["complex32", "contiguous"]),
    ],
    ids=["none", "number", "holes", "overlap", "meta", "sparse", "lazy halves"],
)
def test_what_cannot_be_broadcast_is_named(tensors, words):
    assert_named(words, raised_by(make_world().broadcast, tensors))


PARAM = nn.Parameter(torch.ones(3))


def half_complex():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.empty(3, dtype=torch.complex32)


BAD_TENSORS = {
    "params: no list": ((3, []), ["must be list, not int"]),
    "params: none": (([], []), ["params is empty"]),
    "params: number": (([3], []), ["parameter"]),
    "params: meta": (([torch.ones(3, device="meta")], []), ["parameter", "meta"]),
    "params: sparse": (([torch.eye(3).to_sparse()], []), ["parameter"]),
    "params: complex32": (([half_complex()], []), ["parameter", "type"]),
    "buffers: no list": (([PARAM], 3), ["must be list, not int"]),
    "buffers: number": (([PARAM], [3]), ["buffers"]),
    "buffers: pair": (([PARAM], [({}, "a")]), ["buffers"]),
    "buffers: no dict": (([PARAM], [(3, "a", False)]), ["buffers", "dict"]),
    "buffers: missing": (([PARAM], [({}, "a", False)]), ["'a'"]),
    "buffers: no tensor": (([PARAM], [({"a": 3}, "a", False)]), ["buffer"]),
    "buffers: None": (([PARAM], [({"a": None}, "a", False)]), ["buffer"]),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("what", BAD_TENSORS)
def test_a_bad_tensor_is_named_when_a_reducer_is_measured_and_made(what):
    (params, buffers), words = BAD_TENSORS[what]
    assert_named(
        words,
        raised_by(_native.measure, params, buffers, MIB, MIB),
        raised_by(_native.Reducer, make_world(), params, buffers, MIB, MIB, 0),
    )


def test_a_bad_size_of_a_reducer_is_named_with_its_value():
    names = ("bucket_bytes", "last_bytes", "view_bytes")
    for at, value in ((0, 0), (0, -5), (1, 0), (2, -1)):
        sizes = [MIB, MIB, 1]
        sizes[at] = value
        words = [names[at], str(value)]
        assert_named(words, raised_by(make_reducer, sizes=sizes))
        if at < 2:
            assert_named(words, raised_by(_native.measure, [PARAM], [], *sizes[:2]))


@pytest.mark.parametrize(
    ("sparse", "words"),
    [
        (3, ["must be list, not int"]),
        ([2], ["sparse has 2"]),
        ([1], ["sparse has 1", "rows"]),
        (["a"], ["int"]),
        ([-1], ["sparse has -1"]),
    ],
    ids=["no list", "no such parameter", "no rows", "text", "negative"],
)
def test_a_bad_declaration_of_what_is_sparse_is_named(sparse, words):
    params = [PARAM, nn.Parameter(torch.tensor(1.0))]
    assert_named(
        words,
        raised_by(_native.measure, params, [], MIB, MIB, sparse),
        raised_by(_native.Reducer, make_world(), params, [], MIB, MIB, 0, sparse),
    )


def test_a_sparse_parameter_takes_no_room_beside_the_staging_that_all_share():
    params = [nn.Parameter(torch.ones(1000, 1000)) for _ in range(3)]
    dense, *_ = _native.measure(params, [], MIB, MIB)
    one, *_ = _native.measure(params, [], MIB, MIB, [1])
    all_three, *_ = _native.measure(params, [], MIB, MIB, [0, 1, 2])
    assert dense - one == 4_000_000 - MIB
    assert one - all_three == 8_000_000


def test_a_reducer_needs_a_world():
    message = raised_by(_native.Reducer, 3, [PARAM], [], MIB, MIB, 1)
    assert_named(["World", "int"], message)
    assert "give a Reducer" in raised_by(make_reducer().follow, 3)


def test_an_arena_as_large_as_measured_is_enough_and_no_smaller_one():
    params = [nn.Parameter(torch.ones(n)) for n in (1, 1000, 3)]
    needed, n_ops, _ = _native.measure(params, [], 64, 64)
    make_reducer(make_world(arena_bytes=needed, n_ops=n_ops), params, (), (64, 64, 0))
    small = make_world(arena_bytes=64, n_ops=n_ops)
    assert str(needed) in raised_by(make_reducer, small, params, (), (64, 64, 0))


def test_the_facts_of_a_reducer_are_read_only():
    reducer = make_reducer()
    for name in ("step", "n_taken", "is_active", "has_failed", "buckets"):
        with pytest.raises(AttributeError):
            setattr(reducer, name, 1)
    with pytest.raises((TypeError, AttributeError), match="delete"):
        del reducer.sync
    assert (reducer.step, reducer.is_active, reducer.buckets) == (0, False, [[0]])
    assert reducer.sync is True


def callables(monkeypatch):
    """Return all callables that attach() passes to the native module."""
    taken = {}
    with monkeypatch.context() as patch:
        patch.setattr(torch_core._native, "attach_torch", taken.update)
        torch_core.attach()
    return taken


@pytest.mark.parametrize("value", [None, 3, "missing"])
def test_a_callable_of_torch_that_is_none_is_named(monkeypatch, value):
    given = callables(monkeypatch)
    assert len(given) >= 7
    try:
        for name in given:
            changed = {**given, name: value}
            if value == "missing":
                del changed[name]
            if name != "exchange" or value == 3:  # None: torch may have no table
                assert name in raised_by(_native.attach_torch, **changed)
        assert "keywords" in raised_by(_native.attach_torch, 1)
    finally:
        torch_core.attach()


@pytest.mark.parametrize(
    "kind", ["Listener", "RankWorld", "Reducer", "Hook", "BackwardEnd"]
)
def test_types_cannot_be_changed_or_subclassed_nor_some_of_them_made(kind):
    made = getattr(_native, kind)
    with pytest.raises(TypeError, match="immutable"):
        made.extra = 1
    with pytest.raises(TypeError, match="base type"):
        type("Sub", (made,), {})
    if kind in ("Hook", "BackwardEnd"):
        with pytest.raises(TypeError, match="cannot create"):
            made()


# ---- a world of one rank ------------------------------------------------------------


def test_a_world_knows_its_rank_and_its_size_and_starts_as_zeros():
    world = make_world(arena_bytes=MIB)
    assert (world.rank, world.world_size, memoryview(world).nbytes) == (0, 1, MIB)
    assert not any(memoryview(world))


def test_a_world_that_failed_stays_so_but_its_recording_may_go_on():
    name, listener = f"goes-on-{os.getpid()}", _native.Listener()
    met = [listener, listener.address]
    known = {"world_size": 2, "pids": [0, 0], "arena_bytes": MIB}
    ranks = in_threads(lambda r: make_world(rank=r, meeting=met[r], **known), 2)
    recorder = _native.Recorder(name, "{}")
    ranks[0].record(recorder)
    ranks[0].fail("I gave up")
    make_reducer(ranks[1]).abandon("so did I")
    for world in ranks * 2:
        with pytest.raises(paceline.PeerError, match="I gave up"):
            world.wait(world.issue(*GOOD_OP))
        world.check_gone()
    ranks[0].record(None)
    ranks[0].leave()
    ranks[0].leave()  # a second call does nothing
    with pytest.raises(paceline.PeerError, match=r"rank 0 .* has left"):
        ranks[1].check_gone()
    assert len(list(_recorder.find(name))) == 1


# ---- Watch --------------------------------------------------------------------------


CHANGES = {
    "unfrozen": lambda net: net[0].weight.requires_grad_(True),
    "converted": lambda net: net.double(),
    "replaced parameter": lambda net: setattr(net[0], "weight", nn.Parameter(PARAM)),
    "removed parameter": lambda net: setattr(net[0], "bias", None),
    "added parameter": lambda net: setattr(net[0], "extra", nn.Parameter(PARAM)),
    "None became a parameter": lambda net: setattr(net[2], "bias", nn.Parameter(PARAM)),
    "replaced layer": lambda net: net.__setitem__(0, copy.deepcopy(net[0])),
    "added layer": lambda net: net.append(nn.Linear(1, 1)),
    "added buffer": lambda net: net.register_buffer("more", torch.ones(1)),
    "renamed buffer": lambda net: net[1]._buffers.update(
        mean=net[1]._buffers.pop("running_mean")
    ),
    "swapped parameters": lambda net: torch.utils.swap_tensors(
        net[0].weight, nn.Parameter(PARAM)
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_a_model_is_noticed(what):
    net = watched_net()
    net[0].weight.requires_grad_(what != "unfrozen")
    seen = Watch(net)
    assert seen.changed() is False
    CHANGES[what](net)
    assert seen.changed() is True
    assert Watch(net).changed() is False


def test_training_and_freezing_and_thawing_a_model_are_no_change():
    net = watched_net()
    seen = Watch(net)
    net(torch.randn(4, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net[1].running_mean = torch.zeros(2)
    net.eval().train()
    net.load_state_dict(net.state_dict())
    for wanted in (False, True):
        net[0].weight.requires_grad_(wanted)
        assert seen.changed() is False


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, ["list", "3"]),
        ([3], ["3", "(parameter, dtype, __dict__, trains)"]),
        ([(3, 3, {}, True)], ["__dict__"]),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_named(given, words):
    with pytest.raises((TypeError, AttributeError)) as caught:
        _native.converted(given)
    assert_named(words, str(caught.value))


def test_a_property_that_a_class_gets_later_is_read(monkeypatch):
    p = nn.Parameter(torch.ones(2))
    noted = [(p, torch.float32, p.__dict__, True)]
    for _ in range(3):
        assert not _native.converted(noted)
    with monkeypatch.context() as patch:
        half = property(lambda _: torch.float16)
        patch.setattr(nn.Parameter, "dtype", half, raising=False)
        assert _native.converted(noted)
    assert not _native.converted(noted)


# ---- the environment ----------------------------------------------------------------


def run(code, **env):
    return run_python(code, env={**os.environ, **env}, check=False)


ASK_ISA = "from paceline import _native; print(_native.isa())"
LACKING = "avx2" if os.uname().machine == "aarch64" else "neon"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("avx9000", ["ValueError", "avx9000", "plain", "neon", "avx2", "avx512"]),
        (LACKING, [LACKING, "PACELINE_ISA"]),
    ],
)
def test_an_instruction_set_that_is_not_there_is_named(word, told):
    result = run(ASK_ISA, PACELINE_ISA=word)
    assert result.returncode == 1
    assert_named(told, result.stderr.splitlines()[-1])


def test_a_bad_instruction_set_is_an_error_where_a_reducer_is_made(monkeypatch):
    monkeypatch.setenv("PACELINE_ISA", "avx9000")
    with pytest.raises(ValueError, match="avx9000"):
        make_reducer()


def test_a_bad_timeout_is_named_with_its_value(monkeypatch):
    monkeypatch.setenv("PACELINE_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="PACELINE_TIMEOUT is 'soon'"):
        make_world()
