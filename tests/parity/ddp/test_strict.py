"""What torch refuses is served, and refused under strict: in the words of torch."""

import re

import pytest
import torch
from cases import Branches, grads_of, net, on_ranks, skip_with_bf16_hook
from torch import nn
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
    """Return what a call raises, in words; None where it does not."""
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)
    return None


def assert_one_says(ranks, words, prefix):
    """Check that every rank raised; one that heard of another's failure names it."""
    said = ranks.all(words)
    assert None not in said
    assert any(one.startswith(prefix) for one in said), said


# ---- unused parameters --------------------------------------------------------------


@on_ranks(1, 2)
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


@on_ranks(1, 2)
def test_a_backward_that_left_parameters_out_is_not_finalized_under_strict(ranks):
    mine = ranks.wrap(Branches(), strict=True)
    theirs = ranks.wrap_by_torch(Branches())
    for model in (mine, theirs):
        step(model, False)
        assert message(model._check_reducer_finalized).startswith(UNFINISHED)
    served = ranks.wrap(Branches())
    step(served, False)
    assert message(served._check_reducer_finalized) is None


@on_ranks(1, 2, options=["{}", "{'strict': False}", "find"])
def test_unused_parameters_are_served_without_strict_and_with_the_flag(ranks, options):
    given = {"strict": True, "find_unused_parameters": True}
    model = ranks.wrap(Branches(), **(given if options == "find" else eval(options)))
    for both in (True, False, False, True):
        step(model, both)
        ranks.assert_same(grads_of(model), "gradients")


@on_ranks(2)
def test_steps_that_use_all_parameters_go_on_under_strict(ranks):
    model, plain = ranks.wrap(net(), strict=True), ranks.wrap_by_torch(net())
    for k in range(3):
        for one in (model, plain):
            one.zero_grad()
            with one.no_sync():
                one(ranks.integers(3, 6, key=(k, 0))).sum().backward()
            one(ranks.integers(3, 6, key=(k, 1))).sum().backward()
        for a, b in zip(grads_of(model), grads_of(plain), strict=True):
            assert torch.equal(a, b)


@on_ranks(2)
def test_a_rank_that_joined_early_is_not_refused_afterwards(ranks):
    model = ranks.wrap(Branches(), strict=True)
    with model.join():
        for _ in range(1 + ranks.rank):
            step(model)
    step(model)


# ---- ready twice --------------------------------------------------------------------


@on_ranks(1, 2)
def test_a_second_gradient_in_a_backward_is_refused(ranks):
    words = message(step, ranks.wrap(Twice(), strict=True))
    assert_one_says(ranks, words, "Expected to mark a variable ready only once.")


@on_ranks(1, 2, options=["{}", "{'strict': True, 'static_graph': True}"])
def test_a_second_gradient_is_served_without_strict_and_in_a_static_graph(
    ranks, options
):
    model = ranks.wrap(Twice(), **eval(options))
    for _ in range(2):
        model.zero_grad()
        step(model)
        ranks.assert_same(grads_of(model), "gradients")


# ---- static graphs ------------------------------------------------------------------


@on_ranks(1, 2, first=[True, False])
def test_a_static_graph_that_changes_is_refused_as_in_torch(ranks, first):
    mine = ranks.wrap(Branches(), static_graph=True, strict=True)
    theirs = ranks.wrap_by_torch(Branches(), static_graph=True)
    for model in (mine, theirs):
        step(model, first)
        step(model, first)
        words = message(step, model, not first)
        if first:  # noticed when the next one begins
            assert words is None
            words = message(model, X)
            assert words.startswith(UNFINISHED)
            assert "your training graph has changed in this iteration" in words
        else:
            assert words.startswith("Your training graph has changed in this iter")


@on_ranks(1, 2)
def test_a_static_graph_may_change_without_strict(ranks):
    model = ranks.wrap(Branches(), static_graph=True)
    for both in (True, False, True):
        step(model, both)
        ranks.assert_same(grads_of(model), "gradients")


@on_ranks(1, 2)
def test_a_graph_is_declared_static_before_training_under_strict(ranks):
    for model in (ranks.wrap(Branches(), strict=True), ranks.wrap_by_torch(Branches())):
        step(model)
        words = message(model._set_static_graph)
        assert words.startswith("set_static_graph() should be called before training")
    served = ranks.wrap(Branches())
    step(served)
    served._set_static_graph()
    step(served, False)


# ---- where strict comes from --------------------------------------------------------


@on_ranks(1)
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


@on_ranks(2)
def test_ranks_that_differ_in_strictness_are_told(ranks):
    with pytest.raises(RuntimeError, match="strict differs"):
        ranks.wrap(net(), strict=bool(ranks.rank))


# ---- the words of torch -------------------------------------------------------------


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(2)


def unpickled(ranks, wrap):
    wrap(net()).__getstate__()


def mismatched(ranks, wrap):
    wrap(net() if ranks.rank else nn.Linear(2, 2))


def hooked(*arguments):
    def call(ranks, wrap):
        model = wrap(net())
        for argument in arguments:
            model.register_comm_hook(None, argument)

    return call


def bad_bucket(state, bucket: int):
    """Is annotated as no hook is."""


def bad_result(state, bucket) -> int:
    """Is annotated as no hook is."""


def good(state, bucket):
    """Is never called."""


def mesh_and_group(ranks, wrap):
    wrap(net(), device_mesh=object())


NOT_NEEDED = "DistributedDataParallel is not needed when a module doesn't have any"
REFUSED = {
    "no gradient": (lambda r, wrap: wrap(nn.ReLU()), NOT_NEEDED),
    "two devices": (
        lambda r, wrap: wrap(net(), device_ids=[0, 1]),
        "device_ids can only be None or contain a single element.",
    ),
    "a device": (
        lambda r, wrap: wrap(net(), device_ids=[0]),
        "DistributedDataParallel device_ids and output_device arguments only work with",
    ),
    "lazy": (
        lambda r, wrap: wrap(Lazy()),
        "Modules with uninitialized parameters can't be used with `Distr",
    ),
    "types of devices": (
        lambda r, wrap: wrap(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        ),
        "DistributedDataParallel's input module must be on the same type of devices",
    ),
    "mesh and group": (
        mesh_and_group,
        "Cannot specify both process_group and device_mesh arguments.",
    ),
    "half of a delay": (
        lambda r, wrap: wrap(net(), param_to_hook_all_reduce=1),
        "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at",
    ),
    "batch norm": (
        lambda r, wrap: wrap(nn.SyncBatchNorm(2)),
        "SyncBatchNorm layers only work with GPU modules",
    ),
    "pickle": (unpickled, "DDP Pickling/Unpickling are only supported when using DDP"),
    "not callable": (hooked(3), "Communication hook must be callable."),
    "bucket": (
        hooked(bad_bucket),
        "Communication hook: bucket annotation should be dist.GradBucket",
    ),
    "result": (
        hooked(bad_result),
        "Communication hook: return annotation should be torch.futures.Future",
    ),
    "two hooks": (
        hooked(good, good),
        "register_comm_hook or register_builtin_comm_hook can only be called once.",
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


@on_ranks(1, 2, what=[*REFUSED])
def test_what_both_refuse_is_refused_in_the_words_of_torch(ranks, what):
    call, prefix = REFUSED[what]
    with pytest.raises(Exception, match="") as caught:
        call(ranks, ranks.wrap_by_torch)
    if isinstance(caught.value, AssertionError) and not str(caught.value):
        pytest.skip(f"torch {torch.__version__} asserts it, without words")
    assert str(caught.value).startswith(prefix)
    with pytest.raises(type(caught.value), match=f"^{re.escape(prefix)}"):
        call(ranks, ranks.wrap)


@on_ranks(2)
def test_models_that_differ_are_refused_in_the_words_of_torch_on_every_rank(ranks):
    with pytest.raises(RuntimeError, match=r"^DDP expects same model across all ranks"):
        mismatched(ranks, ranks.wrap)


@on_ranks(2, what=["hook's result", "strict bf16"])
def test_what_a_hook_does_wrong_is_refused_in_the_words_of_torch(ranks, what):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if what == "strict bf16":
        skip_with_bf16_hook(ranks)
        model = ranks.wrap(net(), strict=True)
        with pytest.raises(TypeError, match=r"^BF16 all reduce communication hook req"):
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        return
    model = ranks.wrap(net())
    model.register_comm_hook(None, good)
    words = message(step_of, model)
    assert_one_says(ranks, words, "DDP communication hook's callback must")


def step_of(model):
    model(torch.ones(3, 6)).sum().backward()
