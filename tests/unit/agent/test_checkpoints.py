"""Checkpoints without a node: which is the newest, what a stream lets through, what a killed agent leaves."""

from __future__ import annotations

import os
import stat
import struct
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.kernel.files.node_files import Found, decode_found
from ugro.kernel.files.results.checkpoints import Checkpoint, CheckpointStore, Offer, choose
from ugro.kernel.support.errors import NotFound, RemoteFailure, UgroError
from ugro.node.files import checkpoint_dir, listing
from ugro.node.files import listing as checkpoint_names
from ugro.node.files.checkpoint_dir import CheckpointDir, Written
from ugro.node.files.listing import Unsendable
from ugro.node.files.transfer import CHUNK, Folder, Reader, StreamError, Writer, receive_whole, send_whole
from ugro.node.runs.rundir import AgentDir

HEADER, TRAILER = struct.Struct(">IBQQQqQI"), struct.Struct(">BI")


# --- which is the newest ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step_000200", 200),
        ("epoch-3.pt", 3),
        ("7", 7),
        ("model.12", 12),
        ("epoch=3-step=100.ckpt", 100),
        ("checkpoint-500.tar.gz", 500),
        ("weights_5.h5", 5),
        ("weights.h5", None),
        ("last.pt", None),
        ("loss=0.25.ckpt", None),
        ("v1.2", None),
        ("step_" + "9" * 18, 10**18 - 1),
        ("step_" + "9" * 19, None),
        ("step_٣", None),
    ],
)
def test_the_number_is_the_one_at_the_end_of_the_name(name: str, number: int | None) -> None:
    assert checkpoint_names.number(name) == number


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".x", "a.tmp", "a.partial", "a/b", "a\nb", "a\x1b", "\udc80", "é" * 128]
)
def test_what_is_being_written_or_cannot_be_named_is_not_complete(name: str) -> None:
    assert not checkpoint_names.is_complete(name)


@pytest.mark.parametrize("name", ["step_1", "last.pt", "my model 3", "a.tmp.3", "é" * 127])
def test_any_other_name_is_complete(name: str) -> None:
    assert checkpoint_names.is_complete(name)


def test_the_newest_has_the_highest_number_and_those_without_come_last_by_time(tmp_path: Path) -> None:
    for name, time_s in [("step_9", 50), ("step_10", 40), ("last.pt", 60), ("best.pt", 30), ("step_11.tmp", 70)]:
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (time_s, time_s))
    (tmp_path / "latest_99").symlink_to("step_9")
    os.mkfifo(tmp_path / "pipe_99")
    (tmp_path / "step_8").mkdir()
    os.utime(tmp_path / "step_8", (80, 80))
    found = CheckpointDir(agent_dir(tmp_path), {"job": "7", "dir": str(tmp_path)}).complete()
    assert [entry.name for entry in found] == ["step_10", "step_9", "step_8", "last.pt", "best.pt"]
    younger = {"job": "8", "dir": str(tmp_path), "age_s": time.time() - 45}
    found = CheckpointDir(agent_dir(tmp_path), younger).complete()
    assert [entry.name for entry in found] == ["step_9", "step_8", "last.pt"]


def test_what_a_later_attempt_wrote_is_newer_whatever_the_clock_of_the_node_said(tmp_path: Path) -> None:
    def attempt(number: int) -> CheckpointDir:
        return CheckpointDir(agent_dir(tmp_path), {"job": "7", "attempt": number, "dir": str(tmp_path)})

    def written(name: str, time_s: int) -> None:
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (time_s, time_s))

    attempt(1).make()
    written("last.pt", 9000)
    assert attempt(1).complete()[0].written.attempt == 1
    written("unseen.pt", 9999)
    attempt(2).make()
    attempt(2).make()
    written("model.pt", 20)
    first = attempt(2).complete()
    assert [(entry.name, entry.written.attempt) for entry in first] == [
        ("model.pt", 2), ("unseen.pt", 1), ("last.pt", 1),
    ]  # fmt: skip
    written("last.pt", 10)
    again = attempt(2).complete()
    assert [(entry.name, entry.written.attempt) for entry in again[:2]] == [("last.pt", 2), ("model.pt", 2)]
    attempt(2).make()
    assert [entry.written for entry in attempt(2).complete()] == [entry.written for entry in again]


def agent_dir(folder: Path) -> AgentDir:
    agent = AgentDir(str(folder / ".agent"), "agent", "n1@machine")
    os.makedirs(agent.path, exist_ok=True)
    return agent


@given(
    st.lists(st.tuples(st.sampled_from(["step_1", "step_02", "a", "b.pt", "e-7.pt"]), st.integers(0, 9)), min_size=1)
)
def test_whatever_order_they_are_found_in_the_same_one_is_the_newest(seen: list[tuple[str, int]]) -> None:
    about = os.stat_result((0o100644, *[0] * 9))
    entries = [checkpoint_dir.Found("", name, about, Written(1, serial)) for name, serial in seen]
    newest = max(entries, key=lambda entry: entry.order)
    assert newest.order == max(reversed(entries), key=lambda entry: entry.order).order
    numbers = [entry.number for entry in entries if entry.number is not None]
    assert newest.number == (max(numbers) if numbers else None)


def found(name: str, changed_ns: int = 1, fingerprint: str = "0" * 32, attempt: int = 1, serial: int = 0) -> Found:
    made = Found(name, "folder", 3, changed_ns, checkpoint_names.number(name), fingerprint)
    return replace(made, attempt=attempt, serial=serial)


def at_home(offer: Found, node: str = "n1") -> Checkpoint:
    return Checkpoint(1, offer, node, 1, "", "")


def test_what_is_home_is_brought_again_only_when_it_is_newer() -> None:
    home = at_home(found("step_5", 50))
    same, older = Offer("n1", found("step_5", 50)), Offer("n2", found("step_4", 90, "1" * 32))
    newer, copy = Offer("n2", found("step_6", 10, "2" * 32)), Offer("n2", found("step_5", 60, "3" * 32))
    again = Offer("n1", found("step_5", 55, "4" * 32))
    nameless = Offer("n2", found("last.pt", 99, "5" * 32))
    assert choose([same, older, copy, nameless], home) is None
    assert choose([same, newer], home) is newer
    assert choose([copy, again], home) is again
    assert choose([nameless, older], None) is older
    assert choose([Offer("n1", found("a")), Offer("n2", found("b"))], None) == Offer("n1", found("a"))


def test_a_later_attempt_goes_before_a_later_time_and_on_one_node_the_order_of_writing_does() -> None:
    home = at_home(found("last.pt", 9000, serial=5))
    behind = Offer("n2", found("last.pt", 20, "1" * 32, attempt=2))
    ahead = Offer("n3", found("last.pt", 99_999, "2" * 32, attempt=1))
    assert choose([ahead, behind], home) is behind
    assert choose([ahead], at_home(found("last.pt", 20, attempt=2), "n2")) is None
    set_back = Offer("n1", found("last.pt", 10, "3" * 32, serial=6))
    older = Offer("n1", found("best.pt", 99_999, "4" * 32, serial=4))
    assert choose([set_back], home) is set_back
    assert choose([older], home) is None


# --- what a node says of them -----------------------------------------------------------------------------------

SOUND: dict[str, Any] = {
    "name": "step_5", "kind": "file", "bytes": 3, "changed_ns": 1,
    "number": 5, "fingerprint": "a" * 32, "problem": None,
}  # fmt: skip


def test_a_sound_answer_is_understood() -> None:
    assert decode_found({"found": [SOUND]}, "n1") == [Found("step_5", "file", 3, 1, 5, "a" * 32)]


@pytest.mark.parametrize(
    "lie",
    [
        {"attempt": -1},
        {"serial": 1 << 53},
        {"name": "../../.ssh/step_5"},
        {"name": "/etc/step_5"},
        {"name": ".step_5"},
        {"name": "step_5\x1b[2J"},
        {"name": 5},
        {"number": 99},
        {"number": None},
        {"kind": "device"},
        {"bytes": -1},
        {"bytes": 1 << 60},
        {"changed_ns": 1 << 70},
        {"fingerprint": "../" + "a" * 29},
        {"fingerprint": "a" * 31},
        {"fingerprint": None},
    ],
)
def test_an_invalid_answer_is_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(RemoteFailure, match="invalid answer"):
        decode_found({"found": [{**SOUND, **lie}]}, "n1")


@pytest.mark.parametrize("answer", [{"found": ["x"]}, {"found": [None]}, {"found": [{}]}])
def test_an_answer_that_is_none_is_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(RemoteFailure, match="invalid answer"):
        decode_found(answer, "n1")


# --- whole folders ----------------------------------------------------------------------------------------------


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "sub" / "weights.bin").write_bytes(os.urandom(200_000))
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o4755)
    (folder / "nothing").touch()
    (folder / os.fsdecode(b"\xff name")).write_text("odd")
    os.utime(folder / "nothing", ns=(5, 1_600_000_000_123_456_789))


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def receive(stream: bytes, folder: Path, most_bytes: int = 1 << 30, step: int = 1 << 20) -> Path:
    folder.mkdir()
    pieces = (stream[start : start + step] for start in range(0, len(stream), step))
    return Path(receive_whole(str(folder), most_bytes, pieces))


def fingerprint(path: Path) -> str:
    return listing.fingerprint(listing.files_of(str(path)))


def test_a_folder_arrives_as_it_was_and_is_known_as_the_same(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    stream = b"".join(send_whole(str(tmp_path / "a")))
    assert max(map(len, send_whole(str(tmp_path / "a")))) <= CHUNK
    root = receive(stream, tmp_path / "b", step=1000)
    assert contents(root) == contents(tmp_path / "a")
    assert fingerprint(root) == fingerprint(tmp_path / "a")
    assert stat.S_IMODE((root / "run.sh").stat().st_mode) == 0o755


def test_a_file_is_known_as_the_same_as_a_folder_that_contains_just_this_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "last.pt").write_bytes(b"weights")
    root = receive(b"".join(send_whole(str(tmp_path / "a"))), tmp_path / "b")
    assert contents(root) == {"last.pt": b"weights"}
    assert fingerprint(root) == fingerprint(tmp_path / "a" / "last.pt")


def test_a_change_of_anything_is_seen_in_the_fingerprint(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    seen = {fingerprint(tmp_path / "a")}
    (tmp_path / "a" / "run.sh").write_text("#!/bin/sh\n# longer\n")
    seen.add(fingerprint(tmp_path / "a"))
    os.utime(tmp_path / "a" / "nothing", ns=(5, 6))
    seen.add(fingerprint(tmp_path / "a"))
    (tmp_path / "a" / "nothing").rename(tmp_path / "a" / "something")
    seen.add(fingerprint(tmp_path / "a"))
    (tmp_path / "a" / "sub" / "empty").rmdir()
    seen.add(fingerprint(tmp_path / "a"))
    assert len(seen) == 5


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/etc/passwd"), os.mkfifo])
def test_a_link_or_a_pipe_is_refused_by_name(tmp_path: Path, make: Any) -> None:
    fill(tmp_path / "a")
    make(tmp_path / "a" / "sub" / "strange")
    with pytest.raises(Unsendable, match="sub/strange"):
        list(send_whole(str(tmp_path / "a")))


def test_a_link_to_a_folder_is_no_folder(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(Unsendable, match="symbolic link"):
        list(send_whole(str(tmp_path / "b")))


def test_a_folder_that_is_too_deep_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "/".join(["x"] * listing.MOST_DEPTH)
    deep.mkdir(parents=True)
    (deep / "file").touch()
    assert listing.files_of(str(tmp_path / "a"))[-1].name.endswith(b"/x/file")
    (deep / "x").mkdir()
    with pytest.raises(Unsendable, match="too deep"):
        listing.files_of(str(tmp_path / "a"))
    with pytest.raises(FileNotFoundError):
        listing.files_of(str(tmp_path / "none"))


def test_a_file_that_changes_while_it_is_sent_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "file"
    file.write_bytes(bytes(300_000))
    pieces = send_whole(str(tmp_path / "a"))
    first = next(pieces)
    file.write_bytes(b"short")
    with pytest.raises(StreamError, match="changed while it was read"):
        receive(b"".join([first, *pieces]), tmp_path / "b")


@given(st.data())
def test_a_stream_that_was_cut_or_changed_is_never_taken_for_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    (folder / "a" / "sub").mkdir(parents=True)
    (folder / "a" / "sub" / "file").write_bytes(b"some weights")
    stream = bytearray(b"".join(send_whole(str(folder / "a"))))
    place = data.draw(st.integers(stream.index(b"\n\n") + 2, len(stream) - 1))
    if data.draw(st.booleans()):
        del stream[place:]
    else:
        stream[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StreamError):
        receive(bytes(stream), folder / "b")
    assert {path.name for path in folder.iterdir()} <= {"a", "b"}


def listed(*files: tuple[bytes, int]) -> bytes:
    return b"".join(listing.encoded(listing.RunFile(name, size, 1, 1) for name, size in files)) + b"\n"


def sent(number: int, content: bytes) -> bytes:
    whole = HEADER.pack(number, 1, 0, len(content), len(content), 1, 1, 0o644) + content
    return whole + TRAILER.pack(0, zlib.crc32(whole + b"\0"))


def test_a_stream_made_by_hand_is_taken(tmp_path: Path) -> None:
    stream = listed((b"a/", 0), (b"a/b", 100)) + sent(0, b"x" * 100)
    assert contents(receive(stream, tmp_path / "b", most_bytes=100)) == {"a": None, "a/b": b"x" * 100}


@pytest.mark.parametrize(
    "hostile",
    [
        listed((b"../evil", 1)) + sent(0, b"x"),
        listed((b"a/", 0), (b"a/../../evil", 1)) + sent(0, b"x"),
        listed((b"../", 0)),
        listed((b"./", 0)),
        listed((b"/tmp/evil", 1)) + sent(0, b"x"),
        listed((b"a//b", 1)) + sent(0, b"x"),
        listed((b"a\0b", 1)) + sent(0, b"x"),
        listed((b"", 1)) + sent(0, b"x"),
        listed((b"/", 0)),
        listed((b"a/b", 1)) + sent(0, b"x"),
        listed((b"a", 1), (b"a", 1)) + sent(0, b"x") + sent(1, b"y"),
        listed((b"a", 1), (b"a/", 0)) + sent(0, b"x"),
        listed((b"a" * 5000, 1)) + sent(0, b"x"),
        listed((b"/".join([b"a"] * 200), 1)) + sent(0, b"x"),
        listed((b"a", 101)) + sent(0, b"x" * 101),
        listed((b"a", 1)) + sent(0, b"xy"),
        listed((b"a", 1 << 63)) + sent(0, b"x"),
        listed((b"a", 1)) + sent(0, b"x") + b"more",
        listed((b"a", 1)),
        b'["a", 1, 1, 1, null]',
        b"",
        b"\xff" * 100,
        b"\xff" * 100_000,
    ],
)
def test_a_hostile_stream_is_refused_and_leaves_its_folder_alone(tmp_path: Path, hostile: bytes) -> None:
    with pytest.raises((StreamError, OSError)):
        receive(hostile, tmp_path / "b", most_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert not (Path("/tmp") / "evil").exists()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside, root, partial = tmp_path / "outside", tmp_path / "root", tmp_path / "partial"
    for folder in (outside, root, partial):
        folder.mkdir()
    (root / "a").symlink_to(outside)
    (root / "b").symlink_to(outside / "file")
    names = [b"a/file", b"b"]
    writer = Writer(Folder(str(root), str(partial)), names, lambda size: None, lambda name, head, state: None)
    Reader([0, 0], writer).feed(sent(0, b"x") + sent(1, b"y"))
    assert list(outside.iterdir()) == []
    assert contents(root) == {"a": None, "a/file": b"x", "b": b"y"}


# --- at home ----------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def bring(home: CheckpointStore, name: str, attempt: int = 1) -> Checkpoint:
    root = home.arriving(found(name)).root
    (root / "weights").write_text(name)
    return home.settle(listing.files_of(str(root)), found(name), "n1", attempt)


def names(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "checkpoints").iterdir()}


def test_only_the_newest_is_kept_at_home(home: CheckpointStore, tmp_path: Path) -> None:
    assert home.newest() is None
    bring(home, "step_1")
    second = bring(home, "step_2")
    assert home.newest() == second
    assert (second.name, second.number, second.bytes, second.node) == ("step_2", 2, 3, "n1")
    assert (Path(second.path) / "weights").read_text() == "step_2"
    assert names(tmp_path) == {"2"}


def test_what_a_killed_agent_left_half_done_is_not_taken_and_deleted(home: CheckpointStore, tmp_path: Path) -> None:
    first = bring(home, "step_1")
    half = home.arriving(found("step_2", fingerprint="1" * 32)).root
    (half / "weights").write_text("ha")
    damaged = tmp_path / "checkpoints" / "7" / "content"
    damaged.mkdir(parents=True)
    again = CheckpointStore(tmp_path / "checkpoints")
    assert again.newest() == first
    second = bring(again, "step_3")
    assert again.newest() == second
    assert names(tmp_path) == {str(second.serial)}


def test_what_arrived_of_a_checkpoint_is_used_by_its_next_transfer_and_deleted_when_none_follows(
    home: CheckpointStore, tmp_path: Path
) -> None:
    half = home.arriving(found("step_2", fingerprint="1" * 32)).root
    (half / "weights").write_text("ha")
    assert (home.arriving(found("step_2", fingerprint="1" * 32)).root / "weights").read_text() == "ha"
    home.drop_incomplete()
    assert names(tmp_path) == set()
    assert home.newest() is None


def test_one_that_was_changed_at_home_is_not_resumed_from(home: CheckpointStore, tmp_path: Path) -> None:
    bring(home, "step_1")
    assert home.begin(1) is not None
    (tmp_path / "checkpoints" / "1" / "content" / "weights").unlink()
    assert home.newest() is None
    with pytest.raises(NotFound, match="attempt 1 resumes from"):
        home.begin(1)
    assert home.begin(2) is None


def test_every_node_of_an_attempt_gets_what_it_began_from(home: CheckpointStore, tmp_path: Path) -> None:
    assert home.begin(1) is None
    first = bring(home, "step_1")
    assert home.begin(1) is None
    assert home.has_progressed(1)
    assert home.begin(2) == first
    assert not home.has_progressed(2)
    bring(home, "step_2", attempt=2)
    third = bring(home, "step_3", attempt=2)
    assert home.begin(2) == first
    assert home.has_progressed(2)
    assert names(tmp_path) == {"1", "3", "attempt_2.json"}
    assert CheckpointStore(tmp_path / "checkpoints").begin(3) == third
    assert names(tmp_path) == {"3", "attempt_3.json"}


def test_one_that_does_not_fit_is_refused_before_it_comes(home: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(UgroError, match="do not fit") as refused:
        home.arriving(replace(found("step_1"), bytes=1 << 49))
    assert str(tmp_path) in str(refused.value.hint)
    assert home.newest() is None
