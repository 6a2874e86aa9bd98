"""What a value in the cluster file may be: its words for people, and its parser.

Each kind is put on a field with ``Annotated``, so that an error, the reference page and an environment
variable all speak of a value in the same words, and those are ours and not the library's.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ugro.config.yamltext import flow, shown
from ugro.core.support.quantity import DURATION_EXAMPLES, parse_duration, parse_size

LONGEST_DURATION_S = 86400.0
_LARGEST_WEIGHT = 1_000_000
# What OpenSSH refuses too: such names reach a shell through ProxyCommand and Match exec.
_SHELL_CHARACTERS = frozenset("'`\"$;&<>|(){}")


class BadValueError(ValueError):
    """A value that is not of its kind; ``at`` leads to the part of it that is wrong."""

    def __init__(self, message: str, *, hint: str | None = None, at: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.at = at


class Kind:
    @property
    def expected(self) -> str:
        """What is expected, so that "expected X, got Y" is a sentence."""
        raise NotImplementedError

    def parse(self, value: object) -> object:
        raise NotImplementedError

    def from_text(self, text: str) -> object:
        """An environment variable's text as the file would have given it; ``parse`` judges the result."""
        return text

    def refuse(self, value: object, *, hint: str | None = None) -> BadValueError:
        return BadValueError(f"expected {self.expected}, got {shown(value)}", hint=hint)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.parse)


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    low: int
    high: int

    @property
    def expected(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def parse(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise self.refuse(value)
        return value

    def from_text(self, text: str) -> object:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


@dataclass(frozen=True, slots=True)
class Weight(Kind):
    @property
    def expected(self) -> str:
        return f"a number from 0 to {_LARGEST_WEIGHT}"

    def parse(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(value)
        # Compared before it is converted: a whole number too large for a float must not raise OverflowError.
        if not 0 <= value <= _LARGEST_WEIGHT:
            raise self.refuse(value)
        return float(value)

    def from_text(self, text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    @property
    def expected(self) -> str:
        return "true or false"

    def parse(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.refuse(value)
        return value

    def from_text(self, text: str) -> object:
        words = {"true": True, "yes": True, "on": True, "1": True}
        words |= {"false": False, "no": False, "off": False, "0": False}
        return words.get(text.lower(), text)


@dataclass(frozen=True, slots=True)
class Duration(Kind):
    may_be_zero: bool = False

    @property
    def expected(self) -> str:
        least = "from 0" if self.may_be_zero else "over 0 and"
        return f"a duration {least} up to 1d, such as {DURATION_EXAMPLES}"

    def parse(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.refuse(value)
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            raise self.refuse(value) from error
        if seconds > LONGEST_DURATION_S or (seconds == 0 and not self.may_be_zero):
            raise self.refuse(value)
        return seconds


@dataclass(frozen=True, slots=True)
class Gigabytes(Kind):
    """A bare number is GB, since the key says so; with a unit, the unit counts."""

    @property
    def expected(self) -> str:
        return "a number of GB such as 12, or a size such as 12GiB"

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
                # A bare number in quotes would be bytes to parse_size, and GB to who wrote it.
                return None if value.strip().isdigit() else parse_size(value) / 10**9
            except ValueError:
                return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        # Compared before it is converted, as above; a comparison with NaN is false.
        return float(value) if 0 < value <= 10**6 else None


@dataclass(frozen=True, slots=True)
class Bytes(Kind):
    @property
    def expected(self) -> str:
        return "a size such as 500MB or 10GiB"

    def parse(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.refuse(value)
        try:
            return parse_size(value)
        except ValueError as error:
            raise self.refuse(value) from error


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"{', '.join(self.words[:-1])} or {self.words[-1]}"

    def parse(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise self.refuse(value)
        return value


@dataclass(frozen=True, slots=True)
class Text(Kind):
    words: str
    is_good: Callable[[str], bool] = field(repr=False)
    expands_home: bool = False

    @property
    def expected(self) -> str:
        return self.words

    def parse(self, value: object) -> str:
        if isinstance(value, bool):
            # What the file has may also be yes, no, on or off.
            raise self.refuse(value, hint="put it in quotes")
        if isinstance(value, int | float):
            raise self.refuse(value, hint=f'put it in quotes: "{flow(value)}"')
        if not isinstance(value, str):
            raise self.refuse(value)
        text = os.path.expanduser(value) if self.expands_home else value
        if not self.is_good(text):
            raise self.refuse(value)
        return text


@dataclass(frozen=True, slots=True)
class ListOf(Kind):
    words: str
    item: Kind

    @property
    def expected(self) -> str:
        return self.words

    def parse(self, value: object) -> tuple[object, ...]:
        # A tuple comes from our own code and from defaults, a list from a file.
        if not isinstance(value, list | tuple):
            raise self.refuse(value)
        items: dict[object, None] = {}
        for index, part in enumerate(value):
            try:
                item = self.item.parse(part)
            except BadValueError as error:
                raise BadValueError(error.message, hint=error.hint, at=(index,)) from error
            if item in items:
                raise BadValueError(f"{shown(part)} is given twice", hint="remove one", at=(index,))
            items[item] = None
        return tuple(items)

    def from_text(self, text: str) -> object:
        return [self.item.from_text(part.strip()) for part in text.split(",")]


@dataclass(frozen=True, slots=True)
class Transport(Kind):
    @property
    def expected(self) -> str:
        return "ssh, local, or a command as a list of words"

    def parse(self, value: object) -> str | tuple[str, ...]:
        if isinstance(value, str) and value in ("ssh", "local"):
            return value
        if not isinstance(value, list | tuple) or not value:
            raise self.refuse(value, hint="a command is a list: transport: [docker, exec, -i, NAME]")
        words = tuple(_WORD_OF_COMMAND.parse(word) for word in value)
        if words[0].startswith("-"):
            raise self.refuse(words[0], hint="a command begins with its program")
        return words


@dataclass(frozen=True, slots=True)
class Environment(Kind):
    """Values may be secrets, so no message shows one."""

    @property
    def expected(self) -> str:
        return "a map of names to texts"

    def parse(self, value: object) -> dict[str, str]:
        if not isinstance(value, dict):
            raise self.refuse(value)
        for name, text in value.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise BadValueError("expected names of letters, digits and _", hint="for example: CUDA_HOME")
            if not isinstance(text, str):
                raise BadValueError("expected a text", hint=f'put it in quotes: {name}: "…"', at=(name,))
            if not _survives_encoding(text):
                raise BadValueError("expected a text without characters that no program can be given", at=(name,))
        return dict(value)


@dataclass(frozen=True, slots=True)
class OrNull(Kind):
    kind: Kind

    @property
    def expected(self) -> str:
        return self.kind.expected

    def parse(self, value: object) -> object:
        return None if value is None else self.kind.parse(value)

    def from_text(self, text: str) -> object:
        return None if text.lower() == "null" else self.kind.from_text(text)


def is_node_name(text: str) -> bool:
    return len(text) <= 64 and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None


def is_host(text: str) -> bool:
    return _is_ssh_word(text) and not set("@/\\,") & set(text)


def is_user(text: str) -> bool:
    return _is_ssh_word(text) and not set("/,") & set(text) and not text.endswith("\\")


def is_label(text: str) -> bool:
    return 0 < len(text) <= 64 and text.isprintable() and not set(" ,") & set(text) and text[0] not in "-@"


def is_line(text: str) -> bool:
    return 0 < len(text) <= 1024 and text.isprintable() and text == text.strip()


def is_program(text: str) -> bool:
    return is_line(text) and not text.startswith("-")


def is_local_path(text: str) -> bool:
    """With the home directory put in. Not a relative one: the agent works elsewhere than its user."""
    return is_line(text) and text.startswith("/")


def is_directory_on_node(text: str) -> bool:
    """A directory below something: all of / or of a home directory is not UGRO's to keep files in."""
    inside = re.fullmatch(r"(?:~[^/]*)?/+(.*)", text)
    parts = [part for part in inside[1].split("/") if part not in ("", ".")] if inside else []
    return is_line(text) and bool(parts) and ".." not in parts


def _is_ssh_word(text: str) -> bool:
    # A leading "-" would be an option to ssh.
    is_word = 0 < len(text) <= 255 and text.isprintable() and " " not in text and text[0] != "-"
    return is_word and not _SHELL_CHARACTERS & set(text)


def _survives_encoding(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


_WORD_OF_COMMAND = Text(
    "a command's words as texts", lambda text: bool(text) and len(text) <= 4096 and _survives_encoding(text)
)
NODE_NAME = Text("a node's name: letters, digits and . _ -, at most 64", is_node_name)
