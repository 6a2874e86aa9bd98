"""The owner of a machine comes first: whether one is there, and what becomes of the jobs there then.

A node takes no job from the first sign of its owner until it was quiet for as long as its rule says, so that a job that
made way is not started there and ended again and again. Nothing is moved back: a job that has started elsewhere stays
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ugro.core.job import HOLDING_STATES, Job, JobState, Launcher
from ugro.core.login import node_of
from ugro.core.owner import OwnerReport, OwnerRule, Then

# Of an equal share of each batch, or of its cores, what a job keeps of a machine whose owner is there.
SMALL_PART = 0.1
_STOPPED = HOLDING_STATES - {JobState.STOPPING}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node has said of its owner."""

    last_s: float | None = None  # when the newest sign was, by the clock of the agent's boot
    sign: str = ""
    is_known: bool = False  # it has said something, or that it cannot
    is_open: bool = False  # it would say if that changed
    sources: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    error: str | None = None


def judge(rule: OwnerRule, seen: Seen, now_s: float) -> OwnerReport:
    idle_s = None if seen.last_s is None else max(0.0, now_s - seen.last_s)
    return OwnerReport(
        when=rule.when,
        then=rule.then,
        quiet_s=rule.quiet_s,
        is_there=idle_s is not None and idle_s < rule.quiet_s,
        sign=seen.sign or None,
        idle_s=idle_s,
        is_known=seen.is_known,
        sources=seen.sources,
        blind=seen.blind,
        error=seen.error,
    )


@dataclass(frozen=True, slots=True)
class Stop:
    """End the attempt with its checkpoint, and queue the job again."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class Part:
    """A job takes that part of this node: of an equal share of each batch, or of its cores; 1: no limit."""

    job: Job
    node: str
    part: float
    is_of_cores: bool


def stops(jobs: Iterable[Job], owners: Mapping[str, OwnerReport]) -> Iterator[Stop]:
    """``owners``: of the nodes that can be heard now. A job's priority makes no difference."""
    there = {name: one for name, one in owners.items() if one.is_there and one.then is Then.PAUSE}
    for job in jobs:
        if not there or job.ending is not None or job.state not in _STOPPED or job.placement is None:
            continue
        node = next((name for name in job.placement.node_names if name in there), None)
        if node is not None:
            yield Stop(job, makes_way(node, there[node]))


def parts(jobs: Iterable[Job], owners: Mapping[str, OwnerReport]) -> Iterator[Part]:
    """For running jobs, on each node where jobs shrink: trainings on several nodes, and those without GPUs."""
    shrinking = {name: one for name, one in owners.items() if one.then is Then.SHRINK}
    for job in jobs:
        if not shrinking or job.state is not JobState.RUNNING or job.placement is None:
            continue
        # A training on one node has nobody to leave its share to.
        has_shares = job.spec.launcher is not Launcher.COMMAND and len(job.placement.nodes) > 1
        for share in job.placement.shares:
            owner = shrinking.get(node_of(share.node))
            if owner is not None and (has_shares or not share.gpus):
                part = SMALL_PART if owner.is_there else 1.0
                yield Part(job, share.node, part, is_of_cores=not has_shares)


def makes_way(node: str, owner: OwnerReport) -> str:
    return f"it made way for the owner of {node} ({owner.sign})"


def takes(one: Part) -> str:
    """In words."""
    what = "the cores" if one.is_of_cores else "an equal share of each batch"
    if one.part < 1:
        return f"the owner of {node_of(one.node)} is there: it takes {one.part:.0%} of {what} there"
    return f"it may take all of {what} on {node_of(one.node)} again"
