"""DataParallel in a notebook: run cells again, interrupt them, reload modules."""

import pytest
from support.kernel import MISSING, Kernel

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"
)

BEGIN = """
import sys, time, torch, paceline
from torch import nn

def total(scale):
    out = model(torch.ones(4, 3))
    out.sum().backward()
    expected = 4 * scale * model.module.linear(torch.ones(1, 3)).sum().item()
    assert abs(float(out.detach().sum()) - expected) < 1e-3, (out, expected)
"""
NET = """
SCALE = 1

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        wait("forward", where)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        wait("backward", ctx.where)
        return gradient, None

def wait(which, where):
    if where == which:
        print("busy", flush=True)
        for _ in range(1500):
            time.sleep(0.01)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.where = ""

    def forward(self, x):
        return Slow.apply(self.linear(x), self.where) * SCALE
"""
WRAP = "model = paceline.DataParallel(Net(), ['cpu'] * 2)"


@pytest.fixture
def kernel(tmp_path):
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.end()


def test_a_notebook_may_define_again_interrupt_and_reload(kernel, tmp_path):
    assert kernel.run(BEGIN + NET + WRAP + "\ntotal(1)") == ""

    # Run cells again.
    assert kernel.run("SCALE = 2\ntotal(2)") == ""
    again = "Net.forward = lambda self, x: self.linear(x) * (SCALE + 1)\ntotal(3)"
    assert kernel.run(again) == ""
    assert kernel.run(NET.replace("* SCALE", "* (SCALE + 3)") + "total(2)") == ""
    assert kernel.run(f"{WRAP}\ntotal(4)") == ""

    # Interrupt cells.
    for where in ("forward", "backward"):
        cell = f"model.module.where = {where!r}\ntotal(4)"
        assert kernel.run(cell, interrupt_at="busy") == "KeyboardInterrupt"
        assert kernel.run("model.module.where = ''\ntotal(4)") == ""

    # Edit and reload a module.
    text = "SCALE = 3\n\ndef bend(x):\n    return x * SCALE\n"
    (tmp_path / "bending.py").write_text(text)
    assert kernel.run("sys.dont_write_bytecode = True\nimport importlib, bending") == ""
    cell = "Net.forward = lambda self, x: bending.bend(self.linear(x))\n"
    assert kernel.run(cell + "model.module = Net()\ntotal(3)") == ""
    (tmp_path / "bending.py").write_text(text.replace("3", "5").replace("*", "* 2 *"))
    assert kernel.run("importlib.reload(bending)\ntotal(10)") == ""
