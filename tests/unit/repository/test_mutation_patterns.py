"""The patterns of the mutation script still find what they are for in the sources."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS / "mutation"))
from equivalent import PLACES  # noqa: E402
from mutants import ROOT, SOURCES, Mutant, all_mutants, blank  # noqa: E402


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return all_mutants()


def test_every_operator_finds_places_in_the_sources(mutants):
    found = Counter(mutant.operator for mutant in mutants)
    assert set(found) == {
        "drop order",
        "drop event",
        "drop reference",
        "other slot",
        "other stream",
        "side stream",
        "swap streams",
        "always",  # and those that follow are Python's
        "never",
        "blind entry",
        "drop operand",
        "drop statement",
        "drop with",
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


def test_a_mutant_changes_its_piece_alone(mutants):
    for mutant in mutants:
        whole = (ROOT / mutant.path).read_text()
        changed = mutant.applied_to(whole)
        assert changed != whole
        assert changed.startswith(whole[: mutant.start])
        assert changed.endswith(whole[mutant.end :])
