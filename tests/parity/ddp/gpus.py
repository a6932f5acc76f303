"""Tests of ranks, on GPUs that a fake library stands for: see support/fake_gpus.py."""

import functools
import importlib

import cases
from support import fake_gpus


def on_gpus(*n_ranks, **axes):
    """Run a function on ranks that have a GPU each; as `cases.on_ranks`."""

    def decorate(body):
        @functools.wraps(body)
        def run(ranks, *point):
            with fake_gpus.on_gpu(ranks.rank):
                body(ranks, *point)

        return cases.on_ranks(*n_ranks, **axes)(run)

    return decorate


def again(home, into, names, *rows):
    """Make tests of a file anew, on GPUs.

    Parameters
    ----------
    home : str
        The file, `test_gradients`, whose tests are `on_ranks`.
    into : dict
        The globals of the file that is to have them.
    names : str
        Tests for 2 ranks, with all values of their axes.
    *rows : (str, tuple of int, dict)
        A test's name, how many ranks, and values of its axes in place of its own.
    """
    there = importlib.import_module(home)
    for name, n_ranks, axes in [*((name, (2,), {}) for name in names.split()), *rows]:
        body = getattr(there, name)
        original = getattr(body, "axes", {})
        assert axes.keys() <= original.keys(), name
        into[name] = on_gpus(*n_ranks, **{**original, **axes})(body)
