"""Where the code of the GPU path can be broken, in one place at a time.

A mutant is a replacement of one piece of one source.  The places are found by the form
of the code, so that what is written later is found too:

- *drop order*: a call that records an event or makes something wait does nothing;
- *drop event*: an operation is given no event to wait for, or none to record;
- *other stream*: a call is given the legacy default stream in place of its own;
- *side stream*: a call is given the device's own stream in place of the caller's;
- *swap streams*: a call that orders two streams is given them the other way round;
- *other slot*: the event of a ring's first slot is taken for that of another one;
- *drop reference*: what keeps memory, or work on it, alive is not held or waited for.

Those of Python have operators of their own: python_mutants.py.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import python_mutants
from mutant import ROOT, Mutant

sys.path.insert(0, str(Path(__file__).parents[1] / "lint"))
from rules import blank, line_of

# The GPU path: what puts work on a stream, or decides when memory may be reused.
SOURCES = [
    "csrc/backend/cuda.c",
    "csrc/backend/cuda_host.c",
    "csrc/backend/cuda_peers.c",
    "csrc/backend/kernels.c",
    "csrc/reducer/*.c",
    "csrc/nccl/gpu_*.c",
    "csrc/nccl/nccl.c",
    "csrc/nccl/nccl_end.c",
    "csrc/comm/broadcast_many.c",
    "csrc/comm/window.c",
    "csrc/replicas/device_group*.c",
    "csrc/python/*.c",
    "csrc/python/ddp/*.c",
    "csrc/python/dp/device_group_*.c",
    "python/paceline/_dp/gpus/*.py",
]

# Calls without which an order is lost.
ORDERING = {
    "event_record",
    "event_wait",
    "synchronize",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "pli_comm_order",
    "pl_reducer_order",
    "pl_reducer_set_stream",
    "stream_wait",
    "stream_wait_pending",
    "pli_reducer_record_side",
    "pli_backend_await",
}

# ... in one source alone, whose own functions they are.
ORDERING_IN = {
    "csrc/replicas/device_group.c": {"order", "record", "wait_for"},
    "csrc/replicas/device_group_refresh.c": {"order", "record", "wait_for"},
    "csrc/replicas/device_group_sum.c": {"record", "wait_for"},
}

# Calls that keep something alive, and what stands in their place.
HOLDING = {
    "pli_cuda_backend_retain": "(void)0",
    "pl_reducer_n_posted": "SIZE_MAX",
    "keep": "0",
    "keep_late": "0",
    "keep_until_copied": "0",
    "pli_gpu_comm_drain": "1",
}

# An argument that names a stream.
STREAM = re.compile(
    r"(?:pli_as_cu_stream\()?(?:\(\w+\)\(void \*\))?(?:\w+(?:\[\w+\])?(?:->|\.))*"
    r"(?:stream|side|on|then|waiter|made_on|by_member\[\w+\]"
    r"|streams\[(?:\w+|\w+\[\w+\]\.\w+)\])\)?"
)
# The device's own stream, where one can be had.
SIDES = {
    "csrc/backend/cuda.c": "(void *)as_cuda(backend)->side",
    "csrc/backend/cuda_host.c": "(void *)pli_cuda_side_stream(backend)",
    "csrc/nccl/gpu_": "self->side",
    "csrc/replicas/": "self->members[0].side",
    "csrc/reducer/": "({ pl_stream *pli_cuda_side_stream(pl_backend *);"
    " pli_cuda_side_stream(self->backend); })",
}

# Calls that put nothing anywhere: a stream in a list, a cast, an object.
PASSIVE = re.compile(r"pli_as_cu_\w+|event_as_cu|add_stream|list_moves|Py\w+")

CALL = re.compile(r"(?<![\w>.])((?:\w+(?:\[\w+\])?(?:->|\.))*)([A-Za-z_]\w*)\(")
KEYWORDS = {"if", "while", "for", "switch", "return", "sizeof", "defined"}
MACROS = {"PL_TRY", "PL_FAIL", "PL_CUDA", "LAUNCH"}
SLOT_EVENT = re.compile(r"\w+(?:->|\.)(?:\w+(?:\[\w+\])?\.)?has_\w+\[slot\]")
EVENT = re.compile(r"\.(ready|done) = ([^,;}]+)|order(?:\.|->)(ready|done) = ([^,;]+);")


@dataclass(frozen=True)
class Call:
    """A call within a function's body."""

    start: int  # of the expression, with the owners of the function called
    end: int
    name: str
    arguments: list[tuple[int, int]]


def bodies(code: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first, last) of each function's body: `{` and `}` in column 0."""
    for match in re.finditer(r"^\{\n.*?^\}", code, flags=re.DOTALL | re.MULTILINE):
        head = code[: match.start()].rstrip()
        head = head[max(head.rfind("\n\n"), head.rfind("}\n"), head.rfind(";\n")) + 1 :]
        name = re.search(r"(\w+)\(", head)
        if name is not None:
            yield name[1], match.start(), match.end()


def calls(code: str, first: int, last: int) -> Iterator[Call]:
    """Yield the calls between two positions, nested ones too."""
    for match in CALL.finditer(code, first, last):
        if match[2] in KEYWORDS:
            continue
        depth, arguments, at = 1, [], match.end()
        begin = at
        while depth > 0:
            char = code[at]
            depth += (char in "([{") - (char in ")]}")
            if depth == 0 or (depth == 1 and char == ","):
                arguments.append((begin, at))
                begin = at + 1
            at += 1
        yield Call(match.start(), at, match[2], arguments)


def trimmed(code: str, span: tuple[int, int]) -> tuple[int, int]:
    """Return the span without the spaces at its ends."""
    start, end = span
    while start < end and code[start].isspace():
        start += 1
    while end > start and code[end - 1].isspace():
        end -= 1
    return start, end


Place = tuple[str, int, int, str]  # operator, start, end, replacement


def nothing_for(call: Call, code: str) -> str:
    """Return an expression that does nothing, of the call's type."""
    before = code[: call.start].rstrip()
    if before.endswith(","):  # within PL_CUDA, which adds what owns the function
        return "cuCtxGetCurrent(&(pli_cu_context){0})"
    return "0"


def side_of(path: str, body: str) -> str | None:
    """Return what names the device's own stream in a function, if anything does."""
    for start, side in SIDES.items():
        variable = "backend" if "(backend)" in side else "self"
        if path.startswith(start) and re.search(rf"\b{variable}\b", body):
            return side
    return None


def places(path: str, code: str, first: int, last: int) -> Iterator[Place]:
    """Yield the places of one body."""
    side = side_of(path, code[first:last])
    for call in calls(code, first, last):
        is_bare_driver = (
            call.name.startswith("cu")
            and "->" not in code[call.start : call.start + 60].split("(")[0]
        )
        if call.name in ORDERING or call.name in ORDERING_IN.get(path, ()):
            nothing = nothing_for(call, code) if is_bare_driver else "0"
            yield "drop order", call.start, call.end, nothing
        if call.name in HOLDING:
            yield "drop reference", call.start, call.end, HOLDING[call.name]
        if call.name in MACROS and call.name != "LAUNCH":
            continue
        if PASSIVE.fullmatch(call.name):
            continue
        spans = [trimmed(code, span) for span in call.arguments]
        streams = [s for s in spans if STREAM.fullmatch(code[s[0] : s[1]])]
        for start, end in spans:
            if SLOT_EVENT.fullmatch(code[start:end]):
                yield "other slot", end - len("[slot]"), end, "[0]"
        if len(streams) == 2:
            (a, b), (c, d) = streams
            if len(spans) == 4 and streams == spans[1::2]:  # each behind whose it is
                (a, b), (c, d) = (spans[0][0], b), (spans[2][0], d)
            swapped = code[c:d] + code[b:c] + code[a:b]
            yield "swap streams", a, d, swapped
        for start, end in streams:
            yield "other stream", start, end, "NULL"
            if side is not None and not code[start:end].endswith("side"):
                yield "side stream", start, end, side
    for match in EVENT.finditer(code, first, last):
        group = 2 if match[2] is not None else 4
        start, end = trimmed(code, match.span(group))
        if code[start:end] != "NULL":
            yield "drop event", start, end, "NULL"


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return the mutants of one source."""
    if path.endswith(".py"):
        return python_mutants.mutants_of(path, source)
    code = blank(source)
    found: list[Mutant] = []
    for function, first, last in bodies(code):
        seen: dict[tuple[str, str], int] = {}
        for operator, start, end, replacement in places(path, code, first, last):
            text = source[start:end]
            if operator.endswith(("stream", "streams", "slot")):
                text = context(source, code, start)
            key = (operator, " ".join(text.split()))
            seen[key] = seen.get(key, 0) + 1
            found.append(
                Mutant(
                    path,
                    function,
                    operator,
                    start,
                    end,
                    text,
                    replacement,
                    seen[key],
                    line_of(code, start),
                )
            )
    return found


def context(source: str, code: str, at: int) -> str:
    """Return the innermost call that holds a position, for words."""
    depth, start = 0, at
    while start > 0:
        start -= 1
        depth += (code[start] in ")]}") - (code[start] in "([{")
        if depth < 0:
            break
    while start > 0 and re.match(r"[\w>.\-\]\[]", code[start - 1]):
        start -= 1
    depth, end = 0, at
    while True:
        depth += (code[end] in "([{") - (code[end] in ")]}")
        end += 1
        if depth < 0:
            return source[start:end] + f" [{source[at : word_end(code, at)]}]"


def word_end(code: str, at: int) -> int:
    """Return the end of the argument that begins at a position."""
    depth, end = 0, at
    while True:
        depth += (code[end] in "([{") - (code[end] in ")]}")
        if depth < 0 or (depth == 0 and code[end] == ","):
            return end
        end += 1


def all_mutants(root: Path = ROOT) -> list[Mutant]:
    """Return the mutants of all sources, in the order of their paths."""
    paths = sorted({path for glob in SOURCES for path in root.glob(glob)})
    return [
        mutant
        for path in paths
        for mutant in mutants_of(path.relative_to(root).as_posix(), path.read_text())
    ]
