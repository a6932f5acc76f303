"""Places where the code can be broken, one at a time.

Patterns find the places by the form of the code, so they also find new code.  On the
GPU path:

- *drop order*: a call that records an event or makes a stream wait does nothing;
- *drop event*: an operation gets no event to wait for, or no event to record;
- *other stream*: a call gets the legacy default stream instead of its stream;
- *side stream*: a call gets the device's own stream instead of the caller's;
- *swap streams*: a call that orders two streams gets them in reverse;
- *other slot*: the event of a ring's first slot replaces that of another slot;
- *drop reference*: an object that keeps memory, or work on it, alive is dropped.

In code for gradients, replicas and their data on a CPU:

- *negate*: the condition of an `if` is negated;
- *drop call*: a statement that is a call is left out;
- *boundary*: `<` becomes `<=`;
- *unequal*: `==` becomes `!=`;
- *return*: a function only returns a fixed status, truth or count.

For the operators of Python see python_mutants.py.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import python_mutants
from mutant import ROOT, Edit, Mutant, Place, mutants_at

sys.path.insert(0, str(Path(__file__).parents[1] / "lint"))
from rules import blank

# The GPU path: code that enqueues work, or decides when memory may be reused.
GPU_SOURCES = [
    "csrc/backend/cuda.c",
    "csrc/backend/kernels.c",
    "csrc/reducer/*.c",
    "csrc/nccl/gpu_*.c",
    "csrc/nccl/nccl.c",
    "csrc/comm/broadcast_many.c",
    "csrc/comm/window.c",
    "csrc/replicas/*.c",
    "csrc/python/*.c",
    "csrc/python/ddp/*.c",
    "csrc/python/dp/device_group_type.c",
]
# The CPU path.
CPU_SOURCES = [
    "csrc/reducer/*.c",
    "csrc/replicas/*.c",
    "csrc/python/ddp/*.c",
    "csrc/python/dp/*.c",
]
PY_SOURCES = ["python/paceline/_ddp/*.py", "python/paceline/_dp/**/*.py"]
SOURCES = GPU_SOURCES + CPU_SOURCES + PY_SOURCES

# Calls that order work: without them the order is lost.
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

# The same, but functions of a single source.
ORDERING_IN = {
    "csrc/replicas/device_group.c": {"order", "record", "wait_for"},
}

# Calls that keep an object alive, and their replacements.
HOLDING = {
    "pli_cuda_backend_retain": "(void)0",
    "pl_reducer_n_posted": "SIZE_MAX",
    "keep": "0",
    "keep_late": "0",
    "keep_until_copied": "0",
    "drain": "1",
}

# An argument that names a stream.
STREAM = re.compile(
    r"(?:stream_as_cu\()?(?:\(\w+\)\(void \*\))?(?:\w+(?:\[\w+\])?(?:->|\.))*"
    r"(?:stream|side|on|then|waiter|made_on|by_member\[\w+\]"
    r"|streams\[(?:\w+|\w+\[\w+\]\.\w+)\])\)?"
)
# The device's own stream, where it can be reached.
SIDE_OF_BACKEND = (
    "({ pl_stream *pli_cuda_side_stream(pl_backend *);"
    " pli_cuda_side_stream(self->backend); })"
)
SIDES = {
    "csrc/backend/cuda.c": "(void *)as_cuda(backend)->side",
    "csrc/nccl/gpu_inflight.c": SIDE_OF_BACKEND,
    "csrc/nccl/gpu_": "self->side",
    "csrc/replicas/": "self->members[0].side",
    "csrc/reducer/": SIDE_OF_BACKEND,
}

# Calls that enqueue nothing: a stream in a list, a cast, an object.
PASSIVE = re.compile(r"\w+_as_cu|add_stream|list_moves|Py\w+")

CALL = re.compile(r"(?<![\w>.])((?:\w+(?:\[\w+\])?(?:->|\.))*)([A-Za-z_]\w*)\(")
KEYWORDS = {"if", "while", "for", "switch", "return", "sizeof", "defined"}
# A statement that is a call, after a token that may precede one.
STATEMENT = re.compile(
    r"(?:[;{}]|\)[ \t]*\n|\belse\b|\bdone:)\s*(?P<call>(?:\(void\))?"
    r"(?:\w+(?:\[\w+\])?(?:->|\.))*(?P<name>[A-Za-z_]\w*)\()"
)
TRUTH = re.compile(r"(?:pli?_)?(?:\w+_)?(?:is|has|can|needs|may|defers)_?")
MACROS = {"PL_TRY", "PL_FAIL", "PL_CUDA", "LAUNCH"}
SLOT_EVENT = re.compile(r"\w+(?:->|\.)(?:\w+(?:\[\w+\])?\.)?has_\w+\[slot\]")
EVENT = re.compile(r"\.(ready|done) = ([^,;}]+)|order(?:\.|->)(ready|done) = ([^,;]+);")


@dataclass(frozen=True)
class Call:
    start: int  # of the expression, with the objects before the function's name
    end: int
    name: str
    arguments: list[tuple[int, int]]


def bodies(code: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield (type, name, first, last) of each function: `{` and `}` in column 0."""
    for match in re.finditer(r"^\{\n.*?^\}", code, flags=re.DOTALL | re.MULTILINE):
        head = code[: match.start()].rstrip()
        head = head[max(head.rfind("\n\n"), head.rfind("}\n"), head.rfind(";\n")) + 1 :]
        name = re.search(r"(?:(\w+) )?\**(\w+)\(", head)
        if name is not None:
            yield name[1] or "", name[2], match.start(), match.end()


def calls(code: str, first: int, last: int) -> Iterator[Call]:
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
    start, end = span
    while start < end and code[start].isspace():
        start += 1
    while end > start and code[end - 1].isspace():
        end -= 1
    return start, end


Found = tuple[str, int, int, tuple[Edit, ...]]  # operator, start, end, edits


def either(start: int, end: int, other: str) -> tuple[Edit, ...]:
    """Replace an expression by another one."""
    return ((start, end, f"(pl_mutant(@) ? ({other}) : (", "))"),)


def dropped(start: int, end: int) -> tuple[Edit, ...]:
    return ((start, end, "if (pl_mutant(@)) {} else ", ""),)


def closing(code: str, at: int) -> int:
    """Return where the bracket is closed that opens just before a position."""
    depth = 1
    while depth > 0:
        depth += (code[at] in "([{") - (code[at] in ")]}")
        at += 1
    return at - 1


def operand(code: str, at: int, step: int) -> tuple[int, int]:
    """Return the operand of a comparison that begins or ends at a position."""
    opened, closed = ("([{", ")]}") if step > 0 else (")]}", "([{")
    end, depth = at, 0
    while True:
        char = code[end] if step > 0 else code[end - 1]
        depth += (char in opened) - (char in closed)
        pair = code[end - 1 : end + 1] if step > 0 else code[end - 2 : end]
        is_end = char in ",;?:&|=<>!^" and "->" not in (pair, code[end : end + 2])
        if char == "&":  # not that of an address
            is_end = code[end + (step > 0)] in " &\n"
        if depth < 0 or (depth == 0 and is_end):
            break
        end += step
    start, end = trimmed(code, (at, end) if step > 0 else (end, at))
    word = re.match(r".*\breturn\s+", code[start:end], re.DOTALL)
    return start + (len(word[0]) if word else 0), end


def cpu_places(
    code: str, kind: str, name: str, first: int, last: int
) -> Iterator[Found]:
    values = {"pl_status": "0", "size_t": "0", "int": "0", "bool": "01"}.get(kind, "")
    if kind == "int" and TRUTH.match(name):
        values = "01"
    for value in values:
        edit = (first + 1, last - 1, f"\nif (pl_mutant(@)) return {value};", "")
        yield f"return {value}", first + 1, first + 1, (edit,)
    conditions = set()
    for match in re.finditer(r"\bif \(", code[first:last]):
        start = first + match.end()
        end = closing(code, start)
        conditions.add((start, end))
        yield "negate", start, end, ((start, end, "(pl_mutant(@) != !!(", "))"),)
    for match in STATEMENT.finditer(code, first, last):
        end = closing(code, match.end()) + 1
        if code[end] == ";" and match["name"] not in {*KEYWORDS, "PLI_ENTER"}:
            start = match.start("call")
            yield "drop call", start, end, dropped(start, end + 1)
    for match in re.finditer(r" (<|==) ", code[first:last]):
        begin, end = first + match.start(), first + match.end()
        if code[code.rfind("\n", 0, begin) + 1] == "#":
            continue
        left, right = operand(code, begin, -1), operand(code, end, 1)
        edit = (*right, "(", " + pl_mutant(@))")
        if match[1] == "==":
            edit = (left[0], right[1], "(pl_mutant(@) != (", "))")
        if right[0] < right[1] and (left[0], right[1]) not in conditions:
            operator = "unequal" if match[1] == "==" else "boundary"
            yield operator, left[0], right[1], (edit,)


def side_of(path: str, body: str) -> str | None:
    """Return the expression for the device's own stream in a function, if any."""
    for start, side in SIDES.items():
        variable = "backend" if "(backend)" in side else "self"
        if path.startswith(start) and re.search(rf"\b{variable}\b", body):
            return side
    return None


def gpu_places(path: str, code: str, first: int, last: int) -> Iterator[Found]:
    side = side_of(path, code[first:last])
    for call in calls(code, first, last):
        if call.name in ORDERING or call.name in ORDERING_IN.get(path, ()):
            edits = either(call.start, call.end, "0")
            if code[: call.start].rstrip().endswith(","):  # PL_CUDA adds the owner
                edits = dropped(code.rfind("PL_CUDA(", 0, call.start), call.end)
            yield "drop order", call.start, call.end, edits
        if call.name in HOLDING:
            edits = either(call.start, call.end, HOLDING[call.name])
            yield "drop reference", call.start, call.end, edits
        if call.name in MACROS and call.name != "LAUNCH":
            continue
        if PASSIVE.fullmatch(call.name):
            continue
        spans = [trimmed(code, span) for span in call.arguments]
        streams = [s for s in spans if STREAM.fullmatch(code[s[0] : s[1]])]
        for start, end in spans:
            if SLOT_EVENT.fullmatch(code[start:end]):
                slot = (end - len("slot]"), end - 1)
                yield "other slot", end - len("[slot]"), end, either(*slot, "0")
        if len(streams) == 2:
            pairs = [tuple(streams)]
            if len(spans) == 4 and streams == spans[1::2]:  # with owners
                pairs.append((spans[0], spans[2]))
            edits = tuple(
                edit
                for a, b in pairs
                for edit in either(*a, code[slice(*b)]) + either(*b, code[slice(*a)])
            )
            yield "swap streams", min(pairs)[0][0], streams[1][1], edits
        for start, end in streams:
            yield "other stream", start, end, either(start, end, "NULL")
            if side is not None and not code[start:end].endswith("side"):
                yield "side stream", start, end, either(start, end, side)
    for match in EVENT.finditer(code, first, last):
        group = 2 if match[2] is not None else 4
        start, end = trimmed(code, match.span(group))
        if code[start:end] != "NULL":
            yield "drop event", start, end, either(start, end, "NULL")


def places(path: str, source: str) -> Iterator[Place]:
    code = blank(source)
    for kind, function, first, last in bodies(code):
        found: list[Found] = []
        if any(fnmatch(path, glob) for glob in GPU_SOURCES):
            found += gpu_places(path, code, first, last)
        if any(fnmatch(path, glob) for glob in CPU_SOURCES):
            found += cpu_places(code, kind, function, first, last)
        for operator, start, end, edits in found:
            text = source[start:end]
            if operator.endswith(("stream", "streams", "slot")):
                text = context(source, code, start)
            yield function, operator, start, end, text, edits


def mutants_of(path: str, source: str) -> list[Mutant]:
    if path.endswith(".py"):
        return python_mutants.mutants_of(path, source)
    return mutants_at(path, source, places(path, source))


def context(source: str, code: str, at: int) -> str:
    """Return the innermost call that contains a position, for a description."""
    depth, start = 0, at
    while start > 0:
        start -= 1
        depth += (code[start] in ")]}") - (code[start] in "([{")
        if depth < 0:
            break
    while start > 0 and re.match(r"[\w>.\-\]\[]", code[start - 1]):
        start -= 1
    end = closing(code, at) + 1
    return source[start:end] + f" [{source[at : word_end(code, at)]}]"


def word_end(code: str, at: int) -> int:
    depth, end = 0, at
    while True:
        depth += (code[end] in "([{") - (code[end] in ")]}")
        if depth < 0 or (depth == 0 and code[end] == ","):
            return end
        end += 1


def all_mutants(root: Path = ROOT) -> list[Mutant]:
    paths = sorted({path for glob in SOURCES for path in root.glob(glob)})
    return [
        mutant
        for path in paths
        for mutant in mutants_of(path.relative_to(root).as_posix(), path.read_text())
    ]
