"""Collects entries of the audit log, and writes them together: no call waits for it.

A crash loses the entries of the last half second. What strangers try at the dashboard is recorded a few times a minute,
and counted beyond that.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from ugro.core.audit import AuditEntry
from ugro.core.errors import UgroError
from ugro.store.audit import AuditStore

log = logging.getLogger(__name__)

_PAUSE_S = 0.5
_MOST_PENDING = 10_000  # while the database cannot be written
_STRANGERS_PER_MINUTE = 10


class AuditLog:
    def __init__(self, store: AuditStore) -> None:
        self._store = store
        self._pending: list[AuditEntry] = []
        self._is_pending = asyncio.Event()
        self._strangers = StrangerLimit()

    def note(self, entry: AuditEntry) -> None:
        if len(self._pending) < _MOST_PENDING:
            self._pending.append(entry)
        self._is_pending.set()

    def note_stranger(self, entry: AuditEntry, now_s: float) -> None:
        if (counted := self._strangers.counted(entry, now_s)) is not None:
            self.note(counted)

    async def run(self) -> None:
        while True:
            await self._is_pending.wait()
            await asyncio.sleep(_PAUSE_S)
            await self.flush()

    async def flush(self) -> None:
        entries, self._pending = self._pending, []
        self._is_pending.clear()
        if not entries:
            return
        try:
            await self._store.add(entries)
        except UgroError as error:
            log.error("the audit log cannot be written: %s", error)
            self._pending = [*entries, *self._pending][:_MOST_PENDING]

    async def newest(self, limit: int, since: str, user: str | None) -> list[AuditEntry]:
        await self.flush()
        return await self._store.newest(limit, since, user)


class StrangerLimit:
    """Pure: which of them are recorded."""

    def __init__(self) -> None:
        self._minute = -1
        self._count = 0
        self._left_out = 0

    def counted(self, entry: AuditEntry, now_s: float) -> AuditEntry | None:
        """None: this one is only counted; the next that is recorded says how many were."""
        if (minute := int(now_s // 60)) != self._minute:
            self._minute, self._count = minute, 0
        self._count += 1
        if self._count > _STRANGERS_PER_MINUTE:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return replace(entry, outcome=f"{entry.outcome}; {left_out} more before it") if left_out else entry
