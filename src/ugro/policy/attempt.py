"""The next step of an attempt, from what its nodes say of it. Asked again and again, also after a crash: the answer
depends on nothing but what is on disk and on the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.core.job import Ending, JobState


class RunState(StrEnum):
    UNKNOWN = "unknown"  # the node has not been asked yet, or cannot be
    ABSENT = "absent"  # the node knows nothing of this attempt
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"  # every rank ended with 0
    FAILED = "failed"
    DEAD = "dead"  # nobody watches its ranks any more


@dataclass(frozen=True, slots=True)
class NodeRun:
    node: str
    state: RunState
    is_reachable: bool = True
    problem: str | None = None  # why it could not be started, when the node said so


@dataclass(frozen=True, slots=True)
class AttemptView:
    state: JobState
    ending: Ending | None
    runs: tuple[NodeRun, ...]
    is_over_time: bool = False


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
    """Every rank is proven dead: say how it was, and what comes next."""


Step = Start | Stop | Move | Conclude

_LIVE = frozenset({RunState.STARTING, RunState.RUNNING})
_OVER = frozenset({RunState.DONE, RunState.FAILED})


def next_step(view: AttemptView) -> Step | None:
    """None: there is nothing to do but wait."""
    if view.state is JobState.STOPPING:
        return _stopping(view)
    if (ending := _ending(view)) is not None:
        return ending
    unreachable = [run.node for run in view.runs if not run.is_reachable]
    if unreachable:
        if view.state is JobState.UNREACHABLE:
            return None
        return Move(JobState.UNREACHABLE, f"{_names(unreachable)} cannot be reached; its ranks may well go on")
    if any(run.state is RunState.UNKNOWN for run in view.runs):
        return None
    return _going_on(view)


def _ending(view: AttemptView) -> Move | None:
    """What makes the attempt end, whatever else is known."""
    if view.ending is not None:
        return Move(JobState.STOPPING, f"asked to end: {view.ending.value.replace('_', ' ')}", view.ending)
    failed = [run for run in view.runs if run.state in (RunState.FAILED, RunState.DEAD) or run.problem]
    if failed:
        problems = "; ".join(f"{run.node}: {run.problem or _WORDS[run.state]}" for run in failed)
        return Move(JobState.STOPPING, problems, Ending.FAILED)
    if view.is_over_time:
        return Move(JobState.STOPPING, "its time limit is over", Ending.TIME_LIMIT)
    if all(run.state is RunState.DONE for run in view.runs):
        return Move(JobState.STOPPING, "every rank ended with 0", Ending.DONE)
    return None


def _going_on(view: AttemptView) -> Step | None:
    absent = tuple(run.node for run in view.runs if run.state is RunState.ABSENT)
    if absent and view.state is JobState.STARTING:
        return Start(absent)
    if absent:
        # It ran there before: a folder that was deleted, or a machine set up anew.
        return Move(JobState.STOPPING, f"{_names(absent)} knows nothing of it any more", Ending.FAILED)
    is_running = all(run.state in (RunState.RUNNING, RunState.DONE) for run in view.runs)
    if is_running and view.state is not JobState.RUNNING:
        return Move(JobState.RUNNING, "every rank runs")
    return None


def _stopping(view: AttemptView) -> Step | None:
    """Every node is asked until it has said that nothing of the attempt lives there."""
    left = tuple(run.node for run in view.runs if run.is_reachable and run.state not in _OVER)
    if left:
        return Stop(left)
    return Conclude() if all(run.state in _OVER for run in view.runs) else None


_WORDS = {
    RunState.FAILED: "a rank failed",
    RunState.DEAD: "its supervisor is gone",
}


def _names(nodes: list[str] | tuple[str, ...]) -> str:
    return ", ".join(nodes)
