"""The files of a client on another machine, as far as it has sent them for a request.

A path in a request means the client's machine. The agent never looks for it on its own disk: what it needs of such a
path it asks for (``Wanted``), and the client sends it and asks again.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ugro.core.errors import ConfigError, NotAllowed, UsageError, Wanted

HEADER = "ugro-remote"  # of every request: a key for what it has sent, and the name of its machine
TEXT, HASH, PLACE, CODE, FOLDER = "text", "hash", "place", "code", "folder"
KINDS = frozenset({TEXT, HASH, PLACE, CODE, FOLDER})
_VALUE = re.compile(r"([0-9A-Za-z-]{1,64}) ([0-9A-Za-z._-]{1,64})")
_MOST_OFFERS = 200
_MOST_ITEMS = 2000  # of one request
_MOST_BYTES = 64 << 20  # of all texts together

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
    _items: dict[tuple[str, str], Item] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of texts, about."""
        return sum(len(item.value) for item in self._items.values() if isinstance(item.value, str))

    def add(self, item: Item) -> None:
        if len(self._items) >= _MOST_ITEMS:
            raise UsageError(f"more than {_MOST_ITEMS} files for one request")
        self._items[item.what, item.path] = item

    def forget(self, what: str, path: str) -> None:
        self._items.pop((what, path), None)

    def text(self, path: str) -> str:
        return str(self._value(TEXT, path))

    def digest(self, path: str) -> str:
        return str(self._value(HASH, path))

    def why_left_alone(self, path: str) -> str | None:
        found = self._value(PLACE, path)
        return None if found is None else str(found)

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
    """The newest ones; an older one is asked for again."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Offer] = OrderedDict()

    def of(self, header: str) -> Offer:
        """Raises UsageError for a header that is none of ours."""
        if (found := _VALUE.fullmatch(header)) is None:
            raise UsageError(f"invalid header {HEADER}")
        key, machine = found.groups()
        offer = self._known.setdefault(key, Offer(key, machine))
        self._known.move_to_end(key)
        while len(self._known) > 1 and (len(self._known) > _MOST_OFFERS or self._size > _MOST_BYTES):
            self._known.popitem(last=False)
        return offer

    @property
    def _size(self) -> int:
        return sum(one.size for one in self._known.values())


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
