"""The interface of DataParallel: arguments, attributes, methods, state, messages."""

import collections
import copy
import inspect
import types

import paceline
import pytest
import torch
from paceline import DataParallel, _environment, _gpu
from paceline._compat import torch_core
from paceline._dp import marker, transfers
from torch import nn

CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]
torch_core.attach()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.last(self.norm(self.first(x))) * scale


class Same(nn.Module):
    """Returns its arguments."""

    def forward(self, *args, **kwargs):
        return (args, kwargs) if kwargs else args


class Notes(nn.Module):
    """Notes the number of rows of each call."""

    def __init__(self):
        super().__init__()
        self.n_rows = []

    def forward(self, x):
        self.n_rows.append(len(x))
        return x


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv(_environment.CPU_REPLICAS, raising=False)


# ---- arguments ----------------------------------------------------------------------


def parameters_of(function):
    found = inspect.signature(function).parameters
    return {name: (p.kind, p.default) for name, p in found.items()}


def test_the_signature_is_that_of_torch():
    ours, theirs = map(parameters_of, (DataParallel, nn.DataParallel))
    assert list(ours.items()) == list(theirs.items())
    for name in ("engine", "engine_reason", "refresh", "close", "__enter__"):
        assert not hasattr(DataParallel, name)


def test_methods_have_the_signatures_of_torch():
    for name in ("scatter", "replicate", "parallel_apply", "gather"):
        ours, theirs = (getattr(kind, name) for kind in (DataParallel, nn.DataParallel))
        assert [*parameters_of(ours)] == [*parameters_of(theirs)]
    assert parameters_of(paceline.data_parallel) == parameters_of(
        nn.parallel.data_parallel
    )


def test_attributes_are_those_of_torch():
    module = nn.Linear(1, 1)
    wrapper = DataParallel(module, TWO, dim=1)
    assert isinstance(wrapper, nn.DataParallel)
    assert wrapper.module is module
    assert wrapper.device_ids == [CPU, CPU]
    assert (wrapper.output_device, wrapper.src_device_obj) == (CPU, CPU)
    assert wrapper.dim == 1


@pytest.mark.parametrize(
    "device_ids", [["cpu", "cpu:0"], (CPU, "cpu"), [CPU] * 2, iter(["cpu", "cpu"])]
)
def test_devices_may_be_given_in_any_form(device_ids):
    assert DataParallel(nn.Linear(1, 1), device_ids).device_ids == [CPU, CPU]


def test_the_environment_gives_the_number_of_replicas(monkeypatch):
    monkeypatch.setenv(_environment.CPU_REPLICAS, "3")
    assert DataParallel(nn.Linear(1, 1)).device_ids == [0, 1, 2]
    assert DataParallel(nn.Linear(1, 1), TWO).device_ids == [CPU] * 2
    monkeypatch.setenv(_environment.CPU_REPLICAS, "1")
    assert DataParallel(nn.Linear(1, 1)).device_ids == []


@pytest.mark.parametrize("word", ["0", "-1", "two", "1.5"])
def test_a_bad_number_in_the_environment_is_an_error(monkeypatch, word):
    monkeypatch.setenv(_environment.CPU_REPLICAS, word)
    with pytest.raises(ValueError, match=f"PACELINE_CPU_REPLICAS is '{word}'"):
        DataParallel(nn.Linear(1, 1))


LAYER = nn.Linear(1, 1)
NO_MODULE = TypeError, r"give a torch\.nn\.Module|give an object"
BAD = [
    *(((module,), *NO_MODULE) for module in (None, 3, nn.Linear, [LAYER])),
    *(((LAYER, TWO, None, d), TypeError, "dim is") for d in (None, "0", 1.0, True)),
    *(((LAYER, i), TypeError, "device") for i in ("cpu", 2, CPU, [None], ["gpus"])),
    ((LAYER, [1.5]), TypeError, "device"),
    ((LAYER, ["cpu", 0]), ValueError, "give the CPU only, or GPUs only"),
    ((LAYER, TWO, 0), ValueError, "output_device is 0"),
]


@pytest.mark.parametrize(("given", "kind", "words"), BAD)
def test_a_bad_argument_is_named(given, kind, words):
    with pytest.raises(kind, match=words):
        DataParallel(*given)


def test_gpus_are_refused_where_there_are_some(monkeypatch):
    monkeypatch.setattr(torch_core, "has_accelerator", lambda: True)
    monkeypatch.setattr(_gpu.machine, "why_unusable", lambda: "torch is for others")
    with pytest.raises(NotImplementedError, match=r"\[0, 1\], and torch is for others"):
        DataParallel(nn.Linear(1, 1), [0, 1])


@pytest.mark.parametrize("device", ["cpu", CPU, -1, None])
def test_the_cpu_may_be_the_output_device(device):
    assert DataParallel(nn.Linear(1, 1), TWO, device).output_device == CPU


class Elsewhere(nn.Linear):
    """A module that seems to be on a GPU."""

    def named_parameters(self, *args, **kwargs):
        fake = collections.namedtuple("Fake", "device")(torch.device("cuda", 0))
        return iter([("weight", fake)])


def test_a_module_on_a_gpu_is_refused():
    with pytest.raises(NotImplementedError, match="'weight' is on device cuda:0"):
        DataParallel(Elsewhere(1, 1))


def test_moving_the_wrapper_to_a_gpu_is_refused_rather_than_run_alone():
    wrapper = DataParallel(nn.Linear(1, 1))
    wrapper.double()
    wrapper.module.__class__ = Elsewhere
    with pytest.raises(NotImplementedError, match="move the module by"):
        wrapper.float()


def test_replicas_may_be_added_and_taken_away_later():
    wrapper, x = DataParallel(Notes(), ["cpu"]), torch.ones(2, 1)
    for device_ids, n_rows in (([CPU], [2]), ([CPU, CPU], [1, 1]), ([], [2])):
        wrapper.device_ids = device_ids
        wrapper.module.n_rows.clear()
        assert torch.equal(wrapper(x), x)
        assert wrapper.module.n_rows == n_rows


# ---- one replica is the module ------------------------------------------------------


@pytest.mark.parametrize("device_ids", [None, [], ["cpu"]])
def test_one_replica_gives_the_modules_own_object(device_ids):
    wrapper = DataParallel(Same(), device_ids)
    x, odd = torch.ones(2), object()
    args, kwargs = wrapper(x, [odd], flag=odd)
    assert args[0] is x
    assert args[1][0] is odd
    assert kwargs["flag"] is odd
    assert wrapper() == ()


def test_one_replica_trains_with_the_bits_of_the_plain_module():
    plain = Net()
    ends = []
    for model in (DataParallel(copy.deepcopy(plain)), plain):
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 3), scale=2.0).square().sum().backward()
            optimizer.step()
        ends.append([t.clone() for t in model.state_dict().values()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("device_ids", [None, ["cpu"]])
def test_marks_are_taken_off_for_one_replica(device_ids):
    wrapper = DataParallel(Same(), device_ids)
    x = torch.ones(2)
    marked = paceline.replicate(x)
    assert wrapper(marked)[0] is x
    assert wrapper({"a": [(1, marked)]})[0]["a"][0][1] is x
    assert wrapper(y=[marked])[1]["y"][0] is x


def test_what_the_module_raises_comes_through_one_replica_unchanged():
    class Bad(nn.Linear):
        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        DataParallel(Bad(1, 1))(torch.ones(1))
    assert caught.value.args == ("mine",)


def scattering(*given):
    """Return a subclass whose scatter returns this."""
    return type("Mine", (DataParallel,), {"scatter": lambda *_: given})


def test_a_scatter_of_ones_own_is_called_if_there_are_devices_as_in_torch():
    made = scattering((("scattered",),), ({"n": 1},))
    assert made(Same(), ["cpu"])(1) == (("scattered",), {"n": 1})
    assert made(Same())(1) == (1,)
    assert scattering((), ())(Same(), TWO)(1, 2) == ()
    with pytest.raises(ValueError, match="for 2 replicas, and keyword arguments for 1"):
        scattering(((1,), (2,)), ({},))(Same(), TWO)(1)


def test_profilers_see_the_forward_by_the_name_of_torch():
    wrapper = DataParallel(nn.Linear(1, 1))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        wrapper(torch.ones(1, 1))
    assert "DataParallel.forward" in {event.key for event in profile.key_averages()}


# ---- methods, called directly and overridden ----------------------------------------


def test_scatter_called_directly_gives_the_arguments_of_each_replica():
    wrapper = DataParallel(Same(), TWO)
    args, kwargs = wrapper.scatter((torch.arange(3), "a"), {"k": 1}, TWO)
    assert [a[0].tolist() for a in args] == [[0, 1], [2]]
    assert [a[1] for a in args] == ["a", "a"]
    assert kwargs == ({"k": 1}, {"k": 1})
    assert wrapper.scatter((), {}, TWO) == ((), ())
    args, kwargs = wrapper.scatter((torch.arange(3),), None, ["cpu"] * 5)
    assert [a[0].tolist() for a in args] == [[0], [1], [2]]


class Recording(DataParallel):
    """Overrides every method, and notes its arguments."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def scatter(self, inputs, kwargs, device_ids):
        self.calls.append(("scatter", device_ids))
        return super().scatter(inputs, kwargs, device_ids)

    def replicate(self, module, device_ids):
        self.calls.append(("replicate", device_ids))
        return super().replicate(module, device_ids)

    def parallel_apply(self, replicas, inputs, kwargs):
        self.calls.append(("parallel_apply", len(replicas), len(inputs), len(kwargs)))
        return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs, output_device):
        self.calls.append(("gather", len(outputs), output_device))
        return super().gather(outputs, output_device)


def test_overridden_methods_are_called_in_the_order_of_torch():
    wrapper = Recording(nn.Linear(1, 1), ["cpu"] * 3)
    x = torch.arange(2.0).reshape(2, 1)
    assert torch.equal(wrapper(x), wrapper.module(x))
    assert wrapper.calls == [
        ("scatter", [CPU] * 3),
        ("replicate", [CPU] * 2),
        ("parallel_apply", 2, 2, 2),
        ("gather", 2, CPU),
    ]


@pytest.mark.parametrize("n_rows", [1, 4])
def test_a_method_may_be_replaced_on_one_object(n_rows):
    wrapper = DataParallel(nn.Linear(1, 1), TWO)
    wrapper.gather = lambda outputs, output_device: len(outputs)
    assert wrapper(torch.ones(n_rows, 1)) == min(n_rows, 2)


def test_sizes_of_packed_outputs_stay_on_the_cpu():
    group = types.SimpleNamespace(member_of=lambda tensor, k: None, devices=[])
    streams = types.SimpleNamespace(group=group)
    joiner = transfers.Joiner(streams, torch.device("meta"))
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    brought, sizes = joiner.of_replica((packed, packed.batch_sizes), 0)
    assert type(brought) is type(packed)
    assert brought.data.is_meta
    assert brought.batch_sizes.is_cpu
    assert sizes.is_meta


# ---- replicate, data_parallel, check ------------------------------------------------


def test_marks_are_found_wherever_they_may_stand():
    mark = paceline.replicate(1)
    deep = circle = []
    for _ in range(5000):
        deep = [deep, deep]
    circle.append(deep)
    pair = collections.namedtuple("Pair", "a b")
    for value in (mark, [mark], (0, [mark]), {"a": (mark,)}, pair(deep, mark)):
        assert marker.has_mark(value)
    for value in (1, torch.ones(1), [1, "a", (None,)], {"a": {}}, object(), deep):
        assert not marker.has_mark(value)


@pytest.mark.parametrize("inputs", [torch.ones(3, 2), (torch.ones(3, 2),), None])
def test_the_function_takes_inputs_in_any_form(inputs):
    module, named = nn.Linear(2, 1), None
    if inputs is None:
        named = {"input": torch.ones(3, 2)}
    for devices in (TWO, None):
        output = paceline.data_parallel(module, inputs, devices, module_kwargs=named)
        assert torch.equal(output, module(torch.ones(3, 2)))


def test_data_parallel_without_inputs_calls_the_module_once():
    assert paceline.data_parallel(Same(), None, TWO) == ()
    assert paceline.data_parallel(Same(), (), TWO) == ()


def test_check_agrees_with_itself_on_a_model_of_rows():
    model = Net().eval()
    before = copy.deepcopy(model.state_dict())
    report = paceline.check(model, torch.randn(5, 3))
    assert report.ok
    assert report
    assert report.n_replicas == 2
    assert not hasattr(report, "engine")
    names = [row.name for row in report.rows]
    assert names[1:] == [f"grad {name}" for name, _ in model.named_parameters()]
    assert "\nall agree" in str(report)
    assert all(p.grad is None for p in model.parameters())
    assert all(
        torch.equal(mine, before[key]) for key, mine in model.state_dict().items()
    )


@torch.no_grad()
def test_check_leaves_the_batch_and_the_random_numbers_as_they_are():
    before = torch.get_rng_state()
    paceline.check(nn.Dropout(0.5), torch.ones(4, 3))
    assert torch.equal(before, torch.get_rng_state())
    encoder, x = nn.Linear(2, 2), torch.ones(4, 2)
    with torch.enable_grad():
        loss = (encoded := encoder(x)).sum()
    model = nn.Sequential(nn.Hardtanh(0, 0.1, inplace=True), nn.Linear(2, 1))
    report = paceline.check(model, encoded)
    assert report.ok
    assert float(report.rows[-1].plain) > 0
    assert torch.equal(encoded, encoder(x))
    loss.backward()
    assert encoder.bias.grad.tolist() == [4, 4]


class Sum(nn.Linear):
    """Its output does not depend on the batch size."""

    def forward(self, x):
        return super().forward(x).sum(0)


OTHERWISE = [
    (Net(), torch.arange(12.0).reshape(4, 3), "note: BatchNorm in training mode"),
    (
        nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)),  # of all rows, then again
        torch.ones(64, 9),
        "draws random numbers",
    ),
    (Sum(1, 1), torch.ones(4, 1), "[1] torch.float32"),
]


@pytest.mark.parametrize(("model", "x", "words"), OTHERWISE)
def test_check_shows_what_replicas_compute_otherwise(model, x, words):
    report = paceline.check(model, x)
    assert not report.ok
    assert "DIFFERS" in str(report)
    assert words in str(report)


def test_check_takes_arguments_and_losses_in_any_form():
    class Loss(nn.Linear):
        def forward(self, x, scale, *, mean):
            rows = super().forward(x).sum(1) * scale
            return {"loss": rows.mean() if mean else rows, "n": 3}

    model, x = Loss(2, 2).double(), torch.ones(4, 2).double()
    report = paceline.check(
        model,
        {"x": x, "scale": paceline.replicate(torch.tensor(2.0)), "mean": True},
    )
    assert report.ok
    assert "mean of replicas" in report.rows[0].name
    report = paceline.check(
        nn.Bilinear(2, 2, 1), (x.float(), x.float()), loss=torch.sum, replicas=3
    )
    assert report.ok


def test_check_refuses_a_number_of_replicas_below_one():
    with pytest.raises(ValueError, match="replicas is 0"):
        paceline.check(nn.Linear(1, 1), torch.ones(1, 1), replicas=0)


def test_check_unwraps_a_wrapper_first():
    assert paceline.check(DataParallel(nn.Linear(1, 1), TWO), torch.ones(4, 1)).ok
