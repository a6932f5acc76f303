"""The facts of errors whose messages the tests in tests/ranks do not produce."""

import pickle
import signal
import subprocess

import paceline
import pytest

DIED = "rank 2: rank 3 (process 0) died (step 5, in forward, after operation 4)"
OWN = "\n\nIts own failure message:\n"
FACTS = [  # the message, the rank at fault and its step
    (f"rank 0: the step has failed ({DIED})", 3, 5),
    (f"rank 1: the step of rank 0 failed (step 9, in forward){OWN}{DIED}", 3, 5),
    (f"rank 1: the step of rank 0 failed{OWN}paceline.PeerError: {DIED}", 3, 5),
    (f"rank 1: the step of rank 0 failed{OWN}  f()\npaceline.PeerError: {DIED}", 3, 5),
    (
        f"rank 1: the step of rank 0 failed{OWN}a:\npaceline.PeerError: rank 0: "
        "the step has failed (rank 0: ranks 2 to 3 (host 1) died or left)",
        None,
        None,
    ),
    (f"rank 1: this rank's step failed (step 9, in forward){OWN}KeyError", 1, 9),
    (f"rank 0: the step of rank 1 failed (step 9, in a){OWN}KeyError: {DIED}", 1, 9),
    (
        f"{DIED}{OWN}rank 3: the step of rank 0 failed (step 4, in a){OWN}rank 0: a",
        3,
        5,
    ),
    (
        f"{DIED}{OWN}rank 3: the step of rank 1 failed{OWN}rank 1: rank 0 (host 0)",
        0,
        None,
    ),
    (f"{DIED}{OWN}rank 3: ranks 0 to 1 (host 0): the connection", None, None),
    (
        "rank 0: rank 1 left the construction (a.PeerError: rank 1: ranks 2 to 3",
        None,
        None,
    ),
    ("rank 0: rank 1 left the construction (KeyboardInterrupt)", 1, None),
    ("rank 0: a step has ended on some ranks only (rank 1 has", None, None),
    (f"rank 0: the step of ranks 2 to 3 (host 1) failed{OWN}rank 3: a", 3, None),
    ("rank 0: ranks 2 to 3 (host 1) kept this rank waiting for 6 seconds", None, None),
    ("rank 1: ranks [2] have not come to this construction within 9 s", 2, None),
    ("rank 1: ranks [0, 2] have not come to this construction", None, None),
    ("rank 1: one of ranks [0, 2] was lost during construction (timeout)", None, None),
    ("rank 1: rank 0, which hosts the group's store, was lost during", 0, None),
    ("rank 1: the group's store, which rank 0 or the launcher hosts,", None, None),
    ("rank 2 could not make its world: no room", 2, None),
    (f"rank 1: rank 0 could not make the world: {DIED} or gave up", 3, 5),
    ("a step has failed on rank 1 (no room), and its process group", 1, None),
    ("rank 2: this rank issued another operation (step 4, in forward)", 2, 4),
    ("rank 2: this rank and rank 1 wait (in this one, rank 1: step 3, in a)", 1, 3),
    ("rank 0's module is on cpu, rank 2's on cuda:0: move all", 2, None),
    ("rank 2: the ranks are not in the same step. rank 0: 1; rank 1: 2", None, None),
    ("rank 0: save(rng=True) waits for rank 1: call it on", 1, None),
    ("rank 0: mean() waits for another rank: call it on", None, None),
    ("", None, None),
]


@pytest.mark.parametrize(("message", "rank", "step"), FACTS)
def test_an_error_has_the_facts_of_its_message_and_keeps_them(message, rank, step):
    for kind in (paceline.PeerError, paceline.PeerTimeoutError, paceline.MismatchError):
        for error in (kind(message), pickle.loads(pickle.dumps(kind(message)))):
            assert (error.rank, error.step, error.signal) == (rank, step, None)
            assert str(error) == message


def test_an_error_keeps_the_signal_that_ended_the_rank_if_it_can_be_known():
    process = subprocess.Popen(["sleep", "60"])
    process.kill()
    while not paceline._native.has_ended(process.pid):
        pass
    words = f"rank 0: rank 1 (process {process.pid}) died (step 2, in forward)"
    error = paceline.PeerError(words)
    process.wait()
    assert paceline.PeerError(words).signal is None  # its parent has reaped it
    assert pickle.loads(pickle.dumps(error)).signal == signal.SIGKILL
