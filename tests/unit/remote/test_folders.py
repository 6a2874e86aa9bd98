"""Folders on a node: they arrive whole whatever is killed on the way, are read-only, shared, and stay while needed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.code import make, seen
from ugro.kernel.files.code.scanner import Choices
from ugro.kernel.files.code.snapshot_store import SnapshotRequest, SnapshotStore
from ugro.node import trees
from ugro.node.files import folders as places
from ugro.node.files import folders as tidy
from ugro.node.files import folders_api as receiving
from ugro.node.files.folders import Found, Layout, Place
from ugro.node.files.folders_api import Arrival
from ugro.node.files.packs import ContentStore
from ugro.node.program import Refused
from ugro.node.runs.runspec import FolderAt, RunSpec
from ugro.node.trees import block, record

CHUNK = trees.CHUNK
TREE = {
    b"config.json": ("file", 300, 1, 0o644),
    b"model.bin": ("file", 2 * CHUNK + 7, 2, 0o600),
    b"same.bin": ("file", 2 * CHUNK + 7, 2, 0o600),
    b"empty": ("file", 0, 0, 0o644),
    b"run.sh": ("file", 70_000, 3, 0o755),
    b"link": ("link", b"config.json"),
    b"sub": {b"caf\xc3\xa9": ("file", 5000, 4, 0o444), b"nothing": {}},
}


@pytest.fixture
def home(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "home")


@pytest.fixture
def node(tmp_path: Path) -> Place:
    (tmp_path / "node").mkdir()
    return Place(str(tmp_path / "node"))


def taken(home: SnapshotStore, source: Path, tree: object) -> bytes:
    make(tree, os.fsencode(source))
    request = SnapshotRequest(str(source), Choices(reads_rules=False), 1 << 40, is_code=False)
    return trees.parse_id(home.take(request).id)


def stream(store: ContentStore, ids: list[bytes]) -> Iterator[bytes]:
    for key in ids:
        found = store.locate(key)
        yield block(b"".join(record(key, found.kind, store.read(key))), compressed=False)


def send(node: Place, store: ContentStore, tree: bytes, ids: list[bytes]) -> list[bytes]:
    """One stream, as a node gets it; what it still lacks."""
    arrival = Arrival(node, tree)
    try:
        arrival.receive(stream(store, ids))
        return arrival.finish()
    finally:
        arrival.close()


def send_all(node: Place, store: ContentStore, tree: bytes) -> int:
    """Returns how many contents travelled beside the trees."""
    ids = list(dict.fromkeys(Layout(tree, store.entries).trees))
    sent = -len(ids)
    while ids:
        sent += len(ids)
        ids = send(node, store, tree, ids)
    return sent


def there(node: Place, tree: bytes) -> dict[bytes, object]:
    return seen(node.path(FolderAt(tree, b"")))


def without_modes(found: dict[bytes, object]) -> dict[bytes, object]:
    return {
        name: (one[0],) if isinstance(one, tuple) and one[0] == "folder" else (one[0], one[-1])  # type: ignore[index]
        for name, one in found.items()
    }


def test_a_folder_arrives_as_it_was_and_read_only(home: SnapshotStore, node: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tree = taken(home, source, TREE)
    assert send_all(node, home.store, tree) == 5, "equal contents travel once"
    assert without_modes(there(node, tree)) == without_modes(seen(os.fsencode(source)))
    data = Path(os.fsdecode(node.path(FolderAt(tree, b""))))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [data, *data.rglob("*")]}
    assert {modes["run.sh"], modes["model.bin"], modes["sub"], modes["data"]} == {0o555, 0o444}
    assert node.is_whole(tree)
    assert sorted(path.name for path in Path(node.complete(tree)).iterdir()) == ["data", "lock", "record.json"]


def test_what_arrived_before_the_receiver_was_killed_is_not_lacking(
    home: SnapshotStore, node: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "_SYNC_BYTES", 1)
    tree = taken(home, tmp_path / "source", TREE)
    store = home.store
    lacking = send(node, store, tree, list(dict.fromkeys(Layout(tree, store.entries).trees)))
    killed = Arrival(node, tree)
    pieces = list(stream(store, lacking))
    with pytest.raises(Refused, match="cut short"):
        killed.receive(iter([*pieces[:4], pieces[4][:9]]))
    os.close(killed._lock)  # as the kernel does
    assert sorted(send(node, store, tree, [])) == sorted(lacking[4:])
    assert send(node, store, tree, lacking[4:]) == []
    assert without_modes(there(node, tree)) == without_modes(seen(os.fsencode(tmp_path / "source")))


def test_a_file_that_another_folder_has_is_linked_and_does_not_travel(
    home: SnapshotStore, node: Place, tmp_path: Path
) -> None:
    first = taken(home, tmp_path / "one", TREE)
    send_all(node, home.store, first)
    second = taken(home, tmp_path / "two", {**TREE, b"config.json": ("file", 301, 1, 0o644)})
    assert send_all(node, home.store, second) == 1
    assert without_modes(there(node, second)) == without_modes(seen(os.fsencode(tmp_path / "two")))
    inodes = [
        {os.stat(os.path.join(node.path(FolderAt(tree, b"")), name)).st_ino for name in (b"model.bin", b"same.bin")}
        for tree in (first, second)
    ]
    assert inodes[1] <= inodes[0]


def test_a_folder_that_a_job_changed_is_not_believed_and_sent_again(
    home: SnapshotStore, node: Place, tmp_path: Path
) -> None:
    tree = taken(home, tmp_path / "source", TREE)
    send_all(node, home.store, tree)
    path = Path(os.fsdecode(node.path(FolderAt(tree, b"config.json"))))
    path.chmod(0o644)
    path.write_text("changed")
    with pytest.raises(Refused, match="the folder model is not on this node"):
        places.expect(node.root, {"model": FolderAt(tree, b"")})
    node.drop_changed(tree)
    assert not os.path.exists(node.complete(tree))
    send_all(node, home.store, tree)
    assert without_modes(there(node, tree)) == without_modes(seen(os.fsencode(tmp_path / "source")))


def test_a_full_disk_is_said_before_a_content_is_sent(
    home: SnapshotStore, node: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = taken(home, tmp_path / "source", TREE)
    monkeypatch.setattr("ugro.node.machine.free_bytes", lambda path: 1000)  # stands in for a disk
    with pytest.raises(Refused, match="is full: 1000 B free; the folder needs 16") as refused:
        send(node, home.store, tree, list(dict.fromkeys(Layout(tree, home.store.entries).trees)))
    assert refused.value.kind == "no-space"


def test_tidying_up_removes_the_least_recently_used_and_nothing_that_is_needed() -> None:
    found = [
        Found(b"old", 10, 900.0, False),
        Found(b"needed", 50, 5000.0, True),
        Found(b"new", 10, 400.0, False),
        Found(b"large", 100, 500.0, False),
    ]
    assert tidy.choose(found, 70) == {b"large"}
    assert tidy.choose(found, 60) == {b"large", b"old"}
    assert tidy.choose(found, 0) == {b"large", b"old", b"new"}


def test_tidying_up_keeps_what_the_agent_names_and_what_was_just_used(
    home: SnapshotStore, node: Place, tmp_path: Path
) -> None:
    kept, gone = (
        taken(home, tmp_path / name, {b"f": ("file", 3000 + number, number, 0o644)})
        for number, name in enumerate(("kept", "gone"))
    )
    for tree in (kept, gone):
        send_all(node, home.store, tree)
    assert tidy.tidy(node, 0, [])["trees"] == 2, "both were used just now"
    assert tidy.tidy(node, 0, [kept], recent_s=-1) == {"freed_bytes": 3001, "kept_bytes": 3000, "trees": 1}
    assert node.trees() == [kept]
    assert os.listdir(node.folder).count("lock") == 1


@pytest.mark.parametrize("wrong", [{"../x": {"tree": "0" * 64}}, {"model": {"tree": "0" * 64, "file": "../x"}}])
def test_a_run_names_its_folders_and_nothing_else(wrong: dict[str, object]) -> None:
    rank = {"rank": 0, "argv": ["true"]}
    with pytest.raises(ValueError, match="no name for a folder"):
        RunSpec({"ranks": [rank], "folders": wrong})
    spec = RunSpec({"ranks": [rank], "folders": {"model": {"tree": "ab" * 32, "file": "a b.txt"}}})
    path = f"/r/.ugro/folders/{'ab' * 32}/data/a b.txt".encode()
    assert places.variables("/r", spec.folders) == {b"UGRO_FOLDER_MODEL": path}
