"""The active mutant, for the package's Python code: see switch.h."""

import mmap
import os

N_BYTES = 65536


def open_map() -> mmap.mmap:
    """Map the file that PL_MUTANTS names, or private memory without it."""
    path = os.environ.get("PL_MUTANTS")
    if path is None:
        return mmap.mmap(-1, N_BYTES)
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), N_BYTES)


_map = open_map()


def on(n: int) -> bool:
    """Tell whether a mutant is active, and record that its place was reached."""
    _map[4 + n] = 1
    return int.from_bytes(_map[:4], "little") == n


def turn_on(n: int) -> None:
    """Activate a mutant, 0 for none, in all processes; clear the records."""
    _map[:] = n.to_bytes(4, "little") + bytes(N_BYTES - 4)


def reached() -> list[int]:
    """Return the mutants whose places were reached since the last turn_on()."""
    seen = _map[4:]
    return [n for n in range(N_BYTES - 4) if seen[n]]
