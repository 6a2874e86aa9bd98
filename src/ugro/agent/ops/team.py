"""Who the users of this agent are: the owner, and the members of the team's Unix group, each with a role."""

from __future__ import annotations

import os

from ugro.agent.ops.accounts import Lookups, is_member, user_name
from ugro.agent.tracking.cluster import Cluster
from ugro.core.finding import Finding, Grade
from ugro.core.identity import ApiToken, Caller, Role, least
from ugro.kernel.access.operations import GetWhoami, Whoami
from ugro.kernel.operations.request import answers

ROOT = 0


class Team:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.uid = os.geteuid()
        # Once, before anybody asks: they get in also while the user database does not answer.
        self.owner = user_name(self.uid) or str(self.uid)
        self._root = user_name(ROOT) or str(ROOT)
        self.names: Lookups[int, str] = Lookups(user_name)
        self._members: Lookups[tuple[str, str], bool] = Lookups(is_member)

    @property
    def group(self) -> str | None:
        return self._cluster.config.team.group

    async def peer(self, uid: int, pid: int, *, is_of_team: bool) -> Caller | None:
        """Who is on the other end of a socket, as the kernel says; None: nobody that may use this agent.

        ``is_of_team``: of the team's socket, which the kernel lets only members of the group open.
        """
        shares = uid in (self.uid, ROOT)
        user = await self.names.of(uid) if not shares else self.owner if uid == self.uid else self._root
        if not shares and not (is_of_team and self.group is not None):
            return None
        if user is None:  # roles are given to names: without one, default_role could be more than theirs
            return None
        role = Role.ADMIN if shares else self._role_of_member(user)
        via = f"pid {pid}" if uid == self.uid else f"pid {pid}, uid {uid}"
        return Caller(user, role, via, shares_account=shares, is_alone=shares and self.group is None)

    @answers(GetWhoami)
    async def whoami(self, asked: GetWhoami, caller: Caller) -> Whoami:
        return Whoami(caller.user, caller.role, self.owner)

    async def token(self, token: ApiToken, address: str) -> Caller | None:
        """Never more than its user may do now. None: its user may not use this agent any more."""
        role = await self.role_of(token.user)
        via = f"token {token.name}, {address}"
        return None if role is None else Caller(token.user, least(role, token.role), via, by_token=True)

    async def browser(self, user: str, via: str) -> Caller | None:
        """A browser that was signed in by this user; empty: by the owner."""
        user = user or self.owner
        role = await self.role_of(user)
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

    async def role_of(self, user: str) -> Role | None:
        """None: neither the owner nor, now, a member of the group."""
        if user in (self.owner, self._root):
            return Role.ADMIN
        is_member = self.group is not None and await self._members.of((user, self.group))
        return self._role_of_member(user) if is_member else None

    def _role_of_member(self, user: str) -> Role:
        team = self._cluster.config.team
        return team.roles.get(user, team.default_role)
