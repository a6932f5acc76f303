"""Run the lessons and store them with what they print and draw.

    make notebooks        or: python notebooks/store.py 03_large_batches.ipynb

Each keeps a digest of its cells, by which tests/unit/repository/test_notebooks.py finds
outputs of other cells.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LESSONS = sorted(HERE.glob("*.ipynb"))
CELL_SECONDS = 150


def digest(notebook: Any) -> str:
    """Return a digest of the cells' sources."""
    sources = repr([cell.source for cell in notebook.cells])
    return hashlib.sha256(sources.encode()).hexdigest()[:16]


def execute(notebook: Any) -> None:
    """Run the cells in an empty folder; raise the error of the first that fails."""
    import nbclient

    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        ).execute()


def main() -> None:
    """Run and store the lessons of the command line, by default all."""
    import nbformat

    for path in [HERE / name for name in sys.argv[1:]] or LESSONS:
        notebook = nbformat.read(path, as_version=4)
        execute(notebook)
        for cell in notebook.cells:
            cell.metadata.clear()  # the times at which it ran
        notebook.metadata["cells_digest"] = digest(notebook)
        nbformat.write(notebook, path)
        print(path.name, flush=True)


if __name__ == "__main__":
    main()
