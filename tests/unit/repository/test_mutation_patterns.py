"""The patterns of the mutation script still match the code that they are for."""

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS / "mutation"))
from equivalent import PLACES  # noqa: E402
from mutant import instrumented  # noqa: E402
from mutants import ROOT, SOURCES, Mutant, all_mutants, blank  # noqa: E402


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return all_mutants()


def test_every_operator_finds_places_in_the_sources(mutants):
    found = Counter(mutant.operator for mutant in mutants)
    assert set(found) == {
        *("drop order", "drop event", "drop reference", "other slot"),
        *("other stream", "side stream", "swap streams"),
        *("negate", "drop call", "boundary", "unequal", "return 0", "return 1"),
        *("always", "never", "blind entry"),  # kinds for Python
        *("drop operand", "drop statement", "drop with"),
    }
    assert found["drop order"] >= 20
    assert found["other stream"] >= 40


def test_every_source_of_the_list_is_there(mutants):
    assert [glob for glob in SOURCES if not list(ROOT.glob(glob))] == []


def test_every_record_and_wait_is_a_mutant(mutants):
    names = "event_record|event_wait|cuStreamWaitEvent|cuEventRecord"
    call = re.compile(rf"(?:->|[(\s])({names})\(")
    for path in {mutant.path for mutant in mutants}:
        code = blank((ROOT / path).read_text())
        made = Counter(match[1] for match in call.finditer(code))
        broken = Counter(
            name
            for mutant in mutants
            if mutant.path == path and mutant.operator == "drop order"
            for name in made
            if re.search(rf"\b{name}\($", mutant.text.split("(")[0] + "(")
        )
        assert broken == made, path


def test_mutants_have_names_of_their_own(mutants):
    twice = [name for name, n in Counter(m.name for m in mutants).items() if n > 1]
    assert twice == []


def test_every_excuse_is_of_a_mutant_that_is_left(mutants):
    for path, function, piece, operators, reason in PLACES:
        assert any(
            mutant.path == path
            and mutant.function == function
            and mutant.operator in operators
            and piece in mutant.text
            for mutant in mutants
        ), (path, function, piece)
        assert len(reason.split()) > 3


@pytest.mark.parametrize("suffix", [".c", ".py"])
def test_a_source_with_its_mutants_is_what_it_was_with_pieces_put_in(mutants, suffix):
    for path in {m.path for m in mutants if m.path.endswith(suffix)}:
        whole = (ROOT / path).read_text()
        edits = [(n, m) for n, m in enumerate(mutants, 1) if m.path == path]
        changed = instrumented(whole, edits)
        left = iter(changed)
        assert all(char in left for char in whole)  # in this order
        if suffix == ".py":
            ast.parse(changed)
        else:
            assert {f"pl_mutant({n})" for n, _ in edits} == {
                f"pl_mutant({n})" for n in re.findall(r"pl_mutant\((\d+)\)", changed)
            }


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_compiler_takes_every_source_with_its_mutants(mutants, tmp_path):
    folders = [ROOT, ROOT / "csrc", sysconfig.get_paths()["include"], np.get_include()]
    sources = []
    for path in sorted({m.path for m in mutants if m.path.endswith(".c")}):
        edits = [(n, m) for n, m in enumerate(mutants, 1) if m.path == path]
        source = tmp_path / path
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(instrumented((ROOT / path).read_text(), edits))
        sources.append(source)
        folders.append((ROOT / path).parent)
    flags = ["-std=gnu11", "-w", "-include", TESTS / "mutation/switch.h"]
    flags += [f"-I{folder}" for folder in folders]
    done = subprocess.run(
        ["gcc", "-fsyntax-only", *flags, *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
