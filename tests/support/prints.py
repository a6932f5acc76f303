"""The output of programs."""

import re


def without_gloo(text: str) -> str:
    """Return a program's output without the lines that Gloo of torch 2.8 prints."""
    return re.sub(r"^(\[rank \d+\] )?\[Gloo\] .*\n?", "", text, flags=re.MULTILINE)
