"""The parts of the process engine, one at a time, without a worker process."""

import copy
import dataclasses
import gc
import io
import os
import pickle
import threading
import weakref

import pytest
import torch
from natives import torch_core  # hands torch to the native module
from paceline import _native
from paceline._compat import odd_tensors, torch_storage
from paceline._dp.process import holders, messages, obstacles, pickling, shared_model
from paceline._dp.process.replica import Replica
from paceline._replicas.errors import CannotTravelError
from torch import nn
from torch.nn.utils import prune

assert torch_core


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
    places, end = pickling.lay_out(tensors, 128)
    arena = _native.SharedMemory(end)
    views = [arena.view(place.offset, place.like()) for place in places]
    for tensor, view, place in zip(tensors, views, places, strict=True):
        assert place.offset % pickling.ALIGNMENT == 0
        assert place.offset >= 128
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert view.stride() == tensor.stride()
        view.copy_(tensor)
    assert all(map(torch.equal, views, tensors))  # none has written into another
    assert pickling.lay_out([], 192) == ([], 192)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 6)[:, ::2], torch.ones(1, 3).expand(2, 3)],
    ids=["holes", "overlaps"],
)
def test_tensors_with_holes_get_dense_places(tensor):
    (place,), end = pickling.lay_out([tensor], 0)
    assert place.shape == tensor.shape
    assert torch_core.is_dense(place.like())
    assert end >= tensor.numel() * 4


def test_places_can_be_pickled():
    (place,), _ = pickling.lay_out([LAYOUTS["columns"]()], 64)
    assert pickle.loads(pickle.dumps(place)) == place


class Tagged(nn.Parameter):
    pass


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_is_made_anew_over_other_memory(requires_grad):
    given = Tagged(torch.ones(2), requires_grad)
    given.is_special = True
    memory = torch.zeros(2)
    made = pickling.rebuild(pickling.describe(given), memory)
    assert type(made) is Tagged
    assert (made.is_special, made.requires_grad) == (True, requires_grad)
    assert made.is_leaf
    memory.fill_(5)
    assert made.tolist() == [5.0, 5.0]
    made.is_special = False
    assert given.is_special


def test_tensors_of_the_table_stay_behind():
    kept, sent = torch.ones(1000), torch.zeros(2)
    words = pickling.dumps({"a": [kept, kept], "b": sent}, {id(kept): ("parameter", 3)})
    assert len(words) < 2000
    other = torch.ones(1)
    got = pickling.loads(words, {("parameter", 3): other})
    assert got["a"][0] is other
    assert got["a"][1] is other
    assert torch.equal(got["b"], sent)


def test_code_of_a_script_travels_by_value():
    scope = {"__name__": "__main__"}
    exec("factor = 3\ndef scale(x): return x * factor", scope)
    words = pickling.dumps(scope["scale"], {})
    scope["factor"] = 100  # what was captured does not change
    assert pickling.loads(words, {})(2) == 6


def test_what_cannot_travel_says_why():
    with pytest.raises(
        CannotTravelError, match=r"it cannot be pickled: TypeError: .*lock"
    ):
        pickling.dumps({"lock": threading.Lock()}, {})


# ---- gradients that no slot holds ---------------------------------------------------


def sparse(rows, values):
    return torch.sparse_coo_tensor(rows, values, (4, 2), check_invariants=True)


def test_strays_come_out_as_they_went_in():
    given = [
        (0, sparse([[1, 1, 3]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])),
        (4, torch.ones(2, dtype=torch.float64)),
    ]
    words, parts = odd_tensors.pack(given)
    assert all(part.layout == torch.strided for part in parts)
    got = odd_tensors.unpack(words, parts)
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
    ((index, got),) = odd_tensors.unpack(*odd_tensors.pack([(2, empty)]))
    assert (index, got.shape, got._nnz()) == (2, (4, 2), 0)


def test_no_strays_are_no_words():
    assert odd_tensors.pack([]) == (b"", [])
    assert odd_tensors.unpack(b"", []) == []


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
    before, plain = messages.Modes.now(), state_of_torch()
    change()
    changed, wanted = messages.Modes.now(), state_of_torch()
    assert changed != before
    before.adopt()
    assert state_of_torch() == plain
    pickle.loads(pickle.dumps(changed)).adopt()
    assert state_of_torch() == wanted


def test_autocast_is_seen_and_left_to_the_forward():
    before = messages.Modes.now()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        inside = messages.Modes.now()
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
    messages.Modes.now().adopt()


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
    assert obstacles.reason_against(net) is None
    change(net)
    with pytest.raises(CannotTravelError, match=words):
        shared_model.SharedModel(net, 1, pickling.ScriptGlobals())


def test_hooks_for_all_modules_keep_a_model_here():
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert obstacles.reason_against(Odd()) == "hooks are registered for all modules"
    finally:
        handle.remove()
    assert obstacles.reason_against(Odd()) is None


def test_tied_weights_and_empty_ones_may_travel():
    net = Odd()
    net.tied = nn.Linear(2, 2)
    net.tied.weight = net.layer.weight
    net.none = nn.Parameter(torch.zeros(0))
    net.nothing = None
    assert obstacles.reason_against(net) is None


# ---- who else holds the parameters' memory ------------------------------------------


def _trained(net):
    optimizer = torch.optim.Adam(net.parameters())
    net.layer(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    return optimizer


def _with_graph(net):
    net.more = nn.Linear(2, 2)
    return net.more(torch.tanh(net.layer(torch.ones(2, 2))))  # saves the weight


def _loaded(net):
    net.load_state_dict(copy.deepcopy(net).state_dict())


def _assigned(net):
    net.load_state_dict(copy.deepcopy(net).state_dict(), assign=True)


def _saved_and_loaded(net):
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    net.load_state_dict(torch.load(file), assign=True)


def _hooked(net):
    net.layer.weight.register_hook(print)
    net.layer.weight.register_post_accumulate_grad_hook(print)


def _tied(net):
    net.tied = nn.Linear(2, 2)
    net.tied.weight = net.layer.weight


def _tied_transformer(net):
    transformers = pytest.importorskip("transformers")
    net.lm = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8
        )
    )
    assert net.lm.lm_head.weight is net.lm.transformer.wte.weight


ORDINARY = {
    "new": lambda net: None,
    "recurrent": lambda net: setattr(net, "rnn", nn.LSTM(2, 2, 2, bidirectional=True)),
    "attention": lambda net: setattr(net, "heads", nn.MultiheadAttention(4, 2)),
    "an optimizer": lambda net: torch.optim.Adam(net.parameters()),
    "trained": _trained,
    "with a graph that is alive": _with_graph,
    "a gradient that is held": lambda net: [_trained(net), net.layer.weight.grad],
    "loaded": _loaded,
    "assigned": _assigned,
    "saved and loaded": _saved_and_loaded,
    "converted": lambda net: net.double().float(),
    "frozen": lambda net: net.requires_grad_(False),
    "with hooks on a parameter": _hooked,
    "with a storage that is held": lambda net: net.layer.weight.untyped_storage(),
    "tied": _tied,
    "tied in a transformer": _tied_transformer,
    "parametrized": lambda net: nn.utils.parametrizations.weight_norm(net.layer),
    "pruned": lambda net: prune.l1_unstructured(net.layer, "weight", 1),
    "initialized": lambda net: nn.init.orthogonal_(net.layer.weight),
    "with a view that is gone": lambda net: [net.state_dict(), None][1],
}


@pytest.mark.parametrize("make", ORDINARY.values(), ids=ORDINARY)
@pytest.mark.parametrize("is_copy", [False, True], ids=["itself", "a copy"])
def test_parameters_of_ordinary_models_are_held_by_nobody_else(make, is_copy):
    net = Odd()
    kept = make(net)
    if is_copy:
        if make is ORDINARY["pruned"]:
            pytest.skip("torch cannot copy it")
        net = copy.deepcopy(net)
    assert holders.reason_of(net) is None
    del kept


def test_a_parameter_in_shared_memory_may_have_any_views():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    views = [net.state_dict(), [p.data for p in net.parameters()]]
    assert holders.reason_of(net) is None
    del model
    assert shared_model.SharedModel(
        nn.Sequential(net), 1, pickling.ScriptGlobals()
    ).memory.places
    assert all(map(torch.equal, views[0].values(), net.state_dict().values()))


def test_who_holds_a_tensor_is_asked_of_python_alone():
    flat = torch.ones(8)
    halves = [flat[:4].data, flat[4:].data]
    alone = torch.ones(3)
    assert torch_storage.aliased([alone, *halves]) == 1
    del flat
    assert torch_storage.aliased([alone, *halves]) is None
    array = alone.numpy()
    assert torch_storage.aliased([*halves, alone]) == 2
    del array
    assert torch_storage.aliased([*halves, alone]) is None
    assert torch_storage.aliased([]) is None


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
    model = shared_model.SharedModel(net, 2, pickling.ScriptGlobals())
    assert all(
        a is b
        for a, b in zip([*net.parameters(), *net.buffers()], objects, strict=True)
    )
    assert all(torch.equal(x, state[name]) for name, x in net.state_dict().items())
    assert [b.data_ptr() for b in net.buffers()] == places
    (home,) = model.memory.parameter_memory.values()
    for parameter in net.parameters():
        assert home.address <= parameter.data_ptr() < home.address + home.n_bytes
        assert parameter.is_leaf
    assert len(model.gradients.parameters) == 3  # the frozen one has none
    assert all(map(torch.equal, model.memory.buffer_views, net.buffers()))
    assert net(torch.ones(1, 2)).tolist() == [[5.0, 6.0]]


def test_two_models_over_the_same_parameters_share_their_places():
    net = Net()
    first = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    places = [p.data_ptr() for p in net.parameters()]
    holder = nn.Sequential(net, nn.Linear(2, 2))
    second = shared_model.SharedModel(holder, 1, pickling.ScriptGlobals())
    assert [p.data_ptr() for p in net.parameters()] == places
    assert not first.memory.placed.moved()
    (home,) = first.memory.parameter_memory.values()
    described = second.describe(0)
    assert described.memory[0][0] == home.fd
    assert (
        described.memory[described.replica_memory][0] == second.memory.replica_memory.fd
    )


def test_a_shared_model_is_freed_and_its_parameters_stay():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert net.scale.tolist() == [2.0, 3.0]
    net.scale.data.add_(1)
    assert net.scale.tolist() == [3.0, 4.0]


def update_of(model):
    """Return what replicas receive: (part, name) and value; without one: deleted."""
    update = model.changes()
    if "attributes" in update:
        known = {key: key for key in model._keys.values()}
        values = pickling.load_stream(update["attributes"], known)
        update["attributes"] = [tuple(value) for value in values]
    return update


def test_nothing_is_said_where_nothing_has_changed():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    assert model.changes() == {}
    with torch.no_grad():
        net.scale.mul_(2)  # both see it: it lies in shared memory
    net.offset.add_(3)  # copied to its place
    assert model.changes() == {}
    assert model.memory.buffer_views[0].tolist() == [4.0, 4.0]


ATTRIBUTES = {
    "number": (lambda net: setattr(net, "power", 2), (0, "power", 2)),
    "new": (lambda net: setattr(net, "fresh", "x"), (0, "fresh", "x")),
    "training": (lambda net: net.child.eval(), (1, "training", False)),
    "dict": (
        lambda net: setattr(net, "options", {"a": 2}),
        (0, "options", {"a": 2}),
    ),
    "in place": (lambda net: net.options.update(a=2), (0, "options", {"a": 2})),
    "deleted": (lambda net: delattr(net, "power"), (0, "power")),
}


@pytest.mark.parametrize(("change", "expected"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes_that_have_changed_are_sent_once(change, expected):
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    change(net)
    assert update_of(model) == {"attributes": [expected]}
    assert model.changes() == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.table.add_(4),
        lambda net: setattr(net, "table", net.table + 4),
    ],
    ids=["in place", "assigned"],
)
def test_tensor_attributes_are_sent_when_their_values_change(change):
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    change(net)
    ((i, name, value),) = update_of(model)["attributes"]
    assert (i, name, value.tolist()) == (0, "table", [5.0, 5.0])
    assert model.changes() == {}


def test_frozen_parameters_are_told_by_slot():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    assert model.active_slots == [0, 1, 2]
    net.child.weight.requires_grad_(False)
    assert model.changes() == {"trainable": b"\1\0\1"}
    assert model.active_slots == [0, 2]
    wanting = [model.gradients.parameters[i] for i in model.active_slots]
    assert wanting == [net.scale, net.child.bias]
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
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    change(net)
    assert model.changes() is None


def test_a_buffer_may_be_replaced_by_one_like_it():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    net.offset = torch.tensor([8.0, 9.0])
    assert model.changes() == {}
    assert model.memory.buffer_views[0].tolist() == [8.0, 9.0]


def test_hooks_that_come_later_keep_the_model_here():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    net.child.register_forward_hook(lambda *args: None)
    assert model.changes() is None
    with pytest.raises(CannotTravelError, match=r"'child' \(Linear\) has hooks"):
        shared_model.SharedModel(net, 1, pickling.ScriptGlobals(), model)


def test_what_cannot_travel_later_is_an_error_each_time():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    net.lock = threading.Lock()
    with pytest.raises(CannotTravelError, match="lock, of which nobody can tell"):
        model.changes()
    assert model.changes() is None
    with pytest.raises(CannotTravelError, match="lock, of which nobody can tell"):
        shared_model.SharedModel(net, 1, pickling.ScriptGlobals())


def test_what_forward_assigns_is_not_sent():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    net.power = 7
    net.table = torch.zeros(2)
    model.forward_ends()
    assert model.changes() == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda net: setattr(net, "late", nn.Parameter(torch.ones(1))),
            "Net has changed its parameters or modules in forward",
        ),
        (
            lambda net: net.add_module("late", nn.Linear(1, 1)),
            "Net has changed its parameters or modules in forward",
        ),
    ],
    ids=["parameter", "layer"],
)
def test_a_forward_that_changes_the_structure_is_an_error(change, words):
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    change(net)
    with pytest.raises(RuntimeError, match=words):
        model.forward_ends()
    assert model.changes() is None  # the next call shares it anew


def test_hooks_on_parameters_are_told_by_slot():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    assert model.gradients.hooked() is None
    net.child.bias.register_hook(lambda g: g)
    assert model.gradients.hooked() == b"\0\0\1"


def test_a_model_without_parameters_has_no_slots():
    model = shared_model.SharedModel(nn.ReLU(), 3, pickling.ScriptGlobals())
    assert (model.gradients.slots, model.gradients.parameters) == (None, [])
    assert model.active_slots == []
    assert model.gradients.hooked() is None
    assert model.changes() == {}


# ---- a replica, in this process -----------------------------------------------------


TRACKED = messages.GRAD | messages.TRACKED


@dataclasses.dataclass
class Remote:
    """A replica of a module, built here: what a worker would do."""

    net: nn.Module
    model: shared_model.SharedModel
    replica: Replica
    calls: int = 0

    def forward(self, x, bits=TRACKED, seed=5, **update):
        self.calls += 1
        tree, leaves = _native.flatten(((x,), {}))
        update.update(number=self.calls, modes=messages.Modes.now())
        payload = {"tree": tree, "updates": [update]}
        bits |= messages.UPDATE
        words = messages.FORWARD_HEADER.pack(self.calls, seed, 0, bits)
        flags = bytes(leaf.requires_grad for leaf in leaves)
        leaves = [leaf.detach().clone() for leaf in leaves]
        kind, words, outputs = self.replica.handle(
            messages.FORWARD, words + pickle.dumps(payload), leaves, flags
        )
        assert kind == messages.FORWARD
        return words, outputs

    def backward(self, call, gradients, bits=0):
        words = messages.BACKWARD_HEADER.pack(call, bits)
        kind, words, parts = self.replica.handle(
            messages.BACKWARD, words, gradients, bytes(len(gradients))
        )
        assert kind == messages.BACKWARD
        return words, parts


@pytest.fixture
def remote(monkeypatch):
    """Return a function that builds a module's replica in this process."""
    monkeypatch.setattr(os, "getppid", os.getpid)  # whose memory a replica maps
    state = torch.default_generator.get_state()
    replicas = []

    def build(net):
        model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
        replica = Replica()
        replicas.append(replica)
        words = pickle.dumps(model.describe(0))
        kind, words, parts = replica.handle(messages.MODEL, words, [], b"")
        assert (kind, parts) == (messages.MODEL, [])
        model.imported.compare(pickle.loads(words))
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
    far.model.gradients.slots.add((used,))
    assert far.net.scale.grad.tolist() == [1.0, 20.0]
    assert far.net.child.bias.grad.tolist() == [2.0, 30.0]
    assert far.net.frozen.grad is None


def test_a_replica_keeps_a_graph_only_if_told(remote):
    far = remote(Net())
    far.forward(torch.ones(1, 2, requires_grad=True))
    ones = torch.ones(1, 2)
    for bits in (messages.KEEP_GRAPH, 0):
        used, (of_input,) = far.backward(1, [ones], bits)
        (total, *_) = far.model.gradients.slots.take((used,))
        assert total.tolist() == [1.0, 1.0]
        assert of_input.tolist() == [[2.0, 3.0]]
    with pytest.raises(RuntimeError, match="run the forward again before backward"):
        far.backward(1, [ones])


def test_a_replica_adds_up_backwards_only_if_told(remote):
    far = remote(Net())
    far.forward(torch.ones(1, 2))
    far.forward(torch.ones(1, 2))
    far.backward(1, [torch.ones(1, 2)])
    used, _ = far.backward(2, [torch.ones(1, 2)], messages.ACCUMULATE)
    assert far.model.gradients.slots.take((used,))[0].tolist() == [2.0, 2.0]


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
    words, _ = far.forward(torch.ones(1, 2), TRACKED | messages.WANTS_USED)
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
    words, _ = far.forward(one, messages.WANTS_TREE)
    assert pickle.loads(words).n_leaves == 1
    words, leaves = far.forward(-one, 0)
    assert type(pickle.loads(words).unflatten(leaves)) is list


def test_a_replica_answers_with_what_no_slot_holds(remote):
    far = remote(nn.Embedding(4, 2, sparse=True))
    far.forward(torch.tensor([1, 1, 2]))
    words, parts = far.backward(1, [torch.ones(3, 2)])
    assert words[:1] == b"\0"
    ((index, gradient),) = odd_tensors.unpack(words[1:], parts)
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
    for bits in (0, messages.INFERENCE):
        _, (out,) = far.forward(torch.ones(1, 2), bits)
        assert not out.requires_grad
        assert out.is_inference() is bool(bits)
    assert far.replica._graphs == {}


def test_an_unknown_request_is_an_error():
    replica = Replica()
    try:
        with pytest.raises(ValueError, match="kind is 77: this version of paceline"):
            replica.handle(77, b"", [], b"")
    finally:
        replica._is_inside.close()
