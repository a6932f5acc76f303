"""The probes of torch's features, with this torch and as if it lacked them."""

import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from natives import make_reducer, make_world, torch_core
from paceline._compat import torch_groups, torch_modes
from support.programs import run_python
from torch.autograd.graph import saved_tensors_hooks


@pytest.fixture
def without_exchange(monkeypatch):
    """Pass tensors by capsules, as with a torch that has no exchange table."""
    attach_torch = torch_core._native.attach_torch

    def attach(**given):
        attach_torch(**{**given, "exchange": None})

    with monkeypatch.context() as patch:
        patch.setattr(torch_core._native, "attach_torch", attach)
        torch_core.attach()
    yield
    torch_core.attach()


# ---- tensors ------------------------------------------------------------------------


NO_MEMORY = [3, None, torch.ones(2, device="meta"), torch.eye(2).to_sparse()]


@pytest.mark.parametrize("bad", NO_MEMORY, ids=["number", "None", "meta", "sparse"])
def test_what_no_capsule_holds_is_a_type_error_that_names_it(without_exchange, bad):
    world = make_world()
    with pytest.raises(TypeError, match="is not a strided tensor in memory: "):
        world.broadcast([bad])


def test_capsules_carry_tensors_as_the_exchange_table_does(without_exchange):
    params = [
        torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t()),
        torch.nn.Parameter(torch.ones(())),
        torch.nn.Parameter(torch.ones(1, 400)),
    ]
    for attach in (None, torch_core.attach):
        if attach is not None:
            attach()  # by the table, if this torch has one
        reducer = make_reducer(params=params)
        reducer.forward_begins()
        sum((p * p).sum() for p in params).backward()
        for p in params:
            assert torch.equal(p.grad, 2 * p.detach())
            assert p.grad.stride() == p.stride()
            p.grad = None
        reducer.detach()


@pytest.mark.parametrize("takes_several", [True, False])
def test_each_tensor_that_was_overwritten_gets_a_new_version(
    monkeypatch, takes_several
):
    if takes_several and not torch_core._increments_several():
        pytest.skip("this torch takes one tensor at a time")
    monkeypatch.setattr(torch_core, "_increments_several", lambda: takes_several)
    tensors = [torch.ones(2) for _ in range(3)]
    before = [tensor._version for tensor in tensors]
    torch_core.increment_version(tensors)
    torch_core.increment_version(tensors[0])
    after = [tensor._version for tensor in tensors]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1, 1]


def test_holders_of_memory_are_tensors_and_what_graphs_have_saved():
    block = torch.ones(8)
    storages = [torch_core.storage_of(block)]
    alone = torch_core.count_holders(storages)
    assert torch_core.count_holders(storages) == alone
    view = block[:4].detach()
    assert torch_core.count_holders(storages) == alone + 1
    out = torch.ones(4, requires_grad=True) * view
    del view
    assert torch_core.count_holders(storages) == alone + 1
    out.sum().backward()
    assert torch_core.count_holders(storages) == alone


# ---- state of a thread --------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["shown", "hidden"])
def top_hooks(request, monkeypatch):
    """Run with this torch's access to saved-tensor hooks, and as if it had none."""
    if not request.param:
        monkeypatch.setattr(torch_modes, "_top_hooks", None)


def save():
    return torch.ones(2, requires_grad=True).sin()


FORBIDDEN = "forbidden here"


def test_hooks_on_saved_tensors_are_seen_and_not_called(top_hooks):
    called = []
    assert not torch_modes.has_saved_tensors_hooks()
    with saved_tensors_hooks(called.append, called.append):
        assert torch_modes.has_saved_tensors_hooks()
        assert called == []
        assert save().grad_fn is not None
        assert len(called) == 1, "they are on as before"
    assert not torch_modes.has_saved_tensors_hooks()
    with torch.autograd.graph.disable_saved_tensors_hooks(FORBIDDEN):
        assert torch_modes.has_saved_tensors_hooks()
        with pytest.raises(RuntimeError, match=FORBIDDEN):
            saved_tensors_hooks(called.append, called.append).__enter__()
    with saved_tensors_hooks(called.append, called.append):
        pass


def test_a_call_without_hooks_on_saved_tensors_leaves_them_as_they_were(top_hooks):
    called = []

    def record(name):
        return saved_tensors_hooks(
            lambda tensor: called.append(name) or tensor, lambda tensor: tensor
        )

    with record("outer"):
        with record("inner"):
            torch_modes.without_saved_tensors_hooks(save).sum().backward()
            assert called == []
            with pytest.raises(ZeroDivisionError):
                torch_modes.without_saved_tensors_hooks(lambda: 1 / 0)
            save()
        save()
    save()
    assert called == ["inner", "outer"]
    with torch.autograd.graph.disable_saved_tensors_hooks(FORBIDDEN):
        torch_modes.without_saved_tensors_hooks(save)
        assert torch_modes.has_saved_tensors_hooks()


def test_modes_of_calls_are_listed_from_the_outermost():
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    assert torch_modes.function_modes() == []
    with torch.device("cpu"), Mode() as mode:
        device, own = torch_modes.function_modes()
        assert own is mode
        assert torch_modes.is_device_mode(device)
        assert not torch_modes.is_device_mode(own)


# ---- groups -------------------------------------------------------------------------


def test_a_slice_of_a_mesh_is_told_from_a_whole_one(alone):
    whole = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert not torch_groups.is_mesh_slice(whole)
    assert torch_groups.is_mesh_slice(whole["a"])


# ---- compiled autograd --------------------------------------------------------------


class Thing:
    pass


def run_as_compiled(function):
    """Call a function from a frame like the one that runs a compiled backward."""
    frame = {"__name__": "torch._dynamo.compiled_autograd", "function": function}
    exec("def run():\n    return function()", frame)
    frame["run"]()


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_compiled_backward_holds_goes_when_it_ends(fails):
    things = []

    def backward():
        for thing in (Thing(), Thing()):
            things.append(weakref.ref(thing))
            torch_core._hold_while_compiled(thing)
        del thing
        assert all(thing() is not None for thing in things)
        if fails:
            raise ValueError("out of luck")

    try:
        run_as_compiled(backward)
    except ValueError:
        assert fails
        assert all(thing() is None for thing in things)
    assert len(things) == 2
    assert all(thing() is None for thing in things)
    assert sys.getprofile() is None


def test_a_profiler_where_a_compiled_backward_must_be_watched_is_an_error():
    def profile(*_):
        pass

    def hold():
        sys.setprofile(profile)
        try:
            torch_core._hold_while_compiled(Thing())
        finally:
            sys.setprofile(None)

    with pytest.raises(RuntimeError, match="turn off the Python profiler"):
        run_as_compiled(hold)


# ---- the version --------------------------------------------------------------------


def test_a_torch_that_is_too_old_is_refused_with_both_versions():
    code = """
import torch
torch.__version__ = "2.3.1+cpu"
import paceline
try:
    paceline.DataParallel(torch.nn.Linear(1, 1))
except ImportError as error:
    print(error)
"""
    done = run_python(code)
    assert done.stderr == ""
    told = "paceline needs torch 2.4 or newer, and this is 2.3.1+cpu"
    assert done.stdout.strip() == told
