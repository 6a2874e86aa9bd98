"""The next step of an attempt, from what its nodes say of it. Asked again and again, also after a crash: the answer
depends on nothing but what is on disk and on the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ugro.kernel.jobs.model import Ending, JobState
from ugro.kernel.support.quantities import names

# --- where an elastic attempt stands ----------------------------------------------------------------------------------
# Says which ranks train, which are lost, and whether the attempt can go on, is done, or has failed.
#
# Ranks say themselves who trains together. A rank that is lost while others go on is no failure; one that the others
# still count on when they end is.


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


# --- the next step ----------------------------------------------------------------------------------------------------


class RunState(StrEnum):
    UNKNOWN = "unknown"  # the node has not been asked yet, or cannot be reached
    ABSENT = "absent"  # the node has no record of this attempt
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"  # every rank ended with 0
    FAILED = "failed"
    DEAD = "dead"  # its supervisor is gone


@dataclass(frozen=True, slots=True)
class NodeRun:
    node: str
    state: RunState
    is_reachable: bool = True
    # There is nothing to wait for: its lease is over, it was never asked for there, or its node was taken out of the
    # cluster and the job is to be cancelled.
    is_gone: bool = False
    is_elsewhere: bool = False  # the node's name leads to another machine or folder by now: that one is not asked
    is_removed: bool = False  # its node was taken out of the cluster


@dataclass(frozen=True, slots=True)
class AttemptView:
    state: JobState
    ending: Ending | None
    runs: tuple[NodeRun, ...]
    is_over_time: bool = False
    refusal: str | None = None  # why it cannot be started at all
    is_overdue: bool = False  # its ranks were asked to start, and should run by now
    why_ending: str | None = None  # in words, where more is known than ``ending`` says
    elastic: ElasticView | None = None  # of a training that goes on without ranks that are lost


@dataclass(frozen=True, slots=True)
class Start:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Move:
    state: JobState
    reason: str
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class Conclude:
    """Every rank is known to have ended: record how, and decide what comes next."""


Step = Start | Stop | Move | Conclude | Rejoin



def next_step(view: AttemptView) -> Step | None:
    """None: wait."""
    if view.state is JobState.STOPPING:
        return _stopping(view)
    if (ending := _ending(view)) is not None:
        return ending
    if view.state is JobState.STARTING:
        return _starting(view)
    if not all(run.is_reachable for run in view.runs if not _is_over_elastically(run, view)):
        if view.state is JobState.UNREACHABLE:
            return None
        return Move(JobState.UNREACHABLE, f"{_out_of_reach(view)}; its ranks may well go on")
    return _going_on(view)


def _ending(view: AttemptView) -> Move | None:
    """Why the attempt must end, whatever else is known."""
    if view.ending is not None:
        words = view.why_ending or _ASKED.get(view.ending) or f"asked to end: {view.ending.value.replace('_', ' ')}"
        return Move(JobState.STOPPING, words, view.ending)
    if (problem := _problem(view)) is not None:
        return Move(JobState.STOPPING, problem, Ending.FAILED)
    if all(run.state is RunState.DONE for run in view.runs):
        return Move(JobState.STOPPING, "every rank ended with 0", Ending.DONE)
    if view.elastic is not None and is_done(view.elastic):
        return Move(JobState.STOPPING, "every rank that was left ended with 0", Ending.DONE)
    if view.is_over_time:
        return Move(JobState.STOPPING, "its time limit is over", Ending.TIME_LIMIT)
    return None


def _problem(view: AttemptView) -> str | None:
    if view.refusal is not None:
        return view.refusal
    if view.elastic is not None and view.state is not JobState.STARTING:
        return problem(view.elastic)
    problems = [f"{run.node}: {_WORDS[run.state]}" for run in view.runs if run.state in _WORDS]
    problems += [f"{run.node} is lost" for run in view.runs if run.is_gone and run.state is not RunState.DONE]
    return "; ".join(problems) or None


def _starting(view: AttemptView) -> Step | None:
    """All ranks within one window, or none."""
    if _is_running(view):
        return Move(JobState.RUNNING, "every rank runs")
    if view.is_overdue:
        late = [run.node for run in view.runs if run.state not in (RunState.RUNNING, RunState.DONE)]
        return Move(JobState.STOPPING, f"{_names(late)} did not start in time: all is taken back", Ending.FAILED)
    absent = tuple(run.node for run in view.runs if run.state is RunState.ABSENT and run.is_reachable)
    return Start(absent) if absent else None


def _out_of_reach(view: AttemptView) -> str:
    elsewhere = [run.node for run in view.runs if run.is_elsewhere]
    if elsewhere:
        return f"{_names(elsewhere)} leads to another machine or folder than when it started"
    if removed := [run.node for run in view.runs if run.is_removed]:
        return removal(removed)
    return f"{_names([run.node for run in view.runs if not run.is_reachable])} cannot be reached"


def removal(nodes: list[str]) -> str:
    """What is said of a job whose nodes were taken out of the cluster while it ran there."""
    return f"{_names(nodes)} {'was' if len(nodes) == 1 else 'were'} removed from the cluster"


def _going_on(view: AttemptView) -> Step | None:
    if view.elastic is not None:
        return _going_on_elastically(view, view.elastic)
    absent = [run.node for run in view.runs if run.state is RunState.ABSENT]
    if absent:
        # It ran there before: its folder was deleted, or the machine was reinstalled.
        return Move(JobState.STOPPING, f"{_names(absent)} knows nothing of it any more", Ending.FAILED)
    if view.state is JobState.UNREACHABLE and _is_running(view):
        return Move(JobState.RUNNING, "every node answers again, and every rank runs")
    return None


def _going_on_elastically(view: AttemptView, elastic: ElasticView) -> Step | None:
    dead = tuple(run.node for run in view.runs if run.state is RunState.DEAD and run.is_reachable)
    if dead:
        return Stop(dead)  # what its supervisor left is ended, and that is recorded
    if view.state is JobState.UNREACHABLE:
        return Move(JobState.RUNNING, described(elastic) or "every node answers again, and every rank runs")
    return rejoin(elastic)


def _is_over_elastically(run: NodeRun, view: AttemptView) -> bool:
    return view.elastic is not None and (run.is_gone or run.state in (RunState.DONE, RunState.FAILED))


def _is_running(view: AttemptView) -> bool:
    return all(run.state in (RunState.RUNNING, RunState.DONE) for run in view.runs)


def _stopping(view: AttemptView) -> Step | None:
    """Every node is asked until it confirms that no process of the attempt is left."""
    left = tuple(run.node for run in view.runs if run.is_reachable and not _is_over(run))
    if left:
        return Stop(left)
    return Conclude() if all(_is_over(run) for run in view.runs) else None


def _is_over(run: NodeRun) -> bool:
    return run.is_gone or run.state in (RunState.DONE, RunState.FAILED)


_ASKED = {Ending.OWNER: "it made way for the owner of a machine"}
_WORDS = {
    RunState.FAILED: "a rank failed",
    RunState.DEAD: "its supervisor is gone",
}


def _names(nodes: list[str]) -> str:
    return ", ".join(nodes)
