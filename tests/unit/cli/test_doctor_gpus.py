"""The doctor's look at GPUs, on the fakes of CUDA and NCCL."""

import types

import pytest
from paceline import _gpu, _native
from paceline._cli.doctor import gpus, imports
from paceline._cli.doctor.finding import MIB, Status
from paceline._compat import torch_cuda
from support import devices, fake_gpus

devices.load()  # before the first backward of this process


@pytest.fixture
def three_gpus():
    with fake_gpus.several(3) as machine:
        yield machine


def test_gpus_are_listed_with_who_accesses_whom(three_gpus, monkeypatch):
    found = gpus.look_gpus()
    assert found == gpus.Gpus("", (gpus.Gpu("fake GPU", 1 << 30, "9.0"),) * 3)
    monkeypatch.setattr(three_gpus, "can_access", lambda a, b: (a, b) != (0, 2))
    assert gpus.look_gpus().blocked == ((0, 2),)


def test_kernels_are_loaded_on_every_gpu_or_one_is_a_problem(three_gpus, monkeypatch):
    found = gpus.look_kernels()
    assert len(found.sources) == 3
    assert gpus.judge_kernels(found).status is Status.OK
    monkeypatch.setattr(three_gpus, "count", lambda: 9)
    assert gpus.judge_kernels(gpus.look_kernels()).status is Status.PROBLEM


def test_nccl_and_the_driver_are_opened_by_the_paths_that_are_named(
    three_gpus, monkeypatch
):
    monkeypatch.setenv("PACELINE_LIBNCCL", fake_gpus.library())
    monkeypatch.setenv("PACELINE_LIBCUDA", fake_gpus.library())
    found = gpus.look_nccl()
    assert found.version > 20000
    assert found.is_named
    assert gpus.look_driver().version >= 11000
    monkeypatch.setenv("PACELINE_LIBNCCL", "/nowhere")
    assert "/nowhere" in gpus.judge_nccl(gpus.look_nccl()).found


@pytest.mark.parametrize("n_gpus", [1, 3])
def test_a_pattern_arrives_right_between_all_pairs_or_from_the_host(n_gpus):
    with fake_gpus.several(n_gpus):
        assert gpus.look_gpu_links() == gpus.GpuLinks(n_gpus, 16 * MIB)


@pytest.mark.parametrize("kind", ["changed", "lost"])
def test_a_copy_that_arrives_wrong_is_found_with_its_direction(
    three_gpus, monkeypatch, kind
):
    class Group:
        def __init__(self, devices):
            self.group = _native.DeviceGroup(devices)
            self.streams = self.group.streams

        def copy(self, streams, source, tensors, target, places):
            is_bad = (source, target) == (2, 0)
            if is_bad and kind == "lost":
                return
            self.group.copy(streams, source, tensors, target, places)
            if is_bad:
                three_gpus.synchronize()
                places[0][12345] += 1

    native = types.SimpleNamespace(DeviceGroup=Group)
    monkeypatch.setattr(imports, "native", lambda: native)
    found = gpus.look_gpu_links()
    n_wrong = 2 if kind == "changed" else 8 * MIB
    assert found.wrong == (("GPU 2", "GPU 0", n_wrong),)
    finding = gpus.judge_gpu_links(found)
    assert finding.status is Status.PROBLEM
    assert "iommu=pt" in finding.advice


def test_a_driver_whose_gpus_torch_does_not_see_is_a_problem(monkeypatch):
    monkeypatch.setattr(_gpu.Machine, "why_unusable", lambda self: "torch sees none")
    monkeypatch.setattr(torch_cuda, "build", lambda: "CUDA 13.0")
    monkeypatch.setenv("PACELINE_LIBCUDA", "/nowhere")
    assert gpus.judge_gpus(gpus.look_gpus()).status is Status.OK
    monkeypatch.setenv("PACELINE_LIBCUDA", fake_gpus.library())
    finding = gpus.judge_gpus(gpus.look_gpus())
    assert finding.status is Status.PROBLEM
    assert "torch sees none" in finding.found


def test_without_gpus_nothing_is_opened(monkeypatch):
    monkeypatch.setattr(_gpu.Machine, "why_unusable", lambda self: "none here")
    monkeypatch.delenv("PACELINE_LIBNCCL", raising=False)
    monkeypatch.setattr(_gpu, "open_device", None)
    assert gpus.look_gpus() == gpus.Gpus("none here")
    assert gpus.look_kernels() == gpus.Kernels()
    assert gpus.look_nccl() == gpus.Nccl()
    assert gpus.look_gpu_links() == gpus.GpuLinks()
