"""Type checkers and Python accept the types of paceline's names."""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paceline import DataParallel, DistributedDataParallel
from paceline._compat import torch_core

ROOT = Path(__file__).parents[2]

# Every checker must report exactly the lines that end in "# error".
SCRIPT = """\
# pyright: standard
import copy

import paceline
import torch


class Net(torch.nn.Module):
    def width(self) -> int:
        return 3


class Mine(paceline.DataParallel[Net]): ...


def train(steps: int, name: str = "") -> float:
    return steps / 2


replicas = paceline.DataParallel(Net(), ["cpu", "cpu"])
wrapper = paceline.DistributedDataParallel(Net(), strict=True)
width: int = replicas.module.width() + wrapper.module.width()
width = copy.deepcopy(wrapper).train().module.width() + Mine(Net()).module.width()
width = paceline.DataParallel[Net](Net()).module.width()
replicas.module.no_such()  # error
text: str = wrapper.module  # error
paceline.DistributedDataParallel[Net](torch.nn.Linear(2, 1))  # error
of_any: paceline.DistributedDataParallel = wrapper.to("cpu")
parameters = list(of_any.module.parameters())
torchs: torch.nn.parallel.DistributedDataParallel = wrapper
torch_replicas: torch.nn.DataParallel[Net] = replicas
paceline.DataParalell(Net())  # error
from paceline import lanch  # error
losses: list[float] = paceline.launch(train, 2, 3, name="run")
losses = paceline.launch(train, n=2, steps=3)
losses = paceline.launch(train, 2, 3, backend="gloo", timeout=60)
losses = paceline.launch(train, 2, 3, timeout=60, name="run")
paceline.launch(train, 2, "3")  # error
paceline.launch(train, 2)  # error
paceline.launch(train, 2, 3, title="run")  # error
names: list[str] = paceline.launch(train, 2, 3)  # error
paceline.save(wrapper, "model.pt", prefix="strip")
paceline.save(wrapper, "model.pt", prefix="stripped")  # error
with wrapper.no_sync(), wrapper.no_sync(enabled=False):
    is_srun = paceline.init().launcher == "slurm"
loss: float = paceline.mean(0.5, weight=3)
means: dict[str, float] = paceline.mean({"loss": 0.5})
rows: torch.Tensor = paceline.gather(paceline.mean(torch.ones(2)))
loss = paceline.mean(torch.ones(2))  # error
report: paceline.Report = paceline.check(Net(), torch.ones(2))
with paceline.init().first(), paceline.install() as installation:
    paceline.init().barrier(timeout="1")  # error
launcher: str = paceline.init(backend=2).launcher  # error
"""
CHECKERS = {
    "mypy": ["--config-file", str(ROOT / "pyproject.toml")],
    "basedpyright": ["--pythonpath", sys.executable],  # pyright, with its own Node
}


@pytest.mark.skipif(
    torch_core.version() < (2, 13), reason="types of torch differ before 2.13"
)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_finds_the_wrong_lines_and_no_others(checker, tmp_path):
    pytest.importorskip(checker)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", checker, *CHECKERS[checker], tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = re.findall(r"script\.py:(\d+):(?:\d+)?[ -]*:? ?error", done.stdout)
    lines = enumerate(SCRIPT.splitlines(), 1)
    wrong = {str(i) for i, line in lines if line.endswith("# error")}
    assert {*said} == wrong, done.stdout + done.stderr


@pytest.mark.parametrize("kind", [DataParallel, DistributedDataParallel])
def test_a_class_takes_the_type_of_its_model(kind, alone):
    wrapper = kind[torch.nn.Linear](torch.nn.Linear(2, 1))
    loaded = pickle.loads(pickle.dumps(wrapper))
    for model in (wrapper, copy.deepcopy(wrapper), loaded):
        assert type(model) is kind
        assert isinstance(model, getattr(torch.nn.parallel, kind.__name__))
        model(torch.ones(3, 2)).sum().backward()
        assert model.module.bias.grad.item() == 3
