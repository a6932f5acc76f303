"""A process with workers, for tests of how it ends: worker_group_life.py HOW N_WORKERS.

It prints one line of process ids when all is set up: its own, its workers', and its
forked child's, if any.  Then it does what HOW says; no main guard, on purpose.
"""

import os
import sys
import time

import torch
from paceline import PeerError
from paceline._workers.group import WorkerGroup
from support.echo import ECHO, RUN

how, n_workers = sys.argv[1], int(sys.argv[2])
SPINS = b"while True: pass"
SLEEPS = b"import time; time.sleep(600)"
COMPUTES = (
    b"import torch; x = torch.ones(300, 300)\nwhile True: x = (x @ x).clamp(0, 1)"
)
child = []


def fork_child():
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    child.append(pid)


workers = WorkerGroup(n_workers, "support.echo:Echo")
if how != "starting":
    workers.wait_until_ready()
    for channel in workers.channels:
        channel.post(ECHO, b"", [torch.ones(3)])
        assert channel.wait(copy=True)[2][0].tolist() == [1.0] * 3
if how == "with a forked child":
    fork_child()
if how == "busy in every way":  # one of four is idle
    for channel, words in zip(
        workers.channels, (SPINS, SLEEPS, COMPUTES), strict=False
    ):
        channel.post(RUN, words, [])
elif how in ("interrupted", "caught"):
    again = b"import time; time.sleep(1.5); words = b'late'"
    for channel in workers.channels:
        channel.post(RUN, again if how == "caught" else SPINS, [])


def announce():
    print(os.getpid(), *workers.pids, *child, flush=True)


if how != "caught":
    announce()
if how == "interrupted":
    workers.channels[0].wait(copy=True)
elif how == "caught":
    try:
        announce()  # the signal may come at once
        workers.channels[0].wait(copy=True)
    except KeyboardInterrupt:
        for channel in workers.channels:
            channel.post(ECHO, b"again", [torch.ones(2)])
            assert channel.wait(copy=True)[1] == b"again"
        print("goes on", flush=True)
elif how == "becomes another":
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
elif how == "exits":
    pass
elif how == "raises":
    raise ValueError("on purpose")
elif how == "exits busy":
    workers.channels[0].post(RUN, SPINS, [])
elif how == "forks and exits":
    if os.fork() == 0:
        try:
            workers.channels[0].post(ECHO, b"", [])
        except RuntimeError as error:
            print(error, flush=True)
        workers.close()
        sys.exit(0)  # with all its handlers
    os.wait()
    workers.channels[0].post(ECHO, b"still there", [])
    print(workers.channels[0].wait(copy=True)[1].decode(), flush=True)
elif how == "loses":
    os.kill(workers.pids[0], 9)
    try:
        workers.channels[0].post(ECHO, b"", [])
        workers.channels[0].wait(copy=True)
    except PeerError as error:
        print(error, flush=True)
else:
    time.sleep(600)
