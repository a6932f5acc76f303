"""If a rank raises, dies or stops responding, every other rank raises soon."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import paceline
import torch
from check_gradients import Leaves, coefficients_for, good_steps
from checks import check, is_fake, rehearsed
from torch import Tensor
from world import World

SOON_SECONDS = rehearsed(10.0, 40.0)
DEADLINE_SECONDS = rehearsed(6, 3)
DEADLINE = (("PACELINE_TIMEOUT", str(DEADLINE_SECONDS)),)
SHAPES = [(10,), (90_000,)] * 8


class Trouble(torch.autograd.Function):
    """Does nothing in forward; runs the given action in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Any) -> Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.action()
        return grad, None


class Troubled(Leaves):
    """Its backward begins with `action`, if it is set."""

    action: Any = None

    def forward(self, coefficients: list[Tensor | None]) -> Tensor:
        loss = super().forward(coefficients)
        return loss if self.action is None else Trouble.apply(loss, self.action)


def raise_now() -> None:
    raise ArithmeticError("made for this check")


@check(worlds=(1, 2, 3))
def an_exception_in_backward(world: World) -> dict[str, Any]:
    """The rank raises it unchanged, the others raise, and the next step is right."""
    module = Troubled(SHAPES, [torch.float32])
    model = world.ours(module)
    good_steps(world, model, range(4))
    seconds, words, n_told = [], "", 0
    for round_number in range(3):
        culprit = world.rank == world.size - 1
        begin = time.monotonic()
        given = coefficients_for(world, model, 50)
        model.zero_grad()
        module.action = raise_now if culprit else None
        try:
            model(given).backward()  # the others may raise in their forward
            world.synchronize()
        except ArithmeticError:
            assert culprit
        except paceline.PeerError as error:
            assert not culprit
            words = str(error)
            assert f"rank {world.size - 1}" in words, words
            n_told += "made for this check" in words
        else:
            raise AssertionError("nothing was raised")
        seconds.append(round(time.monotonic() - begin, 3))
        world.synchronize()  # no kernel of the failed step spins on the device
        module.action = None
        good_steps(world, model, (10 * round_number, 10 * round_number + 1))
    assert max(seconds) < SOON_SECONDS, seconds
    # The message comes from the exception that Python handles.  The autograd thread of
    # a GPU may give up the backward only after it has been handled.
    assert n_told == 3 or not is_fake() or culprit, words
    return {"seconds": max(world.all(max(seconds))), "n_told": n_told, "words": words}


def lose_rank_1(world: World, number: signal.Signals, limit: float) -> dict[str, Any]:
    """Send rank 1 a signal in its backward; the other can still use the device."""
    model = world.ours(Leaves(SHAPES, [torch.float32]))
    good_steps(world, model, range(4))
    given = coefficients_for(world, model, 50)
    model.zero_grad()
    loss = model(given)
    world.meet()
    begin = time.monotonic()
    if world.rank == 1:
        Trouble.apply(loss, lambda: os.kill(os.getpid(), number)).backward()
    try:
        loss.backward()
        world.synchronize()
        model(given)  # the host may not have noticed yet
    except paceline.PeerError as error:
        words = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("a dead or silent rank went unnoticed")
    torch.ones(10, device=world.device).sum().item()
    seconds = time.monotonic() - begin
    assert "rank 1" in words, words
    assert seconds < limit, f"only after {seconds:.1f} s: {words}"
    return {"seconds": round(seconds, 2), "words": words}


@check(worlds=(2,), dying=(1,), seconds=40)
def a_rank_that_is_killed(world: World) -> dict[str, Any]:
    return lose_rank_1(world, signal.SIGKILL, SOON_SECONDS)


@check(worlds=(2,), dying=(1,), seconds=60, env=DEADLINE, fresh=True)
def a_rank_that_is_stopped(world: World) -> dict[str, Any]:
    """It is alive but does nothing: the deadline ends the wait."""
    return lose_rank_1(world, signal.SIGSTOP, DEADLINE_SECONDS + SOON_SECONDS)


@check(worlds=(2,), dying=(1,), seconds=40, fresh=True, needs_cuda=True)
def a_rank_that_ends_while_the_other_waits_on_the_device(world: World) -> Any:
    """The host sleeps in synchronize(); a watchdog ends the wait."""
    model = world.ours(Leaves(SHAPES, [torch.float32]))
    good_steps(world, model, range(4))
    given = coefficients_for(world, model, 50)
    world.meet()
    begin = time.monotonic()
    if world.rank == 1:
        busy = torch.randn(8192, 8192, device=world.device)
        for _ in range(40):
            busy = (busy @ busy).clamp(-1, 1)
        model.zero_grad()
        model(given).backward()  # its collectives wait for that
        os.kill(os.getpid(), signal.SIGKILL)
    words = ""
    try:
        model.zero_grad()
        model(given).backward()
        world.synchronize()
        model(given).backward()
    except paceline.PeerError as error:
        words = str(error)
    torch.ones(10, device=world.device).sum().item()
    seconds = time.monotonic() - begin
    assert seconds < 2 * SOON_SECONDS, f"only after {seconds:.1f} s: {words}"
    return {"seconds": round(seconds, 2), "words": words}
