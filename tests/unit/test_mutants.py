"""Each guard that ``make mutants`` takes away is still where it is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.guards import Mutant, all_mutants

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_what_a_mutant_edits_and_the_tests_that_notice_it_are_there(mutant: Mutant) -> None:
    for edit in mutant.edits:
        source = edit.path(ROOT).read_text()
        assert edit.applied(source) != source
    files = [word.partition("::")[0] for word in mutant.tests if word.startswith("tests/")]
    assert all((ROOT / file).exists() for file in files), mutant.tests
