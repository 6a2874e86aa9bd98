"""Latencies in bounded memory: counts in buckets whose bounds grow by a tenth, over a window that slides by parts.

It also runs on nodes, as a part of the door's program: Python 3.9 and its standard library alone.
"""

from __future__ import annotations

import math

LEAST_S = 0.0005
_GROWTH = math.log(1.1)
_BUCKETS = 170  # up to an hour and a half; what takes longer counts as that
_PARTS = 6


class Histogram:
    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        bucket = _bucket(seconds)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def merge(self, other: Histogram) -> None:
        self.count += other.count
        self.total_s += other.total_s
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    def quantile(self, share: float) -> float:
        """Within 5 %; 0 if there is nothing."""
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return _middle(bucket)
        return 0.0

    def summary(self) -> dict[str, float]:
        mean_s = self.total_s / self.count if self.count else 0.0
        shares = {f"p{share}_s": self.quantile(share / 100) for share in (50, 90, 99)}
        return {"count": self.count, "mean_s": mean_s, **shares}


class Window:
    """The last ``seconds``, up to one part of them more or less."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._parts: list[Histogram] = [Histogram()]
        self._ends_at = -math.inf

    def add(self, seconds: float, now: float) -> None:
        self._slide(now)
        self._parts[-1].add(seconds)

    def whole(self, now: float) -> Histogram:
        self._slide(now)
        found = Histogram()
        for part in self._parts:
            found.merge(part)
        return found

    def _slide(self, now: float) -> None:
        step_s = self.seconds / _PARTS
        if now >= self._ends_at + self.seconds:
            self._parts, self._ends_at = [Histogram()], now + step_s
        while now >= self._ends_at:
            self._parts = [*self._parts[1 - _PARTS :], Histogram()]
            self._ends_at += step_s


def _bucket(seconds: float) -> int:
    if seconds <= LEAST_S:
        return 0
    return min(_BUCKETS - 1, 1 + int(math.log(seconds / LEAST_S) / _GROWTH))


def _middle(bucket: int) -> float:
    return LEAST_S * math.exp(_GROWTH * (bucket - 0.5)) if bucket else LEAST_S / 2
