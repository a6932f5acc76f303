"""Tests on ranks with simulated GPUs: see support/fake_gpus.py."""

import functools

import cases
from support import fake_gpus


def on_gpus(*n_ranks, **axes):
    """Run a function on ranks with one GPU each, like `cases.on_ranks`."""

    def decorate(body):
        @functools.wraps(body)
        def run(ranks, *point):
            with fake_gpus.on_gpu(ranks.rank):
                body(ranks, *point)

        return cases.on_ranks(*n_ranks, **axes)(run)

    return decorate
