"""Input that a job would not get: what is certainly meant is refused, what may be a loop's is left alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ugro.cli.jobs.stdin import Input, input_of, is_meant


def test_a_pipe_is_looked_at_and_not_read() -> None:
    reader, writer = os.pipe()
    try:
        assert input_of(reader) is Input.PIPE
        os.write(writer, b"next")
        assert input_of(reader) is Input.FULL_PIPE
        assert os.read(reader, 9) == b"next"
    finally:
        os.close(reader)
        os.close(writer)
    assert input_of(reader) is Input.NONE, "a closed one"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"next")
        assert input_of(ours.fileno()) is Input.FULL_PIPE


def test_a_file_counts_until_somebody_has_read_of_it(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"")
    with file.open("rb") as stream:
        assert input_of(stream.fileno()) is Input.NONE
    file.write_bytes(b"one\ntwo\n")
    with file.open("rb") as stream:
        assert input_of(stream.fileno()) is Input.FILE
        os.read(stream.fileno(), 4)  # as `read` does in a loop
        assert input_of(stream.fileno()) is Input.NONE
    with open(os.devnull, "rb") as stream:
        assert input_of(stream.fileno()) is Input.NONE


@pytest.mark.parametrize(
    ("found", "words", "expected"),
    [
        (Input.FILE, ["python3", "-"], True),
        (Input.FILE, ["wc"], True),
        (Input.FULL_PIPE, ["python3", "-"], True),
        (Input.PIPE, ["python3", "-"], True),
        (Input.FULL_PIPE, ["wc"], False),
        (Input.PIPE, ["wc", "-l"], False),
        (Input.NONE, ["python3", "-"], False),
    ],
)
def test_only_input_that_is_certainly_meant_is_refused(found: Input, words: list[str], expected: bool) -> None:
    assert is_meant(found, words) is expected
