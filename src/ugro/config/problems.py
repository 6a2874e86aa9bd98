"""What is wrong in a configuration file, with its line; many become one error, in the order of their lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ugro.config.yamltext import printable
from ugro.core.errors import ConfigError

_MOST_SHOWN = 20
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    line: int
    key: str  # dotted; empty for the file as a whole
    message: str
    hint: str | None = None


def config_error(file: str, problems: Sequence[Problem]) -> ConfigError:
    first, *others = sorted(problems, key=lambda problem: problem.line)
    more = f" (and {len(others)} more)" if others else ""
    shown = [(_said(file, one), one.hint) for one in others[:_MOST_SHOWN]]
    return ConfigError(f"{_said(file, first)}{more}", hint=first.hint, others=shown)


def _said(file: str, problem: Problem) -> str:
    key = f"{problem.key}: " if problem.key else ""
    return f"{file}:{problem.line}: {key}{problem.message}"


def dotted(path: KeyPath) -> str:
    """Without the positions in lists: the line says which item is meant."""
    return ".".join(printable(part) for part in path if isinstance(part, str))


def nearest(word: str, known: Iterable[str]) -> str | None:
    import difflib  # only a mistake needs it

    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return found[0] if found else None
