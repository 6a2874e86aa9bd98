"""A rank is asked to take less of each batch, apart from torch: what is read, and what becomes of a bad file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ugro.train.balance import PartOfShare


def asked(made: PartOfShare) -> float:
    made._next_look = 0.0
    return made.asked()


def write(folder: Path, part: object, run: str = "7.1") -> None:
    (folder / "part.json").write_text(json.dumps({"run": run, "part": part}))


def test_a_rank_takes_the_part_that_it_was_asked_to(tmp_path: Path) -> None:
    made = PartOfShare(tmp_path, "7.1")
    assert asked(made) == 1.0
    write(tmp_path, 0.1)
    assert made.asked() == 1.0, "it has only just looked"
    assert asked(made) == 0.1
    write(tmp_path, 1)
    assert asked(made) == 1.0
    write(tmp_path, 0.1, run="6.1")
    assert asked(made) == 1.0, "it is another run's"
    assert PartOfShare(None, "None.1").asked() == 1.0


@pytest.mark.parametrize("part", [0, -1, 2, "x", None, [1]])
def test_a_bad_word_changes_nothing(tmp_path: Path, part: object) -> None:
    made = PartOfShare(tmp_path, "7.1")
    write(tmp_path, 0.5)
    assert asked(made) == 0.5
    write(tmp_path, part)
    assert asked(made) == 0.5
    (tmp_path / "part.json").write_bytes(b"\xff" * 10_000)
    assert asked(made) == 0.5
