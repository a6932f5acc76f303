"""The key with which ranks prove to one another that they are of one job.

It is made of rank 0's random bytes, which the process group carries, and of the secret
in ``PACELINE_SECRET``, which a launcher gives to its ranks.  Without that secret, every
process that can read the group's messages can join the job, as with torch.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from paceline import _environment, _native

KEY_BYTES = 32
_MOST_NAMED = 9


@dataclass(frozen=True)
class Share:
    """A rank's part of the agreement, as sent to all ranks."""

    noise: bytes  # rank 0's becomes part of the key
    fingerprint: bytes  # tells secrets apart and does not reveal them; b"" without one
    problem: str  # why this rank's secret cannot be used, or ""

    def __post_init__(self) -> None:
        if len(self.noise) != KEY_BYTES:
            raise ValueError(f"a random number of {len(self.noise)} bytes")

    @classmethod
    def own(cls) -> Share:
        """Return the share of this process."""
        secret, problem = b"", ""
        try:
            secret = _environment.secret() or b""
        except ValueError as error:
            problem = str(error)
        fingerprint = secret and hmac.digest(secret, b"paceline: same?", "sha256")
        return cls(secrets.token_bytes(KEY_BYTES), fingerprint, problem)


def key_of(shares: Sequence[Share]) -> bytes:
    """Return the ranks' key, or raise the same error on every rank."""
    for rank, share in enumerate(shares):
        if share.problem:
            raise ValueError(f"rank {rank}: {share.problem}")
    first = shares[0]
    odd = [
        f"rank {rank} has {'another' if share.fingerprint else 'none'}"
        for rank, share in enumerate(shares)
        if share.fingerprint != first.fingerprint
    ]
    if odd:
        odd[:0] = [f"rank 0 has {'one' if first.fingerprint else 'none'}"]
        raise _native.MismatchError(
            f"{_environment.SECRET} differs: {', '.join(odd[:_MOST_NAMED])}: "
            "give every rank the same, or none to any"
        )
    secret = _environment.secret()
    return hmac.digest(secret, first.noise, "sha256") if secret else first.noise
