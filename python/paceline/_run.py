"""``python -m paceline``: runs a program as ``python`` would, with paceline installed.

The program gets a ``__main__`` of its own, for good: what it pickles or hands to other
processes by name is found there, also in threads and at exit.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
import types
import zipfile
from types import TracebackType
from typing import Any, NoReturn

import paceline
from paceline import _install

USAGE = """\
usage: python -m paceline script.py [argument ...]
       python -m paceline -m module [argument ...]
       python -m paceline -c code [argument ...]
       python -m paceline - [argument ...]

Runs a Python program as `python` would, with paceline.install() called before it:
torch.nn.DataParallel and torch.nn.parallel.DistributedDataParallel are paceline's, in
this process and in those that it starts.

  -m module      run a module, or a package's __main__
  -c code        run a program that is passed as a string
  -              run a program that is read from standard input
  -h, --help     print this and exit
  -V, --version  print the version and exit

Under a launcher:

  torchrun --nproc-per-node 2 -m paceline train.py [argument ...]
  torchrun --nproc-per-node 2 -m paceline -m package.train [argument ...]
"""


def main() -> None:
    """Read the command line, and run what it says."""
    words = sys.argv[1:]
    if not words:
        _refuse("give a script, -m module or -c code")
    first, rest = words[0], words[1:]
    if first in ("-h", "--help"):
        print(USAGE, end="")
    elif first in ("-V", "--version"):
        print(f"paceline {paceline.__version__}")
    elif first[:2] in ("-m", "-c"):
        attached = first[2:]
        if not attached and not rest:
            _refuse(f"argument expected for the {first} option")
        value, args = (attached, rest) if attached else (rest[0], rest[1:])
        if first[1] == "m":
            _run_module(value, args)
        else:
            _run_code(value, ["-c", *args], "<string>")
    elif first == "-":
        _run_code(sys.stdin.buffer.read(), ["-", *rest], "<stdin>")
    elif first.startswith("-"):
        _refuse(f"unknown option {first}")
    else:
        _run_script(first, rest)


def _refuse(words: str) -> NoReturn:
    print(f"paceline: {words}\n{USAGE}", end="", file=sys.stderr)
    raise SystemExit(2)


def _begin(argv: list[str], first_path: str | None) -> dict[str, Any]:
    """Make everything as Python leaves it to a program; return its globals.

    `first_path` takes the place of the current folder, which is what ``-m`` has put
    first in ``sys.path``, unless Python was told to put nothing there.
    """
    sys.argv[:] = argv
    if first_path is not None and not _has_no_first_path():
        sys.path[0] = first_path
    program = types.ModuleType("__main__")
    space = vars(program)
    space["__loader__"] = importlib.machinery.BuiltinImporter
    space["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        space["__annotations__"] = {}
    sys.modules["__main__"] = program
    _install.install()
    return space


def _has_no_first_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def _run_script(path: str, args: list[str]) -> None:
    full = os.path.join(os.getcwd(), path)
    if os.path.isdir(path) or (os.path.isfile(path) and zipfile.is_zipfile(path)):
        if _has_no_first_path():
            sys.path.insert(0, full)
        space = _begin([path, *args], full)
        _guard(space, lambda: _run_as_main("__main__", False))
        return
    try:
        with open(path, "rb") as file:
            source = file.read()  # once: it may be a pipe
    except OSError as error:
        print(
            f"paceline: can't open file {full!r}: [Errno {error.errno}] "
            f"{error.strerror}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    code = pkgutil.read_code(io.BytesIO(source))
    space = _begin([path, *args], os.path.dirname(_without_links(path)))
    kind: Any = importlib.machinery.SourceFileLoader
    if code is not None:
        kind = importlib.machinery.SourcelessFileLoader
    space.update(__file__=full, __cached__=None, __loader__=kind("__main__", full))

    def run() -> None:
        exec(code or compile(source, full, "exec", dont_inherit=True), space)

    _guard(space, run)


def _without_links(path: str) -> str:
    """Return where a script lies, as Python has it: a pipe's name leads nowhere."""
    with contextlib.suppress(OSError):  # where it is no link
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    try:
        return os.path.realpath(path, strict=True)
    except OSError:
        return path


def _run_module(name: str, args: list[str]) -> None:
    space = _begin(["-m", *args], None)
    _guard(space, lambda: _run_as_main(name, True))


def _run_code(source: str | bytes, argv: list[str], name: str) -> None:
    space = _begin(argv, "")
    _guard(space, lambda: exec(compile(source, name, "exec", dont_inherit=True), space))


def _run_as_main(name: str, alter_argv: bool) -> None:
    # What `python -m` itself calls: it runs in the globals of `__main__`.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _guard(space: dict[str, Any], run: Any) -> None:
    """Run; have an error that nobody catches shown without our frames."""
    try:
        run()
    except SystemExit:
        raise
    except BaseException:
        show = sys.excepthook

        def show_without_ours(
            kind: type[BaseException],
            error: BaseException,
            trace: TracebackType | None,
        ) -> None:
            sys.excepthook = show
            rest = _after_ours(trace)
            show(kind, error.with_traceback(rest), rest)

        sys.excepthook = show_without_ours
        raise


def _after_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return what follows the last frame of this module's."""
    rest, each = trace, trace
    while each is not None:
        if each.tb_frame.f_globals is globals():
            rest = each.tb_next
        each = each.tb_next
    return rest
