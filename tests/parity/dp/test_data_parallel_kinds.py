"""Modules of many kinds: scripts, compiled, exported, quantised, with operators."""

import copy
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import paceline
import pytest
import torch
import torch.ao.quantization as quantization
from paceline._replicas.errors import UnsupportedModelError
from replicas import (
    Twin,
    assert_close,
    assert_same_grads,
    assert_same_state,
    integer_weights,
    integers,
    linear,
    loss_of,
    net,
    step,
)
from torch import nn

TWO = ["cpu"] * 2
pytestmark = pytest.mark.usefixtures("idle_workers")


class Holder(nn.Module):
    """Has a layer of its own beside an inner module, which it may run twice."""

    def __init__(self, inner, is_shared=False):
        super().__init__()
        self.linear = linear()
        self.inner = inner
        if is_shared:
            self.again = inner

    def forward(self, x):
        out = self.linear(x) + self.inner(x)
        return out + self.again(x) if hasattr(self, "again") else out


def inner():
    return linear()


def exported():
    rows = torch.export.Dim("rows")
    shapes = ({0: rows},)
    program = torch.export.export(net(), (integers(7, 3),), dynamic_shapes=shapes)
    return program.module()


def compiled_in_place():
    module = Holder(inner())
    module.compile(backend="eager")
    module.inner.compile(backend="eager")
    return module


KINDS = {
    "a script": (lambda: torch.jit.script(net()), "ScriptModule"),
    "a script inside": (lambda: Holder(torch.jit.script(inner())), "ScriptModule"),
    "a shared script": (
        lambda: Holder(torch.jit.script(inner()), True),
        "ScriptModule",
    ),
    "a trace": (lambda: torch.jit.trace(net(), integers(7, 3)), "ScriptModule"),
    "a trace inside": (
        lambda: Holder(torch.jit.trace(inner(), integers(7, 3))),
        "ScriptModule",
    ),
    "compiled": (lambda: torch.compile(net(), backend="eager"), None),
    "compiled inside": (
        lambda: Holder(torch.compile(inner(), backend="eager")),
        None,
    ),
    "compiled in place": (compiled_in_place, None),
    "a graph": (lambda: torch.fx.symbolic_trace(Holder(inner())), None),
    "exported": (exported, "has hooks"),
}


@pytest.mark.parametrize(("make", "words"), KINDS.values(), ids=KINDS)
def test_a_module_of_this_kind_trains_as_the_plain_one(wrap, make, words):
    plain, module = make(), make()
    ours = wrap(module)
    if words and wrap.engine == "process":
        with pytest.raises(UnsupportedModelError, match=words):
            ours(integers(7, 3))
        return
    for seed in range(3):
        losses = [step(model, integers(7, 3, seed=seed)) for model in (ours, plain)]
        for loss in losses:
            loss.backward()
        assert_close(*losses)
        assert_same_grads(ours, plain)
        for model in (plain, module):
            with torch.no_grad():
                for p in model.parameters():
                    p -= 2 * p.grad.sign()


def test_replica_0_of_a_script_shares_its_storage(wrap):
    if wrap.engine == "process":
        pytest.skip("scripts stay in their process")
    module = torch.jit.script(net())
    before = [p.data_ptr() for p in module.parameters()]
    ours = wrap(module)
    with torch.no_grad():
        first, second = ours.replicate(module, ours.device_ids)
        assert [p.data_ptr() for p in first.parameters()] == before
        assert torch.equal(second(integers(7, 3)), module(integers(7, 3)))
        ours(integers(7, 3))
    assert [p.data_ptr() for p in module.parameters()] == before


# ---- torch.compile, round the wrapper -----------------------------------------------


def _compile(wrapper):
    return torch.compile(wrapper, backend="eager")


def _compile_in_place(wrapper):
    wrapper.compile(backend="eager")
    return wrapper


def _compile_module_later(wrapper):
    wrapper(integers(7, 3))
    wrapper.module.compile(backend="eager")
    return wrapper


def _compile_round(wrapper):
    return torch.compile(lambda x: wrapper(x * 1) + 0, backend="eager")


COMPILES = [_compile, _compile_in_place, _compile_module_later, _compile_round]


@pytest.mark.parametrize("compiles", COMPILES, ids=lambda how: how.__name__[1:])
def test_a_compiled_wrapper_trains_as_the_plain_module(wrap, compiles):
    torch._dynamo.reset()
    twin = Twin(wrap, net())
    compiled = compiles(twin.ours)
    for seed in range(2):
        x = integers(7, 3, seed=seed)
        for model in (compiled, twin.plain):
            loss_of(model(x)).backward()
        assert_same_grads(twin.ours, twin.plain)


def test_a_full_graph_of_a_wrapper_is_refused_by_the_compiler(wrap):
    torch._dynamo.reset()
    compiled = torch.compile(wrap(net()), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_call_in_replicas"):
        compiled(integers(7, 3))


# ---- quantisation -------------------------------------------------------------------


def prepared():
    module = nn.Sequential(
        quantization.QuantStub(),
        nn.Linear(3, 4),
        nn.ReLU(),
        nn.Linear(4, 2),
        quantization.DeQuantStub(),
    )
    integer_weights(module, dtype=torch.float32)
    module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(module.train())


@pytest.mark.filterwarnings("ignore")
def test_observers_of_quantisation_stay_the_same_and_are_replica_0s():
    module = prepared()
    plain = copy.deepcopy(module)
    objects = {name: id(buffer) for name, buffer in module.named_buffers()}
    x = integers(7, 3, dtype=torch.float32)
    with paceline.DataParallel(module, TWO) as ours:
        for seed in range(2):
            x = integers(7, 3, seed=seed, dtype=torch.float32)
            ours(x).sum().backward()
            plain(x[:4])
            assert_same_state(ours, plain)
        assert {name: id(b) for name, b in module.named_buffers()} == objects
        for model in (module, plain):
            model.apply(quantization.disable_observer)
        ours(5 * x)
        assert_same_state(ours, plain)
        assert torch.equal(ours(x), module(x))  # what it observed, for all
        module.apply(quantization.disable_fake_quant)
        assert torch.equal(ours(x), module(x))
        module.apply(quantization.enable_fake_quant)
        assert torch.equal(ours(x), module(x))


@pytest.mark.filterwarnings("ignore")
def test_converted_modules_run_in_evaluation():
    module = prepared()
    x = integers(7, 3, dtype=torch.float32)
    module(x)
    converted = quantization.convert(module.eval())
    with paceline.DataParallel(converted, TWO) as ours:
        assert torch.equal(ours(x), converted(x))


# ---- operators and extensions of the user's -----------------------------------------

OPERATOR = """
#include <stdint.h>
typedef uint64_t word;
extern int aoti_torch_library_init_def(const char *, const char *, uint32_t, void **);
extern int aoti_torch_library_def(void *, const char *);
extern int aoti_torch_library_init_impl(const char *, const char *, const char *,
                                        uint32_t, void **);
extern int aoti_torch_library_impl(void *, const char *,
                                   void (*)(word *, uint64_t, uint64_t));
extern int aoti_torch_call_dispatcher(const char *, const char *, word *);
static void flip(word *stack, uint64_t n_in, uint64_t n_out)
{
    (void)n_in, (void)n_out;
    aoti_torch_call_dispatcher("aten::neg", "", stack);
}
static void *declared, *defined;
__attribute__((constructor)) static void begin(void)
{
    aoti_torch_library_init_def("paceline_test", "", 0, &declared);
    aoti_torch_library_def(declared, "flip(Tensor x) -> Tensor");
    aoti_torch_library_init_impl("paceline_test", "CompositeImplicitAutograd", "", 0,
                                 &defined);
    aoti_torch_library_impl(defined, "flip", flip);
}
"""
EXTENSION = """
#include <Python.h>
static PyObject *twice(PyObject *self, PyObject *x)
{
    (void)self;
    return PyNumber_Add(x, x);
}
static PyMethodDef methods[] = {{"twice", twice, METH_O, ""}, {0}};
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "paceline_test_ext", 0, -1,
                                 methods, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit_paceline_test_ext(void)
{
    return PyModule_Create(&def);
}
"""


def build(folder, name, text, *options):
    """Return a shared library of C code; skip where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = folder / f"{name}.c", folder / f"{name}.so"
    source.write_text(text)
    command = [compiler, "-shared", "-fPIC", str(source), "-o", str(library), *options]
    subprocess.run(command, check=True)
    return library


class Calling(nn.Module):
    def __init__(self, name=None):
        super().__init__()
        self.linear = linear()
        if name == "operator":
            self.call = torch.ops.paceline_test.flip
        elif name == "overload":
            self.call = torch.ops.paceline_test.flip.default
        elif name == "namespace":
            self.call = torch.ops.paceline_test

    def forward(self, x):
        out = self.linear(x)
        if not hasattr(self, "call"):
            return torch.ops.paceline_test.flip(out)
        return self.call(out) if callable(self.call) else self.call.flip(out)


def test_operators_of_a_library_are_loaded_in_every_replica(tmp_path):
    if not hasattr(torch.ops, "paceline_test") or not _has_shim():
        pytest.skip("this torch has no stable functions to define operators")
    folder = Path(torch.__file__).parent / "lib"
    options = (f"-L{folder}", "-l:libtorch_cpu.so")
    torch.ops.load_library(build(tmp_path, "paceline_test", OPERATOR, *options))
    for name in (None, "operator", "overload", "namespace"):
        module = Calling(name)
        with paceline.DataParallel(module, TWO, engine="process") as ours:
            assert torch.equal(ours(integers(7, 3)), -module.linear(integers(7, 3)))


def _has_shim():
    header = "include/torch/csrc/inductor/aoti_torch/c/shim.h"
    path = Path(torch.__file__).parent / header
    return path.exists() and "aoti_torch_library_init_def" in path.read_text()


def test_an_extension_that_was_just_built_is_loaded_in_every_replica(tmp_path):
    include = f"-I{sysconfig.get_path('include')}"
    library = build(tmp_path, "paceline_test_ext", EXTENSION, include)
    spec = importlib.util.spec_from_file_location("paceline_test_ext", library)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    for held in (extension, extension.twice):

        class Net(nn.Module):
            def __init__(self, held=held):
                super().__init__()
                self.linear = linear()
                self.held = held

            def forward(self, x):
                call = getattr(self.held, "twice", self.held)
                return call(self.linear(x))

        module = Net()
        with paceline.DataParallel(module, TWO, engine="process") as ours:
            assert torch.equal(ours(integers(7, 3)), 2 * module.linear(integers(7, 3)))


def test_an_operator_of_this_process_alone_has_its_replicas_as_threads():
    @torch.library.custom_op("paceline_test_py::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    triple.register_autograd(lambda ctx, gradient: 3 * gradient)

    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return torch.ops.paceline_test_py.triple(self.linear(x))

    class ByObject(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return triple(self.linear(x))

    x = integers(7, 3)
    for kind in (ByName, ByObject):
        module = kind()
        with (
            paceline.DataParallel(module, TWO, engine="process") as ours,
            pytest.raises((UnsupportedModelError, AttributeError), match="triple"),
        ):
            ours(x)
        with paceline.DataParallel(module, TWO) as ours:
            assert torch.equal(ours(x), 3 * module.linear(x))
            assert ours.engine == "thread"


# ---- what holds on to this process --------------------------------------------------


class Holding(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.linear = linear()
        self.held = held

    def forward(self, x):
        return self.linear(x)


def test_a_model_with_a_lock_or_an_open_file_has_its_replicas_as_threads(tmp_path):
    x = integers(7, 3)
    with open(tmp_path / "log", "w") as file:
        reasons = {
            "it holds a _io.TextIOWrapper": (file,),
            "it holds a _thread.lock": (threading.Lock(),),
            "it holds a builtins.generator": ((i for i in range(3)),),
        }
        pairs = [(held, reason) for reason, some in reasons.items() for held in some]
        for held, reason in pairs:
            module = Holding(held)
            with paceline.DataParallel(module, TWO) as ours:
                assert torch.equal(ours(x), module(x))
                assert ours.engine == "thread"
                assert reason in ours.engine_reason


def test_a_closed_over_lock_does_so_too_and_names_of_torch_do_not():
    lock = threading.Lock()
    deterministic, ops = torch.utils.deterministic, torch.ops

    class Locking(Holding):
        def forward(self, x):
            with self.held or lock:
                return self.linear(x)

    class Naming(Holding):
        def forward(self, x):
            assert deterministic.fill_uninitialized_memory
            return ops.aten.relu(self.linear(x))

    x = integers(7, 3)
    # Before Python 3.11, torch.ops takes __getstate__ for the name of operators.
    can_send = "process" if sys.version_info >= (3, 11) else "thread"
    for kind, engine in ((Locking, "thread"), (Naming, can_send)):
        module = kind(None)
        with paceline.DataParallel(module, TWO) as ours:
            assert torch.equal(ours(x), module(x))
            assert ours.engine == engine
