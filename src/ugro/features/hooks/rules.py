"""When a hook is called: after what it is about has lasted, not again during its cool-down, and so often per hour.

So no hook can be called in a loop, whatever its call does to the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

HOUR_S = 3600.0
_LOW = 0.8  # of the length of a queue that is too long: only below that it counts as short again


@dataclass(frozen=True, slots=True)
class Patience:
    """Of a hook, as configured."""

    lasting_s: float = 0.0  # how long it must last
    cool_down_s: float = 0.0  # between two calls
    most_per_hour: int = 60


@dataclass(frozen=True, slots=True)
class Seen:
    """What is remembered from look to look. Times are seconds by one clock that nobody can set."""

    since_s: float | None = None  # since when it is so; None: it is not
    calls_s: tuple[float, ...] = ()  # of the last hour


def look(seen: Seen, is_so: bool, patience: Patience, now_s: float) -> tuple[Seen, bool]:
    """What is remembered now, and whether to call."""
    since_s = (now_s if seen.since_s is None else seen.since_s) if is_so else None
    calls_s = tuple(at_s for at_s in seen.calls_s if now_s - at_s < HOUR_S)
    after = Seen(since_s, calls_s)
    if since_s is None or now_s - since_s < patience.lasting_s or not may_call(after, patience, now_s):
        return after, False
    return replace(after, calls_s=(*calls_s, now_s)), True


def may_call(seen: Seen, patience: Patience, now_s: float) -> bool:
    return in_s(seen, patience, now_s) <= 0


def in_s(seen: Seen, patience: Patience, now_s: float) -> float:
    """How long its cool-down and its budget still keep it from being called."""
    recent = sorted(at_s for at_s in seen.calls_s if now_s - at_s < HOUR_S)
    if not recent:
        return 0.0
    over = len(recent) + 1 - patience.most_per_hour
    budget_s = recent[over - 1] + HOUR_S - now_s if over > 0 else 0.0
    return max(0.0, recent[-1] + patience.cool_down_s - now_s, budget_s)


def is_long(waiting: int, limit: int, was_long: bool) -> bool:
    """A queue that swings around its limit counts as long all the time."""
    return waiting > (int(limit * _LOW) if was_long else limit)


@dataclass(frozen=True, slots=True)
class Losses:
    """The nodes that cannot be reached: since when, and which of them were reported."""

    since_s: Mapping[str, float]
    reported: frozenset[str] = frozenset()


def look_at_losses(
    known: Losses, lost: Iterable[str], lasting_s: float, now_s: float
) -> tuple[Losses, tuple[str, ...]]:
    """What is remembered, and which losses are to be reported. Each is once: then the node must be back first."""
    since_s = {name: known.since_s.get(name, now_s) for name in lost}
    reported = known.reported & since_s.keys()
    due = sorted(name for name, at_s in since_s.items() if now_s - at_s >= lasting_s)
    return Losses(since_s, reported), tuple(name for name in due if name not in reported)
