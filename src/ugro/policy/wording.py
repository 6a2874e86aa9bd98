"""Parts of sentences that several policies share."""

from __future__ import annotations

from collections.abc import Sequence

# A sentence with more names is hard to read.
_MAX_NAMES = 4


def count_of(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def in_words(parts: Sequence[str], last: str = "and") -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"


def names(parts: Sequence[str]) -> str:
    """The first few, and how many more."""
    if len(parts) <= _MAX_NAMES:
        return in_words(parts) if parts else "nothing"
    shown = parts[: _MAX_NAMES - 1]
    return in_words([*shown, f"{len(parts) - len(shown)} more"])


def jobs(ids: Sequence[int]) -> str:
    return ("job " if len(ids) == 1 else "jobs ") + names([str(job) for job in ids])
