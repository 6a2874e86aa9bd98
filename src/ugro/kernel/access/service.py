"""Answers who somebody is and what they may do: accounts of this machine, the team, tokens, and the audit log.

All tokens are in memory: a check asks no database.
"""

from __future__ import annotations

import asyncio
import grp
import hashlib
import logging
import os
import pwd
import secrets
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

from ugro.kernel.access.model import ApiToken, AuditEntry, Caller, Role, least
from ugro.kernel.access.operations import (
    LONGEST_S,
    AuditPage,
    CreatedToken,
    CreateToken,
    GetWhoami,
    ListAuditEntries,
    ListTokens,
    RevokedToken,
    RevokeToken,
    TokenList,
    Whoami,
)
from ugro.kernel.access.store import AuditStore, TokenStore
from ugro.kernel.agent.model import Finding, Grade
from ugro.kernel.config.section import is_label
from ugro.kernel.links.cluster import Cluster
from ugro.kernel.operations.request import answers
from ugro.kernel.support.errors import NotAllowed, NotFound, UgroError, UsageError

# --- this machine's user database -------------------------------------------------------------------------------------
# The user database says what a user id is called, and who is in a group.
#
# It may be far away and slow, so the agent's loop never asks it: threads do, one for each question that is open. An
# answer holds for a while and is asked for again before that is over. Without an answer in time, nobody is let in.


log = logging.getLogger(__name__)

KNOWN_S = 30.0  # how long an answer holds
ASKED_AGAIN_S = 15.0  # from then on it is asked for again; meanwhile the old answer stays
_WAIT_S = 5.0
_MOST_KNOWN = 1024
_MOST_OPEN = 16  # questions: each has a thread, which a database that hangs keeps

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lookups(Generic[K, V]):
    """``look`` blocks, and returns None for what is not known."""

    def __init__(
        self,
        look: Callable[[K], V | None],
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._look = look
        self._clock = clock
        self._wait_s = wait_s
        self._known: dict[K, tuple[float, V | None]] = {}  # since when; the oldest first
        self._open: dict[K, asyncio.Future[None]] = {}

    def known(self, key: K) -> V | None:
        """From what is known now, without asking."""
        since, value = self._known.get(key, (float("-inf"), None))
        return value if self._clock() - since < KNOWN_S else None

    async def of(self, key: K) -> V | None:
        """None: there is no such thing, or the database has not answered in time, which looks the same."""
        age_s = self._clock() - self._known.get(key, (float("-inf"), None))[0]
        if age_s < ASKED_AGAIN_S:
            return self.known(key)
        answer = self._open.get(key) or self._ask(key)
        if age_s >= KNOWN_S and answer is not None:
            try:
                async with asyncio.timeout(self._wait_s):
                    await asyncio.shield(answer)
            except TimeoutError:
                log.warning("the user database has not answered within %g s: %s", self._wait_s, key)
        return self.known(key)

    def _ask(self, key: K) -> asyncio.Future[None] | None:
        if len(self._open) >= _MOST_OPEN:
            return None
        loop = asyncio.get_running_loop()
        answer = self._open[key] = loop.create_future()
        # Not one of the loop's own threads: there are few, and one that hangs would be joined when the agent ends.
        asking = threading.Thread(target=self._in_thread, args=(key, loop), name=f"look up {key}", daemon=True)
        asking.start()
        return answer

    def _in_thread(self, key: K, loop: asyncio.AbstractEventLoop) -> None:
        value = self._look(key)
        with suppress(RuntimeError):  # the agent has ended
            loop.call_soon_threadsafe(self._answered, key, value)

    def _answered(self, key: K, value: V | None) -> None:
        self._known.pop(key, None)
        while len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = (self._clock(), value)
        answer = self._open.pop(key)
        if not answer.done():
            answer.set_result(None)


def user_name(uid: int) -> str | None:
    """Blocks."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def is_member(whose: tuple[str, str]) -> bool:
    """A user and a group. Blocks."""
    user, group = whose
    try:
        found = grp.getgrnam(group)
        return user in found.gr_mem or pwd.getpwnam(user).pw_gid == found.gr_gid
    except (KeyError, OSError):
        return False


# --- the audit log ----------------------------------------------------------------------------------------------------
# Collects entries of the audit log, and writes them together: no call waits for it.
#
# A crash loses the entries of the last half second. What is refused is recorded a few times a minute for each user, and
# counted beyond that, so that refusals cannot push out the rest. All strangers count as one user.


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

    @answers(ListAuditEntries)
    async def list_entries(self, asked: ListAuditEntries, caller: Caller) -> AuditPage:
        first = datetime.fromtimestamp(asked.since, UTC).isoformat(timespec="milliseconds")
        return AuditPage(tuple(await self.newest(asked.limit, first, asked.user)))

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


# --- the team ---------------------------------------------------------------------------------------------------------
# The users of this agent are the owner, and the members of the team's Unix group, each with a role.


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


# --- tokens -----------------------------------------------------------------------------------------------------------


PREFIX = "ugro_"  # by which leaked ones are found
_LISTED_S = 30 * 86400.0  # after its end
MOST_LISTED = 100  # of one user's that have ended
_NOTED_S = 60.0  # uses within this time are one


class Tokens:
    """``now``: the wall clock; a token ends at a date."""

    def __init__(self, store: TokenStore, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._store = store
        self._now = now
        self._known: dict[str, ApiToken] = {}
        self._used: dict[int, ApiToken] = {}  # which is not written yet
        self._is_used = asyncio.Event()

    async def load(self) -> None:
        self._known = dict(await self._store.all())
        await self._forget_old()

    async def _forget_old(self) -> None:
        """Those that ended long ago, and of each user the first of many: somebody may make and revoke them all day."""
        now = _text(self._now())
        oldest = _text(self._now() - timedelta(seconds=_LISTED_S))
        ended: dict[str, list[ApiToken]] = {}
        for token in self._known.values():
            if not token.is_valid(now):
                ended.setdefault(token.user, []).append(token)
        over = {one.id for own in ended.values() for one in own[: max(0, len(own) - MOST_LISTED)]}
        over |= {one.id for own in ended.values() for one in own if (one.revoked_at or one.expires_at) < oldest}
        if over:
            await self._store.remove(sorted(over))
            self._known = {digest: token for digest, token in self._known.items() if token.id not in over}

    @property
    def has_valid(self) -> bool:
        now = _text(self._now())
        return any(token.is_valid(now) for token in self._known.values())

    @answers(CreateToken)
    async def create_token(self, asked: CreateToken, caller: Caller) -> CreatedToken:
        return CreatedToken(*await self.create(caller, asked.role, asked.expires_s, asked.name))

    async def create(self, caller: Caller, role: Role, lifetime_s: float, name: str) -> tuple[ApiToken, str]:
        """The token's record, and the token itself, this once."""
        if not caller.role.covers(role):
            raise NotAllowed(
                f"you are {_article(caller.role)}: a token cannot be {_article(role)}",
                hint=f"choose a role that you have: ugro token create --role {caller.role}",
            )
        if not 0 < lifetime_s <= LONGEST_S:
            raise UsageError("a token lasts up to ten years", hint="for example: --expires 30d")
        name = name or f"token-{secrets.token_hex(3)}"
        if not is_label(name) or name.isdigit():
            raise UsageError(f"not a token's name: {name!r:.80}", hint="a word such as ci, without spaces")
        await self._forget_old()
        now = self._now()
        new = ApiToken(0, name, caller.user, role, _text(now), _text(now + timedelta(seconds=lifetime_s)))
        secret = PREFIX + secrets.token_urlsafe(32)
        made = await self._store.add(new, _digest(secret))
        self._known[_digest(secret)] = made
        return made, secret

    @answers(ListTokens)
    async def list_tokens(self, asked: ListTokens, caller: Caller) -> TokenList:
        return TokenList(tuple(self.listed(caller)))

    def listed(self, caller: Caller) -> list[ApiToken]:
        """An admin's list has everybody's."""
        tokens = self._known.values()
        return [one for one in tokens if one.user == caller.user or caller.role.covers(Role.ADMIN)]

    @answers(RevokeToken)
    async def revoke_token(self, asked: RevokeToken, caller: Caller) -> RevokedToken:
        return RevokedToken(await self.revoke(caller, asked.word))

    async def revoke(self, caller: Caller, word: str) -> ApiToken:
        """By number, or by name: one's own before another's, a valid one before others."""
        now = _text(self._now())
        found = [one for one in self.listed(caller) if word in (str(one.id), one.name)]
        if not found:
            raise NotFound(f"there is no token {word!r:.80}", hint="see: ugro token ls")
        token = max(found, key=lambda one: (str(one.id) == word, one.is_valid(now), one.user == caller.user, one.id))
        await self._store.revoke(token.id, now)
        return self._replaced(replace(token, revoked_at=token.revoked_at or now))

    def check(self, secret: str, address: str) -> ApiToken | None:
        """The token, if it is one and still valid. Its use is noted, and written later: no request waits for that."""
        token = self._known.get(_digest(secret)) if secret.startswith(PREFIX) else None
        now = self._now()
        if token is None or not token.is_valid(_text(now)):
            return None
        if token.last_used_by != address or (token.last_used_at or "") < _text(now - timedelta(seconds=_NOTED_S)):
            token = self._replaced(replace(token, last_used_at=_text(now), last_used_by=address))
            self._used[token.id] = token
            self._is_used.set()
        return token

    async def run(self) -> None:
        """Writes down which tokens were used."""
        while True:
            await self._is_used.wait()
            await self.flush()

    async def flush(self) -> None:
        self._is_used.clear()
        used, self._used = self._used, {}
        for token in used.values():
            try:
                await self._store.used(token.id, token.last_used_at or "", token.last_used_by)
            except UgroError as error:  # a full disk: the next use is noted
                log.warning("the use of token %s cannot be noted: %s", token.name, error)

    def is_valid(self, number: int) -> bool:
        now = _text(self._now())
        return any(token.id == number and token.is_valid(now) for token in self._known.values())

    def _replaced(self, token: ApiToken) -> ApiToken:
        digest = next(key for key, known in self._known.items() if known.id == token.id)
        self._known[digest] = token
        return token


def _digest(secret: str) -> str:
    """Tokens are long and random: a slow hash would protect nothing."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _text(moment: datetime) -> str:
    """All in UTC and of one length: they can be compared as texts."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")


def _article(role: Role) -> str:
    return f"an {role}" if role[0] in "ao" else f"a {role}"
