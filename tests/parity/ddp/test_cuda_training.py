"""What is GPUs' own: where things are, what is called, what goes wrong and how."""

import copy
import dataclasses
import gc
import os
import pickle
import time
from datetime import timedelta

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import Twin, assert_equal, integer_weights, mean_over
from gpus import on_gpus
from paceline import _gpu, _native
from paceline._ddp import peers, placement
from support import fake_gpus
from support.fake_gpus import environment
from support.processes import descriptors, leftovers
from support.ranks import run_ranks, start_ranks, tell
from support.waiting import until
from torch import nn

OUT_OF_MEMORY = 2
WAITS = [
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuEventCreate",
    "cuStreamCreateWithPriority",
    "ncclMemAlloc",
]


def module():
    return integer_weights(
        nn.Sequential(nn.Linear(6, 50), nn.BatchNorm1d(50), nn.Linear(50, 300))
    )


def count(*names):
    return [fake_gpus.fake().fake_count(name.encode()) for name in names]


def live():
    gc.collect()
    return fake_gpus.fake().fake_live_objects()


def train(ranks, model, steps=3):
    for step in range(steps):
        model.zero_grad()
        x = ranks.n * ranks.integers(4, 6, key=step)
        model(x).sum().backward()
        own = copy.deepcopy(model.module)
        own.zero_grad()
        own(x).sum().backward()
        rows = ranks.all([p.grad for p in own.parameters()])
        for p, *grads in zip(model.parameters(), *rows, strict=True):
            assert_equal(p.grad, mean_over(grads), f"step {step}")


def one_linear(ranks, model, steps=3):
    """Train what has exact gradients."""
    for step in range(steps):
        model.zero_grad()
        x = ranks.n * ranks.integers(4, 6, key=step)
        model(x).sum().backward()
        rows = ranks.all(x.sum(0))
        for row in model.module.weight.grad:
            assert_equal(row, mean_over(rows), f"step {step}")


# ---- what is called -----------------------------------------------------------------


@on_gpus(2)
def test_nccl_carries_the_gradients(ranks):
    model = ranks.wrap(nn.Linear(6, 3))
    before = count("ncclAllReduce")
    one_linear(ranks, model)
    assert count("ncclAllReduce")[0] >= before[0] + 3


@on_gpus(2)
def test_a_step_neither_waits_for_the_gpu_nor_allocates(ranks):
    model = ranks.wrap(module(), bucket_cap_mb=0.01)
    for step in range(4):
        model.zero_grad()
        model(ranks.integers(4, 6, key=step)).sum().backward()
    before = count(*WAITS)
    for step in range(4):
        model.zero_grad()
        model(ranks.integers(4, 6, key=step)).sum().backward()
    assert dict(zip(WAITS, count(*WAITS), strict=True)) == dict(
        zip(WAITS, before, strict=True)
    )


@on_gpus(1)
def test_a_rank_that_is_alone_is_the_plain_module(ranks):
    model = ranks.wrap(nn.Linear(6, 3), device_ids=[0])
    before = count("cuInit", "cuLaunchKernel")
    one_linear(ranks, model)
    assert count("cuInit", "cuLaunchKernel") == before
    assert model._session.reducer is None


@on_gpus(1)
def test_a_rank_that_is_alone_may_have_a_hook_without_nccl(ranks):
    model = ranks.wrap(nn.Linear(6, 3))
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().clone())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 2)
        return future

    model.register_comm_hook(None, hook)
    model(torch.ones(1, 6)).sum().backward()
    assert seen
    assert model.module.weight.grad.unique().tolist() == [2.0]


# ---- arguments ----------------------------------------------------------------------


class Echo(nn.Linear):
    def forward(self, *args, **kwargs):
        return args, kwargs


@on_gpus(1, 2, given=[[0], ["cuda:0"], None])
def test_device_ids_say_whether_inputs_are_moved(ranks, given):
    model = ranks.wrap(Echo(6, 3), device_ids=given)
    assert model.device_ids == (None if given is None else [0])
    assert model.output_device == (None if given is None else 0)
    move, moved = model.to_kwargs, []
    model.to_kwargs = lambda *args: (moved.append(args), move(*args))[1]
    x = torch.ones(())
    assert model(x)[0][0] is x  # it is there
    assert model() == ((), {})
    assert not moved
    given_dict, given_list = {"y": x}, [x, 3]
    args, kwargs = model(given_dict, "word", z=given_list)
    assert len(moved) == (given is not None)
    assert (args, kwargs) == ((given_dict, "word"), {"z": given_list})
    assert (args[0] is given_dict) == (given is None)  # torch makes new containers
    args, kwargs = model._pre_forward(given_dict)
    assert (args[0] is given_dict) == (given is None)
    model._post_forward(None)


@on_gpus(2)
def test_device_ids_follow_a_module_that_is_moved(ranks):
    model = ranks.wrap(nn.Linear(6, 3), device_ids=[0])
    before = count("ncclAllReduce")
    one_linear(ranks, model)
    on_gpu = count("ncclAllReduce")
    assert on_gpu > before
    _gpu.machine.is_there = False  # model.cpu()
    model.module.double()
    model(ranks.integers(4, 6, dtype=torch.float64)).sum().backward()
    assert model.device_ids is None
    model.module.float()
    one_linear(ranks, model)
    assert count("ncclAllReduce") == on_gpu
    _gpu.machine.is_there = True  # model.cuda()
    model.module.double()
    model(ranks.integers(4, 6, dtype=torch.float64)).sum().backward()
    assert model.device_ids == [0]
    model.module.float()
    one_linear(ranks, model)
    assert count("ncclAllReduce") > on_gpu


@on_gpus(3, dtype=["bfloat16", "float16"])
def test_gradients_of_16_bits_are_added_up_in_float32_if_asked_for(ranks, dtype):
    kind = getattr(torch, dtype)
    large = 256.0 if dtype == "bfloat16" else 2046.0
    net = nn.Linear(1, 300, bias=False).to(kind)
    model = ranks.wrap(net, accumulate_in_fp32=True)
    for _ in range(3):
        model.zero_grad()
        x = torch.full((1, 1), large if ranks.rank == 0 else 1.0, dtype=kind)
        model(x).sum().backward()
        mean = torch.tensor((large + 2) / 3).to(kind)
        assert net.weight.grad.unique().tolist() == [mean.item()]


@on_gpus(2)
def test_ranks_that_add_up_in_different_ways_are_told(ranks):
    with pytest.raises(paceline.MismatchError, match="accumulate_in_fp32 differs"):
        ranks.wrap(nn.Linear(1, 1), accumulate_in_fp32=ranks.rank == 0)


@on_gpus(2)
def test_a_copy_adds_up_as_the_original(ranks):
    model = paceline.DistributedDataParallel(
        nn.Linear(6, 3), device_ids=[0], accumulate_in_fp32=True
    )
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin._session.options.accumulate_in_fp32
        one_linear(ranks, twin)
        assert twin.device_ids == [0]


@on_gpus(2)
def test_logging_data_names_the_device(ranks):
    data = ranks.wrap(nn.Linear(6, 3), device_ids=[0])._get_ddp_logging_data()
    assert (data["device_ids"], data["output_device"]) == ("0", 0)


@on_gpus(2, cap=[None, 2.0, 0.05])
def test_buckets_are_as_large_as_asked_for_and_the_last_is_small(ranks, cap):
    net = nn.ParameterList(torch.zeros(1 << 18) for _ in range(7))  # 1 MiB each
    model = ranks.wrap(net, bucket_cap_mb=cap)
    sizes = [len(bucket) for bucket in model._session.reducer.buckets]
    assert sizes == {None: [6, 1], 2.0: [2, 2, 2, 1], 0.05: [1] * 7}[cap]


@on_gpus(2)
def test_a_list_of_bucket_sizes_is_honoured(ranks):
    net = nn.ParameterList(torch.zeros(1 << 18) for _ in range(7))
    model = ranks.wrap(net, bucket_cap_mb_list=[1, 2, 4])
    assert [len(bucket) for bucket in model._session.reducer.buckets] == [1, 2, 4]


# ---- groups -------------------------------------------------------------------------


def device_group():
    return dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=10))


@on_gpus(2, 3)
def test_a_module_trains_in_a_group_that_takes_gpu_tensors_alone(ranks):
    model = paceline.DistributedDataParallel(
        integer_weights(nn.Linear(6, 3)), process_group=device_group()
    )
    one_linear(ranks, model)


@on_gpus(2, kind=["gloo", "device"])
def test_ranks_on_several_hosts_train_by_nccl(ranks, kind):
    group = device_group() if kind == "device" else ranks.group
    before = peers.Host.shares_memory_with
    peers.Host.shares_memory_with = lambda host, other: host.pid == other.pid
    try:
        model = paceline.DistributedDataParallel(
            integer_weights(nn.Linear(6, 3)), process_group=group
        )
    finally:
        peers.Host.shares_memory_with = before
    calls = count("ncclAllReduce")
    one_linear(ranks, model)
    assert count("ncclAllReduce") > calls


@on_gpus(2)
def test_more_ranks_than_can_share_memory_train_over_the_group(ranks):
    most = _native.MAX_SHARED_MEMORY_RANKS, _native.MAX_HOSTS
    _native.MAX_SHARED_MEMORY_RANKS = _native.MAX_HOSTS = 1
    try:
        model = ranks.wrap(nn.Linear(6, 3))
    finally:
        _native.MAX_SHARED_MEMORY_RANKS, _native.MAX_HOSTS = most
    assert model._session.world.uses_group
    one_linear(ranks, model)


# ---- bad input ----------------------------------------------------------------------


def refused(ranks, kind, words, **options):
    """Check that wrapping is the same error on every rank, and leaves nothing."""
    net = nn.Linear(6, 3)
    ranks.all(None)
    before = live()
    with pytest.raises(kind, match=words) as caught:
        ranks.wrap(net, **options)
    said = str(caught.value)
    del caught
    ranks.all(None)
    fake_gpus.synchronize()
    assert live() <= before
    assert len(
        {type(kind), *(row.rpartition("rank 1: ")[2] for row in ranks.all(said))}
    )
    return said


@on_gpus(2)
def test_two_ranks_on_one_gpu_are_refused_on_both(ranks):
    _gpu.machine.identity = lambda index, version: "GPU 7"
    try:
        refused(ranks, ValueError, "Duplicate GPU detected: ranks 0 and 1 .* GPU 7")
        os.environ["NCCL_HOSTID"] = f"host {ranks.rank}"
        one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))
    finally:
        os.environ.pop("NCCL_HOSTID", None)
        del _gpu.machine.identity


@on_gpus(2)
def test_a_rank_that_left_its_module_on_the_cpu_is_told_to_all(ranks):
    _gpu.machine.is_there = ranks.rank == 0
    open_gpu = placement.open_gpu

    def open_and_rename(*args, **named):
        gpu, here = open_gpu(*args, **named)
        return gpu, dataclasses.replace(here, device="cuda:0")

    placement.open_gpu = open_and_rename
    try:
        refused(ranks, paceline.MismatchError, "0's module is on cuda:0, rank 1's on c")
    finally:
        placement.open_gpu = open_gpu
        _gpu.machine.is_there = True


@on_gpus(2)
def test_a_rank_without_a_gpu_that_can_be_used_is_told_to_all(ranks):
    if ranks.rank == 1:
        _gpu.machine.why_unusable = lambda: "torch sees no CUDA device"
    try:
        refused(ranks, NotImplementedError, "torch sees no CUDA device")
    finally:
        _gpu.machine.__dict__.pop("why_unusable", None)
    one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))


@on_gpus(2)
def test_a_rank_without_nccl_is_told_to_all(ranks):
    path = os.environ["PACELINE_LIBNCCL"]
    if ranks.rank == 1:
        os.environ["PACELINE_LIBNCCL"] = "/nowhere/libnccl.so.2"
    try:
        refused(ranks, NotImplementedError, "PACELINE_LIBNCCL.*Tried: /nowhere/libnccl")
    finally:
        os.environ["PACELINE_LIBNCCL"] = path
    one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))


@on_gpus(2)
def test_another_version_of_nccl_is_told_to_all(ranks):
    if ranks.rank == 1:
        _gpu.machine.nccl_version = lambda path: 22705
    try:
        words = r"rank 0 has NCCL 2\.28\.9, rank 1 has 2\.27\.5"
        refused(ranks, paceline.MismatchError, words)
    finally:
        _gpu.machine.__dict__.pop("nccl_version", None)


@on_gpus(2, ids=[[0, 1], [1], ["cpu"]])
def test_wrong_device_ids_of_one_rank_are_told_to_all(ranks, ids):
    given = ids if ranks.rank == 1 else [0]
    refused(ranks, ValueError, "device", device_ids=given)


def is_let_go(before):
    """Tell whether a thread that was left behind in NCCL has given back what it had."""
    fake_gpus.fake().fake_let_go()
    return live() <= before


@on_gpus(2, function=["cuMemAlloc", "ncclCommInitRank"])
def test_a_gpu_that_is_full_at_construction_fails_on_every_rank(ranks, function):
    one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))
    ranks.all(None)
    before, files = live(), descriptors()
    if ranks.rank == 1:
        code = OUT_OF_MEMORY if function == "cuMemAlloc" else 1  # unhandled CUDA error
        for hidden in ("cuMemAlloc", "ncclMemAlloc") if code == 2 else (function,):
            fake_gpus.fake().fake_fail(hidden.encode(), 1, code)
            if code == OUT_OF_MEMORY:  # and with torch's cache empty
                fake_gpus.fake().fake_fail(hidden.encode(), 2, code)
    kinds = (MemoryError, OSError, RuntimeError)
    with pytest.raises(kinds) as caught:
        ranks.wrap(nn.Linear(6, 3))
    if ranks.rank == 0:
        assert isinstance(caught.value, paceline.PeerError)
        assert "rank 1" in str(caught.value)
    del caught
    ranks.all(None)
    assert until(lambda: is_let_go(before))
    assert leftovers(files) == []
    one_linear(ranks, ranks.wrap(nn.Linear(6, 3)))


@on_gpus(2)
def test_wrappers_that_are_dropped_leave_nothing_on_the_gpu(ranks):
    seen = []
    for _ in range(6):
        model = ranks.wrap(nn.Linear(6, 3))
        one_linear(ranks, model, steps=2)
        del model
        ranks.all(None)
        seen.append(live())
    assert seen[-1] <= seen[1]


# ---- failures in a step -------------------------------------------------------------


@on_gpus(2, 3)
def test_an_exception_of_one_rank_reaches_all_and_is_overcome(ranks):
    twin = Twin(ranks, integer_weights(nn.Linear(6, 3)))

    def step(number):
        twin.zero()
        x = ranks.n * ranks.integers(4, 6, key=number)
        twin.step(lambda model: model(x).sum())

    def fail(*_):
        raise LookupError("no such row")

    step(0)
    x = ranks.integers(4, 6, key=1).requires_grad_()
    if ranks.rank == 1:
        x.register_hook(fail)
    kind = LookupError if ranks.rank == 1 else paceline.PeerError
    with pytest.raises(kind, match="no such row"):
        twin.ours(x).sum().backward()
    for number in range(2, 5):
        step(number)


def train_until_a_kill(rank, n_ranks, victim):
    with fake_gpus.on_gpu(rank):
        files = descriptors()
        model = paceline.DistributedDataParallel(module())
        with pytest.raises(paceline.PeerError) as caught:
            step_until_a_kill(rank, victim, model)
        at, words = time.monotonic(), str(caught.value)
        del model, caught
        return at, words, leftovers(files)


def step_until_a_kill(rank, victim, model):
    for step in range(10_000):
        if rank == victim and step == 5:
            tell("five steps")
            time.sleep(60)
        model.zero_grad()
        model(torch.ones(4, 6)).sum().backward()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_named_by_all_others(victim):
    with start_ranks(train_until_a_kill, 3, victim, env=environment()) as ranks:
        assert ranks.hear(victim) == "five steps"
        killed_at = ranks.kill(victim)
        pid = ranks.pids[victim]
        outcomes = ranks.wait()
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.is_ok, outcome
        at, words, left = outcome.value
        assert words.startswith(f"rank {rank}: rank {victim} (process {pid}) died")
        assert at - killed_at < 10
        assert left == []


def leave_without_a_word(rank, n_ranks):
    with fake_gpus.on_gpu(rank):
        model = paceline.DistributedDataParallel(module())
        model(torch.ones(4, 6)).sum().backward()
        if rank == 1:
            return None
        with pytest.raises(paceline.PeerError) as caught:
            step_until_a_kill(rank, -1, model)
        return str(caught.value)


def test_a_rank_that_drops_its_model_is_named():
    outcomes = run_ranks(leave_without_a_word, 2, env=environment())
    assert outcomes[0].is_ok, outcomes[0]
    assert "rank 1" in outcomes[0].value
