"""Why replicas cannot run in processes of their own, or have failed there."""

from __future__ import annotations


class UnsupportedModelError(RuntimeError):
    """The model cannot run in worker processes; the message says why."""


class UnsupportedCallError(UnsupportedModelError):
    """One call cannot run in worker processes; others may."""


class WrittenError(RuntimeError):
    """A forward has written a parameter in place, which all replicas share."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the forward changes parameter '{name}' in place, which replicas in other "
            'processes share: wrap by engine="thread", where each replica changes a '
            "copy and that of replica 0 stays"
        )


class ReplicaFailedError(Exception):
    """A replica other than 0 has failed in a forward where replica 0 has not.

    `error` is what it raised, as the caller is to see it.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
