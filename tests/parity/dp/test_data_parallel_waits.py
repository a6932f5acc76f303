"""Replicas that wait for one another, and forwards that wait for other threads.

A wait counts after 2 s: here after 0.05 s.
"""

import contextlib
import os
import queue
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import paceline
import pytest
import torch
from paceline._dp import threads
from programs import X, module
from replicas import ON_EACH, Twin, integers, linear, net, step
from support.threads import in_threads
from support.waiting import until
from torch.overrides import TorchFunctionMode


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE_S", 0.05)


# ---- replicas that wait for one another ----------------------------------------------


class Barrier:
    """A sum over replicas, which meet at a barrier."""

    def __init__(self, n):
        self.barrier, self.parts = threading.Barrier(n), {}

    def __deepcopy__(self, memo):
        return type(self)(1)

    def total(self, part):
        self.parts[self.barrier.wait(60)] = part
        self.barrier.wait(60)
        total = sum(each.to(part.device) for each in self.parts.values())
        self.barrier.wait(60)
        return total


def sums_up(m, x):
    y = m.first(x)
    return m.last(y + m.meeting.total(y.sum(0)))


def begun_apart(caplog):
    """The messages of calls in which replicas began to run side by side.

    On a loaded machine replicas may also wait for one another longer than is usual.
    """
    messages = [record.getMessage() for record in caplog.records]
    return [each for each in messages if "torch.nn.SyncBatchNorm over ranks" in each]


@torch.no_grad()  # a Barrier keeps graphs, and these keep their module
@ON_EACH
def test_the_function_learns_once_that_replicas_wait(wrap, caplog):
    ours = wrap(module(sums_up, first=linear(), last=net(), meeting=Barrier(1)))
    inner, expected = ours.module, ours.module(X.to(wrap.device()))
    inner.meeting = Barrier(2)
    for _ in range(3):
        out = paceline.data_parallel(inner, X, ours.device_ids)
        assert torch.equal(out, expected)
    assert len(begun_apart(caplog)) == 1


@pytest.mark.parametrize("n", [2, 3])
@ON_EACH
def test_replicas_that_wait_for_one_another_give_the_plain_results(wrap, n, caplog):
    made = module(sums_up, first=linear(), last=net(), meeting=Barrier(1))
    twin = Twin(wrap, made, n)
    twin.inner.meeting = Barrier(n)
    for _ in range(3):
        twin.step(step, X.clone().requires_grad_())
    for model in twin.models:
        model.eval()
    with torch.no_grad():
        twin.compare(lambda model, x: model(x), X)
    (training, evaluation) = begun_apart(caplog)
    assert training == evaluation


def test_a_forked_child_may_run_replicas_that_wait(wrap):
    ours = wrap(module(sums_up, first=linear(), last=net(), meeting=Barrier(1)))
    ours.module.meeting = Barrier(2)
    _, expected = ours(X), ours(X)
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(not torch.equal(ours(X), expected))
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(ours(X), expected)


class NoAnswer(ValueError):
    """Has no text once its arguments are changed."""

    def __str__(self):
        return "{}, {}".format(*self.args)


def waits_or_fails(m, x):
    """Rows of 1 wait for an answer; rows of 2 fail once others have begun to wait."""
    if x[0, 0] == 1:
        m.box.begun.put(0)
        m.box.answers.get(timeout=60)
    if x[0, 0] == 2:
        m.box.begun.get(timeout=60)
        raise m.box.error
    return m.layer(x)


def waiting(wrap):
    ours = wrap(module(waits_or_fails, layer=linear()))
    box = ours.module.box = SimpleNamespace(
        begun=queue.Queue(), answers=queue.Queue(), error=ValueError("no answer")
    )
    return ours, box


def rows(*values):
    return (
        torch.tensor(values, dtype=X.dtype).repeat_interleave(3)[:, None].expand(-1, 3)
    )


ROWS = rows(0, 3)


@ON_EACH
def test_an_error_does_not_wait_for_a_replica_that_waits_for_the_failed_one(wrap):
    ours, box = waiting(wrap)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"in replica 0 (?s:.)*no answer"):
            ours(rows(2, 1))
        assert torch.equal(ours(ROWS), ours.module(ROWS.to(wrap.device())))
    box.error = NoAnswer("no", "answer")
    with pytest.raises(NoAnswer):
        ours(rows(2, 1))
    for _ in range(3):
        box.answers.put(0)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="sends signals")
@ON_EACH
def test_replicas_that_wait_for_ever_can_be_interrupted(wrap):
    ours, box = waiting(wrap)

    def interrupt():
        for _ in range(2):
            box.begun.get()
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(2):  # one after the other at first, then side by side
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            ours(rows(1, 1))
        thread.join()
        assert torch.equal(ours(ROWS), ours.module(ROWS.to(wrap.device())))
    for _ in range(4):
        box.answers.put(0)


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


@contextlib.contextmanager
def answered_after(words, box, caplog):
    """Answer the replica that waits once the log has these words."""

    def answer():
        while words not in caplog.text:
            time.sleep(0.01)
        box.answers.put(0)

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    thread.join()


@ON_EACH
def test_a_wait_that_threads_cannot_end_is_told_of(wrap, caplog):
    ours, box = waiting(wrap)
    with answered_after("this call may never end", box, caplog), Mode():
        out = ours(rows(1, 0))
    assert torch.equal(out, ours.module.layer(rows(1, 0).to(out.device)))


@ON_EACH
def test_a_first_call_that_waits_for_a_failed_replica_logs_the_error(wrap, caplog):
    """Later calls raise it, and leave the replica behind that waits."""
    ours, box = waiting(wrap)
    failure = pytest.raises(ValueError, match=r"in replica 1 (?s:.)*no answer")
    with answered_after("ValueError: no answer", box, caplog), failure:
        ours(rows(1, 2))
    for _ in range(2):
        with failure:
            ours(rows(1, 2))
        assert torch.equal(ours(ROWS), ours.module(ROWS.to(wrap.device())))
    for _ in range(2):
        box.answers.put(0)


# ---- a forward that waits for a thread -----------------------------------------------


@ON_EACH
def test_a_forward_may_wait_for_a_thread_that_calls_the_same_wrapper(wrap):
    found = {}

    def asks(m, x):
        if not m.is_asking(x):
            return m.layer(x)
        (out,) = in_threads(lambda _: found["model"](integers(5, 3).to(x.device)), 1)
        return m.layer(x) + out.sum(0).to(x.device)

    made = module(asks, layer=linear(), is_asking=lambda x: x[0, 0] > 9)
    twin = Twin(wrap, made)

    def loss(model, x):
        found["model"] = model
        return step(model, x)

    for _ in range(3):
        twin.step(loss, X + 20)
        twin.step(loss, X)


class Thing: ...


def test_variables_of_a_forward_that_was_watched_are_freed(wrap, monkeypatch):
    monkeypatch.setattr(threads, "PATIENCE_S", 2.0)  # each thread is looked at in 0.5 s
    held = []

    def rests(m, x):
        thing = Thing()
        held.append(weakref.ref(thing))
        time.sleep(0.6)
        return m.layer(x)

    wrap(module(rests, layer=linear()))(X)
    assert until(lambda: not any(thing() for thing in held), seconds=0.2)
