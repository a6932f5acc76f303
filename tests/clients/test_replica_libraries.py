"""Libraries whose models run in replicas give the gradients of the plain module."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import paceline
import pytest
import torch
from support.clients import needs
from torch import nn

N_ROWS = 6
RELATIVE = 1e-4  # float32, sums in another order


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Run torch's operations on one thread: teams are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def vectors() -> torch.Tensor:
    return torch.randn(N_ROWS, 5, 8)


def wrapped(module: nn.Module) -> Any:
    return paceline.DataParallel(module, device_ids=["cpu", "cpu"])


def stepped(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the output, and the gradients, of a step."""
    model.zero_grad()
    out = model(x)
    out = out[0] if isinstance(out, tuple) else out
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


def check_steps(plain: nn.Module, x: torch.Tensor, n: int = 2) -> None:
    """Check that a model takes the same steps in replicas."""
    ours = wrapped(copy.deepcopy(plain))
    for _ in range(n):
        expected, found = stepped(plain, x), stepped(ours, x)
        largest = max(float(t.abs().max()) for t in expected[1:] if t is not None)
        assert largest > 0
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert (one is None) == (other is None), i
            if one is not None and other is not None:
                limit = RELATIVE * (float(other.abs().max()) if i == 0 else largest)
                torch.testing.assert_close(one, other, rtol=0, atol=limit)


# ---- torchdiffeq ---------------------------------------------------------------------


class Slope(nn.Module):
    """The right-hand side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(y) * t


class Flow(nn.Module):
    """Solves it, and gets gradients by a second equation: the adjoint."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = Slope()

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        solve = importlib.import_module("torchdiffeq").odeint_adjoint
        return solve(self.slope, y, torch.tensor([0.0, 0.5, 1.0]), method="rk4")[-1]


@needs("torchdiffeq")
def test_the_adjoint_of_torchdiffeq_trains_all_replicas() -> None:
    torch.manual_seed(0)
    check_steps(Flow(), vectors())


# ---- vector-quantize-pytorch ---------------------------------------------------------


class Quantized(nn.Module):
    """A layer, and a quantizer of its outputs."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        library = importlib.import_module("vector_quantize_pytorch")
        self.layer, self.quantizer = nn.Linear(8, 8), getattr(library, kind)(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.quantizer(self.layer(x))
        return out[0] if isinstance(out, tuple) else out


CODES = {"dim": 8, "codebook_size": 16}
TRAINED = {"learnable_codebook": True, "ema_update": False}
AVERAGED = "codebooks of moving averages"
QUANTIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "trained codebook": ("VectorQuantize", {**CODES, **TRAINED}),
    "finite scalars": ("FSQ", {"dim": 8, "levels": [8, 5, 5]}),
    "a simple codebook": ("SimVQ", CODES),
    AVERAGED: ("ResidualVQ", {**CODES, "num_quantizers": 2}),
}


@needs("vector_quantize_pytorch")
@pytest.mark.parametrize("which", QUANTIZERS)
def test_a_quantizer_passes_on_the_gradients_of_all_replicas(which: str) -> None:
    torch.manual_seed(0)
    kind, options = QUANTIZERS[which]
    plain, x = Quantized(kind, **options), vectors()
    ours, halved = wrapped(copy.deepcopy(plain)), copy.deepcopy(plain)
    is_averaged = which == AVERAGED
    check_steps(plain, x, n=1 if is_averaged else 2)
    if is_averaged:  # the averages of replica 0's rows stay
        ours(x)
        halved(x[: N_ROWS // 2])
        torch.testing.assert_close(ours.module.state_dict(), halved.state_dict())


# ---- x-transformers ------------------------------------------------------------------


@needs("x_transformers")
def test_a_transformer_of_x_transformers_trains_alike() -> None:
    torch.manual_seed(0)
    library = importlib.import_module("x_transformers")
    options = {"attn_num_mem_kv": 4, "ff_glu": True, "use_rmsnorm": True}
    layers = library.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    x = torch.randint(0, 20, (N_ROWS, 12))
    plain = library.TransformerWrapper(
        num_tokens=20, max_seq_len=16, attn_layers=layers
    )
    check_steps(plain, x)
