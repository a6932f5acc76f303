"""Code that changes after wrapping: a notebook's cells, modules that are reloaded."""

import importlib
import sys

import paceline
import pytest
import torch
from replicas import Twin, integer_weights, integers, loss_of
from torch import nn

SCRIPT = """
import types
import torch
from torch import nn

SCALE = 2
LIST = [1, [2]]
TABLE = {"a": {"b": 3}}
OPTIONS = types.SimpleNamespace(shift=1)
TENSOR = torch.ones(2, dtype=torch.float64)


def inner(x):
    return x + OPTIONS.shift


def helper(x, factor=3):
    return inner(x) * factor


def marked(x):
    return x + marked.more


marked.more = 1


def make():
    held = 5

    def read():
        return held

    def write(value):
        nonlocal held
        held = value

    return read, write


READ, WRITE = make()


class Base(nn.Module):
    def bend(self, x):
        return x - 1


class Net(Base):
    POWER = 2

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.final = lambda x: x + SCALE

    def forward(self, x):
        x = self.bend(self.linear(x)) * SCALE + sum(LIST[1]) + TABLE["a"]["b"]
        x = helper(x) * self.POWER + TENSOR + READ() + LIST[0]
        return self.final(marked(x))
"""

CHANGES = {
    "a constant": "SCALE = 7",
    "a constant of another type": "SCALE = 2.5",
    "a tensor": "TENSOR = torch.full((2,), 4.0, dtype=torch.float64)",
    "a tensor in place": "TENSOR += 2",
    "a list": "LIST = [5, [1]]",
    "a list in place": "LIST[0] = 4",
    "a list inside a list": "LIST[1].append(3)",
    "a dict inside a dict": "TABLE['a']['b'] = 9",
    "an object's attribute": "OPTIONS.shift = 6",
    "another object": "OPTIONS = types.SimpleNamespace(shift=8)",
    "a helper": "def helper(x):\n    return x * SCALE",
    "a helper of the helper": "def inner(x):\n    return x - 4 * SCALE",
    "a helper's defaults": "helper.__defaults__ = (5,)",
    "a helper's code": "helper.__code__ = (lambda x, factor: x + factor).__code__",
    "a function's attribute": "marked.more = 5",
    "a cell": "WRITE(11)",
    "a method": "Net.bend = lambda self, x: x * 3",
    "a method of the base": "Base.bend = lambda self, x: x * SCALE",
    "forward": "Net.forward = lambda self, x: self.linear(x) * 3 + SCALE",
    "an attribute of the class": "Net.POWER = 5",
    "a constant that the method reads anew": (
        "def bend(self, x):\n    return x * NEW\nNEW = 4\nNet.bend = bend"
    ),
}


class Cells:
    """A namespace like that of a notebook, whose classes travel by value."""

    def __init__(self, source=SCRIPT):
        self.names = {"__name__": "__main__"}
        self.run(source)

    def run(self, source):
        exec(compile(source, "<cell>", "exec"), self.names)

    def net(self):
        return integer_weights(self.names["Net"]())


def step(model, x):
    return loss_of(model(x))


def assert_trains(twin, seed=0):
    twin.zero()
    twin.step(step, integers(7, 3, seed=seed))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_cell_that_changes_what_forward_reads_reaches_every_replica(wrap, change):
    cells = Cells()
    twin = Twin(wrap, cells.net())
    assert_trains(twin)
    before = twin.plain(integers(7, 3))
    cells.run(change)
    assert not torch.equal(twin.plain(integers(7, 3)), before)
    for seed in range(2):
        assert_trains(twin, seed)
    cells.run("SCALE = 13")
    assert_trains(twin)


def test_a_class_that_is_defined_again_is_another_one(wrap):
    cells = Cells()
    twin = Twin(wrap, cells.net())
    assert_trains(twin)
    first = twin
    cells.run(
        SCRIPT.replace("* SCALE +", "* SCALE -").replace("POWER = 2", "POWER = 3")
    )
    twin = Twin(wrap, cells.net())
    assert_trains(twin)
    x = integers(7, 3)
    assert not torch.equal(first.plain(x), twin.plain(x))
    assert_trains(first)
    assert_trains(twin)


KINDS = """
import collections
import functools
import types
import numpy as np
import torch
from torch import nn

COUNTS = collections.defaultdict(int, a=1)
ORDER = collections.OrderedDict(a=1)
QUEUE = collections.deque([1], 2)
SET = {1}
ARRAY = np.ones(1)
MADE = types.ModuleType("made")
MADE.SHIFT = 1
NAMED = types.SimpleNamespace(shift=1)
ALIAS = NAMED
FIXED = 1


class Own(dict):
    pass


OWN = Own(a=1)


class Lazy:
    held = None

    @classmethod
    def get(cls):
        if cls.held is None:
            cls.held = cls()
            cls.held.factor = 1
        return cls.held


@torch.no_grad()
def still(x):
    return x.detach() * 0 + FIXED


def marked(x):
    return x * marked.times


marked.times = 1


@functools.lru_cache
def cached(n):
    return n + 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    @functools.cached_property
    def width(self):
        return self.linear.out_features

    def forward(self, x):
        x = self.linear(x) * COUNTS["a"] + ORDER["a"] + sum(QUEUE) + sum(SET)
        x = marked(x) * Lazy.get().factor + still(x) + self.width + cached(2)
        return x * float(ARRAY[0]) * NAMED.shift + ALIAS.shift + OWN["a"] + MADE.SHIFT
"""

CHANGES_INSIDE = [
    "Lazy.held.factor = 2",
    "COUNTS['a'] = 2",
    "ORDER['a'] = 2",
    "QUEUE.append(3)",
    "SET.add(5)",
    "ARRAY[0] = 2",
    "NAMED.shift = 2",
    "OWN['a'] = 3",
    "FIXED = 4",
    "MADE.SHIFT = 2",
    "marked.times = 2",
]


def test_what_changes_inside_globals_of_each_kind_reaches_every_replica(wrap):
    cells = Cells(KINDS)
    twin = Twin(wrap, cells.net())
    twin.ours(integers(7, 3))  # the first forward, which makes what is lazy
    assert_trains(twin)
    for change in CHANGES_INSIDE:
        before = twin.plain(integers(7, 3))
        cells.run(change)
        assert not torch.equal(twin.plain(integers(7, 3)), before)
        for seed in range(2):
            assert_trains(twin, seed)


def test_an_object_that_two_modules_import_stays_one_object(
    wrap_by_default, tmp_path, monkeypatch
):
    names = [f"{name}_of_{tmp_path.name}".replace("-", "_") for name in "abc"]
    settings, layer, net = names
    sources = {
        settings: "import types\nSETTINGS = types.SimpleNamespace(scale=2)",
        layer: f"from {settings} import SETTINGS\n"
        "def apply(x):\n    return x * SETTINGS.scale",
        net: f"from torch import nn\nimport {layer} as layer\n"
        f"from {settings} import SETTINGS\n"
        "class Net(nn.Linear):\n    def forward(self, x):\n"
        "        return layer.apply(super().forward(x)) + SETTINGS.scale",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    twin = Twin(
        wrap_by_default, integer_weights(importlib.import_module(net).Net(3, 2))
    )
    assert_trains(twin)
    for scale in (3, 4):
        sys.modules[settings].SETTINGS.scale = scale
        assert_trains(twin)
    for name in names:
        del sys.modules[name]


COUNTING = """
CALLS = 0
LAST = None


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x):
        global CALLS, LAST
        CALLS += 1
        seen, LAST = LAST, x.detach().sum(1)
        return self.linear(x) * CALLS, len(x), -1 if seen is None else seen.sum()
"""


def test_globals_that_forward_itself_sets_are_each_replicas_own(wrap):
    cells = Cells()
    cells.run(COUNTING)
    model = wrap(integer_weights(cells.names["Counting"]()))
    if wrap.engine == "thread":
        pytest.skip("threads share the globals, as torch's replicas do")
    x = integers(7, 3)
    for calls in range(1, 5):
        out, _, seen = model(x)
        assert cells.names["CALLS"] == calls
        assert torch.equal(out, model.module.linear(x) * calls)
        if calls > 1:
            assert seen.tolist() == [x[:4].sum(), x[4:].sum()]
    cells.run("CALLS = 100")
    assert torch.equal(model(x)[0], model.module.linear(x) * 101)


# ---- modules that replicas import ---------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return an importable module with the code of `SCRIPT`."""
    name = f"code_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_module_that_is_patched_is_patched_in_every_replica(
    wrap_by_default, module, change, is_before
):
    twin = Twin(wrap_by_default, integer_weights(module.Net()))
    if not is_before:
        assert_trains(twin)
    before = twin.plain(integers(7, 3))
    exec(change, vars(module))
    assert not torch.equal(twin.plain(integers(7, 3)), before)
    for seed in range(2):
        assert_trains(twin, seed)
    exec("SCALE = 13", vars(module))
    assert_trains(twin)


def test_a_patch_that_is_taken_back_is_taken_back_in_every_replica(
    wrap_by_default, module, monkeypatch
):
    twin = Twin(wrap_by_default, integer_weights(module.Net()))
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(module.Net, "bend", lambda self, x: 2 * x)
            patch.setattr(module, "helper", lambda x: x * module.SCALE)
            patch.setattr(module, "SCALE", 5)
            assert_trains(twin)
        assert_trains(twin)
    twin = Twin(wrap_by_default, integer_weights(module.Net()))
    assert_trains(twin)


def test_a_module_that_is_reloaded_is_the_same_in_every_replica(
    wrap_by_default, module
):
    twin = Twin(wrap_by_default, integer_weights(module.Net()))
    assert_trains(twin)
    text = SCRIPT.replace("SCALE = 2", "SCALE = 6").replace("* factor", "- factor")
    with open(module.__file__, "w") as file:
        file.write(text)
    importlib.reload(module)
    assert_trains(twin)  # the old class, which reads the new globals
    twin = Twin(wrap_by_default, integer_weights(module.Net()))
    assert_trains(twin)


def test_processes_say_which_name_of_a_module_is_another_one(module):
    model = paceline.DataParallel(module.Net(), ["cpu"] * 2, engine="process")
    module.SCALE = 5
    with model, pytest.raises(RuntimeError, match=rf"{module.__name__}\.SCALE is not"):
        model(integers(7, 3))


def test_a_refresh_has_workers_import_a_module_anew(module):
    net = integer_weights(module.Net())
    with paceline.DataParallel(net, ["cpu"] * 2) as model:
        assert torch.equal(model(integers(7, 3)), net(integers(7, 3)))
        assert model.engine == "process"
        with open(module.__file__, "w") as file:
            file.write(SCRIPT.replace("SCALE = 2", "SCALE = 6"))
        importlib.reload(module)
        assert torch.equal(model(integers(7, 3)), net(integers(7, 3)))
        assert model.engine == "thread"
        assert "SCALE" in model.engine_reason
        model.refresh()
        assert torch.equal(model(integers(7, 3)), net(integers(7, 3)))
        assert model.engine == "process"


def test_a_script_that_calls_a_patched_module_is_never_silently_different(module):
    cells = Cells(
        f"import {module.__name__} as other\n"
        "from torch import nn\n"
        "class Calling(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return other.helper(super().forward(x)) * other.SCALE\n"
    )
    net = integer_weights(cells.names["Calling"](3, 2))
    with paceline.DataParallel(net, ["cpu"] * 2) as model:
        assert torch.equal(model(integers(7, 3)), net(integers(7, 3)))
        assert model.engine == "process"
        module.SCALE = 5
        assert torch.equal(model(integers(7, 3)), net(integers(7, 3)))
        assert model.engine == "thread"


def test_a_file_that_has_changed_since_its_import_is_not_what_runs(
    wrap_by_default, module
):
    with open(module.__file__, "w") as file:
        file.write(SCRIPT.replace("SCALE = 2", "SCALE = 6").replace("x - 1", "x - 2"))
    assert_trains(Twin(wrap_by_default, integer_weights(module.Net())))


def test_a_method_of_a_librarys_class_may_be_patched(wrap_by_default, monkeypatch):
    twin = Twin(
        wrap_by_default, integer_weights(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    )
    assert_trains(twin)
    with monkeypatch.context() as patch:
        patch.setattr(nn.ReLU, "forward", lambda self, x: 3 * x)
        assert_trains(twin)
        other = Twin(
            wrap_by_default, integer_weights(nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
        )
        assert_trains(other)
    assert_trains(twin)
    assert_trains(other)


CALLING = """
import torch
import torch.nn.functional as F
from torch import nn


class Calling(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x):
        return torch.relu(self.linear(x)) + F.relu6(x.sum(1, keepdim=True))
"""


def test_a_function_of_torch_that_is_patched_is_patched_in_every_replica(
    wrap_by_default, monkeypatch
):
    cells = Cells(CALLING)
    first, relu = torch.relu, nn.functional.relu6
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "relu", lambda x: first(x) * 3)
            patch.setattr(nn.functional, "relu6", lambda x: relu(x) - x)
            twin = Twin(wrap_by_default, integer_weights(cells.names["Calling"]()))
            assert_trains(twin)
            patch.setattr(nn.functional, "relu6", lambda x: x * 2)
            assert_trains(twin)
        assert_trains(twin)


LOGGING = """
SCALE = 2
SHIFT = torch.zeros(2).double()
LOG = []
LOSSES = []
STEPS = {"done": 0}


class Logging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.LOSSES = 1

    def forward(self, x):
        x = self.linear(x) * self.LOSSES * (SCALE + STEPS["done"])
        return x + SHIFT + sum(n["x"] for n in LOG)
"""


def test_globals_that_change_in_every_step_leave_earlier_graphs_alone(wrap):
    cells = Cells()
    cells.run(LOGGING)
    twin = Twin(wrap, integer_weights(cells.names["Logging"]()))
    for number in range(10):
        theirs, mine = [step(model, integers(7, 3)) for model in twin.models]
        cells.run("SCALE += 1; LOSSES.append(1); STEPS['done'] += 2; SHIFT += 1")
        cells.run("LOG[-1]['x'] += 1" if number % 2 else "LOG.append({'x': 1})")
        assert torch.equal(mine, theirs)
        theirs2, mine2 = [step(model, integers(7, 3)) for model in twin.models]
        assert torch.equal(mine2, theirs2)
        for loss in (mine, theirs, mine2, theirs2):
            loss.backward()
        twin.assert_same()
