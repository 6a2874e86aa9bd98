"""UGRO's own package beside a run: where it lies, and how its ranks find it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ugro.node.files import workdir as sdk
from ugro.node.runs.rundir import AgentDir, RunDir
from ugro.node.runs.runspec import RunSpec


def run_in(root: Path) -> RunDir:
    return AgentDir(str(root), "agent", "node").run("7", 1)


def test_the_users_own_places_come_before_it(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    place = f"{run.path}/sdk/ugro.zip".encode()
    assert sdk.findable({b"A": b"1"}, run) == {b"A": b"1", b"PYTHONPATH": place}
    assert sdk.findable({b"PYTHONPATH": b"/a:/b"}, run) == {b"PYTHONPATH": b"/a:/b:" + place}
    # Python treats an empty one as none.
    assert sdk.findable({b"PYTHONPATH": b""}, run) == {b"PYTHONPATH": place}


def test_a_folder_that_cannot_be_named_there_leaves_the_variable_alone(tmp_path: Path) -> None:
    assert sdk.findable({b"PYTHONPATH": b"/a"}, run_in(tmp_path / "a:b")) == {b"PYTHONPATH": b"/a"}


def test_a_run_names_it_by_its_hash() -> None:
    ranks = [{"rank": 0, "argv": ["x"]}]
    assert RunSpec({"ranks": ranks}).sdk is None
    assert RunSpec({"ranks": ranks, "sdk": 64 * "a"}).sdk == bytes.fromhex(64 * "a")
    with pytest.raises(ValueError, match="hash"):
        RunSpec({"ranks": ranks, "sdk": "../../etc"})


def test_dropping_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    sdk.drop(str(tmp_path))
    (tmp_path / "sdk").mkdir()
    (tmp_path / "sdk" / "ugro.zip").write_bytes(b"x")
    sdk.drop(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
