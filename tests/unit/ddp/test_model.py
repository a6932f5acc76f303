"""The description of a model: its tensors, and the facts that ranks must agree on."""

import pytest
import torch
from paceline import MismatchError
from paceline._ddp.model_spec import NO_GRADIENT, Model, raise_first_difference
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 1, bias=False)


def names(pairs):
    return [entry[0] for entry in pairs]


# ---- collected tensors --------------------------------------------------------------


def test_parameters_and_buffers_come_in_the_order_of_registration():
    net = Net()
    model = Model.of(net)
    assert names(model.parameters) == [name for name, _ in net.named_parameters()]
    assert names(model.buffers) == [name for name, _ in net.named_buffers()]
    expected = [*net.parameters(), *net.buffers()]
    assert [id(t) for t in model.tensors()] == [id(t) for t in expected]


def test_frozen_parameters_are_collected_but_not_trainable():
    net = Net()
    net.first.requires_grad_(False)
    model = Model.of(net)
    assert len(model.parameters) == 5
    assert model.trainable == [net.norm.weight, net.norm.bias, net.last.weight]


def test_buffers_that_are_not_saved_are_collected_and_those_that_are_none_are_not():
    net = nn.BatchNorm1d(2, track_running_stats=False)
    net.register_buffer("nothing", None)
    assert Model.of(net).buffers == []
    net.register_buffer("cache", torch.zeros(3), persistent=False)
    ((_, owner, name),) = Model.of(net).buffers
    net.cache = torch.ones(1)
    assert owner[name] is net.cache  # found also after it was replaced


# ---- models that cannot be wrapped --------------------------------------------------


def check(net):
    model = Model.of(net)
    model.check()
    model.check_travelling(has_peers=True)
    model.check_buffers()
    model.check_supported(net)


def test_a_plain_model_passes_the_checks():
    check(Net())


def with_buffer(tensor):
    net = nn.Linear(1, 1)
    net.register_buffer("odd", tensor.detach())
    return net


def with_weight(weight):
    net = nn.Linear(1, 1)
    net.weight = nn.Parameter(weight)
    return net


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0]


def ignoring(net, *names):
    net._ddp_params_and_buffers_to_ignore = list(names)
    return net


LAZY = "uninitialized parameters.*"
FAR = nn.Linear(1, 1, device="meta")
HALF_FAR = nn.Sequential(nn.Linear(1, 1), FAR)
SPARSE = torch.eye(2).to_sparse()
FAKE = FakeTensorMode().from_tensor(torch.ones(1, 1))
WRAPPER = torch.Tensor._make_wrapper_subclass(Wrapper, (2,))
WRONG = [
    (nn.ReLU(), RuntimeError, NO_GRADIENT),
    (nn.Linear(1, 1).requires_grad_(False), RuntimeError, NO_GRADIENT),
    (ignoring(nn.Linear(1, 1), "weight", "bias"), RuntimeError, NO_GRADIENT),
    (nn.LazyLinear(2), RuntimeError, f"{LAZY}'weight'"),
    (nn.Sequential(nn.Linear(1, 1), nn.LazyBatchNorm1d()), RuntimeError, LAZY + "'1.w"),
    (nn.LazyBatchNorm1d(affine=False), RuntimeError, f"{LAZY}'running_mean'"),
    (FAR, NotImplementedError, "'weight' is a .* on device meta"),
    (HALF_FAR, ValueError, r"same type of devices.*\['cpu', 'meta'\]"),
    (with_buffer(FAR.bias), NotImplementedError, "'odd' is a .* on device meta"),
    (with_weight(FAKE), NotImplementedError, "'weight' is a fake tensor"),
    (with_buffer(WRAPPER), NotImplementedError, "'odd' wraps other tensors"),
    (with_buffer(SPARSE), NotImplementedError, r"'odd' is a torch\.sparse_coo"),
]


@pytest.mark.parametrize(("net", "kind", "words"), WRONG)
def test_what_cannot_be_wrapped_is_named_in_the_words_of_torch(net, kind, words):
    with pytest.raises(kind, match=words):
        check(net)


def test_an_ignored_lazy_parameter_is_no_error():
    net = nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(1))
    Model.of(ignoring(net, "1.weight", "1.bias")).check()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_declare_their_gradients_sparse(kind):
    frozen = kind(3, 2, sparse=True).requires_grad_(False)
    parts = [nn.Linear(1, 1), frozen, kind(3, 2, sparse=True), kind(3, 2)]
    model = Model.of(nn.Sequential(*parts))
    model.check_supported(nn.Sequential(*parts))
    assert model.sparse == [2]  # only trained parameters count
    told = [what.endswith(", sparse gradients") for _, _, what in model.describe()]
    assert told == [False, False, False, True, False]


def test_a_weight_is_declared_sparse_if_every_module_that_has_it_says_so():
    table, twin = nn.Embedding(3, 2, sparse=True), nn.Embedding(3, 2, sparse=True)
    twin.weight = table.weight
    assert Model.of(nn.Sequential(table, twin)).sparse == [0]
    out = nn.Linear(2, 3, bias=False)
    out.weight = table.weight
    for parts in ([table, out], [out, table]):
        assert Model.of(nn.Sequential(*parts)).sparse == []


def test_sync_batch_norm_is_refused_in_the_words_of_torch():
    net = nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1))
    with pytest.raises(
        ValueError, match=r"SyncBatchNorm layers only work with GPU.*'1'"
    ):
        Model.of(net).check_supported(net)


# ---- agreement ----------------------------------------------------------------------


def test_a_description_has_all_that_must_agree():
    net = nn.Conv2d(1, 2, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    net.bias.requires_grad_(False)
    net.register_buffer("kept", torch.zeros(2, dtype=torch.int16))
    strides = net.weight.stride()
    assert Model.of(net).describe() == [
        (
            "parameter",
            "weight",
            f"torch.float64 of shape (2, 1, 3, 3), strides {strides}, trainable",
        ),
        ("parameter", "bias", "torch.float64 of shape (2,), strides (1,), frozen"),
        ("buffer", "kept", "torch.int16 of shape (2,), strides (1,)"),
    ]


CHANGES = {  # changes of a net, and the difference that is reported
    "net.z = net.last; del net.last": "parameter 'last.weight' -> parameter 'z.weight'",
    "net.first = nn.Linear(2, 4)": "shape (3, 2) -> shape (4, 2)",
    "net.last.double()": "torch.float32 -> torch.float64",
    "net.first.weight.data = torch.zeros(2, 3).t()": "strides (2, 1) -> strides (1, 3)",
    "net.last.requires_grad_(False)": "trainable -> frozen",
    "net.m = nn.Linear(1, 1)": "buffer 'norm.running_mean' -> parameter 'm.weight'",
    "net.last.named_parameters = lambda recurse: ()": "able -> trainable, not averaged",
    "del net.last": "parameter 'last.weight' -> buffer 'norm.running_mean'",
    "net.norm.register_buffer('b', torch.zeros(1))": "nothing -> buffer 'norm.b'",
    "net.norm.running_mean = torch.zeros(3).double()": "float32 -> torch.float64",
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_difference_is_in_the_digest_and_named_with_both_sides(change):
    net = Net()
    exec(change, {"net": net, "nn": nn, "torch": torch})
    plain, other = Model.of(Net()), Model.of(net)
    assert plain.digest() != other.digest()
    descriptions = [each.describe() for each in (plain, plain, other)]
    with pytest.raises(MismatchError) as caught:
        raise_first_difference(descriptions)
    words = str(caught.value)
    here, there = CHANGES[change].split(" -> ")
    first, second = words.split(" where rank 2 has ")
    assert first.startswith("DDP expects same model across all ranks, but rank 0 has ")
    assert here in first
    assert there in second.split(" (rank 0 has ")[0]
    assert f"rank 0 has 5 params, rank 2 has {len(other.parameters)}" in words


def test_equal_models_raise_nothing_whatever_their_values():
    assert Model.of(Net()).digest() == Model.of(Net()).digest()
    raise_first_difference([Model.of(Net()).describe()] * 3)


class OfOddTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(1, 1)
        self.part.scale = nn.Parameter(torch.zeros(2, dtype=torch.uint32), False)
        self.part.register_buffer("codes", torch.zeros(2, dtype=torch.uint16))


@pytest.mark.parametrize(
    ("stays", "words"),
    [
        ({"buffers": True}, "'part.scale' is of torch.uint32"),
        ({"frozen": True}, "'part.codes' is of torch.uint16"),
    ],
)
def test_a_type_that_cannot_travel_is_named_where_it_would(stays, words):
    model = Model.of(OfOddTypes())
    model.without(frozen=True, buffers=True).check_travelling(has_peers=True)
    travelling = model.without(**{"frozen": False, "buffers": False, **stays})
    with pytest.raises(NotImplementedError, match=f"{words}.*_to_ignore"):
        travelling.check_travelling(has_peers=True)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex32_travels_only_without_gradients():
    module = nn.Linear(1, 1)
    module.scale = nn.Parameter(torch.zeros(2, dtype=torch.complex32), False)
    Model.of(module).check_travelling(has_peers=True)
    module.scale.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"'scale' is of torch\.complex32"):
        Model.of(module).check_travelling(has_peers=True)
