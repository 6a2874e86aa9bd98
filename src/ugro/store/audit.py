"""The audit log: entries are added and read, and removed only when they are old or too many."""

from __future__ import annotations

from collections.abc import Sequence

from ugro.core.audit import AuditEntry
from ugro.store.connection import Connection, Row
from ugro.store.engine import Database

MOST_ENTRIES = 100_000  # about


class AuditStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, entries: Sequence[AuditEntry]) -> None:
        await self._database.run(lambda db: _add(db, entries))

    async def newest(self, limit: int, since: str = "", user: str | None = None) -> list[AuditEntry]:
        """The newest ones that match, the oldest of them first."""
        clause, values = ("AND user = ?", (user,)) if user is not None else ("", ())
        query = f"SELECT * FROM audit WHERE at >= ? {clause} ORDER BY seq DESC LIMIT ?"
        rows = await self._database.run(lambda db: db.execute(query, (since, *values, limit)).fetchall())
        return [_entry(row) for row in reversed(rows)]

    async def remove(self, before: str, limit: int) -> int:
        """Returns how many."""
        query = "DELETE FROM audit WHERE seq IN (SELECT seq FROM audit WHERE at < ? LIMIT ?)"
        return await self._database.run(lambda db: db.execute(query, (before, limit)).rowcount)


def _add(db: Connection, entries: Sequence[AuditEntry]) -> None:
    rows = [(one.at, one.user, one.via, one.action, one.subject, one.outcome) for one in entries]
    db.executemany("INSERT INTO audit (at, user, via, action, subject, outcome) VALUES (?, ?, ?, ?, ?, ?)", rows)
    newest = db.execute("SELECT MAX(seq) AS seq FROM audit").fetchone()["seq"] or 0
    pace = max(1, MOST_ENTRIES // 32)  # counting reads all of it: not every time
    if newest // pace > (newest - len(rows)) // pace:
        _trim(db)


def _trim(db: Connection) -> None:
    """Removes the oldest entries of the user who has most: nobody can push out what others did."""
    query = "SELECT user, COUNT(*) AS count FROM audit GROUP BY user ORDER BY count DESC"
    counts = [(row["user"], int(row["count"])) for row in db.execute(query).fetchall()]
    over = sum(count for _, count in counts) - MOST_ENTRIES
    if over > 0:
        oldest = "SELECT seq FROM audit WHERE user = ? ORDER BY seq LIMIT ?"
        db.execute(f"DELETE FROM audit WHERE seq IN ({oldest})", (counts[0][0], over))


def _entry(row: Row) -> AuditEntry:
    return AuditEntry(row["at"], row["user"], row["via"], row["action"], row["subject"], row["outcome"])
