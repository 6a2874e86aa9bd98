"""Where the state of an agent is kept, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStatus:
    kind: str  # sqlite or postgresql
    where: str  # a file, or a URL without a password
    schema: int  # 0: nothing was written yet
    bytes: int
    version: str = ""  # of the server
    used_by: str | None = None  # the session that has the lock
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    where: str  # the state is now
    tables: int
    rows: int
    before: str  # what it was moved from; kept, and not used any more
