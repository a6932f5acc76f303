"""The CUDA backend by ctypes, without the binding: shim.c and the layers below it.

Functions take tensors, whose memory must stay valid until the stream is done.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "gpu"

NAMES = """uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64
    complex64 complex128"""
DTYPES = {name: number for number, name in enumerate(NAMES.split())}  # PL_DTYPE_MAP
SUM, MEAN = 0, 1


def structure(name: str, **fields: Any) -> Any:
    """Make a C structure; its member `from` is called `source`."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


PLACES = {"to": c_void_p, "source": c_void_p}
Move = structure("pl_move", **PLACES, dtype=c_int, n_elems=c_size_t)
RankRanges = structure(
    "pl_rank_ranges",
    **PLACES,
    stride_bytes=c_size_t,
    n_ranks=c_int,
    dtype=c_int,
    reduction=c_int,
    n_elems=c_size_t,
)
Piece = structure(
    "pli_piece", **PLACES, n_bytes=c_size_t, offset=c_size_t, segment=ctypes.c_uint
)


def layout() -> str:
    """Return C assertions, for shim.c, that its structures equal those above."""
    words = []
    for kind in (Move, RankRanges, Piece):
        name = kind.__name__
        words.append(f"sizeof({name}) == {ctypes.sizeof(kind)}")
        for field, _ in kind._fields_:
            member = "from" if field == "source" else field
            words.append(f"offsetof({name}, {member}) == {getattr(kind, field).offset}")
    return ";".join(f'_Static_assert({each}, "{each}")' for each in words)


def dtype_of(tensor: Any) -> int:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]


def address(tensor: Any) -> int | None:
    return None if tensor is None else tensor.data_ptr()


IMAGE = ROOT / "csrc/backend/kernels_nvrtc.c"  # where the kernels are embedded


def compile_libraries(flags: Mapping[Path, Sequence[str]]) -> None:
    """Compile libraries with different flags of kernels_nvrtc.c, concurrently."""
    cc = os.environ.get("CC", "gcc")
    common = (ROOT / "csrc/compile_flags.txt").read_text().split()
    common.append(f"-DLAYOUT={layout()}")
    sources = sorted(ROOT.glob("csrc/[!p]*/*.c"))  # all but the binding, csrc/python
    sources.append(Path(__file__).with_name("shim.c"))
    objects = BUILT / "objects"
    objects.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path, name: str, *own: str) -> str:
        target = str(objects / f"{name}.o")
        command = [cc, *common, *own, "-w", "-O2", "-fPIC", "-c", str(source)]
        subprocess.run([*command, "-o", target], check=True, cwd=ROOT, timeout=120)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(compile_one, source, f"{source.parent.name}-{source.stem}")
            for source in sources
            if source != IMAGE
        ]
        images = {
            out: pool.submit(compile_one, IMAGE, out.stem, *own)
            for out, own in flags.items()
        }
        made = [job.result() for job in jobs]
    for out, image in images.items():
        link = [cc, "-shared", *made, image.result(), "-o", str(out)]
        subprocess.run([*link, "-pthread", "-lm", "-ldl"], check=True, timeout=120)


class Kernels:
    def __init__(
        self,
        library: Path,
        device: int = 0,
        driver: str | None = None,
        nvrtc: str | None = None,
    ) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_words.restype = ctypes.c_char_p
        self._library.shim_kernels.restype = ctypes.c_char_p
        self._backend = c_void_p()
        encoded = [p and os.fsencode(p) for p in (driver, nvrtc)]
        out = ctypes.byref(self._backend)
        self._check(self._library.shim_open(device, *encoded, out))

    def _check(self, status: int) -> None:
        if status != 0:
            words = self._library.shim_words().decode()
            raise RuntimeError(f"status {status}: {words}")

    @property
    def origin(self) -> str:
        return str(self._library.shim_kernels(self._backend).decode())

    def close(self) -> None:
        self._library.shim_close(self._backend)

    # ---- moves ----------------------------------------------------------------------

    @staticmethod
    def moves(pairs: Sequence[tuple[Any, Any]]) -> Any:
        """Make moves from pairs of tensors, (to, from); from None for zeros."""
        rows = [
            Move(address(to), address(source), dtype_of(to), to.numel())
            for to, source in pairs
        ]
        return (Move * len(rows))(*rows)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(getattr(self._library, f"shim_{name}")(self._backend, *arguments))

    def copy(self, moves: Any, stream: int = 0) -> None:
        self._call("copy", moves, c_size_t(len(moves)), c_void_p(stream))

    def add(self, moves: Any, stream: int = 0) -> None:
        self._call("add", moves, c_size_t(len(moves)), c_void_p(stream))

    def scale(self, moves: Any, top: int, bottom: int, stream: int = 0) -> None:
        n_moves = c_size_t(len(moves))
        self._call("scale", moves, n_moves, top, bottom, c_void_p(stream))

    def sum(self, to: Any, rows: Any, reduction: int, stream: int = 0) -> None:
        """Reduce `rows`, one per rank, into `to`."""
        ranges = RankRanges(
            to.data_ptr(),
            rows.data_ptr(),
            rows.stride(0) * rows.element_size(),
            rows.shape[0],
            dtype_of(to),
            reduction,
            to.numel(),
        )
        self._call("sum", ctypes.byref(ranges), c_void_p(stream))

    @staticmethod
    def pieces(rows: Sequence[tuple[Any, Any, int, int]]) -> Any:
        """Make pieces from (to, from, offset, segment); `to` may be None."""
        made = [
            Piece(address(to), address(source), source.nbytes, offset, segment)
            for to, source, offset, segment in rows
        ]
        return (Piece * len(made))(*made)

    def checksum(self, pieces: Any, sums: Any, stream: int = 0) -> None:
        where = c_void_p(sums.data_ptr()), c_void_p(stream)
        self._call("checksum", pieces, c_size_t(len(pieces)), *where)

    def refresh(self, pieces: Any, sums: Any, wanted: Any, stream: int = 0) -> None:
        where = (c_void_p(at) for at in (sums.data_ptr(), wanted.data_ptr(), stream))
        self._call("refresh", pieces, c_size_t(len(pieces)), *where)

    def synchronize(self, stream: int = 0) -> None:
        self._call("synchronize", c_void_p(stream))
