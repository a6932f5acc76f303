"""Mistakes that newcomers make: each is one line that says what to write."""

import subprocess
import sys
import warnings

import paceline
import pytest
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x).mean()


def replicas(module=None):
    return paceline.DataParallel(module or Net(), ["cpu", "cpu"])


MISTAKES = [
    (
        lambda: paceline.DistributedDataParallel(Net()),
        ValueError,
        "Default process group has not been initialized, please make sure to call "
        "init_process_group. paceline.init() does it, before the model is wrapped, in "
        "a script that `paceline run -n 2 train.py` or a launcher starts",
    ),
    (
        lambda: replicas(Net),
        TypeError,
        "module is the class Net: give an object, such as Net()",
    ),
    (lambda: replicas([Net()]), TypeError, "module is list: give a torch.nn.Module"),
    *(
        (
            lambda short=short: getattr(paceline, short),
            AttributeError,
            f"module 'paceline' has no attribute '{short}': did you mean {name}?",
        )
        for short, name in {
            "DDP": "DistributedDataParallel",
            "DP": "DataParallel",
            "gathr": "gather",
        }.items()
    ),
    (
        lambda: paceline.init(backend="glo"),
        ValueError,
        "backend is 'glo', and torch has no 'glo': leave it out, or give 'gloo' or "
        "'cpu:gloo,cuda:nccl' (torch has gloo, nccl",
    ),
    (
        lambda: paceline.init(backend=5),
        TypeError,
        "backend is 5: give a name such as 'gloo', or None",
    ),
    (
        lambda: paceline.save("model.pt", Net()),
        TypeError,
        "path is a Net: give save(obj, path)",
    ),
]


@pytest.mark.parametrize(("make", "kind", "words"), MISTAKES)
def test_a_mistake_of_a_newcomer_says_what_to_write(make, kind, words):
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value).startswith(words)


def test_a_loss_from_forward_is_warned_of_at_the_line_that_calls():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replicas()(torch.ones(4, 2))
    (found,) = caught
    assert found.filename == __file__
    assert str(found.message) == (
        "forward returns a scalar, such as a loss, on each of 2 replicas: they are "
        "joined into a vector; write .mean() before backward()"
    )


HIDDEN = """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Finder)
sys.argv = ["paceline", *sys.argv[1:]]
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import paceline; paceline.DataParallel",
            "paceline.DataParallel needs torch, ",
        ),
        ("from paceline._cli.main import main; main()", "paceline: torch "),
    ],
)
def test_a_missing_torch_is_one_line_with_what_to_install(code, words):
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN + code, "bench"], capture_output=True, text=True
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.removeprefix("ModuleNotFoundError: ").startswith(words)
    assert last.endswith(
        "not installed: pip install torch, with the build for your machine"
    )
    assert "import torch" not in done.stderr
