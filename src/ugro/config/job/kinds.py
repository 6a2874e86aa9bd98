"""What a value in a job file may be, where the cluster file has no such kind: its words for people, and its parser."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from ugro.config.kinds import BadValueError, Choice, Environment, Kind, ListOf, Text, is_label, is_line, is_node_name
from ugro.config.problems import nearest
from ugro.config.yamltext import shown
from ugro.core.failure import Cause
from ugro.core.job import ALL_GPUS
from ugro.core.support.quantity import format_duration, parse_duration, parse_size

PRIORITIES = {"urgent": 90, "normal": 50, "batch": 10}
MOST_NODES = 10_000
MOST_GPUS = 256  # the node program starts no more processes than that for one job
_LARGEST_ID = 2**63 - 1
# Linux passes no longer word to a program.
_LONGEST_WORD_BYTES = 128 * 1024 - 1


@dataclass(frozen=True, slots=True)
class Range:
    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class NodeCount(Kind):
    @property
    def expected(self) -> str:
        return "a number of nodes such as 3, or a range such as 2..4"

    def parse(self, value: object) -> Range:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.refuse(value)
        text = str(value) if isinstance(value, str) or 0 < value <= MOST_NODES else ""
        ends = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:\.\.\s*([0-9]{1,9})\s*)?", text)
        if ends is None:
            raise self._refuse_ends(value)
        low, high = int(ends[1]), int(ends[2] or ends[1])
        if low > high:
            raise BadValueError(f"the range {shown(value)} ends before it begins", hint=f"write it as {high}..{low}")
        if low < 1 or high > MOST_NODES:
            raise BadValueError(f"expected 1 to {MOST_NODES} nodes, got {shown(value)}")
        return Range(low, high)

    def _refuse_ends(self, value: object) -> BadValueError:
        is_open = isinstance(value, str) and (value.strip().endswith("..") or value.strip().startswith(".."))
        return self.refuse(value, hint="a range of nodes needs both ends: 2..4" if is_open else None)


class BalanceMode(Choice):
    def parse(self, value: object) -> str:
        """YAML reads a bare off as false."""
        return super().parse("off" if value is False else value)


@dataclass(frozen=True, slots=True)
class GpuCount(Kind):
    @property
    def expected(self) -> str:
        return f"a whole number from 0 to {MOST_GPUS}, or all"

    def parse(self, value: object) -> int:
        if value == "all":
            return ALL_GPUS
        is_number = isinstance(value, str) and re.fullmatch(r"[0-9]{1,3}", value)
        count = int(str(value)) if is_number else value
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_GPUS:
            raise self.refuse(value)
        return count


@dataclass(frozen=True, slots=True)
class Size(Kind):
    """A bare number is refused: nobody who writes ``memory: 32`` means 32 bytes."""

    @property
    def expected(self) -> str:
        return "a size with a unit, such as 8GB or 512MiB"

    def parse(self, value: object) -> int:
        size = _size(value)
        if size is None:
            raise self.refuse(value, hint=_unit_hint(value))
        return size


@dataclass(frozen=True, slots=True)
class CheckpointRule(Kind):
    @property
    def expected(self) -> str:
        return "all, none, best, or last N such as last 3"

    def parse(self, value: object) -> str:
        words = " ".join(value.split()) if isinstance(value, str) else ""
        if words not in ("all", "none", "best") and not re.fullmatch(r"last [1-9][0-9]{0,5}", words):
            raise self.refuse(value)
        return words


@dataclass(frozen=True, slots=True)
class LeastSize(Kind):
    """A range that is open above: 8GB and 8GB.. are the same."""

    @property
    def expected(self) -> str:
        return "a least size with a unit, such as 8GB or 8GB.."

    def parse(self, value: object) -> int:
        text = value.strip() if isinstance(value, str) else ""
        least, dots, most = text.partition("..")
        size = _size(least) if dots else _size(value)
        if dots and (size is not None or not least) and _size(most) is not None:
            hint = "only the least can be asked for, such as 8GB.."
            raise BadValueError(f"{shown(value)} has an upper end", hint=hint)
        if size is None or most:
            raise self.refuse(value, hint=_unit_hint(value))
        return size


@dataclass(frozen=True, slots=True)
class TimeSpan(Kind):
    longest_s: float
    may_be_zero: bool = False

    @property
    def expected(self) -> str:
        least = "from 0" if self.may_be_zero else "over 0 and"
        return f"a duration {least} up to {format_duration(self.longest_s)}, such as 90, 30m or 1h30m"

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


@dataclass(frozen=True, slots=True)
class Priority(Kind):
    @property
    def expected(self) -> str:
        return "urgent, normal, batch, or a whole number from 0 to 100"

    def parse(self, value: object) -> int:
        if isinstance(value, str) and value in PRIORITIES:
            return PRIORITIES[value]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
            raise self.refuse(value)
        return value

    def from_text(self, text: str) -> object:
        return int(text) if re.fullmatch(r"[0-9]{1,3}", text) else text


@dataclass(frozen=True, slots=True)
class Command(Kind):
    """A text is for a shell; a list is for no shell."""

    @property
    def expected(self) -> str:
        return "a list of words, or one text for sh -c"

    def parse(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return ("sh", "-c", SNIPPET.parse(value))
        if not isinstance(value, list | tuple):
            raise self.refuse(value)
        if not value:
            raise BadValueError("expected at least the program's name, got an empty list")
        words = _words(value)
        if not words[0]:
            raise BadValueError("expected the program's name, got an empty text", at=(0,))
        return words


@dataclass(frozen=True, slots=True)
class Arguments(Kind):
    @property
    def expected(self) -> str:
        return "a list of words, or one text that is split at its spaces"

    def parse(self, value: object) -> tuple[str, ...]:
        if isinstance(value, list | tuple):
            return _words(value)
        if not isinstance(value, str):
            raise self.refuse(value)
        try:
            return _words(shlex.split(value))
        except ValueError as error:
            # It may hold a secret, so it is not shown.
            raise BadValueError("a quote in it is not closed", hint="close it, or write a list of words") from error


@dataclass(frozen=True, slots=True)
class JobEnvironment(Kind):
    """A name without a value stands for one that comes from the submitter; "" is a value. No message shows one."""

    @property
    def expected(self) -> str:
        return "a map of names to texts"

    def parse(self, value: object) -> dict[str, str | None]:
        if not isinstance(value, dict):
            raise self.refuse(value)
        Environment().parse({name: "" if text is None else text for name, text in value.items()})
        return dict(value)


@dataclass(frozen=True, slots=True)
class Signal(Kind):
    """KILL is not among them: it leaves nothing to be graceful about, and ``grace: 0`` does the same."""

    @property
    def expected(self) -> str:
        return "TERM, INT, HUP, QUIT, USR1 or USR2"

    def parse(self, value: object) -> str:
        name = value.upper().removeprefix("SIG") if isinstance(value, str) else ""
        if name not in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2"):
            raise self.refuse(value, hint="to kill at once, give it a grace of 0" if name == "KILL" else None)
        return name


@dataclass(frozen=True, slots=True)
class FailureCause(Kind):
    @property
    def expected(self) -> str:
        return "a cause of failure such as node_lost or exit_code:3"

    def parse(self, value: object) -> str:
        if not isinstance(value, str):
            raise self.refuse(value)
        code = re.fullmatch(r"exit_code:([1-9][0-9]{0,2})", value)
        if value not in tuple(Cause) and not (code and int(code[1]) <= 255):
            near = nearest(value, tuple(Cause))
            raise self.refuse(value, hint=f"did you mean {near}?" if near else f"the causes are {', '.join(Cause)}")
        return value


@dataclass(frozen=True, slots=True)
class JobReference(Kind):
    """An id becomes a number. What a name stands for only the agent knows."""

    @property
    def expected(self) -> str:
        return "a job's id or name"

    def parse(self, value: object) -> int | str:
        is_number = isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value)
        job = int(str(value)) if is_number else value
        if isinstance(job, int) and not isinstance(job, bool) and 1 <= job <= _LARGEST_ID:
            return job
        if isinstance(job, str) and (is_job_name(job) or job == "last"):
            return job
        raise self.refuse(value)


@dataclass(frozen=True, slots=True)
class OneOrMore(Kind):
    """A single item may stand without its list."""

    many: ListOf

    @property
    def expected(self) -> str:
        return self.many.expected

    def parse(self, value: object) -> tuple[object, ...]:
        if isinstance(value, list | tuple):
            return self.many.parse(value)
        return (self.many.item.parse(value),)

    def from_text(self, text: str) -> object:
        return self.many.from_text(text)


def is_job_name(text: str) -> bool:
    """Not a number and not ``last``: where a job is named, those mean an id and the newest job."""
    return is_node_name(text) and not text.isdigit() and text != "last"


def is_snippet(text: str) -> bool:
    return bool(text.strip()) and _is_word(text)


def is_path_without_detour(text: str) -> bool:
    # A leading "-" would be an option to the program that is given the path.
    return is_line(text) and not text.startswith("-") and ".." not in text.split("/")


def is_path_on_node(text: str) -> bool:
    return is_line(text) and text.startswith(("/", "~"))


def is_path_inside(text: str) -> bool:
    return is_path_without_detour(text) and not text.startswith(("/", "~"))


def _size(value: object) -> int | None:
    """None for what is no size, has no unit, or is nothing."""
    if not isinstance(value, str) or not re.search(r"[A-Za-z]\s*$", value):
        return None
    try:
        return parse_size(value) or None
    except ValueError:
        return None


def _unit_hint(value: object) -> str | None:
    is_number = isinstance(value, int | float) or (isinstance(value, str) and value.strip().isdigit())
    return "say in which unit, such as 8GB" if is_number and not isinstance(value, bool) else None


def _words(value: list[object] | tuple[object, ...] | list[str]) -> tuple[str, ...]:
    words = []
    for index, word in enumerate(value):
        try:
            words.append(_WORD.parse(word))
        except BadValueError as error:
            raise BadValueError(error.message, hint=error.hint, at=(index,)) from error
    return tuple(words)


def _is_word(text: str) -> bool:
    # Bytes that are no UTF-8 come from a command line as lone surrogates, and go to the program as they came.
    try:
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return b"\0" not in encoded and len(encoded) <= _LONGEST_WORD_BYTES


_WORD = Text("words as texts that a program can be given", _is_word)
SNIPPET = Text("a text for a shell, of at most 128 KiB", is_snippet)
JOB_NAME = Text("a job's name: letters, digits and . _ -, at most 64, not a number and not last", is_job_name)
LABEL = Text("a word of at most 64 characters, without spaces or commas", is_label)
