"""A backup of the agent's state: one file, a SQLite database like the state itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backup:
    path: str
    made_at: str
    bytes: int
    schema: int
    version: str  # of the UGRO that made it
    jobs: int
    newest_job: int | None
    problem: str | None = None  # why it cannot be restored


@dataclass(frozen=True, slots=True)
class Restored:
    backup: Backup | None  # None: begun with an empty state
    aside: tuple[str, ...]  # what was there before, under its new name
