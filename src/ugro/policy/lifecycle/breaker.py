"""The circuit breaker of a node: the agent stops asking a node that keeps failing, for a while.

A link that opens or is heard again meanwhile is a sign of life, and the node is asked at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"  # the node is asked as usual
    OPEN = "open"  # the node is not asked
    HALF_OPEN = "half-open"  # the pause is over, or its link is back: the next answer decides


@dataclass(frozen=True, slots=True)
class Limits:
    failures: int = 3
    pause_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Breaker:
    """Times are seconds of a monotonic clock."""

    failures: int = 0  # in a row
    opened_at: float | None = None

    def after(self, has_answered: bool, now: float, limits: Limits) -> Breaker:
        if has_answered:
            return Breaker()
        failed = replace(self, failures=self.failures + 1)
        # A failure after the pause starts another pause.
        return replace(failed, opened_at=now) if failed.failures >= limits.failures else failed

    def state(self, now: float, limits: Limits, *, alive_since: float | None = None) -> BreakerState:
        """``alive_since``: when its link was opened, or last answered again after a silence."""
        if self.opened_at is None:
            return BreakerState.CLOSED
        has_shown_up = alive_since is not None and alive_since > self.opened_at
        is_over = now - self.opened_at >= limits.pause_s
        return BreakerState.HALF_OPEN if has_shown_up or is_over else BreakerState.OPEN

    def reason(self, now: float, limits: Limits) -> str:
        if self.opened_at is None:
            return f"{self.failures} failures in a row" if self.failures else "it answers"
        left_s = max(0.0, limits.pause_s - (now - self.opened_at))
        return f"{self.failures} failures in a row; asked again in {left_s:.0f} s, or when its link is back"
