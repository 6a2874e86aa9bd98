"""Files as one stream from an offset on: it arrives however it is cut, and nothing else than what was asked for."""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ugro.node.files import transfer as resumable
from ugro.node.files.transfer import BLOCK, Head, Reader, StreamError

HEADER = struct.Struct(">IBQQQqQI")
TRAILER = struct.Struct(">BI")


@contextmanager
def opened(content: bytes) -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        os.utime(file.fileno(), (1, 1))
        yield file.fileno()


class Taken:
    def __init__(self, *offsets: int) -> None:
        self.heads: list[Head] = []
        self.contents: list[bytes] = []
        self.ends: list[int] = []
        self.reader = Reader(list(offsets), self)

    def begin(self, head: Head) -> None:
        self.heads.append(head)
        self.contents.append(b"")

    def write(self, piece: bytes) -> None:
        self.contents[-1] += piece

    def end(self, state: int) -> None:
        self.ends.append(state)


def stream(content: bytes, have: bytes) -> bytes:
    with opened(content) as fd, opened(have) as mine:
        return b"".join(resumable.send(0, fd, len(have), resumable.check_of(mine, len(have))))


SIZES = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK])


@given(SIZES, SIZES, st.integers(37, 100_000))
def test_a_file_that_grew_brings_what_it_grew_by_however_the_stream_is_cut(old: int, more: int, cut: int) -> None:
    content = (b"0123456789abcdef" * (BLOCK // 4))[: old + more]
    sent = stream(content, content[:old])
    taken = Taken(old)
    for first in range(0, len(sent), cut):
        taken.reader.feed(sent[first : first + cut])
    taken.reader.finish()
    assert taken.contents == [content[old:]]
    assert (taken.heads[0].offset, taken.heads[0].size, taken.ends) == (old, len(content), [resumable.WHOLE])


@pytest.mark.parametrize("spoilt", [0, BLOCK - 1, 3 * BLOCK, 4 * BLOCK - 1])
def test_a_file_that_was_written_anew_comes_from_its_beginning(spoilt: int) -> None:
    have = bytes(4 * BLOCK)
    content = bytearray(have + b"more")
    content[spoilt] = 1
    taken = Taken(len(have))
    taken.reader.feed(stream(bytes(content), have))
    taken.reader.finish()
    assert (taken.heads[0].offset, taken.contents) == (0, [bytes(content)])


def test_one_that_is_shorter_now_comes_from_its_beginning() -> None:
    taken = Taken(5)
    taken.reader.feed(stream(b"abc", b"abcde"))
    taken.reader.finish()
    assert taken.contents == [b"abc"]


def test_what_is_cut_while_it_is_read_is_told_to_be_of_no_use() -> None:
    with opened(bytes(3 * BLOCK)) as fd:
        sending = resumable.send(0, fd, 0, "")
        sent = [next(sending), next(sending)]
        os.ftruncate(fd, 10)
        taken = Taken(0)
        taken.reader.feed(b"".join([*sent, *sending]))
    taken.reader.finish()
    assert (len(taken.contents[0]), taken.ends) == (3 * BLOCK, [resumable.BROKEN])


def test_what_changed_just_now_is_told_to_be_unsettled() -> None:
    with opened(b"abc") as fd:
        os.utime(fd)
        taken = Taken(0)
        taken.reader.feed(b"".join(resumable.send(0, fd, 0, "")))
    assert taken.ends == [resumable.UNSETTLED]


def test_a_file_that_cannot_be_read_says_why_and_the_next_one_comes() -> None:
    with opened(b"abc") as fd:
        sent = resumable.send_problem(0, "it is gone") + b"".join(resumable.send(1, fd, 0, ""))
    taken = Taken(7, 0)
    taken.reader.feed(sent)
    taken.reader.finish()
    assert [head.problem for head in taken.heads] == ["it is gone", None]
    assert taken.contents[1] == b"abc"


def header(number: int = 0, kind: int = 1, offset: int = 0, length: int = 3, size: int = 3) -> bytes:
    return HEADER.pack(number, kind, offset, length, size, 1, 1, 0o644)


def file(content: bytes = b"abc", state: int = 0) -> bytes:
    sent = header() + content
    return sent + TRAILER.pack(state, zlib.crc32(sent + bytes([state])))


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (header(number=1), "not asked for"),
        (file() + header(), "not asked for"),
        (header(kind=3), "invalid header"),
        (header(kind=2, length=1 << 30), "invalid header"),
        (header(offset=2, length=1), "invalid header"),
        (header(length=2), "invalid header"),
        (header(length=1 << 60, size=1 << 60), "invalid header"),
        (file(state=9), "damaged"),
        (file()[:-1] + b"x", "damaged"),
        (file().replace(b"abc", b"abd"), "damaged"),
        (file()[:-1], "cut short"),
        (header()[:10], "cut short"),
        (header() + b"ab", "cut short"),
        (header() + b"abc", "cut short"),
        (b"", "cut short"),
    ],
)
def test_what_cannot_have_been_sent_is_refused(sent: bytes, problem: str) -> None:
    taken = Taken(0)

    def read() -> None:
        taken.reader.feed(sent)
        taken.reader.finish()

    with pytest.raises(StreamError, match=problem):
        read()
