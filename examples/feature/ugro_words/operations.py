from __future__ import annotations

from dataclasses import dataclass

from ugro.kernel.access.model import Role
from ugro.kernel.operations.request import Kind, Request


@dataclass(frozen=True, slots=True)
class WordCount:
    word: str
    times: int


@dataclass(frozen=True, slots=True)
class CountedWords:
    job: int
    words: tuple[WordCount, ...]


@dataclass(frozen=True, slots=True)
class CountWords(Request[CountedWords], route="GET /v1/jobs/{word}/words", role=Role.VIEWER, of=Kind.JOB):
    """Counts the words in the log of a job, the most common first."""

    word: str
