"""Process groups that end before their wrappers, and new groups after them."""

import gc
import os
from datetime import timedelta

import paceline
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values


def make(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 2))


def step(model, rank):
    model.zero_grad()
    model(torch.ones(2, 4) * (rank + 1)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def meet(path, rank, n_ranks):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=n_ranks,
        timeout=timedelta(seconds=20),
    )


def end_the_group_first(rank, n_ranks):
    module = make()
    model = paceline.DistributedDataParallel(module)
    seen = [step(model, rank)]
    dist.destroy_process_group()
    seen.append(step(model, rank))  # its world still exists
    seen.append(step(module, rank))  # it has hooks, but this was no wrapped forward
    del model
    gc.collect()
    seen.append(step(module, rank))
    return seen


def test_a_group_that_ends_first_leaves_models_that_train():
    first, second = values(run_ranks(end_the_group_first, 2))
    for step_number, is_averaged in enumerate((True, True, False, False)):
        same = all(
            torch.equal(a, b)
            for a, b in zip(first[step_number], second[step_number], strict=True)
        )
        assert same is is_averaged


def start_again(rank, n_ranks, path):
    models = []
    grads = []
    for number in range(3):
        if number:
            dist.destroy_process_group()
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
            # A restart may assign ranks differently.
            meet(f"{path}{number}", n_ranks - 1 - rank, n_ranks)
        models.append(paceline.DistributedDataParallel(make(number)))
        grads.append(step(models[-1], rank))
    return {"grads": grads, "rank": models[-1]._distributed_rank}


def test_a_process_may_meet_its_peers_again_in_a_new_group(tmp_path):
    rows = values(run_ranks(start_again, 2, str(tmp_path / "store")))
    for mine, theirs in zip(rows[0]["grads"], rows[1]["grads"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert [row["rank"] for row in rows] == [1, 0]


def meet_a_newcomer(rank, n_ranks, path):
    """Rank 0 has wrapped models before; rank 1 is like a new process."""
    alone = [dist.new_group([r]) for r in range(n_ranks)][rank]
    if rank == 0:
        paceline.DistributedDataParallel(make(), process_group=alone)
    dist.barrier()  # else the peer, still connecting, may take the end for a crash
    dist.destroy_process_group()
    meet(path, rank, n_ranks)
    return step(paceline.DistributedDataParallel(make()), rank)


def test_ranks_with_different_pasts_meet_in_a_new_group(tmp_path):
    first, second = values(run_ranks(meet_a_newcomer, 2, str(tmp_path / "store")))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def save_after_the_group(rank, n_ranks):
    model = paceline.DistributedDataParallel(make())
    step(model, rank)
    dist.destroy_process_group()
    with torch.no_grad():
        model(torch.ones(2, 4))
    return list(model.state_dict())


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_model_is_evaluated_and_saved_after_its_group(n_ranks):
    for keys in values(run_ranks(save_after_the_group, n_ranks)):
        assert keys[0] == "module.0.weight"
