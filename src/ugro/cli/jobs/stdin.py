"""A job has no input. Who seems to give it some is told so, instead of it being lost silently.

It cannot be read to find out: in a loop such as ``while read x; do ugro run …; done`` it is the loop's input.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
import termios
from collections.abc import Sequence
from enum import Enum

from ugro.cli.output import Output
from ugro.kernel.support.errors import UsageError


class Input(Enum):
    NONE = "none"
    FILE = "file"  # not begun to be read, and not empty
    PIPE = "pipe"  # with nothing in it yet, and perhaps never
    FULL_PIPE = "full pipe"


def check_input(output: Output, words: Sequence[str]) -> None:
    """``words``: the command. Raises UsageError if input is certainly meant for it."""
    found = input_of(sys.stdin.fileno()) if sys.stdin is not None else Input.NONE
    if is_meant(found, words):
        raise UsageError(
            "a job gets no input: stdin would be lost",
            hint="write it to a file in this folder and name that in the command; or without input: </dev/null",
        )
    if found is Input.FULL_PIPE:
        output.note("note: a job gets no input: what is in the pipe is not read")


def is_meant(found: Input, words: Sequence[str]) -> bool:
    """A file is a redirection of this command, or of a loop that reads nothing. A pipe may well be a loop's."""
    reads_stdin = "-" in words
    return found is Input.FILE or (reads_stdin and found in (Input.PIPE, Input.FULL_PIPE))


def input_of(descriptor: int) -> Input:
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            is_begun = os.lseek(descriptor, 0, os.SEEK_CUR) > 0
            return Input.FILE if status.st_size and not is_begun else Input.NONE
        if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            waiting = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
            return Input.FULL_PIPE if struct.unpack("i", waiting)[0] else Input.PIPE
    except OSError:  # a closed one
        return Input.NONE
    return Input.NONE
