"""One line of ``ugro doctor``: what was checked, what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str  # a node, a pair "a → b", "cluster", or "this machine": the one that the agent runs on
    check: str
    grade: Grade
    text: str
    remedy: str | None = None
