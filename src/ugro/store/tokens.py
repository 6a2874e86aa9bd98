"""Tokens on disk: a hash of each, never the token. Those that ended long ago are removed."""

from __future__ import annotations

from collections.abc import Sequence

from ugro.core.errors import NotAllowed
from ugro.core.identity import ApiToken, Role
from ugro.store.connection import Connection, Row
from ugro.store.engine import Database

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
        return await self._database.run(lambda db: _add(db, new, digest))

    async def revoke(self, number: int, now: str) -> None:
        query = "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
        await self._database.run(lambda db: db.execute(query, (now, number)))

    async def used(self, number: int, now: str, address: str) -> None:
        query = "UPDATE tokens SET last_used_at = ?, last_used_by = ? WHERE id = ?"
        await self._database.run(lambda db: db.execute(query, (now, address, number)))

    async def remove(self, numbers: Sequence[int]) -> None:
        await self._database.run(lambda db: db.executemany("DELETE FROM tokens WHERE id = ?", [(n,) for n in numbers]))


def _add(db: Connection, new: ApiToken, digest: str) -> ApiToken:
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
