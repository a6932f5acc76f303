"""Save, load and change the state of a model while it is wrapped.

Synchronised state may change if it does on all ranks; other state on any rank.
"""

import copy
import os
import tempfile
import time

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import (
    PEER_SECONDS,
    Branches,
    Twin,
    as_torch,
    assert_equal,
    grads_of,
    integer_weights,
    on_gpus_too,
    on_ranks,
    skip_without_argument,
    step_of,
)
from torch import nn
from torch.ao import quantization
from torch.nn.utils import prune


def net():
    module = nn.Sequential(
        nn.Linear(4, 120), nn.BatchNorm1d(120), nn.ReLU(), nn.Linear(120, 2)
    )
    return integer_weights(module)


def train(ranks, model, steps=2):
    model.train()
    for step in range(steps):
        x = torch.randn(6, 4, generator=ranks.generator(step)) + ranks.rank
        model(x).sum().backward()


def shared_folder(ranks):
    return ranks.all(tempfile.mkdtemp() if ranks.rank == 0 else None)[0]


# ---- checkpoints --------------------------------------------------------------------


@on_ranks(first=[0, 1])
def test_the_first_rank_of_a_group_alone_writes_a_checkpoint(ranks, first):
    folder, groups = shared_folder(ranks), [None, dist.new_group([1])]
    model, other = ranks.wrap(integer_weights(net(), 3, 5)), net()
    if ranks.rank >= first:
        paceline.save(model, f"{folder}/{ranks.rank}.pt", process_group=groups[first])
    dist.barrier(group=ranks.group)
    assert os.listdir(folder) == [f"{first}.pt"]
    paceline.load(f"{folder}/{first}.pt", other)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_equal(mine.data, theirs.data, "a parameter")


LOADS = {
    "the wrapper": lambda model, state, _: model.load_state_dict(
        {"module." + key: value for key, value in state.items()}
    ),
    "the wrapper, bare keys": lambda model, state, _: model.load_state_dict(state),
    "the module": lambda model, state, _: model.module.load_state_dict(state),
    "a file": lambda model, state, path: paceline.load(path, model),
    "by hand": lambda model, state, _: [
        tensor.copy_(state[name]) for name, tensor in model.module.state_dict().items()
    ],
    "new buffers": lambda model, state, _: [
        model.module.load_state_dict(state),
        setattr(model.module[1], "running_mean", state["1.running_mean"].clone()),
        setattr(model.module[1], "running_var", state["1.running_var"].clone()),
    ],
}


@on_gpus_too()
@on_ranks(into=[*LOADS])
def test_what_was_loaded_is_what_is_evaluated(ranks, into):
    """The buffers that rank 0 sent with the previous backward must not replace it."""
    kept = net()
    with torch.no_grad():
        kept(torch.arange(24.0).reshape(6, 4))  # this rank's own statistics
    state = copy.deepcopy(kept.state_dict())
    folder = shared_folder(ranks)
    paceline.save(kept, f"{folder}/model.pt", process_group=ranks.group)
    dist.barrier(group=ranks.group)
    model = ranks.wrap(net())
    train(ranks, model)
    LOADS[into](model, state, f"{folder}/model.pt")
    x = torch.arange(8.0).reshape(2, 4)
    with torch.no_grad():
        assert_equal(model.eval()(x), kept.eval()(x), f"rank {ranks.rank}'s output")
    for name, tensor in model.state_dict().items():
        assert_equal(tensor, state[name.removeprefix("module.")], name)


class SharesMemory(nn.Module):
    """Counts in two buffers that are views of one tensor."""

    def __init__(self, amount):
        super().__init__()
        self.linear, self.amount = integer_weights(nn.Linear(4, 2)), amount
        both = torch.zeros(4)
        self.register_buffer("first", both[:2])
        self.register_buffer("second", both[2:])

    def forward(self, x):
        if self.training:
            self.first += self.amount
            self.second += 2 * self.amount
        return self.linear(x)


@on_gpus_too()
@on_ranks()
def test_buffers_that_share_memory_are_all_taken_over(ranks):
    model = ranks.wrap(SharesMemory(ranks.rank + 1))
    train(ranks, model, 3)
    with torch.no_grad():
        model.eval()(torch.ones(1, 4))
    ranks.assert_same([*model.module.buffers()], "rank 0's counts")


def test_statistics_that_were_reset_start_anew_on_every_rank(ranks):
    model = ranks.wrap(net())
    train(ranks, model)
    model.module[1].reset_running_stats()
    assert model.state_dict()["module.1.num_batches_tracked"].item() == 0
    train(ranks, model, 1)
    state = model.state_dict()
    assert state["module.1.num_batches_tracked"].item() == 1
    model.module[1].momentum = 0.0  # the next forward only copies rank 0's
    train(ranks, model, 1)
    ranks.assert_same(model.state_dict().values(), "the state")


# ---- models that change -------------------------------------------------------------


CHANGES = {
    "frozen": lambda net: net[0].requires_grad_(False),
    "frozen and unfrozen": lambda net: net[0].requires_grad_(
        not net[0].weight.requires_grad
    ),
    "float64": lambda net: net.double(),
    "bfloat16": lambda net: net.bfloat16(),
    "another parameter": lambda net: setattr(
        net[0], "weight", nn.Parameter(net[0].weight.detach() * 2)
    ),
    "another layer": lambda net: net.__setitem__(1, layer(130, 5)),
    "a layer inserted": lambda net: net.insert(1, layer(130, 130)),
    "two layers appended": lambda net: net.extend([layer(3, 130), layer(130, 3)]),
    "an adapter of a frozen layer": lambda net: net.__setitem__(
        0, nn.Sequential(net[0].requires_grad_(False), layer(130, 130))
    ),
    "no bias": lambda net: setattr(net[0], "bias", None),
    "a layer shared": lambda net: setattr(net[1], "twin", net[0]),
    "loaded": lambda net: net.load_state_dict(
        {name: tensor + 1 for name, tensor in net.state_dict().items()}
    ),
    "strides": lambda net: net[0].weight.data.set_(net[0].weight.t().contiguous().t()),
    "shared memory": lambda net: net.share_memory(),
    "a buffer added and removed": lambda net: (
        delattr(net, "later")
        if hasattr(net, "later")
        else net.register_buffer("later", torch.ones(3))
    ),
}


def layer(*sizes):
    return integer_weights(nn.Linear(*sizes), -1, 2)


@on_gpus_too()
@on_ranks(change=[*CHANGES])
def test_a_model_may_change_between_steps(ranks, change):
    twin = Twin(ranks, nn.Sequential(layer(4, 130), layer(130, 3)))
    for step in range(5):
        twin.zero(set_to_none=step != 2)
        x = ranks.integers(3, 4, key=step)
        twin.step(lambda model, x=x: model(x.to(next(model.parameters()).dtype)).sum())
        if step in (1, 3):
            for one in (twin.plain, twin.ours.module):
                torch.manual_seed(step)
                CHANGES[change](one)
            twin.check()


@as_torch()
def test_what_was_accumulated_before_a_change_and_is_unused_is_averaged(ranks, wrap):
    module = integer_weights(Branches())
    module.register_buffer("seen", torch.zeros(2))  # else no buffer would be sent
    model = wrap(module, find_unused_parameters=True)
    with model.no_sync():
        model(ranks.integers(3, 2), both=ranks.rank == 0).sum().backward()
    module.register_buffer("late", torch.zeros(2))
    model(ranks.integers(3, 2, key=1), both=False).sum().backward()
    yield grads_of(model)


def test_what_was_accumulated_before_a_change_and_is_frozen_is_refused(ranks):
    model = ranks.wrap(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    with model.no_sync():
        model(ranks.integers(4, 2)).sum().backward()
    model.module[0].requires_grad_(False)
    model.module.append(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight was frozen, and its"):
        model(ranks.integers(4, 2))
    model.module[0].zero_grad()
    model(ranks.integers(4, 2)).sum().backward()
    assert model.module[2].weight.grad is not None


def test_a_parameter_that_one_rank_freezes_is_unused_there(ranks):
    model = ranks.wrap(layer(4, 3))
    for key in range(3):
        model.zero_grad()
        model(ranks.integers(2, 4, key=key)).sum().backward()
        ranks.assert_same([model.module.weight.grad], "gradients")
        model.module.bias.requires_grad_(ranks.rank == 0)


def test_a_change_leaves_whether_to_synchronise_as_it_was(ranks):
    model = ranks.wrap(nn.Sequential(nn.Linear(4, 130), nn.Linear(130, 3)))
    train(ranks, model)
    with model.no_sync():
        model.module[0].requires_grad_(False)
        train(ranks, model)
        assert model.require_backward_grad_sync is False
    assert model.require_backward_grad_sync is True


# ---- sent and local state ------------------------------------------------------------


def module():
    return integer_weights(
        nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
    )


def world_of(model):
    """Return the world of our wrapper: it differs if the wrapper made a new one."""
    return getattr(model, "_session", None) and model._session.world


class Metric(nn.Module):
    """Counts in an attribute that is no buffer."""

    def forward(self, x):
        return x


def frozen():
    return nn.Linear(2, 2).requires_grad_(False)


ADDED = {
    "a metric": lambda net: net[0].add_module("metric", Metric()),
    "a frozen teacher": lambda net: net[0].add_module("teacher", frozen()),
    "a cached mask": lambda net: net.register_buffer("mask", torch.ones(3)),
    "an empty cache": lambda net: net.register_buffer("cache", None),
}


@as_torch(what=[*ADDED], whose=[0, 1])
def test_what_does_not_travel_may_be_added_on_one_rank(ranks, wrap, what, whose):
    model = wrap(module(), broadcast_buffers=False)
    world = world_of(model)
    for step in range(4):
        if step == 2 and ranks.rank == whose:
            ADDED[what](model.module)
        yield step_of(model, ranks.integers(4, 6, key=step))
    assert world_of(model) is world


def rename(net):
    del net.first
    net.register_buffer("other", torch.zeros(2))


def prepare_for_quantisation(net):
    net.qconfig = quantization.get_default_qat_qconfig()
    quantization.prepare_qat(net, inplace=True)


def train_more(net):
    net[0].requires_grad_(True)  # torch's class would not average these
    net.register_buffer("mask", torch.zeros(3))


LATER = {
    "a buffer": lambda net: net.register_buffer("mask", torch.zeros(3)),
    "one that was None": lambda net: setattr(net, "empty", torch.zeros(2)),
    "one in the place of another": rename,
    "one of two names": lambda net: setattr(net, "second", torch.zeros(2)),
    "another size": lambda net: setattr(net, "first", torch.zeros(5)),
    "a spectral norm": lambda net: nn.utils.spectral_norm(net[2]),
    "a pruning mask": lambda net: prune.l1_unstructured(net[2], "weight", 0.5),
    "quantisation": prepare_for_quantisation,
    "more to train": train_more,
}


@as_torch(what=[*LATER], has_buffers=[True, False])
def test_buffers_registered_later_come_from_rank_0_if_there_were_any(
    ranks, wrap, what, has_buffers
):
    net = module()
    net.register_buffer("empty", None)
    net[0].requires_grad_(what != "more to train")
    if has_buffers:
        net.register_buffer("first", torch.zeros(2))
        net.register_buffer("second", net.first)
    else:
        net[1] = nn.Identity()
    model = wrap(net)
    for step in range(4):
        if step == 1 and (has_buffers or what not in list(LATER)[2:5]):
            torch.manual_seed(ranks.rank)
            LATER[what](net)
            own = [*net.buffers()]
            if what != "more to train":  # that copies rank 0's parameters
                own += net.parameters()
            with torch.no_grad():
                for tensor in own:
                    tensor += ranks.rank
        step_of(model, ranks.integers(4, 6, key=step))
        yield [*net.buffers(), *grads_of(net[2])]


class Rotary(nn.Module):
    """Its forward grows a table to the longest input."""

    def __init__(self, dtype):
        super().__init__()
        self.line = integer_weights(nn.Linear(6, 2))
        self.dtype = dtype
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        if len(x) > len(self.table):
            self.table = torch.arange(len(x)).to(self.dtype)
        return self.line(x) + self.table[: len(x), None]


@as_torch(dtype=[torch.float32, torch.float64])
def test_a_buffer_that_all_ranks_let_grow_is_trained_on(ranks, wrap, dtype):
    model = wrap(Rotary(dtype))
    for step, n_rows in enumerate((2, 5, 5, 9, 9, 3)):
        model.module.seen.fill_(ranks.rank + step)
        yield step_of(model, ranks.integers(n_rows, 6, key=step))
        if wrap == ranks.wrap:
            assert_equal(model.module.seen, torch.full((2,), 0.0 + step), "rank 0's")
        ranks.assert_same([model.module.table], "the table")


# ---- changes on one rank ------------------------------------------------------------

ALONE = {
    "a parameter is added": lambda net: net.add_module("more", nn.Linear(2, 2)),
    "a parameter is converted": lambda net: net[2].double(),
    "a parameter is replaced": lambda net: net.__setitem__(2, nn.Linear(40, 2)),
    "a buffer is gone": lambda net: delattr(net, "scale"),
    "a buffer is added": lambda net: net.register_buffer("more", torch.ones(2)),
    "a buffer has another size": lambda net: setattr(net, "scale", torch.ones(3)),
}


@on_gpus_too(what=["a parameter is replaced"], whose=[1])
@on_ranks(what=[*ALONE], whose=[0, 1])
def test_a_rank_that_alone_changes_what_travels_is_an_error_on_all(ranks, what, whose):
    net = module()
    net.register_buffer("scale", torch.ones(2))
    model = ranks.wrap(net)
    for _ in range(2):
        model(torch.ones(3, 6)).sum().backward()
    if ranks.rank == whose:
        ALONE[what](model.module)
    began = time.monotonic()
    with pytest.raises(paceline.MismatchError, match="changed") as caught:
        model(torch.ones(3, 6)).sum().backward()
    assert time.monotonic() - began < PEER_SECONDS / 2
    assert f"rank {whose}" in str(caught.value) or ranks.rank == whose


# ---- from the start ------------------------------------------------------------------


def hold(net, name, tensor):
    if isinstance(tensor, nn.Parameter):
        net.register_parameter(name, tensor)
    else:
        net.register_buffer(name, tensor)


OF_A_RANK = {
    "a longer buffer": lambda rank: torch.ones(3 + rank),
    "a wider buffer": lambda rank: torch.ones(
        3, dtype=[torch.float32, torch.int64][rank]
    ),
    "no buffer": lambda rank: torch.ones(3) if rank else None,
    "a frozen parameter": lambda rank: nn.Parameter(torch.ones(2 + rank), False),
}


@as_torch(what=[*OF_A_RANK])
def test_a_ranks_own_is_accepted_where_it_does_not_travel_as_in_torch(
    ranks, wrap, what
):
    net, own = module(), OF_A_RANK[what](ranks.rank)
    hold(net, "own", own)
    options = {"broadcast_buffers": False}
    if "parameter" in what:
        skip_without_argument("init_sync")
        options["init_sync"] = False
    model = wrap(net, **options)
    for key in range(3):
        yield step_of(model, ranks.integers(4, 6, key=key))
    assert own is None or torch.equal(net.own, OF_A_RANK[what](ranks.rank))


@on_ranks(what=[*OF_A_RANK])
def test_a_ranks_own_is_refused_where_it_travels(ranks, what):
    net = module()
    hold(net, "own", OF_A_RANK[what](ranks.rank))
    with pytest.raises(paceline.MismatchError, match="own"):
        ranks.wrap(net)
