"""The logins that jobs were ever started through: written with the start, in the same transaction."""

from __future__ import annotations

from ugro.core.job import HOLDING_STATES, Share
from ugro.core.login import account_of
from ugro.core.support.codec import dumps
from ugro.store.connection import Connection
from ugro.store.engine import Database


class LoginStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> dict[str, bool]:
        """By name, whether it is clear: nothing of a job can be there."""
        query = "SELECT name, is_clear FROM logins"
        return await self._database.run(lambda db: {row["name"]: bool(row["is_clear"]) for row in db.execute(query)})

    async def clear(self, name: str) -> None:
        """It has nothing, and is closed. Not if a job was started there meanwhile."""
        await self._database.run(lambda db: _clear(db, name))


def remember(db: Connection, share: Share) -> None:
    if account_of(share.node):
        query = "INSERT INTO logins (name) VALUES (?) ON CONFLICT (name) DO UPDATE SET is_clear = 0"
        db.execute(query, (share.node,))


def _clear(db: Connection, name: str) -> None:
    states = ", ".join(f"'{state}'" for state in sorted(HOLDING_STATES))
    query = (
        "UPDATE logins SET is_clear = 1 WHERE name = ? AND NOT EXISTS (SELECT 1 FROM attempts JOIN jobs "
        f"ON jobs.id = attempts.job AND jobs.attempt = attempts.number WHERE jobs.state IN ({states}) "
        "AND attempts.placement LIKE ? ESCAPE '!')"
    )
    pattern = "".join(f"!{letter}" if letter in "!_%" else letter for letter in dumps(name))
    db.execute(query, (name, f"%{pattern}%"))
