"""The next step of an attempt, from what its nodes say of it. Asked again and again, also after a crash: the answer
depends on nothing but what is on disk and on the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.core.job import Ending, JobState
from ugro.policy.elastic import standing
from ugro.policy.elastic.standing import ElasticView, Rejoin


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
    if view.elastic is not None and standing.is_done(view.elastic):
        return Move(JobState.STOPPING, "every rank that was left ended with 0", Ending.DONE)
    if view.is_over_time:
        return Move(JobState.STOPPING, "its time limit is over", Ending.TIME_LIMIT)
    return None


def _problem(view: AttemptView) -> str | None:
    if view.refusal is not None:
        return view.refusal
    if view.elastic is not None and view.state is not JobState.STARTING:
        return standing.problem(view.elastic)
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
        return Move(JobState.RUNNING, standing.described(elastic) or "every node answers again, and every rank runs")
    return standing.rejoin(elastic)


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
