"""What comes out: every form of output is what the plain module returns."""

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from replicas import Twin, assert_same, integer_weights, integers, loss_of
from torch import nn
from torch.utils import _pytree as pytree


class Point(NamedTuple):
    y: torch.Tensor
    z: torch.Tensor


@dataclasses.dataclass
class Record:
    y: torch.Tensor
    z: torch.Tensor | None = None
    note: str = "none"


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    y: torch.Tensor
    square: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "square", self.y * self.y)


class ModelOutput(collections.OrderedDict):
    """Attributes, keys and places are one: as outputs of transformers' models are."""

    def __init_subclass__(cls):
        pytree.register_pytree_node(
            cls,
            lambda output: (list(output.values()), list(output.keys())),
            lambda values, keys: cls(**dict(zip(keys, values, strict=True))),
            serialized_type_name=f"test_data_parallel_outputs.{cls.__name__}",
        )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key):
        if isinstance(key, str):
            return dict(self.items())[key]
        return tuple(self.values())[key]

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class TagOutput(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    states: tuple | None = None
    attentions: tuple | None = None


class Pair:
    """A container that torch knows by registration alone."""

    def __init__(self, first, second, note):
        self.first, self.second, self.note = first, second, note


pytree.register_pytree_node(
    Pair,
    lambda pair: ([pair.first, pair.second], pair.note),
    lambda leaves, note: Pair(*leaves, note),
    serialized_type_name="test_data_parallel_outputs.Pair",
)

FORMS = {
    "tensor": lambda y, z: y,
    "tuple": lambda y, z: (y, z),
    "one in a tuple": lambda y, z: (y,),
    "list": lambda y, z: [y, z],
    "dict": lambda y, z: {"z": z, "y": y},
    "ordered dict": lambda y, z: collections.OrderedDict(z=z, y=y),
    "default dict": lambda y, z: collections.defaultdict(list, {"z": z, "y": y}),
    "dict of integers": lambda y, z: {1: y, 0: z},
    "namedtuple": Point,
    "torch's named tuple": lambda y, z: y.max(1),
    "dataclass": lambda y, z: Record(y, z, "kept"),
    "dataclass with None": lambda y, z: Record(y),
    "frozen dataclass": lambda y, z: FrozenRecord(y),
    "model output": lambda y, z: TagOutput(logits=y, states=(y, z)),
    "registered": lambda y, z: Pair(y, z, "kept"),
    "nested": lambda y, z: {"a": [(y, {"b": Point(z, y)})], "c": (Record(z), ())},
    "None": lambda y, z: (y, None, {"none": None}),
    "constants": lambda y, z: (y, 3, 2.5, True, "words", b"bytes", 1j, None),
    "integers": lambda y, z: (y, y.argmax(1), y > 0, y.detach().int()),
    "the same tensor twice": lambda y, z: (y, y),
    "detached": lambda y, z: (y, z.detach(), torch.zeros(len(y), 3)),
    "views of one another": lambda y, z: (y, y[:, :1], y.reshape(-1, 1, 2)),
    "complex": lambda y, z: (y, torch.complex(y, z)),
    "sixteen bits": lambda y, z: (y, z.half(), y.bfloat16()),
    "no columns": lambda y, z: (y, z[:, :0]),
    "a vector": lambda y, z: (y.sum(1), z),
    "an image": lambda y, z: (y, z[:, :, None, None].expand(-1, 2, 3, 4)),
    "arrays": lambda y, z: (y, z.detach().numpy()),
}


class Forms(nn.Module):
    """Two layers, and a form of output by name."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.left = integer_weights(nn.Linear(3, 2), 1)
        self.right = integer_weights(nn.Linear(3, 2), 2)

    def forward(self, x):
        return FORMS[self.kind](self.left(x), self.right(x))


def total(out):
    """Return a loss of every output that has a gradient."""
    leaves = [
        leaf
        for leaf in pytree.tree_leaves(unpacked(out))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    reals = [torch.view_as_real(t) if t.is_complex() else t for t in leaves]
    return sum((i + 1) * loss_of(t.double()) for i, t in enumerate(reals))


def unpacked(out):
    """Return an output with its dataclasses as dicts of their fields, at any depth."""
    if isinstance(out, (Record, FrozenRecord)):
        names = [field.name for field in dataclasses.fields(out)]
        return {name: unpacked(getattr(out, name)) for name in names}
    if type(out) in (tuple, list):
        return [unpacked(entry) for entry in out]
    if type(out) is dict:
        return {key: unpacked(value) for key, value in out.items()}
    return out


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(("n", "n_rows"), [(2, 7), (3, 7), (2, 1), (2, 0)])
def test_outputs_have_the_plain_form_and_gradients(wrap, kind, n, n_rows):
    if kind == "torch's named tuple" and n_rows == 0:
        n_rows = 4
    twin = Twin(wrap, Forms(kind), n)
    x = integers(n_rows, 3).requires_grad_()
    twin.compare(lambda model, x: model(x), x)
    twin.step(lambda model, x: total(model(x)), x)


def test_a_model_output_is_reached_in_its_three_ways(wrap):
    out = wrap(Forms("model output"))(integers(7, 3))
    assert out.logits is out["logits"]
    assert out.logits is out[0]
    assert list(out) == ["logits", "states"]
    assert out.loss is None
    assert out.attentions is None


def test_a_default_dict_keeps_its_factory(wrap):
    out = wrap(Forms("default dict"))(integers(7, 3))
    assert out["new"] == []


# ---- values that are no batch -------------------------------------------------------


class Odd(nn.Module):
    """Returns what each replica finds for itself."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x):
        y = self.linear(x)
        rows = [int(v) for v in x[:, 0]]
        values: dict[str, Any] = {
            "count": len(x),
            "word": f"{len(x)} rows",
            "share": len(x) / 8,
            "is four": len(x) == 4,
            "names": [f"row {v}" for v in rows],
            "pieces": [row * 1 for row in y],
        }
        return y, values[self.kind]


VALUES = {
    "count": lambda n: n,
    "word": lambda n: f"{n} rows",
    "share": lambda n: n / 8,
    "is four": lambda n: n == 4,
}


@pytest.mark.parametrize("kind", VALUES)
def test_constants_come_as_a_list_with_one_entry_a_replica(wrap, kind):
    """For any number of rows, so that the type does not depend on the batch."""
    ours = wrap(Odd(kind))
    for n_rows, sizes in ((7, [4, 3]), (1, [1]), (6, [3, 3]), (2, [1, 1]), (8, [4, 4])):
        out = ours(integers(n_rows, 3))[1]
        assert type(out) is list
        assert out == [VALUES[kind](n) for n in sizes]


def test_constants_of_all_kinds_and_objects_come_as_lists(wrap):
    constants = FORMS["constants"](None, None)[1:-1]
    for n_rows, n_used in ((7, 2), (1, 1)):
        out = wrap(Forms("constants"))(integers(n_rows, 3))
        assert list(out[1:-1]) == [[value] * n_used for value in constants]
        assert out[-1] is None


@pytest.mark.parametrize("n_rows", [7, 8])
def test_lists_of_names_with_an_entry_a_row_are_joined(wrap, n_rows):
    x = torch.arange(3.0 * n_rows, dtype=torch.float64).reshape(n_rows, 3)
    twin = Twin(wrap, Odd("names"))
    theirs, mine = twin.run(lambda model, x: model(x), x)
    assert_same(mine, theirs)


def test_lists_of_tensors_are_joined_by_entry_as_in_torch(wrap):
    ours = wrap(Odd("pieces"))
    y, pieces = ours(integers(8, 3))
    assert_same(pieces, [torch.cat(pair) for pair in zip(y[:4], y[4:], strict=True)])
    with pytest.raises(ValueError, match="4 entries on replica 0 and 3 on replica 1"):
        ours(integers(7, 3))


class Losses(nn.Module):
    """Returns its loss, as a number and as a tensor without dimensions."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x):
        loss = self.linear(x).square().sum()
        return {"loss": loss, "value": loss.item()}


@pytest.mark.filterwarnings("ignore:Was asked to gather")
@pytest.mark.parametrize(("n", "n_rows"), [(2, 7), (3, 7), (3, 2), (2, 1)])
def test_losses_without_dimensions_become_a_vector(wrap, n, n_rows):
    twin = Twin(wrap, Losses(), n)
    x = integers(n_rows, 3).requires_grad_()
    out = twin.ours(x)
    used = min(n, n_rows)
    assert out["loss"].shape == (used,)
    assert out["value"] == out["loss"].tolist()
    twin.step(lambda model, x: model(x)["loss"].sum(), x)


@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_the_weight_of_each_loss_reaches_its_replica(wrap):
    module = Losses()
    plain = copy.deepcopy(module)
    x = integers(7, 3)
    ours = wrap(module)
    (ours(x)["loss"] * torch.tensor([1.0, 10.0], dtype=torch.float64)).sum().backward()
    (plain(x[:4])["loss"] + 10 * plain(x[4:])["loss"]).backward()
    assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)


# ---- outputs that are something else already ----------------------------------------


class Passing(nn.Module):
    """Returns inputs, and views of its parameters, as they are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(integers(1, 3))
        self.bias = nn.Parameter(integers(3, seed=1))
        self.linear = integer_weights(nn.Linear(3, 3))

    def forward(self, x, kind):
        if kind == "input":
            return x
        if kind == "input in a tuple":
            return x, self.linear(x), x
        if kind == "view of the input":
            return x[:, 1:]
        if kind == "expanded parameter":
            return self.weight.expand(len(x), -1)
        if kind == "expanded bias":
            return self.bias.unsqueeze(0).expand(len(x), 3)
        if kind == "input changed in place":
            return self.linear(x.mul_(2))
        assert kind == "changed in place"
        return self.linear(x).add_(x)


@pytest.mark.parametrize(
    "kind",
    [
        "input",
        "input in a tuple",
        "view of the input",
        "expanded parameter",
        "expanded bias",
        "changed in place",
    ],
)
def test_inputs_and_parameters_may_be_returned(wrap, kind):
    twin = Twin(wrap, Passing())
    x = integers(7, 3).requires_grad_()
    twin.compare(lambda model, x: model(x, kind), x)
    twin.step(lambda model, x: total(model(x, kind)), x)


def test_an_input_may_be_changed_in_place(wrap):
    twin = Twin(wrap, Passing())
    x = integers(7, 3).requires_grad_()
    twin.step(lambda model, x: loss_of(model(x * 1, "input changed in place")), x)


def test_an_input_without_gradient_comes_back_without(wrap):
    twin = Twin(wrap, Passing())
    x = integers(7, 3)
    assert not twin.ours(x, "input").requires_grad
    twin.compare(lambda model, x: model(x, "input in a tuple"), x)


def test_outputs_may_be_changed_in_place(wrap):
    twin = Twin(wrap, Passing())
    x = integers(7, 3)

    def loss(model, x):
        out = model(x, "input in a tuple")[1]
        out.mul_(2)
        out[:, 0] += 1
        return loss_of(out)

    twin.step(loss, x)
    kept = x.clone()
    twin.ours(x, "input in a tuple")[1].add_(1)
    assert torch.equal(x, kept)


# ---- outputs of which not all are used ----------------------------------------------

USES = {
    "the first": lambda out: loss_of(out[0]),
    "the second": lambda out: loss_of(out[1]),
    "both": lambda out: loss_of(out[0]) + 2 * loss_of(out[1]),
    "one row of the first half": lambda out: out[0][1].sum(),
    "rows of the second half": lambda out: loss_of(out[1][5:]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_loss_may_use_some_outputs_only(wrap, use):
    twin = Twin(wrap, Forms("tuple"))
    x = integers(7, 3).requires_grad_()
    twin.step(lambda model, x: use(model(x)), x)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_outputs_apart_go_into_backwards_of_their_own(wrap, order):
    """Two graphs that share nothing but the input: neither backward frees the other."""
    twin = Twin(wrap, Forms("tuple"))

    def run(model, x):
        outs = model(x)
        for i in order:
            loss_of(outs[i]).backward()
        return x.grad

    twin.compare(run, integers(7, 3).requires_grad_())
    twin.assert_same()


def test_outputs_live_on_after_later_calls(wrap):
    twin = Twin(wrap, Forms("tuple"))
    batches = [integers(7, 3, seed=seed) for seed in range(4)]
    with torch.no_grad():
        kept = [twin.ours(x) for x in batches]
        for out, x in zip(kept, batches, strict=True):
            assert_same(out, twin.plain(x))
