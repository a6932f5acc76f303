"""If a model cannot be wrapped, all ranks raise one error; the group stays usable."""

from functools import partial

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import Twin, apart, integer_weights, on_gpus_too, on_ranks
from support.groups import Over, wrap_over
from support.ranks import run_ranks, values
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision


def net():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


def by_store(ranks):
    """Wrap over a group that takes no CPU tensors: see test_store_meeting.py."""
    return partial(wrap_over, dist.new_group(backend="cuda:gloo"))


def on_hosts(ranks):
    def wrap(module, **options):
        with apart():
            return ranks.ours(module, process_group=ranks.group, **options)

    return wrap


WORLDS = {
    "shared memory": lambda ranks: ranks.wrap,
    "no shared memory": on_hosts,
    "a group in Python": lambda ranks: partial(wrap_over, Over(ranks.group)),
    "a store": by_store,
}


def refusals(ranks, module, **options):
    """Wrap on every rank; return the type and the message of each rank's error."""
    outcome = None
    try:
        ranks.wrap(module, **options)
    except Exception as error:
        outcome = type(error).__name__, str(error)
    rows = ranks.all(outcome)
    assert None not in rows, rows
    assert_still_usable(ranks)
    return rows


def mismatch(ranks, module, **options):
    """Return the message of a MismatchError, which is the same on every rank."""
    rows = refusals(ranks, module, **options)
    assert rows == [rows[0]] * ranks.n
    kind, words = rows[0]
    assert kind == "MismatchError"
    return words


def assert_still_usable(ranks):
    """Check that the user's group works, and that a correct model can be wrapped."""
    one = torch.ones(1)
    dist.all_reduce(one, group=ranks.group)
    assert one.item() == ranks.n
    module = nn.Linear(3, 2)
    nn.init.zeros_(module.weight)
    twin = Twin(ranks, module)
    twin.step(lambda model: ranks.n * model(ranks.integers(2, 3)).sum())


# ---- models that differ -------------------------------------------------------------


# unit/ddp/test_model.py has all kinds of differences.
CHANGES = {
    "shape": (
        lambda m: setattr(m[2], "weight", nn.Parameter(torch.zeros(2, 5))),
        "'2.weight' (torch.float32 of shape (2, 4)",
        "'2.weight' (torch.float32 of shape (2, 5)",
    ),
    "more": (lambda m: m.append(nn.Linear(2, 2)), "'1.running_mean'", "'3.weight'"),
    "ignored on one": (
        lambda m: setattr(m, "_ddp_params_and_buffers_to_ignore", ["0.weight"]),
        "'0.weight'",
        "'0.bias'",
    ),
    # Without the first synchronisation: else ranks would average other parameters.
    "renamed": (
        lambda m: m._modules.update(end=m._modules.pop("2")),
        "'2.weight'",
        "'end.weight'",
    ),
}


@on_ranks(3, change=[*CHANGES], odd=[0, 2], over=[*WORLDS])
def test_the_first_difference_is_named_on_every_rank(ranks, change, odd, over):
    ranks.wrap = WORLDS[over](ranks)
    alter, *found = CHANGES[change]
    module = net()
    if ranks.rank == odd:
        alter(module)
    words = mismatch(ranks, module, init_sync=change != "renamed")
    assert words.startswith("DDP expects same model across all ranks, but rank 0 has ")
    first, second = words.split(f" where rank {odd or 1} has ")
    here, there = found if odd else reversed(found)
    assert here in first, words
    assert there in second, words
    said = f"params[4] of rank {odd or 1} appears not to match sizes of the same"
    assert (said in second) is (change == "shape"), words


# ---- options that differ ------------------------------------------------------------

OPTIONS = {
    "bucket_cap_mb": (1, 2),
    "broadcast_buffers": (True, False),
    "forward_sync_buffers": (True, False),
    "init_sync": (True, False),
    "strict": (True, False),
    "mixed_precision": (_MixedPrecision(torch.float16), _MixedPrecision()),
}


@on_gpus_too()
@on_ranks(3, name=[*OPTIONS])
def test_an_option_that_differs_is_named_on_every_rank(ranks, name):
    last = ranks.n - 1
    words = mismatch(ranks, net(), **{name: OPTIONS[name][ranks.rank == last]})
    assert name.replace("forward_sync", "broadcast") in words
    assert f"rank {last}" in words


def test_a_bucket_size_of_the_same_bytes_is_the_same(ranks):
    model = ranks.wrap(net(), bucket_cap_mb=[1, 1.0][ranks.rank])
    model(ranks.integers(2, 3)).sum().backward()
    ranks.assert_same([p.grad for p in model.parameters()], "gradients")


# ---- one rank's model alone ---------------------------------------------------------

# The model or options of one rank; the error of all ranks and its message.  For other
# messages see test_strict.py and unit/ddp.
ON_ONE = {
    "nothing to train": (
        lambda m: m.requires_grad_(False),
        "RuntimeError",
        "doesn't have any parameter that requires a gradient",
    ),
    "all on another device": (lambda m: m.to("meta"), "NotImplementedError", "meta"),
    "no module": (lambda m: [m], "TypeError", "module"),
    "bad bucket size": ({"bucket_cap_mb": -1}, "ValueError", "bucket_cap_mb"),
    "sums in float32": (
        {"accumulate_in_fp32": True},
        "NotImplementedError",
        "accumulate_in_fp32 is gone: give mixed_precision=torch.nn.parallel."
        "distributed._MixedPrecision(reduce_dtype=torch.float32)",
    ),
}


@on_ranks(3, what=[*ON_ONE], over=[*WORLDS])
def test_what_one_rank_cannot_wrap_is_an_error_on_every_rank(ranks, what, over):
    ranks.wrap = WORLDS[over](ranks)
    change, kind, words = ON_ONE[what]
    module, options = net(), {}
    if ranks.rank == 2 and isinstance(change, dict):
        options = change
    elif ranks.rank == 2:
        module = change(module)
    rows = refusals(ranks, module, **options)
    assert [row[0] for row in rows] == [kind] * 3
    assert all(words in row[1] for row in rows), rows
    for row in rows[:-1]:
        assert row[1].startswith("rank 2: "), row


# ---- process groups -----------------------------------------------------------------


def wrap_without_a_group(rank, n_ranks):
    with pytest.raises(ValueError) as mine:
        paceline.DistributedDataParallel(nn.Linear(1, 1))
    with pytest.raises(ValueError) as theirs:
        nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    return str(mine.value), str(theirs.value)


def test_no_process_group_is_an_error_in_the_words_of_torch():
    ((mine, theirs),) = values(run_ranks(wrap_without_a_group, 1, rendezvous="none"))
    assert mine.startswith(f"{theirs} paceline.init() does it, ")
    assert "has not been initialized" in mine


# ---- models that change after wrapping ----------------------------------------------


def test_a_parameter_of_another_size_is_an_error_on_every_rank(ranks):
    module = integer_weights(net().eval())
    model = ranks.wrap(module)
    module[0].weight.data = torch.ones(4, 5)
    with pytest.raises(RuntimeError, match="wrap the model again"):
        model(ranks.integers(2, 5)).sum().backward()
    assert_still_usable(ranks)
