"""Random programs do the same with replicas as with the plain module.

Sixty fixed programs run on the CPU, and on 2 to 4 GPUs; `make fuzz-dp` draws any number
of others.
"""

import pytest
from drawn_features import ANYWHERE, CODE, INPUTS, LAYERS, STATE
from drawn_programs import (
    ONLY_ON_THE_CPU,
    Differs,
    Program,
    Step,
    draw,
    each_change,
    run,
)
from kept import as_new
from support import fake_gpus

pytestmark = pytest.mark.filterwarnings("ignore:.* rows for each row of the batch")
N_PROGRAMS, FIRST_SEED = 60, 20261122


def test_drawn_programs_do_as_the_plain_module():
    for seed in range(FIRST_SEED, FIRST_SEED + N_PROGRAMS):
        run(draw(seed))


def test_drawn_programs_do_as_the_plain_module_on_gpus():
    """With and without peer access; as late as possible, and at drawn times."""
    begin = FIRST_SEED + N_PROGRAMS
    for seed in range(begin, begin + N_PROGRAMS):
        n_gpus = 2 + seed % 3
        options = [f"peers={seed // 2 % 2}"]
        if seed % 2:
            options += ["schedule=random", "pump=1", f"seed={seed}"]
        with fake_gpus.several(n_gpus, *options):
            run(draw(seed), list(range(n_gpus)))


def test_each_change_of_each_feature_is_followed():
    """On GPUs, except for changes that torch refuses on devices."""
    with fake_gpus.several(3, "peers=0"), as_new():
        errors = [run(program, [0, 1, 2]) for program in each_change()]
    for program in each_change():
        if any(word in str(program) for word in ONLY_ON_THE_CPU):
            run(program)
    assert errors.count("TypeError") == 2  # from None + a tensor
    assert set(errors) == {None, "TypeError"}


def test_a_seed_draws_one_program():
    assert str(draw(3)) == str(draw(3))
    assert str(draw(3)) != str(draw(4))


def test_each_feature_is_drawn():
    texts = [draw(seed).text for seed in range(300)]
    for features in (LAYERS, STATE, CODE, INPUTS):
        for name, feature in features.items():
            begin = (feature.methods or feature.forward or feature.outside).strip()
            assert any(begin.split("$")[0] in text for text in texts), name
    steps = [step for seed in range(300) for step in draw(seed).steps]
    assert all(any(change in step.changes for step in steps) for change in ANYWHERE)


WRONG = """
import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return x + len(x)
"""


def test_a_program_that_does_something_else_is_found():
    program = Program(0, WRONG, [Step((), 7, "no_grad")])
    with pytest.raises(Differs, match="at step 0"):
        run(program)
