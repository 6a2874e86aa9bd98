"""Which code was sent to which node, on disk: the last snapshot on a node tells what the next one lacks there."""

from __future__ import annotations

from datetime import UTC, datetime

from ugro.store.engine import Database


class CodeStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def sent(self, node: str, folder: str, snapshot: str) -> None:
        await self._database.run(
            lambda db: db.execute(
                "INSERT INTO sent_code (node, folder, snapshot, sent_at) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (node, folder) DO UPDATE SET snapshot = excluded.snapshot, sent_at = excluded.sent_at",
                (node, _text(folder), snapshot, datetime.now(UTC).isoformat()),
            )
        )

    async def last(self, node: str, folder: str) -> str | None:
        """The last snapshot on the node, of this folder if there is one."""
        query = "SELECT snapshot FROM sent_code WHERE node = ? ORDER BY folder = ? DESC, sent_at DESC LIMIT 1"
        row = await self._database.run(lambda db: db.execute(query, (node, _text(folder))).fetchone())
        return str(row["snapshot"]) if row else None

    async def taken(self, folder: str, snapshot: str) -> None:
        await self._database.run(
            lambda db: db.execute(
                "INSERT INTO snapshots (id, folder, taken_at) VALUES (?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET folder = excluded.folder, taken_at = excluded.taken_at",
                (snapshot, _text(folder), datetime.now(UTC).isoformat()),
            )
        )

    async def folder_of(self, snapshot: str) -> str:
        query = "SELECT folder FROM snapshots WHERE id = ?"
        row = await self._database.run(lambda db: db.execute(query, (snapshot,)).fetchone())
        return str(row["folder"]) if row else ""


def _text(folder: str) -> str:
    """The name of a folder need not be UTF-8, as texts in the database are."""
    return folder.encode("utf-8", "backslashreplace").decode()
