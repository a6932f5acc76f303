"""Other ways to run the same step: as a CUDA graph, compiled, on other streams."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import bench_models as models
import torch
from check_models import batches_of
from checks import Skip, add, check
from torch import Tensor, nn
from torch.nn import functional as F
from twins import assert_near, plain_step, take_steps
from world import World

N_WARM_UP = 5
N_REPLAYS = 20


class Captured:
    """A whole step as a CUDA graph, from forward to the optimizer."""

    def __init__(self, model: nn.Module, spec: models.ModelSpec, like: Any) -> None:
        self.inputs = [t.clone() for t in like]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        self.model, self.spec = model, spec
        self.graph = torch.cuda.CUDAGraph()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.spec.loss(self.model(self.inputs[0]), self.inputs[1]).backward()
        self.optimizer.step()

    def give(self, batch: Any) -> None:
        for mine, new in zip(self.inputs, batch, strict=True):
            mine.copy_(new)

    def capture(self) -> None:
        with torch.cuda.graph(self.graph):  # forbids unsafe calls in all threads
            self.step()


def train_captured(
    world: World, module: nn.Module, spec: models.ModelSpec, rows: list[Any]
) -> list[Tensor]:
    """Warm up and capture on a side stream, as in torch's notes; replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured = Captured(world.ours(module), spec, rows[0])
        for batch in rows[:N_WARM_UP]:
            captured.give(batch)
            captured.step()
    torch.cuda.current_stream().wait_stream(side)
    world.synchronize()
    captured.capture()
    for batch in rows[N_WARM_UP:]:
        captured.give(batch)
        captured.graph.replay()
    world.synchronize()
    return [p.detach().clone() for p in module.parameters()]


def on_device(world: World, spec: models.ModelSpec, n: int) -> list[Any]:
    rows = batches_of(world, spec, n)
    return [tuple(t.to(world.device) for t in row) for row in rows]


def graph_of(world: World, name: str) -> None:
    spec = models.BY_NAME[name]
    rows = on_device(world, spec, N_WARM_UP + N_REPLAYS)
    torch.manual_seed(1)
    module = spec.build().to(world.device)
    model = world.ours(copy.deepcopy(module))
    eager = take_steps(model, rows, plain_step(spec.loss)).parameters
    replayed = train_captured(world, module, spec, rows)
    for number, (a, b) in enumerate(zip(replayed, eager, strict=True)):
        assert_near(a, b, False, f"parameter {number} after {N_REPLAYS} replays")
    world.meet()


OF_MODELS = {"digits": "digits", "mlp25m": "mlp25m", "many_small": "small"}
for _word, _model in OF_MODELS.items():
    _made = partial(graph_of, name=_model)
    _options = {"worlds": (1, 2), "needs_cuda": True, "seconds": 90}
    add(globals(), f"graph_of_{_word}", _made, **_options)


@check(worlds=(1,), needs_cuda=True, fresh=True)
def graph_without_warm_up(world: World) -> dict[str, Any]:
    """Before the order is learned, it is one clear error; the device stays usable."""
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        raise Skip("torch ends the process then, also for the plain module")
    spec = models.BY_NAME["digits"]
    rows = on_device(world, spec, 1)
    captured = Captured(world.ours(spec.build()), spec, rows[0])
    torch.zeros(1, device=world.device).requires_grad_().sum().backward()
    words = ""
    try:
        captured.capture()
    except RuntimeError as error:
        words = str(error)
    asked = any(word in words for word in ("warm", "captur"))
    assert asked, f"no error that asks for steps before the capture: {words!r}"
    world.synchronize()
    assert float(torch.ones(3, device=world.device).sum()) == 3.0
    return {"error": words[:500]}


# ---- compiled -----------------------------------------------------------------------


def compiled(world: World, name: str, of_module: bool) -> dict[str, Any]:
    spec = models.BY_NAME[name]
    rows = on_device(world, spec, 4)
    torch.manual_seed(1)
    module = spec.build().to(world.device)
    other = copy.deepcopy(module)
    step = plain_step(spec.loss)
    right = take_steps(world.ours(module), rows, step)
    torch._dynamo.reset()
    try:
        if of_module:
            model: Any = world.ours(torch.compile(other))  # type: ignore[arg-type]
        else:
            model = torch.compile(world.ours(other))
        mine = take_steps(model, rows, step)
    except Exception as error:
        if type(error).__name__ in ("TritonMissing", "InvalidCxxCompiler"):
            raise Skip(f"nothing to compile with: {error}") from None
        raise
    for number, (a, b) in enumerate(
        zip(mine.parameters, right.parameters, strict=True)
    ):
        scale = float(b.abs().max())
        far = float((a - b).abs().max()) / scale
        assert far < 1e-3, f"parameter {number} is off by {far:.2g}"
    return {"kernels": "compiled"}


for _name in ("compiled_module", "compiled_wrapper"):
    _made = partial(compiled, name="digits", of_module=_name == "compiled_module")
    add(globals(), _name, _made, worlds=(1, 2), needs_cuda=True, seconds=150)


# ---- streams ------------------------------------------------------------------------


class Branches(nn.Module):
    """Two branches on two streams in forward, and so in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.ParameterList(torch.ones(width) for _ in range(6))
        self.right = nn.ParameterList(torch.ones(width) for _ in range(6))

    def forward(self, x: Tensor, streams: list[Any]) -> Tensor:
        """Return the sum of both branches; each multiplies by its weights in turn."""
        here = torch.cuda.current_stream()
        parts = []
        for stream, weights in zip(streams, (self.left, self.right), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                part = x.clone()
                for weight in weights:
                    part = part * weight
            parts.append(part)
        for stream, part in zip(streams, parts, strict=True):
            here.wait_stream(stream)
            part.record_stream(here)
        return parts[0] + 2 * parts[1]


@check(worlds=(1, 2), needs_cuda=True, seconds=90)
def branches_on_two_streams(world: World) -> None:
    model = world.ours(Branches(100_000))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(20):
        x = world.integers(100_000, seed=step) * world.size
        model.zero_grad()
        model(x, streams).sum().backward()
        mean = world.mean(x, x)
        for number, p in enumerate(model.parameters()):
            right = mean if number < 6 else 2 * mean
            assert_near(p.grad, right, True, f"step {step}, parameter {number}")


@check(worlds=(1, 2), needs_cuda=True, seconds=90)
def steps_on_changing_streams(world: World) -> None:
    """Each step is on another stream; the next waits for it, as a user must ensure."""
    model = world.ours(nn.Sequential(*[nn.Linear(300, 300, bias=False)] * 1))
    streams = [torch.cuda.Stream() for _ in range(3)] + [torch.cuda.default_stream()]
    before = torch.cuda.current_stream()
    for step in range(16):
        stream = streams[step % len(streams)]
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            x = world.integers(8, 300, seed=step) * world.size
            model.zero_grad()
            model(x).sum().backward()
            [grad] = [p.grad.clone() for p in model.parameters()]
            right = world.mean(x.sum(0).expand(300, 300).contiguous(), grad)
            assert_near(grad, right, True, f"step {step}")
        before = stream
    torch.cuda.current_stream().wait_stream(before)


@check(worlds=(1, 2), needs_cuda=True, seconds=90)
def a_device_that_is_far_behind(world: World) -> None:
    """The host runs ahead by many steps: no data is overwritten before it is read."""
    model = world.ours(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    busy = torch.randn(4096, 4096, device=world.device)
    ones = torch.ones(1, 1024, device=world.device)
    rows = [world.integers(4, 1024, seed=n) * world.size for n in range(12)]

    def step(x: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        F.linear(model(x), ones).sum().backward()
        optimizer.step()
        return [p.grad.double().sum() for p in model.parameters()]

    sums, again = [], []
    for x in rows:
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)
        sums.append(step(x))
    world.synchronize()
    for x in rows:
        again.append(step(x))
        world.synchronize()
    for step, (a, b) in enumerate(zip(sums, again, strict=True)):
        for mine, right in zip(a, b, strict=True):
            far = abs(float(mine - right)) / max(1.0, abs(float(right)))
            assert far < 1e-6, f"step {step}: {far:.2g}"
