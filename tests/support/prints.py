"""What programs print."""

import re


def without_gloo(text: str) -> str:
    """Return what a program has printed, but for what Gloo of torch 2.8 prints."""
    return re.sub(r"^(\[rank \d+\] )?\[Gloo\] .*\n?", "", text, flags=re.MULTILINE)
