"""Tokens of programs: made, checked, listed and revoked. All of them are in memory: a check asks no database."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from ugro.config.names import is_label
from ugro.core.errors import NotAllowed, NotFound, UgroError, UsageError
from ugro.core.identity import ApiToken, Caller, Role
from ugro.kernel.access.operations import (
    LONGEST_S,
    CreatedToken,
    CreateToken,
    ListTokens,
    RevokedToken,
    RevokeToken,
    TokenList,
)
from ugro.kernel.operations.request import answers
from ugro.store.tokens import TokenStore

log = logging.getLogger(__name__)

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
