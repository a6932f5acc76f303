"""torch's names mean ours while installed, and torch itself takes no harm."""

import copy
import copyreg
import importlib
import io
import os
import pickle
import subprocess
import sys
import types
import unittest.mock
import warnings
from pathlib import Path

import cloudpickle
import paceline
import pytest
import torch
from paceline._install import rebind
from support.copies import saved_and_loaded
from torch.nn.parallel import DataParallel as TorchDP
from torch.nn.parallel import DistributedDataParallel as TorchDDP

PLACES = {
    "torch.nn": ["DataParallel"],
    "torch.nn.parallel": ["DataParallel", "DistributedDataParallel", "data_parallel"],
    "torch.nn.parallel.data_parallel": ["DataParallel", "data_parallel"],
    "torch.nn.parallel.distributed": ["DistributedDataParallel"],
}
MAKER = "torch.distributed._composable.replicate"


@pytest.fixture
def installed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this very file holds torch's classes
        installation = paceline.install()
    with installation:
        yield installation


def install_quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return paceline.install()


def everything():
    """Return all that installing may change."""
    modules = [sys.modules[name] for name in PLACES]
    return {
        "names": [
            (module, name, getattr(sys.modules[module], name))
            for module, names in PLACES.items()
            for name in names
        ],
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


def run(code, env=None, flags=()):
    """Run code in a fresh interpreter; return what it printed."""
    result = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")[:-1], result.stderr


# ---- the names ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"), [(m, name) for m, names in PLACES.items() for name in names]
)
def test_a_public_name_of_torch_is_ours(installed, module, name):
    assert getattr(sys.modules[module], name) is getattr(paceline, name)
    space = {}
    exec(f"from {module} import {name} as found", space)
    assert space["found"] is getattr(paceline, name)


def test_importing_by_star_gives_ours(installed):
    space = {}
    exec("from torch.nn.parallel import *", space)
    assert space["DistributedDataParallel"] is paceline.DistributedDataParallel
    exec("from torch.nn import *", space)
    assert space["DataParallel"] is paceline.DataParallel


@pytest.mark.parametrize("name", ["replicate", "scatter", "gather", "parallel_apply"])
def test_functions_for_gpus_stay_those_of_torch(name):
    before = getattr(torch.nn.parallel, name)
    with install_quietly():
        assert getattr(torch.nn.parallel, name) is before


def test_undoing_restores_exactly_what_was_there():
    before = everything()
    install_quietly()
    assert everything() != before
    paceline.uninstall()
    assert everything() == before


def test_undoing_without_installing_does_nothing():
    before = everything()
    paceline.uninstall()
    assert everything() == before


def test_installing_twice_is_one_installation():
    before = everything()
    install_quietly()
    once = everything()
    install_quietly()
    assert everything() == once
    paceline.uninstall()
    assert everything() == before


def test_a_context_manager_installs_for_its_block_alone():
    with install_quietly() as installation:
        assert torch.nn.DataParallel is paceline.DataParallel
        assert "on" in repr(installation)
    assert torch.nn.DataParallel is TorchDP
    assert "off" in repr(installation)


def test_nested_context_managers_restore_what_they_found():
    install_quietly()
    with install_quietly(), install_quietly():
        pass
    assert torch.nn.DataParallel is paceline.DataParallel
    paceline.uninstall()
    assert torch.nn.DataParallel is TorchDP


def test_a_context_manager_undoes_after_an_error():
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
    with pytest.warns(UserWarning, match=r"under torch\.nn\.DataParallel since"):
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


def test_mocks_of_the_names_come_and_go(installed):
    with unittest.mock.patch("torch.nn.parallel.DistributedDataParallel") as mock:
        assert torch.nn.parallel.DistributedDataParallel is mock
    ours = paceline.DistributedDataParallel
    assert torch.nn.parallel.DistributedDataParallel is ours


def test_what_is_read_and_put_back_leaves_no_trace(installed):
    patch = pytest.MonkeyPatch()
    patch.setattr("torch.nn.parallel.DistributedDataParallel", 5)
    assert torch.nn.parallel.DistributedDataParallel == 5
    patch.undo()  # sets what getattr() gave
    ours = paceline.DistributedDataParallel
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
    with pytest.warns(UserWarning, match=r"under torch\.nn\.DataParallel since"):
        paceline.uninstall()
    torch.nn.DataParallel = TorchDP


# ---- what torch sees ----------------------------------------------------------------


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
    maker = importlib.import_module(MAKER)
    assert vars(maker)["DistributedDataParallel"] is TorchDDP
    with install_quietly():
        assert (
            vars(maker)["DistributedDataParallel"] is paceline.DistributedDataParallel
        )
    assert vars(maker)["DistributedDataParallel"] is TorchDDP


def test_wrappers_pass_the_checks_by_type(installed, alone):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    dp = torch.nn.DataParallel(torch.nn.Linear(2, 1))
    both = (torch.nn.parallel.DataParallel, torch.nn.parallel.DistributedDataParallel)
    assert type(ddp) in both
    assert type(dp) in both
    assert isinstance(ddp, both)
    assert isinstance(dp, both)
    assert isinstance(ddp, TorchDDP)
    assert isinstance(dp, TorchDP)


def test_a_wrapper_of_torch_made_before_goes_on(alone):
    dp, ddp = TorchDP(torch.nn.Linear(2, 1)), TorchDDP(torch.nn.Linear(2, 1))
    with install_quietly():
        assert dp(torch.ones(1, 2)).shape == (1, 1)
        assert not isinstance(ddp, torch.nn.parallel.DistributedDataParallel)
        with ddp.no_sync():
            ddp(torch.ones(1, 2)).sum().backward()
        ddp(torch.ones(1, 2)).sum().backward()
        assert ddp.module.bias.grad.item() == 2


def test_the_join_of_a_wrapper_of_torch_still_works(alone):
    ddp = TorchDDP(torch.nn.Linear(2, 1))
    with install_quietly(), ddp.join():
        ddp(torch.ones(1, 2)).sum().backward()
    assert ddp.module.bias.grad.item() == 1


def test_torch_finds_the_module_inside_of_ours(installed, alone):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    assert sorted(get_model_state_dict(ddp)) == ["bias", "weight"]


# ---- what it does on the CPU --------------------------------------------------------


def test_data_parallel_calls_the_module_plainly(installed, monkeypatch):
    monkeypatch.delenv("PACELINE_CPU_REPLICAS", raising=False)
    calls = []

    class Model(torch.nn.Module):
        def forward(self, *args, **kwargs):
            calls.append((args, kwargs))
            return args

    module = Model()
    for device_ids in (None, [], [0], [0, 1]):
        wrapper = torch.nn.DataParallel(module, device_ids)
        x, other = torch.ones(3, 2), object()
        output = wrapper(x, other, key=x)
        assert output[0] is x
        assert output[1] is other
        assert calls.pop()[1]["key"] is x
        assert wrapper.device_ids == []
        assert list(wrapper.children()) == [module]
    assert calls == []


def test_the_function_takes_the_arguments_of_torch(installed):
    module = torch.nn.Linear(2, 1)
    x = torch.ones(3, 2)
    output = torch.nn.parallel.data_parallel(module, x, None, None, 0, None)
    assert torch.equal(output, module(x))


def test_annotations_with_a_type_in_brackets_work(installed):
    alias = torch.nn.DataParallel[torch.nn.Linear]
    wrapper = alias(torch.nn.Linear(2, 1))
    assert type(wrapper) is paceline.DataParallel


# ---- pickles ------------------------------------------------------------------------


class OfTorch(TorchDP):
    pass


def save_and_load(thing, how):
    if how == "pickle":
        return pickle.loads(pickle.dumps(thing))
    if how == "python pickle":
        return pickle._loads(pickle._dumps(thing))
    return saved_and_loaded(thing)


WAYS = ["pickle", "python pickle", "save"]


@pytest.mark.parametrize("how", WAYS)
def test_a_pickle_of_data_parallel_by_torch_becomes_ours(how):
    dp = TorchDP(torch.nn.Linear(2, 1)).eval()
    dp.note = "kept"
    dp.register_forward_hook(print_nothing)
    words = pickle.dumps(dp)
    file = io.BytesIO()
    torch.save(dp, file)
    file.seek(0)
    with install_quietly():
        if how == "pickle":
            loaded = pickle.loads(words)
        elif how == "python pickle":
            loaded = pickle._loads(words)
        else:
            loaded = torch.load(file, weights_only=False)
        assert type(loaded) is torch.nn.DataParallel is paceline.DataParallel
    assert loaded.note == "kept"
    assert not loaded.training
    assert list(loaded._forward_hooks.values()) == [print_nothing]
    x = torch.ones(3, 2)
    assert torch.equal(loaded(x), dp(x))
    assert list(loaded.state_dict()) == list(dp.state_dict())
    again = pickle.loads(pickle.dumps(loaded))
    assert type(again) is paceline.DataParallel


def print_nothing(module, args, output):
    return None


def test_a_pickle_of_replicas_on_gpus_by_torch_can_be_read_here(installed):
    state = dict(vars(TorchDP(torch.nn.Linear(2, 1))))
    state.update(device_ids=[0, 1], dim=1, output_device=0)
    loaded = paceline.DataParallel.__new__(paceline.DataParallel)
    loaded.__setstate__(state)
    assert loaded.dim == 1
    assert loaded(torch.ones(3, 2)).shape == (3, 1)


def test_a_pickle_that_we_cannot_serve_becomes_what_it_was(installed, monkeypatch):
    monkeypatch.setattr("paceline._compat.torch_core.has_accelerator", lambda: True)
    state = dict(vars(TorchDP(torch.nn.Linear(2, 1))), device_ids=[0], dim=0)
    loaded = paceline.DataParallel.__new__(paceline.DataParallel)
    loaded.__setstate__(state)
    assert type(loaded) is TorchDP
    assert loaded.device_ids == [0]
    assert list(loaded.state_dict()) == ["module.weight", "module.bias"]


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


def test_a_subclass_of_torchs_is_pickled_by_its_own_name(installed):
    loaded = pickle.loads(pickle.dumps(OfTorch(torch.nn.Linear(2, 1))))
    assert type(loaded) is OfTorch


# ---- who has it already -------------------------------------------------------------


def test_modules_that_hold_torchs_class_are_named(monkeypatch):
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
    assert " more, and stays torch's there" in ddp
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


def test_torch_imported_first_and_unused_gives_no_warning():
    out, err = run("import torch, paceline; paceline.install(); print(1)")
    assert (out, err) == (["1"], "")


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


@pytest.mark.parametrize("paths", [None, "", "/a:/b", "/a::/b"])
def test_the_environment_is_given_back(installed_never, monkeypatch, paths):
    if paths is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", paths)
    before = dict(os.environ)
    with install_quietly():
        given = os.environ["PYTHONPATH"].split(":")
        assert Path(given[0], "sitecustomize.py").exists()
        assert given[1:] == (paths.split(":") if paths else [])
        assert os.environ["PACELINE_INSTALL"] == "1"
    assert dict(os.environ) == before


@pytest.fixture
def installed_never():
    assert not rebind.is_installed()


def test_what_the_program_adds_to_the_path_stays(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a")
    with install_quietly():
        os.environ["PYTHONPATH"] = "/new:" + os.environ["PYTHONPATH"]
    assert os.environ["PYTHONPATH"] == "/new:/a"


def test_a_folder_that_the_path_cannot_hold_is_said(monkeypatch):
    monkeypatch.setattr(rebind, "_FOLDER", "/a:b/startup")
    before = dict(os.environ)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        paceline.install()
    assert "which PYTHONPATH cannot hold" in str(caught[0].message)
    assert dict(os.environ) == before
    paceline.uninstall()
    assert dict(os.environ) == before
