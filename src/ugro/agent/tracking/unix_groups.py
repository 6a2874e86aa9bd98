"""The members of Unix groups of this machine. They are looked up in a thread: they may come from a slow directory.

A directory that does not answer looks like one that has no such group or user. So what was known once counts until the
directory says something else: an outage must not lift the quotas of a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import pwd
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

log = logging.getLogger(__name__)

_EVERY_S = 60.0
_FIRST_S = 5.0  # how long a pass waits for groups and users that were never looked up


@dataclass(frozen=True, slots=True)
class UnixGroup:
    number: int
    listed: frozenset[str]


def _group(name: str) -> UnixGroup | None:
    try:
        found = grp.getgrnam(name)
    except (KeyError, ValueError):
        return None
    return UnixGroup(found.gr_gid, frozenset(found.gr_mem))


def _primary_group(user: str) -> int | None:
    """Asked of each user: many directories do not list all of theirs."""
    try:
        return pwd.getpwnam(user).pw_gid
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Directory:
    group: Callable[[str], UnixGroup | None] = _group
    primary_group: Callable[[str], int | None] = _primary_group


class UnixGroups:
    def __init__(self, directory: Directory | None = None) -> None:
        self._directory = directory or Directory()
        self._groups: dict[str, UnixGroup | None] = {}  # None: there is no such group
        self._primary: dict[str, int | None] = {}  # by user
        self._gone: frozenset[str] = frozenset()  # groups that were there once
        self._looked_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.version = 0  # grows with every change

    def members(self, name: str) -> frozenset[str]:
        """Those that the group lists; and of the users that have asked for something, those whose own group it is."""
        group = self._groups.get(name)
        if group is None:
            return frozenset()
        return group.listed | {user for user, number in self._primary.items() if number == group.number}

    def problem(self, name: str) -> str | None:
        if name in self._groups and self._groups[name] is None:
            return f"there is no Unix group {name}"
        return f"the Unix group {name} is not found any more; its last members count" if name in self._gone else None

    async def keep_up(self, names: Collection[str], users: Iterable[str] = ()) -> None:
        """Looks them up again now and then. Only those that are new are waited for, and not for long."""
        if not names:
            return
        wanted = {*users}
        for _ in range(2):  # one that is under way may be about others
            is_new = not (self._groups.keys() >= {*names} and self._primary.keys() >= wanted)
            now = asyncio.get_running_loop().time()
            if self._task is None and (is_new or now - self._looked_at > _EVERY_S):
                self._looked_at = now
                look = self._look(frozenset(names), wanted | self._primary.keys())
                self._task = asyncio.create_task(look, name="members of Unix groups")
            if not is_new or self._task is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_S):
                    await asyncio.shield(self._task)

    async def _look(self, names: frozenset[str], users: Collection[str]) -> None:
        try:
            groups, primary = await asyncio.to_thread(self._found, names, users)
            gone = frozenset(name for name, found in groups.items() if found is None and self._groups.get(name))
            for name in gone - self._gone:
                log.warning("quotas: the Unix group %s is not found any more: its last members count", name)
            for name in groups.keys() - self._groups.keys():
                if groups[name] is None:
                    log.warning("quotas: there is no Unix group %s on this machine", name)
            known = {name: found or self._groups.get(name) for name, found in groups.items()}
            own = {user: self._primary.get(user) if number is None else number for user, number in primary.items()}
            if (known, own, gone) != (self._groups, self._primary, self._gone):
                self._groups, self._primary, self._gone = known, own, gone
                self.version += 1
        finally:
            self._task = None

    def _found(
        self, names: frozenset[str], users: Collection[str]
    ) -> tuple[dict[str, UnixGroup | None], dict[str, int | None]]:
        """Blocks."""
        groups = {name: self._directory.group(name) for name in sorted(names)}
        return groups, {user: self._directory.primary_group(user) for user in sorted(users)}
