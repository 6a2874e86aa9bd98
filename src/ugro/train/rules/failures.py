"""Decides what becomes of a training whose loss or gradients are not finite. Pure, and the same on all ranks.

A GradScaler leaves out steps by itself, and finds its scale in this way, in fewer steps than ``MOST_IN_A_ROW``. A loss
of which nothing comes into the model, such as the mean over no labels, is only said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ugro.kernel.support.errors import UsageError
from ugro.kernel.support.quantities import count_of

# --- forming ----------------------------------------------------------------------------------------------------------
# Who belongs to the next group, when a rank was lost or one wants to join; and whether a job has enough ranks at all.
#
# Each rank that waits asks this with what it sees, and publishes the answer; the first one published holds for all.


GRACE_S = 1.0  # a process that lives answers within milliseconds, also while it computes


@dataclass(frozen=True, slots=True)
class Forming:
    previous: frozenset[int]  # the ranks of the last group
    here: Mapping[int, float]  # ranks whose process has answered: for how long their script had been silent then
    ready: frozenset[int]  # ranks that wait for the new group
    joining: frozenset[int]  # those of them that have no state yet
    expected: frozenset[int]  # ranks that have asked to join
    waited_s: float
    timeout_s: float  # a script that is silent for longer hangs
    min_ranks: int
    grace_s: float = GRACE_S


@dataclass(frozen=True, slots=True)
class Wait:
    pass


@dataclass(frozen=True, slots=True)
class TooFew:
    ranks: frozenset[int]  # that are left


def lack_of_ranks(min_ranks: int | None, ranks: int) -> tuple[str, str] | None:
    """Why a job with so many ranks must not start, and a hint; None if it may."""
    if min_ranks is None or ranks >= min_ranks:
        return None
    hint = f"--min-ranks {ranks} at most, or more nodes: a rank is a GPU, or a node without GPUs"
    return f"it would have {count_of(ranks, 'rank')}, fewer than its min_ranks {min_ranks}", hint


def decide(forming: Forming) -> frozenset[int] | Wait | TooFew:
    """The ranks of the next group."""
    missing = (forming.previous - forming.here.keys() - forming.ready) | (forming.expected - forming.ready)
    if missing and forming.waited_s < forming.grace_s:
        return Wait()
    if any(_may_come(rank, forming) for rank in forming.previous - forming.ready):
        return Wait()
    trained = forming.ready - forming.joining
    if not trained:
        return Wait()  # nobody has a state: only somebody who has one can go on
    if len(forming.ready) < forming.min_ranks:
        return TooFew(forming.ready)
    return forming.ready


def _may_come(rank: int, forming: Forming) -> bool:
    """It computes, and will notice."""
    silent_s = forming.here.get(rank)
    return silent_s is not None and silent_s + forming.waited_s < forming.timeout_s


# --- nan --------------------------------------------------------------------------------------------------------------


MOST_IN_A_ROW = 32  # then a training learns nothing any more


class OnNan(StrEnum):
    STOP = "stop"  # the run ends with an error
    SKIP = "skip"  # the update is left out, on all ranks
    IGNORE = "ignore"  # it is only said


class Wrong(StrEnum):
    LOSS = "loss"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


@dataclass(frozen=True, slots=True)
class Incident:
    """A rank found a loss or gradients that are not finite."""

    rank: str  # as it is called: rank 1 (gpu2)
    step: int
    what: Wrong
    is_harmless: bool = False  # a GradScaler leaves out the update, or its gradients are finite all the same

    @property
    def is_search(self) -> bool:
        """A GradScaler finds its scale so; one that finds none in many steps leaves out all updates."""
        return self.what is Wrong.GRADIENTS and self.is_harmless

    @property
    def words(self) -> str:
        verb = "is" if self.what is Wrong.LOSS else "are"
        return f"the {self.what} of {self.rank} {verb} not finite in step {self.step}"


@dataclass(frozen=True, slots=True)
class Response:
    """What all ranks do with a step. ``stops``: why the run ends."""

    skips: bool = False
    stops: str | None = None
    in_a_row: int = 0


def on_nan(name: str) -> OnNan:
    try:
        return OnNan(name)
    except ValueError:
        raise UsageError(f"unknown choice for nan: {name!r}", hint=f"one of {', '.join(OnNan)}") from None


def response(choice: OnNan, incidents: Sequence[Incident], before: int) -> Response:
    """``before``: steps in a row until now in which something was not finite."""
    if not incidents:
        return Response()
    if choice is OnNan.IGNORE:
        return Response(in_a_row=before + 1)
    first = incidents[0]
    in_a_row = before + 1
    is_harmless = all(one.is_harmless for one in incidents)
    if choice is OnNan.STOP and not is_harmless:
        return Response(stops=first.words)
    if in_a_row >= MOST_IN_A_ROW:
        return Response(stops=f"{first.words}, and so it was in {in_a_row} steps in a row")
    return Response(skips=not is_harmless, in_a_row=in_a_row)
