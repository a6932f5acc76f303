"""Inputs: every kind of argument reaches the replicas as users wrote it."""

import dataclasses
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


class Point(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass
class Record:
    a: torch.Tensor
    b: torch.Tensor | None = None
    note: str = "none"


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


# name: (makes the nesting of two tensors, finds them in it)
NESTINGS = {
    "registered": (lambda a, b: Pair(a, b, "kept"), lambda v: (v.a, v.b)),
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


@uses(ECHO)
def inputs_of_any_dtype_arrive_as_they_are(model):
    seen = []
    for dtype in [getattr(torch, name) for name in DTYPES]:
        x = integers(7, 3).to(dtype).requires_grad_(dtype.is_floating_point)
        out = alike(model(x))
        loss_of(out[0]).backward()
        seen.append([out, x.grad])
    return seen


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
