"""What is wrong in a configuration file, with its line; many become one error, the first by line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ugro.config.yamltext import printable
from ugro.core.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    line: int
    key: str  # dotted; empty for the file as a whole
    message: str
    hint: str | None = None


def config_error(file: str, problems: Sequence[Problem]) -> ConfigError:
    first = min(problems, key=lambda problem: problem.line)
    key = f"{first.key}: " if first.key else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ConfigError(f"{file}:{first.line}: {key}{first.message}{more}", hint=first.hint)


def dotted(path: KeyPath) -> str:
    """Without the positions in lists: the line says which item is meant."""
    return ".".join(printable(part) for part in path if isinstance(part, str))


def nearest(word: str, known: Iterable[str]) -> str | None:
    import difflib  # only a mistake needs it

    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return found[0] if found else None
