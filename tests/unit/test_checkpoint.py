"""Checkpoints are written whole or not at all; both kinds of keys load."""

import os
import signal
import stat

import paceline
import pytest
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


class Net(nn.Module):
    """Its child is called `inner`, or `module` as in torch's wrappers."""

    def __init__(self, part="inner"):
        super().__init__()
        self.add_module(part, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


def bare(model):
    return model


def wrapped(model):
    return paceline.DistributedDataParallel(model)


class Versioned(nn.Module):
    """Keeps the version that its parameters were saved with."""

    def __init__(self, version, **parts):
        super().__init__()
        self.version = version
        self.seen = None
        self.weight = nn.Parameter(torch.zeros(1))
        for name, part in parts.items():
            self.add_module(name, part)

    @property
    def _version(self):
        return self.version

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def assert_same(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert list(left) == list(right)
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pt"


PREFIX = pytest.mark.parametrize("prefix", ["keep", "strip"])

# ---- both kinds of keys -------------------------------------------------------------


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPS = [bare, wrapped, nn.DataParallel, compiled]
WRAPS += [
    lambda model: wrapped(compiled(model)),
    lambda model: compiled(wrapped(model)),
]
PARTS = pytest.mark.parametrize("part", ["inner", "module", "_orig_mod"])


@PREFIX
@PARTS
@pytest.mark.parametrize("wrap", WRAPS)
def test_either_kind_of_file_loads_into_bare_models_and_wrappers(
    alone, path, prefix, part, wrap
):
    model = Net(part)
    paceline.save(wrap(model), path, prefix=prefix)
    assert list(paceline.load(path)) == list(model.state_dict())
    for wrap_other in WRAPS:
        other = Net(part)
        paceline.load(path, wrap_other(other))
        assert_same(other, model)


@PARTS
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_files_without_a_record_load_by_their_keys(path, part, prefix):
    model, other = Net(part), Net(part)
    state = {prefix + key: value for key, value in model.state_dict().items()}
    torch.save(state, path)
    paceline.load(path, other)
    assert_same(other, model)
    if part == "inner":
        assert list(paceline.load(path)) == list(model.state_dict())


def test_a_record_that_is_no_longer_true_is_ignored(alone, path):
    paceline.save(wrapped(nn.ModuleDict({"module": Net(), "head": Net()})), path)
    state = torch.load(path)
    consume_prefix_in_state_dict_if_present(state, "module.")
    torch.save(state, path)
    assert list(paceline.load(path)) == list(state)


def test_what_was_loaded_may_be_saved_and_loaded_again(alone, path):
    model = Net("module")
    paceline.save(wrapped(model), path)
    for _ in range(2):
        paceline.save(paceline.load(path), path)
    assert list(paceline.load(path)) == list(model.state_dict())


def test_a_partial_file_leaves_other_parameters_alone(path):
    model = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(1, 1)})})
    model["module"].weight = nn.Parameter(torch.zeros(1, 1))
    torch.save({"module.module.weight": torch.full((1, 1), 9.0)}, path)
    with pytest.raises(RuntimeError, match="Missing key"):
        paceline.load(path, model)
    assert model["module"].weight.item() == 0


@PREFIX
def test_the_prefix_of_a_wrapper_is_kept_or_stripped_in_the_file(alone, path, prefix):
    paceline.save(wrapped(Net()), path, prefix=prefix)
    before = {"keep": "module.", "strip": ""}[prefix]
    assert list(torch.load(path)) == [before + key for key in Net().state_dict()]
    assert list(paceline.load(path)) == list(Net().state_dict())


# ---- metadata -----------------------------------------------------------------------


def seen(model):
    return [m.seen for m in model.modules() if isinstance(m, Versioned)]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("part", ["part", "module"])
@PREFIX
def test_the_versions_of_modules_are_kept_by_their_places(
    alone, path, wrap, part, prefix
):
    def versioned(root, inner, leaf):
        return Versioned(root, **{part: Versioned(inner, **{part: Versioned(leaf)})})

    paceline.save(wrap(versioned(5, 6, 7)), path, prefix=prefix)
    other = versioned(8, 9, 10)
    paceline.load(path, other)
    assert seen(other) == [5, 6, 7]


# ---- whole or not at all ------------------------------------------------------------


class Sized:
    """An object without a state_dict()."""


class Unsaveable:
    def __reduce__(self):
        raise RuntimeError("this cannot be saved")


def test_a_failed_save_leaves_the_old_file_and_no_other(path):
    paceline.save({"a": torch.ones(1)}, path)
    with pytest.raises(RuntimeError, match="cannot be saved"):
        paceline.save({"a": torch.zeros(1), "b": Unsaveable()}, path)
    assert torch.load(path)["a"].item() == 1
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        paceline.save({}, tmp_path / "nowhere" / "model.pt")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0, 0o666)])
def test_the_permissions_are_those_of_any_new_file(path, mask, mode):
    before = os.umask(mask)
    try:
        paceline.save({}, path)
        assert os.umask(mask) == mask, "save() changed the umask"
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def kill_at(monkeypatch, n_bytes, error=None):
    """Kill the process, or raise, when `n_bytes` bytes have been written."""
    write, left = os.write, [n_bytes]

    def write_less(descriptor, data):
        n_now = write(descriptor, bytes(data[: left[0]])) if left[0] > 0 else 0
        left[0] -= n_now
        if n_now < len(data) or n_bytes == 0:
            if error is not None:
                raise error
            os.kill(os.getpid(), signal.SIGKILL)
        return n_now

    monkeypatch.setattr(os, "write", write_less)


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


NEW = {"model": nn.Linear(60, 60), "epoch": 2}


def sampled_offsets(path, n):
    """Return byte offsets in a save of NEW: at both ends, and evenly between."""
    paceline.save(NEW, path)
    size = path.stat().st_size
    path.unlink()
    return sorted({*range(0, size, max(size // n, 1)), 1, size - 23, size - 1})


def test_a_kill_at_any_byte_leaves_the_old_file(path, monkeypatch):
    offsets = sampled_offsets(path, 20)
    paceline.save(STATE, path)
    for where in [*offsets, "fsync", "replace"]:
        pid = os.fork()
        if pid == 0:
            if isinstance(where, str):
                monkeypatch.setattr(os, where, die)
            else:
                kill_at(monkeypatch, where)
            paceline.save(NEW, path)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert torch.equal(paceline.load(path)["weight"], STATE["weight"])
    paceline.save(NEW, path)
    assert paceline.load(path)["epoch"] == 2
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt("no")])
def test_an_error_at_any_write_leaves_the_old_file_alone(path, monkeypatch, error):
    offsets = sampled_offsets(path, 100)
    paceline.save(STATE, path)
    for n_bytes in offsets:
        with monkeypatch.context() as patch:
            kill_at(patch, n_bytes, error)
            with pytest.raises(type(error), match="no"):
                paceline.save(NEW, path)
        assert torch.equal(paceline.load(path)["weight"], STATE["weight"])
        assert list(path.parent.iterdir()) == [path]


# ---- arguments ----------------------------------------------------------------------


@pytest.mark.parametrize("word", ["drop", "", None, True])
def test_another_word_for_prefix_is_refused_before_anything_is_written(path, word):
    with pytest.raises(ValueError, match=f"prefix is {word!r}: give 'keep' or 'strip'"):
        paceline.save({}, path, prefix=word)
    assert not path.exists()


@pytest.mark.parametrize(
    "thing",
    [
        {"epoch": 3, "model": {"module.weight": torch.ones(2), "bias": 1}},
        [1, 2, (torch.ones(2), "three")],
        torch.ones(2),
        {1: 2},
        {},
    ],
    ids=["nested", "list", "tensor", "int keys", "empty"],
)
def test_what_is_no_state_dict_comes_back_as_it_was(path, thing):
    paceline.save(thing, path, prefix="strip")
    assert str(paceline.load(path)) == str(thing)


def test_files_of_torch_save_are_read_and_ours_by_torch_load(alone, path):
    wrapper, model, other = wrapped(Net()), Net(), Net()
    torch.save(wrapper.state_dict(), str(path))
    paceline.load(str(path), model)
    assert_same(model, wrapper.module)
    paceline.save(model, path)
    other.load_state_dict(torch.load(path, weights_only=True))
    assert_same(other, model)


FINDS_OBJECTS = pytest.mark.skipif(
    not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"),
    reason="this torch does not find objects in a file",
)


@FINDS_OBJECTS
def test_arbitrary_objects_are_refused_unless_asked_for(path):
    with pytest.warns(
        UserWarning, match=r"holds test_checkpoint\.Sized: .*weights_only"
    ):
        paceline.save({"a": Sized()}, str(path))
    with pytest.raises(Exception, match="weights_only"):
        paceline.load(path)
    assert isinstance(paceline.load(path, weights_only=False)["a"], Sized)


def test_where_tensors_go_can_be_said(path):
    paceline.save(Net(), path)
    loaded = paceline.load(path, map_location="meta")
    assert {tensor.device.type for tensor in loaded.values()} == {"meta"}
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        paceline.load(path, nn.Linear(3, 2))


# ---- beside torch.save --------------------------------------------------------------

SAVERS = [paceline.save, torch.save]
ONE_BY_TORCH = pytest.mark.parametrize("save", SAVERS, ids=["ours", "torch's"])
STATE = {"weight": torch.arange(6.0)}


@ONE_BY_TORCH
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_written_again_keeps_its_mode(path, save, mode):
    path.write_bytes(b"old")
    path.chmod(mode)
    save(STATE, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert torch.equal(torch.load(path)["weight"], STATE["weight"])


@ONE_BY_TORCH
@pytest.mark.parametrize("name", ["m" * 255, "ü" * 127])
def test_any_name_that_the_system_takes_is_written(tmp_path, save, name):
    save(STATE, tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@ONE_BY_TORCH
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written_is_refused(path, save):
    path.write_bytes(b"old")
    path.chmod(0o400)
    with pytest.raises((PermissionError, RuntimeError)):
        save(STATE, path)
    assert path.read_bytes() == b"old"


class Deadly:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_save_left_is_removed_by_the_next(path):
    other = path.with_name("other.pt")
    for where in (path, path, other):
        pid = os.fork()
        if pid == 0:
            paceline.save([torch.zeros(1000), Deadly()], where)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(list(path.parent.iterdir())) == 2  # one per place
    paceline.save(STATE, path)
    assert len(list(path.parent.iterdir())) == 2
    paceline.save(STATE, other)
    assert sorted(path.parent.iterdir()) == [path, other]


@FINDS_OBJECTS
def test_a_save_that_is_under_way_is_left_alone_by_another(path):
    class Nested:
        def __reduce__(self):
            paceline.save(STATE, path)
            return int, ()

    with pytest.warns(UserWarning, match="int"):
        paceline.save([Nested(), torch.ones(2)], path)
    assert torch.equal(torch.load(path, weights_only=False)[1], torch.ones(2))
    assert list(path.parent.iterdir()) == [path]


def test_no_thread_ever_sees_another_umask(path, monkeypatch):
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("umask() was called"))
    paceline.save(STATE, path)
