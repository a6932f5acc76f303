"""Every lesson under notebooks/ runs from top to bottom."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[3] / "notebooks").glob("*.ipynb"))
NEEDED = ("nbclient", "nbformat", "ipykernel", "matplotlib", "sklearn")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
CELL_SECONDS = 150


assert NOTEBOOKS
FIRST, OTHERS = NOTEBOOKS[:1], NOTEBOOKS[1:]
RUN = [*FIRST, *(pytest.param(path, marks=pytest.mark.long) for path in OTHERS)]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_notebook_runs_without_an_error(path, tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # raises CellExecutionError with the cell and its traceback


@pytest.mark.skipif("nbformat" in MISSING, reason="not installed: nbformat")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    import nbformat

    cells = nbformat.read(path, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
