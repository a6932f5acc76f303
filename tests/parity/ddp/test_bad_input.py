"""What cannot be wrapped is one clear error on every rank; the group stays usable."""

import copy

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import Twin, assert_equal, integer_weights, on_gpus_too, on_ranks
from support.ranks import run_ranks, values
from torch import nn


def net():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


def outcome_of(ranks, module, **options):
    """Wrap; return (kind, words) of what was raised, or None."""
    try:
        ranks.wrap(module, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def assert_still_usable(ranks):
    """Check the user's group, and that a correct wrap works."""
    one = torch.ones(1)
    dist.all_reduce(one, group=ranks.group)
    assert one.item() == ranks.n
    module = nn.Linear(3, 2)
    nn.init.zeros_(module.weight)
    twin = Twin(ranks, module)
    twin.step(lambda model: model(ranks.integers(2, 3)).sum())


# ---- models that differ -------------------------------------------------------------


def renamed(module):
    module._modules["end"] = module._modules.pop("2")


def reordered(module):
    first = module._modules.pop("0")
    module._modules["0"] = first


CHANGES = {
    "name": (renamed, "'2.weight'", "'end.weight'"),
    "order": (reordered, "'0.weight'", "'1.weight'"),
    "shape": (
        lambda m: setattr(m[2], "weight", nn.Parameter(torch.zeros(2, 5))),
        "'2.weight' (torch.float32 of shape (2, 4)",
        "'2.weight' (torch.float32 of shape (2, 5)",
    ),
    "dtype": (lambda m: m[0].double(), "torch.float32", "torch.float64"),
    "requires_grad": (lambda m: m[2].requires_grad_(False), "trainable", "frozen"),
    "more parameters": (
        lambda m: m.append(nn.Linear(2, 2)),
        "'1.running_mean'",
        "'3.weight'",
    ),
    "fewer parameters": (lambda m: m.pop(2), "'2.weight'", "'1.running_mean'"),
    "no buffers": (
        lambda m: m.__setitem__(1, nn.LayerNorm(4)),
        "'1.running_mean'",
        "nothing",
    ),
    "shape of a buffer": (
        lambda m: setattr(m[1], "running_mean", torch.zeros(5)),
        "shape (4,)",
        "shape (5,)",
    ),
    "ignored on one": (
        lambda m: setattr(m, "_ddp_params_and_buffers_to_ignore", ["0.weight"]),
        "'0.weight'",
        "'0.bias'",
    ),
    "strides": (
        lambda m: setattr(m[2], "weight", nn.Parameter(torch.zeros(4, 2).t())),
        "strides (4, 1)",
        "strides (1, 2)",
    ),
}


@on_ranks(3, change=[*CHANGES])
def test_the_first_difference_is_named_on_every_rank(ranks, change):
    alter, here, there = CHANGES[change]
    module = net()
    if ranks.rank == ranks.n - 1:
        alter(module)
    rows = ranks.all(outcome_of(ranks, module))
    assert rows == [rows[0]] * ranks.n
    kind, words = rows[0]
    assert kind == "MismatchError"
    assert words.startswith("DDP expects same model across all ranks, but rank 0 has ")
    first, second = words.split(f" where rank {ranks.n - 1} has ")
    assert here in first, words
    assert there in second, words
    said = f"params[4] of rank {ranks.n - 1} appears not to match sizes of the same"
    assert (said in second) is (change in ("shape", "strides")), words
    assert_still_usable(ranks)


@on_ranks(3)
def test_the_odd_one_is_named_where_it_is_rank_0(ranks):
    module = net()
    if ranks.rank == 0:
        module.append(nn.Linear(2, 2))
    rows = ranks.all(outcome_of(ranks, module))
    assert rows == [rows[0]] * 3
    assert "rank 0 has parameter '3.weight'" in rows[0][1]
    assert "rank 1 has buffer '1.running_mean'" in rows[0][1]
    assert_still_usable(ranks)


def test_models_are_compared_without_the_first_synchronisation_too(ranks):
    """Gradients would be cross-wired otherwise."""
    module = net()
    if ranks.rank == 1:
        renamed(module)
    rows = ranks.all(outcome_of(ranks, module, init_sync=False))
    assert rows[0] == rows[1]
    assert rows[0][0] == "MismatchError"
    assert_still_usable(ranks)


# ---- options that differ ------------------------------------------------------------

OPTIONS = {
    "bucket_cap_mb": (1, 2),
    "broadcast_buffers": (True, False),
    "forward_sync_buffers": (True, False),
    "init_sync": (True, False),
    "accumulate_in_fp32": (False, True),
}


@on_gpus_too()
@on_ranks(3, name=[*OPTIONS])
def test_an_option_that_differs_is_named_on_every_rank(ranks, name):
    value = OPTIONS[name][ranks.rank == ranks.n - 1]
    rows = ranks.all(outcome_of(ranks, net(), **{name: value}))
    assert rows == [rows[0]] * ranks.n
    kind, words = rows[0]
    assert kind == "MismatchError"
    word = "broadcast_buffers" if name == "forward_sync_buffers" else name
    assert word in words
    assert f"rank {ranks.n - 1}" in words
    assert_still_usable(ranks)


def test_a_bucket_size_of_the_same_bytes_is_the_same(ranks):
    model = ranks.wrap(net(), bucket_cap_mb=[1, 1.0][ranks.rank])
    model(ranks.integers(2, 3)).sum().backward()
    ranks.assert_same([p.grad for p in model.parameters()], "gradients")


# ---- one rank's model alone ---------------------------------------------------------

ON_ONE = {
    "nothing to train": (
        lambda m: m.requires_grad_(False),
        "RuntimeError",
        "doesn't have any parameter that requires a gradient",
    ),
    "lazy": (lambda m: m.append(nn.LazyLinear(2)), "RuntimeError", "'3.weight'"),
    "on another device": (
        lambda m: m.append(nn.Linear(2, 2, device="meta")),
        "ValueError",
        "['cpu', 'meta']",
    ),
    "all on another device": (lambda m: m.to("meta"), "NotImplementedError", "meta"),
    "synchronised batch norm": (
        lambda m: m.append(nn.SyncBatchNorm(2)),
        "ValueError",
        "SyncBatchNorm layers only work with GPU modules",
    ),
}


@on_ranks(3, what=[*ON_ONE])
def test_what_one_rank_cannot_wrap_is_an_error_on_every_rank(ranks, what):
    alter, kind, words = ON_ONE[what]
    module = net()
    if ranks.rank == ranks.n - 1:
        alter(module)
    rows = ranks.all(outcome_of(ranks, module))
    assert [row and row[0] for row in rows] == [kind] * ranks.n
    assert all(words in row[1] for row in rows), rows
    for row in rows[:-1]:
        assert row[1].startswith(f"rank {ranks.n - 1}: "), row
    assert_still_usable(ranks)


ALONE = {
    "devices": ({"device_ids": [0]}, "ValueError", "device_ids"),
    "bad bucket size": ({"bucket_cap_mb": -1}, "ValueError", "bucket_cap_mb"),
    "unsupported": ({"mixed_precision": "x"}, "NotImplementedError", "mixed_precision"),
    "no module": (None, "TypeError", "module"),
}


@on_ranks(what=[*ALONE])
def test_a_bad_argument_of_one_rank_is_an_error_on_every_rank(ranks, what):
    options, kind, words = ALONE[what]
    if ranks.rank == 0:
        row = outcome_of(ranks, net())
    elif options is None:
        row = outcome_of(ranks, [net()])
    else:
        row = outcome_of(ranks, net(), **options)
    rows = ranks.all(row)
    assert [row and row[0] for row in rows] == [kind] * 2, rows
    assert all(words in row[1] for row in rows), rows
    assert_still_usable(ranks)


# ---- process groups -----------------------------------------------------------------


def wrap_without_a_group(rank, n_ranks):
    with pytest.raises(ValueError) as mine:
        paceline.DistributedDataParallel(nn.Linear(1, 1))
    with pytest.raises(ValueError) as theirs:
        nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    return str(mine.value), str(theirs.value)


def test_no_process_group_is_an_error_in_the_words_of_torch():
    ((mine, theirs),) = values(run_ranks(wrap_without_a_group, 1, rendezvous="none"))
    assert mine == theirs
    assert "has not been initialized" in mine


@on_ranks(3)
def test_a_rank_outside_the_group_is_refused(ranks):
    group = dist.new_group([0, 1])
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    if ranks.rank == 2:
        with pytest.raises((ValueError, RuntimeError, TypeError), match="group"):
            paceline.DistributedDataParallel(model, process_group=group)
    else:
        wrapper = paceline.DistributedDataParallel(model, process_group=group)
        wrapper(torch.full((1, 3), float(ranks.rank))).sum().backward()
        assert model.weight.grad.unique().tolist() == [0.5]
    assert_still_usable(ranks)


# ---- models that change after wrapping ----------------------------------------------

LATER = {
    "buffer": lambda m: setattr(m[1], "running_mean", torch.full((4,), 2.0)),
    "buffer removed": lambda m: m[1].register_buffer("running_mean", None),
}


@on_ranks(what=[*LATER])
def test_a_model_that_all_ranks_change_after_wrapping_is_trained_on(ranks, what):
    module = integer_weights(net().eval())
    model = ranks.wrap(module)
    model(ranks.integers(2, 3)).sum().backward()
    model.zero_grad()
    LATER[what](module)
    if what == "buffer removed":
        module[1].track_running_stats = False  # it normalises by its batches now
        module[1].register_buffer("running_var", None)
    plain = copy.deepcopy(module)
    x = ranks.integers(2, 3, key=1)
    for each in (model, plain):
        each(x).sum().backward()
    for mine, alone in zip(module.parameters(), plain.parameters(), strict=True):
        parts = ranks.all(alone.grad)
        assert_equal(mine.grad, sum(parts) / ranks.n, what)
    assert_still_usable(ranks)


def test_a_parameter_of_another_size_is_an_error_on_every_rank(ranks):
    module = integer_weights(net().eval())
    model = ranks.wrap(module)
    module[0].weight.data = torch.ones(4, 5)
    with pytest.raises(RuntimeError, match="wrap the model again"):
        model(ranks.integers(2, 5)).sum().backward()
    assert_still_usable(ranks)
