"""Settings of torch round a call: each replica computes under them, and not after."""

import contextlib

import paceline
import pytest
import torch
from paceline._replicas.errors import UnsupportedCallError
from replicas import Twin, integer_weights, integers, loss_of, net
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

cuda, mkldnn, einsum = (
    torch.backends.cuda,
    torch.backends.mkldnn,
    torch.backends.opt_einsum,
)


def _word(ask):
    try:
        return str(ask())
    except RuntimeError as error:  # who mixes torch's old settings and new ones
        return str(error)[:40]


def _precision(backend, operation):
    ask = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: "none")
    return ask(backend, operation)


def _tiny(factor):
    return factor * torch.full((1,), 1e-310, dtype=torch.float64, device="cpu")


ASKED = {
    "determinism": torch.are_deterministic_algorithms_enabled,
    "only warns": torch.is_deterministic_algorithms_warn_only_enabled,
    "fills": lambda: torch.utils.deterministic.fill_uninitialized_memory,
    "matmul": torch.get_float32_matmul_precision,
    "mkldnn": lambda: mkldnn.enabled,
    "einsum": lambda: (einsum.enabled, einsum.strategy),
    "flash": cuda.flash_sdp_enabled,
    "math": cuda.math_sdp_enabled,
    "efficient": cuda.mem_efficient_sdp_enabled,
    "device": torch.get_default_device,
    "of empty": lambda: torch.empty(1).device,
    "of module": lambda: nn.Linear(1, 1).weight.device,
    "dtype": torch.get_default_dtype,
    "denormal": lambda: _tiny(1).tolist(),
    "anomaly": torch.is_anomaly_enabled,
    "nans": torch.is_anomaly_check_nan_enabled,
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
    "float32": lambda: _precision("generic", "all"),
    "float32 of mkldnn": lambda: _precision("mkldnn", "matmul"),
    "engine": lambda: torch.backends.quantized.engine,
}


class World(nn.Module):
    """Says what it is asked; a list would mean that replicas differ."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2), dtype=torch.float32)

    def forward(self, x):
        seen = {name: _word(ask) for name, ask in ASKED.items()}
        return torch.relu(self.linear(x)), seen


@contextlib.contextmanager
def set_to(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def called(function, value, after):
    function(value)
    try:
        yield
    finally:
        function(after)


@contextlib.contextmanager
def deterministic(warn_only, fills=True):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with set_to(torch.utils.deterministic, "fill_uninitialized_memory", fills):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def precision_of(owner, word):
    if not hasattr(owner, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    with set_to(owner, "fp32_precision", word):
        yield


def only_math():
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


SURROUNDINGS = {
    "deterministic": lambda: deterministic(False),
    "deterministic, warns": lambda: deterministic(True),
    "deterministic, unfilled": lambda: deterministic(False, False),
    "matmul": lambda: called(torch.set_float32_matmul_precision, "high", "highest"),
    "mkldnn": lambda: set_to(mkldnn, "enabled", False),
    "mkldnn.flags": lambda: mkldnn.flags(enabled=False),
    "mkldnn precision": lambda: precision_of(mkldnn, "bf16"),
    "precision": lambda: precision_of(torch.backends, "ieee"),
    "sdpa_kernel": only_math,
    "flash": lambda: called(cuda.enable_flash_sdp, False, True),
    "device cpu": lambda: torch.device("cpu"),
    "device meta": lambda: torch.device("meta"),
    "default device cpu": lambda: called(torch.set_default_device, "cpu", None),
    "dtype": lambda: called(torch.set_default_dtype, torch.float64, torch.float32),
    "denormal": lambda: called(torch.set_flush_denormal, True, False),
    "anomaly": torch.autograd.detect_anomaly,
    "anomaly, not nan": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
if einsum.is_available():
    SURROUNDINGS["einsum"] = lambda: set_to(einsum, "enabled", False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_settings_round_a_call_hold_in_every_replica_and_end_with_it(wrap):
    model = wrap(World())
    x = integers(7, 3, dtype=torch.float32)
    for name, surrounding in SURROUNDINGS.items():
        before = model.module(x)[1]
        assert model(x)[1] == before, name
        with surrounding():
            theirs, expected = model.module(x)
            mine, seen = model(x)
        assert seen == expected, name
        assert expected != before or "cpu" in name, name
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name
    assert model(x)[1] == model.module(x)[1]


def test_settings_inside_each_other_hold_in_every_replica(wrap):
    model = wrap(World())
    x = integers(7, 3, dtype=torch.float32)
    with torch.device("meta"), torch.device("cpu"), only_math():
        expected = model.module(x)[1]
        assert model(x)[1] == expected
    with torch.autocast("cpu", torch.bfloat16), deterministic(True):
        assert model(x)[1] == model.module(x)[1]


# ---- what sees the operations of one process ----------------------------------------


class Doubles(TorchFunctionMode):
    """Doubles what relu returns, and counts its calls."""

    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.relu:
            self.calls += 1
            out = 2 * out
        return out


class DoublesBelow(TorchDispatchMode):
    """The same, below autograd."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.relu.default:
            self.calls += 1
            out = 2 * out
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x):
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("mode", [Doubles, DoublesBelow])
@pytest.mark.parametrize("engine", ["auto", "thread", "process"])
@pytest.mark.usefixtures("idle_workers")
def test_a_mode_sees_every_replica_or_its_call_is_refused(mode, engine):
    module, x = Net(), integers(7, 3)
    with paceline.DataParallel(module, ["cpu"] * 2, engine=engine) as model:
        expected = module(x)
        assert torch.equal(model(x), expected)
        with mode() as seen:
            if engine == "process":
                with pytest.raises(UnsupportedCallError, match="sees the operations"):
                    model(x)
            else:
                out = model(x)
                assert seen.calls == 2
        if engine != "process":
            assert torch.equal(out, 2 * expected)
        assert model.engine == ("thread" if engine == "thread" else "process")
        loss_of(model(x)).backward()
        plain = Net()
        loss_of(plain(x)).backward()
        assert torch.equal(module.linear.weight.grad, plain.linear.weight.grad)


def test_operations_of_all_replicas_are_counted():
    module, x = net(), integers(8, 3)
    with FlopCounterMode(display=False) as plain:
        module(x)
    with paceline.DataParallel(module, ["cpu"] * 2) as model:
        with FlopCounterMode(display=False) as ours:
            model(x)
        assert ours.get_total_flops() == plain.get_total_flops() > 0


def test_graphs_from_before_a_call_by_threads_can_be_run_backward(wrap):
    twin = Twin(wrap, net())
    losses = [loss_of(model(integers(7, 3))) for model in twin.models]
    with contextlib.suppress(UnsupportedCallError), Doubles():
        twin.ours(integers(7, 3))
    later = [loss_of(model(integers(7, 3, seed=1))) for model in twin.models]
    for loss in losses + later:
        loss.backward()
    twin.assert_same()
