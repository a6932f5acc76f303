"""The project's own lint finds what it should, and nothing else."""

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
    """Return the findings for files, given by their paths and texts."""

    def run(files):
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return rules.run(tmp_path)

    return run


def function(n_lines):
    return "int f(int a,\n      int b)\n{\n" + "    a++;\n" * (n_lines - 4) + "}\n"


def called_by_python(body):
    return (
        "static PyObject *name(PyObject *self,\n                      PyObject *args)\n"
        f"{{\n{body}    Py_RETURN_NONE;\n}}\n"
        'static PyMethodDef methods[] = {{"name", name, METH_NOARGS, NULL}};\n'
    )


def include(name):
    return f'#include "{name}"\n'


def rows(path, rule, *texts):
    """Return rows of a file: each text breaks the rule, or passes if rule is None."""
    return [(path, text, rule) for text in texts]


PLAN = "csrc/core/plan.c"
READS = ("x = getenv(name);", "x = secure_getenv(name);")
PRINTS = (
    'printf("x");',
    'fprintf(stderr,\n        "x");',
    'fputs("x", stdout);',
    "write(STDERR_FILENO, x, n);",
    "dprintf(2, x);",
)
ENTER = "    PLI_ENTER(self);\n"
BINDING = "csrc/python/module.c"
C_ROWS = [
    *rows(BINDING, None, called_by_python(ENTER)),
    *rows(
        BINDING, "lock", called_by_python(""), called_by_python("    int n;\n" + ENTER)
    ),
    *rows("csrc/core/config.c", None, *READS),
    *rows("csrc/comm/shm_init.c", "no-getenv", *READS),
    *rows("csrc/core/log.c", None, *PRINTS),
    *rows(PLAN, "no-print", *PRINTS),
    *rows(PLAN, "no-exit", "    exit(1);\n", "    _exit(1);\n", "    abort();\n"),
    *rows(PLAN, "no-exit", "exit(1); /* lint: no-exit */"),  # without a reason
    *rows(
        PLAN,
        None,
        "exit(1); /* lint: no-exit - the child of a fork */",
        "/* printf(x); exit(1); getenv(y) */",
        "// abort();",
        'pli_fail(PL_EINVAL, "exit() or abort() or printf()");',
        "snprintf(words, n, x);",
        "fprintf(file, x);",
        "write(fd, x, n);",
        "pl_comm_abort(comm, words);",
        "comm->table->abort(comm, words);",
    ),
    *rows("csrc/core/status.h", None, include("include/paceline.h")),
    *rows("csrc/core/status.c", "layers", include("plan.h")),
    *rows(PLAN, None, include("status.h")),
    *rows(PLAN, "layers", include("comm/comm.h"), "#include <Python.h>\n"),
    *rows(PLAN, "layers", include("Python.h")),
    *rows("csrc/reducer/reducer.c", None, include("comm/comm.h")),
    *rows("csrc/backend/cpu.c", "layers", include("comm/comm.h")),
    *rows("csrc/comm/shm_init.c", None, include("backend/cpu_sum.h")),
    *rows("csrc/comm/shm_init.c", "layers", include("reducer/reducer.h")),
    *rows("csrc/comm/shm_init.c", "layers", include("python/convert.h")),
    *rows(BINDING, None, include("reducer/reducer.h")),
    *rows("csrc/elsewhere/x.c", "layers", include("core/status.h")),
    *rows(PLAN, None, function(60)),
    *rows(PLAN, "function-size", function(61)),
    *rows(PLAN, None, "static const int t[] = {\n" + "    1,\n" * 100 + "};\n"),
    *rows(PLAN, None, "int n;\n" * 1000),
    *rows(PLAN, "file-size", "int n;\n" * 1001),
]
PYTHON_ROWS = [
    *rows("python/paceline/x.py", None, "x = 1\n" * 500),
    *rows("python/paceline/x.py", "file-size", "x = 1\n" * 501),
    *rows("tests/unit/test_x.py", None, "def test_it_really_works():\n    pass\n"),
    *rows("tests/unit/test_x.py", "test-name", "def test_sum():\n    pass\n"),
]


PAGE = "docs/page.md"
PHRASES = (
    "nobody waits",
    "a rank who waits",
    "the rank\nwhose part it is, if there\nis one: it is none",
    "Where there\nis a GPU",
    "a stream of the user's that waits",
    "a thread of its\n# own.",
    "the value is not\nto be kept",
    "a rank that is to end",
)
GOOD_PHRASES = (
    "users who read",
    "it is None",
    "if there is none",
    "`who`, ``who``",
    "to wait is to lose",
    "step(path, who): a step",
    "steps of torch's and ours",
)
WORDS_ROWS = [
    *rows(PAGE, "words", *PHRASES),
    *rows(PAGE, None, *GOOD_PHRASES, "```\nwho waits\n```"),
    *rows(PLAN, "words", "/* a rank\n * who waits */", 'x = "told to"\n    " nobody";'),
    *rows(
        PLAN, None, "int who;", 'x = "who";', "/* lint: words - nobody is an account */"
    ),
    *rows(
        "setup.py", "words", 'x = f"{n} who"', "# nobody\n", '"""Told to\nnobody."""'
    ),
    *rows("setup.py", None, "nobody = 1", 'x = f"{who + n} is"', 'y["who"]'),
]


def layered(path, rule, *lines):
    """Return rows of a file of the package; indented imports are only for hints."""
    texts = [
        f"if TYPE_CHECKING:\n{line}\n" if line[0] == " " else f"def f():\n    {line}\n"
        for line in lines
    ]
    return rows(f"python/paceline/{path}", rule, *texts)


PYTHON_ROWS += [
    *layered("_ddp/join.py", None, "from paceline import _native"),
    *layered("_ddp/join.py", None, "from paceline._ddp import options"),
    *layered("_ddp/join.py", None, "import paceline._ddp.options"),
    *layered("_ddp/join.py", "packages", "from paceline._dp import rng"),
    *layered("_ddp/join.py", "packages", "    import paceline._dp.rng"),
    *layered("_ddp/join.py", "packages", "from paceline import DataParallel"),
    *layered("_dp/engine.py", None, "from paceline._dp.rng import offset"),
    *layered("_dp/engine.py", "packages", "from paceline._launch import ranks"),
    *layered("_launch/processes.py", "packages", "from paceline._dp import engine"),
    *layered("_compat/torch_core.py", None, "from paceline import _native"),
    *layered("_compat/torch_core.py", "packages", "from paceline._ddp import options"),
    *layered("__init__.py", None, "    from paceline._dp.check import check"),
    *layered("_dp/check.py", None, "import torch"),
]


DIST = "import torch.distributed as dist\n"
UNPICKLES = (
    "import pickle",
    "import cloudpickle as c",
    "from pickle import loads",
    DIST + "dist.all_gather_object(a, b)",
    DIST + "dist.broadcast_object_list(a)",
    "import torch\ntorch.distributed.gather_object(a)",
    "from torch.distributed import send_object_list",
    "torch.load(file, weights_only=False)",
)
PYTHON_ROWS += [
    *rows("python/paceline/_ddp/peers.py", "pickle", *UNPICKLES),
    *rows("python/paceline/_launch/payloads.py", None, *UNPICKLES),
    *rows("python/paceline/_cloudpickle.py", None, "import cloudpickle"),
    *rows(
        "python/paceline/_values.py",
        None,
        DIST + "dist.all_gather(a, b)",
        "import copyreg\ncopyreg.pickle(a, b)",
        "torch.load(file, weights_only=weights_only)",
        "import pickle  # lint: pickle - reads what this process wrote",
    ),
]


@pytest.mark.parametrize(("path", "text", "rule"), C_ROWS + PYTHON_ROWS + WORDS_ROWS)
def test_a_file_breaks_the_rule_that_it_is_said_to_break(lint, path, text, rule):
    broken = [line.split(": ")[1] for line in lint({path: text})]
    assert broken == ([] if rule is None else [rule])


@pytest.mark.parametrize("start", ["", "if TYPE_CHECKING:\n    "])
def test_circles_are_found_and_imports_for_hints_close_them(lint, start):
    files = {
        "one": "from paceline._ddp import other\n",
        "other": "def f():\n    from paceline._ddp.third import x\n",
    }
    assert (
        lint({f"python/paceline/_ddp/{k}.py": text for k, text in files.items()}) == []
    )
    words = "python/paceline: circle: _ddp.one _ddp.other _ddp.third"
    closing = f"{start}from paceline._ddp.one import x\n"
    assert lint({"python/paceline/_ddp/third.py": closing}) == [words]


def test_circles_of_includes_are_found_too(lint):
    one, other = "csrc/comm/one.h", "csrc/comm/other.h"
    found = lint({one: include("other.h"), other: include("comm/one.h")})
    assert found == ["csrc: circle: comm/one.h comm/other.h"]


def test_a_folder_that_outgrows_its_budget_is_said(lint):
    files = {"csrc/core/a.c": "\n" * 5, "csrc/core/b.h": "\n" * 3}
    files |= {"python/paceline/_cli/doctor/x.py": "\n" * 4}
    rows = '"csrc/core" = 8\n"python/paceline/_cli" = {}\n'
    assert lint({**files, "tests/lint/budget.toml": rows.format(4)}) == []
    (said,) = lint({"tests/lint/budget.toml": rows.format(3)})
    assert said.endswith("python/paceline/_cli has 4 lines, 1 more than its budget")
    (said,) = lint({"tests/lint/budget.toml": '"python/paceline/_cli" = 4\n'})
    assert "csrc/core has 8 lines, 8 more than its budget" in said
