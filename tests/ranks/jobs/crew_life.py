"""A process with a crew, for tests of how it ends: python crew_life.py HOW N_WORKERS.

It prints one line of process ids when all is set up: its own, its workers', and its
forked child's, if any.  Then it does what HOW says; no main guard, on purpose.
"""

import os
import sys
import time

import torch
from paceline import PeerError
from paceline._crew import Crew
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


crew = Crew(n_workers, "support.echo:Echo")
if how != "starting":
    crew.wait_until_ready()
    for channel in crew.channels:
        channel.post(ECHO, b"", [torch.ones(3)])
        assert channel.wait(copy=True)[2][0].tolist() == [1.0] * 3
if how == "with a forked child":
    fork_child()
if how in ("spinning", "sleeping", "computing", "interrupted", "caught"):
    words = {"spinning": SPINS, "sleeping": SLEEPS, "computing": COMPUTES}
    again = b"import time; time.sleep(1.5); words = b'late'"
    for channel in crew.channels:
        channel.post(RUN, words.get(how, again if how == "caught" else SPINS), [])


def announce():
    print(os.getpid(), *crew.pids, *child, flush=True)


if how != "caught":
    announce()
if how == "interrupted":
    crew.channels[0].wait(copy=True)
elif how == "caught":
    try:
        announce()  # the signal may come at once
        crew.channels[0].wait(copy=True)
    except KeyboardInterrupt:
        for channel in crew.channels:
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
    crew.channels[0].post(RUN, SPINS, [])
elif how == "forks and exits":
    if os.fork() == 0:
        try:
            crew.channels[0].post(ECHO, b"", [])
        except RuntimeError as error:
            print(error, flush=True)
        crew.close()
        sys.exit(0)  # with all its handlers
    os.wait()
    crew.channels[0].post(ECHO, b"still there", [])
    print(crew.channels[0].wait(copy=True)[1].decode(), flush=True)
elif how == "loses":
    os.kill(crew.pids[0], 9)
    try:
        crew.channels[0].post(ECHO, b"", [])
        crew.channels[0].wait(copy=True)
    except PeerError as error:
        print(error, flush=True)
else:
    time.sleep(600)
