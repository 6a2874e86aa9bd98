"""Collects entries of the audit log, and writes them together: no call waits for it.

A crash loses the entries of the last half second. What is refused is recorded a few times a minute for each user, and
counted beyond that, so that refusals cannot push out the rest. All strangers count as one user.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from ugro.core.audit import AuditEntry
from ugro.core.errors import UgroError
from ugro.store.audit import AuditStore

log = logging.getLogger(__name__)

_PAUSE_S = 0.5
_MOST_PENDING = 10_000  # while the database cannot be written
_REFUSED_PER_MINUTE = 10
_MOST_USERS = 1000  # whose refusals are counted at once
_MOST_NOTED = 4096


class AuditLog:
    def __init__(self, store: AuditStore) -> None:
        self._store = store
        self._pending: list[AuditEntry] = []
        self._is_pending = asyncio.Event()
        self._refused = RefusalLimit()
        self._noted: dict[tuple[object, ...], None] = {}

    def note(self, entry: AuditEntry) -> None:
        if len(self._pending) < _MOST_PENDING:
            self._pending.append(entry)
        self._is_pending.set()

    def note_refused(self, entry: AuditEntry, now_s: float) -> None:
        if (counted := self._refused.counted(entry, now_s)) is not None:
            self.note(counted)

    def is_first(self, entry: AuditEntry, period: int = 0) -> bool:
        """Of its kind and process, in a period: a tunnel has many connections, and a page asks again and again."""
        key = (entry.user, entry.via, entry.action, entry.subject, entry.outcome, period)
        if key in self._noted:
            return False
        self._noted[key] = None
        if len(self._noted) > _MOST_NOTED:
            del self._noted[next(iter(self._noted))]
        return True

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


@dataclass(slots=True)
class _Count:
    """Of one user."""

    minute: int
    recorded: int = 0  # in this minute
    left_out: int = 0


class RefusalLimit:
    """Pure: which of them are recorded."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def counted(self, entry: AuditEntry, now_s: float) -> AuditEntry | None:
        """None: this one is only counted; the next of its user that is recorded says how many were."""
        count = self._count_of(entry.user, int(now_s // 60))
        if count.recorded >= _REFUSED_PER_MINUTE:
            count.left_out += 1
            return None
        count.recorded += 1
        left_out, count.left_out = count.left_out, 0
        return replace(entry, outcome=f"{entry.outcome}; {left_out} more before it") if left_out else entry

    def _count_of(self, user: str, minute: int) -> _Count:
        count = self._counts.pop(user, None) or _Count(minute)
        if count.minute != minute:
            count.minute, count.recorded = minute, 0
        self._counts[user] = count  # the last: who was not seen for longest is forgotten first
        if len(self._counts) > _MOST_USERS:
            del self._counts[next(iter(self._counts))]
        return count
