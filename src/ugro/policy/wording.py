"""Parts of sentences that several policies share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# A sentence with more names is hard to read.
_MAX_NAMES = 4
_JOBS = re.compile(r"\bjobs? (?P<ids>\d+(?:, \d+)*(?: and \d+\b(?! more))?)(?: and (?P<more>\d+ more))?")
PRIVATE_JOB = "a private job"


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


def without_numbers(text: str, is_hidden: Callable[[int], bool]) -> str:
    """The same, for somebody who must not know of some of the jobs that it names."""
    return _JOBS.sub(lambda found: _without_numbers(found, is_hidden), text)


def _without_numbers(found: re.Match[str], is_hidden: Callable[[int], bool]) -> str:
    ids = [int(one) for one in re.findall(r"\d+", found["ids"])]
    shown = [str(one) for one in ids if not is_hidden(one)]
    if len(shown) == len(ids):
        return found[0]
    more = [found["more"]] if found["more"] else []
    private = PRIVATE_JOB if len(shown) + 1 == len(ids) else f"{len(ids) - len(shown)} private jobs"
    if not shown:
        return in_words([private, *more])
    return f"{'job' if len([*shown, *more]) == 1 else 'jobs'} {in_words([*shown, *more, private])}"
