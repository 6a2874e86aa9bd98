"""A trace of some steps by torch's own profiler, when somebody asks for it while the training runs.

The agent puts a word into a file of the run's folder on the node. The main rank looks at it once a second at most,
and tells the others along with its numbers: all ranks record the same steps, and none waits for another one.
Whatever goes wrong here is written where the trace would be, and the training goes on.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

_LOOK_S = 1.0
_MOST_STEPS = 1000
_MOST_BYTES = 4096
_CONTROL = "control.json"
_FAILURES = (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError)


class Tracer:
    def __init__(self, run_folder: Path | None, run_name: str, output: Path, rank: int, is_cuda: bool) -> None:
        """Without a folder of the run, which UGRO makes, nobody can ask."""
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
        """How many steps somebody wants; the same until it has begun."""
        now = time.monotonic()
        if self._rank == 0 and self._folder is not None and now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._look(self._folder / _CONTROL)
        return self._asked

    def after_step(self, step: int, asked: int) -> None:
        """``asked`` is what the main rank said in this step, on all ranks the same."""
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

    def close(self) -> None:
        """The training ends before the trace does: what there is, is kept."""
        if self._left:
            self._left = 0
            self._end(is_last_moment=True)

    # --- being asked --------------------------------------------------------------------------------------------

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
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        profiler = profile(activities=activities)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a machine without a GPU is told so each time
            profiler.start()
        self._profiler = profiler
        atexit.register(self.close)

    def _next(self) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def _end(self, *, is_last_moment: bool) -> None:
        profiler, self._profiler = self._profiler, None
        atexit.unregister(self.close)
        if profiler is None:
            return

        def stop() -> None:
            profiler.stop()
            if is_last_moment:
                self._write(profiler)
            else:
                # Not in the way of the next step. The interpreter waits for it at its end.
                name = "ugro trace"
                threading.Thread(target=self._guarded, args=(lambda: self._write(profiler),), name=name).start()

        self._guarded(stop)

    def _write(self, profiler: Any) -> None:
        """Whole or not at all: what stands in the output folder is on its way home."""
        assert self._folder is not None
        self._output.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"trace.rank_{self._rank}.json.gz"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(self._output / f"{self._name}.json.gz")

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except _FAILURES as error:
            self._profiler = None
            self._complain(f"no trace of rank {self._rank}: {error}")

    def _complain(self, problem: str) -> None:
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            (self._output / f"{self._name}.txt").write_text(problem[:_MOST_BYTES], encoding="utf-8")
        except OSError:
            warnings.warn(problem, RuntimeWarning, stacklevel=2)

    @property
    def _name(self) -> str:
        return f"rank_{self._rank}.step_{self._first_step}"
