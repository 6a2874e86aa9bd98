"""Tells the supervisor that this rank's script has ended by itself: the rank may be killed while its process exits.

A process that exits still runs for a while, and longest where it waits for threads and devices of PyTorch. What kills
it then takes nothing away: the script has written its results. Only if a signal ends the process does the supervisor
look for this note; an exit code says by itself how a script has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import dis
import gc
import io
import os
import sys
from pathlib import Path
from types import FrameType


def note_at_exit() -> None:
    """Registers it. Exit handlers that the script registers after this run before it is noted."""
    folder, script, pid = os.environ.get("UGRO_RUN_DIR"), _script(), os.getpid()
    if folder and script is not None:
        atexit.register(_note, Path(folder), script, pid)


def _script() -> FrameType | None:
    """The frame of the module that Python runs; None if that is not a script of the user's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(sys.modules["__main__"]):
            return frame
        frame = frame.f_back
    return None


def _note(folder: Path, script: FrameType, pid: int) -> None:
    if os.getpid() != pid or not _has_returned(script) or _waits_for_children():
        return
    with contextlib.suppress(OSError, ValueError):  # what cannot be written was not written
        _flush_files()
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        unfinished = folder / f".ended.{pid}"
        unfinished.write_text(started)
        unfinished.rename(folder / f"ended.{pid}")


def _has_returned(script: FrameType) -> bool:
    """Whether it ran to its end. An exception leaves it elsewhere, also SystemExit, whose code is not known here."""
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
