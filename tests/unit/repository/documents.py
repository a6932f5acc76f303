"""Read the pages: blocks of code, links, headings, and commands of shell blocks."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
ENGINES = ROOT / "docs" / "engines.md"  # tests/engines runs its programs
RUN_PAGES = [README, *sorted({*(ROOT / "docs").glob("*.md")} - {ENGINES})]
OTHER_PAGES = [
    ENGINES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "SUPPORT.md",
    ROOT / "notebooks" / "README.md",
]
PAGES = RUN_PAGES + OTHER_PAGES

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT_NAME = re.compile(r"`(\w+\.py)`(?:[^`\n]|\n(?!\n))*:\s*$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block; if it is a file, `name` is the file's name."""

    page: Path
    language: str
    text: str
    name: str


def name_of(page: Path) -> str:
    """Return a page's name for messages and for names of tests."""
    return str(page.relative_to(ROOT))


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in FENCE.finditer(text):
        before = SCRIPT_NAME.search(text, 0, match.start())
        is_script = match[1] == "python" and before is not None
        name = before[1] if is_script and before is not None else ""
        blocks.append(Block(page, match[1], match[2], name))
    return tuple(blocks)


def prose_of(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def commands_of(page: Path) -> list[str]:
    """Return the lines of the shell blocks, without comments."""
    lines = [
        line.split("  #")[0].strip()
        for block in blocks_of(page)
        if block.language == "sh"
        for line in block.text.splitlines()
    ]
    return [line for line in lines if line and not line.startswith("#")]


def scripts_of(page: Path) -> dict[str, str]:
    return {block.name: block.text for block in blocks_of(page) if block.name}


def scripts_in(command: str) -> list[str]:
    return [word for word in shlex.split(command) if word.endswith(".py")]


def program_of(page: Path) -> str:
    """Return the Python blocks of a page that are not files, joined in order."""
    return "\n".join(
        block.text
        for block in blocks_of(page)
        if block.language == "python" and not block.name
    )


def sides_of(diff: str) -> tuple[str, str]:
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


def links_of(page: Path) -> list[str]:
    """Return the targets of a page's links to this repository."""
    return [t for t in LINK.findall(prose_of(page)) if not t.startswith("http")]


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    )
