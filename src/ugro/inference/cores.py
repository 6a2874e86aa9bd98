"""How many threads a model on a CPU computes with: tried out, because more are often slower.

Threads wait for each other many times for each token. For a small model, or beside other programs, that costs more than
it brings: two threads on two busy cores took ten times as long as one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)
_REPEATS = 3
_LIMIT_S = 5.0  # a large model is not tried with few threads


def settle_threads(work: Callable[[], object], device: Any) -> None:
    """Called in the thread that computes. What the environment allows (``OMP_NUM_THREADS``) is the most."""
    import torch

    most = torch.get_num_threads()
    if device.type != "cpu" or most == 1:
        return
    began = time.monotonic()
    taken: dict[int, float] = {}
    for count in halves(most):
        torch.set_num_threads(count)
        work()
        taken[count] = min(_seconds(work) for _ in range(_REPEATS))
        if time.monotonic() - began > _LIMIT_S:
            break
    best = min(taken, key=lambda count: (taken[count], count))
    torch.set_num_threads(best)
    figures = ", ".join(f"{seconds * 1000:.1f} ms with {count}" for count, seconds in taken.items())
    log.info("computes with %d of %d threads: a small batch takes %s", best, most, figures)


def halves(most: int) -> list[int]:
    found = [most]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
