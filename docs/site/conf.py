"""Settings of Sphinx, which makes the pages of docs/ and the reference into a site.

`make docs` writes it into build/docs.  Sphinx, because it reads the docstrings and the
pages alike, checks links, and its search needs no server.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

project = "Paceline"
author = copyright = "the Paceline developers"
version = release = metadata.version("paceline")
root_doc = "site/index"
include_patterns = ["site/*.md", "*.md"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_heading_anchors = 4  # as GitHub makes them
autodoc_typehints = "none"  # the docstrings have them
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring = False
napoleon_use_rtype = False
add_module_names = False

html_theme = "furo"
html_title = f"Paceline {version}"
html_copy_source = html_show_sourcelink = False


def as_text(app: Any, docname: str, source: list[str]) -> None:
    """Make links to files of the repository that are no pages into their names."""
    here = (Path(app.srcdir) / docname).parent

    def named(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = (here / target.partition("#")[0]).resolve()
        is_page = path.is_file() and path.is_relative_to(app.srcdir)
        if is_page or target.startswith(("http", "#")):
            return match[0]
        return f"{text} (`{path.relative_to(ROOT)}`)"

    source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", named, source[0])


def front_page(app: Any, docname: str, source: list[str]) -> None:
    """Put the README onto the first page, with its links as from there."""
    if docname == root_doc:
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        readme = re.sub(r"\]\((?!http|#)docs/", "](../", readme)
        readme = re.sub(r"\]\((?!http|#|\.\./)", "](../../", readme)
        source[0] = source[0].replace("README", readme)
    as_text(app, docname, source)


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("source-read", front_page)
