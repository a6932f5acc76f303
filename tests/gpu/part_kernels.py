"""Compare every kernel, from the fatbin and from NVRTC, with torch.

Sums and scaled values must have the bits of the same arithmetic in torch: in float32,
or float64 where the contract requires it, rounded once to nearest even.  Before each
launch the output is filled with a poison value.  The memory around it must not change.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from checks import Figures, Skip, is_fake, is_quick, run_here, simulated
from kernels_library import MEAN, SUM, Kernels
from part_build import find_nvcc, library_of, nvrtc_path
from torch import Tensor

Names = Iterator[tuple[str, Callable[[], Figures | None]]]

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SIZES = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 255, 1000, 4096, 4097, 100_003]
OFFSETS = [0, 1, 2, 3, 4, 8]
RATIOS = [(1, 3), (2, 1), (7, 64)]
CHECKS = """
origin copies additions scales sums sums_in_place checksums refreshes many_tensors
tensors_of_all_sizes_at_once behind_other_work on_another_stream large_tensors
"""
GUARD = 64  # elements on either side that a kernel must not write


def device() -> torch.device:
    return torch.device("cpu" if is_fake() else "cuda")


@lru_cache(maxsize=2000)
def draw(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random numbers of all magnitudes, with special values among them."""
    g = torch.Generator().manual_seed(seed)
    if dtype in WHOLE:
        info = torch.iinfo(dtype)
        low, high = max(info.min, -(2**62)), min(info.max, 2**62)
        return torch.randint(low, high, (n,), generator=g, dtype=dtype)
    if dtype.is_complex:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.complex(draw(n, part, seed), draw(n, part, seed + 1))
    values = torch.randn(n, generator=g, dtype=torch.float64)
    values *= torch.exp2(torch.randint(-16, 12, (n,), generator=g).double())
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 65504.0, 65520.0]
    special += [2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 3.4e38, 2.0**-133, 1 + 2.0**-8]
    special += [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 3 * 2.0**-8, 2.0**-14 - 2.0**-25]
    for i, value in enumerate(special):
        if 3 * i + 1 < n:
            values[3 * i + 1] = value
    return values.to(dtype)


def placed(values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return the values on the device at an offset, and all memory around them."""
    whole = torch.full(
        (values.numel() + 2 * GUARD + offset,), 77, dtype=values.dtype, device=device()
    )
    begin = GUARD + offset
    inner = whole[begin : begin + values.numel()]
    inner.copy_(values)
    return inner, whole


def bits(tensor: Tensor) -> Tensor:
    """Return the bits, with all NaNs equal."""
    tensor = tensor.detach().clone()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).contiguous()
    if tensor.is_floating_point():
        tensor[tensor.isnan()] = float("nan")
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(same[tensor.element_size()])


def expect(inner: Tensor, whole: Tensor | None, right: Tensor, what: str) -> None:
    """Fail unless the values are right and the memory around them is unchanged."""
    mine, theirs = bits(inner).flatten(), bits(right.to(inner.device)).flatten()
    wrong = (mine != theirs).nonzero().flatten()
    if wrong.numel():
        at = int(wrong[0])
        words = f"{what}: {wrong.numel()} of {mine.numel()} wrong, the first at {at}"
        raise AssertionError(f"{words}: {int(mine[at]):#x} for {int(theirs[at]):#x}")
    if whole is None:
        return
    touched = whole.clone()
    begin = inner.storage_offset()
    touched[begin : begin + inner.numel()] = 77
    assert bool((touched == 77).all()), f"{what}: memory beside it was overwritten"


class Stand:
    """The kernels of one origin, and torch's current stream to run them on."""

    def __init__(self, kind: str) -> None:
        driver = nvrtc = None
        if is_fake():
            driver = nvrtc = simulated().library()
        self.kernels = Kernels(library_of(kind), 0, driver, nvrtc or nvrtc_path())
        self.kind = kind

    @property
    def stream(self) -> int:
        if is_fake():
            return 0
        return int(torch.cuda.current_stream().cuda_stream)

    def done(self) -> None:
        self.kernels.synchronize(self.stream)

    def checks(self) -> Names:
        for name in CHECKS.split():
            yield f"{self.kind}.{name}", partial(getattr(self, name))

    # ---- the checks -----------------------------------------------------------------

    def origin(self) -> Figures:
        found = self.kernels.origin
        has_fatbin = self.kind == "default" and find_nvcc() is not None
        wanted = "fatbin" if has_fatbin else "nvrtc"
        assert found == wanted, f"the kernels come from {found}, not from {wanted}"
        return {"origin": found}

    def cases(self) -> Iterator[tuple[int, int, int]]:
        sizes = SIZES[::3] if is_quick() else SIZES
        for n in sizes:
            for a, b in zip(OFFSETS, reversed(OFFSETS), strict=True):
                yield n, a, b
            yield n, 0, 0

    def copies(self) -> None:
        for dtype in [*FLOATS, *COMPLEX, *WHOLE]:
            for n, a, b in self.cases():
                to, whole = placed(torch.full((n,), 55, dtype=dtype), a)
                source, _ = placed(draw(n, dtype, n), b)
                self.kernels.copy(self.kernels.moves([(to, source)]), self.stream)
                self.done()
                expect(to, whole, source, f"copy of {n} {dtype} at {a} from {b}")
                self.kernels.copy(self.kernels.moves([(to, None)]), self.stream)
                self.done()
                expect(to, whole, torch.zeros_like(to), f"{n} zeros of {dtype} at {a}")

    def additions(self) -> None:
        for dtype in [*FLOATS, *COMPLEX]:
            for n, a, b in self.cases():
                to, whole = placed(draw(n, dtype, n), a)
                source, _ = placed(draw(n, dtype, n + 5), b)
                right = like(to, parts(to) + parts(source))
                self.kernels.add(self.kernels.moves([(to, source)]), self.stream)
                self.done()
                expect(to, whole, right, f"sum of {n} {dtype} at {a} and {b}")

    def scales(self) -> None:
        for dtype in [*FLOATS, *COMPLEX]:
            for (n, a, _), by in itertools.product(self.cases(), RATIOS):
                to, whole = placed(draw(n, dtype, n), a)
                exact = parts(to.cpu()).double() * by[0] / by[1]
                moves = self.kernels.moves([(to, None)])
                self.kernels.scale(moves, *by, self.stream)
                self.done()
                right = like(to, round_once(exact, dtype))
                expect(to, whole, right, f"{by[0]}/{by[1]} of {n} {dtype}")

    def sums(self) -> None:
        sizes = SIZES[1 :: 6 if is_quick() else 2]
        cases = itertools.product(
            [*FLOATS, *COMPLEX], sizes, (1, 2, 3, 4, 8), (SUM, MEAN)
        )
        for dtype, n, n_ranks, reduction in cases:
            stride = (n + 127) // 64 * 64
            rows = [draw(stride, dtype, 10 * r + n) for r in range(n_ranks)]
            ranges = torch.stack(rows).to(device())
            to, whole = placed(torch.full((n,), 55, dtype=dtype), 0)
            self.kernels.sum(to, ranges, reduction, self.stream)
            self.done()
            right = like(to, in_order(ranges[:, :n], reduction))
            expect(to, whole, right, f"sum {reduction} of {n_ranks} times {n} {dtype}")

    def sums_in_place(self) -> None:
        """Sum into one of the ranges, which then holds the sum."""
        for which in (0, 2):
            rows = torch.stack([draw(1024, torch.bfloat16, r) for r in range(3)])
            rows = rows.to(device())
            right = rows[0].float() + rows[1].float() + rows[2].float()
            self.kernels.sum(rows[which], rows, SUM, self.stream)
            self.done()
            expect(rows[which], None, right.bfloat16(), f"into row {which}")

    def checksums(self) -> None:
        """Checksums of bytes and their places, at any address, are additive."""
        for n, a, b in self.cases():
            values = draw(n, torch.uint8, n)
            inner, _ = placed(values, a)
            other, _ = placed(values, b)
            whole, _ = placed(values, 0)
            sums = torch.full((3,), 5, dtype=torch.int64, device=device())
            rows = [(None, inner, 0, 0), (None, other, 0, 2), (None, whole, 640, 2)]
            self.kernels.checksum(self.kernels.pieces(rows), sums, self.stream)
            self.done()
            first, second = (checksum_of(values, place) for place in (0, 640))
            right = torch.stack([first, torch.zeros_like(first), first + second]) + 5
            expect(sums, None, right, f"checksum of {n} bytes at {a} and {b}")

    def refreshes(self) -> None:
        """Only segments with different checksums are copied."""
        sums = torch.tensor([1, 2, 3], device=device())
        wanted = torch.tensor([1, 2, -3], device=device())
        for n, a, b in self.cases():
            rows, expected = [], []
            for segment in range(3):
                to, whole = placed(torch.full((n,), 55, dtype=torch.uint8), a)
                source, _ = placed(draw(n, torch.uint8, segment), b)
                rows.append((to, source, 0, segment))
                right = source if segment == 2 else torch.full_like(source, 55)
                expected.append((to, whole, right))
            pieces = self.kernels.pieces(rows)
            self.kernels.refresh(pieces, sums, wanted, self.stream)
            self.done()
            for to, whole, right in expected:
                expect(to, whole, right, f"refresh of {n} bytes at {a} from {b}")

    def many_tensors(self) -> Figures:
        """Move thousands of tensors in one call, of irregular sizes, some empty."""
        chance = random.Random(3)
        counts = [chance.choice([0, 1, 4, 5, 33, 300, 2000]) for _ in range(5000)]
        sources = [
            placed(draw(n, torch.float32, i), i % 4) for i, n in enumerate(counts)
        ]
        arena = torch.full((sum((n + 15) // 16 * 16 for n in counts) + 16,), 77.0)
        arena = arena.to(device())
        pairs, at, right = [], 0, arena.clone()
        for n, (source, _) in zip(counts, sources, strict=True):
            pairs.append((arena[at : at + n], source))
            right[at : at + n] = source
            at += (n + 15) // 16 * 16
        self.kernels.copy(self.kernels.moves(pairs), self.stream)
        self.done()
        expect(arena, None, right, "5000 tensors in one call")
        back = [(source.fill_(9), part) for part, (source, _) in
                zip([p for p, _ in pairs], sources, strict=True)]  # fmt: skip
        self.kernels.copy(self.kernels.moves(back), self.stream)
        self.done()
        for (source, whole), (part, _) in zip(sources, pairs, strict=True):
            expect(source, whole, part, "the way back")
        return {"n_tensors": len(counts)}

    def tensors_of_all_sizes_at_once(self) -> None:
        for dtype in (torch.bfloat16, torch.float32):
            sizes = [1 << 22, 1, 3, 1 << 20, 17, 100_003, 0, 5]
            right = [draw(n, dtype, n).to(device()) for n in sizes]
            made = [placed(torch.full((n,), 55, dtype=dtype), i % 3)
                    for i, n in enumerate(sizes)]  # fmt: skip
            pairs = [(to, r) for (to, _), r in zip(made, right, strict=True)]
            self.kernels.copy(self.kernels.moves(pairs), self.stream)
            self.done()
            for (to, whole), r in zip(made, right, strict=True):
                expect(to, whole, r, f"{to.numel()} of {dtype}")

    def behind_other_work(self) -> None:
        """Kernels run in stream order, without synchronisation in between."""
        if is_fake():
            raise Skip("needs a GPU")
        value = torch.zeros(1 << 20, device=device())
        out = torch.zeros_like(value)
        moves = self.kernels.moves([(out, value)])
        sums = []
        for i in range(50):
            value.fill_(float(i))
            self.kernels.copy(moves, self.stream)
            sums.append((out == i).all())
        self.done()
        assert all(bool(s) for s in sums)

    def on_another_stream(self) -> None:
        if is_fake():
            raise Skip("needs a GPU")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.behind_other_work()
        torch.cuda.current_stream().wait_stream(stream)

    def large_tensors(self) -> None:
        """Tensors may have more elements than 32 bits can count."""
        if is_fake() or is_quick():
            raise Skip("takes 9 GB and a GPU")
        n = (1 << 32) + 1000
        source = torch.arange(n, dtype=torch.int64, device=device()).to(torch.uint8)
        to = torch.full((n,), 55, dtype=torch.uint8, device=device())
        self.kernels.copy(self.kernels.moves([(to, source)]), self.stream)
        self.done()
        assert bool((to == source).all())


def checksum_of(values: Tensor, place: int) -> Tensor:
    """Return the 64-bit checksum of bytes at a place, in wrapping integers."""
    words = torch.zeros((values.numel() + 7) // 8 * 8, dtype=torch.uint8)
    words[: values.numel()] = values
    at = torch.arange(len(words) // 8) + place // 8
    x = words.view(torch.int64) ^ at * -0x61C8864680B583EB
    x = (x ^ x >> 32 & (1 << 32) - 1) * -0x40A7B892E31B1A47
    x = (x ^ x >> 29 & (1 << 35) - 1) * -0x6B2FB644ECCEEE15
    return (x ^ x >> 32 & (1 << 32) - 1).sum()


def parts(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, and others unchanged."""
    return torch.view_as_real(tensor).contiguous() if tensor.is_complex() else tensor


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Convert the result of parts() back to the dtype of its tensor."""
    if tensor.is_complex():
        return torch.view_as_complex(values.reshape(*tensor.shape, 2).contiguous())
    return values.to(tensor.dtype)


def in_order(rows: Tensor, reduction: int) -> Tensor:
    """Sum the rows from first to last, 16-bit ones in float32, on the CPU.

    For a mean, first divide rows by a power of two, their number or the next above, so
    that a mean of finite numbers is finite.  On a GPU, torch would multiply by the
    reciprocal, which rounds twice.
    """
    n = len(rows)
    power = 1 << (n - 1).bit_length() if reduction == MEAN else 1
    values = [parts(row) for row in rows.cpu()]
    if rows.dtype.itemsize == 2:
        values = [row.float() for row in values]
    total = values[0] / power
    for row in values[1:]:
        total = total + row / power
    return total / (n / power) if reduction == MEAN else total


def round_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert float64 to a shorter dtype with one rounding.

    torch converts float64 to 16 bits by way of float32, which rounds twice.  Rounding
    to odd in between has the effect of a single rounding.
    """
    if dtype.is_complex:
        return values.to(torch.float32 if dtype == torch.complex64 else torch.float64)
    if values.dtype != torch.float64 or dtype.itemsize != 2:
        return values.to(dtype)
    short = values.float()
    inexact = (short.double() != values) & short.isfinite()
    away = short.double().abs() > values.abs()
    kept = short.view(torch.int32)
    truncated = torch.where(inexact & away, kept - 1, kept)
    odd = torch.where(inexact, truncated | 1, truncated)
    return odd.view(torch.float32).to(dtype)


def run(seconds: float) -> bool:
    begin, good = time.monotonic(), True
    for kind in ("default", "nvrtc"):
        try:
            stand = Stand(kind)
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            good = run_here([(f"{kind}.opens", partial(fail, words))]) and good
            continue
        good = run_here(stand.checks()) and good
        print(f"{kind}: {time.monotonic() - begin:.0f} s", flush=True)
        stand.kernels.close()
    return good


def fail(words: str) -> None:
    raise RuntimeError(words)
