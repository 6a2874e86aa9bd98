"""Who the users of this agent are: the owner, and the members of the team's Unix group, each with a role."""

from __future__ import annotations

import grp
import os
import pwd
import time
from collections.abc import Callable

from ugro.agent.tracking.cluster import Cluster
from ugro.core.finding import Finding, Grade
from ugro.core.identity import ApiToken, Caller, Role, least

_KNOWN_S = 30.0  # how long a look into the user database holds: it may be far away
_MOST_NAMES = 1024
ROOT = 0


def _looked_up(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


class UserNames:
    """What user ids are called now: an account can go, and its id be another's."""

    def __init__(
        self, look: Callable[[int], str | None] = _looked_up, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look
        self._clock = clock
        self._known: dict[int, tuple[float, str | None]] = {}

    def of(self, uid: int) -> str | None:
        """None: nobody has it, or the user database does not answer, which looks the same."""
        until, name = self._known.get(uid, (float("-inf"), None))
        if until <= self._clock():
            name = self._look(uid)
            while len(self._known) >= _MOST_NAMES:
                del self._known[next(iter(self._known))]
            self._known[uid] = (self._clock() + _KNOWN_S, name)
        return name


NAMES = UserNames()


class Team:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.uid = os.geteuid()
        self.owner = user_name(self.uid)
        self._members: dict[tuple[str, str], tuple[float, bool]] = {}

    @property
    def group(self) -> str | None:
        return self._cluster.config.team.group

    def peer(self, uid: int, pid: int, *, is_of_team: bool) -> Caller | None:
        """Who is on the other end of a socket, as the kernel says; None: nobody that may use this agent.

        ``is_of_team``: of the team's socket, which the kernel lets only members of the group open.
        """
        shares = uid in (self.uid, ROOT)
        if not shares and not (is_of_team and self.group is not None):
            return None
        user = self.owner if uid == self.uid else NAMES.of(uid) or (str(uid) if shares else None)
        if user is None:  # roles are given to names: without one, default_role could be more than theirs
            return None
        role = Role.ADMIN if shares else self._role_of_member(user)
        via = f"pid {pid}" if uid == self.uid else f"pid {pid}, uid {uid}"
        return Caller(user, role, via, shares_account=shares, is_alone=shares and self.group is None)

    def token(self, token: ApiToken, address: str) -> Caller | None:
        """Never more than its user may do now. None: its user may not use this agent any more."""
        role = self.role_of(token.user)
        via = f"token {token.name}, {address}"
        return None if role is None else Caller(token.user, least(role, token.role), via, by_token=True)

    def browser(self, user: str, via: str) -> Caller | None:
        """A browser that was signed in by this user; empty: by the owner."""
        user = user or self.owner
        role = self.role_of(user)
        if role is None:
            return None
        is_owner = user == self.owner
        return Caller(user, role, via, shares_account=is_owner, is_alone=is_owner and self.group is None)

    def finding(self) -> Finding | None:
        """For the doctor: whether members have the owner's account, by a job on this machine."""
        local = [node.spec.name for node in self._cluster.inventory if node.spec.transport == "local"]
        if self.group is None or not local:
            return None
        text = f"jobs of all members run as {self.owner} on {', '.join(local)}: they can read the agent's state"
        return Finding("agent", "team", Grade.WARNING, text, "give the team's agent an account of its own")

    def role_of(self, user: str) -> Role | None:
        """None: neither the owner nor, now, a member of the group."""
        if user == self.owner or user == user_name(ROOT):
            return Role.ADMIN
        return self._role_of_member(user) if self.group is not None and self._is_member(user, self.group) else None

    def _role_of_member(self, user: str) -> Role:
        team = self._cluster.config.team
        return team.roles.get(user, team.default_role)

    def _is_member(self, user: str, group: str) -> bool:
        until, known = self._members.get((user, group), (0.0, False))
        if until > time.monotonic():
            return known
        found = is_member(user, group)
        self._members[user, group] = (time.monotonic() + _KNOWN_S, found)
        return found


def is_member(user: str, group: str) -> bool:
    try:
        found = grp.getgrnam(group)
        return user in found.gr_mem or pwd.getpwnam(user).pw_gid == found.gr_gid
    except (KeyError, OSError):
        return False


def user_name(uid: int) -> str:
    """For people."""
    return NAMES.of(uid) or str(uid)
