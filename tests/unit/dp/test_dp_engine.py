"""The parts of the process engine, one at a time, without a worker process."""

import dataclasses
import os
import pickle
import threading

import pytest
import torch
from paceline import _native
from paceline._compat import odd_tensors, torch_core
from paceline._dp.process import messages, pickling, shared_model
from paceline._dp.process.replica import Replica
from paceline._replicas.errors import UnsupportedModelError
from shared_cases import Net
from torch import nn

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


def strides_of(tensor):
    """Return the strides that matter; DLPack of older torches changes the others."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def test_every_tensor_gets_a_place_of_its_own():
    tensors = [make() for make in LAYOUTS.values()]
    places, end = pickling.lay_out(tensors, 128)
    arena = _native.SharedMemory(end)
    views = [arena.view(place.offset, place.like()) for place in places]
    for tensor, view, place in zip(tensors, views, places, strict=True):
        assert place.offset % pickling.ALIGNMENT == 0
        assert place.offset >= 128
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert strides_of(view) == strides_of(tensor)
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
        UnsupportedModelError, match=r"it cannot be pickled: TypeError: .*lock"
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
    assert pickle.loads(words).path(0) == "['x']"
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
