"""The owner of a machine comes first: when somebody uses it (``When``), and what jobs do then (``Then``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.core.support.quantity import format_duration


class When(StrEnum):
    NEVER = "never"
    ACTIVE = "active"  # a person at its keyboard, its display or one of its terminals
    GPU_BUSY = "gpu_busy"  # a process on one of its GPUs that is none of UGRO's


class Then(StrEnum):
    PAUSE = "pause"  # jobs are ended with their checkpoints, and queued again
    SHRINK = "shrink"  # trainings on several nodes leave it a small part of each batch
    DRAIN = "drain"  # running jobs continue


@dataclass(frozen=True, slots=True)
class OwnerRule:
    """In every case, no new job starts on the node until it was quiet for ``quiet_s``."""

    when: When
    then: Then = Then.PAUSE
    quiet_s: float = 600.0


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """What is known of a node's owner."""

    when: When
    then: Then
    quiet_s: float
    is_there: bool = False
    sign: str | None = None  # by which the owner was noticed last: "ann types on pts/3"
    idle_s: float | None = None  # since then
    is_known: bool = True  # False: the node has not said yet
    sources: tuple[str, ...] = ()  # what it looks at
    blind: tuple[str, ...] = ()  # what it cannot look at
    error: str | None = None  # why it cannot look at all

    @property
    def words(self) -> str | None:
        """Why it takes no new jobs, after the name of the node; None if it takes some."""
        if not self.is_known:
            return "has not said yet whether somebody uses it"
        if not self.is_there:
            return None
        return f"is used by its owner ({self.sign}): no new jobs until it was quiet for {format_duration(self.quiet_s)}"
