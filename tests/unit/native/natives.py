"""Make the native module's objects, in a world of one rank."""

import functools
import hmac

import torch
from paceline import _native
from paceline._compat import torch_core
from torch import nn

MIB = 1 << 20

torch_core.attach()


def make_world(**changes):
    given = {
        "rank": 0,
        "world_size": 1,
        "arena_bytes": 4096,
        "n_ops": 8,
        "timeout": 5.0,
        "pids": [0],
        "meeting": None if "group_comm" in changes else _native.Listener(),
        "prove": functools.partial(hmac.digest, b"the tests' secret", digest="sha256"),
    }
    return _native.RankWorld(**{**given, **changes})


def make_reducer(world=None, params=None, buffers=(), sizes=(MIB, MIB // 4, 1024)):
    params = [nn.Parameter(torch.ones(3))] if params is None else params
    world = make_world(arena_bytes=MIB) if world is None else world
    return _native.Reducer(world, list(params), list(buffers), *sizes)


def follow(failed, made):
    """Let a new reducer follow one whose step has failed, as the wrapper does."""
    assert failed.has_failed
    assert failed.check_failure() is None
    made.follow(failed)
    failed.detach()
    return made


def watched_net():
    return nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)
    )
