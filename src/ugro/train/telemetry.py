"""The measurements that ranks exchange in every step, together with the last gradients.

No rank waits for them additionally, and after each step all ranks have the same numbers.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ugro.train.rules.failures import Wrong

# --- clock ------------------------------------------------------------------------------------------------------------
# Times the parts of a step on this rank's device, and separates computing from waiting for other ranks.
#
# All-reduce makes the backward of all ranks equally long, so a rank's own time ends when its last gradients are ready.
# On a GPU the moments are events in its stream and are read a step later, so measuring never stops the device.


class Clock(Protocol):
    """Moments in the order of a device's work, which may be done long after the host has asked for it."""

    lag: int  # steps after which moments can be compared

    def now(self) -> Any: ...
    def has_come(self, moment: Any) -> bool:
        """Returns whether the device has done all that was asked of it before the moment. Does not wait."""
        ...

    def wait(self, moment: Any) -> None:
        """Waits until the device has done all that was asked of it before the moment."""
        ...

    def between(self, earlier: Any, later: Any) -> float:
        """Returns seconds. Waits until the device has reached the later moment."""
        ...

    def kept(self, loss: Any) -> Any: ...


class CpuClock:
    lag = 0

    def now(self) -> Any:
        return time.perf_counter()

    def has_come(self, moment: Any) -> bool:
        return True

    def between(self, earlier: Any, later: Any) -> float:
        return float(later - earlier)

    def kept(self, loss: Any) -> Any:
        return loss.detach()

    def wait(self, moment: Any) -> None:
        return


class CudaClock:
    lag = 1

    def now(self) -> Any:
        import torch

        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def has_come(self, moment: Any) -> bool:
        return bool(moment.query())

    def between(self, earlier: Any, later: Any) -> float:
        later.synchronize()  # of the previous step: the GPU has other work meanwhile
        return float(earlier.elapsed_time(later)) / 1000

    def kept(self, loss: Any) -> Any:
        """Copies to the host now. A later copy would wait for all work that was queued since."""
        import torch

        return torch.empty_like(loss, device="cpu", pin_memory=True).copy_(loss.detach(), non_blocking=True)

    def wait(self, moment: Any) -> None:
        moment.synchronize()


@dataclass(slots=True)
class Moments:
    """The moments of one step. ``own`` starts when the previous step was synchronised, and includes its optimizer."""

    step: int
    share: int = 0
    micro_batches: int = 1
    since: Any = None
    begun: Any = None
    forward_done: Any = None
    backward_begun: Any = None
    ready: Any = None
    synced: Any = None
    ended: Any = None
    fetched: tuple[Any, Any] | None = None  # before and after the device waited for its batch
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # for other ranks, inside forward and backward
    pauses: list[tuple[Any, Any]] = field(default_factory=list)  # in which the ranks did something else together
    is_clean: bool = True
    loss: Any = None
    gradients: Any = None  # the sum of all numbers in them: finite, if they are
    is_scaled: bool = False  # by a GradScaler


@dataclass(frozen=True, slots=True)
class Phases:
    own_s: float
    data_s: float
    forward_s: float
    backward_s: float


def phases(clock: Clock, moments: Moments) -> Phases:
    """The durations of a step whose gradients are ready."""
    begun = moments.begun
    forward_done = moments.forward_done or moments.backward_begun or moments.ready
    backward_begun = moments.backward_begun or forward_done
    since = begun if moments.since is None else moments.since
    others_s = _sum_s(clock, moments.waits) + _sum_s(clock, moments.pauses)
    return Phases(
        max(0.0, clock.between(since, moments.ready) - others_s),
        data_s(clock, moments),
        clock.between(begun, forward_done),
        max(0.0, clock.between(backward_begun, moments.ready)),
    )


def data_s(clock: Clock, moments: Moments) -> float:
    """Returns how long the device stood still for its batch: nothing while it still computes what was asked before."""
    return 0.0 if moments.fetched is None else clock.between(*moments.fetched)


def after_ready(clock: Clock, moments: Moments) -> tuple[float, float]:
    """The durations after that: until the gradients of all ranks arrived, and the optimizer.

    Exchanges inside forward and backward count as if all of them came after it.
    """
    if moments.ready is None or moments.synced is None:  # the first: memory ran out, and the step was repeated
        return 0.0, 0.0
    optimizer_s = clock.between(moments.synced, moments.ended) if moments.ended is not None else 0.0
    return clock.between(moments.ready, moments.synced) + _sum_s(clock, moments.waits), optimizer_s


def _sum_s(clock: Clock, spans: list[tuple[Any, Any]]) -> float:
    return sum(clock.between(before, after) for before, after in spans)


# --- telemetry --------------------------------------------------------------------------------------------------------


_STOP, _OUT_OF_MEMORY, _UNCLEAN, _REGROUPS, _HARMLESS, _CAP_ESTIMATED = 1, 2, 4, 8, 16, 32
_WRONG = (None, Wrong.LOSS, Wrong.GRADIENTS)


@dataclass(frozen=True, slots=True)
class Word:
    """The numbers of one rank. Times after a step are sent with the next one; on a GPU, all times a step later."""

    stops: bool = False
    is_out_of_memory: bool = False
    is_clean: bool = True
    cap: int | None = None
    step: int = -1  # the measured step; -1 for none
    share: int = 0
    micro_batches: int = 1
    own_s: float = 0.0
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    loss: float = math.nan
    tail_s: float = 0.0  # of the previous step: from ready to synchronised
    optimizer_s: float = 0.0  # the same
    trace_steps: int = 0  # steps to record from the next one on, as requested from the main rank
    part: float = 1.0  # of an equal share, the most that this rank is to take
    regroups: bool = False  # a rank waits to join
    is_cap_estimated: bool = False  # and not found out by running out of memory
    position: tuple[int, int] = (-1, -1)  # the epoch and the step in which it is sent
    not_finite: Wrong | None = None
    wrong_step: int = -1  # in which that was
    is_harmless: bool = False  # nothing of it comes into the model

    def numbers(self) -> list[float]:
        flags = _STOP * self.stops + _OUT_OF_MEMORY * self.is_out_of_memory + _UNCLEAN * (not self.is_clean)
        flags += _REGROUPS * self.regroups + _HARMLESS * self.is_harmless + _CAP_ESTIMATED * self.is_cap_estimated
        return [
            *(float(flags), float(self.cap or 0), float(self.step), float(self.share), float(self.micro_batches)),
            *(self.own_s, self.data_s, self.forward_s, self.backward_s, self.loss, self.tail_s, self.optimizer_s),
            *(float(self.trace_steps), self.part, *map(float, self.position)),
            *(float(_WRONG.index(self.not_finite)), float(self.wrong_step)),
        ]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Word:
        flags, cap, step, share, micro_batches = (int(number) for number in numbers[:5])
        own_s, data_s, forward_s, backward_s, loss, tail_s, optimizer_s, trace_steps, part = numbers[5:14]
        epoch, at, wrong, wrong_step = (int(number) for number in numbers[14:])
        return cls(
            bool(flags & _STOP), bool(flags & _OUT_OF_MEMORY), not flags & _UNCLEAN, cap or None, step, share,
            micro_batches, own_s, data_s, forward_s, backward_s, loss, tail_s, optimizer_s, int(trace_steps), part,
            bool(flags & _REGROUPS), bool(flags & _CAP_ESTIMATED), (epoch, at), _WRONG[wrong], wrong_step,
            bool(flags & _HARMLESS),
        )  # fmt: skip


def of_units(words: Sequence[Word], units: Sequence[int]) -> list[Word]:
    """One for each unit. Its ranks have the same samples, and it is as slow as the slowest of them."""
    if len(set(units)) == len(words):
        return list(words)
    return [
        _together([word for word, one in zip(words, units, strict=True) if one == unit])
        for unit in range(max(units) + 1)
    ]


def _together(words: Sequence[Word]) -> Word:
    slowest = max(words, key=lambda word: word.own_s)
    smallest = min(words, key=lambda word: math.inf if word.cap is None else word.cap)
    return replace(
        slowest,
        stops=any(word.stops for word in words),
        is_out_of_memory=any(word.is_out_of_memory for word in words),
        is_clean=all(word.is_clean for word in words),
        cap=smallest.cap,
        is_cap_estimated=smallest.is_cap_estimated,
        step=min(word.step for word in words),
        data_s=max(word.data_s for word in words),
        trace_steps=words[0].trace_steps,
        part=min(word.part for word in words),
        **_wrong(words),
    )


def _wrong(words: Sequence[Word]) -> dict[str, Any]:
    one = next((word for word in words if word.not_finite is not None), words[0])
    return {"not_finite": one.not_finite, "wrong_step": one.wrong_step, "is_harmless": one.is_harmless}


class History:
    """The newest steps of this rank."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._steps: list[Moments] = []

    def begin(self, moments: Moments) -> Moments:
        before = self.latest
        if before is not None:
            self.end()
            moments.since = before.synced
        moments.begun = self.clock.now()
        self._steps = [*self._steps, moments][-3:]
        return moments

    @property
    def latest(self) -> Moments | None:
        return self._steps[-1] if self._steps else None

    @property
    def before_latest(self) -> Moments | None:
        return self._at(-2)

    def end(self) -> None:
        """Ends the newest step, if it has not ended."""
        latest = self.latest
        if latest is not None and latest.ended is None and latest.synced is not None:
            latest.ended = self.clock.now()

    def forget(self) -> Any:
        """Of a step that came to nothing, and of those before it; returns its loss, if that was known."""
        latest, self._steps = self.latest, []
        return latest.loss if latest is not None else None

    def word(
        self, *, stops: bool, is_out_of_memory: bool, cap: int | None, trace_steps: int = 0, part: float = 1.0
    ) -> Word:
        """The numbers of the newest step whose moments can be read, and of the one before it."""
        measured, finished = self._at(-1 - self.clock.lag), self._at(-2 - self.clock.lag)
        if measured is None or measured.ready is None or is_out_of_memory:
            return Word(stops, is_out_of_memory, False, cap, trace_steps=trace_steps, part=part)
        found = phases(self.clock, measured)
        tail_s, optimizer_s = after_ready(self.clock, finished) if finished is not None else (0.0, 0.0)
        return Word(
            stops, is_out_of_memory, measured.is_clean, cap, measured.step, measured.share, measured.micro_batches,
            found.own_s, found.data_s, found.forward_s, found.backward_s, _value(measured.loss), tail_s, optimizer_s,
            trace_steps, part,
        )  # fmt: skip

    def _at(self, place: int) -> Moments | None:
        return self._steps[place] if len(self._steps) >= -place else None


def _value(loss: Any) -> float:
    return math.nan if loss is None else float(loss)


# --- trace ------------------------------------------------------------------------------------------------------------
# Records a trace of some steps with torch's profiler, on request while the training runs.
#
# The agent writes a request to a file in the run's folder on the node. The main rank checks it at most once per second
# and sends it to the others with its measurements, so all ranks record the same steps without waiting for each other.
# Errors are written where the trace would be, and the training continues.


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
