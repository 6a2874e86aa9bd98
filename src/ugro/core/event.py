"""An entry of the event log."""

from __future__ import annotations

from dataclasses import dataclass

PUT_BACK = "put back"  # the kind of what is said of files that earlier attempts made


@dataclass(frozen=True, slots=True)
class Event:
    seq: int
    at: str  # RFC 3339
    kind: str
    text: str
    job: int | None = None
    attempt: int | None = None
    node: str | None = None
