"""The ranks of a job's newest attempt: node and state of each, as far as known.

A node reports that it has started its ranks, and their ends when all of them have ended. With several ranks on one node
it is not known before that whether one has already ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ugro.agent.engine.failure_facts import exits_of
from ugro.core.failure import Failure, RankExit
from ugro.core.job import HOLDING_STATES, Job, JobState, Launcher, ranges
from ugro.core.login import node_of
from ugro.core.support.signals import signal_name
from ugro.nodes.runs import RunStatus
from ugro.policy.lifecycle.attempt import NodeRun, RunState
from ugro.telemetry.curves import KeySummary

_NOT_YET = frozenset({RunState.ABSENT, RunState.STARTING})


@dataclass(frozen=True, slots=True)
class RankRow:
    rank: int
    node: str
    gpus: str
    state: str  # selects the icon
    words: str
    last_step: int | None  # that it logged
    is_culprit: bool


@dataclass(frozen=True, slots=True)
class Known:
    reports: Mapping[str, tuple[NodeRun, RunStatus | None]] = field(default_factory=dict)  # by node, if live
    failure: Failure | None = None
    last_steps: Mapping[int, int] = field(default_factory=dict)  # by rank


def last_steps(summaries: Iterable[KeySummary]) -> dict[int, int]:
    found: dict[int, int] = {}
    for one in summaries:
        found[one.rank] = max(one.last_step, found.get(one.rank, one.last_step))
    return found


def rank_rows(job: Job, nodes: Mapping[int, str], known: Known) -> list[RankRow]:
    """``nodes``: by rank. Each DDP rank has one of its node's GPUs, in order; other launchers share them."""
    exits = _exits(known)
    # With torchrun the ranks here are launchers, while the steps are logged by the ranks that they start.
    steps = known.last_steps if job.spec.launcher not in (Launcher.TORCHRUN, Launcher.RAY) else {}
    culprit = known.failure.rank if known.failure else None
    all_there, seen = Counter(nodes.values()), Counter[str]()
    rows = []
    for rank, node in nodes.items():
        state, words = _state(job, rank, known.reports.get(node), exits.get(rank), all_there[node])
        if rank == culprit and state == "ended":
            state = "failed"
        gpus = _gpus(job, node, seen[node])
        seen[node] += 1
        rows.append(RankRow(rank, node_of(node), gpus, state, words, steps.get(rank), rank == culprit))
    return rows


def exit_words(end: RankExit) -> str:
    if end.signal is not None:
        return f"ended by {signal_name(end.signal)}"
    return "ended" if end.code is None else f"exit code {end.code}"


def _exits(known: Known) -> dict[int, RankExit]:
    """By rank. What a node reports overrides what was recorded."""
    failure = known.failure
    found = {end.rank: end for end in failure.exits} if failure else {}
    if failure and failure.rank is not None and failure.exit_code is not None:
        found.setdefault(failure.rank, RankExit(failure.rank, failure.exit_code))
    live = exits_of(status for _, status in known.reports.values() if status is not None and status.has_ended)
    return {**found, **{end.rank: end for end in live}}


def _state(
    job: Job, rank: int, report: tuple[NodeRun, RunStatus | None] | None, end: RankExit | None, beside: int
) -> tuple[str, str]:
    if end is not None:
        return ("succeeded" if end.code == 0 else "ended"), exit_words(end)
    if job.state is JobState.SUCCEEDED:  # then every rank ended with 0
        return "succeeded", "exit code 0"
    if job.state not in HOLDING_STATES:
        return "ended", "ended"
    return _live(rank, report, beside)


def _live(rank: int, report: tuple[NodeRun, RunStatus | None] | None, beside: int) -> tuple[str, str]:
    if report is None or not report[0].is_reachable:
        return "unknown", "unknown: its node does not answer"
    run, status = report
    if run.state in _NOT_YET:
        return "starting", "not started yet"
    if run.state is not RunState.RUNNING or status is None or rank not in status.started_ranks:
        return "unknown", "unknown"
    return "running", "running" if beside == 1 else "started"


def _gpus(job: Job, node: str, local: int) -> str:
    shares = job.placement.shares if job.placement else ()
    gpus: tuple[int, ...] = next((share.gpus for share in shares if share.node == node), ())
    return ranges(gpus[local : local + 1] if job.spec.launcher is Launcher.DDP else gpus)
