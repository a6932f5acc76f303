"""Programs that torch refuses work, but with strict they raise torch's errors."""

import dataclasses
import re

import pytest
import torch
from cases import Branches, as_torch, grads_of, net, on_ranks, skip_with_bf16_hook
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

X = torch.tensor([[1.0, 2.0]])
UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new "
    "one."
)


class Twice(nn.Module):
    """Uses one layer in two reentrant checkpoints."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def step(model, *args):
    model(X, *args).sum().backward()


def message(call, *args):
    """Return the message of the error that a call raises; None if it raises none."""
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    return None


# ---- unused parameters --------------------------------------------------------------


def test_unused_parameters_are_refused_at_the_next_forward_as_in_torch(ranks):
    mine = ranks.wrap(Branches(), strict=True)
    theirs = ranks.wrap_by_torch(Branches())
    words = []
    for model in (mine, theirs):
        step(model, False)
        words.append(message(model, X))
    for said in words:
        assert said.startswith(UNFINISHED)
        assert "parameters that were not used in producing loss" in said
        own = f"indices which did not receive grad for rank {ranks.rank}: 2 3"
        assert own in said
    assert ": second.weight, second.bias" in words[0]
    for said in words:
        assert "`find_unused_parameters=True`" in said
    assert "Leave out strict" in words[0]
    assert message(mine, X) == words[0], "it is refused again"
    for model in (mine, theirs):
        data = model._get_ddp_logging_data()
        assert data["has_error"] == 1
        assert data["error"].startswith(("<class 'RuntimeError'>: Exp", UNFINISHED))


def strictly(ranks, wrap, module, **options):
    """Wrap with torch's class, or with ours in strict mode."""
    return wrap(module, **options, **({"strict": True} if wrap == ranks.wrap else {}))


@as_torch()
def test_a_backward_that_left_parameters_out_is_not_finalized_under_strict(ranks, wrap):
    model = strictly(ranks, wrap, Branches())
    step(model, False)
    yield message(model._check_reducer_finalized).startswith(UNFINISHED)
    served = ranks.wrap(Branches())
    step(served, False)
    assert message(served._check_reducer_finalized) is None


def test_a_rank_that_joined_early_is_not_refused_afterwards(ranks):
    model = ranks.wrap(Branches(), strict=True)
    with model.join():
        for _ in range(1 + ranks.rank):
            step(model)
    step(model)


# ---- static graphs ------------------------------------------------------------------


@on_ranks(declared=["before training", "later"])
def test_a_static_graph_may_change_without_strict(ranks, declared):
    model = ranks.wrap(Branches(), static_graph=declared == "before training")
    for both in (True, False, True):
        step(model, both)
        ranks.assert_same(grads_of(model), "gradients")
        if declared == "later":
            model._set_static_graph()


# ---- ways to set strict -------------------------------------------------------------


def test_the_environment_asks_for_strict_unless_the_argument_is_given(ranks):
    with pytest.MonkeyPatch.context() as patch:
        for word, is_strict in (("1", True), ("0", False), ("", False)):
            patch.setenv("PACELINE_STRICT", word)
            assert ranks.wrap(net())._session.options.strict is is_strict
            assert ranks.wrap(net(), strict=True)._session.options.strict is True
            assert ranks.wrap(net(), strict=False)._session.options.strict is False
        patch.setenv("PACELINE_STRICT", "yes")
        with pytest.raises(ValueError, match="PACELINE_STRICT is 'yes': give 1"):
            ranks.wrap(net())


# ---- torch's messages ---------------------------------------------------------------


NOT_NEEDED = "DistributedDataParallel is not needed when a module doesn't have any"
REFUSED = {
    "no gradient": (lambda r, wrap: wrap(nn.ReLU()), NOT_NEEDED),
    "lazy": (
        lambda r, wrap: wrap(nn.Sequential(nn.LazyLinear(2))),
        "Modules with uninitialized parameters can't be used with `Distr",
    ),
    "types of devices": (
        lambda r, wrap: wrap(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        ),
        "DistributedDataParallel's input module must be on the same type of devices",
    ),
    "half of a delay": (
        lambda r, wrap: wrap(net(), param_to_hook_all_reduce=1),
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at",
    ),
    "batch norm": (
        lambda r, wrap: wrap(nn.SyncBatchNorm(2)),
        "SyncBatchNorm layers only work with GPU modules",
    ),
    "sample rate": (
        lambda r, wrap: wrap(net())._set_ddp_runtime_logging_sample_rate(0),
        "DDP runtime logging sample rate should be equal or greater than 1",
    ),
    "buffers' hook": (
        lambda r, wrap: wrap(net())._register_buffer_comm_hook(None, 3),
        "hook must be callable",
    ),
}


@on_ranks(what=[*REFUSED])
def test_what_both_refuse_is_refused_in_the_words_of_torch(ranks, what):
    call, prefix = REFUSED[what]
    with pytest.raises(Exception, match="") as caught:
        call(ranks, ranks.wrap_by_torch)
    if isinstance(caught.value, AssertionError) and not str(caught.value):
        pytest.skip(f"torch {torch.__version__} asserts it, without words")
    assert str(caught.value).startswith(prefix)
    with pytest.raises(type(caught.value), match=f"^{re.escape(prefix)}"):
        call(ranks, ranks.wrap)


@as_torch()
def test_strict_refuses_the_bf16_hook_in_the_words_of_torch(ranks, wrap):
    skip_with_bf16_hook(ranks)
    model = strictly(ranks, wrap, net())
    with pytest.raises(TypeError, match="BF16") as caught:
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    yield str(caught.value)


# ---- programs that raise at the same call as with torch, or not at all --------------

READY_TWICE = "Expected to mark a variable ready only once."
SENTENCES = [
    READY_TWICE,
    "Expected to have finished reduction in the prior iteration before star",
    "likely  means that not all `forward`",
    "set_static_graph() should be called before training",
]
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
    """Returns two outputs, in a given form."""

    def __init__(self, form="tuple"):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.form = form

    def forward(self, x):
        return FORMS[self.form](self.first(x), self.second(x))


class Checkpointed(nn.Module):
    """Runs its second layer in a checkpoint, and never uses `other`."""

    def __init__(self, use_reentrant, other=None):
        super().__init__()
        self.first, self.second, self.other = nn.Linear(2, 2), nn.Linear(2, 2), other
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)


class HandsOut(nn.Module):
    """Returns one of its layers, for the caller to use."""

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


def steps(model, losses=lambda output: [output.sum()]):
    for _ in range(3):
        output = yield "forward", lambda: model(X)
        for loss in losses(output):
            yield "backward", loss.backward


def one_head(model):
    return steps(model, lambda output: [heads(output)[0].sum()])


def both_heads(model):
    return steps(model, lambda output: [sum(head.sum() for head in heads(output))])


def a_backward_for_each_head(model):
    return steps(model, lambda output: [head.sum() for head in heads(output)])


def uses_what_is_handed_out(model):
    return steps(model, lambda output: [output[1](output[0]).sum()])


def two_forwards_of_other_parts(model):
    for _ in range(3):
        one = yield "forward", lambda: model(X, True)
        two = yield "forward", lambda: model(X, False)
        yield "backward", (one + two).sum().backward


def freezes_a_layer(model):
    yield from steps(model)
    for parameter in model.module.second.parameters():
        parameter.requires_grad_(False)
    yield from steps(model)


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
    """Return the index of the call of a program that raises, and its message."""
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
        f"{kind}, {name}": (steps, Checkpointed, (reentrant,), options)
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


@on_ranks(what=[*PROGRAMS, "heads apart, alone", "frozen, alone", "no_sync, alone"])
def test_a_program_is_refused_where_torch_refuses_it(ranks, what):
    if what.endswith(", alone"):
        ranks.group = ranks.alone()
        what = what.removesuffix(", alone")
    program, kind, given, options = PROGRAMS[what]
    at, words = refusal(program, ranks.wrap(kind(*given), strict=True, **options))
    torchs_at, torchs = refusal(program, ranks.wrap_by_torch(kind(*given), **options))
    assert at == torchs_at, (words, torchs)
    for sentence in SENTENCES:
        assert (sentence in words) == (sentence in torchs), (words, torchs)


OURS = {
    "beside an unused layer": (lambda: Checkpointed(True, nn.Linear(2, 2)), FIND),
    "of one layer, twice": (Twice, {}),
}


@on_ranks(checkpoint=[*OURS])
def test_a_reentrant_checkpoint_of_this_kind_is_refused(ranks, checkpoint):
    make, options = OURS[checkpoint]
    at, words = refusal(steps, ranks.wrap(make(), strict=True, **options))
    assert at == "2, backward"
    assert READY_TWICE in words
    at, words = refusal(steps, ranks.wrap(make(), **options))
    assert at is None, "it is served without strict"


def test_a_mask_of_another_length_is_refused(ranks):
    model = ranks.wrap(Branches(), strict=True)
    for mask in (b"", b"\0" * 5, None):
        with pytest.raises(ValueError, match="give 4 bytes, one a parameter"):
            model._session.reducer.unused = mask
