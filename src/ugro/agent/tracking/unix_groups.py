"""The members of Unix groups of this machine. They are looked up in a thread: they may come from a slow directory."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import pwd
from collections.abc import Collection

log = logging.getLogger(__name__)

_EVERY_S = 60.0
_FIRST_S = 5.0  # how long a pass waits for groups that were never looked up


class UnixGroups:
    def __init__(self) -> None:
        self._members: dict[str, frozenset[str] | None] = {}  # None: there is no such group
        self._looked_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.version = 0  # grows with every change

    def members(self, name: str) -> frozenset[str]:
        return self._members.get(name) or frozenset()

    def is_missing(self, name: str) -> bool:
        return name in self._members and self._members[name] is None

    async def keep_up(self, names: Collection[str]) -> None:
        """Looks them up again now and then. Only those that are new are waited for, and not for long."""
        is_new = any(name not in self._members for name in names)
        now = asyncio.get_running_loop().time()
        if self._task is None and (is_new or now - self._looked_at > _EVERY_S) and names:
            self._looked_at = now
            self._task = asyncio.create_task(self._look(frozenset(names)), name="members of Unix groups")
        if is_new and self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S):
                    await asyncio.shield(self._task)

    async def _look(self, names: frozenset[str]) -> None:
        try:
            found = await asyncio.to_thread(lambda: {name: _members_of(name) for name in sorted(names)})
            if found != self._members:
                for name in found:
                    if found[name] is None:
                        log.warning("quotas: there is no Unix group %s on this machine", name)
                self._members = dict(found)
                self.version += 1
        finally:
            self._task = None


def _members_of(name: str) -> frozenset[str] | None:
    """Those that the group lists, and those whose own group it is."""
    try:
        group = grp.getgrnam(name)
    except KeyError:
        return None
    return frozenset(group.gr_mem) | {one.pw_name for one in pwd.getpwall() if one.pw_gid == group.gr_gid}
