"""Python programs that start in 30 ms: forked from a process that has imported torch.

    done = warm.run([sys.executable, "train.py", "2"], capture_output=True, text=True)

`Popen` and `run` take the arguments of those of `subprocess`.  A command that is this
Python with a script, `-m module` or `-c code` is forked.  `subprocess` itself starts
every other command, and one with a `preexec_fn` or with options of Python.  A program
that was forked starts Python programs in the same way, by `subprocess` as well as by
multiprocessing's "spawn".

    this process  -- command, environment, descriptors -->  server, its child
         |                                                    fork, fork
         +------------------ parent of -----------------------  the program

The server forks twice.  The intermediate process ends at once, and the kernel gives the
program to its nearest ancestor that is a "subreaper".  This process is one during the
call.  So `waitpid` and `getppid` treat the program as a child of this process, and it
is in this process's session and process group.

At its end, a program runs the handlers of atexit and drops its main module's objects,
as Python does.  Then it skips the destruction of all modules, which takes a third of a
second, unless `is_whole` is set.

A program does not get this process's resource limits, options of Python, or a
`sitecustomize`.  `first` is code that sets its limits; it runs before the program, and
before programs that it starts.  To test how an interpreter starts, use `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

_PRELOAD = [
    "torch",
    "torch.distributed.run",
    "torch.multiprocessing",
    "torch._dynamo",  # 2 s, which every optimizer's first step would take
    "torch.profiler",  # imported by the first step of a DataLoader
    "paceline._ddp.distributed",
    "paceline._dp.data_parallel",
    "paceline._launch.rank",
]
_PRELOAD_IF_THERE = ["sklearn.datasets"]  # for the examples
_TESTS = str(Path(__file__).parents[1])
_MOST_BYTES = 1 << 18
_MOST_FDS = 64
_HIGH_FD = 64  # the first descriptor that a program does not use
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
_SIGNALS += [signal.SIGUSR1, signal.SIGUSR2]
SERVER = "warm-server"
"""The name of a server in /proc/PID/comm."""

_INTERRUPTED = -signal.SIGINT

_prctl = ctypes.CDLL(None).prctl
_popen = subprocess.Popen
_spawnv = multiprocessing.util.spawnv_passfds


# ---- in the process that starts programs --------------------------------------------


class _Server:
    """The connection to the server that forks programs; both end with this process."""

    _current: _Server | None = None

    def __init__(self, connection: socket.socket) -> None:
        self._lock = threading.Lock()
        self._socket = connection

    @classmethod
    def of_this_process(cls) -> _Server:
        """Return the server; the first call starts it."""
        if cls._current is None:
            ours, theirs = _make_sockets()
            env = {**os.environ, "PYTHONPATH": _TESTS, "OPENBLAS_NUM_THREADS": "1"}
            for name in ("OMP_NUM_THREADS", "PACELINE_INSTALL"):
                env.pop(name, None)
            with theirs:
                _popen(
                    [sys.executable, "-c", f"{_ENTRY}({theirs.fileno()})"],
                    stdin=subprocess.DEVNULL,
                    env=env,
                    pass_fds=[theirs.fileno()],
                )
            cls._current = cls(ours)
        return cls._current

    @classmethod
    def forget(cls) -> None:
        """Close the connection in a forked child, which needs its own server."""
        if cls._current is not None:
            cls._current._socket.close()
            cls._current = None

    def start(self, words: dict[str, Any], fds: Sequence[int]) -> int:
        """Start a program as a child of this process; return its process id."""
        with self._lock:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(words).encode()], fds)
                return int(self._socket.recv(_MOST_BYTES))
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_ENTRY = "__import__('support.warm').warm._serve"
os.register_at_fork(after_in_child=_Server.forget)


def _make_sockets(least: int = _HIGH_FD) -> tuple[socket.socket, socket.socket]:
    """Return the client's socket, numbered from `least` on, and the server's."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_BYTES)
    high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, least)
    ours.close()
    return socket.socket(fileno=high), theirs


def _read_command(command: Any) -> list[str] | None:
    """Return the arguments of Python in a command; None if it cannot be forked."""
    if isinstance(command, str | bytes | os.PathLike):
        return None
    executable, *words = map(os.fsdecode, command)
    if executable != sys.executable:
        return None
    while words[:1] in (["-u"], ["-B"]):  # a forked program writes each line at once
        del words[0]
    is_known = bool(words) and (words[0] in ("-c", "-m") or words[0][:1] != "-")
    return words if is_known else None


def _start(
    words: list[str],
    targets: Sequence[int],
    fds: Sequence[int],
    env: Any = None,
    folder: Any = None,
    is_session: bool = False,
    first: str = "",
    is_whole: bool = False,
    is_leaf: bool = False,
) -> int:
    env = os.environ if env is None else env
    told = {
        "words": words,
        "env": {os.fsdecode(k): os.fsdecode(v) for k, v in env.items()},
        "folder": os.path.abspath(os.fsdecode(folder or ".")),
        "targets": list(targets),
        "is_session": is_session,
        "first": first,
        "is_whole": is_whole,
        "is_leaf": is_leaf,
    }
    return _Server.of_this_process().start(told, fds)


class Popen(_popen):
    """`subprocess.Popen`, but forks commands that run this Python."""

    def __init__(
        self, *args: Any, first: str = "", is_whole: bool = False, **options: Any
    ) -> None:
        self._more = {"first": first, "is_whole": is_whole}
        super().__init__(*args, **options)

    def _execute_child(self, *given: Any) -> None:
        args, _, preexec_fn, _, pass_fds, folder, env, _, _, shell, *rest = given
        pipes, is_session = rest[:6], rest[11]
        words = None if preexec_fn or shell else _read_command(args)
        if words is None:
            assert not self._more["first"], "this command cannot be forked"
            super()._execute_child(*given)  # type: ignore[misc]
            return
        ends = [pipes[0], pipes[3], pipes[5]]
        fds = [k if fd == -1 else fd for k, fd in enumerate(ends)]
        targets = [0, 1, 2, *pass_fds]
        self.args = args
        fds += pass_fds
        self.pid = _start(words, targets, fds, env, folder, is_session, **self._more)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Rank(Popen):
    """A rank of `paceline.launch`; `subprocess` starts the programs of the rank."""

    def _execute_child(self, *given: Any) -> None:
        self._more["is_leaf"] = True
        super()._execute_child(*given)


def run(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, but forks a command that runs this Python."""
    with _replaced(subprocess, Popen=Popen):
        return subprocess.run(command, **options)


@contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def ranks_of_launch() -> Iterator[None]:
    """Have `paceline.launch` in this process fork its ranks."""
    from paceline._launch import processes

    stand_in = types.SimpleNamespace(
        Popen=_Rank,
        DEVNULL=subprocess.DEVNULL,
        PIPE=subprocess.PIPE,
        _args_from_interpreter_flags=list,
    )
    with _replaced(processes, subprocess=stand_in):
        yield


def _spawn(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """`multiprocessing.util.spawnv_passfds`, but forks the child."""
    words = _read_command(args)
    if words is None:
        return _spawnv(path, args, passfds)
    fds = [0, 1, 2, *passfds]
    return _start(words, fds, fds)


# ---- in the server ------------------------------------------------------------------


def _serve(fd: int) -> None:
    """Import what programs import, then fork them; return when a program ends."""
    subprocess.Popen = Popen  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = _spawn
    for module in _PRELOAD:  # some import Popen and the like by name
        importlib.import_module(module)
    for module in _PRELOAD_IF_THERE:
        with suppress(ImportError):
            importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()
    ours = [path for path in ("", _TESTS) if path in sys.path]
    for path in ours:
        sys.path.remove(path)
    _fork_programs(socket.socket(fileno=fd))()


def _fork_programs(asked: socket.socket) -> Callable[[], None]:
    """Fork programs until the client ends; return in each program, with its code."""
    _prctl(_PR_SET_NAME, SERVER.encode(), 0, 0, 0)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # they are meant for the client's group
    while True:
        words, fds, _, _ = socket.recv_fds(asked, _MOST_BYTES, _MOST_FDS)
        if not words:
            os._exit(0)
        told = json.loads(words)
        pid = _fork_twice()
        if pid == 0:
            asked.close()
            return _prepare(told, fds)
        for fd in fds:
            os.close(fd)
        asked.send(str(pid).encode())


def _fork_twice() -> int:
    """Fork a grandchild; return its id, or 0 in it, once the child has ended."""
    ids, go_on = os.pipe(), os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            os.write(ids[1], str(pid).encode())
            os._exit(0)
        for fd in (*ids, go_on[1]):
            os.close(fd)
        os.read(go_on[0], 1)  # until the intermediate process has ended
        os.close(go_on[0])
        return 0
    os.waitpid(middle, 0)
    pid = int(os.read(ids[0], 20))
    for fd in (*ids, *go_on):
        os.close(fd)
    return pid


# ---- in a program -------------------------------------------------------------------


def _prepare(told: dict[str, Any], fds: list[int]) -> Callable[[], None]:
    """Become a program; return the code of it, or of a program that it starts."""
    if told["is_session"]:
        os.setsid()
    exec(told["first"], {})
    least = max(_HIGH_FD, *told["targets"]) + 1
    if told["is_leaf"]:
        subprocess.Popen = _popen  # type: ignore[misc]
        multiprocessing.util.spawnv_passfds = _spawnv
    else:
        ours, theirs = _make_sockets(least)
        if os.fork() == 0:  # now, before there is another thread
            ours.close()
            for fd in fds:
                os.close(fd)
            return _fork_programs(theirs)
        theirs.close()
        _Server._current = _Server(ours)
    _take_descriptors(told["targets"], fds, least)
    _take_environment(told)
    return lambda: (_run if told["is_whole"] else _run_and_end)(told["words"])


def _take_descriptors(targets: list[int], fds: list[int], least: int) -> None:
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(high, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    for number, name, mode in (
        (0, "stdin", "r"),
        (1, "stdout", "w"),
        (2, "stderr", "w"),
    ):
        errors = "backslashreplace" if name == "stderr" else None
        stream = open(number, mode, errors=errors, closefd=False)  # noqa: SIM115
        if mode == "w":
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _take_environment(told: dict[str, Any]) -> None:
    import numpy as np
    import torch

    _prctl(_PR_SET_NAME, b"python", 0, 0, 0)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["env"])
    multiprocessing.process.ORIGINAL_DIR = told["folder"]  # type: ignore[attr-defined]
    n_cores = len(os.sched_getaffinity(0))
    n_threads = int(told["env"].get("OMP_NUM_THREADS", n_cores))
    if n_threads != torch.get_num_threads():  # may start threads
        torch.set_num_threads(n_threads)
    np.random.seed()


def _run_and_end(words: list[str]) -> NoReturn:
    status = 0
    try:
        _run(words)
    except SystemExit as error:
        is_words = not isinstance(error.code, int | None)
        if is_words:
            print(error.code, file=sys.stderr)
        status = 1 if is_words else int(error.code or 0)
    except BaseException as error:
        kind, sys.last_value, trace = type(error), error, error.__traceback__
        sys.excepthook(kind, error, trace)
        status = _INTERRUPTED if kind is KeyboardInterrupt else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if status == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _run(words: list[str]) -> None:
    """Run a script, a module or code as Python's main program."""
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *words]
    sys.excepthook = _show_error
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = filter(None, paths)
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        if not hasattr(sys.modules.get(words[1]), "__path__"):
            sys.modules.pop(words[1], None)  # it runs as __main__
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        code: Any = words[1]
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        sys.argv = words
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    exec(code, vars(main))


def _show_error(kind: Any, error: BaseException, trace: Any) -> None:
    """Show an error without the frames of this file, as Python shows it."""
    frames, first = [], 0
    while trace is not None:
        frames.append(trace)
        if trace.tb_frame.f_code.co_filename == __file__:
            first = len(frames)
        trace = trace.tb_next
    own = frames[first] if first < len(frames) else None
    sys.__excepthook__(kind, error.with_traceback(own), own)
