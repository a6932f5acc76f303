"""Programs that torch refuses, or takes, and strict with it: at the same call."""

import dataclasses

import pytest
import torch
from cases import Branches, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

X = torch.tensor([[1.0, 2.0]])
READY_TWICE = "Expected to mark a variable ready only once."
UNFINISHED = "Expected to have finished reduction in the prior iteration before star"
FIND = {"find_unused_parameters": True}
STATIC = {"static_graph": True}


@dataclasses.dataclass
class Both:
    first: torch.Tensor
    second: torch.Tensor


class Hidden:
    def __init__(self, first, second):
        self.first, self.second = first, second


FORMS = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, "b": b},
    "dataclass": Both,
    "object": Hidden,
}


class TwoHeads(nn.Module):
    """Returns two outputs, in some form."""

    def __init__(self, form="tuple"):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.form = form

    def forward(self, x):
        return FORMS[self.form](self.first(x), self.second(x))


class Checkpointed(nn.Module):
    """Runs its second layer in a checkpoint; `other` in none of its forwards."""

    def __init__(self, use_reentrant, other=None):
        super().__init__()
        self.first, self.second, self.other = nn.Linear(2, 2), nn.Linear(2, 2), other
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)


class HandsOut(nn.Module):
    """Returns a layer of its own, for the caller to use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.first(x), self.second


# ---- the programs: pairs of a name and a call ---------------------------------------


def heads(output):
    if isinstance(output, (tuple, list)):
        return output
    if isinstance(output, dict):
        return tuple(output.values())
    return output.first, output.second


def one_head(model, n_steps=3):
    for _ in range(n_steps):
        output = yield "forward", lambda: model(X)
        head = heads(output)[0]
        yield "backward", head.sum().backward


def both_heads(model):
    for _ in range(3):
        output = yield "forward", lambda: model(X)
        first, second = heads(output)
        yield "backward", (first.sum() + second.sum()).backward


def a_backward_for_each_head(model):
    for _ in range(3):
        output = yield "forward", lambda: model(X)
        for head in heads(output):
            yield "backward", head.sum().backward


def plain_steps(model):
    for _ in range(3):
        output = yield "forward", lambda: model(X)
        yield "backward", output.sum().backward


def uses_what_is_handed_out(model):
    for _ in range(3):
        output = yield "forward", lambda: model(X)
        y, layer = output
        yield "backward", layer(y).sum().backward


def two_forwards_of_other_parts(model):
    for _ in range(3):
        one = yield "forward", lambda: model(X, True)
        two = yield "forward", lambda: model(X, False)
        yield "backward", (one + two).sum().backward


def freezes_a_layer(model):
    yield from plain_steps(model)
    for parameter in model.module.second.parameters():
        parameter.requires_grad_(False)
    yield from plain_steps(model)


def leaves_out_and_goes_on_without_sync(model):
    output = yield "forward", lambda: model(X, False)
    yield "backward", output.sum().backward
    with torch.no_grad():
        yield "no_grad", lambda: model(X)
    with model.no_sync():
        yield "no_sync", lambda: model(X)


def declares_static_after_a_forward(model):
    yield "forward", lambda: model(X)
    yield "static", model._set_static_graph


def refusal(program, model):
    """Return which call of a program raises, by its place, and its words."""
    steps = program(model)
    result, n = None, 0
    try:
        while True:
            name, call = steps.send(result)
            n += 1
            try:
                result = call()
            except RuntimeError as error:
                return f"{n}, {name}", str(error)
    except StopIteration:
        return None, ""


PROGRAMS = {
    **{
        f"one head of a {form}, {name}": (one_head, TwoHeads, (form,), options)
        for form in FORMS
        for name, options in (("plain", {}), ("find", FIND), ("static", STATIC))
    },
    **{
        f"both heads of a {form}, find": (both_heads, TwoHeads, (form,), FIND)
        for form in FORMS
    },
    **{
        f"{kind}, {name}": (plain_steps, Checkpointed, (reentrant,), options)
        for kind, reentrant in (("reentrant", True), ("other checkpoint", False))
        for name, options in (("plain", {}), ("find", FIND), ("static", STATIC))
    },
    "heads apart": (a_backward_for_each_head, TwoHeads, (), {}),
    "layer handed out": (uses_what_is_handed_out, HandsOut, (), {}),
    "layer handed out, find": (uses_what_is_handed_out, HandsOut, (), FIND),
    "two forwards": (two_forwards_of_other_parts, Branches, (), {}),
    "two forwards, find": (two_forwards_of_other_parts, Branches, (), FIND),
    "frozen": (freezes_a_layer, Branches, (), {}),
    "frozen, find": (freezes_a_layer, Branches, (), FIND),
    "no_sync": (leaves_out_and_goes_on_without_sync, Branches, (), {}),
    "late static": (declares_static_after_a_forward, Branches, (), {}),
}


@on_ranks(1, 2, what=[*PROGRAMS])
def test_a_program_is_refused_where_torch_refuses_it(ranks, what):
    program, kind, given, options = PROGRAMS[what]
    at, words = refusal(program, ranks.wrap(kind(*given), strict=True, **options))
    torchs_at, torchs = refusal(program, ranks.wrap_by_torch(kind(*given), **options))
    assert at == torchs_at, (words, torchs)
    for sentence in (READY_TWICE, UNFINISHED, "likely  means that not all `forward`"):
        assert (sentence in words) == (sentence in torchs), (words, torchs)


@on_ranks(1, 2)
def test_a_reentrant_checkpoint_beside_an_unused_layer_is_refused(ranks):
    model = ranks.wrap(Checkpointed(True, nn.Linear(2, 2)), strict=True, **FIND)
    at, words = refusal(plain_steps, model)
    assert at == "2, backward"
    assert READY_TWICE in words
    at, words = refusal(plain_steps, ranks.wrap(Checkpointed(True), **FIND))
    assert at is None, "it is served without strict"


@on_ranks(1)
def test_a_mask_of_another_length_is_refused(ranks):
    model = ranks.wrap(Branches(), strict=True)
    for mask in (b"", b"\0" * 5, None):
        with pytest.raises(ValueError, match=r"unused takes 4 bytes, one a parameter"):
            model._session.reducer.unused = mask
