"""The native reducer with communication hooks, callbacks and gradients elsewhere."""

import sys
import weakref

import pytest
import torch
from natives import MIB, follow, make_world
from paceline import _native
from support.leaks import assert_leaves_nothing
from torch import nn


class Carrier:
    """Doubles each bucket, and records its calls."""

    def __init__(self, reducer, sizes=()):
        self.reducer, self.sizes = weakref.ref(reducer), sizes
        self.calls, self.buckets = [], {}

    def post(self, index):
        reducer = self.reducer()
        params = reducer.buckets[index]
        buffer = torch.empty(sum(self.sizes[i] for i in params))
        reducer.read_bucket(index, buffer)
        self.buckets[index] = buffer
        self.calls.append(("post", index))

    def finish(self):
        self.calls.append(("finish",))
        for index, buffer in self.buckets.items():
            self.reducer().write_bucket(index, buffer * 2)

    def finish_sparse(self, params, is_active, binds):
        self.calls.append(("finish_sparse", params, is_active, binds))

    def refuse(self):
        """Return that nothing was refused."""

    def abandon(self):
        self.calls.append(("abandon",))


class Failing:
    def post(self, index):
        raise KeyError("post")

    def abandon(self):
        raise KeyError("abandon")


def reducer_of(*params, **options):
    world = make_world(arena_bytes=2 * MIB)
    return _native.Reducer(world, list(params), [], MIB, MIB // 4, 1024, **options)


def carried(*params, **options):
    reducer = reducer_of(*params, **options)
    sparse = options.get("sparse", ())
    sizes = [0 if i in sparse else p.numel() for i, p in enumerate(params)]
    carrier = Carrier(reducer, sizes)
    reducer.set_comm_hook(carrier, MIB, MIB)
    return reducer, carrier


def ones(*sizes):
    return [nn.Parameter(torch.ones(n)) for n in sizes]


# ---- carry --------------------------------------------------------------------------


def test_a_carrier_has_caps_for_each_bucket():
    reducer = reducer_of(*ones(*[16] * 6))
    assert reducer.buckets == [[5, 4, 3, 2, 1, 0]]
    reducer.set_comm_hook(Carrier(reducer), 64, 64, (64, 192))
    assert reducer.buckets == [[5], [4, 3, 2], [1, 0]]
    reducer.set_comm_hook(Carrier(reducer), 128, 128)
    assert reducer.buckets == [[5, 4], [3, 2], [1, 0]]


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ((0, 64), ValueError, "bucket_bytes 0"),
        ((64, -1), ValueError, "last_bytes -1"),
        ((64, 64, (64, 0)), ValueError, r"caps\[1\] is 0"),
        ((64, 64, ("64",)), TypeError, "integer"),
        ((64, 64, [64]), TypeError, "must be tuple"),
        ((64,), TypeError, "required argument"),
        ((64, 64, (1 << 80,)), OverflowError, "int"),
    ],
)
def test_a_bad_cap_of_a_carrier_is_named_and_changes_nothing(given, kind, words):
    (p,) = ones(16)
    reducer = reducer_of(p)
    carrier = Carrier(reducer)
    n = sys.getrefcount(carrier)
    with pytest.raises(kind, match=words):
        reducer.set_comm_hook(carrier, *given)
    assert sys.getrefcount(carrier) == n
    p.sum().backward()
    assert carrier.calls == []


@pytest.mark.parametrize(
    ("carrier", "error"),
    [(Failing(), KeyError), (object(), AttributeError)],
    ids=["fails", "has no methods"],
)
def test_what_a_carrier_raises_comes_out_of_backward_whatever_abandon_raises(
    carrier, error
):
    (p,) = ones(3)
    reducer = reducer_of(p)
    reducer.set_comm_hook(carrier, MIB, MIB)
    with pytest.raises(error, match="post"):
        p.sum().backward()
    assert not reducer.is_active


def test_what_is_declared_sparse_is_the_carriers_too():
    table, (bias,) = nn.Embedding(5, 2, sparse=True), ones(1)
    _, carrier = carried(table.weight, bias, sparse=[0])
    (table(torch.tensor([1])).sum() + bias.sum()).backward()
    sparse = ("finish_sparse", [0], True, True)
    assert carrier.calls == [("post", 0), ("finish",), sparse]
    carrier.calls.clear()
    bias.sum().backward()  # no step uses it
    assert [call[0] for call in carrier.calls] == ["post", "finish"]


# ---- read_bucket, write_bucket ------------------------------------------------------


@pytest.mark.parametrize("method", ["read_bucket", "write_bucket"])
@pytest.mark.parametrize(
    ("index", "tensor", "kind", "words"),
    [
        (1, torch.zeros(3), IndexError, "bucket 1 of 1"),
        (-1, torch.zeros(3), IndexError, "bucket -1 of 1"),
        (0, torch.zeros(4), ValueError, "4 x float32 does not fit a bucket of 3"),
        (0, torch.zeros(3).double(), ValueError, "3 x float64"),
        (0, torch.zeros(3, 2)[:, 0], ValueError, "contiguous"),
        (0, [0.0, 0.0, 0.0], TypeError, "a bucket's tensor"),
        ("0", torch.zeros(3), TypeError, "integer"),
    ],
)
def test_a_tensor_that_fits_no_bucket_is_named(method, index, tensor, kind, words):
    reducer = reducer_of(*ones(3))
    with pytest.raises(kind, match=words):
        getattr(reducer, method)(index, tensor)


def test_buckets_are_read_and_written_without_the_room_between_slots():
    reducer = reducer_of(*ones(3, 0, 5))
    assert reducer.poll() is None  # a world of one rank has nothing to poll
    reducer.write_bucket(0, torch.arange(8.0))
    back = torch.zeros(8)
    reducer.read_bucket(0, back)
    assert back.tolist() == [*range(8)]


# ---- on_finish, ready_counts, strict ------------------------------------------------


def test_the_end_of_each_step_is_told_once_all_gradients_are_there():
    p, unused = ones(3, 3000)
    reducer = reducer_of(p, unused)
    told = []

    def tell():
        told.append((p.grad.tolist(), reducer.ready_counts))
        if len(told) == 2:
            reducer.on_finish = None  # what is called may change who is told

    reducer.on_finish = tell
    del tell
    for _ in range(3):
        p.grad = None
        p.sum().backward()
    assert told == [([1.0] * 3, b"\1\0")] * 2
    reducer.on_finish = print
    del reducer.on_finish
    assert reducer.on_finish is None


def test_whether_to_be_strict_is_a_bool():
    reducer = reducer_of(*ones(3))
    assert reducer.strict is False
    for value in (1, None, "yes"):
        with pytest.raises(TypeError, match="bool"):
            reducer.strict = value
    reducer.strict = True
    assert reducer.strict is True


def test_what_is_raised_at_the_end_comes_out_of_backward_and_the_step_stands():
    (p,) = ones(3)
    reducer = reducer_of(p)
    reducer.on_finish = lambda: {}["mine"]
    with pytest.raises(KeyError, match="mine"):
        p.sum().backward()
    assert p.grad.tolist() == [1.0] * 3
    assert not reducer.is_active
    reducer.on_finish = 5
    with pytest.raises(TypeError, match="not callable"):
        p.sum().backward()
    reducer.on_finish = None
    p.sum().backward()
    assert reducer.step == 3


# ---- gradients outside of the parameters --------------------------------------------


class Home:
    """Holds a gradient instead of the parameter."""

    def __init__(self, values):
        self.grad = None if values is None else torch.tensor(values)


def doubled(*homes):
    """Return a reducer that doubles gradients; parameters have 3 elements each."""
    params = ones(*[3] * len(homes))
    reducer, _ = carried(*params)
    reducer.contexts = lambda task: homes
    return reducer, params


def backward_through(*calls):
    """Run backward through one tensor, and call each function in it."""
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    for call in calls:
        y.register_hook(lambda _, call=call: call())
    y.backward()


def test_two_backwards_at_once_are_refused():
    reducer, _ = doubled(Home([1.0] * 3))
    with pytest.raises(RuntimeError, match="one after the other"):
        backward_through(
            lambda: reducer.arrive_in_context(0, 5),
            lambda: reducer.arrive_in_context(0, 6),
        )
    assert reducer.has_failed
    other, (p,) = doubled(Home([1.0] * 3))
    with pytest.raises(RuntimeError, match="one after the other"):
        backward_through(lambda: other.arrive_in_context(0, 5), p.sum().backward)


def test_arguments_are_checked():
    reducer, _ = doubled(Home([1.0] * 3))
    for arguments in ((1, 5), (-1, 5), (0, -1)):
        with pytest.raises(ValueError, match="no parameter"):
            reducer.arrive_in_context(*arguments)
    with pytest.raises(TypeError):
        reducer.arrive_in_context(0)
    del reducer.contexts
    assert reducer.contexts is None
    with pytest.raises(ValueError, match="no parameter"):
        reducer.arrive_in_context(0, 5)


@pytest.mark.parametrize(
    ("contexts", "error"),
    [
        (lambda task: [], ValueError),
        (lambda task: 5, TypeError),
        (lambda task: {}["mine"], KeyError),
        (5, TypeError),
    ],
)
def test_what_cannot_be_read_fails_the_step(contexts, error):
    reducer, _ = doubled(Home([1.0] * 3))
    reducer.contexts = contexts
    with pytest.raises(error):
        backward_through(lambda: reducer.arrive_in_context(0, 5))
    assert reducer.has_failed


def test_a_reducer_without_its_hooks_takes_nothing():
    home = Home([1.0] * 3)
    reducer, _ = doubled(home)
    reducer.detach()
    backward_through(lambda: reducer.arrive_in_context(0, 5))
    assert home.grad.tolist() == [1.0] * 3


# ---- group comms --------------------------------------------------------------------


class GroupCallbacks:
    def __init__(self):
        self.calls = []

    def issue(self, *args):
        self.calls.append(("issue", *args))

    def wait(self, ticket):
        self.calls.append(("wait", ticket))

    def drop(self):
        self.calls.append(("drop",))


def make_group_comm(callbacks, rank=1, size=3):
    return make_world(rank=rank, world_size=size, pids=[0] * size, group_comm=callbacks)


def test_group_callbacks_get_each_operation_and_what_is_waited_for():
    callbacks = GroupCallbacks()
    world = make_group_comm(callbacks)
    assert (world.rank, world.world_size) == (1, 3)
    assert world.issue("all-reduce", "float32", "mean", 64, 10) == 1
    assert world.issue("broadcast", "uint8", "sum", 0, 5, 2) == 2
    world.wait(2)
    world.wait(1)
    assert callbacks.calls == [
        ("issue", "all-reduce", "float32", "mean", 64, 10, 0, 1),
        ("issue", "broadcast", "uint8", "sum", 0, 5, 2, 2),
        ("wait", 2),
    ]


@pytest.mark.parametrize("where", ["issue", "wait"])
def test_what_group_callbacks_raise_comes_through_and_ends_their_world(where):
    callbacks = GroupCallbacks()
    world = make_group_comm(callbacks)
    world.issue("barrier", "uint8", "sum", 0, 0)
    setattr(callbacks, where, lambda *args: {}["mine"])
    calls = {
        "issue": lambda: world.issue("barrier", "uint8", "sum", 0, 0),
        "wait": lambda: world.wait(1),
    }
    with pytest.raises(KeyError, match="mine"):
        calls[where]()
    assert callbacks.calls[-1] == ("drop",)
    for call in calls.values():
        with pytest.raises(_native.PeerError, match=r"KeyError: 'mine'.*wrap the"):
            call()


@pytest.mark.parametrize(
    ("method", "error"),
    [("issue", AttributeError), ("wait", AttributeError), ("drop", KeyError)],
)
def test_an_object_without_group_callbacks_is_an_attribute_error(method, error):
    class Part(GroupCallbacks):
        def __getattribute__(self, name):
            if name == method:
                raise AttributeError(name)
            return super().__getattribute__(name)

    callbacks = Part()
    world = make_group_comm(callbacks)
    if method == "drop":  # a failure to report the end does not change the error
        callbacks.wait = lambda ticket: {}["drop"]

    def use():
        world.issue("barrier", "uint8", "sum", 0, 0)
        world.wait(1)

    with pytest.raises(error, match=method):
        use()


def test_a_group_comm_needs_a_rank_of_its_world():
    with pytest.raises(ValueError, match="rank 3 of world_size 3"):
        make_group_comm(GroupCallbacks(), rank=3)
    with pytest.raises(ValueError, match="pids"):
        make_world(rank=0, world_size=2, pids=[0], group_comm=GroupCallbacks())


# ---- leaks --------------------------------------------------------------------------


def test_hundreds_of_reducers_whose_carriers_refer_to_them_leave_nothing():
    def make():
        (p,) = ones(3)
        reducer, carrier = carried(p)
        carrier.owner = reducer
        reducer.on_finish = lambda: reducer
        p.sum().backward()
        assert carrier.calls == [("post", 0), ("finish",)]
        assert p.grad.tolist() == [2.0] * 3

    assert_leaves_nothing(make, Carrier, _native.Reducer, n=200)


def test_a_hundred_failures_of_a_carrier_leave_nothing():
    (p,) = ones(3)

    def make():
        reducer, carrier = carried(p)
        carrier.post = lambda index: {}["mine"]
        with pytest.raises(KeyError):
            p.sum().backward()
        follow(reducer, reducer_of(p))

    assert_leaves_nothing(make, p, n=100)


def test_a_thousand_worlds_over_groups_leave_nothing():
    def make():
        world = make_group_comm(callbacks)
        world.issue("barrier", "uint8", "sum", 0, 0)
        world.wait(1)
        callbacks.calls.clear()

    callbacks = GroupCallbacks()
    assert_leaves_nothing(make, callbacks, _native.RankWorld)
