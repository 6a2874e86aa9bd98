"""Files that nodes sent are opened below their folder only, whatever their names and links say."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from ugro.kernel.files.model import Part
from ugro.kernel.files.results.output_store import CHUNK_BYTES, archive, open_result, shown
from ugro.kernel.support.errors import NotFound

ODD = (b"with space.txt", b"two\nlines", b"\xff\xfe.bin", b'quote".txt', b"a\\xffb", "größe.csv".encode())


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Part, ...]:
    (tmp_path / "secret").write_text("hush")
    output = tmp_path / "output"
    for name in (*ODD, b"sub/deep/one.txt"):
        path = os.path.join(os.fsencode(output), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(os.fsdecode(path)).write_bytes(b"this is " + name)
    (output / "link").symlink_to(tmp_path / "secret")
    (output / "folder-link").symlink_to(tmp_path)
    os.mkfifo(output / "pipe")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text("said")
    (tmp_path / "logs" / "rank_0.log.times").write_text("when")
    (tmp_path / "config.json").write_text("{}")
    return (
        Part("config.json", str(tmp_path / "config.json")),
        Part("logs", str(tmp_path / "logs")),
        Part("", str(output)),
        Part("nodes", str(tmp_path / "nodes")),  # there are none
    )


def _read(parts: tuple[Part, ...], name: str) -> bytes:
    with open_result(parts, name) as file:
        return file.read()


def test_a_file_is_found_under_the_name_that_is_listed(parts: tuple[Part, ...]) -> None:
    for name in (*ODD, b"sub/deep/one.txt"):
        assert _read(parts, shown(name)) == b"this is " + name
    assert _read(parts, "logs/rank_0.log") == b"said"
    assert _read(parts, "config.json") == b"{}"


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "sub/../../secret",
        "./with space.txt",
        "sub//deep/one.txt",
        "/etc/passwd",
        "logs/../secret",
        "link",
        "folder-link/secret",
        "pipe",
        "sub",
        "",
        "no-such",
        "with space.txt/x",
        "config.json/x",
        "a\0b",
        "nodes/x",
    ],
)
def test_nothing_else_is_opened(parts: tuple[Part, ...], name: str) -> None:
    with pytest.raises(NotFound):
        open_result(parts, name)


def test_an_archive_has_every_file_once_and_no_links(parts: tuple[Part, ...]) -> None:
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive(parts, "job-7")))) as found:
        contents = {os.fsencode(one.name): found.extractfile(one) for one in found.getmembers() if one.isfile()}
        assert all(one.isfile() for one in found.getmembers())
        read = {name: file.read() for name, file in contents.items() if file is not None}
    expected = {b"job-7/" + name: b"this is " + name for name in (*ODD, b"sub/deep/one.txt")}
    assert read == expected | {b"job-7/logs/rank_0.log": b"said", b"job-7/config.json": b"{}"}


def test_an_archive_comes_in_pieces_and_stays_whole_if_a_file_changes_meanwhile(tmp_path: Path) -> None:
    for name in ("grows", "shrinks"):
        (tmp_path / name).write_bytes(b"x" * 3 * CHUNK_BYTES)
    pieces = []
    for piece in archive((Part("", str(tmp_path)),), "job-7"):
        pieces.append(piece)
        with (tmp_path / "grows").open("ab") as file:
            file.write(b"more")
        os.truncate(tmp_path / "shrinks", CHUNK_BYTES)
    assert max(map(len, pieces)) <= CHUNK_BYTES
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as found:
        assert [one.name for one in found.getmembers()] == ["job-7/grows", "job-7/shrinks"]


def test_deep_folders_take_few_descriptors(tmp_path: Path) -> None:
    deep = ["d"] * 150
    here = os.open(tmp_path, os.O_RDONLY)
    for name in deep:
        os.mkdir(name, dir_fd=here)
        here, above = os.open(name, os.O_RDONLY, dir_fd=here), here
        os.close(above)
    with open("last.txt", "wb", opener=lambda path, flags: os.open(path, flags, 0o600, dir_fd=here)) as file:
        file.write(b"found")
    os.close(here)
    (tmp_path / "z.txt").write_text("x")
    parts = (Part("", str(tmp_path)),)
    with open_result(parts, "/".join([*deep, "last.txt"])) as found:
        assert found.read() == b"found"
    pieces, most = [], 0
    before = len(os.listdir("/proc/self/fd"))
    for piece in archive(parts, "job-7"):
        pieces.append(piece)
        most = max(most, len(os.listdir("/proc/self/fd")))
    assert most - before < 10
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as whole:
        assert [one.name for one in whole.getmembers()] == ["job-7/z.txt", "/".join(["job-7", *deep, "last.txt"])]
