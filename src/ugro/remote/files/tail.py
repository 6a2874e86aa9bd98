"""`runs.follow`: sends a file of a run from an offset on, as it is written, until the run has ended.

Bytes are sent as OUT frames, within the granted credit. An ERR frame ``{"offset": N}`` says that the next byte is not
the one after the last, but number N of the file: the head of a log was cut. The file is polled: two system calls each.
Who asks for it ``promptly`` gets each piece late by a small part of the time that passes between two pieces.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from typing import Any, Dict, Optional

from ugro.remote import wire
from ugro.remote.clock import moment
from ugro.remote.files.capped_log import Cut, read_cut
from ugro.remote.program import Call, Refused
from ugro.remote.state.rundir import RunDir

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
