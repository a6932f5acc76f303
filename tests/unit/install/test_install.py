"""While installed, torch's names mean our classes; torch itself works as before."""

import copy
import copyreg
import importlib
import io
import os
import pickle
import re
import sys
import types
import unittest.mock
import warnings

import cloudpickle
import paceline
import pytest
import torch
from paceline._install import functions, rebind
from support.programs import run_python
from torch.nn.parallel import DataParallel as TorchDP
from torch.nn.parallel import DistributedDataParallel as TorchDDP

PLACES = {
    "torch.nn": ["DataParallel"],
    "torch.nn.parallel": [
        *("DataParallel", "DistributedDataParallel", "data_parallel"),
        *("scatter", "gather", "replicate", "parallel_apply"),
    ],
    "torch.nn.parallel.data_parallel": ["DataParallel", "data_parallel"],
    "torch.nn.parallel.distributed": ["DistributedDataParallel"],
    "torch.nn.parallel.scatter_gather": ["scatter", "scatter_kwargs", "gather"],
    "torch.nn.parallel.replicate": ["replicate"],
    "torch.nn.parallel.parallel_apply": ["parallel_apply"],
}
NAMES = [(module, name) for module, names in PLACES.items() for name in names]
MAKER = "torch.distributed._composable.replicate"


def install_quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this file itself holds torch's classes
        return paceline.install()


@pytest.fixture
def installed():
    with install_quietly() as installation:
        yield installation


def everything():
    """Return all values that installing may change."""
    modules = [sys.modules[name] for name in PLACES]
    return {
        "names": [getattr(sys.modules[module], name) for module, name in NAMES],
        "dicts": [dict(vars(module)) for module in modules],
        "types": [type(module) for module in modules],
        "maker": vars(importlib.import_module(MAKER))["DistributedDataParallel"],
        "environment": dict(os.environ),
        "path": list(sys.path),
        "meta path": list(sys.meta_path),
        "pickles": dict(copyreg.dispatch_table),
        "classes": [dict(vars(TorchDP)), dict(vars(TorchDDP))],
        "hooks": [sys.excepthook, sys.displayhook, sys.path_hooks],
    }


def run(code, flags=()):
    done = run_python(code, flags=flags, cwd="/")
    return done.stdout.split("\n")[:-1], done.stderr


# ---- the names ----------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_of_torch_is_ours_however_it_is_imported(installed, module, name):
    home = paceline if name in rebind._CLASSES else functions
    ours, space = getattr(home, name), {}
    assert getattr(sys.modules[module], name) is ours
    for what in (name, "*"):
        exec(f"from {module} import {what}", space)
        assert space[name] is ours


def test_undoing_restores_exactly_what_was_there_however_often_it_was_installed():
    before = everything()
    paceline.uninstall()
    assert everything() == before
    install_quietly()
    once = everything()
    assert once != before
    install_quietly()
    assert everything() == once
    paceline.uninstall()
    assert everything() == before


def test_context_managers_install_for_their_block_alone_and_restore_what_they_found():
    with install_quietly() as installation:
        assert torch.nn.DataParallel is paceline.DataParallel
        assert "on" in repr(installation)
        with install_quietly(), install_quietly():
            pass
        assert torch.nn.DataParallel is paceline.DataParallel
    assert torch.nn.DataParallel is TorchDP
    assert "off" in repr(installation)
    with pytest.raises(ZeroDivisionError), install_quietly():
        1 / 0  # noqa: B018
    assert torch.nn.DataParallel is TorchDP


def test_a_name_that_somebody_else_has_taken_is_theirs(monkeypatch):
    class Theirs:
        pass

    before = everything()
    install_quietly()
    torch.nn.DataParallel = Theirs
    assert torch.nn.DataParallel is Theirs
    assert torch.nn.parallel.DataParallel is paceline.DataParallel
    with pytest.warns(UserWarning, match=r"torch\.nn\.DataParallel changed since"):
        paceline.uninstall()
    assert torch.nn.DataParallel is Theirs
    assert torch.nn.parallel.DataParallel is TorchDP
    torch.nn.DataParallel = TorchDP
    assert everything() == before


def test_what_was_taken_before_installing_is_left_alone():
    class Theirs(TorchDP):
        pass

    torch.nn.DataParallel = Theirs
    try:
        with install_quietly(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.nn.DataParallel is Theirs
            paceline.uninstall()
        assert torch.nn.DataParallel is Theirs
    finally:
        torch.nn.DataParallel = TorchDP


def test_what_is_mocked_or_patched_and_put_back_leaves_no_trace(installed):
    ours = paceline.DistributedDataParallel
    with unittest.mock.patch("torch.nn.parallel.DistributedDataParallel") as mock:
        assert torch.nn.parallel.DistributedDataParallel is mock
    assert torch.nn.parallel.DistributedDataParallel is ours
    patch = pytest.MonkeyPatch()
    patch.setattr("torch.nn.parallel.DistributedDataParallel", 5)
    assert torch.nn.parallel.DistributedDataParallel == 5
    patch.undo()  # sets the value that getattr() returned
    assert torch.nn.parallel.DistributedDataParallel is ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paceline.uninstall()
    assert torch.nn.parallel.DistributedDataParallel is TorchDDP


def test_reloading_the_modules_changes_nothing(installed):
    for module in (torch.nn.parallel, torch.nn):
        importlib.reload(module)
    assert torch.nn.DataParallel is paceline.DataParallel


def test_modules_with_the_names_travel_by_cloudpickle(installed):
    nn = torch.nn
    space = {"nn": nn, "__name__": "__main__"}
    exec("def f(): return nn, nn.parallel, nn.functional.relu", space)
    back = cloudpickle.loads(cloudpickle.dumps(space["f"]))()
    assert back == (nn, nn.parallel, nn.functional.relu)


def test_a_deleted_name_stays_away(installed):
    del torch.nn.DataParallel
    assert not hasattr(torch.nn, "DataParallel")
    with pytest.warns(UserWarning, match=r"torch\.nn\.DataParallel changed since"):
        paceline.uninstall()
    torch.nn.DataParallel = TorchDP


# ---- torch's own checks -------------------------------------------------------------


def test_the_code_of_torchs_class_finds_its_own_name(installed):
    assert TorchDDP.__init__.__globals__["DistributedDataParallel"] is TorchDDP
    import torch.nn.parallel.distributed as found

    assert found is sys.modules["torch.nn.parallel.distributed"]
    assert found is torch.nn.parallel.distributed
    assert found.DistributedDataParallel is paceline.DistributedDataParallel
    assert found.__spec__.name == found.__name__
    assert found._find_tensors is TorchDDP.forward.__globals__["_find_tensors"]


def test_compiled_functions_see_the_names_as_others_do(installed, alone):
    def kind(x, model):
        if type(model) is torch.nn.parallel.DistributedDataParallel:
            return x + 1
        if isinstance(model, torch.nn.DataParallel):
            return torch.nn.functional.relu(x + 3)
        return x + 4

    compiled = torch.compile(kind, backend="eager", fullgraph=True)
    wrappers = [
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)),
        torch.nn.DataParallel(torch.nn.Linear(1, 1)),
        torch.nn.Linear(1, 1),
    ]
    zero = torch.zeros(1)
    for _ in range(2):
        assert [compiled(zero, each).item() for each in wrappers] == [1, 3, 4]


def test_scripted_and_traced_functions_find_their_names(installed):
    def f(x):
        return torch.nn.functional.relu(x)

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.relu(x)

    x = torch.tensor([-1.0, 1.0])
    exported = torch.export.export(Model(), (x,)).module()
    for each in (torch.fx.symbolic_trace(f), exported):
        assert each(x).tolist() == [0, 1]


def test_modules_of_torch_imported_later_serve_ours_and_replicate_is_given_back():
    code = f"""
import paceline; paceline.install()
import importlib
maker = importlib.import_module({MAKER!r})
print(maker.DistributedDataParallel.__module__)
from torch._dynamo import convert_frame
print(convert_frame.DistributedDataParallel._get_active_ddp_module())
paceline.uninstall()
print(maker.DistributedDataParallel.__module__)
"""
    out, _ = run(code)
    assert out == ["paceline", "None", "torch.nn.parallel.distributed"]


def test_composable_replicate_makes_ours_though_it_was_imported_before():
    names = vars(importlib.import_module(MAKER))
    assert names["DistributedDataParallel"] is TorchDDP
    with install_quietly():
        ours = names["DistributedDataParallel"]
        assert ours is paceline.DistributedDataParallel
    assert names["DistributedDataParallel"] is TorchDDP


def test_a_wrapper_of_torch_made_before_goes_on(alone):
    dp, ddp = TorchDP(torch.nn.Linear(2, 1)), TorchDDP(torch.nn.Linear(2, 1))
    x = torch.ones(1, 2)
    with install_quietly():
        assert dp(x).shape == (1, 1)
        assert not isinstance(ddp, torch.nn.parallel.DistributedDataParallel)
        with ddp.no_sync():
            ddp(x).sum().backward()
        with ddp.join():
            ddp(x).sum().backward()
        assert ddp.module.bias.grad.item() == 2


def test_the_function_takes_the_arguments_of_torch_and_the_class_a_type(installed):
    module = torch.nn.Linear(2, 1)
    x = torch.ones(3, 2)
    output = torch.nn.parallel.data_parallel(module, x, None, None, 0, None)
    assert torch.equal(output, module(x))
    alias = torch.nn.DataParallel[torch.nn.Linear]
    assert type(alias(module)) is paceline.DataParallel


# ---- pickles ------------------------------------------------------------------------


class OfTorch(TorchDP):
    pass


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file


def loaded(file):
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "pickle": (pickle.dumps, pickle.loads),
    "python pickle": (pickle._dumps, pickle._loads),
    "save": (saved, loaded),
}


def save_and_load(thing, how):
    save, load = WAYS[how]
    return load(save(thing))


@pytest.mark.parametrize("how", WAYS)
def test_a_pickle_of_data_parallel_by_torch_becomes_ours(how):
    save, load = WAYS[how]
    dp = TorchDP(torch.nn.Linear(2, 1)).eval()
    dp.note = "kept"
    dp.register_forward_hook(print_nothing)
    words = save(dp)
    with install_quietly():
        ours = load(words)
        assert type(ours) is torch.nn.DataParallel is paceline.DataParallel
    assert ours.note == "kept"
    assert not ours.training
    assert list(ours._forward_hooks.values()) == [print_nothing]
    x = torch.ones(3, 2)
    assert torch.equal(ours(x), dp(x))
    assert list(ours.state_dict()) == list(dp.state_dict())
    again = pickle.loads(pickle.dumps(ours))
    assert type(again) is paceline.DataParallel


def print_nothing(module, args, output):
    return None


def from_state(**changes):
    """Unpickle a state that torch's class wrote for replicas on GPUs."""
    state = {**vars(TorchDP(torch.nn.Linear(2, 1))), **changes}
    made = paceline.DataParallel.__new__(paceline.DataParallel)
    made.__setstate__(state)
    return made


def test_a_pickle_of_replicas_on_gpus_by_torch_can_be_read_here(installed):
    made = from_state(device_ids=[0, 1], dim=1, output_device=0)
    assert made.dim == 1
    assert made(torch.ones(3, 2)).shape == (3, 1)


def test_a_pickle_that_we_cannot_serve_becomes_what_it_was(installed, monkeypatch):
    monkeypatch.setattr("paceline._compat.torch_core.has_accelerator", lambda: True)
    made = from_state(device_ids=[0], dim=0)
    assert type(made) is TorchDP
    assert made.device_ids == [0]
    assert list(made.state_dict()) == ["module.weight", "module.bias"]


@pytest.mark.parametrize("how", WAYS)
def test_a_pickle_of_ddp_by_torch_stays_that_of_torch(alone, how):
    ddp = TorchDDP(torch.nn.Linear(2, 1))
    words = pickle.dumps(ddp)
    with install_quietly():
        for loaded in (pickle.loads(words), save_and_load(ddp, how)):
            assert type(loaded) is TorchDDP
            loaded(torch.ones(1, 2)).sum().backward()
            assert loaded.module.bias.grad.item() == 1


@pytest.mark.parametrize("how", WAYS)
def test_what_torch_made_before_can_be_pickled_while_installed(how):
    dp = TorchDP(torch.nn.Linear(2, 1))
    with install_quietly():
        assert type(save_and_load(dp, how)) is paceline.DataParallel
        assert type(save_and_load([dp, dp], how)[1]) is paceline.DataParallel
        words = pickle.dumps(dp)
    assert b"paceline" not in words
    loaded = pickle.loads(words)
    assert type(loaded) is TorchDP
    assert torch.equal(loaded.module.weight, dp.module.weight)


def test_copies_of_what_torch_made_before_are_of_torch(installed, alone):
    for kind in (TorchDP, TorchDDP):
        wrapper = kind(torch.nn.Linear(2, 1))
        for one in (copy.copy(wrapper), copy.deepcopy(wrapper)):
            assert type(one) is kind
            assert one(torch.ones(3, 2)).shape == (3, 1)


@pytest.mark.parametrize("how", WAYS)
def test_ours_can_be_pickled_while_installed(installed, alone, how):
    for kind in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel):
        assert type(save_and_load(kind(torch.nn.Linear(2, 1)), how)) is kind
        assert save_and_load(kind, "pickle") is kind
    assert type(save_and_load(OfTorch(torch.nn.Linear(2, 1)), how)) is OfTorch


# ---- modules that hold the names already --------------------------------------------


@pytest.mark.parametrize(
    ("place", "sign", "advice"),
    [
        ("os.environ", "NO_ENGINE", "start the program by python -m paceline"),
        ("os.environ", "RAY_RAYLET_PID", 'runtime_env={"env_vars": {"PACELINE_INST'),
        ("sys.modules", "pyspark.worker", "spark.executorEnv.PACELINE_INSTALL=1"),
        ("sys.modules", "ipykernel", "restart the kernel"),
    ],
)
def test_modules_that_hold_torchs_class_are_named(monkeypatch, place, sign, advice):
    for each in ("ipykernel", "pyspark.worker"):  # another test may have imported them
        monkeypatch.delitem(sys.modules, each, raising=False)
    monkeypatch.setitem(eval(place), sign, "1")
    for n in range(7):
        holder = types.ModuleType(f"a_library.part{n}")
        holder.DDP = TorchDDP
        monkeypatch.setitem(sys.modules, holder.__name__, holder)
    with pytest.warns(UserWarning, match="torch's own") as caught:
        paceline.install()
    paceline.uninstall()
    words = [str(each.message) for each in caught]
    (ddp,) = [w for w in words if w.startswith("torch's own DistributedDataParallel w")]
    assert "a_library.part0, a_library.part1" in ddp
    assert re.search(rf" more, and stays torch's there: .*{re.escape(advice)}", ddp)
    assert caught[0].filename == __file__


def test_installing_first_gives_no_warning():
    code = """
import paceline
paceline.install()
import sys
assert "torch" not in sys.modules
import torch, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
paceline.install()
print(nn.DataParallel is paceline.DataParallel, DDP is paceline.DistributedDataParallel)
print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)
print([each for each in sys.meta_path if "paceline" in type(each).__module__])
"""
    out, err = run(code, flags=["-W", "error:.*paceline"])
    assert out == ["True True", "SourceFileLoader SourceFileLoader", "[]"]
    assert err == ""
    unused = run("import torch, paceline; paceline.install(); print(1)")
    assert unused == (["1"], "")


def test_undoing_before_torch_is_imported_leaves_no_watch():
    code = """
import sys, os
before = list(sys.meta_path), dict(os.environ), list(sys.path)
import paceline
with paceline.install():
    assert (list(sys.meta_path), dict(os.environ), list(sys.path)) != before
print((list(sys.meta_path), dict(os.environ), list(sys.path)) == before)
import torch
print(torch.nn.DataParallel.__module__)
"""
    out, _ = run(code)
    assert out == ["True", "torch.nn.parallel.data_parallel"]


def test_a_failed_import_of_torch_is_watched_for_again(tmp_path):
    (tmp_path / "torch.py").write_text("import no_such_module\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import paceline
paceline.install()
for _ in range(2):
    try:
        import torch
    except ImportError as error:
        print(error.name)
del sys.path[0]
import torch
print(torch.nn.DataParallel.__module__)
"""
    out, _ = run(code)
    assert out == ["no_such_module", "no_such_module", "paceline"]


def test_looking_for_torch_does_not_import_it():
    code = """
import importlib.util, sys, paceline
paceline.install()
print(importlib.util.find_spec("torch").origin.endswith("torch/__init__.py"))
print("torch" in sys.modules)
"""
    assert run(code)[0] == ["True", "False"]


# ---- the environment ----------------------------------------------------------------


def test_the_environment_has_the_switch_while_installed():
    before = dict(os.environ)
    with install_quietly():
        assert dict(os.environ) == {**before, "PACELINE_INSTALL": "1"}
    assert dict(os.environ) == before


def test_a_python_that_reads_no_file_of_ours_is_said(monkeypatch):
    monkeypatch.setattr("site.getsitepackages", list)
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    with pytest.warns(UserWarning, match="reads no paceline.pth when") as caught:
        paceline.install()
    paceline.uninstall()
    assert caught[0].filename == __file__
