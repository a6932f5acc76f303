"""What holds round a call holds inside it: grad mode, autocast, training, weights."""

import contextlib
import contextvars

import pytest
import torch
from replicas import Twin, alike, integer_weights, integers, loss_of, net
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

TINY = torch.full((1,), 1e-310, dtype=torch.float64)  # a denormal number


class Weather(nn.Module):
    """Says what it sees round itself."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))
        self.child = nn.Sequential(nn.Dropout(0.0), nn.Identity())
        self.options = {"power": 1}
        self.table = torch.ones(2)

    def forward(self, x):
        out = self.linear(x)
        seen = {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "inference weights": self.linear.weight.is_inference(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "autocast dtype": str(torch.get_autocast_dtype("cpu")),
            "cache": torch.is_autocast_cache_enabled(),
            "default dtype": str(torch.zeros(1).dtype),
            "default device": str(torch.get_default_device()),
            "device of new": str(torch.empty(1).device),
            "denormal": bool(TINY * 1),
            "anomaly": torch.is_anomaly_enabled(),
            "nans": torch.is_anomaly_check_nan_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "training": self.training,
            "child": self.child.training,
            "grandchild": self.child[0].training,
            "x needs grad": torch.is_grad_enabled() and x.requires_grad,
            "weight needs grad": self.linear.weight.requires_grad,
            "out needs grad": out.requires_grad,
            "parameters": tuple(n for n, _ in self.named_parameters()),
            "first": str(next(self.parameters()).dtype),
            "type": type(next(self.parameters())).__name__,
            "device": str(next(self.parameters()).device),
            "scale": getattr(self, "scale", None),
            "dropout": self.child[0].p,
            "power": self.options["power"],
            "table": float(self.table.sum()),
        }
        return out, seen, len(x)


def look(model, x=None):
    """Return what both replicas see."""
    out, seen, rows = model(integers(7, 3) if x is None else x)
    assert rows == [4, 3]
    return out, alike(seen)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def called(function, value, after):
    function(value)
    try:
        yield
    finally:
        function(after)


SURROUNDINGS = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled(False)": lambda: torch.set_grad_enabled(False),
    "set_grad_enabled(True)": lambda: torch.set_grad_enabled(True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", cache_enabled=False),
    "autocast switched off": lambda: torch.autocast("cpu", enabled=False),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": lambda: called(torch.use_deterministic_algorithms, True, False),
    "device cpu": lambda: torch.device("cpu"),
    "device meta": lambda: torch.device("meta"),
    "default device": lambda: called(torch.set_default_device, "cpu", None),
    "denormal": lambda: called(torch.set_flush_denormal, True, False),
    "anomaly": torch.autograd.detect_anomaly,
    "anomaly, not nan": lambda: torch.autograd.detect_anomaly(check_nan=False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("needs_grad", [False, True], ids=["data", "leaf"])
def test_what_holds_round_a_call_holds_inside(wrap, surrounding, needs_grad):
    twin = Twin(wrap, integer_weights(Weather(), dtype=torch.float32))
    x = integers(7, 3, dtype=torch.float32).requires_grad_(needs_grad)
    look(twin.ours, x)  # so that the next surrounding is another
    with surrounding():
        theirs, expected, _ = twin.plain(x)
        mine, seen = look(twin.ours, x)
    assert seen == expected
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)
    assert mine.requires_grad == theirs.requires_grad
    assert mine.is_inference() == theirs.is_inference()
    assert look(twin.ours, x)[1]["autocast"] is False


def test_modes_inside_each_other_arrive(wrap):
    ours = wrap(Weather())
    with torch.no_grad(), torch.enable_grad():
        assert look(ours)[1]["grad"] is True
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            assert look(ours)[1]["autocast"] is False
        seen = look(ours)[1]
    assert (seen["autocast"], seen["autocast dtype"]) == (True, "torch.bfloat16")
    with torch.device("meta"), torch.device("cpu"):
        assert look(ours)[1]["device of new"] == "cpu"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_leave_none(wrap, mode):
    twin = Twin(wrap, net())
    x = integers(7, 3).requires_grad_()
    with mode():
        out = twin.ours(x)
    assert not out.requires_grad
    assert torch.equal(out, twin.plain(x).detach())
    twin.step(lambda model, x: loss_of(model(x)), x)


class Precise(nn.Module):
    """Leaves autocast for its second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        integer_weights(self, dtype=torch.float32)

    def forward(self, x):
        low = self.first(x)
        with torch.autocast("cpu", enabled=False):
            high = self.second(low.float())
        return low, high


def test_autocast_gives_the_plain_dtypes_and_gradients(wrap):
    twin = Twin(wrap, Precise())

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            low, high = model(x)
        assert low.dtype == torch.bfloat16
        assert high.dtype == torch.float32
        return low.float().sum() + high.sum()

    x = integers(7, 3, dtype=torch.float32, low=-1, high=1).requires_grad_()
    for _ in range(3):  # casts of weights are cached: not for longer than they last
        twin.zero()
        twin.step(loss, x)
        for model in (twin.plain, twin.inner):
            _add(model)
    twin.zero()
    twin.step(lambda model, x: sum(out.sum() for out in model(x)), x)


# ---- the module's own state ---------------------------------------------------------


def test_parameters_are_there_inside_forward(wrap):
    seen = look(wrap(Weather()))[1]
    assert alike(seen["parameters"]) == ("linear.weight", "linear.bias")
    assert seen["first"] == "torch.float64"
    assert seen["type"] == "Parameter"
    assert seen["device"] == "cpu"


class FirstParameter(nn.Module):
    """Uses parameters as it finds them."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x):
        first = next(self.parameters())
        return x.to(first) @ first.T + sum(p.sum() for p in self.parameters())


def test_parameters_found_inside_forward_get_gradients(wrap):
    twin = Twin(wrap, FirstParameter())
    twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))


def test_training_and_evaluation_reach_every_submodule(wrap):
    ours = wrap(Weather())

    def modes():
        seen = look(ours)[1]
        return seen["training"], seen["child"], seen["grandchild"]

    assert modes() == (True, True, True)
    ours.eval()
    assert modes() == (False, False, False)
    ours.train()
    ours.module.child.eval()
    assert modes() == (True, False, False)
    ours.module.child[0].train()
    assert modes() == (True, False, True)
    ours.module.train(False)
    assert modes() == (False, False, False)
    ours.train()
    assert modes() == (True, True, True)


def test_parameters_may_be_frozen_and_thawed(wrap):
    twin = Twin(wrap, Weather())
    for is_trainable in (True, False, True):
        twin.zero()
        for model in (twin.plain, twin.inner):
            model.linear.weight.requires_grad_(is_trainable)
        twin.step(lambda model, x: loss_of(model(x)[0]), integers(7, 3))
        assert look(twin.ours)[1]["weight needs grad"] is is_trainable
        assert (twin.inner.linear.weight.grad is not None) is is_trainable
    for model in (twin.plain, twin.inner):
        model.requires_grad_(False)
    x = integers(7, 3)
    assert not twin.ours(x)[0].requires_grad
    twin.zero()
    twin.step(lambda model, x: loss_of(model(x)[0]), x.requires_grad_())


def _add(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)


class Counting(nn.Module):
    """Counts its calls by an attribute, and remembers its rows."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))
        self.calls = 0
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.last = x.detach().sum(1)
        return self.linear(x) * self.calls


def test_attributes_that_forward_sets_are_those_of_the_first_replica(wrap):
    twin = Twin(wrap, Counting())
    for step in range(4):
        twin.zero()
        x = integers(7, 3, seed=step)
        twin.step(lambda model, x: loss_of(model(x)), x)
        assert twin.inner.calls == step + 1
        assert torch.equal(twin.inner.last, x[:4].sum(1))


# ---- context variables, and modes that see operations -------------------------------


def test_context_variables_reach_every_replica(wrap):
    variable = contextvars.ContextVar("variable", default=0)

    class Asks(nn.Module):
        def forward(self, x):
            return x + variable.get()

    ours, x = wrap(Asks()), integers(7, 3)
    for value in (3, 0):
        token = variable.set(value)
        for _ in range(2):
            assert torch.equal(ours(x), x + value)
        variable.reset(token)


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
def test_a_mode_sees_every_replica(wrap, mode):
    twin, x = Twin(wrap, Net()), integers(7, 3)
    twin.compare(lambda model, x: model(x), x)
    with mode() as seen:
        out = twin.ours(x)
    assert seen.calls == 2
    assert torch.equal(out, 2 * twin.plain(x))
    twin.step(lambda model, x: loss_of(model(x)), x)


def test_operations_of_all_replicas_are_counted(wrap):
    module, x = net(), integers(8, 3)
    model = wrap(module)
    with FlopCounterMode(display=False) as plain:
        module(x)
    with FlopCounterMode(display=False) as ours:
        model(x)
    assert ours.get_total_flops() == plain.get_total_flops() > 0
