"""People's note about a job: a text and tags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ugro.kernel.support.errors import UsageError

MAX_TEXT = 20_000
MAX_TAGS = 32
_TAG = re.compile(r"[\w.:+@/=-]{1,64}")


@dataclass(frozen=True, slots=True)
class Note:
    job: int
    text: str = ""
    tags: tuple[str, ...] = ()
    changed_at: str | None = None  # None: no note yet


def checked_text(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise UsageError(
            f"the note is too long: {len(text):,} characters (limit {MAX_TEXT:,})",
            hint="keep long texts in a file among the job's outputs",
        )
    return text.strip()


def checked_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Without duplicates, in their order."""
    found = tuple(dict.fromkeys(tags))
    for tag in found:
        if not _TAG.fullmatch(tag):
            raise UsageError(f"{tag!r:.80} is not a tag", hint="up to 64 letters, digits and .:+@/=-_ without spaces")
    if len(found) > MAX_TAGS:
        raise UsageError(f"a job has at most {MAX_TAGS} tags", hint="put longer text into the note")
    return found
