"""A job as an experiment: its parameters, its metrics, and people's notes about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ugro.core.job import JobState


@dataclass(frozen=True, slots=True)
class Figure:
    """The values of one metric, of the newest attempt and the first rank that have it.

    ``None`` if it never was a finite number. docs/results.md defines these for users.
    """

    last: float | None  # the last finite value
    least: float | None
    most: float | None
    last_step: int  # of the last value, finite or not
    count: int
    least_step: int | None = None
    most_step: int | None = None
    odd_step: int | None = None  # from this step on the values are NaN or infinite


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
    energy_wh: float | None = None  # None: not measured
    cost: float | None = None  # at the present price; None: there is none
