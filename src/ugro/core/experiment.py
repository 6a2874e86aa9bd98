"""A job as an experiment: its parameters, its metrics, and people's notes about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ugro.core.job import JobState


@dataclass(frozen=True, slots=True)
class Figure:
    """The values of one metric; ``None`` if it never was a finite number."""

    last: float | None
    least: float | None
    most: float | None
    last_step: int
    count: int


@dataclass(frozen=True, slots=True)
class Experiment:
    id: int
    name: str
    user: str
    state: JobState
    submitted_s: float  # unix seconds, like all of these
    started_s: float | None = None
    ended_s: float | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    note: str = ""
    tags: tuple[str, ...] = ()
