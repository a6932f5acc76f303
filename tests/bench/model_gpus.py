"""A model, not a measurement: a step of DataParallel on 1 to 8 GPUs.

    python tests/bench/model_gpus.py

It predicts the speedup of n GPUs over one, each with as many rows as the one: for
torch's class, for ours, and for one process per GPU (DDP).  All inputs are in the
tables below.  It does not predict what a real machine does.  Times are in milliseconds,
sizes in MB.

    torch's class  every forward: replicas made, parameters broadcast (NCCL), forwards
                   of n threads, all gradients reduced after backward (NCCL)
    ours           parameters sent in a chain while replicas are made; gradients sent
                   while backward runs
    DDP            gradients sent while backward runs; no data before

In the first two, the Python code of n forwards shares one interpreter lock.
"""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """A link between GPUs: MB per ms and direction of one GPU, and a latency."""

    name: str
    mb_per_ms: float
    nccl_share: float  # the share of that in a ring of NCCL
    latency_ms: float


class Model(NamedTuple):
    """A model and the rows of one GPU."""

    name: str
    rows: int
    mb: float  # of parameters
    n_modules: int
    n_parameters: int
    forward_ms: float  # of kernels
    backward_ms: float
    locked_ms: float  # of a forward's Python, under the interpreter lock


LINKS = (
    Link("PCIe 4 x16, peers", 24.0, 0.7, 0.02),
    Link("NVLink, all to all", 250.0, 0.8, 0.01),
)
MODELS = (
    # An A100, TF32, 800 images per second; Python: 161 modules of about 25 us.
    Model("ResNet-50", 64, 102.0, 161, 161, 27.0, 53.0, 4.0),
    # A transformer of 350M parameters in bf16 autocast, 24 layers, 8 x 1,024 tokens.
    Model("transformer 350M", 8, 1400.0, 320, 292, 55.0, 110.0, 9.0),
    # A small model, which the host limits.
    Model("MLP of 8 layers", 256, 34.0, 17, 16, 0.6, 1.2, 0.4),
)
# Measured on the host of an H200, ResNet-50 in 4 replicas: docs/gpus.md.
REPLICA_US_OF_TORCH = 22.0  # per module and replica, in torch's replicate()
REPLICA_US_OF_OURS = 9.0
NODE_US = 110.0  # per segment and replica: two nodes in Python, under the lock
ADDED_US = 5.0  # per parameter: autograd adds sums to replica 0's gradient
FIRST_MB = 1.0  # the segment whose gradients come last


def host_of_forwards(model: Model, n: int) -> float:
    """Return when the last of n threads has enqueued its forward."""
    return max(n * model.locked_ms, model.locked_ms * 1.2)


def torch_step(model: Model, link: Link, n: int) -> float:
    """Return the milliseconds of a step of torch's class."""
    if n == 1:
        return max(model.forward_ms, model.locked_ms) + model.backward_ms
    nccl = model.mb / (link.mb_per_ms * link.nccl_share) + n * link.latency_ms
    made = n * model.n_modules * REPLICA_US_OF_TORCH / 1000
    forward = max(model.forward_ms, host_of_forwards(model, n))
    return max(nccl, made) + forward + model.backward_ms + nccl


def our_step(model: Model, link: Link, n: int) -> float:
    """Return the milliseconds of a step of our class."""
    if n == 1:
        return torch_step(model, link, 1)
    segment = max(min(model.mb / 6, 16.8), min(model.mb / 64, 33.6))
    n_segments = max(1.0, model.mb / segment)
    chain = model.mb / link.mb_per_ms
    chain += (n - 1) * (min(segment, model.mb) / link.mb_per_ms + link.latency_ms)
    made = (n - 1) * model.n_modules * REPLICA_US_OF_OURS / 1000
    forward = max(model.forward_ms, host_of_forwards(model, n))
    nodes = n_segments * n * NODE_US / 1000
    added = model.n_parameters * ADDED_US / 1000
    back = model.mb / link.mb_per_ms
    tail = min(FIRST_MB, model.mb) / link.mb_per_ms + 2 * link.latency_ms
    backward = max(model.backward_ms, back, nodes, added) + tail
    return max(chain, made) + forward + backward


def ddp_step(model: Model, link: Link, n: int) -> float:
    """Return the milliseconds of a step with one process per GPU."""
    if n == 1:
        return torch_step(model, link, 1)
    ring = 2 * (n - 1) / n * model.mb / (link.mb_per_ms * link.nccl_share)
    tail = 2 * (n - 1) / n * min(25.0, model.mb) / (link.mb_per_ms * link.nccl_share)
    forward = max(model.forward_ms, model.locked_ms)
    return forward + max(model.backward_ms, ring) + tail + n * link.latency_ms


def main() -> None:
    """Print the tables."""
    print(__doc__.partition("\n")[0])
    for link in LINKS:
        for model in MODELS:
            print(f"\n{model.name}, {model.rows} rows a GPU, {link.name}")
            print(f"{'GPUs':>6}{'torch DP':>12}{'ours':>8}{'DDP':>8}   times one GPU")
            one = torch_step(model, link, 1)
            for n in (1, 2, 4, 8):
                steps = [step(model, link, n) for step in (torch_step, our_step)]
                ratios = [n * one / ms for ms in (*steps, ddp_step(model, link, n))]
                print(f"{n:>6}{ratios[0]:>12.2f}{ratios[1]:>8.2f}{ratios[2]:>8.2f}")


if __name__ == "__main__":
    main()
