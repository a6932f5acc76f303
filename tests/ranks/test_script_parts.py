"""Other parts of a script, on ranks: batches, values of all ranks, prints and turns."""

import dataclasses
import datetime
import itertools
import logging
import math
import re
import sys
import time

import numpy as np
import paceline
import pytest
import torch
from paceline import _messages
from paceline._compat import torch_groups
from paceline.data import BatchSampler
from support.ranks import run_ranks, values
from torch.nn.utils.rnn import pack_sequence
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


# ---- values --------------------------------------------------------------------------

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
WEIGHTED = [  # the same, and the ranks' weights
    (1.0, 4.0, (3, 1), 1.75),
    (math.nan, 4.0, (0, 2), 4.0),
    (0.1, 0.1, (torch.tensor(3), 6), 0.1),
    (1e308, 1e308, (100.0, 300.0), 1e308),
    ({"a": ONES}, {"a": ONES * 2}, (0.25, 0.75), {"a": ONES * 1.75}),
]
HALF = torch.arange(6).reshape(3, 2).bfloat16()
GATHERED = [  # the values of ranks 0 and 1, and those of all
    (HALF[:1], HALF[1:], HALF),
    (torch.tensor(True), torch.tensor(False), torch.tensor([True, False])),
    (torch.ones(2) * 1j, torch.empty(0) * 1j, torch.ones(2) * 1j),
    (torch.ones(1, 2).mT.conj(), torch.ones(1, 1), torch.ones(3, 1)),
    (torch.ones(1, 0), torch.ones(2, 0), torch.ones(3, 0)),
    (np.arange(2)[::-1], np.arange(1), np.array([1, 0, 0])),
    (["a", None], [], ["a", None]),
    (math.nan, b"\0", [math.nan, b"\0"]),
    ([{"id": 1}], [{"id": [2**70]}], [{"id": 1}, {"id": [2**70]}]),
    (
        {"x": HALF[:2], 1: ("a", [np.int8(1).item()])},
        {1: ("b", []), "x": HALF[2:]},
        {"x": HALF, 1: (["a", "b"], [1])},
    ),
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
NOT_GATHERED = [  # the same for gather()
    (
        torch.ones(2, 3),
        torch.ones(2, 4),
        r"Mismatch.*\(3,\) where rank 1 .*\(4,\)",
        None,
    ),
    (ONES, ONES.double(), "Mismatch.*float32 rows.*where.*float64", None),
    (ONES, ONES.numpy(), "Mismatch.*a tensor.*where.*an array", None),
    ([1], 1, "Mismatch.*a list where rank 1 has a plain value", None),
    ({"a": 1}, {"b": 1}, r"Mismatch.*\['a'\] a plain.*where rank 1 has \['b'\]", None),
    ({1}, 1, r"TypeError: gather\(\) got a set", "Mismatch.*rank 0 failed in gather"),
    ([{1: 2}], [], "TypeError.*got a dict", "Mismatch.*rank 0 failed"),
    ([ONES], [], "TypeError.*got a Tensor", "Mismatch.*rank 0 failed"),
    (np.array(["a"]), 1, "TypeError", "Mismatch.*rank 0 failed"),
    (np.ma.array([1], mask=[True]), 1, "TypeError.*MaskedArray", "Mismatch.*rank 0"),
    (
        pack_sequence([ONES]),
        1,
        "TypeError.*a PackedSequence",
        "Mismatch.*rank 0 failed",
    ),
    (ONES.to("meta"), ONES, "TypeError.*got a Tensor", "Mismatch.*rank 0 failed"),
    (
        "a" * (64 << 20),
        "a",
        "ValueError.*too long",
        "Mismatch.*rank 0 failed.*too long",
    ),
]
BAD_WEIGHTS = [  # the ranks' weights, the error of rank 0, that of rank 1
    (-1, 1, "ValueError.*weight=-1", "Mismatch.*rank 0 failed in mean"),
    (math.inf, 1, "ValueError.*weight=inf", "Mismatch.*rank 0 failed in mean"),
    (None, 1, "Mismatch.*a number where rank 1 has a number, with a weight", None),
    (0, 0, "ValueError.*weight=0 on every rank", None),
    (ONES, 1, "ValueError.*weight=tensor", "Mismatch.*rank 0 failed in mean"),
]


CALLS = {  # words of the error on rank 0 if it calls alone
    lambda: paceline.mean(1): "mean() waits for rank 1: call it on every rank",
    lambda: paceline.save(
        {}, "/dev/null", rng=True
    ): "save(rng=True) waits for rank 1:",
    lambda: paceline.gather(1): "gather() waits for rank 1: call it on every rank",
    lambda: in_turn(print): "first() waits for rank 1: call it on every rank",
}


def take_values(rank, n_ranks):
    world = paceline.init()
    world.print("printed by", rank, flush=True)
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(world.log_filter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.info("info of %s", rank)
    logging.warning("warning of %s", rank)
    found = [paceline.mean(row[rank]) for row in MEANS]
    found += [paceline.mean(row[rank], weight=row[2][rank]) for row in WEIGHTED]
    found += [paceline.gather(row[rank]) for row in GATHERED]
    errors = [error_of(paceline.mean, row[rank]) for row in DIFFERENCES]
    errors += [error_of(paceline.gather, row[rank]) for row in NOT_GATHERED]
    errors += [error_of(paceline.mean, 1.0, weight=row[rank]) for row in BAD_WEIGHTS]
    errors += [error_of((paceline.mean, paceline.gather)[rank], 1)]
    if rank == 0:
        for call, words in CALLS.items():  # rank 1 calls none of them
            words_of_error, fault = error_of(call)
            assert words_of_error.startswith("Peer")  # or PeerTimeout
            assert words in words_of_error
            assert fault == 1
    return found, errors, world.is_main


def error_of(call, *args, **options):
    with pytest.raises(Exception) as caught:
        call(*args, **options)
    words = f"{caught.typename}: {caught.value}"
    return words, getattr(caught.value, "rank", None)


def test_values_are_those_of_all_ranks_and_a_difference_is_an_error_on_each():
    outcomes = run_ranks(take_values, 2, group_timeout=2.0)
    rows = [*MEANS, *WEIGHTED, *GATHERED]
    calls = r"Mismatch.*rank 0 has called mean\(\) where rank 1 has called gather\(\)"
    bad = [*DIFFERENCES, *NOT_GATHERED, *BAD_WEIGHTS, (1, 1, calls, None)]
    for rank, (found, errors, is_main) in enumerate(values(outcomes)):
        for got, (*_, expected) in zip(found, rows, strict=True):
            assert_same(got, expected)
        for (words, fault), row in zip(errors, bad, strict=True):
            assert re.match(row[2 + rank] or row[2], words), words
            assert fault == (None if "Mismatch" not in words else int(row[3] is None))
        assert is_main == (rank == 0)
        output = outcomes[rank].output
        assert f"warning of {rank}" in output
        assert ("printed by" in output, "info of" in output) == (is_main, is_main)


def assert_same(got, expected):
    assert type(got) is type(expected)
    if isinstance(got, torch.Tensor | np.ndarray | float):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(got, dict | list | tuple):
        assert len(got) == len(expected)
        for key in got if isinstance(got, dict) else range(len(got)):
            assert_same(got[key], expected[key])
    else:
        assert got == expected


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


def test_values_of_one_process_have_the_form_of_those_over_ranks():
    calls = [(paceline.mean, MEANS), (paceline.gather, GATHERED)]
    for call, rows in calls:
        for value, _, expected in rows:
            got = call(value)
            assert type(got) is type(expected)
            if isinstance(got, torch.Tensor):
                assert (got.dtype, got.requires_grad) == (expected.dtype, False)
                assert got.data_ptr() != value.data_ptr() or got.numel() == 0


# ---- turns ---------------------------------------------------------------------------


def in_turn(call, *args):
    with paceline.init().first():
        return call(*args)


def take_turns(rank, n_ranks, path):
    world, seen = paceline.init(), []
    with pytest.raises(ValueError, match="LOCAL_RANK"):
        world.first(on_each_host=True).__enter__()
    world = dataclasses.replace(world, local_rank=rank)
    for on_each_host in (False, True):
        with world.first(on_each_host=on_each_host):
            seen.append(path.exists())
            time.sleep(0.1 * (rank == 0))
            path.touch()
        world.barrier()
        if rank == 0:
            path.unlink()
        world.barrier(timeout=20)
    refused = r"in the body of `with world.first\(\):` waits for ranks that wait"
    for call in (world.barrier, lambda: paceline.gather(1), lambda: in_turn(print)):
        assert re.search(refused, error_of(in_turn, call)[0])
    for seconds in (0, -1, 1e9, math.nan, datetime.timedelta(0)):
        assert "from 0.001 to" in error_of(world.barrier, seconds)[0]
    traced = torch.compile(lambda x: paceline.mean(x * 2, weight=1), backend="eager")
    assert traced(torch.ones(2)).tolist() == [2, 2]
    words, _ = error_of(in_turn, path.rename, "no/such/folder")
    if rank < 2:  # ranks 2 and 3 do not come
        error, _ = error_of(world.barrier, timeout=0.5 + 0.3 * rank)
        return seen, words, error
    time.sleep(1.5)
    return seen, words, None


def test_one_rank_goes_first_and_a_barrier_names_who_is_late(tmp_path):
    got = values(run_ranks(take_turns, 4, tmp_path / "file"))
    for rank, (seen, words, error) in enumerate(got):
        assert seen == [rank > 0] * 2
        prefix = "OSError: rank 0: FileNotFound" if rank > 0 else "FileNotFound"
        assert words.startswith(f"{prefix}Error: [Errno 2] No such file"), words
        if rank < 2:
            late = f"PeerTimeoutError: rank {rank}: barrier() waits for ranks 2, 3 ("
            assert error.startswith(late), error
