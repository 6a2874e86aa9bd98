"""What lets somebody in: links that work once, sessions of browsers, and the token of programs."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

LINK_LIFETIME_S = 600.0
COOKIE_LIFETIME_S = 30 * 86400
_CLOCK_S = 86400  # by how much this machine's clock may have been set back since
# Of one user: nobody signs others out, or uses up their links.
MOST_LINKS = 20
MOST_SESSIONS = 50


class Tokens:
    def __init__(self, path: Path) -> None:
        self._token = _load_or_create(path)
        self._links: dict[str, tuple[float, str]] = {}  # by word: until when it may be used, and whose it is
        self.sessions = Sessions(path.with_suffix(".sessions"), self._token)

    def link(self, now: float, user: str = "") -> str:
        """A word that lets one browser in, once, within ``LINK_LIFETIME_S``, as this user; empty: the agent's owner."""
        self._links = {word: one for word, one in self._links.items() if one[0] > now}
        for old in _oldest(self._links, user, MOST_LINKS):
            del self._links[old]
        word = secrets.token_urlsafe(24)
        self._links[word] = (now + LINK_LIFETIME_S, user)
        return word

    def take(self, word: str, now: float) -> str | None:
        """Whose it is; None if it lets nobody in."""
        until, user = self._links.pop(word, (0.0, ""))
        return user if until > now else None

    def is_bearer(self, value: str) -> bool:
        scheme, _, token = value.partition(" ")
        is_token = hmac.compare_digest(token.strip().encode(), self._token.encode())
        return is_token and scheme.lower() == "bearer"


class Sessions:
    """The browsers that are signed in, also after a restart. One that signs out is not in the file any more.

    The file has no cookies: a session's name there is made of its cookie and the token, so that it is of no use
    without either, and a new token ends all sessions.
    """

    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self._token = token
        self._known = _read(path)  # by name: until when, and whose; the oldest first

    def begin(self, now: float, user: str = "") -> str:
        """The cookie of a new session of this user; empty: of the agent's owner."""
        cookie = secrets.token_urlsafe(32)
        kept = {name: one for name, one in self._known.items() if one[0] > now}
        for old in _oldest(kept, user, MOST_SESSIONS):
            del kept[old]
        self._known = kept | {self._name(cookie): (now + COOKIE_LIFETIME_S, user)}
        try:
            self._write()
        except OSError as error:
            log.warning("a browser is signed in only until the agent stops: %s", error)
        return cookie

    def find(self, cookie: str, now: float) -> str | None:
        """The name of the session, if it goes on."""
        name = self._name(cookie)
        # One that ends later than any can was begun by a clock that was wrong.
        is_valid = now < self._known.get(name, (0.0, ""))[0] <= now + COOKIE_LIFETIME_S + _CLOCK_S
        return name if is_valid else None

    def user_of(self, name: str) -> str | None:
        """Whose the session is; empty: the agent's owner's; None: it has ended."""
        return self._known[name][1] if name in self._known else None

    def end(self, name: str) -> None:
        self._known.pop(name, None)
        try:
            self._write()
        except OSError as error:
            # The old file would bring the session back after a restart: rather everybody signs in again.
            log.warning("all browsers are signed out when the agent stops: %s", error)
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _name(self, cookie: str) -> str:
        return hmac.new(self._token.encode(), b"session " + cookie.encode("utf-8", "replace"), "sha256").hexdigest()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        _write_private(fresh, json.dumps(self._known))
        fresh.rename(self._path)


def _oldest(known: Mapping[str, tuple[float, str]], user: str, most: int) -> list[str]:
    """Those of this user that go, so that one more is no more than ``most``."""
    own = [name for name, (_, whose) in known.items() if whose == user]
    return own[: max(0, len(own) - most + 1)]


def _read(path: Path) -> dict[str, tuple[float, str]]:
    try:
        found = json.loads(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}  # nobody has signed in yet, or the file is not ours
    known = found.items() if isinstance(found, dict) else ()
    # A session without a user was begun before there were teams: by the owner.
    entries = [(name, one if isinstance(one, list) else [one, ""]) for name, one in known]
    return {name: (float(one[0]), str(one[1])) for name, one in entries if _is_entry(one)}


def _is_entry(one: list[object]) -> bool:
    return len(one) == 2 and isinstance(one[0], int | float) and isinstance(one[1], str)


def _load_or_create(path: Path) -> str:
    """The token, readable by its user alone. Deleting the file signs everybody out."""
    try:
        if token := path.read_text(encoding="ascii").strip():
            return token
    except (FileNotFoundError, UnicodeDecodeError):
        pass  # there is none yet, or it is not ours
    token = secrets.token_urlsafe(32)
    _write_private(path, token + "\n")
    return token


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
