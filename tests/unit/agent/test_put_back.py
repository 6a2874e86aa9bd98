"""Which files of earlier attempts a job finds in its working directory again."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ugro.kernel.files.code.snapshot_store import EMPTY, SnapshotStore
from ugro.kernel.files.results.collector import Earlier, Found, find, may_be_put_back
from ugro.kernel.files.results.job_folder import write_config
from ugro.kernel.files.results.output_store import OutputStore
from ugro.kernel.jobs.model import (
    Attempt,
    Cause,
    Checkpoint,
    Failure,
    Job,
    JobSpec,
    JobState,
    Launcher,
    Placement,
    Retry,
    Share,
)
from ugro.kernel.jobs.records import NodePlan, Plan
from ugro.node import trees
from ugro.node.files import checkout
from ugro.node.files.listing import RunFile


def attempt(
    folder: Path, number: int, files: dict[str, dict[str, bytes]], *, began_with_files: bool = False,
    cause: Cause = Cause.KILLED,
) -> Earlier:  # fmt: skip
    """``files``: by node."""
    place = folder / f"attempt_{number}"
    for index, (node, contents) in enumerate(files.items()):
        store = OutputStore(place, node, is_first=index == 0)
        for name, content in contents.items():
            (store.root / name).parent.mkdir(parents=True, exist_ok=True)
            (store.root / name).write_bytes(content)
        store.note_work([RunFile(name.encode(), len(one), 1, 1, None, True) for name, one in contents.items()], ())
    tried = Attempt(
        number, Placement(tuple(Share(node) for node in files)), "2026-01-01T00:00:00+00:00",
        failure=Failure(cause, "it failed"),
    )  # fmt: skip
    return Earlier(f"attempt {number}", place, tried, began_with_files)


def nothing(path: str) -> bool:
    return False


def names(found: Found) -> dict[str, bytes]:
    return {name.decode(): path.read_bytes() for name, (path, _) in found.files.items()}


def test_the_newest_of_each_name_is_put_back(tmp_path: Path) -> None:
    first = attempt(tmp_path, 1, {"n1": {"snapshot.pt": b"1", "once.txt": b"only here"}})
    second = attempt(tmp_path, 2, {"n2": {"snapshot.pt": b"2"}}, began_with_files=True)
    found = find([first, second], nothing)
    assert names(found) == {"snapshot.pt": b"2", "once.txt": b"only here"}
    assert set(found.words()) == {"snapshot.pt of attempt 2 is put back", "once.txt of attempt 1 is put back"}


def test_an_attempt_that_began_anew_takes_nothing_of_those_before_it(tmp_path: Path) -> None:
    first = attempt(tmp_path, 1, {"n1": {"snapshot.pt": b"1"}})
    second = attempt(tmp_path, 2, {"n1": {"other.pt": b"2"}})
    assert names(find([first, second], nothing)) == {"other.pt": b"2"}


def test_files_that_make_a_program_fail_are_not_put_back_for_ever(tmp_path: Path) -> None:
    first = attempt(tmp_path, 1, {"n1": {"snapshot.pt": b"1"}})
    second = attempt(tmp_path, 2, {"n1": {}}, began_with_files=True, cause=Cause.RANK_FAILED)
    found = find([first, second], nothing)
    assert not found.files
    assert "attempt 2 failed with earlier files and made none" in found.words()[0]
    lost = attempt(tmp_path, 2, {"n1": {}}, began_with_files=True, cause=Cause.NODE_LOST)
    assert names(find([first, lost], nothing)) == {"snapshot.pt": b"1"}


def test_a_file_that_one_node_has_as_it_was_put_back_is_the_one_that_another_has_made(tmp_path: Path) -> None:
    first = attempt(tmp_path, 1, {"n1": {"snapshot.pt": b"1", "same.txt": b"x"}})
    both = {"n1": {"snapshot.pt": b"2", "same.txt": b"x"}, "n2": {"snapshot.pt": b"1", "same.txt": b"x"}}
    found = find([first, attempt(tmp_path, 2, both, began_with_files=True)], nothing)
    assert names(found) == {"snapshot.pt": b"2", "same.txt": b"x"}
    assert set(found.words()) == {"snapshot.pt of attempt 2 is put back", "same.txt of attempt 1 is put back"}
    none = attempt(tmp_path, 3, {"n1": {"snapshot.pt": b"1"}}, began_with_files=True, cause=Cause.RANK_FAILED)
    assert not find([first, none], nothing).files, "it has made none"


def test_what_differs_between_nodes_is_put_back_on_none(tmp_path: Path) -> None:
    one = attempt(tmp_path, 1, {"n1": {"a.pt": b"4", "b.pt": b"x"}, "n2": {"a.pt": b"3", "b.pt": b"x", "c.pt": b"c"}})
    found = find([one], nothing)
    assert names(found) == {"b.pt": b"x", "c.pt": b"c"}
    assert "a.pt of attempt 1 is not the same on all nodes, and not put back" in found.words()


def test_a_snapshot_that_a_killed_rank_has_half_written_is_not_put_back(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    with zipfile.ZipFile(whole, "w") as file:
        file.writestr("data", b"0" * 5000)
    content = whole.read_bytes()
    one = attempt(tmp_path, 1, {"n1": {"whole.pt": content, "half.pt": content[:2000]}})
    found = find([one], nothing)
    assert set(names(found)) == {"whole.pt"}
    assert "half.pt of attempt 1 is only half written, and not put back" in found.words()


def test_code_and_metrics_stay_what_they_are(tmp_path: Path) -> None:
    one = attempt(tmp_path, 1, {"n1": {"config.yaml": b"changed", "metrics.jsonl": b"{}", "runs/x.pt": b"x"}})
    found = find([one], lambda path: path == "config.yaml")
    assert names(found) == {"runs/x.pt": b"x"}
    assert "config.yaml of attempt 1 is a part of the code, and not put back" in found.words()


def test_files_that_outputs_name_are_those_of_the_working_directory_too(tmp_path: Path) -> None:
    store = OutputStore(tmp_path, "n1", is_first=True)
    files = [RunFile(name, 1, 1, 1) for name in (b"snapshot.pt", b"models/deep/a.pt", b"metrics.txt")]
    store.note_work(files, ("*.pt", "models"))
    assert store.work() == {b"snapshot.pt", b"models/deep/a.pt"}


def job(attempt: int = 2, **fields: object) -> Job:
    spec = JobSpec("train", ("train.py",), **{"launcher": Launcher.DDP, **fields})  # type: ignore[arg-type]
    return Job(1, spec, "ann", JobState.STARTING, "", "2026-01-01T00:00:00+00:00", attempt)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (job(), True),
        (job(attempt=1), False),
        (job(attempt=1, earlier=7), True),
        (job(cwd="/data"), False),
        (job(retry=Retry(puts_back=False)), False),
        (job(launcher=Launcher.COMMAND), False),
        (job(launcher=Launcher.COMMAND, checkpoint=Checkpoint(dir="saved")), True),
    ],
)
def test_a_training_that_is_tried_again_gets_its_files(made: Job, expected: bool) -> None:
    assert may_be_put_back(made) is expected


def test_files_are_added_to_the_code_and_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"n" * 100)
    store = SnapshotStore(tmp_path / "contents")
    code = store.with_files(None, {b"src/train.py": tmp_path / "new"})
    (tmp_path / "new").chmod(0o400)
    both = store.with_files(code, {b"src/snapshot.pt": tmp_path / "new", b"deep/er/x": tmp_path / "new"})
    assert both not in (code, EMPTY)
    with store.store.using():
        (tmp_path / "out").mkdir()
        checkout.fill(store.store, trees.parse_id(both), str(tmp_path / "out"))
    found = {str(one.relative_to(tmp_path / "out")) for one in (tmp_path / "out").rglob("*") if one.is_file()}
    assert found == {"src/train.py", "src/snapshot.pt", "deep/er/x"}
    assert (tmp_path / "out/src/snapshot.pt").stat().st_mode & 0o200, "the script writes it again"


def test_what_a_lost_node_has_made_since_is_said_to_be_missing(tmp_path: Path) -> None:
    one = attempt(tmp_path, 1, {"n1": {"snapshot.pt": b"1"}}, cause=Cause.NODE_LOST)
    assert one.attempt.failure is not None
    lost = replace(one, attempt=replace(one.attempt, failure=replace(one.attempt.failure, node="n1")))
    found = find([lost], nothing)
    assert names(found) == {"snapshot.pt": b"1"}
    assert "n1 was lost: of what it made, only what had arrived before is put back" in found.words()


def test_others_do_not_learn_the_hash_of_the_tree(tmp_path: Path) -> None:
    write_config(tmp_path, job(), Plan(1, 2, (NodePlan("n1", (), code="a" * 64), NodePlan("n2", ()))))
    nodes = json.loads((tmp_path / "config.json").read_text())["plan"]["nodes"]
    assert [node["code"] for node in nodes] == ["a" * 12, None]
