"""How far a transfer is, in words: bytes, files, speed and time left. The clock is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ugro.core.support.quantity import format_duration, format_size

_WINDOW_S = 10.0  # the speed is that of the last seconds
_LEAST_S = 0.5  # below, a speed says nothing


@dataclass(frozen=True, slots=True)
class Progress:
    done_bytes: int
    bytes: int
    done_files: int
    files: int
    bytes_per_s: float | None = None  # None: not known yet

    @property
    def left_s(self) -> float | None:
        left = self.bytes - self.done_bytes
        return left / self.bytes_per_s if left > 0 and self.bytes_per_s else None

    def __str__(self) -> str:
        parts = [
            f"{format_size(self.done_bytes)} of {format_size(self.bytes)}",
            f"{self.done_files:,} of {self.files:,} file{'' if self.files == 1 else 's'}",
        ]
        if self.bytes_per_s is not None:
            parts.append(f"{format_size(self.bytes_per_s)}/s")
        if self.left_s is not None:
            parts.append(f"{_about(self.left_s)} left")
        return ", ".join(parts)


def together(parts: Iterable[Progress]) -> Progress:
    """Of transfers that go on at the same time."""
    found = list(parts)
    rates = [one.bytes_per_s for one in found if one.bytes_per_s is not None]
    return Progress(
        sum(one.done_bytes for one in found),
        sum(one.bytes for one in found),
        sum(one.done_files for one in found),
        sum(one.files for one in found),
        sum(rates) if rates else None,
    )


class Speed:
    """Bytes per second, over the last seconds."""

    def __init__(self, now: float) -> None:
        self._seen = deque([(now, 0)])

    def note(self, now: float, done_bytes: int) -> None:
        self._seen.append((now, done_bytes))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW_S:
            self._seen.popleft()

    def at(self, now: float) -> float | None:
        (began, before), (_, done) = self._seen[0], self._seen[-1]
        return (done - before) / (now - began) if now - began >= _LEAST_S else None


def _about(seconds: float) -> str:
    """Whole seconds: more would pretend to a precision that there is none."""
    return f"{max(1, round(seconds))} s" if seconds < 59.5 else format_duration(round(seconds))
