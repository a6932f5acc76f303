"""accelerate: its loop, its launchers, its saved states."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import (
    alone,
    by_accelerate,
    check_equal,
    check_ranks_agree,
    check_resumes,
    needs,
    run,
    with_accelerate,
)
from support.ports import free_port

pytestmark = needs("accelerate", "sklearn")
LOOP, NOTEBOOK = "accelerate_loop.py", "accelerate_notebook.py"


def test_a_short_training_has_our_wrapper_on_both_ranks(tmp_path: Path) -> None:
    port = ("--port", str(free_port()))
    folder = tmp_path / "out"
    done = run("paceline", alone, NOTEBOOK, folder, *port, has_install_line=True)
    check_ranks_agree(done)


@pytest.mark.long
def test_a_loop_with_accelerate_trains_and_resumes_alike(tmp_path: Path) -> None:
    ours = run("paceline", by_accelerate, LOOP, tmp_path / "ours")
    resume = ("--resume", ours.path)
    plain = run("torch", by_accelerate, LOOP, tmp_path / "torch", *resume)
    check_equal(plain, ours)
    check_resumes(ours, plain)
    # All else that accelerate starts is reached through the environment.
    resume = ("--resume", plain.path)
    again = run("paceline", with_accelerate, LOOP, tmp_path / "again", *resume)
    check_resumes(plain, again)


@pytest.mark.long
def test_a_function_in_a_notebook_trains_alike(tmp_path: Path) -> None:
    plain, ours = (
        run(
            library,
            alone,
            NOTEBOOK,
            tmp_path / library,
            *("--port", str(free_port())),
            has_install_line=True,
        )
        for library in ("torch", "paceline")
    )
    check_equal(plain, ours)
