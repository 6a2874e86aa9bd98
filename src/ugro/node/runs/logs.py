"""`runs.follow`: sends a file of a run from an offset on, as it is written, until the run has ended.

Bytes are sent as OUT frames, within the granted credit. An ERR frame ``{"offset": N}`` says that the next byte is not
the one after the last, but number N of the file: the head of a log was cut. The file is polled: two system calls each.
Who asks for it ``promptly`` gets each piece late by a small part of the time that passes between two pieces.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import re
import stat
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

from ugro.node import wire
from ugro.node.clock import moment
from ugro.node.durable import Numbers
from ugro.node.program import Call, Refused
from ugro.node.runs.rundir import RunDir

# --- capped log -------------------------------------------------------------------------------------------------------
# Logs that cannot fill a disk: the head of a log beyond its cap is returned to the file system.
#
# Ranks write directly into their files, so nothing slows them down and nothing is lost if a supervisor dies. Offsets do
# not change: a hole is punched where the head was. If that is impossible, the file is truncated, and a base counts the
# bytes that were dropped. A small file beside the log says from which offset on it can be read.


_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Cut(NamedTuple):
    first: int  # the first offset that can still be read
    base: int  # the offset of the file's first byte
    is_moving: bool  # the base is changing: the offset of what is read now is unknown


def read_cut(log: str) -> Cut:
    """A file without a sidecar was never cut."""
    first, base, is_moving = Numbers(_sidecar(log), 3).read()
    return Cut(first, base, bool(is_moving))


class CappedLog:
    """One log in its supervisor, which alone writes the sidecar."""

    def __init__(self, path: str, cap_bytes: int, *, is_there: bool = False) -> None:
        """``is_there``: it exists with its sidecar, and was never cut."""
        self._cap_bytes = cap_bytes
        self._sidecar = Numbers(_sidecar(path), 3)
        self._cut = Cut(0, 0, False)
        self._can_punch = True
        # Written now: it is needed when the disk is full, and then a new file could not be created.
        if not is_there:
            self._write(self._cut)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    @property
    def is_whole(self) -> bool:
        return self._cut.first == 0

    def trim(self, is_growing: bool = True) -> None:
        """``is_growing``: its rank still writes. The last lines of one that has ended are worth more than space."""
        size = os.fstat(self._fd).st_size
        length = self._cut.base + size - self._cut.first
        if length > self._cap_bytes and self._can_punch:
            self._punch(size)
        if not self._can_punch and length > self._cap_bytes * (1 if is_growing else 4):
            self._empty(size)

    def _punch(self, size: int) -> None:
        start = self._cut.first - self._cut.base
        end = (size - self._cap_bytes * 3 // 4) // _PAGE * _PAGE
        # Recorded first, so that a reader that checks after reading can tell data from a hole.
        self._write(self._cut._replace(first=self._cut.base + end))
        if _libc.fallocate(self._fd, _KEEP_SIZE | _PUNCH_HOLE, start, end - start) != 0:
            self._can_punch = False

    def _empty(self, size: int) -> None:
        self._write(self._cut._replace(is_moving=True))
        # Bytes written between the two are lost and not counted; later offsets are then a little low.
        os.ftruncate(self._fd, 0)
        base = self._cut.base + size
        self._write(Cut(base, base, False))

    def _write(self, cut: Cut) -> None:
        self._sidecar.write(cut.first, cut.base, cut.is_moving, is_lasting=False)
        self._cut = cut


def last_lines(log: str, count: int, most_bytes: int) -> List[str]:
    with contextlib.suppress(OSError), open(log, "rb") as file:
        cut = read_cut(log)
        size = file.seek(0, os.SEEK_END)
        start = max(cut.first - cut.base, size - most_bytes, 0)
        file.seek(start)
        lines = file.read(most_bytes).split(b"\n")
        if start > 0:
            lines = lines[1:] or lines
        if lines and not lines[-1]:
            lines.pop()
        return [line.decode("utf-8", "replace") for line in lines[-count:]]
    return []


def _sidecar(log: str) -> str:
    return log + ".cut"


# --- tail -------------------------------------------------------------------------------------------------------------


_QUICK_S = 0.02
_SLOW_S = 0.2
_PROMPT_SHARE = 0.1  # of the time between two pieces …
_PROMPT_FIRST_S = 0.05  # … which is not known before the second
_LEAST_CREDIT = 64  # so that the frame about a cut always fits
_CHUNKS_AT_ONCE = 4  # then other calls have their turn


def follow(call: Call, run: RunDir, file: str, offset: int, *, promptly: bool = False) -> None:
    if offset < 0:
        raise ValueError("offset is negative")
    if not run.exists():
        raise Refused("not-found", "no run %s on this node" % run.name)
    _Following(call, run, file, offset, Pace(promptly=promptly))


class Pace:
    """How long to wait before the next look: twice as long after each that found nothing."""

    def __init__(self, *, promptly: bool) -> None:
        self._promptly = promptly
        self._longest_s = _PROMPT_FIRST_S if promptly else _SLOW_S
        self._grown_at: Optional[float] = None
        self.pause_s = _QUICK_S

    def found(self, now: float) -> None:
        if self._promptly and self._grown_at is not None:
            self._longest_s = max(_QUICK_S, min(_SLOW_S, _PROMPT_SHARE * (now - self._grown_at)))
        self._grown_at = now
        self.pause_s = _QUICK_S

    def found_nothing(self) -> None:
        self.pause_s = min(self._longest_s, self.pause_s * 2)


class _Following:
    def __init__(self, call: Call, run: RunDir, file: str, offset: int, pace: Pace) -> None:
        self._call = call
        self._run = run
        self._names = _parts(file)
        self._path = run.file(*self._names)
        self._offset = offset
        self._base = 0
        self._credit = wire.WINDOW
        self._fd: Optional[int] = None
        self._pace = pace
        self._is_scheduled = False
        call.on_credit = self._grant
        call.on_cancel = self._finish
        self._look()

    def _grant(self, amount: int) -> None:
        if self._credit + amount > wire.WINDOW:
            raise wire.ProtocolError("call %d was granted more than it sent" % self._call.number)
        was_out = self._is_out
        self._credit += amount
        if was_out and not self._is_out:
            self._schedule(0.0)

    @property
    def _is_out(self) -> bool:
        return self._credit < _LEAST_CREDIT

    def _schedule(self, delay_s: float) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call.program.after(delay_s, self._look)

    def _look(self) -> None:
        self._is_scheduled = False
        if self._call.is_done:
            return
        try:
            self._look_and_send()
        except Refused as refusal:
            self._close()
            self._call.fail(refusal.kind, str(refusal))
        except OSError as error:
            self._close()
            self._call.fail("os", str(error))

    def _look_and_send(self) -> None:
        # Checked before reading, so that everything written until the end is read.
        is_over = self._is_over()
        if self._fd is None:
            self._fd = open_below(self._run.path, self._names)
        has_more = self._fd is not None and self._send_some(self._fd)
        if self._is_out:
            return  # until more credit is granted
        if is_over and not has_more:
            self._finish()
            return
        self._schedule(0.0 if has_more else self._pace.pause_s)

    def _is_over(self) -> bool:
        """Not when its supervisor is gone: its ranks may go on writing until they are ended, too."""
        return os.path.exists(self._run.file("exit.json")) or not self._run.exists()

    def _send_some(self, fd: int) -> bool:
        """True if there may be more right now."""
        for _ in range(_CHUNKS_AT_ONCE):
            if self._is_out:
                return True
            chunk = os.pread(fd, min(wire.CHUNK, self._credit), max(0, self._offset - self._base))
            # Checked after reading: bytes cut meanwhile may have been read as a hole, or at another offset.
            cut = read_cut(self._path)
            if cut.is_moving:
                return False
            if self._is_at(cut):
                if chunk and not os.path.exists(self._path):  # removed, and perhaps reused by another run
                    return False
                if not chunk:
                    self._pace.found_nothing()
                    return False
                self._send(wire.OUT, chunk)
                self._offset += len(chunk)
                self._pace.found(time.monotonic())
        return True

    def _is_at(self, cut: Cut) -> bool:
        """Whether the read was at the right offset; if not, corrects the offset."""
        was_there = self._base == cut.base and self._offset >= cut.first
        self._base = cut.base
        if self._offset < cut.first:
            self._offset = cut.first
            self._send(wire.ERR, json.dumps({"offset": self._offset}).encode())
        return was_there

    def _send(self, kind: int, payload: bytes) -> None:
        self._call.data(kind, payload)
        self._credit -= len(payload)

    def _finish(self) -> None:
        has_file = self._fd is not None
        self._close()
        status = self._run.status()
        answer: Dict[str, Any] = {"offset": self._offset, "has_file": has_file, "status": status["status"]}
        self._call.finish({"now": moment(), **answer})

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _parts(file: str) -> list[str]:
    parts = file.split("/")
    if not file or "\0" in file or any(part in ("", ".", "..") for part in parts):
        raise ValueError("not a file of a run: %.80r" % file)
    return parts


def open_below(folder: str, names: list[str]) -> Optional[int]:
    """Follows no links: one among the files of a run could lead anywhere. None if there is no such file (yet)."""
    fds = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        for name in names[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fds.append(os.open(name, flags, dir_fd=fds[-1]))
        return _open_regular(names[-1], fds[-1])
    except FileNotFoundError:
        return None
    except (NotADirectoryError, OSError) as error:
        raise Refused("not-a-file", "%s is not a file of this run: %s" % ("/".join(names), error.strerror)) from error
    finally:
        for fd in fds:
            os.close(fd)


def _open_regular(name: str, folder: int) -> int:
    # Non-blocking: opening a pipe would wait for its writer.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "not a regular file")
    with contextlib.suppress(OSError):
        os.set_blocking(fd, True)
    return fd


# --- inline logs ------------------------------------------------------------------------------------------------------
# Logs so small that they are sent with the exit of their run.


MOST_BYTES = 8 * 1024  # together
_LOG = re.compile(r"rank_([0-9]+)\.log")

Logs = Dict[str, Dict[str, Any]]


def of_run(run: RunDir, record: Dict[str, Any]) -> Optional[Logs]:
    """Of a run that has exited with that record; None when they are large or cut, or a process may still write."""
    numbers = sorted(_numbers(run))
    with contextlib.suppress(OSError):
        if all(read_cut(run.log(number)) == (0, 0, False) for number in numbers):
            return whole(run, numbers, record)
    return None


def whole(run: RunDir, ranks: Iterable[int], record: Dict[str, Any]) -> Optional[Logs]:
    """As ``of_run``, where it is known which ranks have logs, and that those are not cut."""
    if record.get("unkillable"):
        return None
    found: Logs = {}
    left = MOST_BYTES
    with contextlib.suppress(OSError):
        for number in ranks:
            content = content_of(run.log(number), left)
            if content is None:
                return None
            left -= len(content)
            found[str(number)] = {"content": base64.b64encode(content).decode("ascii"), "size": len(content)}
        return found
    return None


def content_of(path: str, most_bytes: int) -> Optional[bytes]:
    """None when it is more."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        content = os.read(fd, most_bytes + 1)
    finally:
        os.close(fd)
    return content if len(content) <= most_bytes else None


def _numbers(run: RunDir) -> List[int]:
    with contextlib.suppress(FileNotFoundError):
        matches = (_LOG.fullmatch(name) for name in os.listdir(run.file("logs")))
        return [int(match[1]) for match in matches if match]
    return []
