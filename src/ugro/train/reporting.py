"""Writes records of a run to a file, one line of JSON each, in a thread.

Queueing a record takes a microsecond, and records are never dropped. Problems with the file never reach the training:
they cause one warning, and writing is retried.
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import gc
import io
import json
import logging
import math
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ugro.kernel.support.quantities import format_duration, names
from ugro.train.group import Group
from ugro.train.samples import Progress

# --- ended ------------------------------------------------------------------------------------------------------------
# Tells the supervisor that this rank's script has ended by itself: the rank may be killed while its process exits.
#
# A process that exits still runs for a while, and longest where it waits for threads and devices of PyTorch. What kills
# it then takes nothing away: the script has written its results. Only if a signal ends the process does the supervisor
# look for this note; an exit code says by itself how a script has ended.


def note_at_exit() -> None:
    """Registers it. Exit handlers that the script registers after this run before it is noted."""
    folder, script, pid = os.environ.get("UGRO_RUN_DIR"), _script(), os.getpid()
    if folder and script is not None:
        exit_ = _Exit(sys.exit)
        sys.exit = exit_
        atexit.register(_note, Path(folder), lambda: _has_returned(script) or exit_.is_well(), pid)


class _Exit:
    """``sys.exit`` that remembers the code it was called with: many a script ends with ``sys.exit(main())``."""

    def __init__(self, leave: Callable[[Any], NoReturn]) -> None:
        self._leave = leave
        self._codes: list[Any] = []

    def __call__(self, status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends a thread
            self._codes.append(status)
        self._leave(status)

    def is_well(self) -> bool:
        """Whether it ended the script, without an error. Python notes an exception that nobody caught."""
        # Python takes anything but None and a whole number for an error's text, also 0.0.
        codes = [one is None or (isinstance(one, int) and one == 0) for one in self._codes[-1:]]
        return codes == [True] and not hasattr(sys, "last_type")


def _script() -> FrameType | None:
    """The frame of the module that Python runs; None if that is not a script of the user's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(sys.modules["__main__"]):
            return frame
        frame = frame.f_back
    return None


def _note(folder: Path, has_ended: Callable[[], bool], pid: int) -> None:
    if os.getpid() != pid or not has_ended() or _waits_for_children():
        return
    with contextlib.suppress(OSError, ValueError):  # what cannot be written was not written
        _flush_files()
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        unfinished = folder / f".ended.{pid}"
        unfinished.write_text(started)
        unfinished.rename(folder / f"ended.{pid}")


def _has_returned(script: FrameType) -> bool:
    """Returns whether it ran to its end. An exception leaves it elsewhere, also SystemExit."""
    return dis.opname[script.f_code.co_code[script.f_lasti]] in ("RETURN_VALUE", "RETURN_CONST")


def _waits_for_children() -> bool:
    """Whether Python is going to wait for processes of the script's, which may still write something."""
    module = sys.modules.get("multiprocessing")
    return module is not None and any(not one.daemon for one in module.active_children())


def _flush_files() -> None:
    """Python writes what is left in the buffers of open files only when it takes its modules apart."""
    for one in gc.get_objects():
        if isinstance(one, io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom) and not one.closed:
            one.flush()


# --- metrics ----------------------------------------------------------------------------------------------------------


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


# --- notices ----------------------------------------------------------------------------------------------------------
# What a rank has to say about its run besides its log: UGRO shows it in ``ugro status``, ``ugro why`` and on the page.
#
# It goes to a file in the run's folder on the node, which the supervisor reads. Outside UGRO it is only logged.


log = logging.getLogger("ugro.train")

_EVERY_S = 2.0
_MOST = 4
_LONGEST = 200


class Notices:
    def __init__(self, folder: Path | None, run_name: str, rank: int) -> None:
        self._folder, self._run_name, self._rank = folder, run_name, rank
        self._said: dict[str, str] = {}
        self._write_at = 0.0
        self._is_pending = False

    def say(self, key: str, text: str, *, is_logged: bool = True) -> None:
        """The newest text of a key holds. Files are written now and then only, and at the end."""
        if is_logged:
            log.warning("%s", text)
        if key not in self._said and len(self._said) >= _MOST:
            return
        if not self._said:
            atexit.register(self.write)
        is_new = key not in self._said
        self._said[key] = text[:_LONGEST]
        self._is_pending = True
        if is_new or time.monotonic() >= self._write_at:
            self.write()

    def unsay(self, key: str) -> None:
        """It is no longer so."""
        if self._said.pop(key, None) is not None:
            self._is_pending = True
            self.write()

    def write(self) -> None:
        if not self._is_pending or self._folder is None:
            return
        self._is_pending, self._write_at = False, time.monotonic() + _EVERY_S
        with contextlib.suppress(OSError):  # a full disk must not end the training
            folder = self._folder / "notices"
            folder.mkdir(exist_ok=True)
            unfinished = folder / f".{self._rank}"
            unfinished.write_text(json.dumps({"run": self._run_name, "notices": list(self._said.values())}))
            unfinished.rename(folder / f"{self._rank}.json")


# --- waiting ----------------------------------------------------------------------------------------------------------
# Says whom a rank waits for between two steps: another may have left its loop early, or may still be in it.
#
# Ranks leave a word in the store of the process group before they wait. A rank that has waited for long looks who has
# not come. What hangs is left alone: somebody may only be slow.


_KEY = "waiting"


class Patience:
    def __init__(self, group: Group, progress: Progress, limit_s: float, notices: Notices) -> None:
        self._group, self._progress, self._limit_s, self._notices = group, progress, limit_s, notices
        self._called = [f"rank {rank} ({name})" for rank, name in enumerate(group.nodes)]
        self._store = _store()
        self._count = 0  # of the times that ranks have met like this, alike on all of them

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self._count += 1
        self._store.set(f"here/{self._group.rank}", str(self._count))
        timer = threading.Timer(self._limit_s, self._say)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self._notices.unsay(_KEY)

    def _say(self) -> None:
        others = [rank for rank in range(self._group.ranks) if rank != self._group.rank]
        try:
            absent = [rank for rank in others if not self._is_here(rank)]
        except RuntimeError:  # the store is gone, and with it the group
            return
        whom = names([self._called[rank] for rank in absent or others])
        self._notices.say(
            _KEY,
            f"{self._called[self._group.rank]} has waited {format_duration(self._limit_s)} for {whom}, after "
            f"{self._progress.step} steps: have they left their loops at different steps?",
        )

    def _is_here(self, rank: int) -> bool:
        key = f"here/{rank}"
        return bool(self._store.check([key])) and int(self._store.get(key)) >= self._count


def _store() -> Any:
    from torch.distributed import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store

    return PrefixStore("ugro_waiting", _get_default_store())
