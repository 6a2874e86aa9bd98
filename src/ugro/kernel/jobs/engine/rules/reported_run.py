"""Whose is a run that a node reports? A node is believed about what was placed on it, and about nothing else.

This is the one place that decides it. Nothing is fetched for a run that is not ``PLACED``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ugro.features.safe_mode.rules import Ids, is_beyond
from ugro.kernel.jobs.model import Job, Launcher, OnLost, Placement
from ugro.kernel.links.model import Machine

_LONGEST_NUMBER = 18  # digits: the database has room for them
# What one rank can write to its log: more than any disk takes, so that no true log is refused.
_LOG_BYTES = 1 << 30
_LOG_BYTES_PER_S = 4 << 30


class Belief(StrEnum):
    PLACED = "placed"  # ours: this attempt was placed on this node
    LEFTOVER = "leftover"  # of a job that was removed here: it may be stopped and removed there, and that is all
    NEWER = "newer"  # ours, by its ticket, and started by a newer state than ours: the agent goes into safe mode
    STRANGE = "strange"  # never placed there: ignored, and reported once


@dataclass(frozen=True, slots=True)
class Reported:
    """What a node says that it has."""

    node: str
    machine: Machine | None  # that answers under the node's name now
    job: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What our records say of a job and one attempt at it."""

    newest_job: int  # the highest number that a job was ever given
    is_known: bool  # whether there is such a job
    placement: Placement | None = None  # of the attempt; None: there was no such attempt
    is_in_gap: bool = False  # the job's number is below the highest, and a newer state than ours may have given it


@dataclass(frozen=True, slots=True)
class Verdict:
    belief: Belief
    reason: str


def judge_run(reported: Reported, recorded: Recorded) -> Verdict:
    job, attempt, placement = reported.job, reported.attempt, recorded.placement
    if placement is None:
        return _without_attempt(reported, recorded)
    if reported.node not in placement.nodes:
        return Verdict(Belief.STRANGE, f"attempt {attempt} of job {job} was placed on {', '.join(placement.nodes)}")
    share = placement.on(reported.node)
    if reported.machine is not None and not share.is_of(reported.machine):
        where = "when that name led to another machine or folder"
        return Verdict(Belief.STRANGE, f"attempt {attempt} of job {job} was placed there {where}")
    return Verdict(Belief.PLACED, "placed there")


def _without_attempt(reported: Reported, recorded: Recorded) -> Verdict:
    if recorded.is_known:
        return Verdict(Belief.STRANGE, f"job {reported.job} has had no attempt {reported.attempt}")
    if reported.job > recorded.newest_job:
        return Verdict(Belief.STRANGE, f"no job {reported.job} was ever submitted")
    if recorded.is_in_gap:
        return Verdict(Belief.STRANGE, f"job {reported.job} is not known here")
    return Verdict(Belief.LEFTOVER, f"job {reported.job} was removed")


def judge_ticket(job: int, attempt: int, known_attempt: int | None, ids: Ids) -> Verdict:
    """Of a run that our records do not explain, and whose ticket we have sealed, for this node."""
    if is_beyond(job, attempt, known_attempt, ids):
        return Verdict(Belief.NEWER, f"attempt {attempt} of job {job} was started by a newer state than this one")
    return Verdict(Belief.LEFTOVER, f"attempt {attempt} of job {job} is over")


def run_number(text: str) -> int | None:
    """The number of a job or attempt, written as we write it; None: we never gave such a name."""
    is_ours = text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER and text[0] != "0"
    return int(text) if is_ours else None


def most_log_bytes(age_s: float) -> int:
    """How large the log of a rank can be, so long after its attempt was placed."""
    return _LOG_BYTES + int(_LOG_BYTES_PER_S * max(0.0, age_s))


@dataclass(frozen=True, slots=True)
class StrangeRuns:
    """The runs that a node reports and that are not believed."""

    count: int
    reason: str  # why one of them is not

    def __str__(self) -> str:
        more = f", and {self.count - 1} more" if self.count > 1 else ""
        return f"reports runs that were never placed there: {self.reason}{more}"


# --- runs that may share a supervisor ---------------------------------------------------------------------------------


def shares_supervisor(job: Job) -> bool:
    """A process for each of a thousand small commands would cost more than the commands, so these share one.

    A supervisor of its own is for work that others must not end or outlive: with a shared one all its runs are lost
    when it is killed, and only with one run a supervisor knows exactly whose every process is. So GPUs, which must be
    free when a run is over, leases and checkpoints get one, and so does everything that starts several ranks.
    """
    spec = job.spec
    holds_gpus = job.placement is not None and any(share.gpus for share in job.placement.shares)
    has_lease = spec.disconnect.on_lost is OnLost.RESTART
    return spec.launcher is Launcher.COMMAND and not (holds_gpus or has_lease or spec.has_checkpoints)
