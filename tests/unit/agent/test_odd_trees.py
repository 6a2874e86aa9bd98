"""Folders that are not as they should be: each odd thing is named in one sentence, skipped, or sent as it is."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.rig.code import NAMES, CodeRig
from tests.rig.permissions import respected
from ugro.kernel.files.code.scanner import Changed, exclude, failure, shown, target_of
from ugro.kernel.support.errors import UgroError


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[CodeRig]:
    made = CodeRig(tmp_path)
    (made.source / "train.py").write_text("print()\n")
    yield made
    for place, _, _ in os.walk(tmp_path):
        os.chmod(place, 0o700)


def refused(rig: CodeRig, **choices: object) -> UgroError:
    with respected(), pytest.raises(UgroError) as raised:
        rig.take(**choices)
    assert raised.value.message.isprintable()
    assert raised.value.hint
    return raised.value


def unreadable_folder(rig: CodeRig) -> None:
    (rig.source / "secret" / "sub").mkdir(parents=True)
    (rig.source / "secret").chmod(0)


def folder_without_search(rig: CodeRig) -> None:
    (rig.source / "secret").mkdir()
    (rig.source / "secret" / "file").touch()
    (rig.source / "secret").chmod(0o600)


def unreadable_file(rig: CodeRig) -> None:
    (rig.source / "secret").write_text("x")
    (rig.source / "secret").chmod(0)


def unreadable_large_file(rig: CodeRig) -> None:
    (rig.source / "secret").touch()
    os.truncate(rig.source / "secret", 9 << 20)
    (rig.source / "secret").chmod(0)


@pytest.mark.parametrize(
    "make", [unreadable_folder, folder_without_search, unreadable_file, unreadable_large_file]
)
def test_what_cannot_be_read_is_named_with_the_line_that_leaves_it_out(
    rig: CodeRig, make: Callable[[CodeRig], None]
) -> None:
    make(rig)
    error = refused(rig)
    is_folder = (rig.source / "secret").is_dir()
    name = "secret/" if is_folder else "secret"
    assert error.message == f"{name} cannot be read: permission denied"
    assert error.hint == f"leave it out: echo '/{name}' >> {rig.source}/.ugroignore"
    (rig.source / ".ugroignore").write_text(f"/{name}\n")
    with respected():
        assert rig.take().files == 2, "the script and the rules"
    (rig.source / ".ugroignore").unlink()
    assert refused(rig).message == error.message, "also after a scan that is remembered"


def test_a_folder_that_became_unreadable_is_named_also_where_the_rest_is_unchanged(rig: CodeRig) -> None:
    (rig.source / "outer" / "inner").mkdir(parents=True)
    rig.take()
    rig.take()
    (rig.source / "outer" / "inner").chmod(0)
    assert refused(rig).message == "outer/inner/ cannot be read: permission denied"


@pytest.mark.parametrize("name", [".gitignore", ".ugroignore"])
def test_rules_that_cannot_be_read_are_an_error_for_else_too_much_would_be_sent(rig: CodeRig, name: str) -> None:
    (rig.source / name).write_text("*.key\n")
    (rig.source / name).chmod(0)
    assert refused(rig).message == f"{name} cannot be read: permission denied"
    (rig.source / name).unlink()
    (rig.source / name).write_bytes(b"#" * (2 << 20))
    assert refused(rig).message == f"{name} cannot be read: file too large"


def test_rules_above_that_cannot_be_read_are_named_and_a_folder_above_need_not_be_readable(rig: CodeRig) -> None:
    (rig.folder / ".git").mkdir()
    (rig.folder / ".gitignore").write_text("*.key\n")
    (rig.source / "a.key").touch()
    rig.take()  # makes its store, which is in that folder
    rig.folder.chmod(0o111)
    with respected():
        assert rig.take().files == 1
    rig.folder.chmod(0o755)
    (rig.folder / ".gitignore").chmod(0)
    assert refused(rig).message == f"{rig.folder}/.gitignore cannot be read: permission denied"


def test_rules_that_are_a_folder_are_none_and_go_along(rig: CodeRig) -> None:
    (rig.source / ".gitignore").mkdir()
    (rig.source / ".gitignore" / "file").touch()
    assert rig.take().files == 2


def test_a_path_that_no_node_could_write_is_named(rig: CodeRig) -> None:
    place = os.open(rig.source, os.O_RDONLY)
    for _ in range(15):
        os.mkdir("d" * 255, dir_fd=place)
        place, before = os.open("d" * 255, os.O_RDONLY, dir_fd=place), place
        os.close(before)
    os.close(os.open("empty", os.O_CREAT | os.O_WRONLY, dir_fd=place))
    os.close(place)
    error = refused(rig)
    assert "is too long: 3,584 bytes" in error.message
    assert len(error.message) < 500


def test_a_folder_that_is_very_deep_is_named(rig: CodeRig) -> None:
    place = rig.source
    for _ in range(205):
        place = place / "d"
    place.mkdir(parents=True)
    assert "is more than 200 folders deep" in refused(rig).message


def test_links_that_lead_nowhere_or_to_themselves_go_along_or_are_skipped(rig: CodeRig) -> None:
    (rig.source / "nowhere").symlink_to("gone")
    (rig.source / "loop").symlink_to("loop")
    os.mkfifo(rig.folder / "pipe")
    (rig.source / "pipe").symlink_to(rig.folder / "pipe")
    assert rig.take().files == 4
    assert sorted(rig.take(follows_links=True).skipped) == [
        "loop leads nowhere", "nowhere leads nowhere", "pipe leads to neither a file nor a folder",
    ]  # fmt: skip


def test_times_beyond_all_measure_do_no_harm(rig: CodeRig) -> None:
    for number, seconds in enumerate((-(2**31), 2**31, 2**33, 2**34, 2**40)):
        file = rig.source / f"{number}"
        file.write_text(f"{seconds}")
        os.utime(file, (0, seconds))
    assert rig.take().files == 6
    assert rig.take().files == 6


@pytest.mark.parametrize("name", [b"was-a-link", b"went-away"])
def test_a_link_that_is_none_any_more_has_changed(tmp_path: Path, name: bytes) -> None:
    (tmp_path / "was-a-link").write_text("a file now")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(Changed, match=f"^sub/{name.decode()} changed$"):
            target_of(b"sub/" + name, name, folder)
    finally:
        os.close(folder)


def test_a_tree_that_others_rearrange_is_taken_or_named(rig: CodeRig) -> None:
    """A folder becomes a file and back, files come, grow and go."""
    stop = threading.Event()
    busy = rig.source / "busy"
    named: list[str] = []

    def stir() -> None:
        while not stop.is_set():
            busy.mkdir()
            (busy / "file").write_text("x" * 1000)
            with (busy / "file").open("a") as file:
                file.write("y" * 1000)
            shutil.rmtree(busy)
            busy.write_text("now a file")
            busy.unlink()
            busy.symlink_to("train.py")
            busy.unlink()

    stirring = threading.Thread(target=stir)
    stirring.start()
    try:
        for _ in range(30):
            try:
                assert rig.take().files >= 1
            except UgroError as error:
                named.append(error.message)
    finally:
        stop.set()
        stirring.join()
    assert [text for text in named if "changes faster than it can be read: busy" not in text] == []


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_whatever_the_disk_says_is_one_sentence(code: int) -> None:
    found = failure(b"data/x", OSError(code, os.strerror(code)))
    assert str(found).startswith("data/x c")
    assert str(found).isprintable()


@given(st.lists(NAMES, min_size=1, max_size=3))
@example([rb"\!"])
def test_the_line_that_leaves_a_path_out_does_so_and_no_more(names: list[bytes]) -> None:
    """Whatever the path, a shell that is given the hint adds one rule, which fits the path."""
    path = b"/".join(names)
    assert shown(path).isprintable()
    with tempfile.TemporaryDirectory() as folder:
        rig = CodeRig(Path(folder))
        os.makedirs(os.path.dirname(os.path.join(os.fsencode(rig.source), path)), exist_ok=True)
        with open(os.path.join(os.fsencode(rig.source), path), "wb"):
            pass
        hint = exclude(path, str(rig.source))
        if hint.endswith("see docs/sync.md"):
            return
        subprocess.run(["sh", "-c", hint.removeprefix("leave it out: ")], check=True)
        assert rig.take().files == 1, "the rules alone"
