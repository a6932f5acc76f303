"""The program ``paceline``, also started as ``python -m paceline``.

The first word is a command's name; any other word is a Python program to run, so that
``python -m paceline`` can replace ``python``.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

import paceline
from paceline._cli.options import meant

_USAGE = """\
usage: {program} script.py [argument ...]
       {program} -m module [argument ...]
       {program} -c code [argument ...]
       {program} - [argument ...]
       {program} run ...
       {program} run -n RANKS [torchrun option ...] script.py
       {program} doctor [--json]
       {program} bench [--quick] ...
       {program} top [--once] [--json]
       {program} trace [-o trace.json]

Runs a Python program as `python` would, with paceline.install() called before it:
torch.nn.DataParallel and torch.nn.parallel.DistributedDataParallel are paceline's, in
this process and in those that it starts.

  -m module      run a module, or a package's __main__
  -c code        run a program that is passed as a string
  -              run a program that is read from standard input
  -h, --help     print this and exit
  -V, --version  print the version and exit

Commands (for a script of such a name: ./doctor, or run doctor):

  run            any of the above, by name: {program} run script.py
  doctor         check this machine: what is wrong for training, and what to do
  bench          measure on this machine which wrapper, ranks and threads are fastest
  top            watch running jobs: step times, waits, which rank comes last
  trace          write running jobs' last steps as a trace for Perfetto

Under a launcher:

  torchrun --nproc-per-node 2 -m paceline train.py [argument ...]
  torchrun --nproc-per-node 2 -m paceline -m package.train [argument ...]
"""

_RUN_USAGE = """\
usage: {program} run script.py [argument ...]           (or -m module, or -c code)
       {program} run -n RANKS [option ...] script.py [argument ...]

Runs a Python program with Paceline's classes under torch's names: once, as `python`
does, or as RANKS ranks on this machine (`-n gpu`: one for each GPU).

Options come before the script; what follows it goes to the script.  With -n they are
torchrun's; useful on one machine are

  --max-restarts N         start the ranks again after a failure, N times at most
  --log-dir DIR            write each rank's output to a file; see --redirects, --tee
  --local-ranks-filter 0   show the output of these ranks alone
  -m                       what follows is a module

For several hosts call torchrun, srun or mpirun: docs/launchers.md.
"""

_STDOUT = 1
_MODULE, _SCRIPT = "python -m paceline", "paceline"


def main() -> None:
    """Read the command line, and run its command or program."""
    try:
        status = _dispatch(sys.argv[1:])
        if sys.stdout is not None:  # it may have been closed before
            sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # as when `head` ends early
            print(f"paceline: {error}", file=sys.stderr)
        # Python would write the rest at exit, and raise the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
        status = 1
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"paceline: torch is not installed: {paceline.INSTALL}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    raise SystemExit(status)


_COMMANDS = {
    "bench": "bench.command",
    "doctor": "doctor.command",
    "run": "",
    "top": "steps.top",
    "trace": "steps.trace",
}
"""The module of each command, which is imported once the command is given."""
_KNOWN = (*_COMMANDS, "--help", "--version")
_MEANS_RUN = ("launch", "train", "start", "torchrun", "python")


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    if module := _COMMANDS.get(first):
        command = importlib.import_module(f"paceline._cli.{module}")
        return int(command.main(arguments[1:], _program()))
    if first in ("-V", "--version"):
        print(f"paceline {paceline.__version__}")
        return 0
    program = arguments[1:] if first == "run" else arguments
    if program[:1] in (["-h"], ["--help"]):
        usage = _RUN_USAGE if first == "run" else _USAGE
        print(usage.format(program=_program()), end="")
        return 0
    is_word = re.fullmatch(r"[a-zA-Z][\w-]*|--[\w-]+", first) is not None
    if first != "run" and is_word and not os.path.exists(first):
        if meant(first, _MEANS_RUN):
            _refuse(
                f"unknown word {first}: {_program()} run -n 2 script.py starts ranks"
            )
        if (question := meant(first, _KNOWN)) or not first.startswith("-"):
            _refuse(f"{first} is no command and no file{question}")
    from paceline._cli import run

    try:
        run.run(program)
    except run.UsageError as error:
        _refuse(str(error), " run" if first == "run" else "")


def _program() -> str:
    """Return the command that the user typed to start this program."""
    is_script = Path(sys.argv[0]).name != "__main__.py"
    return _SCRIPT if is_script and sys.argv[0] != "-m" else _MODULE


def _refuse(message: str, command: str = "") -> NoReturn:
    more = f"{_program()}{command} --help says more"
    print(f"paceline{command}: {message} ({more})", file=sys.stderr)
    raise SystemExit(2)
