"""The doctor's checks of GPUs, with simulated CUDA and NCCL."""

import pytest
from paceline import _gpu, _native
from paceline._cli.doctor import gpus
from paceline._cli.doctor.finding import MIB, Status
from paceline._compat import torch_cuda
from support import devices, fake_gpus

devices.load()  # before the first backward of this process


@pytest.fixture
def three_gpus():
    with fake_gpus.several(3) as machine:
        yield machine


def test_what_a_step_on_gpus_needs_is_found(three_gpus, monkeypatch):
    monkeypatch.setenv("PACELINE_LIBNCCL", fake_gpus.library())
    monkeypatch.setenv("PACELINE_LIBCUDA", fake_gpus.library())
    found = gpus.look_gpus()
    assert found.status is Status.OK
    assert found.found.startswith("3 x fake GPU (1 GiB, compute capability 9.0); kern")
    assert "NCCL 2." in found.found
    assert found.advice == ""
    assert gpus.look_driver().found.startswith("CUDA's driver serves CUDA 1")
    monkeypatch.setattr(three_gpus, "can_access", lambda a, b: (a, b) != (0, 2))
    assert "not all access each other" in gpus.look_gpus().found
    monkeypatch.setenv("PACELINE_LIBNCCL", "/nowhere")
    found = gpus.look_gpus()
    assert found.status is Status.PROBLEM
    assert "/nowhere" in found.found
    monkeypatch.setattr(three_gpus, "count", lambda: 11)
    found = gpus.look_gpus()
    assert found.status is Status.PROBLEM
    assert "need kernels" in found.advice


@pytest.mark.parametrize("n_gpus", [1, 3])
def test_a_pattern_arrives_right_between_all_pairs_or_from_the_host(n_gpus):
    with fake_gpus.several(n_gpus):
        assert gpus.look_gpu_links() == gpus.judge_gpu_links(n_gpus, {})


@pytest.mark.parametrize("kind", ["changed", "lost"])
def test_a_copy_that_arrives_wrong_is_found_with_its_direction(
    three_gpus, monkeypatch, kind
):
    device_group = _native.DeviceGroup

    class Group:
        def __init__(self, devices):
            self.group = device_group(devices)
            self.streams = self.group.streams

        def copy(self, streams, source, tensors, target, places):
            is_bad = (source, target) == (2, 0)
            if is_bad and kind == "lost":
                return
            self.group.copy(streams, source, tensors, target, places)
            if is_bad:
                three_gpus.synchronize()
                places[0][12345] += 1

    monkeypatch.setattr(_native, "DeviceGroup", Group)
    n_wrong = 2 if kind == "changed" else 8 * MIB
    finding = gpus.look_gpu_links()
    assert finding.status is Status.PROBLEM
    assert finding.found == f"wrong data: GPU 2 to GPU 0 ({n_wrong} elements)"
    assert "iommu=pt" in finding.advice


def test_a_driver_whose_gpus_torch_does_not_see_is_a_problem(monkeypatch):
    monkeypatch.setattr(_gpu.Machine, "why_unusable", lambda self: "torch sees none")
    monkeypatch.setattr(torch_cuda, "build", lambda: "CUDA 13.0")
    monkeypatch.setenv("PACELINE_LIBCUDA", "/nowhere")
    assert gpus.look_gpus().status is Status.OK
    monkeypatch.setenv("PACELINE_LIBCUDA", fake_gpus.library())
    finding = gpus.look_gpus()
    assert finding.status is Status.PROBLEM
    assert "torch sees none" in finding.found


def test_without_gpus_nothing_is_opened(monkeypatch):
    monkeypatch.setattr(_gpu.Machine, "why_unusable", lambda self: "none here")
    monkeypatch.delenv("PACELINE_LIBNCCL", raising=False)
    monkeypatch.setattr(_gpu, "open_device", None)
    assert gpus.look_gpus() == gpus.judge_no_gpu("none here", False)
    assert gpus.look_gpu_links() == gpus.judge_gpu_links(0, {})
