"""A neighbour on the host, while the ranks of a job meet over a Unix socket.

The neighbour has found the socket's name, and takes a rank's place before the rank
comes, or keeps rank 0 busy.
"""

import contextlib
import ctypes
import functools
import hmac
import os
import secrets
import socket
import struct
import threading
import time

import pytest
from paceline import _native
from support.ranks import start_ranks, tell, values
from support.waiting import until

KEY, OTHER_KEY = secrets.token_bytes(32), secrets.token_bytes(32)
MAGIC = b"p-hello2"
GREETING, JOIN = struct.Struct("=8s32s"), struct.Struct("=8sii32s32s")
REPLY = struct.Struct("=8s32sii464s")
SECONDS = 30.0
CLONE_NEWPID = 0x20000000
NO_SECRET = "does not have this job's secret"

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root makes PID namespaces and becomes other users"
)


# ---- the job: two processes, in a PID namespace of their own or not -----------------


def be_rank(rank, pids, meeting, key):
    """Make a world of two, add up a number, and end this process."""
    status = 1
    try:
        prove = functools.partial(hmac.digest, key, digest="sha256")
        world = _native.RankWorld(rank, 2, 4096, 8, SECONDS, pids, meeting, prove=prove)
        memory = memoryview(world).cast("B").cast("i")
        memory[0] = rank + 1
        world.wait(world.issue("all-reduce", "int32", "sum", 0, 1))
        status = 0 if memory[0] == 3 else 2
        world.leave()
    except Exception as error:
        print(f"rank {rank}: {error!r}", flush=True)
    finally:
        os._exit(status)


def run_a_job(_, __, has_namespace, are_pids_known, key, go):
    """Start rank 0, tell its address, and start rank 1 once the file `go` exists."""
    if has_namespace and ctypes.CDLL(None).unshare(CLONE_NEWPID) != 0:
        return "no namespace"
    reader, writer = os.pipe()
    at, addresses = os.pipe()
    first = os.fork()  # process 1 of the namespace, which ends with it
    if first == 0:
        listener = _native.Listener()
        os.write(addresses, listener.address.encode())
        os.close(writer)
        second = int(os.read(reader, 20))
        be_rank(0, [os.getpid(), second] if are_pids_known else [0, 0], listener, key)
    address = os.read(at, 100).decode()
    go_on, told = os.pipe()
    second = os.fork()
    if second == 0:
        os.write(told, b"%d" % os.getpid())
        until(lambda: os.path.exists(go), SECONDS)
        pids = [1 if has_namespace else first, os.getpid()]
        be_rank(1, pids if are_pids_known else [0, 0], address, key)
    os.write(writer, os.read(go_on, 20))
    tell(address)
    return [os.waitpid(pid, 0)[1] for pid in (second, first)]


def attack(tmp_path, act, *, has_namespace=False, are_pids_known=True):
    """Call `act` with the address of a job's rank 0; check that its ranks meet."""
    go = tmp_path / "go"
    options = (has_namespace, are_pids_known, KEY, str(go))
    with start_ranks(run_a_job, 1, *options, rendezvous="none") as ranks:
        address = ranks.hear(0)
        try:
            found = act(address)
        finally:
            go.touch()
        (outcome,) = ranks.wait()
    (statuses,) = values([outcome])
    if statuses == "no namespace":
        pytest.skip("this system makes no PID namespace")
    assert statuses == [0, 0], outcome.output
    return found


# ---- neighbours that know the protocol ----------------------------------------------


def reach(address):
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(SECONDS)
    found.connect(f"\0{address}")
    return found


def proof_of(key, side, greeted, mine, rank):
    message = struct.pack("=8s32s32sii", side, greeted, mine, rank, 0)
    return hmac.digest(key, message, "sha256")


def take_rank_1s_place(address, key, is_replay=False, user=0):
    """Join as rank 1; return the reply's words, or None if a descriptor came."""
    os.seteuid(user)
    try:
        found, recorded = reach(address), reach(address)
    finally:
        os.seteuid(0) if user else None
    with found, recorded:
        greetings = [GREETING.unpack(each.recv(1024)) for each in (found, recorded)]
        assert all(magic == MAGIC for magic, _ in greetings)
        mine = secrets.token_bytes(32)
        proof = proof_of(key, b"join", greetings[is_replay][1], mine, 1)
        found.send(JOIN.pack(MAGIC, 1, 0, mine, proof))
        reply, fds, _, _ = socket.recv_fds(found, 1024, 1)
        _, _, status, _, words = REPLY.unpack(reply)
        assert not fds
        return words.rstrip(b"\0").decode() if status else None


NOT_RANK_1 = "is not rank 1, which is process"


@needs_root
@pytest.mark.parametrize(
    ("job", "stranger", "words"),
    [
        # The kernel shows rank 0 no process id of a caller outside its namespace.
        ({"has_namespace": True}, {"key": OTHER_KEY}, f"process 0 {NOT_RANK_1} 2"),
        ({"has_namespace": True}, {"key": KEY}, f"process 0 {NOT_RANK_1} 2"),
        ({}, {"key": KEY}, NOT_RANK_1),
        ({}, {"key": KEY, "user": 12345}, NOT_RANK_1),
        ({"are_pids_known": False}, {"key": OTHER_KEY}, NO_SECRET),
        ({"are_pids_known": False}, {"key": KEY, "is_replay": True}, NO_SECRET),
        ({"are_pids_known": False}, {"key": OTHER_KEY, "user": 12345}, NO_SECRET),
    ],
    ids=[
        "in another PID namespace",
        "in another PID namespace, with the secret",
        "another process, with the secret",
        "another user, with the secret",
        "unknown processes",
        "a replay among unknown processes",
        "another user among unknown processes",
    ],
)
def test_a_stranger_takes_no_ranks_place(job, stranger, words, tmp_path):
    refusal = attack(
        tmp_path, lambda address: take_rank_1s_place(address, **stranger), **job
    )
    assert words in refusal


# ---- neighbours that keep rank 0 busy -----------------------------------------------


def say_nothing(address, is_over):
    with reach(address):
        is_over.wait(SECONDS)


def send_random_bytes(address, is_over):
    while not is_over.is_set():
        with reach(address) as found:
            found.send(secrets.token_bytes(JOIN.size))


def hang_up(address, is_over):
    while not is_over.is_set():
        reach(address).close()


def flood(address, is_over):
    """Keep more connections open than rank 0 reads from at a time."""
    found = []
    try:
        while not is_over.is_set():
            found.append(reach(address))
            if len(found) > 700:
                found.pop(0).close()
    finally:
        for each in found:
            each.close()


@pytest.mark.parametrize(
    "neighbour",
    [say_nothing, send_random_bytes, hang_up, flood],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("are_pids_known", [True, False])
def test_a_busy_stranger_keeps_no_rank_out(neighbour, are_pids_known, tmp_path):
    is_over = threading.Event()

    def act(address):
        def run():
            with contextlib.suppress(OSError):  # the ranks have met
                neighbour(address, is_over)

        threading.Thread(target=run, daemon=True).start()
        time.sleep(0.1)

    attack(tmp_path, act, are_pids_known=are_pids_known)
    is_over.set()


# ---- a proof that fails -------------------------------------------------------------


@pytest.mark.parametrize(
    ("prove", "error", "words"),
    [
        (lambda _: 1 / 0, ZeroDivisionError, "division"),
        (lambda _: b"short", TypeError, "prove has not returned 32 bytes"),
        (lambda _: "x" * 32, TypeError, "prove has not returned 32 bytes"),
        (functools.partial(hmac.digest, OTHER_KEY, digest="sha256"), None, NO_SECRET),
    ],
    ids=["raises", "short", "no bytes", "another secret"],
)
def test_a_rank_that_proves_nothing_gets_the_error_itself(prove, error, words):
    listener = _native.Listener()
    good = functools.partial(hmac.digest, KEY, digest="sha256")

    def be_rank_0():
        with pytest.raises(_native.PeerTimeoutError):
            _native.RankWorld(0, 2, 64, 2, 1.0, [0, 0], listener, prove=good)

    thread = threading.Thread(target=be_rank_0)
    thread.start()
    with pytest.raises(error or _native.PeerError, match=words):
        _native.RankWorld(1, 2, 64, 2, 5.0, [0, 0], listener.address, prove=prove)
    thread.join()
