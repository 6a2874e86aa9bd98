"""An alert: a problem of a node or of the whole cluster, and how long it has lasted."""

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
    """Active from ``started_at`` on; None: not seen often enough yet. Times are unix seconds."""

    rule: str
    node: str
    severity: Severity
    text: str
    first_seen_at: float
    started_at: float | None = None
    told_at: float | None = None
    worst: Severity = Severity.INFO  # of the notices sent: an alert that swings does not send one every time
    seen: int = 0  # looks in a row
    unseen: int = 0  # looks in a row

    @property
    def key(self) -> Key:
        return self.rule, self.node


@dataclass(frozen=True, slots=True)
class Tried:
    """The outcome of a test message."""

    channel: str
    error: str | None = None
    hint: str | None = None
