"""A call keeps the caller's state: grad mode, autocast, training, weights."""

import contextlib
import contextvars

import pytest
import torch
from paceline._compat import torch_core
from programs import X, module
from replicas import (
    ON_EACH,
    Twin,
    alike,
    grow,
    integer_weights,
    integers,
    linear,
    moved,
    step,
)
from support import devices
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TINY = torch.full((1,), 1e-310, dtype=torch.float64)  # a denormal number


class Weather(nn.Module):
    """Returns the state that it sees."""

    def __init__(self):
        super().__init__()
        self.linear = linear(2)
        self.child = nn.Sequential(nn.Dropout(0.0), nn.Identity())

    def forward(self, x):
        out, weight = self.linear(x), next(self.parameters())
        seen = {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "inference weights": weight.is_inference(),
            "autocast": torch.is_autocast_enabled(x.device.type),
            "autocast dtype": str(torch.get_autocast_dtype(x.device.type)),
            "cache": torch.is_autocast_cache_enabled(),
            "default dtype": str(torch.zeros(1).dtype),
            "default device": str(torch.get_default_device()),
            "device of new": str(torch.empty(1).device),
            "denormal": bool(TINY * 1),
            "anomaly": torch.is_anomaly_enabled(),
            "nans": torch.is_anomaly_check_nan_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "training": tuple(m.training for m in (self, self.child, self.child[0])),
            "x needs grad": torch.is_grad_enabled() and x.requires_grad,
            "needs grad": (weight.requires_grad, out.requires_grad),
            "names": tuple(n for n, _ in self.named_parameters()),
            "first": (type(weight), weight.dtype),
        }
        return out, seen, len(x)


def look(model, x=X):
    """Return what both replicas see."""
    out, seen, rows = model(x)
    assert rows == [4, 3]
    return out, alike(seen)


def autocast(*args, **options):
    """Return the autocast of the present devices."""
    kind = devices.KIND if devices.native.visible else "cpu"
    return torch.autocast(kind, *args, **options)


@contextlib.contextmanager
def called(function, value, after):
    function(value)
    try:
        yield
    finally:
        function(after)


@contextlib.contextmanager
def default_device():
    with called(torch.set_default_device, "cpu", None):
        yield
    vars(torch._GLOBAL_DEVICE_CONTEXT).clear()  # torch 2.8 does not read the None


SURROUNDINGS = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled(False)": lambda: torch.set_grad_enabled(False),
    "set_grad_enabled(True)": lambda: torch.set_grad_enabled(True),
    "autocast": lambda: autocast(torch.bfloat16),
    "autocast to half": lambda: autocast(torch.float16),
    "autocast without cache": lambda: autocast(cache_enabled=False),
    "autocast switched off": lambda: autocast(enabled=False),
    "default dtype": lambda: called(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
    "deterministic": lambda: called(torch.use_deterministic_algorithms, True, False),
    "device cpu": lambda: torch.device("cpu"),
    "device meta": lambda: torch.device("meta"),
    "default device": default_device,
    "denormal": lambda: called(torch.set_flush_denormal, True, False),
    "anomaly": torch.autograd.detect_anomaly,
    "anomaly, not nan": lambda: torch.autograd.detect_anomaly(check_nan=False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
@ON_EACH
def test_what_holds_round_a_call_holds_inside(wrap, surrounding):
    twin = Twin(wrap, integer_weights(Weather(), dtype=torch.float32))
    x = integers(7, 3, dtype=torch.float32).requires_grad_()
    plain = moved(twin.plain, wrap.device())
    look(twin.ours, x)  # so that the next surroundings differ
    with surrounding():
        theirs, expected, _ = plain(x.to(wrap.device()))
        mine, seen = look(twin.ours, x)
    assert seen == expected
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)
    assert mine.requires_grad == theirs.requires_grad
    assert mine.is_inference() == theirs.is_inference()
    assert look(twin.ours, x)[1]["autocast"] is False


def precise(m, x):
    """Leave autocast for the second layer."""
    low = m.first(x)
    with torch.autocast(x.device.type, enabled=False):
        high = m.second(low.float())
    return low, high


@pytest.mark.skipif(
    torch_core.version() < (2, 13),
    reason="before, autocast kept a cast of no_grad for what needs a gradient",
)
@ON_EACH
def test_autocast_gives_the_plain_dtypes_and_gradients(wrap):
    layers = {"first": linear(4).float(), "second": linear(2, 4).float()}
    twin = Twin(wrap, module(precise, **layers))

    def loss(model, x):
        kind = next(model.parameters()).device.type
        with torch.autocast(kind, torch.bfloat16):
            with torch.no_grad():
                model(x)
            low, high = model(x)
        assert (low.dtype, high.dtype) == (torch.bfloat16, torch.float32)
        return low.float().sum() + high.sum()

    x = integers(7, 3, dtype=torch.float32, low=-1, high=1).requires_grad_()
    for _ in range(3):  # cached casts of weights live no longer than the weights
        twin.zero()
        twin.step(loss, x)
        for model in (twin.plain, twin.inner):
            grow(model)
    twin.zero()
    twin.step(lambda model, x: sum(out.sum() for out in model(x)), x)


# ---- context variables, and modes that see operations -------------------------------


@ON_EACH
def test_context_variables_reach_every_replica(wrap):
    variable = contextvars.ContextVar("variable", default=0)
    ours = wrap(module(lambda m, x: x + variable.get()))
    for value in (3, 3, 0):
        token = variable.set(value)
        assert torch.equal(ours(X).cpu(), X + value)
        variable.reset(token)


class Doubles(TorchFunctionMode):
    """Doubles what relu returns, and counts its calls."""

    calls = 0
    relu = torch.relu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function != self.relu:
            return out
        self.calls += 1
        return 2 * out


class DoublesBelow(TorchDispatchMode):
    """Does the same, below autograd."""

    calls = 0
    relu = torch.ops.aten.relu.default
    __torch_dispatch__ = Doubles.__torch_function__


@pytest.mark.parametrize("mode", [Doubles, DoublesBelow])
@ON_EACH
def test_a_mode_sees_every_replica(wrap, mode):
    twin = Twin(wrap, module(lambda m, x: torch.relu(m.linear(x)), linear=linear(2)))
    twin.step(step, X)
    with mode() as seen:
        out = twin.ours(X)
    assert seen.calls == 2
    assert torch.equal(out.cpu(), 2 * twin.plain(X))
    twin.step(step, X)
