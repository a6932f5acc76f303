"""The parts of the process engine, one at a time, without a worker process."""

import dataclasses
import gc
import os
import pickle
import threading
import weakref

import pytest
import torch
from natives import _torch  # hands torch to the native module
from paceline import _native, _pool, _protocol, _replica, _shared, _strays, _travel
from paceline._travel import CannotTravelError
from torch import nn

assert _torch


# ---- how things travel --------------------------------------------------------------


LAYOUTS = {
    "rows": lambda: torch.arange(6.0).view(2, 3),
    "columns": lambda: torch.arange(6.0).view(2, 3).t(),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(
        memory_format=torch.channels_last
    ),
    "sixteen bits": lambda: torch.ones(3, dtype=torch.bfloat16),
    "bytes": lambda: torch.ones(65, dtype=torch.uint8),
    "no dimensions": lambda: torch.tensor(7),
    "no elements": lambda: torch.ones(0, 3),
}


def test_every_tensor_gets_a_place_of_its_own():
    tensors = [make() for make in LAYOUTS.values()]
    places, end = _travel.lay_out(tensors, 128)
    arena = _native.Arena(end)
    views = [arena.view(place.offset, place.like()) for place in places]
    for tensor, view, place in zip(tensors, views, places, strict=True):
        assert place.offset % _travel.ALIGNMENT == 0
        assert place.offset >= 128
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert view.stride() == tensor.stride()
        view.copy_(tensor)
    assert all(map(torch.equal, views, tensors))  # none has written into another
    assert _travel.lay_out([], 192) == ([], 192)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 6)[:, ::2], torch.ones(1, 3).expand(2, 3)],
    ids=["holes", "overlaps"],
)
def test_tensors_with_holes_get_dense_places(tensor):
    (place,), end = _travel.lay_out([tensor], 0)
    assert place.shape == tensor.shape
    assert _torch.is_dense(place.like())
    assert end >= tensor.numel() * 4


def test_places_can_be_pickled():
    (place,), _ = _travel.lay_out([LAYOUTS["columns"]()], 64)
    assert pickle.loads(pickle.dumps(place)) == place


class Tagged(nn.Parameter):
    pass


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_is_made_anew_over_other_memory(requires_grad):
    given = Tagged(torch.ones(2), requires_grad)
    given.is_special = True
    memory = torch.zeros(2)
    made = _travel.rebuild(_travel.describe(given), memory)
    assert type(made) is Tagged
    assert (made.is_special, made.requires_grad) == (True, requires_grad)
    assert made.is_leaf
    memory.fill_(5)
    assert made.tolist() == [5.0, 5.0]
    made.is_special = False
    assert given.is_special


def test_tensors_of_the_table_stay_behind():
    kept, sent = torch.ones(1000), torch.zeros(2)
    words = _travel.dumps({"a": [kept, kept], "b": sent}, {id(kept): ("parameter", 3)})
    assert len(words) < 2000
    other = torch.ones(1)
    got = _travel.loads(words, {("parameter", 3): other})
    assert got["a"][0] is other
    assert got["a"][1] is other
    assert torch.equal(got["b"], sent)


def test_code_of_a_script_travels_by_value():
    scope = {"__name__": "__main__"}
    exec("factor = 3\ndef scale(x): return x * factor", scope)
    words = _travel.dumps(scope["scale"], {})
    scope["factor"] = 100  # what was captured does not change
    assert _travel.loads(words, {})(2) == 6


def test_what_cannot_travel_says_why():
    with pytest.raises(
        CannotTravelError, match=r"it cannot be pickled: TypeError: .*lock"
    ):
        _travel.dumps({"lock": threading.Lock()}, {})


# ---- gradients that no slot holds ---------------------------------------------------


def sparse(rows, values):
    return torch.sparse_coo_tensor(rows, values, (4, 2), check_invariants=True)


def test_strays_come_out_as_they_went_in():
    given = [
        (0, sparse([[1, 1, 3]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])),
        (4, torch.ones(2, dtype=torch.float64)),
    ]
    words, parts = _strays.pack(given)
    assert all(part.layout == torch.strided for part in parts)
    got = _strays.unpack(words, parts)
    assert [index for index, _ in got] == [0, 4]
    first, second = (gradient for _, gradient in got)
    assert first.is_sparse
    assert first.is_coalesced()
    assert first.indices().tolist() == [[1, 3]]
    assert first.to_dense().tolist() == [[0, 0], [4, 6], [0, 0], [5, 6]]
    assert torch.equal(second, given[1][1])
    assert second.dtype == torch.float64


def test_a_sparse_stray_may_have_no_rows():
    empty = sparse(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2))
    ((index, got),) = _strays.unpack(*_strays.pack([(2, empty)]))
    assert (index, got.shape, got._nnz()) == (2, (4, 2), 0)


def test_no_strays_are_no_words():
    assert _strays.pack([]) == (b"", [])
    assert _strays.unpack(b"", []) == []


# ---- what replicas share of torch's state -------------------------------------------


def state_of_torch():
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )


@pytest.fixture
def _state_of_torch():
    dtype, is_deterministic, warns_only, precision = state_of_torch()
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
    torch.set_float32_matmul_precision(precision)


CHANGES_OF_STATE = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "determinism": lambda: torch.use_deterministic_algorithms(True),
    "warnings": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.usefixtures("_state_of_torch")
@pytest.mark.parametrize("change", CHANGES_OF_STATE.values(), ids=CHANGES_OF_STATE)
def test_modes_are_seen_and_taken_over(change):
    before, plain = _protocol.Modes.now(), state_of_torch()
    change()
    changed, wanted = _protocol.Modes.now(), state_of_torch()
    assert changed != before
    before.adopt()
    assert state_of_torch() == plain
    pickle.loads(pickle.dumps(changed)).adopt()
    assert state_of_torch() == wanted


def test_autocast_is_seen_and_left_to_the_forward():
    before = _protocol.Modes.now()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        inside = _protocol.Modes.now()
        before.adopt()
        assert torch.is_autocast_enabled("cpu")
    assert inside.autocast == (True, torch.bfloat16, False)
    assert before.autocast[0] is False


def test_modes_that_hold_already_are_not_set_again(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("set for nothing")

    for name in (
        "set_default_dtype",
        "use_deterministic_algorithms",
        "set_float32_matmul_precision",
    ):
        monkeypatch.setattr(torch, name, refuse)
    _protocol.Modes.now().adopt()


# ---- which models may leave ---------------------------------------------------------


class Odd(nn.Module):
    """A layer, and whatever a test makes of it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))


def _alias(net):
    net.other = nn.Parameter(net.layer.weight.data[0])


def _interleave(net):
    memory = torch.zeros(4, 2)
    net.a, net.b = nn.Parameter(memory[::2]), nn.Parameter(memory[1::2])


REASONS = {
    "a hook": (
        lambda net: net.layer.register_forward_hook(print),
        r"'layer' \(Linear\) has hooks",
    ),
    "a hook before": (
        lambda net: net.register_forward_pre_hook(print),
        r"'' \(Odd\) has hooks",
    ),
    "a backward hook": (
        lambda net: net.layer.register_full_backward_hook(print),
        r"'layer' \(Linear\) has hooks",
    ),
    "a lazy parameter": (
        lambda net: setattr(net, "late", nn.UninitializedParameter()),
        r"'late' has no shape yet",
    ),
    "a script": (
        lambda net: net.add_module("script", torch.jit.script(nn.ReLU())),
        r"'script' \(.*\) is a ScriptModule",
    ),
    "another device": (
        lambda net: net.layer.to("meta"),
        r"'layer\.weight' is a torch\.strided tensor on meta",
    ),
    "a sparse buffer": (
        lambda net: net.register_buffer("rows", torch.ones(2, 2).to_sparse()),
        r"'rows' is a torch\.sparse_coo tensor on cpu",
    ),
    "a trained buffer": (
        lambda net: net.count.requires_grad_(True),
        "buffer 'count' requires a gradient",
    ),
    "a view": (_alias, r"'(layer\.weight|other)' and '.*' share their memory"),
    "interleaved views": (_interleave, "'b' and 'a' share their memory"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize(("change", "words"), REASONS.values(), ids=REASONS)
def test_a_model_that_has_to_stay_says_why(change, words):
    net = Odd()
    assert _shared.reason_to_stay(net) is None
    change(net)
    with pytest.raises(CannotTravelError, match=words):
        _shared.SharedModel(net, 1)


def test_hooks_for_all_modules_keep_a_model_here():
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert _shared.reason_to_stay(Odd()) == "hooks are registered for all modules"
    finally:
        handle.remove()
    assert _shared.reason_to_stay(Odd()) is None


def test_tied_weights_and_empty_ones_may_travel():
    net = Odd()
    net.tied = nn.Linear(2, 2)
    net.tied.weight = net.layer.weight
    net.none = nn.Parameter(torch.zeros(0))
    net.nothing = None
    assert _shared.reason_to_stay(net) is None


# ---- a model in shared memory -------------------------------------------------------


class Net(nn.Module):
    """Parameters and buffers of several kinds; a child with its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.frozen = nn.Parameter(torch.tensor([1.0, 1.0]), requires_grad=False)
        self.child = nn.Linear(2, 2)
        self.register_buffer("offset", torch.tensor([1.0, 1.0]))
        self.power = 1
        self.table = torch.tensor([1.0, 1.0])
        self.options = {"a": 1}
        with torch.no_grad():
            self.child.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
            self.child.bias.zero_()

    def forward(self, x):
        if self.training:
            self.offset += 1
        y = self.child(x) * self.scale + self.frozen
        return (y + self.offset) * self.table * self.power


def test_sharing_moves_parameters_and_nothing_else():
    net = Net()
    objects = [*net.parameters(), *net.buffers()]
    state = {name: x.clone() for name, x in net.state_dict().items()}
    places = [b.data_ptr() for b in net.buffers()]
    model = _shared.SharedModel(net, 2)
    assert all(
        a is b
        for a, b in zip([*net.parameters(), *net.buffers()], objects, strict=True)
    )
    assert all(torch.equal(x, state[name]) for name, x in net.state_dict().items())
    assert [b.data_ptr() for b in net.buffers()] == places
    begin = model.arena.address
    for parameter in net.parameters():
        assert begin <= parameter.data_ptr() < begin + model.arena.n_bytes
        assert parameter.is_leaf
    assert model.n_slots == 3  # the frozen one has none
    assert all(map(torch.equal, model._buffer_views, net.buffers()))
    assert net(torch.ones(1, 2)).tolist() == [[5.0, 6.0]]


def test_two_models_over_the_same_parameters_share_their_places():
    net = Net()
    first = _shared.SharedModel(net, 1)
    places = [p.data_ptr() for p in net.parameters()]
    holder = nn.Sequential(net, nn.Linear(2, 2))
    second = _shared.SharedModel(holder, 1)
    assert [p.data_ptr() for p in net.parameters()] == places
    assert not first._placed.moved()
    described = second.describe(0)
    assert described.arenas[0] == (first.arena.fd, first.arena.n_bytes)
    assert described.arenas[described.own_arena][0] == second.arena.fd


def test_a_shared_model_is_freed_and_its_parameters_stay():
    net = Net()
    model = _shared.SharedModel(net, 1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert net.scale.tolist() == [2.0, 3.0]
    net.scale.data.add_(1)
    assert net.scale.tolist() == [3.0, 4.0]


def news_of(model):
    """Return what replicas hear, and what they have to write."""
    news = model.changes()
    if news and "attributes" in news:
        known = {key: key for key in model._all_keys.values()}
        news["attributes"] = _travel.loads(news["attributes"][0], known)[0]
    return news


def named(index, **values):
    """Return what a module has to write."""
    return [(("module", index), "module", (False, values, []))]


def test_nothing_is_said_where_nothing_has_changed():
    net = Net()
    model = _shared.SharedModel(net, 1)
    assert model.changes() == {}
    with torch.no_grad():
        net.scale.mul_(2)  # both see it: it lies in shared memory
    net.offset.add_(3)  # copied to its place
    assert model.changes() == {}
    assert model._buffer_views[0].tolist() == [4.0, 4.0]


ATTRIBUTES = {
    "number": (lambda net: setattr(net, "power", 2), named(0, power=2)),
    "new": (lambda net: setattr(net, "fresh", "x"), named(0, fresh="x")),
    "training": (lambda net: net.child.eval(), named(1, training=False)),
    "dict": (lambda net: setattr(net, "options", {"a": 2}), named(0, options={"a": 2})),
}


@pytest.mark.parametrize(("change", "expected"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes_that_were_assigned_are_told_once(change, expected):
    net = Net()
    model = _shared.SharedModel(net, 1)
    change(net)
    assert news_of(model) == {"attributes": expected}
    assert model.changes() == {}


@pytest.mark.parametrize(
    ("change", "value_of"),
    [
        (lambda net: net.table.add_(4), lambda payload: payload[0]),
        (
            lambda net: setattr(net, "table", net.table + 4),
            lambda payload: payload[1]["table"],
        ),
    ],
    ids=["in place", "assigned"],
)
def test_tensor_attributes_are_told_when_their_values_change(change, value_of):
    net = Net()
    model = _shared.SharedModel(net, 1)
    change(net)
    ((_, _, payload),) = news_of(model)["attributes"]
    assert value_of(payload).tolist() == [5.0, 5.0]
    assert model.changes() == {}


def test_containers_that_are_changed_in_place_are_told():
    net = Net()
    model = _shared.SharedModel(net, 1)
    net.options["a"] = 2
    ((_, kind, payload),) = news_of(model)["attributes"]
    assert (kind, payload) == ("dict", (False, {"a": 2}, []))
    assert model.changes() == {}


def test_an_attribute_that_is_deleted_is_told():
    net = Net()
    model = _shared.SharedModel(net, 1)
    del net.power
    ((_, _, payload),) = news_of(model)["attributes"]
    assert payload == (False, {}, ["power"])


def test_frozen_parameters_are_told_by_slot():
    net = Net()
    model = _shared.SharedModel(net, 1)
    assert model.trained == [0, 1, 2]
    net.child.weight.requires_grad_(False)
    assert model.changes() == {"trainable": b"\1\0\1"}
    assert model.trained == [0, 2]
    assert model.parameters_of(model.trained) == [net.scale, net.child.bias]
    net.child.weight.requires_grad_(True)
    assert model.changes() == {"trainable": b"\1\1\1"}


ANOTHER = {
    "a parameter": lambda net: setattr(net, "scale", nn.Parameter(torch.ones(2))),
    "its memory": lambda net: setattr(net.scale, "data", torch.ones(2)),
    "a dtype": lambda net: net.double(),
    "a layer": lambda net: setattr(net, "child", nn.Linear(2, 2)),
    "one more layer": lambda net: net.add_module("more", nn.Linear(2, 2)),
    "one less": lambda net: delattr(net, "child"),
    "a larger buffer": lambda net: setattr(net, "offset", torch.zeros(3)),
    "one more buffer": lambda net: net.register_buffer("more", torch.zeros(1)),
    "no buffer": lambda net: setattr(net, "offset", None),
    "another dict": lambda net: setattr(net, "_modules", dict(net._modules)),
    "a thawed one": lambda net: net.frozen.requires_grad_(True),
}


@pytest.mark.parametrize("change", ANOTHER.values(), ids=ANOTHER)
def test_a_model_of_another_form_has_to_be_shared_anew(change):
    net = Net()
    model = _shared.SharedModel(net, 1)
    change(net)
    assert model.changes() is None


def test_a_buffer_may_be_replaced_by_one_like_it():
    net = Net()
    model = _shared.SharedModel(net, 1)
    net.offset = torch.tensor([8.0, 9.0])
    assert model.changes() == {}
    assert model._buffer_views[0].tolist() == [8.0, 9.0]


def test_hooks_that_come_later_keep_the_model_here():
    net = Net()
    model = _shared.SharedModel(net, 1)
    net.child.register_forward_hook(lambda *args: None)
    with pytest.raises(CannotTravelError, match=r"'child' \(Linear\) has hooks"):
        model.changes()


def test_what_cannot_travel_later_is_an_error_each_time():
    net = Net()
    model = _shared.SharedModel(net, 1)
    net.lock = threading.Lock()
    with pytest.raises(CannotTravelError, match="cannot be pickled"):
        model.changes()
    assert model.changes() is None
    with pytest.raises(CannotTravelError, match="cannot be pickled"):
        _shared.SharedModel(net, 1)


def test_what_forward_assigns_is_no_news():
    net = Net()
    model = _shared.SharedModel(net, 1)
    net.power = 7
    net.table = torch.zeros(2)
    model.forward_ends()
    assert model.changes() == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda net: setattr(net, "late", nn.Parameter(torch.ones(1))),
            "Net has changed its _parameters in forward",
        ),
        (
            lambda net: net.add_module("late", nn.Linear(1, 1)),
            "Net has changed its _modules in forward",
        ),
    ],
    ids=["parameter", "layer"],
)
def test_a_forward_that_changes_the_structure_is_an_error(change, words):
    net = Net()
    model = _shared.SharedModel(net, 1)
    change(net)
    with pytest.raises(RuntimeError, match=words):
        model.forward_ends()
    assert model.changes() is None  # the next call shares it anew


def test_hooks_on_parameters_are_told_by_slot():
    net = Net()
    model = _shared.SharedModel(net, 1)
    assert model.hooked() is None
    net.child.bias.register_hook(lambda g: g)
    assert model.hooked() == b"\0\0\1"


def test_a_model_without_parameters_has_no_slots():
    model = _shared.SharedModel(nn.ReLU(), 3)
    assert (model.slots, model.n_slots, model.trained) == (None, 0, [])
    assert model.hooked() is None
    assert model.changes() == {}


# ---- a replica, in this process -----------------------------------------------------


TRACKED = _protocol.GRAD | _protocol.TRACKED


@dataclasses.dataclass
class Remote:
    """A replica of a module, built here: what a worker would do."""

    net: nn.Module
    model: _shared.SharedModel
    replica: _replica.Replica
    calls: int = 0

    def forward(self, x, bits=TRACKED, seed=5, **news):
        self.calls += 1
        tree, leaves = _native.flatten(((x,), {}))
        news.update(number=self.calls, modes=_protocol.Modes.now())
        told = {"tree": tree, "news": [news]}
        bits |= _protocol.NEWS
        words = _protocol.FORWARD_WORDS.pack(self.calls, seed, 0, bits)
        flags = bytes(leaf.requires_grad for leaf in leaves)
        leaves = [leaf.detach().clone() for leaf in leaves]
        kind, words, outputs = self.replica.handle(
            _protocol.FORWARD, words + pickle.dumps(told), leaves, flags
        )
        assert kind == _protocol.FORWARD
        return words, outputs

    def backward(self, call, gradients, bits=0):
        words = _protocol.BACKWARD_WORDS.pack(call, bits)
        kind, words, parts = self.replica.handle(
            _protocol.BACKWARD, words, gradients, bytes(len(gradients))
        )
        assert kind == _protocol.BACKWARD
        return words, parts


@pytest.fixture
def remote(monkeypatch):
    """Return a function that builds a module's replica in this process."""
    monkeypatch.setattr(os, "getppid", os.getpid)  # whose memory a replica maps
    state = torch.default_generator.get_state()
    replicas = []

    def build(net):
        model = _shared.SharedModel(net, 1)
        replica = _replica.Replica()
        replicas.append(replica)
        words = pickle.dumps(model.describe(0))
        assert replica.handle(_protocol.MODEL, words, [], b"") == (1, b"", [])
        return Remote(net, model, replica)

    yield build
    for replica in replicas:
        replica._is_inside.close()
    torch.set_grad_enabled(True)
    torch.default_generator.set_state(state)


def test_a_replica_computes_with_the_callers_parameters(remote):
    far = remote(Net())
    _, (out,) = far.forward(torch.ones(1, 2))
    assert out.tolist() == [[5.0, 6.0]]
    with torch.no_grad():
        far.net.scale.mul_(10)
    _, (out,) = far.forward(torch.ones(1, 2))
    assert out.tolist() == [[23.0, 33.0]]  # the offset is the caller's again, plus one


def test_a_replica_leaves_gradients_in_its_row(remote):
    far = remote(Net())
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    far.forward(x)
    used, (of_input,) = far.backward(1, [torch.tensor([[1.0, 10.0]])])
    assert used == b"\1\1\1"
    assert of_input.tolist() == [[2.0, 30.0]]
    far.model.slots.add((used,))
    assert far.net.scale.grad.tolist() == [1.0, 20.0]
    assert far.net.child.bias.grad.tolist() == [2.0, 30.0]
    assert far.net.frozen.grad is None


def test_a_replica_keeps_a_graph_only_if_told(remote):
    far = remote(Net())
    far.forward(torch.ones(1, 2, requires_grad=True))
    ones = torch.ones(1, 2)
    for bits in (_protocol.KEEP_GRAPH, 0):
        used, (of_input,) = far.backward(1, [ones], bits)
        (total, *_) = far.model.slots.take((used,))
        assert total.tolist() == [1.0, 1.0]
        assert of_input.tolist() == [[2.0, 3.0]]
    with pytest.raises(RuntimeError, match="run the forward again before backward"):
        far.backward(1, [ones])


def test_a_replica_adds_up_backwards_only_if_told(remote):
    far = remote(Net())
    far.forward(torch.ones(1, 2))
    far.forward(torch.ones(1, 2))
    far.backward(1, [torch.ones(1, 2)])
    used, _ = far.backward(2, [torch.ones(1, 2)], _protocol.ACCUMULATE)
    assert far.model.slots.take((used,))[0].tolist() == [2.0, 2.0]


def test_a_replica_forgets_the_graphs_that_were_dropped(remote):
    far = remote(Net())
    far.forward(torch.ones(1, 2))
    far.forward(torch.ones(1, 2), dropped=[1])
    with pytest.raises(RuntimeError, match="run the forward again"):
        far.backward(1, [torch.ones(1, 2)])
    far.backward(2, [torch.ones(1, 2)])


def test_a_replica_hears_what_has_changed(remote):
    far = remote(Net())
    far.net.power = 3
    far.net.child.weight.requires_grad_(False)
    far.net.eval()
    _, (out,) = far.forward(torch.ones(1, 2), **far.model.changes())
    assert out.tolist() == [[12.0, 15.0]]
    used, _ = far.backward(1, [torch.ones(1, 2)])
    assert used == b"\1\0\1"


def test_a_module_may_write_to_its_input_in_a_replica(remote):
    class Doubling(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    far = remote(Doubling())
    _, (out,) = far.forward(torch.ones(1, 2, requires_grad=True))
    assert out.tolist() == [[2.0, 2.0]]
    _, (of_input,) = far.backward(1, [torch.ones(1, 2)])
    assert of_input.tolist() == [[2.0, 2.0]]


def test_a_replica_tells_which_slots_backward_will_reach(remote):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(2))
            self.b = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.b

    far = remote(Half())
    words, _ = far.forward(torch.ones(1, 2), TRACKED | _protocol.TELL_USED)
    assert words[:2] == b"\0\1"


def test_a_replica_tells_the_form_of_its_output_once(remote):
    class Forms(nn.Module):
        def forward(self, x):
            return {"x": x} if x.sum() > 0 else [x]

    far = remote(Forms())
    one = torch.ones(1, 2)
    words, leaves = far.forward(one, 0)
    assert pickle.loads(words).unflatten(leaves).keys() == {"x"}
    assert far.forward(one, 0)[0] == b""
    words, _ = far.forward(one, _protocol.TELL_TREE)
    assert pickle.loads(words).n_leaves == 1
    words, leaves = far.forward(-one, 0)
    assert type(pickle.loads(words).unflatten(leaves)) is list


def test_a_replica_answers_with_what_no_slot_holds(remote):
    far = remote(nn.Embedding(4, 2, sparse=True))
    far.forward(torch.tensor([1, 1, 2]))
    words, parts = far.backward(1, [torch.ones(3, 2)])
    assert words[:1] == b"\0"
    ((index, gradient),) = _strays.unpack(words[1:], parts)
    assert index == 0
    assert gradient.to_dense().tolist() == [[0, 0], [2, 2], [1, 1], [0, 0]]


def test_a_replica_draws_by_the_seed_it_is_given(remote):
    far = remote(nn.Dropout(0.5))
    x = torch.ones(8, 8)
    masks = [far.forward(x, 0, seed)[1][0] for seed in (1, 2, 1)]
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


def test_a_forward_without_gradients_keeps_nothing(remote):
    far = remote(Net())
    for bits in (0, _protocol.INFERENCE):
        _, (out,) = far.forward(torch.ones(1, 2), bits)
        assert not out.requires_grad
        assert out.is_inference() is bool(bits)
    assert far.replica._graphs == {}


def test_an_unknown_request_is_an_error():
    replica = _replica.Replica()
    try:
        with pytest.raises(ValueError, match="kind is 77: this version of paceline"):
            replica.handle(77, b"", [], b"")
    finally:
        replica._is_inside.close()


# ---- workers that wait for the next wrapper -----------------------------------------


class FakeChannel:
    is_busy = False


class FakeCrew:
    made = 0

    def __init__(self, n_workers):
        type(self).made += 1
        self.channels = [FakeChannel() for _ in range(n_workers)]
        self.pids = list(range(n_workers))
        self.is_closed = False

    def close(self):
        self.is_closed = True


@pytest.fixture
def _fake_crews(monkeypatch):
    monkeypatch.setattr(_pool._crew, "Crew", FakeCrew)
    monkeypatch.setattr(FakeCrew, "made", 0)
    monkeypatch.setattr(_pool, "_kept", None)


@pytest.mark.usefixtures("_fake_crews")
def test_a_crew_ends_with_its_wrapper_unless_it_is_kept():
    crew, is_ready = _pool.hire(2)
    assert not is_ready
    _pool.release(crew, os.getpid(), True)
    assert crew.is_closed


@pytest.mark.usefixtures("_fake_crews")
def test_a_kept_crew_serves_the_next_wrapper_of_its_size():
    with _pool.keep_workers():
        crew, _ = _pool.hire(2)
        _pool.release(crew, os.getpid(), True)
        assert not crew.is_closed
        other, is_ready = _pool.hire(3)
        assert (other is crew, is_ready) == (False, False)
        assert _pool.hire(2) == (crew, True)
        assert _pool.hire(2)[0] is not crew  # it has work already
        _pool.release(crew, os.getpid(), True)
    assert crew.is_closed
    assert _pool._kept is None


@pytest.mark.usefixtures("_fake_crews")
@pytest.mark.parametrize("flaw", ["unsound", "forked", "busy", "one has died"])
def test_a_crew_that_may_not_go_on_is_not_kept(flaw):
    with _pool.keep_workers():
        crew, _ = _pool.hire(2)
        if flaw == "busy":
            crew.channels[1].is_busy = True
        pid = os.getpid() + (flaw == "forked")
        _pool.release(crew, pid, flaw != "unsound")
        if flaw == "one has died":
            crew.pids.pop()
        else:
            assert crew.is_closed
        assert _pool.hire(2)[0] is not crew
    assert crew.is_closed


@pytest.mark.usefixtures("_fake_crews")
def test_keeping_may_be_nested_and_ends_with_an_exception():
    with _pool.keep_workers():
        outer, _ = _pool.hire(1)
        _pool.release(outer, os.getpid(), True)

        def fail():
            with _pool.keep_workers():
                inner, _ = _pool.hire(1)
                assert inner is not outer
                _pool.release(inner, os.getpid(), True)
                failed.append(inner)
                raise LookupError

        failed = []
        with pytest.raises(LookupError):
            fail()
        assert failed[0].is_closed
        assert not outer.is_closed
        assert _pool.hire(1) == (outer, True)
