"""Bandwidth of packing and unpacking, compared with the card's own copies.

Bytes are those read plus those written.  A bucket is moved as in the reducer, with one
call for all of its tensors.  In each round the kernel and a copy of as many bytes take
turns.  Their buffers together are many times the L2 cache, so neither finds its data
there.  The ratio is computed within the round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from checks import Figures, is_quick
from kernels_library import MEAN, Kernels
from part_build import library_of, nvrtc_path
from stats import median_with_interval
from torch import Tensor

TARGET = 0.8  # of the bandwidth of a plain copy
BUCKET_BYTES = 25 << 20
ALL_BYTES = 4 << 30  # of one side of the moves, over all buffers
N_ROUNDS = 15
PER_ROUND = 20


@dataclass
class Bucket:
    """A slot, and the tensors that are moved into it or out of it."""

    slot: Tensor
    tensors: list[Tensor]
    keep: list[Any] = field(default_factory=list)

    def parts(self) -> Iterator[Tensor]:
        at = 0
        for tensor in self.tensors:
            yield self.slot[at : at + tensor.numel()]
            at += (tensor.numel() + 15) // 16 * 16


def make_bucket(
    sizes: list[int], slot_dtype: torch.dtype, dtype: torch.dtype
) -> Bucket:
    """Make a bucket of random values: zeros can be faster than real data."""
    total = sum((n + 15) // 16 * 16 for n in sizes)
    slot = torch.randn(total, device="cuda").to(slot_dtype)
    return Bucket(slot, [torch.randn(n, device="cuda").to(dtype) for n in sizes])


def elapsed_ms(calls: list[Callable[[], None]]) -> float:
    """Return the device's time per call, by events."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(6_000_000)  # about 3 ms: the host gets ahead of the device
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / len(calls)


def compare(moves: list[Callable[[], None]], copies: list[Callable[[], None]]) -> Any:
    """Time both in turns; return the ratio's median and interval over rounds."""
    rounds = 5 if is_quick() else N_ROUNDS
    mine, theirs = itertools.cycle(moves), itertools.cycle(copies)
    both = []
    for i in range(rounds + 2):
        pair = [
            elapsed_ms([next(turn) for _ in range(PER_ROUND)])
            for turn in ((mine, theirs) if i % 2 else (theirs, mine))
        ]
        if i >= 2:
            both.append(pair if i % 2 else pair[::-1])
    ratios = [copy / move for move, copy in both]
    return (
        median_with_interval(ratios),
        sorted(m for m, _ in both)[len(both) // 2],
        (sorted(c for _, c in both)[len(both) // 2]),
    )


def copy_of(n_bytes: int, n: int) -> list[Callable[[], None]]:
    """Return copies from device to device that read and write `n_bytes` each."""
    rows = [
        [torch.randint(255, (n_bytes,), dtype=torch.uint8, device="cuda") for _ in "ab"]
        for _ in range(n)
    ]
    return [partial(a.copy_, b) for a, b in rows]  # type: ignore[list-item]


def ceiling() -> Figures:
    calls = copy_of(1 << 30, 4)
    times = sorted(elapsed_ms(calls) for _ in range(N_ROUNDS))
    best = 2 * (1 << 30) / times[len(times) // 2] / 1e6
    return {"copy_gb_per_s": round(best), "lines": [f"copy of 1 GiB: {best:.0f} GB/s"]}


LAYOUTS: dict[str, list[int]] = {
    "25 MiB in 1": [BUCKET_BYTES // 4],
    "25 MiB in 12": [512 * 1024, 512, 512 * 1024, 512] * 3 + [3_400_000],
    "25 MiB in 1000": [6553] * 1000,
    "1000 tensors of 4": [4] * 1000,
}


class Bench:
    def __init__(self) -> None:
        self.kernels = Kernels(library_of("default"), 0, None, nvrtc_path())

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def run(
        self,
        layout: str,
        what: str,
        slot_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
    ) -> Figures:
        sizes = LAYOUTS[layout]
        n_bytes = sum(sizes) * (slot_dtype.itemsize + dtype.itemsize)
        n = max(4, min(64, (1 << 30 if is_quick() else ALL_BYTES) // n_bytes))
        buckets = [make_bucket(sizes, slot_dtype, dtype) for _ in range(n)]
        moves = [self._call(what, bucket) for bucket in buckets]
        extra = 1.5 if what == "add" else 1.0  # reads two, writes one
        read = int(n_bytes * extra) // 2
        ratio, move_ms, copy_ms = compare(moves, copy_of(max(read, 16), n))
        rate = 2 * read / move_ms / 1e6
        good = "meets" if ratio.median >= TARGET else "misses"
        if sum(sizes) < 1 << 20:
            good = "latency"  # the time of a launch counts, not bandwidth
        name = f"{what} {str(slot_dtype)[6:]}/{str(dtype)[6:]}, {layout}"
        line = f"{name:<42} {1e3 * move_ms:7.1f} us, {rate:6.0f} GB/s"
        return {
            "move_us": round(1e3 * move_ms, 2),
            "copy_us": round(1e3 * copy_ms, 2),
            "gb_per_s": round(rate),
            "of_copy": [ratio.median, ratio.low, ratio.high],
            "target": good,
            "lines": [f"{line}, of a copy's {ratio} {good}"],
        }

    def _call(self, what: str, bucket: Bucket) -> Callable[[], None]:
        pack = list(zip(bucket.parts(), bucket.tensors, strict=True))
        unpack = [(b, a) for a, b in pack]
        stream = self.stream
        if what == "pack":
            return partial(self.kernels.copy, self.kernels.moves(pack), stream)
        if what == "unpack":
            return partial(self.kernels.copy, self.kernels.moves(unpack), stream)
        assert what == "add"
        return partial(self.kernels.add, self.kernels.moves(pack), stream)

    def sums(self, n_ranks: int) -> Figures:
        n = BUCKET_BYTES // 2 // n_ranks // 64 * 64
        sets = 48 if not is_quick() else 16
        rows = [torch.randn(n_ranks, n, device="cuda").bfloat16() for _ in range(sets)]
        outs = [torch.empty(n, device="cuda", dtype=torch.bfloat16) for _ in rows]
        calls = [
            partial(self.kernels.sum, out, row, MEAN, self.stream)
            for out, row in zip(outs, rows, strict=True)
        ]
        read = n * 2 * (n_ranks + 1) // 2
        ratio, sum_ms, _ = compare(calls, copy_of(read, sets))
        good = "meets" if ratio.median >= TARGET else "misses"
        line = f"sum of {n_ranks} ranges of bfloat16: {1e3 * sum_ms:.1f} us"
        return {
            "us": round(1e3 * sum_ms, 2),
            "of_copy": [ratio.median, ratio.low, ratio.high],
            "lines": [f"{line}, of a copy's {ratio} {good}"],
        }


def checks() -> Iterator[tuple[str, Callable[[], Figures | None]]]:
    yield "ceiling", ceiling
    bench = Bench()
    for layout in LAYOUTS:
        for what in ("pack", "unpack", "add"):
            yield f"{what}, {layout}", partial(bench.run, layout, what)
    half = (torch.bfloat16, torch.bfloat16)
    for layout in ("25 MiB in 12", "25 MiB in 1000"):
        yield f"pack bf16, {layout}", partial(bench.run, layout, "pack", *half)
    for n_ranks in (2, 4, 8):
        yield f"sum of {n_ranks}", partial(bench.sums, n_ranks)
