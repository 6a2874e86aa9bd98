"""An alert: something that is wrong with a node, or with all of them, and how long it has been so."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Key = tuple[str, str]  # rule and node


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Alert:
    """It counts from ``started_at`` on; before, it was seen too seldom. Times are unix seconds."""

    rule: str
    node: str
    severity: Severity
    text: str
    first_seen_at: float
    started_at: float | None = None
    told_at: float | None = None
    worst: Severity = Severity.INFO  # of those that were told: one that swings is not told at every turn
    seen: int = 0  # looks in a row
    unseen: int = 0  # looks in a row

    @property
    def key(self) -> Key:
        return self.rule, self.node


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a test message."""

    channel: str
    error: str | None = None
    hint: str | None = None
