"""The kinds of values that only job files have."""

from __future__ import annotations

import os.path
import re
import shlex
from dataclasses import dataclass

from ugro.config.job.bounds import MOST_BYTES, MOST_WORDS, USE_A_FILE
from ugro.config.kinds import BadValueError, Kind, expect_at_most
from ugro.config.names import SNIPPET, WORD, is_job_name, is_line
from ugro.config.problems import nearest
from ugro.config.yamltext import shown
from ugro.core.failure import Cause
from ugro.core.job import ALL_NODES
from ugro.core.support.quantity import format_size

MOST_NODES = 10_000
_LARGEST_ID = 2**63 - 1
_MOST_FOLDERS = 20


@dataclass(frozen=True)
class Range:
    low: int
    high: int

    def __str__(self) -> str:
        if self.low == ALL_NODES:
            return "all"
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


class NodeCount(Kind):
    expected = "a number of nodes such as 3, a range such as 2..4, or all"
    metavar = "N|N..M|all"
    choices = ("all",)

    def parse(self, value: object) -> Range:
        if isinstance(value, Range):
            return value
        if isinstance(value, str) and value.strip() == "all":
            return Range(ALL_NODES, ALL_NODES)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.refuse(value)
        text = str(value) if isinstance(value, str) or 0 < value <= MOST_NODES else ""
        ends = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:\.\.\s*([0-9]{1,9})\s*)?", text)
        if ends is None:
            raise self.refuse(value, hint=_node_count_hint(text.strip()))
        low, high = int(ends[1]), int(ends[2] or ends[1])
        if low > high:
            raise BadValueError(f"the range {shown(value)} ends before it begins", hint=f"write it as {high}..{low}")
        if low < 1 or high > MOST_NODES:
            raise BadValueError(f"expected 1 to {MOST_NODES} nodes, got {shown(value)}")
        return Range(low, high)

    def written(self, value: Range) -> object:
        return value.low if value.low == value.high != ALL_NODES else str(value)


def _node_count_hint(text: str) -> str | None:
    if text == "best":
        return "the best nodes are found before a job is submitted: ugro launch --nodes best"
    return "a range of nodes needs both ends: 2..4" if text.endswith("..") or text.startswith("..") else None


class FolderMap(Kind):
    """Names to paths on this machine; on a command line, texts such as ``model=~/models/x``."""

    expected = "a map of names to paths on this machine, such as {model: ~/models/x}"
    metavar = "NAME=PATH"

    def parse(self, value: object) -> dict[str, str]:
        if not isinstance(value, dict) or len(value) > _MOST_FOLDERS:
            raise self.refuse(value)
        found: dict[str, str] = {}
        for name, path in value.items():
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name):
                raise BadValueError("expected names of letters, digits and _", hint="for example: model")
            if not isinstance(path, str) or not path.strip() or not is_line(path):
                raise BadValueError(f"expected a path on this machine, got {shown(path)}", at=(name,))
            found[name] = os.path.expanduser(path)
        if len({name.upper() for name in found}) != len(found):
            raise BadValueError("two names differ in their case alone", hint="each is a variable in capitals")
        return found


class CheckpointRule(Kind):
    expected = "all, none, best, or last N such as last 3"
    metavar = "RULE"
    choices = ("all", "none", "best")

    def parse(self, value: object) -> str:
        words = " ".join(value.split()) if isinstance(value, str) else ""
        if words not in self.choices and not re.fullmatch(r"last [1-9][0-9]{0,5}", words):
            raise self.refuse(value)
        return words


class Command(Kind):
    """A text is run by a shell; a list is not."""

    expected = "a list of words, or one text for sh -c"

    def parse(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return ("sh", "-c", SNIPPET.parse(value))
        if not isinstance(value, list | tuple):
            raise self.refuse(value)
        expect_at_most(MOST_WORDS, value, "words")
        if not value:
            raise BadValueError("expected at least the program's name, got an empty list")
        words = _words(value)
        if not words[0]:
            raise BadValueError("expected the program's name, got an empty text", at=(0,))
        return words

    def written(self, value: tuple[str, ...]) -> object:
        return list(value)


class Arguments(Kind):
    expected = "a list of words, or one text that is split at its spaces"

    def parse(self, value: object) -> tuple[str, ...]:
        if isinstance(value, list | tuple):
            expect_at_most(MOST_WORDS, value, "words")
            return _words(value)
        if not isinstance(value, str):
            raise self.refuse(value)
        if len(value) > MOST_BYTES:  # before its quotes are looked for
            raise BadValueError(f"expected at most {format_size(MOST_BYTES)} of words", hint=USE_A_FILE)
        try:
            words = shlex.split(value)
            expect_at_most(MOST_WORDS, words, "words")
            return _words(words)
        except BadValueError:
            raise
        except ValueError as error:
            # It may hold a secret, so it is not shown.
            raise BadValueError("a quote in it is not closed", hint="close it, or write a list of words") from error

    def written(self, value: tuple[str, ...]) -> object:
        return list(value)


class Signal(Kind):
    """Without KILL, which leaves no time to stop: ``grace: 0`` does the same."""

    choices = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")
    expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
    metavar = "SIGNAL"

    def parse(self, value: object) -> str:
        name = value.upper().removeprefix("SIG") if isinstance(value, str) else ""
        if name not in self.choices:
            raise self.refuse(value, hint="to kill at once, use a grace of 0" if name == "KILL" else None)
        return name


class FailureCause(Kind):
    expected = "a cause of failure such as node_lost or exit_code:3"
    metavar = "CAUSE"
    choices = tuple(str(cause) for cause in Cause)

    def parse(self, value: object) -> str:
        if not isinstance(value, str):
            raise self.refuse(value)
        code = re.fullmatch(r"exit_code:([1-9][0-9]{0,2})", value)
        if value not in self.choices and not (code and int(code[1]) <= 255):
            near = nearest(value, self.choices)
            known = f"the causes are {', '.join(self.choices)}"
            raise self.refuse(value, hint=f"did you mean {near}?" if near else known)
        return value

    def written(self, value: str) -> object:
        return str(value)


class JobReference(Kind):
    """An id becomes a number; the agent finds the id of a name."""

    expected = "a job's id or name"
    metavar = "JOB"

    def parse(self, value: object) -> int | str:
        is_number = isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value)
        job = int(str(value)) if is_number else value
        if isinstance(job, int) and not isinstance(job, bool) and 1 <= job <= _LARGEST_ID:
            return job
        if isinstance(job, str) and (is_job_name(job) or job == "last"):
            return job
        raise self.refuse(value)


def _words(value: list[object] | tuple[object, ...] | list[str]) -> tuple[str, ...]:
    words = []
    for index, word in enumerate(value):
        try:
            words.append(WORD.parse(word))
        except BadValueError as error:
            raise error.within(index) from error
    return tuple(words)
