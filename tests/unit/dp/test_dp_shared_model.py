"""Which models may have replicas in other processes, and their shared memory."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from paceline._compat import torch_storage
from paceline._dp.process import holders, obstacles, pickling, shared_model
from paceline._replicas.errors import UnsupportedModelError
from shared_cases import Net
from support.clients import transformers_or_skip
from torch import nn
from torch.nn.utils import prune

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
    assert obstacles.obstacle(net) is None
    change(net)
    with pytest.raises(UnsupportedModelError, match=words):
        shared_model.SharedModel(net, 1, pickling.ScriptGlobals())


def test_hooks_for_all_modules_keep_a_model_here():
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert str(obstacles.obstacle(Odd())) == obstacles.GLOBAL_HOOKS
    finally:
        handle.remove()
    assert obstacles.obstacle(Odd()) is None


def test_tied_weights_and_empty_ones_may_travel():
    net = Odd()
    net.tied = nn.Linear(2, 2)
    net.tied.weight = net.layer.weight
    net.none = nn.Parameter(torch.zeros(0))
    net.nothing = None
    assert obstacles.obstacle(net) is None


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
    transformers = transformers_or_skip()
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
    with pytest.raises(UnsupportedModelError, match=r"'child' \(Linear\) has hooks"):
        shared_model.SharedModel(net, 1, pickling.ScriptGlobals(), model)


def test_what_cannot_travel_later_is_an_error_each_time():
    net = Net()
    model = shared_model.SharedModel(net, 1, pickling.ScriptGlobals())
    net.lock = threading.Lock()
    with pytest.raises(UnsupportedModelError, match="lock, of which nobody can tell"):
        model.changes()
    assert model.changes() is None
    with pytest.raises(UnsupportedModelError, match="lock, of which nobody can tell"):
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
