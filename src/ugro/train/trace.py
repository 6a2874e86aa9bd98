"""Records a trace of some steps with torch's profiler, on request while the training runs.

The agent writes a request to a file in the run's folder on the node. The main rank checks it at most once per second
and sends it to the others with its measurements, so all ranks record the same steps without waiting for each other.
Errors are written where the trace would be, and the training continues.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOOK_S = 1.0
_MOST_STEPS = 1000
_MOST_BYTES = 4096
_CONTROL = "control.json"
_FAILURES = (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError)


class Tracer:
    def __init__(self, run_folder: Path | None, run_name: str, output: Path, rank: int, is_cuda: bool) -> None:
        """Requests need the run's folder, which UGRO creates."""
        self._folder = run_folder
        self._run_name = run_name
        self._output = output / "traces"
        self._rank = rank
        self._is_cuda = is_cuda
        self._next_look = 0.0
        self._seen: tuple[int, int] | None = None
        self._key: str | None = None
        self._asked = 0
        self._left = 0
        self._first_step = 0
        self._profiler: Any = None

    @property
    def is_tracing(self) -> bool:
        return self._left > 0

    def asked(self) -> int:
        """The requested number of steps; the same until recording starts."""
        now = time.monotonic()
        if self._rank == 0 and self._folder is not None and now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._look(self._folder / _CONTROL)
        return self._asked

    def after_step(self, step: int, asked: int) -> bool:
        """Returns True if the step was recorded, or the next one is: recording takes time, and not the same everywhere.

        ``asked`` is what the main rank sent in this step, the same on all ranks.
        """
        was_tracing = self.is_tracing
        if self._left:
            self._left -= 1
            if self._left:
                self._guarded(self._next)
            else:
                self._end(is_last_moment=False)
        elif 0 < asked <= _MOST_STEPS:
            self._asked = 0
            self._left, self._first_step = asked, step + 1
            self._guarded(self._begin)
        return was_tracing or self.is_tracing

    def close(self) -> None:
        """The training ends before the trace: keeps what was recorded."""
        if self._left:
            self._left = 0
            self._end(is_last_moment=True)

    # --- requests -----------------------------------------------------------------------------------------------

    def _look(self, path: Path) -> None:
        try:
            about = os.stat(path)
            if self._seen == (seen := (about.st_mtime_ns, about.st_ino)):
                return
            with path.open("rb") as file:
                word = json.loads(file.read(_MOST_BYTES))
            self._seen = seen
            if word["run"] == self._run_name and word["key"] != self._key:
                self._key, self._asked = word["key"], min(_MOST_STEPS, max(0, int(word["trace_steps"])))
        except (OSError, ValueError, KeyError, TypeError):
            return

    # --- recording ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        from torch import autograd
        from torch.profiler import ProfilerActivity, profile

        if getattr(autograd, "_profiler_enabled", bool)():  # starting a second one ends the first
            raise RuntimeError("the script uses torch.profiler itself")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        profiler = profile(activities=activities)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns each time if there is no GPU
            profiler.start()
        self._profiler = profiler
        atexit.register(self.close)

    def _next(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def _end(self, *, is_last_moment: bool) -> None:
        profiler, self._profiler = self._profiler, None
        name = self._name  # the next trace has another name
        atexit.unregister(self.close)
        if profiler is None or not self._guarded(profiler.stop):
            return

        def write() -> None:
            self._guarded(lambda: self._write(profiler, name), name)

        if is_last_moment:
            write()
        else:
            # In a thread, to not delay the next step. The interpreter waits for it at its end.
            threading.Thread(target=write, name="ugro trace").start()

    def _write(self, profiler: Any, name: str) -> None:
        """Complete or not at all, because UGRO collects the output folder meanwhile."""
        assert self._folder is not None
        self._output.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"trace.{name}.json.gz"
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(self._output / f"{name}.json.gz")

    def _guarded(self, work: Callable[[], Any], name: str | None = None) -> bool:
        try:
            work()
        except _FAILURES as error:
            self._complain(f"no trace of rank {self._rank}: {error}", name or self._name)
            return False
        return True

    def _complain(self, problem: str, name: str) -> None:
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            (self._output / f"{name}.txt").write_text(problem[:_MOST_BYTES], encoding="utf-8")
        except OSError:
            warnings.warn(problem, RuntimeWarning, stacklevel=2)

    @property
    def _name(self) -> str:
        return f"rank_{self._rank}.step_{self._first_step}"
