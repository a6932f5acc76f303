"""``paceline run``: replaces this process by ``python``, with paceline installed.

The arguments go to Python unchanged.  Paceline reaches the program in the way in which
:func:`paceline.install` reaches children, so the program finds everything as in plain
Python.  With ``-n`` that program is torchrun.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any, NoReturn

from paceline import _cgroup, _environment
from paceline._install import rebind


class UsageError(Exception):
    """The command line names no program that can be run."""


def run(arguments: list[str]) -> NoReturn:
    """Replace this process by a Python program.

    Raises
    ------
    UsageError
        If the arguments name no program, or Paceline cannot be installed for it.
    """
    first = arguments[0] if arguments else ""
    if first[:2] == "-n":
        arguments, first = _as_ranks(first[2:], arguments[1:]), "-m"
    if not arguments:
        raise UsageError("give a script, -m module or -c code")
    if first in ("-m", "-c") and len(arguments) == 1:
        raise UsageError(f"argument expected for the {first} option")
    if first.startswith("-") and first != "-" and first[:2] not in ("-m", "-c"):
        raise UsageError(f"unknown option {first}")
    flags = _python_flags()
    if first.endswith(".py") and arguments[1:2] == ["-n"]:
        hint = f"paceline run: -n goes to {first}; for ranks write -n before {first}"
        print(hint, file=sys.stderr, flush=True)
    _reach()
    os.execv(sys.executable, [sys.executable, *flags, *arguments])


def _as_ranks(n: str, arguments: list[str]) -> list[str]:
    """Return the arguments that start n ranks on this machine, by torchrun."""
    if not n and arguments:
        n, *arguments = arguments
    import torch
    from torch.distributed.run import get_args_parser

    if n == "gpu":  # and remains so without a GPU
        n = str(torch.cuda.device_count() or n)
    if not (n.isascii() and n.isdigit() and int(n) > 0):
        words = "torch sees no GPU here (`paceline doctor` says why): " * (n == "gpu")
        raise UsageError(
            f"-n {n}: {words}give a number of ranks, or gpu for one per GPU"
        )
    parser: Any = get_args_parser()
    parser.error = _refuse
    given = parser.parse_args([f"--nproc-per-node={n}", *arguments])
    if given.training_script == "-":
        raise UsageError(
            "ranks cannot share the standard input: write the program to a file"
        )
    if given.nproc_per_node != n:
        raise UsageError(f"-n {n} and --nproc-per-node {given.nproc_per_node}: give -n")
    if given.nnodes not in ("1", "1:1") or given.rdzv_endpoint or given.node_rank:
        raise UsageError("run -n is for one machine: for several, call torchrun")
    os.environ.setdefault("OMP_NUM_THREADS", str(_cgroup.threads_of_each(int(n))))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not os.environ.get(_environment.SECRET):
        os.environ[_environment.SECRET] = secrets.token_hex(32)
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--local-addr=127.0.0.1", f"--nproc-per-node={n}", *arguments]


def _refuse(message: str) -> NoReturn:
    """Take the place of the error of torchrun's parser, which prints all its usage."""
    is_script_missing = "training_script" in message
    raise UsageError("give a script or -m module" if is_script_missing else message)


def _python_flags() -> list[str]:
    """Return the options that this process's Python was started with."""
    n_own = len(sys.argv) - 1
    *head, last = sys.orig_argv[: len(sys.orig_argv) - n_own]
    is_own = sys.orig_argv[len(sys.orig_argv) - n_own :] == sys.argv[1:]
    if is_own and head and last == sys.argv[0] and Path(last).name == "paceline":
        return head[1:]  # the script that the package's installer has made
    if last == "paceline" and head:
        last = head.pop() + last
    # Python takes several options in one argument: -um paceline.
    found = re.fullmatch(r"-([A-Za-z]*)mpaceline", last)
    if found is None or not is_own:
        raise UsageError("start it by python -m paceline, or call paceline.install()")
    return [*head[1:], *([f"-{found[1]}"] if found[1] else [])]


def _reach() -> None:
    """Install Paceline for the program that follows; raise if that has no effect."""
    if not rebind.reaches_children():
        raise UsageError(f"{rebind.NOT_REACHED}: call paceline.install() there")
    rebind.install()
