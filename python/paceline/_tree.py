"""Where pickles that 0.1 has written look for the marker of ``replicate()``."""

from paceline._compat.packed_sequence import Replicated as Replicated
