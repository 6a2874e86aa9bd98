"""The files of a client on another machine, as far as it has sent them for a request.

A path in a request means the client's machine. The agent never looks for it on its own disk: what it needs of such a
path it asks for (``Wanted``), and the client sends it and asks again.
"""

from __future__ import annotations

import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ugro.kernel.support.errors import ConfigError, NotAllowed, UsageError, Wanted

HEADER = "ugro-remote"  # of every request: a key for what it has sent, and the name of its machine
TEXT, HASH, PLACE, SCRIPT, CODE, FOLDER = "text", "hash", "place", "script", "code", "folder"
KINDS = frozenset({TEXT, HASH, PLACE, SCRIPT, CODE, FOLDER})
_VALUE = re.compile(r"([0-9A-Za-z-]{1,64}) ([0-9A-Za-z._-]{1,64})")
_MOST_ITEMS = 2000  # of one request
# In memory. A text of 1 MiB takes up to four times as much.
_MOST_OF_AN_ITEM = 5 << 20
_MOST_OF_AN_OFFER = 16 << 20
_MOST_OFFERS = 200  # of one user
_MOST_OF_A_USER = 32 << 20
_MOST_OF_ALL = 128 << 20

_client: ContextVar[Offer | None] = ContextVar("client", default=None)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that was sent; or why it could not be."""

    what: str
    path: str
    value: Any = None
    problem: str | None = None


@dataclass(slots=True)
class Offer:
    """What was sent for one request. ``machine``: the client's."""

    key: str
    machine: str
    user: str = ""
    _items: dict[tuple[str, str], Item] = field(default_factory=dict)
    _sizes: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        return sum(self._sizes.values())

    def add(self, item: Item) -> None:
        """Raises UsageError for more than one request may send."""
        key, size = (item.what, item.path), _size_of(item)
        if size > _MOST_OF_AN_ITEM:
            raise UsageError(f"{item.path[:200]}: too large to take: {size} bytes (limit {_MOST_OF_AN_ITEM})")
        if len(self._items) >= _MOST_ITEMS:
            raise UsageError(f"more than {_MOST_ITEMS} files for one request")
        if self.size - self._sizes.get(key, 0) + size > _MOST_OF_AN_OFFER:
            raise UsageError(f"the files of one request are too large: more than {_MOST_OF_AN_OFFER >> 20} MiB")
        self._items[key], self._sizes[key] = item, size

    def forget(self, what: str, path: str) -> None:
        self._items.pop((what, path), None)
        self._sizes.pop((what, path), None)

    def text(self, path: str) -> str:
        return str(self._value(TEXT, path))

    def digest(self, path: str) -> str:
        return str(self._value(HASH, path))

    def why_left_alone(self, path: str) -> str | None:
        found = self._value(PLACE, path)
        return None if found is None else str(found)

    def script(self, path: str, params: Mapping[str, Any]) -> Any:
        return self._value(SCRIPT, path, params)

    def code(self, path: str, params: Mapping[str, Any]) -> Any:
        return self._value(CODE, path, params)

    def folder(self, path: str, params: Mapping[str, Any]) -> Any:
        return self._value(FOLDER, path, params)

    def _value(self, what: str, path: str, params: Mapping[str, Any] | None = None) -> Any:
        found = self._items.get((what, path))
        if found is None:
            # With our home folder, into which a ~ may have been expanded: the client means its own.
            raise Wanted(what, path, {**(params or {}), "home": os.path.expanduser("~")})
        if found.problem is not None:
            raise ConfigError(found.problem, hint="name a file or folder of the machine where you submit")
        return found.value


class Offers:
    """The newest ones of each user; an older one is asked for again. Nobody's push out those of others."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[str, Offer]] = {}

    def of(self, header: str, user: str) -> Offer:
        """Kept only once something was sent for it. Raises UsageError for a header that is none of ours."""
        if (found := _VALUE.fullmatch(header)) is None:
            raise UsageError(f"invalid header {HEADER}")
        key, machine = found.groups()
        kept = self._known.get(user)
        return (kept and kept.get(key)) or Offer(key, machine, user)

    def keep(self, offer: Offer) -> None:
        """For the request that follows. A route calls this, so that only those who may submit have any."""
        own = self._known.setdefault(offer.user, OrderedDict())
        own[offer.key] = offer
        own.move_to_end(offer.key)
        while len(own) > _MOST_OFFERS or _size(own) > _MOST_OF_A_USER:
            own.popitem(last=False)
        while sum(map(_size, self._known.values())) > _MOST_OF_ALL:
            max(self._known.values(), key=_size).popitem(last=False)


def _size(offers: Mapping[str, Offer]) -> int:
    return sum(one.size for one in offers.values())


def _size_of(item: Item) -> int:
    """In memory. Not by recursion: how deep it goes is the client's choice."""
    todo: list[Any] = [item.path, item.value, item.problem]
    size = 0
    while todo:
        one = todo.pop()
        size += sys.getsizeof(one)
        if isinstance(one, Mapping):
            todo += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            todo += one
    return size


@contextmanager
def serving(offer: Offer) -> Iterator[None]:
    """For all that is done meanwhile, the client is on another machine."""
    token = _client.set(offer)
    try:
        yield
    finally:
        _client.reset(token)


def remote_client() -> Offer | None:
    """None: the client is on this machine, and its paths are ours."""
    return _client.get()


def expect_local(what: str, hint: str) -> None:
    """Raises NotAllowed if the client is on another machine: ``what`` names a path, and is not sent."""
    if remote_client() is not None:
        raise NotAllowed(f"{what} cannot be used from another machine", hint=hint)
