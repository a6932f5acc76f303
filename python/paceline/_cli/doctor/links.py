"""The check of shared memory between ranks: two processes add up a known pattern.

Each rank fills its part of the world's memory, both all-reduce it, as a step of
DistributedDataParallel does, and each compares every element.  No torch is needed.
"""

from __future__ import annotations

import functools
import hmac
import multiprocessing
import os
import time
from array import array
from typing import Any

from paceline._cli.doctor.finding import Finding, describe, ok, problem, size

N_RANKS = 2
_PERIOD = 1009  # a prime: data that is moved by any power of two differs
_N_PERIODS = 2048
_N_ELEMS = _PERIOD * _N_PERIODS
_N_BYTES = 4 * _N_ELEMS
_N_ROUNDS = 3
_SECONDS = 20.0
_LAST_SECONDS = 1.0  # for the words of rank 1, once rank 0 has failed
_fork = multiprocessing.get_context("fork")  # nothing has started a thread yet


def look_links() -> Finding:
    """Start the second rank, act as the first, and add up the pattern."""
    from paceline import _native

    began = time.monotonic()
    listener = _native.Listener()
    here, there = _fork.Pipe()
    other = _fork.Process(target=_be_rank_1, args=(listener.address, there))
    other.start()
    there.close()
    n_wrong, error = _add_up(0, [os.getpid(), other.pid], listener)
    n_more, others_error = 0, ""
    try:
        if not error or here.poll(_LAST_SECONDS):
            n_more, others_error = here.recv()
    except EOFError:
        others_error = "its process has ended"
    other.kill()
    if others_error:
        error = f"{error or 'no sums'}; rank 1: {others_error}"
    return judge_links(time.monotonic() - began, n_wrong + n_more, error)


def _be_rank_1(address: str, answers: Any) -> None:
    answers.send(_add_up(1, [os.getppid(), os.getpid()], address))


def _add_up(rank: int, pids: Any, meeting: Any) -> tuple[int, str]:
    """Act as a rank; return how many elements were wrong, or why it failed."""
    from paceline import _native

    prove = functools.partial(hmac.digest, b"", digest="sha256")  # without a secret
    try:
        world = _native.RankWorld(
            rank, N_RANKS, _N_BYTES, 2, _SECONDS, pids, meeting, prove=prove
        )
        n_wrong = _all_reduce_patterns(world)
        world.leave()
    except Exception as error:
        return 0, describe(error)
    return n_wrong, ""


def _all_reduce_patterns(world: Any) -> int:
    """Add up the ranks' patterns, several times; return how many elements are wrong."""
    memory = memoryview(world).cast("B")
    n_wrong = 0
    for round_number in range(_N_ROUNDS):
        memory[:_N_BYTES] = pattern(world.rank + 1, round_number)
        ticket = world.issue("all-reduce", "float32", "sum", 0, _N_ELEMS)
        world.wait(ticket)
        n_wrong += n_different(
            bytes(memory[:_N_BYTES]), pattern(sum(range(1, N_RANKS + 1)), round_number)
        )
    return n_wrong


def pattern(factor: int, round_number: int) -> bytes:
    """Return the numbers of a rank and round: small integers, exact in float32."""
    numbers = (factor * (i + round_number) for i in range(_PERIOD))
    return array("f", numbers).tobytes() * _N_PERIODS


def n_different(found: bytes, expected: bytes) -> int:
    """Return how many elements differ."""
    if found == expected:
        return 0
    elements = (memoryview(data).cast("I") for data in (found, expected))
    return sum(a != b for a, b in zip(*elements, strict=True))


def judge_links(seconds: float, n_wrong: int, error: str = "") -> Finding:
    """Judge whether ranks on the CPU get right sums."""
    if error:
        return problem(
            error,
            "Two ranks could not share memory on this machine: ranks average by the "
            "process group, which is slower, or fail, and launch() fails. Allow "
            "memfd_create and pidfd_open (Linux 5.3) in the container's seccomp "
            "profile, raise its memory limit and `ulimit -n`, and see that `ulimit -f` "
            "and `ulimit -v` are unlimited.",
        )
    found = f"{N_RANKS} ranks added up {size(_N_ROUNDS * _N_BYTES)} in {seconds:.1f} s"
    if n_wrong:
        return problem(
            f"{found}: {n_wrong} elements are wrong",
            "Do not train on this machine: its memory or processor gives wrong "
            "results. Try PACELINE_ISA=plain, and test the memory (memtester).",
        )
    return ok(f"{found}, every element right")
