"""Two processes of a node that meet in the files at the worst moment: each test lets the other one act in between."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rig.code import CodeRig
from ugro.node import durable, trees
from ugro.node.files import contents
from ugro.node.files import packs as fsync
from ugro.node.files.packs import PackWriter
from ugro.node.process import terminate
from ugro.node.process.terminate import ProcessName
from ugro.node.runs import stop
from ugro.node.runs.rundir import RunDir

SPEC = {"ranks": [{"rank": 0, "argv": ["true"]}]}


@pytest.fixture
def code(tmp_path: Path) -> CodeRig:
    return CodeRig(tmp_path)


@pytest.fixture
def gone() -> ProcessName:
    """The name of a process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    name = ProcessName.own()._replace(pid=process.pid, started=terminate.start_time(process.pid) or 0)
    assert name.is_alive()
    process.kill()
    process.wait()
    return name


def meanwhile(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, act: Callable[[], object]) -> None:
    """``act`` happens once, just before the first call of that function."""
    calls = getattr(where, name)

    def first(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(where, name, calls)
        act()
        return calls(*args, **more)

    monkeypatch.setattr(where, name, first)


# --- runs -------------------------------------------------------------------------------------------------------


def test_a_run_that_is_claimed_while_it_is_looked_at_is_not_taken_for_dead(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = RunDir.is_alive

    def is_alive(self: RunDir) -> bool:
        found = looks(self)
        monkeypatch.setattr(RunDir, "is_alive", looks)
        assert self.take_lock(1) is not None
        assert self.claim()
        return found

    monkeypatch.setattr(RunDir, "is_alive", is_alive)
    seen = [run.status() for _ in range(2)]
    # The first is no news: whoever asked for its start is told how that went.
    assert [(status["status"], status["is_claimed"]) for status in seen] == [("dead", False), ("starting", True)]


@pytest.mark.parametrize("name", ["is_alive", "take_lock"])
def test_a_run_that_is_removed_while_it_is_stopped_is_absent(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    meanwhile(monkeypatch, RunDir, name, run.set_aside)
    assert stop.stop(run, "test", 0)["status"] == "absent"


def test_a_stop_that_finds_its_folders_broken_says_so_and_ends(run: RunDir) -> None:
    os.rename(run.fence.path.rpartition("/")[0], run.agent.path + "/away")
    lock = Path(run.file("lock"))
    lock.symlink_to("no/such/folder")
    with pytest.raises(FileNotFoundError):
        stop.stop(run, "test", 0)


def test_a_run_that_somebody_else_removes_is_removed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, RunDir, "take_lock", run.set_aside)
    stop.remove(run)
    assert os.listdir(run.agent.runs_path) == []


def test_what_a_supervisor_gave_up_is_cleaned_up_without_those_it_still_has(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, gone: ProcessName
) -> None:
    """All runs of a supervisor are in its control group."""
    asked: list[str | None] = []

    def in_cgroup(path: str | None) -> dict[int, int]:
        asked.append(path)
        return {}

    monkeypatch.setattr(terminate, "in_cgroup", in_cgroup)
    run.write_state({"run": run.name, "cgroup": "/supervisor"})
    for supervisor in (ProcessName.own(), gone):
        durable.write_json(run.file("spec.json"), {"run": run.name, "supervisor": str(supervisor), "spec": SPEC})
        child = os.fork()  # as on a node: it waits for its children to end, and other tests may have left us some
        if child == 0:
            stop._end_leftovers(run)
            os._exit(0 if set(asked) == ({None} if supervisor.is_alive() else {"/supervisor"}) else 1)
        assert os.waitpid(child, 0)[1] == 0, supervisor


# --- what a process left ----------------------------------------------------------------------------------------


def test_a_free_folder_that_nobody_has_any_more_is_a_supervisors_or_is_swept(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, gone: ProcessName
) -> None:
    """A supervisor outlives its node program, and moves the folders it was given: half a one must never be a run."""
    folder = Path(run.agent.pool_path, str(gone), "7")
    (folder / "logs").mkdir(parents=True)
    tried: list[bool] = []

    def take() -> None:
        with pytest.raises(FileNotFoundError):
            os.rename(folder, run.agent.run("other", 1).path)
        tried.append(True)

    meanwhile(monkeypatch, stop, "_delete", take)
    stop.remove(run.agent.run("no-such", 1))
    assert tried == [True]
    assert os.listdir(run.agent.pool_path) == []
    assert os.listdir(run.agent.runs_path) == [run.name]


def test_what_another_machine_left_in_a_shared_folder_is_that_ones(run: RunDir, gone: ProcessName) -> None:
    theirs = gone._replace(machine="another-machine")
    for name in (gone, theirs):
        Path(run.agent.pool_path, str(name)).mkdir(parents=True)
    stop.remove(run.agent.run("no-such", 1))
    assert os.listdir(run.agent.pool_path) == [str(theirs)]
    assert ProcessName.parse(str(theirs)) == theirs
    assert theirs.processes() == {}


# --- code -------------------------------------------------------------------------------------------------------


def test_a_shared_supervisor_does_not_wait_for_contents_that_are_being_tidied(code: CodeRig, run: RunDir) -> None:
    (code.source / "file").write_text("x")
    root = trees.parse_id(code.take().id)
    store = contents.store_in(run.agent.root)
    with store.using(), code.home.store.using():
        writer = PackWriter(store)
        for key in (root, *code.home.store.reach(root)):
            kind = trees.TREE if key == root else trees.CONTENT
            writer.add(key, kind, code.home.store.read(key))
        writer.finish()
        store.complete(root)
    work = Path(run.file("work"))
    with open(os.path.join(store.folder, "lock"), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not contents.fill(run, root, str(work), 10)
        assert list(work.iterdir()) == []
    assert contents.fill(run, root, str(work), 10)
    assert (work / "file").read_text() == "x"


def test_a_pack_that_is_about_to_have_its_name_is_not_taken_for_settled(code: CodeRig) -> None:
    folder = code.home.store.packs
    os.makedirs(folder, exist_ok=True)
    arriving = Path(folder, "x.arriving")
    arriving.touch()
    fsync.mark_unsynced(folder, "x.pack")
    fsync.sync_packs(folder)
    assert fsync._unsynced(folder) == ["x.pack"]
    arriving.rename(Path(folder, "x.pack"))
    fsync.sync_packs(folder)
    assert fsync._unsynced(folder) == []
    fsync.mark_unsynced(folder, "tidied.pack")
    fsync.sync_packs(folder)
    assert fsync._unsynced(folder) == []


def test_a_pack_that_is_found_before_it_is_locked_is_written_all_the_same(
    code: CodeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = code.home.store
    key = trees.identify(trees.CONTENT, b"content")
    with store.using():
        meanwhile(monkeypatch, fcntl, "flock", store.salvage)
        writer = PackWriter(store)
        writer.add(key, trees.CONTENT, b"content")
        writer.finish()
        assert store.read(key) == b"content"


def test_a_pack_that_is_tidied_away_while_packs_are_counted_counts_nothing(code: CodeRig) -> None:
    os.makedirs(code.home.store.packs, exist_ok=True)
    Path(code.home.store.packs, "gone.pack").symlink_to("nowhere")
    Path(code.home.store.packs, "there.pack").write_bytes(b"12345")
    assert code.home.store.unseen_bytes() == 5
