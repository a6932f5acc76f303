"""A wrapper's choices and errors about GPUs, on machines that a test makes up."""

import contextlib
import types

import pytest
import torch
import torch.distributed as dist
from paceline import MismatchError, PeerTimeoutError, _environment, _gpu, _waiting
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
        (None, 0, (None, None)),  # torch ignores it too
    ],
)
def test_one_device_is_kept_as_a_number_as_in_torch(given, output, becomes):
    assert placement.read_devices(given, output, [FIRST, FIRST]) == becomes


@pytest.mark.parametrize("given", ["cuda", torch.device("cuda"), None])
def test_a_device_without_a_number_is_the_current_one(given):
    assert placement.read_devices([given], None, [SECOND]) == ([1], 1)


SEVERAL = "can only be None or contain a single element"
ELSEWHERE = (
    r"device_ids and output_device arguments only work with .* but got device_ids "
    r".*, output_device .*, and module parameters \['c.*move the module to a GPU"
)
OUT_OF_RANGE = "is or has .*, and this process sees 2 CUDA devices"
ANOTHER = r"device_ids is \[1\], but .* on cuda:0: .*module.to\('cuda:1'\).*\[0\]"
NO_CPU = "Expected a non cpu device"
NO_DEVICE = r"device_ids is or has .*, no device"
BARE = r"device_ids is 0: give a list .*=\[0\]"
REFUSED = [  # device_ids, output_device, the module's devices, the message
    *[(ids, None, [CPU], SEVERAL) for ids in ([0, 1], ["cuda:0", "cuda:1"], "cuda:0")],
    *[(ids, None, [FIRST], SEVERAL) for ids in ([0, 1], ["cuda:0", "cuda:1"])],
    *[(ids, None, [CPU], ELSEWHERE) for ids in ([0], ["cuda:0"])],
    (None, 1, [CPU], ELSEWHERE),
    (None, 1, [FIRST], ELSEWHERE),
    ([0], None, [FIRST, SECOND], ELSEWHERE),
    ([1], None, [FIRST], ANOTHER),
    *[([i], None, [FIRST], f"device_ids {OUT_OF_RANGE}") for i in (2, -1, "cuda:7")],
    *[([0], i, [FIRST], f"output_device {OUT_OF_RANGE}") for i in (2, -1, "cuda:7")],
    *[([cpu], None, [FIRST], NO_CPU) for cpu in ("cpu", CPU)],
    *[([odd], None, [FIRST], NO_DEVICE) for odd in ("nowhere", 1.5, object())],
    (0, None, [FIRST], BARE),
]


@pytest.mark.parametrize(("given", "output", "places", "words"), REFUSED)
def test_devices_that_do_not_fit_are_refused_in_the_words_of_torch(
    given, output, places, words
):
    kind = TypeError if words in (NO_DEVICE, BARE) else ValueError
    with pytest.raises(kind, match=words):
        placement.read_devices(given, output, places)


def test_the_refusal_says_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(_gpu, "machine", _gpu.Machine())
    monkeypatch.setattr(torch_cuda, "why_no_cuda", lambda: "torch sees no CUDA device")
    with pytest.raises(ValueError, match="on the CPU; torch sees no CUDA device"):
        placement.read_devices([0], None, [CPU])


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


@pytest.mark.parametrize(
    ("made", "kind", "words"),
    [
        (
            model(FIRST, SECOND),
            NotImplementedError,
            r"'p1' is a .* on device cuda:1, and 'p0' is on cuda:0: .*to\('cuda:0'\)",
        ),
        (model(FIRST, CPU), ValueError, r"same type of devices.*\['cpu', 'cuda'\]"),
        (
            model(FIRST, buffer=CPU),
            NotImplementedError,
            r"'far' .*cpu, and 'p0'.*to_ignore",
        ),
    ],
    ids=["two GPUs", "the CPU and a GPU", "a buffer that stayed on the CPU"],
)
def test_a_module_in_several_places_is_refused_with_what_to_do(made, kind, words):
    def check():
        made.check()
        made.check_travelling(has_peers=True)

    with pytest.raises(kind, match=words):
        check()


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
    words = r"cuda:0, and there is no driver.*in"
    with pytest.raises(NotImplementedError, match=words):
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


# ---- placement of ranks -------------------------------------------------------------


def placed(number, **named):
    given = {"gpu": f"GPU {number}", "nccl_version": 22809, "nccl_host": "here"}
    return placement.Placement(f"cuda:{number}", **{**given, **named})


TWICE = r"ranks 1 and 2 are both on GPU 1 \(cuda:1 and cuda:1\).*NCCL_HOSTID"
CPU_RANK = placement.Placement()


@pytest.mark.parametrize(
    ("placements", "kind", "words"),
    [
        ([placed(0), placed(1), placed(0, nccl_host="there")], None, ""),
        ([CPU_RANK, CPU_RANK], None, ""),
        ([placed(0, gpu=""), placed(0, gpu="")], None, ""),  # torch has no identity
        ([placed(0), placed(1), placed(1)], ValueError, TWICE),
        (
            [placed(0), CPU_RANK],
            MismatchError,
            "0's module is on cuda:0, rank 1's on c",
        ),
        (
            [placed(0), placed(1, nccl_version=22705)],
            MismatchError,
            r"NCCL 2\.28\.9, rank 1 has 2\.27\.5",
        ),
    ],
)
def test_ranks_on_gpus_of_their_own_are_no_conflict_and_others_are_named(
    placements, kind, words
):
    raises = pytest.raises(kind, match=words) if kind else contextlib.nullcontext()
    with raises:
        placement.raise_conflict(placements)


@pytest.mark.parametrize("version", [22809, 23003])
def test_nccl_can_be_told_to_take_two_ranks_on_one_gpu(version):
    placements = [placed(0, shares=True, nccl_version=version) for _ in range(2)]
    if version < 23003:  # older versions do not read the variable
        with pytest.raises(ValueError, match="Duplicate GPU"):
            placement.raise_conflict(placements)
    else:
        placement.raise_conflict(placements)


def test_nccl_takes_hosts_apart_by_name_and_boot_or_by_what_it_is_told(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    own = _environment.nccl_host()
    assert own.count("/") == 1
    monkeypatch.setenv("NCCL_HOSTID", "second")
    assert _environment.nccl_host() == "second"


# ---- messages over the store --------------------------------------------------------


class Clock:
    """A clock that advances only in sleeps."""

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
    for module in (peers, _waiting):
        monkeypatch.setattr(module, "time", clock)
    ranks = peers.Peers(None, 0, 2)
    with pytest.raises(PeerTimeoutError, match=r"\[1\] have not come .* 60 s"):
        ranks.all_gather(b"here", 60.0)
    assert 60 < clock.now < 61
    assert clock.n_sleeps < 1000


# ---- libraries ----------------------------------------------------------------------


@pytest.fixture
def wheels(monkeypatch, tmp_path):
    """Return a function that makes files where torch's wheels have libraries."""
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


NVRTC = "nvidia/cuda_nvrtc/lib/libnvrtc"


@pytest.mark.parametrize(
    ("name", "files", "found"),
    [
        ("nccl", ["nvidia/nccl/lib/libnccl.so.2"], "nvidia/nccl/lib/libnccl.so.2"),
        ("nvrtc", [f"{NVRTC}-builtins.so.12.8", f"{NVRTC}.so.12"], f"{NVRTC}.so.12"),
        (  # of two versions, the one of torch's CUDA
            "nvrtc",
            ["nvidia/cu13/lib/libnvrtc.so.13", "torch/lib/libnvrtc-b5.so.12"],
            "torch/lib/libnvrtc-b5.so.12",
        ),
        ("nccl", ["torch/lib/libtorch.so"], None),  # the loader finds it
    ],
)
def test_a_library_is_found_where_the_wheels_of_torch_have_it(
    wheels, name, files, found
):
    root = wheels(*files)
    assert _gpu.find_library(name) == (found and f"{root}/{found}")


def test_torch_is_searched_before_the_wheels_beside_it(monkeypatch, tmp_path):
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch_cuda.library_folders.cache_clear()
    folders = torch_cuda.library_folders()
    torch_cuda.library_folders.cache_clear()
    assert folders[0].parts[-2:] == ("torch", "lib")
    assert tmp_path / "nvidia/nccl/lib" in folders


# ---- memory for gradients -----------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("dims", [(), (0, 3, 3, 1), (2, 1, 3, 2)])
def test_a_view_of_memory_has_the_dtype_sizes_and_strides(dtype, dims):
    memory = torch.zeros(1024, dtype=torch.uint8)
    with torch.inference_mode():
        view = torch_cuda.view_of(memory, 512, dtype, *dims)
    assert view.storage_offset() * view.itemsize == 512
    assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert (view.dtype, view.shape) == (getattr(torch, dtype), dims[::2])
    assert view.stride() == dims[1::2]
    view.fill_(1)
    assert (view._version, memory._version) == (1, 0)
    assert not view.is_inference()


def test_the_default_stream_is_recorded_by_torchs_own_object(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "default_stream", lambda device: ("default", device)
    )
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *given: given)
    recorded = []
    memory = types.SimpleNamespace(device=FIRST, record_stream=recorded.append)
    torch_cuda.record_stream(memory, 0)
    torch_cuda.record_stream(memory, 71)
    assert recorded == [("default", FIRST), (71, FIRST)]
