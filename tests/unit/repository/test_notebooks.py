"""Every lesson under notebooks/ runs from top to bottom, and has its own outputs."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

STORE = runpy.run_path(str(Path(__file__).parents[3] / "notebooks" / "store.py"))
LESSONS = STORE["LESSONS"]
NEEDED = ("nbclient", "nbformat", "ipykernel", "matplotlib", "sklearn")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


RUN = [
    LESSONS[0],
    *(pytest.param(path, marks=pytest.mark.long) for path in LESSONS[1:]),
]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_notebook_runs_without_an_error(path):
    import nbformat

    STORE["execute"](nbformat.read(path, as_version=4))  # or raises CellExecutionError


@pytest.mark.skipif("nbformat" in MISSING, reason="not installed: nbformat")
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_the_outputs_of_its_cells(path):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.cells_digest == STORE["digest"](notebook), "make notebooks"
    assert any(cell.get("outputs") for cell in notebook.cells)
    assert "/site-packages/" not in str(notebook)
