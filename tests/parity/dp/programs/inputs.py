"""Inputs: every kind of argument reaches the replicas as users wrote it."""

import collections
import dataclasses
import fractions
import functools
import math
import pathlib
from typing import NamedTuple

import numpy as np
import paceline
import torch
from replicas import (
    alike,
    bare,
    integer_weights,
    integers,
    linear,
    loss_of,
    loss_of_all,
    net,
    reals,
)
from torch import nn
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

from programs import THREE, X, grown, module, pairs, program, steps, uses

# ---- how a batch is divided ---------------------------------------------------------


SIZES = 9, 7, 2, 1, 0, 6, 3, 64


@program(
    steps(x=lambda seed: (integers(SIZES[seed % 8], 3, seed=seed),), n=8),
    layer=linear(2),
    in_parts=True,
    on=THREE,
)
def rows_are_dealt_out_evenly(m, x):
    return m.layer(x), torch.full((len(x), 1), float(len(x)))


@uses(module(lambda m: (m.layer.weight.sum()[None], 3), layer=linear()))
def no_argument_at_all_is_one_call(model):
    out = alike(model())
    out[0].backward()
    return out


@uses(net)
def batches_of_many_megabytes_pass(model):
    xs = [grown(integers(n, 3)) for n in (7, 300_001, 1)]
    for x in xs:
        model(x).sum().backward()
    return [x.grad for x in xs]


@uses(net, [1, -2], on=THREE)
def rows_may_lie_along_another_dimension(model, dim):
    if model is not bare(model):
        model = paceline.DataParallel(bare(model), model.device_ids, dim=dim)
    x = grown(integers(5, 7, 3))
    out = model(x)
    loss_of(out).backward()
    return out, x.grad


@uses(net)
def the_function_does_what_the_class_does(model):
    out = model(X)
    if model is not bare(model):
        out = paceline.data_parallel(bare(model), X, device_ids=model.device_ids)
    loss_of(out).backward()
    return out


# ---- arguments -----------------------------------------------------------------------


def summed(m, x, y=None, scale=1, *, sign="plus", mask=None, shift=0.0):
    """Take two inputs and plain options of every kind."""
    out = m.left(x) * scale + float(shift)
    if y is not None:
        out = out + m.right(y) if sign == "plus" else out - m.right(y)
    return out if mask is None else out.masked_fill(mask, 0)


CALLS = {
    "positional": lambda m, x, y: m(x, y),
    "keywords only": lambda m, x, y: m(x=x, y=y),
    "both": lambda m, x, y: m(x, y=y),
    "keywords in another order": lambda m, x, y: m(y=y, sign="minus", x=x),
    "numbers": lambda m, x, y: m(x, y, 2, shift=3.0),
    "a string": lambda m, x, y: m(x, y, sign="minus"),
    "None": lambda m, x, y: m(x, None, 3, mask=None),
    "a mask": lambda m, x, y: m(x, y, mask=x[:, :1] > 0),
    "0-dim tensor": lambda m, x, y: m(x, y, torch.tensor(2.0, dtype=torch.float64)),
    "0-dim array": lambda m, x, y: m(x, y, shift=np.array(2.0)),
    "an option that is back": lambda m, x, y: m(x, y),
}


@uses(module(summed, left=linear(2), right=linear(2, 4)))
def arguments_of_a_call_arrive(model):
    seen = []
    for call in CALLS.values():
        x, y = grown(integers(7, 3)), grown(integers(7, 4))
        out = call(model, x, y)
        loss_of(out).backward()
        seen.append([out, x.grad, y.grad])
    return seen


@uses(module(lambda m, *, x, extra=None: m.layers(x), layers=net()), [[], {}, ((),)])
def empty_containers_may_stand_beside_a_tensor(model, empty):
    loss_of(model(x=X, extra=empty)).backward()
    loss_of(model(x=X + 1)).backward()


class Point(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass
class Record:
    a: torch.Tensor
    b: torch.Tensor | None = None
    note: str = "none"


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    a: torch.Tensor
    b: torch.Tensor


class Pair:
    """A container that torch knows only by registration."""

    def __init__(self, a, b, note):
        self.a, self.b, self.note = a, b, note


pytree.register_pytree_node(
    Pair,
    lambda pair: ([pair.a, pair.b], pair.note),
    lambda leaves, note: Pair(*leaves, note),
    serialized_type_name="programs.inputs.Pair",
)


def of_names(v):
    return v.a, v.b


# name: (makes the nesting of two tensors, finds them in it)
NESTINGS = {
    "tuple": (lambda a, b: (a, b), lambda v: v),
    "list": (lambda a, b: [a, "skipped", b], lambda v: (v[0], v[2])),
    "dict": (lambda a, b: {"b": b, "a": a}, lambda v: (v["a"], v["b"])),
    "ordered dict": (
        lambda a, b: collections.OrderedDict(b=b, a=a),
        lambda v: (v["a"], v["b"]),
    ),
    "dict of integers": (lambda a, b: {1: a, 2: b, 3: None}, lambda v: (v[1], v[2])),
    "namedtuple": (Point, of_names),
    "dataclass": (lambda a, b: Record(a, b, "kept"), of_names),
    "frozen dataclass": (FrozenRecord, of_names),
    "registered": (lambda a, b: Pair(a, b, "kept"), of_names),
    "deep": (
        lambda a, b: {"x": [((a,), {"y": Point(a, [Record(b, b)])})], "z": ()},
        lambda v: (v["x"][0][0][0], v["x"][0][1]["y"].b[0].b),
    ),
    "the same tensor twice": (lambda a, b: [a, a, b], lambda v: (v[0] + v[1], v[2])),
}


def nested(m, batch, find):
    a, b = find(batch)
    note = getattr(batch, "note", "")
    return m.left(a) - m.right(b), f"{type(batch).__name__} {note}"


@uses(module(nested, left=linear(2), right=linear(2, 4)))
def nested_arguments_keep_their_form(model):
    seen = []
    for make, find in NESTINGS.values():
        a, b = grown(integers(7, 3)), grown(integers(7, 4))
        out = alike(model(make(a, b), find))
        loss_of(out[0]).backward()
        seen.append([out, a.grad, b.grad])
    return seen


class Settings:
    """An object of the user, who may change it between calls."""

    def __init__(self, power):
        self.power = power

    def __repr__(self):
        return f"Settings({self.power})"


def double(x):
    return 2 * x


THINGS = [
    *[torch.float32, torch.device("cpu"), torch.Size([1, 2]), slice(0, 2), range(3)],
    *[{1}, fractions.Fraction(1, 3), pathlib.PurePosixPath("a/b"), Settings],
    *[Settings(2), [{"a": Settings(2)}, (Settings(3), ...)], {"a": [1, "b"], 2: None}],
    *[(math.inf, -0.0), double, lambda x: x * 3, functools.partial(double)],
    lambda x: x * 2,
]


def described(m, x, thing):
    if callable(thing) and not isinstance(thing, type):
        return m.layer(thing(x)), "called"
    return m.layer(x), repr(thing)


@uses(module(described, layer=linear()))
def objects_of_any_kind_are_given_to_each(model):
    settings, seen = Settings(1), []
    for settings.power, thing in enumerate(THINGS):
        out = alike(model(X, thing))
        loss_of(out[0]).backward()
        seen += [out, alike(model(X, settings))]
    return seen


def append(log, row):
    log.append(row)


# name: (makes a container, fills it)
FILLS = {
    "an empty list": (list, append),
    "a dict": (dict, lambda log, row: log.update({row: True})),
    "a default dict": (
        lambda: collections.defaultdict(list),
        lambda log, row: log["rows"].append(row),
    ),
    "a deque": (collections.deque, append),
    "a list beside a tensor": (
        lambda: {"x": X, "rows": []},
        lambda v, row: v["rows"].append(row),
    ),
    "a dict in a dataclass": (
        lambda: Record(X, note={}),
        lambda v, row: v.note.setdefault("rows", []).append(row),
    ),
}


def writing(m, x, cache, order):
    cache.setdefault("doubled", x * 2)
    order["n"] += 1
    order["columns"].reverse()
    return m.layer(x[:, order["columns"]] + cache["doubled"]) * order["n"]


@uses(module(writing, layer=linear()), on=THREE)
def a_replica_does_not_see_what_another_writes_to_a_container(model):
    out = model(X, {"step": 0}, {"n": 0, "columns": [0, 2, 1]})
    loss_of(out).backward()
    return out


def filling(m, x, log, fill):
    for row in x[:, 0].tolist():
        fill(log, row)
    return m.layer(x)


@uses(module(filling, layer=linear()), on=THREE)
def empty_containers_are_filled_by_all(model):
    seen = []
    for make, fill in FILLS.values():
        logs = [make(), make(), make()]
        marked = logs[2] if model is bare(model) else paceline.replicate(logs[2])
        for log in (*logs[:2], marked):
            out = model(X, log, fill)
            loss_of(out).backward()
            seen.append(out)
        inside = [log.note if isinstance(log, Record) else log for log in logs]
        seen += [
            sorted(map(str, log.get("rows", log) if isinstance(log, dict) else log))
            for log in inside
        ]
    return seen


@dataclasses.dataclass
class Node:
    x: torch.Tensor
    parent: "Node | None" = None
    children: list | tuple = ()


def family(a, b):
    root = Node(a)
    root.children = [Node(b, root), Node(a, root)]
    return root


def of_family(root):
    assert all(child.parent is root for child in root.children)
    return root.children[1].x, root.children[0].x


def ring(a, b):
    first, second = Node(a), Node(b)
    first.parent, second.parent = second, first
    return [first, {"second": second}]


def of_ring(value):
    first, second = value[0], value[1]["second"]
    assert first.parent is second
    assert second.parent is first
    return first.x, second.x


def around(value, name):
    """Return a container that holds itself."""
    if name is None:
        value.append(value)
    elif isinstance(value, dict):
        value[name] = value
    else:
        setattr(value, name, (value,))
    return value


def of_list(value):
    assert value[2] is value
    return value[:2]


def of_dict(value):
    assert value["itself"] is value
    return value["a"], value["b"]


def of_tuple(value):
    assert value.children[0] is value
    return value.x, value.parent.x


LINKED = {
    "a family": (family, of_family),
    "a ring in a list": (ring, of_ring),
    "a list in itself": (lambda a, b: around([a, b], None), of_list),
    "a dict in itself": (lambda a, b: around({"b": b, "a": a}, "itself"), of_dict),
    "through a tuple": (lambda a, b: around(Node(a, Node(b)), "children"), of_tuple),
}


def linked(m, graph, make, find):
    a, b = find(graph)
    return make(m.left(a), m.right(b))


@uses(module(linked, left=linear(2), right=linear(2, 4)), LINKED, on="cpu3 gpu2")
def values_may_lead_back_to_themselves(model, make, find):
    a, b = grown(integers(7, 3)), grown(integers(7, 4))
    y, z = find(model(make(a, b), make, find))
    (loss_of(y) + 2 * loss_of(z)).backward()
    return y, z, a.grad, b.grad


# ---- several rows for each ----------------------------------------------------------


def each_with_its_own(m, x, more, most, names):
    """For each row of x there are some rows of `more`, and still more of `most`."""
    y = m.left(x).repeat_interleave(len(more) // len(x), 0) + m.right(more)
    sums = most.reshape(len(x), -1).sum(1, keepdim=True)
    return y, {"choices": y.reshape(len(x), -1, 3), "sums": sums * m.left(x)}, names


MULTIPLES = {"pairs": (2, 2), "choices": (4, 1), "proposals": (5, 3)}


@uses(module(each_with_its_own, left=linear(), right=linear(3, 2)), MULTIPLES, on=THREE)
def several_rows_belong_to_each_row(model, k, n):
    seen = []
    for n_rows in (7, 6, 2, 1, 3, 9):
        x, more = grown(integers(n_rows, 3)), grown(integers(n_rows * k, 2))
        most = grown(integers(n_rows * k * n, 1))
        out = alike(model(x, more, most, "name"))
        loss_of_all(out).backward()
        seen.append([out, x.grad, more.grad, most.grad])
    return seen


@uses(module(lambda m, x, more: (m.layer(x), more * 2), layer=linear()), on="cpu cpu3")
def several_rows_of_an_array_belong_to_each_row(model):
    arrays = [integers(3 * n, 2).numpy() for n in (7, 2, 1)]
    return [model(integers(len(a) // 3, 3), a) for a in arrays]


@uses(
    module(lambda m, x, packed: (m.layer(x), packed), layer=linear()),
    on="cpu cpu3",
)
def several_packed_sequences_belong_to_each_row(model):
    sequences = [integers(n, 2, seed=n) for n in (1, 3, 2, 4, 2, 1)]
    packed = rnn.pack_sequence(sequences, enforce_sorted=False)
    out = model(integers(3, 3), packed)
    return out[0], rnn.unpack_sequence(out[1])


TABLES = {
    "tensor": paceline.replicate,
    "inside a dict": lambda table: {"table": paceline.replicate(table)},
    "whole dict": lambda table: paceline.replicate({"table": table}),
}


def looked_up(m, index, tables):
    table = tables["table"] if isinstance(tables, dict) else tables
    return m.layer(table[index]), len(table)


@uses(module(looked_up, layer=linear()), TABLES, on=THREE)
def a_replicated_argument_goes_whole_to_each(model, mark):
    index, table = torch.tensor([4, 0, 1, 1, 3, 4, 4]), grown(integers(5, 3))
    out = alike(model(index, table if model is bare(model) else mark(table)))
    loss_of(out[0]).backward()
    return out, table.grad


def adding(m, x, t):
    t.add_(1)
    return m.layer(x) + t


@uses(
    module(adding, layer=linear()),
    pairs({"()": [], "(3,)": [3]}, {"recorded": True, "not recorded": False}),
)
def an_argument_that_is_not_split_may_be_changed_in_place(model, shape, is_recorded):
    t = torch.zeros(shape, dtype=torch.float64)
    with torch.set_grad_enabled(is_recorded):
        return model(X, t if model is bare(model) else paceline.replicate(t))


# ---- arrays and numbers -------------------------------------------------------------


def echo(m, x):
    if isinstance(x, np.ndarray):
        array = torch.from_numpy(x.astype(np.float64))
        return m.layer(array), x * 2, m.layer(array).detach().numpy(), str(x.dtype)
    return m.layer(x.double()), x, str(x.dtype)


ECHO = module(echo, layer=linear(2))


ARRAYS = ["float64", "float16", "float32", "int8", "int16", "int32", "int64", "bool"]
DTYPES = [*ARRAYS[1:], "bfloat16", "uint8"]


@uses(ECHO)
def arrays_are_split_and_come_back_as_arrays(model):
    arrays = [integers(7, 3).numpy().astype(dtype) for dtype in ARRAYS]
    arrays.append(np.asfortranarray(integers(14, 6).numpy())[::2, ::2])
    outs = [alike(model(array)) for array in arrays]
    loss_of(outs[0][0]).backward()
    assert all(isinstance(out[1], np.ndarray) for out in outs)
    return outs


@uses(ECHO, {dtype: getattr(torch, dtype) for dtype in DTYPES})
def inputs_of_any_dtype_arrive_as_they_are(model, dtype):
    x = integers(7, 3).to(dtype).requires_grad_(dtype.is_floating_point)
    out = alike(model(x))
    assert out[2] == str(dtype)
    loss_of(out[0]).backward()
    return out, x.grad


VIEWS = {
    "transposed": lambda x: x.T,
    "every second row": lambda x: x.T.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:, :1].T.expand(7, 3),
    "flipped": lambda x: x.T.flip(0),
    "with an offset": lambda x: torch.cat([x, x], 1).T[7:],
}


@uses(net)
def views_of_any_strides_are_split_by_rows(model):
    x = grown(integers(3, 7))
    outs = [model(view(x)) for view in VIEWS.values()]
    sum(map(loss_of, outs)).backward()
    return outs, x.grad


def formed(m, x):
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    return m.layer(x), f"{is_last} {x.is_contiguous()}"


@uses(
    module(formed, layer=integer_weights(nn.Conv2d(3, 4, 3, padding=1))),
    {"channels first": torch.contiguous_format, "last": torch.channels_last},
)
def images_keep_their_memory_format(model, form):
    x = grown(integers(7, 3, 5, 6).to(memory_format=form))
    out = alike(model(x))
    loss_of(out[0]).backward()
    return out, x.grad, out[0].is_contiguous(memory_format=form)


# ---- sequences ----------------------------------------------------------------------

LENGTHS = torch.tensor([2, 5, 3, 1, 2, 4, 1])  # the longest is in the first half


def lstm(**options):
    torch.manual_seed(0)
    return nn.LSTM(3, 4, **options).double()


@program(
    steps(x=lambda seed: (reals(7, 5, 3, seed=seed), LENGTHS)),
    exact=False,
    lstm=lstm(num_layers=2, batch_first=True, bidirectional=True),
)
def a_recurrent_net_packs_its_own_rows(m, x, lengths):
    m.lstm.flatten_parameters()
    packed = rnn.pack_padded_sequence(
        x, lengths.cpu(), batch_first=True, enforce_sorted=False
    )
    states, (h, _) = m.lstm(packed)
    padded, sizes = rnn.pad_packed_sequence(
        states, batch_first=True, total_length=x.shape[1]
    )
    return padded, h.transpose(0, 1), sizes


@uses(
    module(lambda m, packed: m.lstm(packed)[1][0][-1], lstm=lstm()),
    {"sorted": True, "unsorted": False},
    exact=False,
)
def packed_sequences_are_split_by_rows(model, is_sorted):
    lengths = LENGTHS.sort(descending=True).values if is_sorted else LENGTHS
    x = grown(reals(7, 5, 3))
    packed = rnn.pack_padded_sequence(
        x, lengths, batch_first=True, enforce_sorted=is_sorted
    )
    out = model(packed)
    loss_of(out).backward()
    return out, x.grad


@uses(module(lambda m, x: (rnn.pack_sequence(list(x)), x.sum(1))))
def packed_sequences_are_joined_within_a_tuple(model):
    return model(integers(7, 3, 2))
