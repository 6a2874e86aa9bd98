"""What shows that this agent's state is older than the world, and what the agent tells about it.

In safe mode the agent starts, ends and removes nothing until its user has decided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

REMEDY = "see what can be done: ugro agent reconcile"
_SHOWN_REASONS = 2


@dataclass(frozen=True, slots=True)
class Mark:
    """How far an agent's state has come. Kept outside the state, so that an older state is recognized."""

    agent: str
    generation: int
    ids: int  # job ids up to this one may have been given


@dataclass(frozen=True, slots=True)
class NewerRun:
    """A run on a node that this agent started and that its state does not know."""

    node: str
    job: int
    attempt: int
    name: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class SafeMode:
    since: str
    reasons: tuple[str, ...]
    runs: tuple[NewerRun, ...] = ()
    generation: int = 0  # the highest that was seen
    ids: int = 0  # ids up to this one may have been given
    not_asked: tuple[str, ...] = ()  # nodes that have not said what they run since the agent started
    absent: tuple[str, ...] = ()  # those of them that are not in the cluster: the state knows them

    @property
    def brief(self) -> str:
        """The first reasons, which are the most telling; ``ugro agent status`` shows all."""
        more = len(self.reasons) - _SHOWN_REASONS
        return "; ".join([*self.reasons[:_SHOWN_REASONS], *([f"and {more} more"] if more > 0 else [])])

    @property
    def unasked(self) -> str:
        """``not_asked`` in words."""
        return unasked(self.not_asked, self.absent)


@dataclass(frozen=True, slots=True)
class JobChange:
    """What a decision would do, or has done, to a job."""

    job: int
    what: str  # take, settle, wait, recall, cancel, end, lost
    text: str


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """``done``: adopt or forget; None: nothing was changed, and both are shown."""

    done: str | None
    adopt: tuple[JobChange, ...] = ()
    forget: tuple[JobChange, ...] = ()
    first_id: int = 0  # of the next job, once it is decided
    generation: int = 0  # after the decision
    not_asked: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()  # of those, nodes that are not in the cluster

    @property
    def unasked(self) -> str:
        """``not_asked`` in words."""
        return unasked(self.not_asked, self.absent)


def unasked(names: Iterable[str], absent: Collection[str]) -> str:
    return ", ".join(f"{name} (not in this cluster)" if name in absent else name for name in names)
