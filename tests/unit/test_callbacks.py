"""Scalars by one call per step: what is written, when, and on which rank."""

import math

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline import callbacks
from paceline.callbacks import TensorBoard, WandB
from torch import nn

OWN = {"paceline/step_ms", "paceline/samples_per_second"}
COMM = {"paceline/exposed_comm_ms", "paceline/exposed_comm_share"}


class Writer:
    """Keeps the entries of both callbacks."""

    def __init__(self):
        self.entries = {}

    def add_scalar(self, name, value, step):
        self.entries.setdefault(step, {})[name] = value

    def log(self, scalars, step):
        self.entries[step] = scalars


@pytest.fixture(params=[TensorBoard, WandB])
def make(request):
    return request.param


def test_every_so_many_steps_are_one_entry(make, monkeypatch):
    clock = iter([10.0, 12.0, 12.5])
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: next(clock))
    writer = Writer()
    log = make(writer, every=4)
    for step in range(9):
        log(step, samples=8, loss=torch.tensor(step / 2))
    assert writer.entries == {
        0: {"loss": 0.0},
        4: {
            "loss": 2.0,
            "paceline/step_ms": 500.0,
            "paceline/samples_per_second": 16.0,
        },
        8: {
            "loss": 4.0,
            "paceline/step_ms": 125.0,
            "paceline/samples_per_second": 64.0,
        },
    }


def test_a_wrapped_model_tells_what_communication_takes(make, alone):
    writer = Writer()
    for wrap in (paceline.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = wrap(nn.Linear(4, 4))
        log = make(writer, model, every=3)
        for step in range(7):
            model(torch.ones(2, 4)).sum().backward()
            log(step, samples=2)
        assert set(writer.entries[6]) == OWN | COMM, wrap
        assert all(math.isfinite(v) and v >= 0 for v in writer.entries[6].values())
        assert writer.entries[6]["paceline/exposed_comm_share"] <= 1.0
        writer.entries.clear()


def test_models_without_communication_have_no_entry_of_it(make):
    writer = Writer()
    model = paceline.DataParallel(nn.Linear(4, 4), ["cpu"])
    log = make(writer, model, every=1)
    log(0)
    log(1, samples=4)
    assert set(writer.entries[1]) == OWN


def test_only_rank_0_writes_and_others_need_no_writer(make, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    make(None, every=1)(0, loss="no number, and not read")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: next(clock))
    writer = Writer()
    log = make(writer, every=1)
    log(0, samples=8)
    log(1, samples=8)
    assert writer.entries[1]["paceline/samples_per_second"] == 4 * 8 / 2


def test_what_is_not_written_is_not_read(make):
    class Unread:
        def __float__(self):
            raise AssertionError("read")

    log = make(Writer(), every=2)
    log(0)
    log(1, loss=Unread())


def test_what_is_no_number_is_named(make):
    log = make(Writer(), every=1)
    with pytest.raises(ValueError, match="loss is a tensor of 4 elements: give one"):
        log(0, loss=torch.ones(4))
    with pytest.raises(ValueError, match="name is a str"):
        log(0, name="x")


@pytest.mark.parametrize("every", [0, -1, 1.5, "2"])
def test_every_is_a_number_of_steps(make, every):
    with pytest.raises(ValueError, match="every is"):
        make(Writer(), every=every)


def test_a_writer_of_another_kind_is_refused():
    with pytest.raises(
        TypeError, match=r"writer is a NoneType.* has no add_scalar\(\)"
    ):
        TensorBoard(None)
    with pytest.raises(
        TypeError, match=r"run is a dict.* has no log\(\): .*wandb.init"
    ):
        WandB({})
