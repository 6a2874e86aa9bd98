"""How things are timed, and said: a line of JSON on standard output for each."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from typing import Any, Callable, List, Tuple

_BEGAN = time.monotonic()
_LEAST_S = 1.0
_MARGIN_S = 0.5


def end_of(seconds: float, limit_s: float) -> float:
    """Until when to measure, by the monotonic clock: so long after the start of this process, however long it took to
    load what measures; but at least for a second, unless the process is ended before that."""
    return min(max(_BEGAN + seconds, time.monotonic() + _LEAST_S), _BEGAN + limit_s - _MARGIN_S)


def say(**message: Any) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def skip(what: str, why: str) -> None:
    say(skipped={"what": what, "why": why[:300]})


def rate(step: Callable[[], int], seconds: float) -> float:
    """Units in a second. A ``step`` does some work and returns how many units that was."""
    begun = time.perf_counter()
    done = 0
    while True:
        done += step()
        spent = time.perf_counter() - begun
        if spent >= seconds:
            return done / spent


def rate_of_threads(steps: List[Callable[[], int]], seconds: float) -> float:
    """Of steps that run at once, each in a thread; they must let go of the interpreter's lock while they work."""
    gate = threading.Barrier(len(steps))
    found: List[float] = []

    def work(step: Callable[[], int]) -> None:
        gate.wait()
        found.append(rate(step, seconds))

    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(found)


def times(step: Callable[[], Any], seconds: float, most: int = 10_000) -> List[float]:
    """How long each step took, for that long, and at least once."""
    begun = time.perf_counter()
    found: List[float] = []
    while len(found) < most:
        start = time.perf_counter()
        step()
        end = time.perf_counter()
        found.append(end - start)
        if end - begun >= seconds:
            break
    return found


def median_and_jitter(found: List[float]) -> Tuple[float, float]:
    """The jitter is the mean difference of one to the next."""
    steps = [abs(found[place] - found[place - 1]) for place in range(1, len(found))]
    return statistics.median(found), statistics.fmean(steps) if steps else 0.0
