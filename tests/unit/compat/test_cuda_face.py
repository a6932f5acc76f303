"""What a wrapper asks and says of GPUs, on a machine that a test makes up."""

import types

import pytest
import torch
import torch.distributed as dist
from paceline import MismatchError, PeerTimeoutError, _environment, _gpu
from paceline._compat import torch_cuda, torch_groups
from paceline._ddp import peers, placement
from paceline._ddp.model_spec import Model
from torch import nn

CPU, FIRST, SECOND = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


class TwoGpus(_gpu.Machine):
    def count(self):
        return 2

    def current(self):
        return 1

    def why_unusable(self):
        return ""


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setattr(_gpu, "machine", TwoGpus())


# ---- device_ids and output_device ---------------------------------------------------


@pytest.mark.parametrize(
    ("given", "output", "becomes"),
    [
        ([0], None, ([0], 0)),
        ((0,), 0, ([0], 0)),
        (["cuda:0"], "cuda:1", ([0], 1)),
        ([FIRST], FIRST, ([0], 0)),
        ([False], None, ([0], 0)),
        (None, None, (None, None)),
        ([], None, (None, None)),
        (None, 0, (None, None)),  # as in torch, which takes it for nothing
    ],
)
def test_one_device_is_kept_as_a_number_as_in_torch(given, output, becomes):
    assert placement.read_devices(given, output, [FIRST, FIRST]) == becomes


@pytest.mark.parametrize("given", ["cuda", torch.device("cuda"), None])
def test_a_device_without_a_number_is_the_current_one(given):
    assert placement.read_devices([given], None, [SECOND]) == ([1], 1)


@pytest.mark.parametrize("given", [[0, 1], ["cuda:0", "cuda:1"], "cuda:0"])
@pytest.mark.parametrize("place", [CPU, FIRST])
def test_several_devices_are_an_error_in_the_words_of_torch(given, place):
    with pytest.raises(
        ValueError, match="can only be None or contain a single element"
    ):
        placement.read_devices(given, None, [place])


@pytest.mark.parametrize(
    ("given", "output", "places"),
    [
        ([0], None, [CPU]),
        (["cuda:0"], None, [CPU]),
        (None, 1, [CPU]),
        (None, 1, [FIRST]),
        ([0], None, [FIRST, SECOND]),
    ],
)
def test_devices_for_a_module_that_is_elsewhere_are_refused_as_in_torch(
    given, output, places
):
    words = (
        r"device_ids and output_device arguments only work with .* but got device_ids "
        r".*, output_device .*, and module parameters \['c.*move the module to a GPU"
    )
    with pytest.raises(ValueError, match=words):
        placement.read_devices(given, output, places)


def test_the_refusal_says_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(_gpu, "machine", _gpu.Machine())
    monkeypatch.setattr(torch_cuda, "why_no_cuda", lambda: "torch sees no CUDA device")
    with pytest.raises(ValueError, match="on the CPU; torch sees no CUDA device"):
        placement.read_devices([0], None, [CPU])


def test_a_module_on_another_gpu_than_device_ids_says_is_named():
    words = r"device_ids is \[1\], but .* on cuda:0: .*module.to\('cuda:1'\).*\[0\]"
    with pytest.raises(ValueError, match=words):
        placement.read_devices([1], None, [FIRST])


@pytest.mark.parametrize("given", [2, -1, "cuda:7"])
@pytest.mark.parametrize("name", ["device_ids", "output_device"])
def test_a_gpu_that_is_not_there_is_out_of_range(given, name):
    ids, output = ([given], None) if name == "device_ids" else ([0], given)
    words = f"{name} is or has .*, and this process sees 2 CUDA devices"
    with pytest.raises(ValueError, match=words):
        placement.read_devices(ids, output, [FIRST])


@pytest.mark.parametrize("given", ["cpu", CPU])
def test_the_cpu_is_no_device_of_a_module_on_a_gpu(given):
    with pytest.raises(ValueError, match="Expected a non cpu device"):
        placement.read_devices([given], None, [FIRST])


@pytest.mark.parametrize("given", [["nowhere"], [1.5], [object()]])
def test_what_is_no_device_is_a_type_error_that_shows_it(given):
    with pytest.raises(TypeError, match=r"device_ids is or has .*, no device"):
        placement.read_devices(given, None, [FIRST])


def test_a_bare_number_in_place_of_a_list_is_a_type_error_that_shows_one():
    with pytest.raises(TypeError, match=r"device_ids is 0: give a list .*=\[0\]"):
        placement.read_devices(0, None, [FIRST])


# ---- the module ---------------------------------------------------------------------


def tensor(place, layout=torch.strided):
    return types.SimpleNamespace(
        device=place, layout=layout, requires_grad=True, dtype=torch.float32
    )


def model(*places, buffer=None):
    parameters = [(f"p{i}", tensor(place)) for i, place in enumerate(places)]
    buffers = [] if buffer is None else [("far", {"far": tensor(buffer)}, "far")]
    return Model(parameters, buffers)


def test_a_module_on_one_gpu_is_taken():
    model(FIRST, FIRST, buffer=FIRST).check()


def test_a_module_on_two_gpus_is_refused_with_what_to_do():
    words = r"'p1' is a .* on device cuda:1, and 'p0' is on cuda:0: .*to\('cuda:0'\)"
    with pytest.raises(NotImplementedError, match=words):
        model(FIRST, SECOND).check()


def test_a_module_on_the_cpu_and_a_gpu_is_refused_in_the_words_of_torch():
    with pytest.raises(ValueError, match=r"same type of devices.*\['cpu', 'cuda'\]"):
        model(FIRST, CPU).check()


def test_a_buffer_that_stayed_on_the_cpu_is_named():
    with pytest.raises(NotImplementedError, match=r"'far' .*cpu, and 'p0'.*to_ignore"):
        model(FIRST, buffer=CPU).check()


def test_sync_batch_norm_is_taken_on_a_gpu():
    net = nn.Sequential(nn.SyncBatchNorm(1))
    model(FIRST).check_supported(net)
    with pytest.raises(ValueError, match="only work with GPU modules"):
        model(CPU).check_supported(net)


@pytest.mark.parametrize(
    ("cuda", "hip", "is_there", "because"),
    [
        (None, None, False, "built without CUDA"),
        (None, "6.2", True, "built for ROCm"),
        ("13.0", None, False, "sees no CUDA device"),
        ("13.0", None, True, ""),
    ],
)
def test_a_torch_that_has_no_gpu_says_why(monkeypatch, cuda, hip, is_there, because):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    words = torch_cuda.why_no_cuda()
    assert because in words
    assert bool(words) == bool(because)


def test_a_gpu_that_cannot_be_used_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(TwoGpus, "why_unusable", lambda self: "there is no driver")
    with pytest.raises(
        NotImplementedError, match=r"cuda:0, and there is no driver.*in"
    ):
        placement.open_gpu(FIRST, is_alone=True)


def test_a_rank_that_is_alone_needs_neither_driver_nor_nccl():
    gpu, here = placement.open_gpu(SECOND, is_alone=True)
    assert (gpu.index, gpu.nccl, here.device) == (1, None, "cuda:1")


_ADDRESS = {"pci_domain_id": 0, "pci_bus_id": 0x41, "pci_device_id": 0}
_UUID = {"uuid": "1f-2e"}


@pytest.mark.parametrize(
    ("properties", "before_2_30", "since"),
    [
        (_ADDRESS | _UUID, "GPU on PCI bus 0000:41:00", "GPU 1f-2e"),
        (_ADDRESS, "GPU on PCI bus 0000:41:00", "GPU on PCI bus 0000:41:00"),
        (_UUID, "GPU 1f-2e", "GPU 1f-2e"),
        ({}, "", ""),
    ],
)
def test_a_gpu_is_told_from_others_as_nccl_does(
    monkeypatch, properties, before_2_30, since
):
    there = types.SimpleNamespace(**properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: there)
    machine = _gpu.Machine()
    assert machine.identity(0, 22907) == before_2_30
    assert machine.identity(0, 23003) == since


# ---- the ranks' places --------------------------------------------------------------


def placed(number, **named):
    given = {"gpu": f"GPU {number}", "nccl_version": 22809, "nccl_host": "here"}
    return placement.Placement(f"cuda:{number}", **{**given, **named})


def test_ranks_on_gpus_of_their_own_are_no_conflict():
    placement.raise_conflict([placed(0), placed(1), placed(0, nccl_host="there")])
    placement.raise_conflict([placement.Placement(), placement.Placement()])
    placement.raise_conflict(
        [placed(0, gpu=""), placed(0, gpu="")]
    )  # torch cannot tell


def test_two_ranks_on_one_gpu_are_named_with_it():
    words = r"ranks 1 and 2 are both on GPU 1 \(cuda:1 and cuda:1\).*NCCL_HOSTID"
    with pytest.raises(ValueError, match=words):
        placement.raise_conflict([placed(0), placed(1), placed(1)])


@pytest.mark.parametrize("version", [22809, 23003])
def test_nccl_can_be_told_to_take_two_ranks_on_one_gpu(version):
    placements = [placed(0, shares=True, nccl_version=version) for _ in range(2)]
    if version < 23003:  # it does not know the variable yet
        with pytest.raises(ValueError, match="Duplicate GPU"):
            placement.raise_conflict(placements)
    else:
        placement.raise_conflict(placements)


def test_a_rank_that_stayed_on_the_cpu_is_named():
    with pytest.raises(MismatchError, match="0's module is on cuda:0, rank 1's on cpu"):
        placement.raise_conflict([placed(0), placement.Placement()])


def test_versions_of_nccl_that_differ_are_named():
    with pytest.raises(MismatchError, match=r"NCCL 2\.28\.9, rank 1 has 2\.27\.5"):
        placement.raise_conflict([placed(0), placed(1, nccl_version=22705)])


def test_nccl_takes_hosts_apart_by_name_and_boot_or_by_what_it_is_told(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    own = _environment.nccl_host()
    assert own.count("/") == 1
    monkeypatch.setenv("NCCL_HOSTID", "second")
    assert _environment.nccl_host() == "second"


# ---- words by the store -------------------------------------------------------------


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self):
        self.now, self.n_sleeps = 0.0, 0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.n_sleeps += 1


def test_a_rank_that_is_long_in_coming_finds_a_store_that_is_not_busy(monkeypatch):
    store, clock = dist.HashStore(), Clock()
    monkeypatch.setattr(torch_groups, "group_store", lambda group: store)
    monkeypatch.setattr(torch_groups, "group_name", lambda group: "of two")
    monkeypatch.setattr(peers, "time", clock)
    ranks = peers.Peers(None, 0, 2)
    with pytest.raises(PeerTimeoutError, match=r"\[1\] have not come .* 60 s"):
        ranks.all_gather(b"here", 60.0)
    assert 60 < clock.now < 61
    assert clock.n_sleeps < 1000


# ---- libraries ----------------------------------------------------------------------


@pytest.fixture
def wheels(monkeypatch, tmp_path):
    """Return a function that puts files where torch's wheels have libraries."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def put(*files):
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        folders = [tmp_path / "torch/lib", *sorted(tmp_path.glob("nvidia/*/lib"))]
        monkeypatch.setattr(torch_cuda, "library_folders", lambda: folders)
        return tmp_path

    return put


def test_a_library_is_found_where_the_wheels_of_torch_have_it(wheels):
    root = wheels(
        "nvidia/nccl/lib/libnccl.so.2",
        "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.8",
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    )
    assert _gpu.find_library("nccl") == f"{root}/nvidia/nccl/lib/libnccl.so.2"
    assert _gpu.find_library("nvrtc") == f"{root}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"


def test_of_two_versions_that_of_torchs_cuda_is_taken(wheels):
    root = wheels("nvidia/cu13/lib/libnvrtc.so.13", "torch/lib/libnvrtc-b5.so.12")
    assert _gpu.find_library("nvrtc") == f"{root}/torch/lib/libnvrtc-b5.so.12"


def test_a_library_that_no_wheel_has_is_left_to_the_loader(wheels):
    wheels("torch/lib/libtorch.so")
    assert _gpu.find_library("nccl") is None


def test_torch_is_searched_before_the_wheels_beside_it(monkeypatch, tmp_path):
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch_cuda.library_folders.cache_clear()
    folders = torch_cuda.library_folders()
    torch_cuda.library_folders.cache_clear()
    assert folders[0].parts[-2:] == ("torch", "lib")
    assert tmp_path / "nvidia/nccl/lib" in folders
