"""An entry of the event log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    seq: int
    at: str  # RFC 3339
    kind: str
    text: str
    job: int | None = None
    attempt: int | None = None
    node: str | None = None
