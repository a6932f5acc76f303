"""Runs torch's own tests of DistributedDataParallel with our class in torch's place.

They lie in the torch wheel: `torch.testing._internal.distributed.distributed_test`.
Each test runs in two fresh ranks, forked from a server that has imported all of it, and
is watched: how often either class was built, what was raised, and whether it ended in
time.  Run by hand it takes names (all without any):

    python tests/parity/upstream/torch_suite.py [--torch] [--how adapted] [NAME ...]

`torch_suite_list.py` says which tests there are, and how each is run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDERS = str(HERE), str(HERE.parents[1])
sys.path[:0] = [path for path in FOLDERS if path not in sys.path]

import torch_suite_list  # noqa: E402
from support.ranks import (  # noqa: E402
    Outcome,
    Ranks,
    RanksFailedError,
    RanksTimeoutError,
    preload,
    start_ranks,
    tell,
)

N_RANKS = 2
TIMEOUT = 60.0  # of one test, in seconds: the longest takes a fifth of it
GROUP_TIMEOUT = 20  # torch has 60; a few tests have their own
HOWS = ("plain", "strict", "adapted", "adapted, strict")
HANGS = "hangs on purpose"
FOREIGN = "with torch's constructor"


@dataclass(frozen=True)
class Verdict:
    """What became of one test."""

    kind: str  # "passes", "skipped", "fails", "hangs"
    words: str = ""  # why, of the first rank that has something to say
    built: tuple[int, ...] = ()  # by rank: constructors run of the class under test
    foreign: tuple[int, ...] = ()  # by rank: constructors run of torch's class

    def __str__(self) -> str:
        return f"{self.kind} (built {self.built}, torch's {self.foreign}) {self.words}"


# ---- in a rank ----------------------------------------------------------------------


class _Watch:
    """Puts a class in torch's place, and counts what is built of it and of torch's."""

    def __init__(self, is_torch: bool) -> None:
        from torch.nn.parallel import distributed

        self.is_torch = is_torch
        self.built = self.foreign = 0
        theirs = distributed.DistributedDataParallel
        self.wrapper: Any = theirs
        if not is_torch:
            import paceline

            self.wrapper = paceline.DistributedDataParallel
            theirs.__init__ = self._refuse  # type: ignore[method-assign]
        construct = self.wrapper.__init__

        def __init__(*args: Any, **kwargs: Any) -> None:
            self.built += 1
            construct(*args, **kwargs)

        self.wrapper.__init__ = __init__

    def rebind(self) -> None:
        """Have every name that torch's tests look up mean our class."""
        import paceline
        from torch.testing._internal.distributed import distributed_test

        with warnings.catch_warnings():  # of the names that torch's modules took
            warnings.simplefilter("ignore", UserWarning)
            paceline.install()
        distributed_test.DistributedDataParallel = self.wrapper  # as if after it

    def _refuse(self, *_: Any, **__: Any) -> None:
        self.foreign += 1
        raise AssertionError("torch's own constructor was run")


def _make_case(test: str, rank: int, folder: str) -> Any:
    """Return torch's test case as its own runner makes it in a rank."""
    import torch.distributed as dist
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test as torchs

    class Case(torchs.TestDistBackend, torchs.DistributedTest._DistTestBase):
        pass

    torchs.INIT_METHOD = f"file://{folder}/init"
    case = Case(test)
    case.rank, case.file_name = rank, f"{folder}/group"
    common_utils.set_rng_seed(common_utils.SEED)
    dist.init_process_group(
        "gloo",
        init_method=case.init_method,
        world_size=N_RANKS,
        rank=rank,
        timeout=timedelta(seconds=torchs.CUSTOM_PG_TIMEOUT.get(test, GROUP_TIMEOUT)),
    )
    case._barrier()
    return case


def _run_case(test: str, rank: int, how: str, watch: _Watch) -> None:
    import cpu_shim
    import torch.distributed as dist

    if how == HANGS:
        time.sleep(TIMEOUT)
    if not watch.is_torch and how != FOREIGN:
        watch.rebind()
    case = _make_case(test, rank, os.environ["TEMP_DIR"])
    function = getattr(type(case), test)
    if how.startswith("adapted"):
        cpu_shim.install(watch.wrapper, N_RANKS)
        function = cpu_shim.bare(function)
    elif getattr(function, "__unittest_skip__", False):
        raise unittest.SkipTest(function.__unittest_skip_why__)
    function(case)
    case._barrier()
    dist.destroy_process_group()


def _reason(leave: SystemExit) -> str:
    """Return why a test of torch's was skipped, which it says by its exit code."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == leave.code:
            return skip.message
    return ""


def run_in_rank(rank: int, _: int, test: str, how: str, is_torch: bool) -> None:
    """Run one of torch's tests in this rank, and tell what became of it."""
    watch = _Watch(is_torch)
    kind, words = "passes", ""
    try:
        _run_case(test, rank, how, watch)
    except unittest.SkipTest as skip:
        kind, words = "skipped", str(skip)
    except SystemExit as leave:
        words = _reason(leave)
        kind = "skipped" if words else "fails"
    except BaseException:
        kind, words = "fails", traceback.format_exc()
    tell((kind, words, watch.built, watch.foreign))
    if kind == "fails":
        os._exit(1)  # the other rank must not wait for this one


# ---- in the process that starts ranks -----------------------------------------------


def run(test: str, how: str, is_torch: bool = False) -> Verdict:
    """Run one test in fresh ranks; never longer than `TIMEOUT`."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("barrier", "test_dir", "init_dir"):
            os.mkdir(f"{folder}/{name}")
        env = {"TEMP_DIR": folder, "MASTER_ADDR": "127.0.0.1"}
        if how.endswith("strict"):
            env["PACELINE_STRICT"] = "1"
        with start_ranks(
            run_in_rank,
            N_RANKS,
            *(test, how, is_torch),
            timeout=3.0 if how == HANGS else TIMEOUT,
            rendezvous="none",
            env=env,
        ) as ranks:
            try:
                told = [_told(ranks, outcome) for outcome in ranks.wait()]
            except RanksTimeoutError as late:
                return Verdict("hangs", str(late))
    kinds = [row[0] for row in told]
    kind = next(kind for kind in ("fails", "skipped", "passes") if kind in kinds)
    words = "\n".join(row[1] for row in told if row[0] == kind)
    return Verdict(
        kind, words, tuple(row[2] for row in told), tuple(row[3] for row in told)
    )


def _told(ranks: Ranks, outcome: Outcome) -> tuple[str, str, int, int]:
    try:
        kind, words, built, foreign = ranks.hear(outcome.rank)
    except RanksFailedError as died:
        return "fails", str(died), 0, 0
    if kind == "fails":
        words = f"rank {outcome.rank}: {words}\n{outcome.output}"
    return kind, words, built, foreign


def serve(requests: Iterable[str]) -> Iterator[str]:
    """Answer each line, the JSON of `run`'s arguments, by a line with the verdict's."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(N_RANKS), TEMP_DIR="/tmp")
    preload("torch.testing._internal.distributed.distributed_test", "cpu_shim")
    for line in requests:
        yield json.dumps(asdict(run(*json.loads(line))))


class Server:
    """A process of its own that runs tests: importing torch's tests changes torch."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, test: str, how: str, is_torch: bool = False) -> Verdict:
        """Run one test."""
        to_server, from_server = self._process.stdin, self._process.stdout
        assert to_server is not None
        assert from_server is not None
        to_server.write(json.dumps((test, how, is_torch)) + "\n")
        to_server.flush()
        line = from_server.readline()
        assert line, "the process that runs torch's tests has died"
        answer = json.loads(line)
        built, foreign = tuple(answer.pop("built")), tuple(answer.pop("foreign"))
        return Verdict(**answer, built=built, foreign=foreign)

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(30)


# ---- by hand ------------------------------------------------------------------------


def _main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of tests; all without any")
    parser.add_argument("--how", choices=HOWS, help="the list's without it")
    parser.add_argument("--torch", action="store_true", help="with torch's own class")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what torch's modules print when they are imported
        for answer in serve(sys.stdin):
            print(answer, file=answers, flush=True)
        return 0
    server = Server()
    n_bad = 0
    for name in arguments.names or torch_suite_list.RUN:
        start = time.monotonic()
        how = arguments.how or torch_suite_list.RUN.get(name, "adapted")
        verdict = server.run(name, how, arguments.torch)
        n_bad += verdict.kind not in ("passes", "skipped")
        print(f"{name} {time.monotonic() - start:.1f}s: {verdict}", flush=True)
    server.close()
    return n_bad


if __name__ == "__main__":
    sys.exit(_main())
