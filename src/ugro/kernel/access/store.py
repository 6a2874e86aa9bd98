"""The audit log and tokens on disk: a hash of each token, never the token. Those that ended long ago are removed."""

from __future__ import annotations

from collections.abc import Sequence

from ugro.kernel.access.model import ApiToken, AuditEntry, Role
from ugro.kernel.store.connection import Connection, Row
from ugro.kernel.store.engine import Database
from ugro.kernel.support.errors import NotAllowed

# --- the audit log ----------------------------------------------------------------------------------------------------
# Entries are added and read, and removed only when they are old or too many.


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


# --- tokens -----------------------------------------------------------------------------------------------------------


MOST_VALID = 100  # of one user: nobody keeps others from having theirs


class TokenStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> list[tuple[str, ApiToken]]:
        """With their hashes, the oldest first."""
        rows = await self._database.run(lambda db: db.execute("SELECT * FROM tokens ORDER BY id").fetchall())
        return [(str(row["hash"]), _token(row)) for row in rows]

    async def add(self, new: ApiToken, digest: str) -> ApiToken:
        """With its number. Raises NotAllowed if its user has a valid one of that name, or too many."""
        return await self._database.run(lambda db: _tokens_add(db, new, digest))

    async def revoke(self, number: int, now: str) -> None:
        query = "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
        await self._database.run(lambda db: db.execute(query, (now, number)))

    async def used(self, number: int, now: str, address: str) -> None:
        query = "UPDATE tokens SET last_used_at = ?, last_used_by = ? WHERE id = ?"
        await self._database.run(lambda db: db.execute(query, (now, address, number)))

    async def remove(self, numbers: Sequence[int]) -> None:
        await self._database.run(lambda db: db.executemany("DELETE FROM tokens WHERE id = ?", [(n,) for n in numbers]))


def _tokens_add(db: Connection, new: ApiToken, digest: str) -> ApiToken:
    valid = "revoked_at IS NULL AND expires_at > ?"
    named = f"SELECT 1 FROM tokens WHERE user_name = ? AND name = ? AND {valid}"
    if db.execute(named, (new.user, new.name, new.created_at)).fetchone() is not None:
        raise NotAllowed(
            f"you have a token {new.name!r} already", hint=f"choose another name, or: ugro token revoke {new.name}"
        )
    counting = f"SELECT COUNT(*) AS count FROM tokens WHERE user_name = ? AND {valid}"
    count = db.execute(counting, (new.user, new.created_at)).fetchone()["count"]
    if count >= MOST_VALID:
        raise NotAllowed(f"you have {count} valid tokens, which is the most", hint="revoke some: ugro token ls")
    row = db.execute(
        "INSERT INTO tokens (name, user_name, role, hash, created_at, expires_at) "
        "VALUES (?, ?, ?, ?, ?, ?) RETURNING *",
        (new.name, new.user, new.role, digest, new.created_at, new.expires_at),
    ).fetchone()
    return _token(row)


def _token(row: Row) -> ApiToken:
    return ApiToken(
        id=row["id"],
        name=row["name"],
        user=row["user_name"],
        role=Role(row["role"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_used_at=row["last_used_at"],
        last_used_by=row["last_used_by"],
    )
