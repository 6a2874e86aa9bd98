"""Writes records of a run to a file, one line of JSON each, in a thread.

Queueing a record takes a microsecond, and records are never dropped. Problems with the file never reach the training:
they cause one warning, and writing is retried.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import queue
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CLOSE_LIMIT_S = 10.0
_AGAIN_S = 1.0
_MOST_AT_ONCE = 1000
_LONGEST_TEXT = 1000

Record = Mapping[str, Any]


class Metrics:
    """Writes one file, which is created with the first record."""

    def __init__(self, path: Path, always: Record) -> None:
        """Every record includes ``always``."""
        self.path = path
        self._always = dict(always)
        self._queue: queue.SimpleQueue[tuple[float, Record] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._file = -1
        self._has_warned = False

    def put(self, record: Record) -> None:
        self._queue.put((time.time(), record))
        if self._thread is None:
            self._start()

    def close(self) -> None:
        """Waits some seconds until everything is in the file."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:  # a forked child has the queue but not the thread
            return
        self._queue.put(None)
        thread.join(_CLOSE_LIMIT_S)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._write, name="ugro metrics", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _write(self) -> None:
        is_over = False
        pending = b""
        deadline = math.inf
        while not is_over or (pending and time.monotonic() < deadline):
            records, ends = self._next(wait_s=_AGAIN_S if pending else None)
            if ends:
                is_over, deadline = True, time.monotonic() + _CLOSE_LIMIT_S
            pending += b"".join(self._line(moment, record) for moment, record in records)
            pending = self._append(pending)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _next(self, wait_s: float | None) -> tuple[list[tuple[float, Record]], bool]:
        """All queued records as one write, and whether the queue has ended."""
        found: list[tuple[float, Record]] = []
        try:
            item = self._queue.get(timeout=wait_s)
            while item is not None and len(found) < _MOST_AT_ONCE:
                found.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return found, False
        if item is None:
            return found, True
        return [*found, item], False

    def _line(self, moment: float, record: Record) -> bytes:
        whole = {"time": round(moment, 6), **self._always, **{name: plain(value) for name, value in record.items()}}
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"

    def _append(self, content: bytes) -> bytes:
        """Returns what could not be written."""
        try:
            if self._file < 0:
                self._file = _opened(self.path)
            while content:
                content = content[os.write(self._file, content) :]
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"cannot write metrics to {self.path}, retrying: {error}", RuntimeWarning, stacklevel=2)
        return content


def kept(value: Any) -> Any:
    """A value that can wait on the queue. CPU tensors are read now; GPU tensors are copied and read later."""
    if not hasattr(value, "detach"):
        return value
    if getattr(value, "is_cpu", False):
        return plain(value)
    return value.detach().clone()


def plain(value: Any) -> Any:
    """A JSON value. NaN and the infinities become texts that float() can read, since JSON has no such numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _not_finite(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return _number(value)


def _number(value: Any) -> Any:
    """The number of a tensor or of anything else that converts to one."""
    try:
        if getattr(value, "ndim", 0):
            return plain(value.tolist())
        return plain(float(value.detach() if hasattr(value, "detach") else value))
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError):
        return f"<{type(value).__name__}>"


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _opened(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    # A writer that was killed may have left a partial line: start on a new one.
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")
    return file
