"""Other parts of a script, on ranks: batches, means, prints and logs."""

import itertools
import logging
import re
import sys

import numpy as np
import paceline
import pytest
import torch
from paceline import _messages
from paceline._compat import torch_groups
from paceline.data import BatchSampler
from support.ranks import run_ranks, values
from torch.utils.data import DataLoader, TensorDataset

N_ROWS, BATCH = 20, 6  # 3 ranks join the last batch, of 2 rows, to the one before


def train(world_size, is_scaled=True):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(N_ROWS, 4, dtype=torch.float64))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()
    if world_size > 1:
        model = paceline.DistributedDataParallel(model)
        sampler = BatchSampler(data, BATCH // world_size)
    else:  # the batches of three ranks
        sampler = BatchSampler(data, BATCH)
        batches = [[*range(6)], [*range(6, 12)], [*range(12, 20)]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for _ in range(3):
        loader = DataLoader(data, batch_sampler=sampler)
        if world_size == 1:
            order = list(itertools.chain(*sampler))
            loader = [(data[[order[i] for i in part]][0],) for part in batches]
        for (x,) in loader:
            loss = (model(x) - x).square().mean()
            if world_size > 1 and is_scaled:
                loss = loss * sampler.scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(paceline.mean(loss))
    return torch.stack(losses), [p.detach() for p in model.parameters()]


def train_on_ranks(rank, n_ranks):
    return train(n_ranks), train(n_ranks, is_scaled=False)


def test_a_training_with_the_scale_is_that_of_one_process():
    losses, parameters = train(1)
    for scaled, plain in values(run_ranks(train_on_ranks, 3)):
        # Not the same bits: this sums three means instead of one.
        torch.testing.assert_close(scaled, (losses, parameters), rtol=1e-12, atol=0)
        assert not torch.allclose(plain[1][0], parameters[0], rtol=1e-3)


# ---- mean ----------------------------------------------------------------------------

ONES = torch.ones(2)
MEANS = [  # the values of ranks 0 and 1, and their mean
    (1, 2, 1.5),
    (True, 0.5, 0.75),
    (np.bool_(True), np.float32(0.5), 0.75),
    (torch.tensor([1, 2]), torch.tensor([2, 4]), torch.tensor([1.5, 3.0])),
    (ONES.bfloat16(), ONES.bfloat16(), ONES.bfloat16()),
    (torch.ones(1, requires_grad=True), torch.zeros(1), torch.tensor([0.5])),
    (torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3)),
    ({"a": 1, 3: ONES}, {3: ONES, "a": 2}, {"a": 1.5, 3: ONES}),
    ({}, {}, {}),
]
DIFFERENCES = [  # the values of ranks 0 and 1, the error of rank 0, that of rank 1
    (torch.ones(2), torch.ones(3), r"Mismatch.*\(2,\) where rank 1 has .*\(3,\)", None),
    (torch.ones(2), torch.ones(2).double(), "Mismatch.*float32.*where.*float64", None),
    (1, torch.tensor(1), "Mismatch.*0 has a number where rank 1 .*torch.int64", None),
    ({"a": 1}, {"b": 1}, "Mismatch.*0 has 'a': a number where rank 1 has 'b'", None),
    ("1", 1, r"TypeError: mean\(\) got a str", "Mismatch.*rank 0 failed.*got a str"),
    (10**400, 1, "OverflowError", "Mismatch.*rank 0 failed in mean.*too large"),
    (torch.ones(2).to_sparse(), 1, "TypeError", "Mismatch.*rank 0 failed in mean"),
    (torch.ones(1) * 1j, 1, "TypeError", "Mismatch.*rank 0 failed in mean"),
]


CALLS = {  # words of the error on rank 0 if it calls alone
    lambda: paceline.mean(1): "mean() waits for rank 1: call it on every rank",
    lambda: paceline.save(
        {}, "/dev/null", rng=True
    ): "save(rng=True) waits for rank 1:",
}


def take_means(rank, n_ranks):
    world = paceline.init()
    world.print("printed by", rank, flush=True)
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(world.log_filter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.info("info of %s", rank)
    logging.warning("warning of %s", rank)
    found = [paceline.mean(row[rank]) for row in MEANS]
    errors = []
    for row in DIFFERENCES:
        with pytest.raises(Exception) as caught:
            paceline.mean(row[rank])
        fault = getattr(caught.value, "rank", None)
        errors.append((f"{caught.typename}: {caught.value}", fault))
    if rank == 0:
        for call, words in CALLS.items():  # rank 1 calls none of them
            with pytest.raises(paceline.PeerError) as caught:
                call()
            assert words in str(caught.value)
            assert caught.value.rank == 1
    return found, errors, world.is_main


def test_a_mean_is_that_of_all_ranks_and_a_difference_is_an_error_on_each():
    outcomes = run_ranks(take_means, 2, group_timeout=2.0)
    for rank, (found, errors, is_main) in enumerate(values(outcomes)):
        for got, (*_, expected) in zip(found, MEANS, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        for (words, fault), row in zip(errors, DIFFERENCES, strict=True):
            assert re.match(row[2 + rank] or row[2], words), words
            assert fault == (None if "Mismatch" not in words else int(row[3] is None))
        assert is_main == (rank == 0)
        output = outcomes[rank].output
        assert f"warning of {rank}" in output
        assert ("printed by" in output, "info of" in output) == (is_main, is_main)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Timed out waiting 2000ms for send operation"), "PeerTimeout"),
        (torch.distributed.DistStoreError("Socket Timeout"), "PeerTimeout"),
        (RuntimeError("pair.cc:553] Connection closed by peer"), "Peer"),
        (RuntimeError("Read error: Connection reset by peer"), "Peer"),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), "Peer"),
        (torch.distributed.DistBackendError("ncclRemoteError: A call"), "Peer"),
        (torch.distributed.DistBackendError("ncclInvalidUsage"), "DistBackend"),
        (torch.OutOfMemoryError("out of memory"), "OutOfMemory"),
        (RuntimeError("Tensors must be contiguous"), "Runtime"),
    ],
)
def test_only_what_another_rank_has_done_is_said_to_be_its_fault(
    error, kind, monkeypatch
):
    def fail(*_):
        raise error

    for name, value in {"initialized": True, "rank": 0, "world_size": 2}.items():
        face = f"is_{name}" if value is True else f"get_{name}"
        monkeypatch.setattr(torch.distributed, face, lambda *_, value=value: value)
    monkeypatch.setattr(torch_groups, "default_group", lambda: None)
    monkeypatch.setattr(_messages, "all_gather_by", fail)
    with pytest.raises(RuntimeError) as caught:
        paceline.mean(1)
    assert caught.typename == f"{kind}Error"
    assert (caught.value is error) == ("Peer" not in kind)


def test_a_mean_of_one_process_has_the_form_of_one_over_ranks():
    for value, _, expected in MEANS:
        got = paceline.mean(value)
        assert type(got) is type(expected)
        if isinstance(got, torch.Tensor):
            assert (got.dtype, got.requires_grad) == (expected.dtype, False)
            assert got.data_ptr() != value.data_ptr() or len(got) == 0
