"""What is saved, loaded, and changed while a model is wrapped."""

import copy
import os
import pickle
import tempfile

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import Twin, assert_equal, bits, integer_weights, mean_over, on_ranks
from torch import nn


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


@on_ranks(3)
def test_rank_0_alone_writes_a_checkpoint(ranks):
    folder = shared_folder(ranks)
    model = ranks.wrap(net())
    paceline.save(model, f"{folder}/{ranks.rank}.pt")
    dist.barrier(group=ranks.group)
    assert os.listdir(folder) == ["0.pt"]
    other = net()
    paceline.load(f"{folder}/0.pt", other)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_equal(mine.data, theirs.data, "a parameter")


@on_ranks(3)
def test_the_first_rank_of_a_group_writes_its_checkpoint(ranks):
    folder = shared_folder(ranks)
    group = dist.new_group([1, 2])
    if ranks.rank > 0:
        paceline.save({}, f"{folder}/{ranks.rank}.pt", process_group=group)
    dist.barrier(group=ranks.group)
    assert os.listdir(folder) == ["1.pt"]


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


@on_ranks(2, into=[*LOADS])
def test_what_was_loaded_is_what_is_evaluated(ranks, into):
    """And not the buffers that rank 0 has sent with the backward before."""
    kept = net()
    with torch.no_grad():
        kept(torch.arange(24.0).reshape(6, 4))  # statistics of its own
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


@on_ranks(2)
def test_statistics_that_were_reset_start_anew_on_every_rank(ranks):
    model = ranks.wrap(net())
    train(ranks, model)
    model.module[1].reset_running_stats()
    assert model.state_dict()["module.1.num_batches_tracked"].item() == 0
    train(ranks, model, 1)
    state = model.state_dict()
    assert state["module.1.num_batches_tracked"].item() == 1
    model.module[1].momentum = 0.0  # the next forward takes over rank 0's, and no more
    train(ranks, model, 1)
    ranks.assert_same(model.state_dict().values(), "the state")


@on_ranks(2)
def test_training_goes_on_after_loading(ranks):
    twin = Twin(ranks, nn.Linear(4, 90))
    train(ranks, twin.ours)
    state = integer_weights(nn.Linear(4, 90)).state_dict()
    twin.ours.load_state_dict(state)
    twin.plain.load_state_dict(state)
    twin.zero()
    twin.step(lambda model: model(ranks.integers(2, 4)).square().sum())


@on_ranks(2, clone=["pickle", "deepcopy"])
def test_a_copy_of_a_trained_wrapper_trains_on(ranks, clone):
    group, ranks.group = ranks.group, dist.group.WORLD
    model = ranks.wrap(net())
    train(ranks, model)
    if clone == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = copy.deepcopy(model)
    ranks.group = group
    for one in (model, twin):
        one.zero_grad()
        train(ranks, one, 1)
    for mine, other in zip(twin.parameters(), model.parameters(), strict=True):
        assert_equal(mine.grad, other.grad, "a copy's gradient")


# ---- models that change -------------------------------------------------------------


class Replace:
    """Changes of a model, the same on every rank."""

    @staticmethod
    def freeze(module):
        module[0].requires_grad_(False)

    @staticmethod
    def freeze_and_unfreeze(module):
        module[0].requires_grad_(not module[0].weight.requires_grad)

    @staticmethod
    def convert(module):
        module.double()

    @staticmethod
    def replace_parameter(module):
        with torch.no_grad():
            module[0].weight = nn.Parameter(module[0].weight * 2)

    @staticmethod
    def replace_layer(module):
        module[1] = integer_weights(nn.Linear(130, 3))

    @staticmethod
    def append_layer(module):
        module.append(integer_weights(nn.Linear(3, 130)))
        module.append(integer_weights(nn.Linear(130, 3)))

    @staticmethod
    def remove_bias(module):
        module[0].bias = None

    @staticmethod
    def share(module):
        module[1].bias = nn.Parameter(module[1].bias.detach().clone())
        module[1].twin = module[0]


CHANGES = [name for name in vars(Replace) if not name.startswith("_")]


@on_ranks(2, change=CHANGES, set_to_none=[True, False])
def test_a_model_may_change_between_steps(ranks, change, set_to_none):
    module = integer_weights(nn.Sequential(nn.Linear(4, 130), nn.Linear(130, 3)))
    twin = Twin(ranks, module)
    for step in range(5):
        twin.zero(set_to_none)
        dtype = twin.plain[0].weight.dtype
        x = ranks.integers(3, 4, key=step, dtype=dtype)
        twin.step(lambda model, x=x: model(x).sum())
        if step in (1, 3):
            for one in (twin.plain, twin.ours.module):
                getattr(Replace, change)(one)


@on_ranks(2)
def test_what_was_accumulated_before_a_change_is_still_averaged(ranks):
    module = integer_weights(nn.Sequential(nn.Linear(4, 130), nn.Linear(130, 3)))
    twin = Twin(ranks, module)
    twin.step(lambda model: model(ranks.integers(3, 4)).sum())
    twin.zero()
    twin.local(lambda model: model(ranks.integers(3, 4, key=1)).sum())
    for one in (twin.plain, twin.ours.module):
        one[0].requires_grad_(False)  # and it is not used again
    twin.step(lambda model: model(ranks.integers(3, 4, key=2)).sum(), check=False)
    theirs = dict(twin.plain[1].named_parameters())
    for name, p in twin.ours.module[1].named_parameters():
        assert_equal(p.grad, theirs[name].grad, name)


@on_ranks(2)
def test_a_change_leaves_whether_to_synchronise_as_it_was(ranks):
    model = ranks.wrap(nn.Sequential(nn.Linear(4, 130), nn.Linear(130, 3)))
    train(ranks, model)
    with model.no_sync():
        model.module[0].requires_grad_(False)
        train(ranks, model)
        assert model.require_backward_grad_sync is False
    assert model.require_backward_grad_sync is True


@on_ranks(2)
def test_stateless_calls_leave_the_wrapper_as_it_was(ranks):
    module = integer_weights(nn.Linear(100, 90))
    model = ranks.wrap(module)
    x = ranks.integers(3, 100)
    swapped = {"module.weight": torch.ones(90, 100), "module.bias": torch.zeros(90)}
    for _ in range(2):
        out = torch.func.functional_call(model, swapped, (x,))
        assert_equal(out, x.sum(1, keepdim=True).expand(3, 90), "a stateless call")
        model.zero_grad()
        model(x).sum().backward()
        mean = mean_over(ranks.all(x.sum(0).expand(90, 100)))
        assert_equal(module.weight.grad, mean, "the gradient")


@on_ranks(2)
def test_a_change_on_one_rank_alone_is_an_error_on_both(ranks):
    model = ranks.wrap(nn.Sequential(nn.Linear(4, 130), nn.Linear(130, 3)))
    train(ranks, model)
    if ranks.rank == 1:
        model.module[0].weight = nn.Parameter(torch.zeros(130, 4))
    with pytest.raises((paceline.PeerError, paceline.MismatchError)):
        train(ranks, model)


@on_ranks(2)
def test_gradients_after_another_memory_format_are_averaged(ranks):
    module = integer_weights(nn.Sequential(nn.Conv2d(8, 64, 3)))
    twin = Twin(ranks, module)
    x = ranks.integers(2, 8, 5, 5)
    twin.step(lambda model: model(x).sum())
    for one in (twin.plain, twin.ours.module):
        one.to(memory_format=torch.channels_last)
    twin.zero()
    twin.step(lambda model: model(x).sum())


@on_ranks(2)
def test_moving_a_model_to_shared_memory_leaves_its_gradients_alone(ranks):
    twin = Twin(ranks, integer_weights(nn.Linear(100, 100)))
    x = ranks.integers(2, 100)
    twin.step(lambda model: model(x).sum())
    before = [bits(p.grad) for p in twin.ours.parameters()]
    twin.ours.share_memory()
    assert [bits(p.grad) for p in twin.ours.parameters()] == before
    for step in range(2):
        twin.zero(set_to_none=step == 1)
        twin.step(lambda model: model(x).sum())


@on_ranks(2, width=[2, 200])
def test_an_output_kept_from_before_a_change_disturbs_nobody(ranks, width):
    module = integer_weights(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 1)))
    model = ranks.wrap(module)
    kept = model(ranks.integers(3, 6))
    model.module[1] = integer_weights(nn.Linear(width, 3))
    for step in range(3):
        model.zero_grad()
        model(ranks.integers(3, 6, key=step)).sum().backward()
        ranks.assert_same([p.grad for p in model.parameters()], "gradients")
    kept.sum().backward()
    ranks.assert_same([p.grad for p in model.module[0].parameters()], "gradients")
