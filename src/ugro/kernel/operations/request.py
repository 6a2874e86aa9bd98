"""The declaration of an operation: one class says all that both ends of the API have to know of it.

Route, role, what the audit log calls it, its fields and its answer. The agent's routes, the checks of roles, the audit
log, the description of the API (OpenAPI) and the client's call follow from it. Importing this loads no web framework:
commands do it.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin, overload
from urllib.parse import quote

from ugro.kernel.access.model import Caller, Role
from ugro.kernel.support.codec import decode
from ugro.kernel.support.errors import NotFound

CALLER = "ugro.caller"  # in the scope of an HTTP request: who asks; None is a stranger
ABOUT = "ugro.about"  # in its scope: a list for what it was about, for the audit log
A = TypeVar("A")
T = TypeVar("T")
ANSWERS = "_answers"  # an attribute of a method: which request it answers
_PLACES = re.compile(r"\{(\w+)(?::path)?\}")
_BODIES = ("POST", "PUT", "PATCH")
# What the things below a path are called, and the command that lists them.
_KINDS = {
    "environments": ("environment", "ugro env ls"),
    "hooks": ("hook", "ugro hooks ls"),
    "jobs": ("job", "ugro status"),
    "nodes": ("node", "ugro node ls"),
    "ray-clusters": ("Ray cluster", "ugro cluster status --all"),
    "services": ("service", "ugro serve ls"),
    "sweeps": ("sweep", "ugro sweep ls"),
    "tokens": ("token", "ugro token ls"),
}


_Method = Callable[[Any, Any, Caller], Awaitable[A]]


class Kind(StrEnum):
    """What a path names."""

    JOB = "job"
    SWEEP = "sweep"
    SERVICE = "service"
    RAY_CLUSTER = "Ray cluster"


class Lines(Generic[T]):
    """The answer of an operation that streams: one document per line, each a ``T``."""


class Raw:
    """The answer of an operation that is bytes of another media type: a response, or a generator of its pieces."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Nothing was done: send the request again with the values of these variables in ``env``."""

    needs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Between:
    """A bound of a number, or of the length of a text: ``Annotated[float, Between(0, 600)]``."""

    least: float | None = None
    most: float | None = None
    above: float | None = None  # exclusive, unlike ``least``

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        schema = handler(source)
        if schema["type"] in ("str", "list", "tuple"):
            # The first mistake is enough: of a few MiB that are all wrong, each would be described.
            first = {} if schema["type"] == "str" else {"fail_fast": True}
            bounds = {"min_length": self.least, "max_length": self.most, **first}
        else:
            bounds = {"ge": self.least, "le": self.most, "gt": self.above}
        known = {name: bound for name, bound in bounds.items() if bound is not None}
        assert known, f"{self} bounds nothing of {source}"
        made: core_schema.CoreSchema = {**schema, **known}
        return made


@dataclass(frozen=True, slots=True)
class Operation:
    """What a request class says of itself."""

    method: str
    path: str  # with places for fields, such as /v1/tokens/{word}
    role: Role
    answer: Any  # a dataclass; ``Lines[…]``; ``Raw``; None: nothing
    audit: str | None  # what the audit log calls it, with fields in braces; None: it changes nothing
    of: Kind | None = None  # the path names one of these, which may be private
    is_own: bool = False  # only its user may do this, or an operator
    needs_files: bool = False  # the agent reads or writes files of this machine that the request names
    for_people: bool = False  # not for tokens: it makes another way in
    ends_with_client: bool = False  # the work is given up if the client leaves before the answer
    without_store: bool = False  # answered also while the agent's database is away
    in_browser: bool = False  # pages of the dashboard ask this, too
    in_query: bool = False  # the fields are in the address, whatever the method
    in_headers: tuple[str, ...] = ()  # fields that commands tell of themselves: ugro_settings is ugro-settings
    is_large: bool = False  # its answer takes long to write: others are answered meanwhile
    repeatable: bool = False  # asked twice, it is done once: it has a key, or says how things are to be
    media: str = "application/json"

    @property
    def route(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def places(self) -> tuple[str, ...]:
        """The fields that are part of the path."""
        return tuple(_PLACES.findall(self.path))

    def values_in(self, path: str) -> dict[str, str] | None:
        """Returns the fields that an address has in its places; None if the address is another operation's."""
        found = _pattern(self.path).fullmatch(path)
        return found.groupdict() if found else None

    @property
    def has_body(self) -> bool:
        return self.method in _BODIES and not self.in_query

    @property
    def can_repeat(self) -> bool:
        """The client asks again if the agent ends before it answers."""
        return self.repeatable or self.method == "GET"

    @property
    def line(self) -> Any:
        """The type of each line of a streamed answer; None: the answer is no stream of lines."""
        return get_args(self.answer)[0] if get_origin(self.answer) is Lines else None


class Request(Generic[A]):
    """Subclasses are frozen dataclasses, whose fields are what is asked::

    @dataclass(frozen=True, slots=True)
    class CancelJob(Request[Cancelled], route="POST /v1/jobs/{word}/cancel", role=Role.USER, audit="cancel {word}"):
        \"""Stops a job, and all its processes.\"""

        word: str
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}
    operation: ClassVar[Operation]

    def __init_subclass__(
        cls, *, route: str = "", role: Role = Role.VIEWER, audit: str | None = None, **more: Any
    ) -> None:
        super().__init_subclass__()
        if not route:  # a dataclass with slots is made a second time, without these words
            return
        method, _, path = route.partition(" ")
        answer = next(get_args(base)[0] for base in cls.__orig_bases__ if get_origin(base) is Request)  # type: ignore[attr-defined]
        answer = None if answer is type(None) else answer
        cls.operation = Operation(method, path, role, answer, audit, **more)

    def about(self, answer: Any) -> str | None:
        """What the audit log says it was about, once it is done; None: as ``audit`` says it; "": it did nothing."""
        return None

    def read(self, answer: Any) -> A:
        """Returns the answer as a value, from its JSON."""
        found: Any = None if self.operation.answer is None else decode(self.operation.answer, answer)
        value: A = found
        return value

    # --- on the wire ------------------------------------------------------------------------------------------------

    def to_wire(self) -> tuple[str, str, dict[str, Any] | None]:
        """Returns its method, address and body; fields that are headers are sent apart.

        Raises NotFound for a word that would lead to another address.
        """
        operation = self.operation
        names = [one.name for one in fields(self) if one.name not in operation.in_headers]  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in names}
        kind = operation.path.split("/")[2]

        def word(place: re.Match[str]) -> str:
            value = values.pop(place[1])
            return _quoted(str(value)) if place[0].endswith(":path}") else part_of(kind, value)

        address = _PLACES.sub(word, operation.path)
        if operation.has_body:
            return operation.method, address, {name: _plain(value) for name, value in values.items()}
        query = "&".join(f"{name}={_quoted(word)}" for name, value in values.items() for word in _words(value))
        return operation.method, f"{address}?{query}" if query else address, None


def part_of(kind: str, word: str | int) -> str:
    """Returns a word as the part of an address below /v1/KIND. Raises NotFound if it would lead elsewhere."""
    text = str(word)
    if text in ("", ".", "..") or "/" in text:
        what, lists = _KINDS.get(kind, ("such thing:", ""))
        raise NotFound(f"there is no {what} {text!r:.80}", hint=f"see: {lists}" if lists else None)
    return _quoted(text)


@cache
def _pattern(path: str) -> re.Pattern[str]:
    """Linear: each place ends at the next slash, and one that may have slashes at the end."""
    parts = re.split(r"\{(\w+)(:path)?\}", path)
    text = re.escape(parts[0])
    for name, is_rest, after in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        text += f"(?P<{name}>{'.+' if is_rest else '[^/]+'}){re.escape(after)}"
    return re.compile(text)


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it: in maps and lists, which a client can look through."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return os.fspath(value)


def operation_name(kind: type[Request[Any]]) -> str:
    """``create_token`` of CreateToken: clients that are generated have a function of this name."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogateescape")  # arguments of a command need not be valid UTF-8


def _words(value: Any) -> Iterator[str]:
    """The values that an address has for a field: none for None, several for a tuple."""
    if value is None:
        return
    for one in value if isinstance(value, tuple) else (value,):
        yield str(one).lower() if isinstance(one, bool) else str(one)


# --- who answers ---------------------------------------------------------------------------------------------------


@overload
def answers(  # type: ignore[overload-overlap]  # lines are answered by a generator of them
    kind: type[Request[Lines[T]]],
) -> Callable[[_Method[AsyncGenerator[list[T]]]], Any]: ...
@overload
def answers(kind: type[Request[Raw]]) -> Callable[[_Method[Any]], Any]: ...
@overload
def answers(kind: type[Request[A]]) -> Callable[[_Method[A]], Any]: ...
def answers(kind: type[Request[Any]]) -> Callable[[_Method[Any]], Any]:
    """Marks the method of a service that answers this request: ``async def f(self, asked, caller)``.

    One that answers lines returns a generator of batches; what it raises before that is an ordinary error.
    """

    def mark(method: _Method[Any]) -> Any:
        setattr(method, ANSWERS, kind)
        return method

    return mark
