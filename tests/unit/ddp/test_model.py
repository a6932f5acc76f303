"""What a model is to the ranks: its tensors, and what they must agree on."""

import pytest
import torch
from paceline import MismatchError
from paceline._ddp.model_spec import NO_GRADIENT, Model, raise_first_difference
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 1, bias=False)


def names(pairs):
    return [entry[0] for entry in pairs]


# ---- what is collected --------------------------------------------------------------


def test_parameters_and_buffers_come_in_the_order_of_registration():
    model = Model.of(Net())
    assert names(model.parameters) == [
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "last.weight",
    ]
    assert names(model.buffers) == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


def test_frozen_parameters_are_collected_but_not_trainable():
    net = Net()
    net.first.requires_grad_(False)
    model = Model.of(net)
    assert len(model.parameters) == 5
    assert model.trainable == [net.norm.weight, net.norm.bias, net.last.weight]


def test_a_shared_parameter_counts_once():
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    net["b"].weight = net["a"].weight
    assert names(Model.of(net).parameters) == ["a.weight", "a.bias", "b.bias"]


def test_a_shared_module_counts_once():
    part = nn.BatchNorm1d(2)
    model = Model.of(nn.Sequential(part, part))
    assert names(model.parameters) == ["0.weight", "0.bias"]
    assert len(model.buffers) == 3


def test_a_shared_buffer_counts_once():
    net = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    shared = torch.zeros(2)
    net[0].register_buffer("kept", shared)
    net[1].register_buffer("same", shared)
    assert names(Model.of(net).buffers) == ["0.kept"]


def test_buffers_that_are_none_are_left_out():
    net = nn.BatchNorm1d(2, track_running_stats=False)
    net.register_buffer("nothing", None)
    assert Model.of(net).buffers == []


def test_buffers_that_are_not_saved_are_still_collected():
    net = nn.Linear(1, 1)
    net.register_buffer("cache", torch.zeros(3), persistent=False)
    assert names(Model.of(net).buffers) == ["cache"]


def test_a_buffer_is_found_again_after_its_tensor_was_replaced():
    net = nn.Linear(1, 1)
    net.register_buffer("kept", torch.zeros(1))
    ((_, owner, name),) = Model.of(net).buffers
    net.kept = torch.ones(1)
    assert owner[name] is net.kept


def test_ignored_names_are_left_out():
    net = Net()
    net._ddp_params_and_buffers_to_ignore = [
        "first.weight",
        "norm.running_mean",
        "none",
    ]
    model = Model.of(net)
    assert "first.weight" not in names(model.parameters)
    assert names(model.buffers) == ["norm.running_var", "norm.num_batches_tracked"]


def test_ignored_names_may_be_set_by_the_way_of_torch():
    net = Net()
    torch_ddp = nn.parallel.DistributedDataParallel
    torch_ddp._set_params_and_buffers_to_ignore_for_model(net, ["last.weight"])
    assert "last.weight" not in names(Model.of(net).parameters)


def test_all_tensors_are_parameters_then_buffers():
    net = Net()
    expected = [*net.parameters(), *net.buffers()]
    assert [id(t) for t in Model.of(net).tensors()] == [id(t) for t in expected]


# ---- what cannot be wrapped ---------------------------------------------------------


def test_a_plain_model_passes_the_checks():
    net = Net()
    model = Model.of(net)
    model.check()
    model.check_supported(net)


@pytest.mark.parametrize(
    "net", [nn.ReLU(), nn.Linear(1, 1).requires_grad_(False)], ids=["none", "frozen"]
)
def test_no_trainable_parameter_is_an_error_in_the_words_of_torch(net):
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires"):
        Model.of(net).check()


def test_ignoring_every_parameter_leaves_none_to_train():
    net = nn.Linear(1, 1)
    net._ddp_params_and_buffers_to_ignore = ["weight", "bias"]
    with pytest.raises(RuntimeError) as caught:
        Model.of(net).check()
    assert str(caught.value).startswith(NO_GRADIENT)


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (nn.LazyLinear(2), "weight"),
        (nn.Sequential(nn.Linear(1, 1), nn.LazyBatchNorm1d()), "1.weight"),
        (nn.LazyBatchNorm1d(affine=False), "running_mean"),
    ],
)
def test_a_lazy_tensor_is_named(net, name):
    with pytest.raises(RuntimeError, match=rf"uninitialized parameters.*'{name}'"):
        Model.of(net).check()


def test_an_ignored_lazy_parameter_is_no_error():
    net = nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(1))
    net._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]
    Model.of(net).check()


def test_a_parameter_on_another_device_is_named_with_the_device():
    with pytest.raises(NotImplementedError, match=r"'weight' is a .* on device meta"):
        Model.of(nn.Linear(1, 1, device="meta")).check()


def test_parameters_on_several_devices_are_an_error_in_the_words_of_torch():
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match=r"same type of devices.*\['cpu', 'meta'\]"):
        Model.of(net).check()


def test_a_buffer_on_another_device_is_named():
    net = nn.Linear(1, 1)
    net.register_buffer("far", torch.zeros(1, device="meta"))
    with pytest.raises(NotImplementedError, match=r"'far' is a .* on device meta"):
        Model.of(net).check()


def test_a_sparse_tensor_is_named():
    net = nn.Linear(1, 1)
    net.register_buffer("thin", torch.eye(2).to_sparse())
    with pytest.raises(NotImplementedError, match=r"'thin' is a torch\.sparse_coo"):
        Model.of(net).check()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_declare_their_gradients_sparse(kind):
    frozen = kind(3, 2, sparse=True).requires_grad_(False)
    parts = [nn.Linear(1, 1), frozen, kind(3, 2, sparse=True), kind(3, 2)]
    model = Model.of(nn.Sequential(*parts))
    model.check_supported(nn.Sequential(*parts))
    assert model.sparse == [2]  # of those that are trained
    told = [what for _, _, what in model.describe()]
    assert [what.endswith(", sparse gradients") for what in told] == [
        False,
        False,
        False,
        True,
        False,
    ]


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


def test_values_have_no_part_in_the_digest():
    assert Model.of(Net()).digest() == Model.of(Net()).digest()


def changed(what):
    net = Net()
    if what == "name":
        net.end = net.last
        del net.last
    elif what == "shape":
        net.first = nn.Linear(2, 4)
    elif what == "dtype":
        net.last.double()
    elif what == "strides":
        net.first.weight = nn.Parameter(torch.zeros(2, 3).t())
    elif what == "frozen":
        net.last.requires_grad_(False)
    elif what == "more":
        net.more = nn.Linear(1, 1)
    elif what == "less":
        del net.last
    elif what == "buffer":
        net.norm.register_buffer("extra", torch.zeros(1))
    elif what == "buffer dtype":
        net.norm.running_mean = net.norm.running_mean.double()
    return net


CHANGES = {
    "name": ("parameter 'last.weight'", "parameter 'end.weight'"),
    "shape": ("shape (3, 2)", "shape (4, 2)"),
    "dtype": ("torch.float32", "torch.float64"),
    "strides": ("strides (2, 1)", "strides (1, 3)"),
    "frozen": ("trainable", "frozen"),
    "more": ("buffer 'norm.running_mean'", "parameter 'more.weight'"),
    "less": ("parameter 'last.weight'", "buffer 'norm.running_mean'"),
    "buffer": ("nothing", "buffer 'norm.extra'"),
    "buffer dtype": ("torch.float32", "torch.float64"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_changes_the_digest(what):
    assert Model.of(changed(what)).digest() != Model.of(Net()).digest()


@pytest.mark.parametrize("what", CHANGES)
def test_the_first_difference_is_named_with_both_sides(what):
    plain, other = Model.of(Net()).describe(), Model.of(changed(what)).describe()
    with pytest.raises(MismatchError) as caught:
        raise_first_difference([plain, plain, other])
    words = str(caught.value)
    here, there = CHANGES[what]
    first, second = words.split(" where rank 2 has ")
    assert first.startswith("DDP expects same model across all ranks, but rank 0 has ")
    assert here in first
    assert there in second.split(" (rank 0 has ")[0]
    assert (
        f"rank 0 has 5 params, rank 2 has {len(Model.of(changed(what)).parameters)}"
        in (words)
    )


def test_equal_models_raise_nothing():
    raise_first_difference([Model.of(Net()).describe()] * 3)


class OfOddTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(1, 1)
        self.part.scale = nn.Parameter(torch.ones(2, dtype=torch.complex32), False)
        self.part.register_buffer("codes", torch.zeros(2, dtype=torch.uint16))


@pytest.mark.parametrize(
    ("stays", "words"),
    [
        ({"buffers": True}, "'part.scale' is of torch.complex32"),
        ({"frozen": True}, "'part.codes' is of torch.uint16"),
    ],
)
def test_a_type_that_cannot_travel_is_named_where_it_would(stays, words):
    model = Model.of(OfOddTypes())
    model.without(frozen=True, buffers=True).check_types()
    travelling = model.without(**{"frozen": False, "buffers": False, **stays})
    with pytest.raises(NotImplementedError, match=f"{words}.*_to_ignore"):
        travelling.check_types()
