"""The project's own lint sees what it is for, and nothing else."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "lint" / "rules.py"


@pytest.fixture(scope="module")
def rules():
    spec = importlib.util.spec_from_file_location("lint_rules", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lint(rules, tmp_path):
    """Return the rules broken by one file of the given path and text."""

    def run(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return [line.split(": ")[1] for line in rules.run(tmp_path)]

    return run


def function(n_lines):
    return "int f(int a,\n      int b)\n{\n" + "    a++;\n" * (n_lines - 4) + "}\n"


def called_by_python(body):
    return (
        "static PyObject *name(PyObject *self,\n                      PyObject *args)\n"
        f"{{\n{body}    Py_RETURN_NONE;\n}}\n"
        'static PyMethodDef methods[] = {{"name", name, METH_NOARGS, NULL}};\n'
    )


def test_what_python_calls_takes_the_lock_first(lint):
    path = "csrc/python/module.c"
    enter = "    PLI_ENTER(self);\n"
    assert lint(path, called_by_python(enter)) == []
    assert lint(path, called_by_python("")) == ["lock"]
    assert lint(path, called_by_python("    int n;\n" + enter)) == ["lock"]


@pytest.mark.parametrize(
    "text",
    [
        "x = getenv(name);",
        "x = secure_getenv(name);",
    ],
)
def test_the_environment_is_read_in_one_file(lint, text):
    assert lint("csrc/core/config.c", text) == []
    assert lint("csrc/comm/shm_init.c", text) == ["no-getenv"]


@pytest.mark.parametrize(
    "text",
    [
        'printf("x");',
        'fprintf(stderr,\n        "x");',
        'fputs("x", stdout);',
        "write(STDERR_FILENO, x, n);",
        "dprintf(2, x);",
    ],
)
def test_only_the_log_prints(lint, text):
    assert lint("csrc/core/log.c", text) == []
    assert lint("csrc/core/plan.c", text) == ["no-print"]


@pytest.mark.parametrize("call", ["exit(1)", "_exit(1)", "abort()"])
def test_a_library_does_not_end_the_process(lint, call):
    assert lint("csrc/core/plan.c", f"    {call};\n") == ["no-exit"]


@pytest.mark.parametrize(
    "text",
    [
        "/* printf(x); exit(1); getenv(y) */",
        "// abort();",
        'pli_fail(PL_EINVAL, "exit() or abort() or printf()");',
        "snprintf(words, n, x);",
        "fprintf(file, x);",
        "write(fd, x, n);",
        "pl_comm_abort(comm, words);",
        "comm->table->abort(comm, words);",
        "exit(1); /* lint: no-exit - the child of a fork */",
    ],
)
def test_what_only_looks_like_a_forbidden_call_passes(lint, text):
    assert lint("csrc/core/plan.c", text) == []


def test_a_lifted_rule_needs_its_reason(lint):
    assert lint("csrc/core/plan.c", "exit(1); /* lint: no-exit */") == ["no-exit"]


@pytest.mark.parametrize(
    ("path", "include", "broken"),
    [
        ("csrc/core/status.h", "include/paceline.h", False),
        ("csrc/core/status.c", "plan.h", True),
        ("csrc/core/plan.c", "status.h", False),
        ("csrc/core/plan.c", "comm/comm.h", True),
        ("csrc/reducer/reducer.c", "comm/comm.h", False),
        ("csrc/backend/cpu.c", "comm/comm.h", True),
        ("csrc/comm/shm_init.c", "backend/cpu_sum.h", False),
        ("csrc/comm/shm_init.c", "reducer/reducer.h", True),
        ("csrc/comm/shm_init.c", "python/convert.h", True),
        ("csrc/python/module.c", "reducer/reducer.h", False),
        ("csrc/elsewhere/x.c", "core/status.h", True),
    ],
)
def test_folders_of_c_know_what_the_table_says(lint, path, include, broken):
    assert lint(path, f'#include "{include}"\n') == ["layers"] * broken


@pytest.mark.parametrize(
    ("path", "line", "broken"),
    [
        ("_ddp/join.py", "from paceline import _native", False),
        ("_ddp/join.py", "from paceline._ddp import options", False),
        ("_ddp/join.py", "import paceline._ddp.options", False),
        ("_ddp/join.py", "from paceline._dp import rng", True),
        ("_ddp/join.py", "    import paceline._dp.rng", True),
        ("_ddp/join.py", "from paceline import DataParallel", True),
        ("_dp/gpus/engine.py", "from paceline._dp.rng import offset", False),
        ("_dp/gpus/engine.py", "from paceline._launch import ranks", True),
        ("_launch/processes.py", "from paceline._dp.gpus import engine", True),
        ("_compat/torch_core.py", "from paceline import _native", False),
        ("_compat/torch_core.py", "from paceline._ddp import options", True),
        ("__init__.py", "    from paceline._dp.check import check", False),
        ("_dp/check.py", "import torch", False),
    ],
)
def test_packages_know_what_the_table_says(lint, path, line, broken):
    text = (
        f"def f():\n    {line}\n" if line[0] != " " else f"if TYPE_CHECKING:\n{line}\n"
    )
    assert lint(f"python/paceline/{path}", text) == ["packages"] * broken


def test_circles_are_found_and_imports_for_hints_are_none(rules, tmp_path):
    folder = tmp_path / "python/paceline/_ddp"
    folder.mkdir(parents=True)
    one, other, third = (folder / f"{name}.py" for name in ("one", "other", "third"))
    one.write_text("from paceline._ddp import other\n")
    other.write_text("def f():\n    from paceline._ddp.third import x\n")
    third.write_text("if TYPE_CHECKING:\n    from paceline._ddp.one import x\n")
    assert rules.run(tmp_path) == []
    third.write_text("from paceline._ddp.one import x\n")
    words = "python/paceline: circle: _ddp.one _ddp.other _ddp.third"
    assert rules.run(tmp_path) == [words]


def test_circles_of_includes_are_found_too(rules, tmp_path):
    folder = tmp_path / "csrc/comm"
    folder.mkdir(parents=True)
    (folder / "one.h").write_text('#include "other.h"\n')
    (folder / "other.h").write_text('#include "comm/one.h"\n')
    assert rules.run(tmp_path) == ["csrc: circle: comm/one.h comm/other.h"]


@pytest.mark.parametrize("form", ["<Python.h>", '"Python.h"'])
def test_python_is_known_in_the_binding_alone(lint, form):
    assert "layers" in lint("csrc/core/plan.c", f"#include {form}\n")


def test_a_function_may_have_sixty_lines(lint):
    assert lint("csrc/core/plan.c", function(60)) == []
    assert lint("csrc/core/plan.c", function(61)) == ["function-size"]


def test_long_tables_are_no_functions(lint):
    text = "static const int table[] = {\n" + "    1,\n" * 100 + "};\n"
    assert lint("csrc/core/plan.c", text) == []


def test_a_file_may_have_five_hundred_lines(lint):
    assert lint("python/paceline/x.py", "x = 1\n" * 500) == []
    assert lint("python/paceline/x.py", "x = 1\n" * 501) == ["file-size"]


def test_names_of_tests_are_sentences(lint):
    text = "def test_it_really_works():\n    pass\n"
    assert lint("tests/unit/test_x.py", text) == []
    assert lint("tests/unit/test_x.py", "def test_sum():\n    pass\n") == ["test-name"]
