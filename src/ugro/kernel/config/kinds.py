"""The kinds of values that the cluster file and job files have: each with its description and its parser.

Errors, reference pages, environment variables and command-line options all describe a value with the words of its kind.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from ugro.kernel.support.quantities import DURATION_EXAMPLES, format_duration, parse_duration, parse_size
from ugro.node import foreign

# --- values written as YAML -------------------------------------------------------------------------------------------
# Writes a value as YAML on one line, and quotes it for a message. It never reads YAML.


_LONGEST_SHOWN = 60


class Limits(NamedTuple):
    """How large a text may be, and how many values it may have, those that aliases repeat included."""

    bytes: int = 1 << 20
    values: int = 50_000


# Written without quotes only if every YAML parser reads it as a text.
_PLAIN = re.compile(r"[A-Za-z~/_.-][A-Za-z0-9~/_.+=-]*")
_NOT_TEXT = re.compile(r"~|null|true|false|yes|no|on|off|y|n|[-.]+|-?\.?[0-9].*|-?\.(?:inf|nan)", re.IGNORECASE)
_IPV4 = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}")


def flow(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        is_plain = _IPV4.fullmatch(value) or (_PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value))
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{flow(str(key))}: {flow(part)}' for key, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(flow(part) for part in value)}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 10**15:
        return f"{value:.0f}"
    return str(value)


def shown(value: object) -> str:
    """For "got …" in a message: safe for a terminal, and short."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a map"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return f'"{printable(value)}"'
    # A float keeps its point: "expected a whole number, got 22" would be confusing for 22.0.
    return printable(str(value) if isinstance(value, float) else flow(value))


def printable(text: str) -> str:
    return escaped(text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…")


def escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- kinds of values --------------------------------------------------------------------------------------------------


DAY_S = 86400.0
_LARGEST_NUMBER = 1_000_000
_MOST_ITEMS = 1_000  # of a list
_MOST_VARIABLES = 1_000
_LONGEST_VARIABLE_BYTES = 128 * 1024 - 1  # of name=value: Linux passes no longer one to a program


class BadValueError(ValueError):
    """A value that is not of its kind. ``at`` leads to the wrong part of it; ``more`` are errors found beside it."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        at: tuple[str | int, ...] = (),
        more: Iterable[BadValueError] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.at = at
        self.more = tuple(more)

    @property
    def all(self) -> tuple[BadValueError, ...]:
        return (self, *self.more)

    def within(self, *place: str | int, hint: str | None = None) -> BadValueError:
        """The same error seen from further out; ``hint`` is used where there is none."""
        more = [error.within(*place, hint=hint) for error in self.more]
        return BadValueError(self.message, hint=self.hint or hint, at=(*place, *self.at), more=more)


class Kind:
    expected: str  # so that "expected X, got Y" is a sentence
    metavar = "TEXT"  # what stands for the value in the help of a command
    choices: tuple[str, ...] = ()  # words among which a shell can complete

    def parse(self, value: object) -> Any:
        """The value in the form that the program uses; raises BadValueError."""
        raise NotImplementedError

    def from_text(self, text: str) -> object:
        """Text of an environment variable or an option, as a file would give it; ``parse`` checks the result."""
        return text

    def written(self, value: Any) -> object:
        """A parsed value, as a file would give it."""
        return value

    def described(self, value: Any) -> str:
        """A parsed value in the help of a command."""
        return flow(self.written(value))

    def refuse(self, value: object, *, hint: str | None = None) -> BadValueError:
        return BadValueError(f"expected {self.expected}, got {shown(value)}", hint=hint)


class OrNull(Kind):
    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.expected = kind.expected
        self.metavar = kind.metavar
        self.choices = kind.choices

    def parse(self, value: object) -> Any:
        return None if value is None else self.kind.parse(value)

    def from_text(self, text: str) -> object:
        return None if text.lower() == "null" else self.kind.from_text(text)

    def written(self, value: Any) -> object:
        return None if value is None else self.kind.written(value)

    def described(self, value: Any) -> str:
        return flow(None) if value is None else self.kind.described(value)


class Whole(Kind):
    """A whole number; some have a name."""

    def __init__(self, low: int, high: int, *, names: Mapping[str, int] | None = None) -> None:
        self.low = low
        self.high = high
        self.names = dict(names or {})
        words = "".join(f"{name}, " for name in self.names)
        self.expected = f"{words}{'or ' if words else ''}a whole number from {low} to {high}"
        self.metavar = "|".join(["N", *self.names])
        self.choices = tuple(self.names)

    def parse(self, value: object) -> int:
        if isinstance(value, str) and value in self.names:
            return self.names[value]
        # Where words are allowed, a number may be in quotes, too.
        is_quoted = isinstance(value, str) and self.names and re.fullmatch(r"[0-9]{1,18}", value)
        number = int(str(value)) if is_quoted else value
        if isinstance(number, bool) or not isinstance(number, int) or not self.low <= number <= self.high:
            raise self.refuse(value)
        return number

    def from_text(self, text: str) -> object:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text

    def written(self, value: int) -> object:
        return next((name for name, number in self.names.items() if number == value), value)


class Number(Kind):
    expected = f"a number from 0 to {_LARGEST_NUMBER}"
    metavar = "NUMBER"

    def parse(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(value)
        # Compared before it is converted: a whole number too large for a float must not raise OverflowError.
        if not 0 <= value <= _LARGEST_NUMBER:
            raise self.refuse(value)
        return float(value)

    def from_text(self, text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text


class Bool(Kind):
    expected = "true or false"

    def parse(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.refuse(value)
        return value

    def from_text(self, text: str) -> object:
        words = {"true": True, "yes": True, "on": True, "1": True}
        words |= {"false": False, "no": False, "off": False, "0": False}
        return words.get(text.lower(), text)


class Duration(Kind):
    metavar = "TIME"

    def __init__(self, longest_s: float = DAY_S, *, may_be_zero: bool = False) -> None:
        self.longest_s = longest_s
        self.may_be_zero = may_be_zero
        least = "from 0" if may_be_zero else "over 0 and"
        self.expected = f"a duration {least} up to {format_duration(longest_s)}, such as {DURATION_EXAMPLES}"

    def parse(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.refuse(value)
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            raise self.refuse(value) from error
        if seconds > self.longest_s or (seconds == 0 and not self.may_be_zero):
            raise self.refuse(value)
        return seconds

    def described(self, value: float) -> str:
        return f"{value:g}s" if value < 60 else format_duration(value)


class Size(Kind):
    """Bytes. A bare number is refused: ``memory: 32`` hardly means 32 bytes."""

    expected = "a size with a unit, such as 8GB or 512MiB"
    metavar = "SIZE"

    def parse(self, value: object) -> int:
        size = self.bytes_in(value)
        if size is None:
            raise self.refuse(value, hint=_unit_hint(value))
        return size

    def written(self, value: int) -> object:
        """With the largest unit that needs no fraction."""
        for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
            if value % size == 0:
                return f"{value // size}{unit}"
        return f"{value}B"

    def bytes_in(self, value: object) -> int | None:
        """None for no size, a size without a unit, and 0."""
        if not isinstance(value, str) or not re.search(r"[A-Za-z]\s*$", value):
            return None
        try:
            return parse_size(value) or None
        except ValueError:
            return None


class LeastSize(Size):
    """A range without an upper end: 8GB and 8GB.. are the same."""

    expected = "a least size with a unit, such as 8GB or 8GB.."

    def parse(self, value: object) -> int:
        text = value.strip() if isinstance(value, str) else ""
        least, dots, most = text.partition("..")
        size = self.bytes_in(least if dots else value)
        if dots and (size is not None or not least) and self.bytes_in(most) is not None:
            raise BadValueError(f"{shown(value)} has an upper end", hint="give only the least size, such as 8GB..")
        if size is None or most:
            raise self.refuse(value, hint=_unit_hint(value))
        return size


class ByteCount(Kind):
    """A size for which a bare number, also 0, is a number of bytes."""

    expected = "a size such as 500MB or 10GiB"
    metavar = "SIZE"

    def parse(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.refuse(value)
        try:
            return parse_size(value)
        except ValueError as error:
            raise self.refuse(value) from error

    def described(self, value: int) -> str:
        return str(Size().written(value)) if value else "0"


class Gigabytes(Kind):
    """A bare number is GB, as the key's name says; with a unit, the unit counts."""

    expected = "a number of GB such as 12, or a size such as 12GiB"
    metavar = "SIZE"

    def parse(self, value: object) -> float:
        gigabytes = self._gigabytes(value)
        if gigabytes is None or not 0 < gigabytes <= 10**6:
            raise self.refuse(value)
        return gigabytes

    def from_text(self, text: str) -> object:
        return float(text) if re.fullmatch(r"[0-9]{1,7}(\.[0-9]{1,9})?", text) else text

    def _gigabytes(self, value: object) -> float | None:
        if isinstance(value, str):
            try:
                # A bare number in quotes would be bytes to parse_size, and GB to the reader.
                return None if value.strip().isdigit() else parse_size(value) / 10**9
            except ValueError:
                return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        # Compared before it is converted, as above; a comparison with NaN is false.
        return float(value) if 0 < value <= 10**6 else None


class Choice(Kind):
    """One of some words, or of an enumeration's."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = {str(word): word for word in words}
        *first, last = self.words
        self.expected = f"{', '.join(first)} or {last}"
        self.metavar = "|".join(self.words)
        self.choices = tuple(self.words)

    def parse(self, value: object) -> str:
        if value is False and "off" in self.words:
            value = "off"  # YAML reads a bare off as false
        if not isinstance(value, str) or value not in self.words:
            raise self.refuse(value)
        return self.words[value]

    def written(self, value: str) -> object:
        return str(value)


class Text(Kind):
    def __init__(
        self, expected: str, is_valid: Callable[[str], bool], *, expands_home: bool = False, metavar: str = "TEXT"
    ) -> None:
        self.expected = expected
        self.is_valid = is_valid
        self.expands_home = expands_home
        self.metavar = metavar

    def parse(self, value: object) -> str:
        if isinstance(value, bool):
            # The file may also have yes, no, on or off.
            raise self.refuse(value, hint="put it in quotes")
        if isinstance(value, int | float):
            raise self.refuse(value, hint=f'put it in quotes: "{flow(value)}"')
        if not isinstance(value, str):
            raise self.refuse(value)
        text = os.path.expanduser(value) if self.expands_home else value
        if not self.is_valid(text):
            raise self.refuse(value)
        return text


class ListOf(Kind):
    def __init__(self, expected: str, item: Kind, *, may_be_single: bool = False, may_repeat: bool = False) -> None:
        self.expected = expected
        self.item = item
        self.may_be_single = may_be_single
        self.may_repeat = may_repeat
        self.metavar = item.metavar
        self.choices = item.choices

    def parse(self, value: object) -> tuple[Any, ...]:
        # A tuple comes from our own code and from defaults, a list from a file.
        if not isinstance(value, list | tuple):
            if not self.may_be_single:
                raise self.refuse(value)
            return (self.item.parse(value),)
        expect_at_most(_MOST_ITEMS, value, "items")
        items: list[Any] = []
        known: set[Any] = set()
        for index, part in enumerate(value):
            try:
                items.append(self.item.parse(part))
            except BadValueError as error:
                raise error.within(index) from error
            if items[-1] in known and not self.may_repeat:
                raise BadValueError(f"{shown(part)} is given twice", hint="remove one", at=(index,))
            known.add(items[-1])
        return tuple(items)

    def from_text(self, text: str) -> object:
        return [self.item.from_text(part.strip()) for part in text.split(",")]

    def written(self, value: Iterable[Any]) -> object:
        return [self.item.written(part) for part in value]


class MapOf(Kind):
    """Names to values; JSON in an environment variable."""

    def __init__(self, expected: str, name: Kind, item: Kind, *, most: int) -> None:
        self.expected = expected
        self.name = name
        self.item = item
        self.most = most

    def parse(self, value: object) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > self.most:
            raise self.refuse(value)
        found: dict[str, Any] = {}
        for name, part in value.items():
            word = self.name.parse(name)
            try:
                found[word] = self.item.parse(part)
            except BadValueError as error:
                raise error.within(word) from error
        return found

    def from_text(self, text: str) -> object:
        try:
            return foreign.parsed(text)
        except ValueError:
            return text


class Environment(Kind):
    """Values may be secrets, so no message shows one. Where a value may be missing, it comes from the submitter."""

    expected = "a map of names to texts"
    metavar = "NAME[=VALUE]"

    def __init__(self, *, may_lack_values: bool = False) -> None:
        self.may_lack_values = may_lack_values

    def parse(self, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refuse(value)
        expect_at_most(_MOST_VARIABLES, value, "variables")
        for name, text in value.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise BadValueError("expected names of letters, digits and _", hint="for example: CUDA_HOME")
            if text is None and self.may_lack_values:
                continue
            if not isinstance(text, str):
                raise BadValueError("expected a text", hint=f'put it in quotes: {name}: "…"', at=(name,))
            if _length(name) + 1 + _length(text) > _LONGEST_VARIABLE_BYTES:
                message = "expected at most 128 KiB: Linux passes no more; put it into a file that the program reads"
                raise BadValueError(message, at=(name,))
            if not is_encodable(text):
                raise BadValueError("expected a text without characters that no program can be given", at=(name,))
        return dict(value)


def expect_at_most(most: int, value: Collection[object], what: str) -> None:
    """Raises BadValueError before any of very many parts is looked at."""
    if len(value) > most:
        hint = "put them into a file that the program reads"
        raise BadValueError(f"expected at most {most} {what}, got {len(value)}", hint=hint)


def _length(text: str) -> int:
    return len(text) if len(text) > _LONGEST_VARIABLE_BYTES else len(text.encode("utf-8", "surrogatepass"))


def is_encodable(text: str) -> bool:
    """Whether a program can be given it."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _unit_hint(value: object) -> str | None:
    is_number = isinstance(value, int | float) or (isinstance(value, str) and value.strip().isdigit())
    return "say in which unit, such as 8GB" if is_number and not isinstance(value, bool) else None
