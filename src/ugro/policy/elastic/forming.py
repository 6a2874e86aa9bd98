"""Who belongs to the next group, when a rank was lost or one wants to join; and whether a job has enough ranks at all.

Each rank that waits asks this with what it sees, and publishes the answer; the first one published holds for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ugro.policy.wording import count_of

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
