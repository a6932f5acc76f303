"""``python -m paceline``: starts ``python`` anew, with paceline installed.

The arguments that follow go to Python as they are, in the place of this process.
Paceline reaches the program as :func:`paceline.install` reaches children: the program
finds everything as Python leaves it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NoReturn

import paceline
from paceline._install import rebind

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
    arguments = sys.argv[1:]
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        print(USAGE, end="")
    elif first in ("-V", "--version"):
        print(f"paceline {paceline.__version__}")
    elif not arguments:
        _refuse("give a script, -m module or -c code")
    elif first in ("-m", "-c") and len(arguments) == 1:
        _refuse(f"argument expected for the {first} option")
    elif first.startswith("-") and first != "-" and first[:2] not in ("-m", "-c"):
        _refuse(f"unknown option {first}")
    else:
        command = _command(arguments)
        _reach()
        os.execv(sys.executable, command)


def _refuse(message: str) -> NoReturn:
    print(f"paceline: {message}\n{USAGE}", end="", file=sys.stderr)
    raise SystemExit(2)


def _command(arguments: list[str]) -> list[str]:
    """Return this process's command line without ``-m paceline``."""
    *head, last = sys.orig_argv[: -len(arguments)]
    if last == "paceline" and head:
        last = head.pop() + last
    # Python takes several options in one argument: -um paceline.
    found = re.fullmatch(r"-([A-Za-z]*)mpaceline", last)
    if found is None or sys.orig_argv[-len(arguments) :] != arguments:
        _refuse("start it by python -m paceline, or call paceline.install()")
    flags = [f"-{found[1]}"] if found[1] else []
    return [sys.executable, *head[1:], *flags, *arguments]


def _reach() -> None:
    """Have the program that follows be reached, or refuse to start it."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        _refuse("Python with -I, -E or -S cannot be reached: call paceline.install()")
    home = str(Path(__file__).absolute().parents[2])
    is_safe = getattr(sys.flags, "safe_path", False)
    if not is_safe and sys.path[0] == home and home not in sys.path[1:]:
        _refuse("it is found in the current folder, unlike by programs: install it")
    rebind.install()
    if not rebind.reaches_children():
        _refuse("the environment does not reach programs: call paceline.install()")
