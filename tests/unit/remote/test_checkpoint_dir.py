"""How checkpoints move between the working directories of attempts: none is lost, and nothing of others is taken."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from ugro.node.files import checkpoint_dir
from ugro.node.files.api import Resume
from ugro.node.files.checkpoint_dir import CheckpointDir, Checkpoints
from ugro.node.files.outputs import Outputs
from ugro.node.program import Refused
from ugro.node.runs.rundir import AgentDir, RunDir


class Machine:
    def __init__(self, root: Path) -> None:
        self.agent = AgentDir(str(root), "agent", "n1@machine")

    def run(self, attempt: int, folder: str = "checkpoints") -> RunDir:
        run = self.agent.run("7", attempt)
        os.makedirs(run.file("work"))
        spec = {"ranks": [{"rank": 0, "argv": ["x"]}], "checkpoint_dir": folder}
        Path(run.file("spec.json")).write_text(json.dumps({"spec": spec}))
        return run

    def folder(self, attempt: int) -> CheckpointDir:
        found = checkpoint_dir.of_run(self.agent.run("7", attempt))
        assert found is not None
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "node").mkdir()
    return Machine(tmp_path.resolve() / "node")


def work(run: RunDir) -> Path:
    return Path(run.file("work"))


def names(folder: CheckpointDir) -> list[str]:
    return [os.fsdecode(file.name) for file in folder.files()]


@pytest.mark.parametrize("name", ["checkpoints", "data/checkpoints"])
def test_nothing_is_taken_from_a_folder_that_a_link_of_the_code_leads_to(
    machine: Machine, tmp_path: Path, name: str
) -> None:
    users = tmp_path / "scratch"
    (users / "checkpoints").mkdir(parents=True)
    (users / "checkpoints" / "other.pt").write_text("of another job")
    run = machine.run(1, name)
    first = work(run) / name.split("/")[0]
    first.symlink_to(users if "/" in name else users / "checkpoints")

    machine.folder(1).gather()
    (work(run) / name / "step_1.pt").write_text("of this job")
    assert names(machine.folder(1)) == []
    machine.folder(1).save(run)
    machine.folder(1).drop()

    assert sorted(path.name for path in (users / "checkpoints").iterdir()) == ["other.pt", "step_1.pt"]


@pytest.mark.parametrize("is_link", [True, False])
def test_a_job_starts_whatever_its_code_has_in_the_place_of_the_folder(machine: Machine, is_link: bool) -> None:
    run = machine.run(1)
    place = work(run) / "checkpoints"
    place.symlink_to("/nowhere/at/all") if is_link else place.write_text("a note")

    machine.folder(1).gather()

    assert names(machine.folder(1)) == []
    machine.folder(1).save(run)
    assert os.path.lexists(place)


def test_what_the_job_writes_through_a_link_can_be_resumed_from_and_what_was_there_before_cannot(
    machine: Machine, tmp_path: Path
) -> None:
    users = tmp_path / "scratch"
    users.mkdir()
    (users / "step_9.pt").write_text("of another job")
    os.utime(users / "step_9.pt", (1000, 1000))
    (work(machine.run(1)) / "checkpoints").symlink_to(users)
    (users / "step_1.pt").write_text("of this job")

    folder = CheckpointDir(machine.agent, {"job": "7", "attempt": 1, "age_s": time.time() - 2000})

    assert [found["name"] for found in folder.newest()] == ["step_1.pt"]


def test_each_attempt_finds_what_the_ones_before_it_wrote(machine: Machine) -> None:
    first = machine.run(1)
    machine.folder(1).gather()
    (work(first) / "checkpoints" / "step_1.pt").write_text("1")
    machine.folder(1).save(first)
    second = machine.run(2)
    machine.folder(2).gather()
    (work(second) / "checkpoints" / "step_1.pt").write_text("again")
    machine.run(3)

    machine.folder(3).gather()

    assert names(machine.folder(3)) == ["checkpoints/step_1.pt"]
    assert (work(machine.agent.run("7", 3)) / "checkpoints" / "step_1.pt").read_text() == "again"


def test_what_was_kept_is_not_replaced_by_a_file_that_it_hid(machine: Machine) -> None:
    """As after a crash between the move and its record: the name is asked for again."""
    run = machine.run(1)
    for place, text in (("output", "used"), ("work", "hidden")):
        os.makedirs(run.file(place), exist_ok=True)
        Path(run.file(place), "a.txt").write_text(text)

    for _ in range(2):
        Outputs(run).keep([b"a.txt"], with_unlisted=False)

    assert Path(machine.agent.path, "kept", "7.1", "a.txt").read_text() == "used"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_without_hard_links_an_attempt_still_resumes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def refuse(*names: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "no links on this file system")

    monkeypatch.setattr(os, "link", refuse)
    first = machine.run(1)
    machine.folder(1).gather()
    written = work(first) / "checkpoints" / "step_1"
    if kind == "folder":
        written.mkdir()
    (written / "weights" if kind == "folder" else written).write_text("1")
    mark = machine.folder(1).newest()[0]["fingerprint"]
    machine.run(2)
    folder = machine.folder(2)

    assert Resume(folder, "step_1", kind, mark).find() is None, "where it is now, it does not stay"
    sent = Path(folder.resume, mark)
    sent.mkdir(parents=True)
    shutil.copytree(written, sent, dirs_exist_ok=True) if kind == "folder" else shutil.copy2(written, sent)
    assert Resume(folder, "step_1", kind, mark).find() == str(sent)
    shutil.rmtree(first.path)
    folder.gather()

    assert names(folder) == ["checkpoints/step_1" + ("/weights" if kind == "folder" else "")]


def test_all_of_them_are_listed_only_when_no_attempt_writes_any_more(machine: Machine) -> None:
    run = machine.run(1)
    lock = run.take_lock(timeout_s=0)
    assert lock is not None
    try:
        with pytest.raises(Refused, match="job 7 is running here"):
            Checkpoints(machine.folder(1)).has_any()
    finally:
        os.close(lock)
    assert not Checkpoints(machine.folder(1)).has_any()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_checkpoints_that_the_program_made_read_only_move_and_go_like_others(machine: Machine) -> None:
    first = machine.run(1)
    machine.folder(1).gather()
    made = work(first) / "checkpoints" / "step_1"
    made.mkdir()
    (made / "weights").write_text("1")
    made.chmod(0o555)
    made.parent.chmod(0o555)
    machine.folder(1).save(first)
    machine.run(2)

    machine.folder(2).gather()

    assert names(machine.folder(2)) == ["checkpoints/step_1/weights"]
    machine.folder(2).drop()
    assert not list(Path(machine.agent.path, "checkpoints").iterdir())
