"""What code in a worker process logs, on its way to the caller's handlers.

A worker has no handlers: records that pass its levels, which are the caller's, wait
here for the answer to the request in hand, are sent with it, and are handled by the
logger of the same name in the caller's process, on the thread that takes the answer.
"""

from __future__ import annotations

import collections
import logging
import pickle
import struct
import sys
from typing import Any

HAS_RECORDS = 1 << 16
"""Added to the kind of an answer whose payload begins with records."""
MOST_RECORDS = 1000
"""Of one answer."""
_N_BYTES = struct.Struct("<I")
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
_PROBE = -0x5EED
"""A level that nobody uses: who asks for it finds out whether levels have changed."""

Levels = tuple[int, dict[str, int]]
Records = list[tuple[int, Any]]

# ---- in a worker --------------------------------------------------------------------

_waiting: collections.deque[bytes] = collections.deque(maxlen=MOST_RECORDS + 1)
_leaving: list[bytes] = []
_formatter = logging.Formatter()


def collect() -> None:
    """Have whatever this process logs wait for the next answer, and nothing else."""
    logging.Logger.callHandlers = _call_handlers  # type: ignore[method-assign,assignment]


def _call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
    _waiting.append(_pickled(record))  # at once: what it names may change


def write(line: str) -> None:
    """Have the caller write a line to its stderr, once."""
    _waiting.append(pickle.dumps(line))


def _pickled(record: logging.LogRecord) -> bytes:
    values = dict(vars(record))
    if record.exc_info and not record.exc_text:
        values["exc_text"] = _formatter.formatException(record.exc_info)
    values["exc_info"] = None
    if not _is_plain(record.args):
        values.update(msg=record.getMessage(), args=None)
    for name, value in values.items():
        if not _is_plain(value):  # a message that is an object, what `extra` has
            values[name] = str(value)
    return pickle.dumps(values)


def _is_plain(value: Any) -> bool:
    """Tell whether a value means the same in each process."""
    kind = type(value)
    if kind in (tuple, list):
        return all(map(_is_plain, value))
    if kind is dict:
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    return kind in _PLAIN


def with_records(kind: int, payload: bytes) -> tuple[int, bytes]:
    """Return the kind and payload of an answer, with the records that wait for it."""
    if not _waiting and not _leaving:
        return kind, payload
    while _waiting:
        _leaving.append(_waiting.popleft())
    if len(_leaving) > MOST_RECORDS:
        text = "more than %d records of one call: the first are missing"
        level, args = logging.WARNING, (MOST_RECORDS,)
        record = logging.LogRecord("paceline", level, __file__, 0, text, args, None)
        _leaving[:-MOST_RECORDS] = [_pickled(record)]
    records = pickle.dumps(_leaving)
    header = _N_BYTES.pack(len(records))
    return kind | HAS_RECORDS, header + records + payload


def have_left() -> None:
    """Forget the records of an answer that was sent."""
    _leaving.clear()


def adopt(levels: Levels) -> None:
    """Let pass what the caller's loggers let pass."""
    disabled, of_names = levels
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name not in of_names:
            logger.setLevel(logging.NOTSET)
    for name, level in of_names.items():
        (logging.getLogger(name) if name else logging.root).setLevel(level)
    logging.disable(disabled)


# ---- in the caller ------------------------------------------------------------------

_levels: Levels = (0, {})
_printed: set[str] = set()


def levels() -> Levels:
    """Return what loggers let pass; the same object while nothing has changed."""
    global _levels
    root = logging.root
    cache = getattr(root, "_cache", {})  # emptied whenever some level is set
    if _PROBE not in cache:
        root.isEnabledFor(_PROBE)
        of_names = {
            name: logger.level
            for name, logger in list(root.manager.loggerDict.items())
            if isinstance(logger, logging.Logger) and logger.level
        }
        now = root.manager.disable, {**of_names, "": root.level}
        if now != _levels:
            _levels = now
    return _levels


def split(kind: int, payload: bytes, replica: int, into: Records) -> tuple[int, bytes]:
    """Return an answer's kind and payload; its records go to `into`."""
    if not kind & HAS_RECORDS:
        return kind, payload
    begin = _N_BYTES.size
    end = begin + _N_BYTES.unpack_from(payload)[0]
    records = map(pickle.loads, pickle.loads(payload[begin:end]))
    into += [(replica, each) for each in records]
    return kind & ~HAS_RECORDS, payload[end:]


def handle(records: Records) -> None:
    """Have this process's loggers handle what replicas have logged, in order."""
    for replica, each in records:
        if isinstance(each, str):
            _write_once(each)
            continue
        record = logging.makeLogRecord(each)
        record.replica = replica
        record.msg = f"[replica {replica}] {record.msg}"
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def _write_once(line: str) -> None:
    if line not in _printed and sys.stderr is not None:
        _printed.add(line)
        print(line, file=sys.stderr, flush=True)
