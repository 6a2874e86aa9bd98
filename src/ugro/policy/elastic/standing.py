"""Where an elastic attempt stands: which ranks train, which are lost, and whether it can go on, is done, or has failed.

Ranks say themselves who trains together. A rank that is lost while others go on is no failure; one that the others
still count on when they end is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ugro.policy.wording import names

_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 300.0

Group = tuple[int, tuple[int, ...]]  # its number, and its ranks


class RankState(StrEnum):
    RUNNING = "running"
    UNKNOWN = "unknown"  # its node cannot be reached: it may well go on
    UNHEARD = "unheard"  # its node has not answered this agent yet
    DONE = "done"  # it ended with 0
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankView:
    rank: int
    node: str
    state: RankState
    why: str = ""  # it is lost
    starts: int = 1
    can_start: bool = False  # its run lives, and its node can be reached
    lost_s: float = 0.0  # for how long


@dataclass(frozen=True, slots=True)
class ElasticView:
    min_ranks: int
    rejoins: int
    ranks: tuple[RankView, ...]
    members: frozenset[int] = frozenset()  # of the newest group; empty: the ranks have not said

    def among(self, state: RankState) -> tuple[RankView, ...]:
        return tuple(one for one in self.ranks if one.state is state)


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Start a lost rank again."""

    node: str
    rank: int
    starts: int  # so often it was started before


def members(said: Mapping[str, Group], nodes: Mapping[int, str]) -> frozenset[int]:
    """Of the newest group that the nodes of all its members know: none decides for others.

    ``said``: what each node tells; ``nodes``: where each rank is.
    """
    for group in sorted(set(said.values()), reverse=True):
        if all(_knows(said.get(nodes.get(rank, "")), group) for rank in group[1]):
            return frozenset(group[1])
    return frozenset()


def _knows(said: Group | None, group: Group) -> bool:
    """Also the node of a rank that belongs to a newer one by now, of which others have not told yet."""
    return said is not None and (said == group or said[0] > group[0])


def is_done(view: ElasticView) -> bool:
    done = {one.rank for one in view.among(RankState.DONE)}
    return bool(view.members) and view.members <= done


def problem(view: ElasticView) -> str | None:
    """Why it cannot go on."""
    lost = view.among(RankState.LOST)
    if not lost or is_done(view):
        return None
    if not view.members:
        if view.among(RankState.UNKNOWN) or view.among(RankState.UNHEARD):  # their nodes may know who trains
            return None
        return f"{_told(lost)}, before the training had begun"
    left = [one for one in view.ranks if one.state is not RankState.LOST]
    trained = [one for one in left if one.rank in view.members and one.state is not RankState.DONE]
    if not trained:  # those who have ended with 0 do not come back to form another group
        return f"{_told(tuple(one for one in lost if one.rank in view.members) or lost)}; no rank is left to go on"
    if len(left) < view.min_ranks:
        return f"{_told(lost)}; {len(left)} of {len(view.ranks)} ranks are left, fewer than min_ranks {view.min_ranks}"
    return None


def rejoin(view: ElasticView) -> Rejoin | None:
    """Which rank to start again: one that the others have gone on without, after a pause that grows each time."""
    if is_done(view) or problem(view) is not None:
        return None
    for one in view.among(RankState.LOST):
        is_due = one.lost_s >= min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (one.starts - 1))
        if one.can_start and is_due and one.starts <= view.rejoins and one.rank not in view.members:
            return Rejoin(one.node, one.rank, one.starts)
    return None


def described(view: ElasticView) -> str | None:
    """What the event log and ``ugro why`` say while it runs; None: every rank trains, or not all is known yet."""
    if view.among(RankState.UNHEARD):
        return None
    apart = [one for one in view.ranks if view.members and one.rank not in view.members]
    lost = {one.rank: one for one in view.among(RankState.LOST)}
    if not apart and not lost:
        return None
    count = len(view.members - lost.keys()) if view.members else len(view.ranks) - len(lost)
    words = [_word(one) for one in view.ranks if one in apart or one.rank in lost]
    return f"{names(words)}; training goes on with {count} of {len(view.ranks)} ranks"


def _word(one: RankView) -> str:
    where = f"rank {one.rank} on {one.node}"
    if one.state is RankState.LOST:
        return f"{where} was lost ({one.why})" if one.why else f"{where} was lost"
    if one.state is RankState.UNKNOWN:
        return f"{where} cannot be reached, and was left behind"
    if one.starts > 1:
        return f"{where} was started again, and waits to join"
    return f"{where} did not answer the others, and was left behind"


def _told(lost: tuple[RankView, ...]) -> str:
    return names([_word(one) for one in lost])
