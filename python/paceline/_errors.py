"""The errors that name another rank, and the facts that their messages carry.

Only the message crosses from C to Python and from host to host.  So this file alone
parses the facts from it: the rank at fault, its step, and the signal that ended it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_OWN_WORDS = "\n\nIts own failure message:\n"
_REPORTER = re.compile(r"rank (\d+): ")
# Words of a rank that is gone may concern an earlier step, whose failure it survived,
# unless they name another rank that is gone.
_GONE = r"rank \d+: rank \d+ \(process \d+\) (?:died|has left)(?!.*: ranks? [\d to]+\()"
# Prefixes of a message that a rank passes on from another rank or host, perhaps as the
# end of a traceback.
_PASSED_ON = re.compile(
    rf"(?!{_GONE}).*?{_OWN_WORDS}(?:(?:.*\n)?paceline\.\w+Error: )?(?=rank \d+: )"
    r"|(?:rank \d+: )?rank \d+ left the construction \([\w.]+: (?=rank \d+: )"
    r"|(?:rank \d+: )?(?:the step has failed|[^(\n]* from what was saved) "
    r"\((?=rank \d+: )"
    r"|(?:rank \d+: )?rank \d+ could not make (?:its|the) world: (?=rank \d+: )",
    re.DOTALL,
)
_CULPRIT = re.compile(
    r".*?\brank 0(?:'s| has| was given)\b.*?\brank (\d+)(?:'s| has| was)"
    r"|(?:the step of |this rank and |the step has failed \(|a step has failed on |"
    r"\S+ waits for )?"
    r"rank (\d+)\b(?: \(process (?P<pid>\d+)\) died)?"
    r"|this rank is in a forward that rank (\d+)\b"
    r"|ranks \[(\d+)\] have not"
    r"|this rank(?:'s step failed| kept| issued)",
    re.DOTALL,
)
_STEP = re.compile(r"\bstep (\d+), in ")


class _NamesRank(Exception):
    rank: int | None = None
    step: int | None = None
    signal: int | None = None

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        text, rank, is_passed_on = str(self), None, False
        while found := _PASSED_ON.match(text):
            is_passed_on, text = True, text[found.end() :]
        text = text.partition(_OWN_WORDS)[0]
        reporter = _REPORTER.match(text)
        culprit = _CULPRIT.match(text, reporter.end() if reporter else 0)
        if culprit:
            rank = next(filter(None, culprit.group(1, 2, 4, 5)), None)
            step = _STEP.search(text, culprit.end())
            self.step = int(step[1]) if step else None
            self.signal = _signal_of(culprit["pid"])
        if reporter and rank is None and (culprit or is_passed_on):
            rank = None if text.startswith("ranks ", reporter.end()) else reporter[1]
        self.rank = int(rank) if rank is not None else None


def _signal_of(pid: str | None) -> int | None:
    """Return the signal that ended a process, unless its parent has reaped it."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()
        return int(fields[48]) & 0x7F or None if state == "Z" else None
    return None


class PeerError(_NamesRank, RuntimeError):
    """Another rank died, left, or failed in this step; the message names it.

    Attributes
    ----------
    rank : int or None
        The rank at fault; None if only its host is known.
    step : int or None
        The step in which that rank was, from 1; None outside of steps.
    signal : int or None
        The signal that ended the rank's process, such as ``signal.SIGKILL``, if the
        process was on this host and its parent had not reaped it yet.

    Examples
    --------
    >>> import paceline
    >>> try:
    ...     raise paceline.PeerError("rank 0: rank 2 (process 7) died")
    ... except paceline.PeerError as error:
    ...     print(f"rank {error.rank} is gone: go on from the checkpoint without it")
    rank 2 is gone: go on from the checkpoint without it
    """


class PeerTimeoutError(PeerError, TimeoutError):
    """Another rank is alive but kept this one waiting beyond the deadline.

    Examples
    --------
    >>> import paceline
    >>> issubclass(paceline.PeerTimeoutError, (paceline.PeerError, TimeoutError))
    True
    """


class MismatchError(_NamesRank, RuntimeError):
    """The ranks' models or steps differ; `rank` is the first one that differs.

    Examples
    --------
    >>> import paceline
    >>> error = paceline.MismatchError("rank 0 has 'a': a number where rank 1 has 'b'")
    >>> error.rank
    1
    """


PeerError.__module__ = PeerTimeoutError.__module__ = MismatchError.__module__ = (
    "paceline"
)
