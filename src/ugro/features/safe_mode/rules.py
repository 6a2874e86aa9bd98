"""Whether the world knows more than this agent's state, and what then becomes of each job: adopted or forgotten.

An older ``state.db`` that was put back knows nothing of what came after it. Ending what it does not know would end
running jobs, and starting what it still has in its queue would run finished jobs again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ugro.features.safe_mode.model import JobChange, Mark
from ugro.kernel.jobs.model import FINAL_STATES, HOLDING_STATES, Ending, Job, JobState, ranges

Gap = tuple[int, int]  # the first and the last of ids that a newer state may have given, and this one has not


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of jobs as the state knows them."""

    highest: int  # that it ever gave; a job that is not there and has a lower one was removed
    gaps: tuple[Gap, ...] = ()

    def were_given(self, job: int) -> bool:
        return job <= self.highest and not any(first <= job <= last for first, last in self.gaps)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the journal beside the state says about a job."""

    attempt: int
    state: JobState
    ending: Ending | None = None


def is_beyond(job: int, attempt: int, known_attempt: int | None, ids: Ids) -> bool:
    """Whether a run, if it is ours, was started after this state was saved. ``known_attempt``: None: no such job."""
    if known_attempt is not None:
        return attempt > known_attempt
    return not ids.were_given(job)


def older_than_mark(own: Mark, mark: Mark, where: str) -> list[str]:
    """Why the own state is older than a mark that was proven to be ours."""
    reasons = []
    if mark.generation > own.generation:
        # Without the own generation: that grows with every start, and each would be a reason of its own.
        met = f"{where} has met generation {mark.generation} of this agent"
        reasons.append(f"{met}: the state is older, or the agent was moved to another machine")
    if mark.ids > own.ids:
        reasons.append(f"{where} knows of job ids up to {mark.ids}, and the state of ids up to {own.ids}")
    return reasons


def older_than_journal(own: Job, entry: Entry) -> bool:
    """Whether a job that has not ended has come further than the state says, in a way that matters."""
    if entry.attempt != own.attempt:
        return entry.attempt > own.attempt
    has_moved = entry.state in FINAL_STATES or (entry.state is JobState.RECOVERING and own.state in HOLDING_STATES)
    return has_moved or (entry.ending is Ending.CANCELLED and own.ending is not Ending.CANCELLED)


# --- what becomes of the jobs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """A run of ours that the state does not know, with the job as it was when the run was started."""

    node: str
    job: Job
    status: str


@dataclass(frozen=True, slots=True)
class JobView:
    """All that is known about a job which has come further than the state says."""

    number: int
    own: Job | None  # as the state has it
    entry: Entry | None = None  # as the journal has it
    runs: tuple[Found, ...] = ()
    started: int = 0  # the highest attempt that a node remembers


@dataclass(frozen=True, slots=True)
class Take:
    """Record it as running in this attempt; how it ends is seen in the normal way."""

    job: Job
    ending: Ending | None
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """It ended after the state was saved."""

    job: int
    attempt: int
    state: JobState
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing of it runs: it waits for its next attempt, which gets a number that was never used."""

    job: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Only a run of an older attempt tells what the job is: it is recorded, and then what became of it."""

    job: Job
    nodes: tuple[str, ...]
    then: Settle | Wait


@dataclass(frozen=True, slots=True)
class Cancel:
    """A user had asked for it."""

    job: int


@dataclass(frozen=True, slots=True)
class End:
    """Its runs are ended."""

    job: int
    runs: tuple[tuple[str, int], ...]  # node and attempt


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing but its id is left: there is nothing to record."""

    job: int
    state: JobState


Change = Take | Settle | Wait | Recall | Cancel | End | Lost


def adopt(views: Iterable[JobView], not_asked: Collection[str]) -> list[Change]:
    """The state catches up with the world. ``not_asked``: nodes that may run more than is known."""
    return [change for view in views if (change := _adopted(view, bool(not_asked))) is not None]


def forget(views: Iterable[JobView]) -> list[Change]:
    """The world goes back to the state: what it does not know is ended."""
    return [change for view in views for change in _forgotten(view)]


def _adopted(view: JobView, is_some_not_asked: bool) -> Change | None:
    own, entry = view.own, view.entry
    newest = max((found.job.attempt for found in view.runs), default=0)
    runs = [found for found in view.runs if found.job.attempt == newest]
    nodes = tuple(found.node for found in runs)
    if own is not None and own.is_final:
        return None  # it had ended before: what a node still has of it is cleared away
    if newest >= max(entry.attempt if entry else 0, view.started, 1):
        return Take(runs[0].job, _ending(entry, newest), nodes)
    if own is not None:
        return _caught_up(own, view, is_some_not_asked)
    if runs:
        then = _caught_up(runs[0].job, view, is_some_not_asked)
        assert isinstance(then, Settle | Wait), "a newer attempt was started"
        return Recall(runs[0].job, nodes, then)
    return Lost(view.number, entry.state) if entry is not None else None


def _caught_up(own: Job, view: JobView, is_some_not_asked: bool) -> Settle | Wait | Cancel | None:
    """Of a job that we know, and whose newest attempt is on no node any more."""
    if view.entry is not None and view.entry.attempt >= view.started:
        return _as_the_journal_says(own, view.entry, is_some_not_asked)
    if view.started > own.attempt or own.state in HOLDING_STATES:
        reason = "it ended after this state was saved, and how is not known"
        return Settle(own.id, max(own.attempt, view.started), JobState.FAILED, reason)
    return None


def _as_the_journal_says(own: Job, entry: Entry, is_some_not_asked: bool) -> Settle | Wait | Cancel | None:
    if entry.state in FINAL_STATES:
        return Settle(own.id, entry.attempt, entry.state, "it ended after this state was saved")
    if entry.attempt == own.attempt:
        if entry.state is JobState.RECOVERING:
            return Wait(own.id, entry.attempt)
        return Cancel(own.id) if entry.ending is Ending.CANCELLED else None
    if entry.state is not JobState.RECOVERING and is_some_not_asked:
        reason = f"attempt {entry.attempt} was started after this state was saved, on a node that was not asked"
        return Settle(own.id, entry.attempt, JobState.FAILED, reason)
    return Wait(own.id, entry.attempt)


def _ending(entry: Entry | None, attempt: int) -> Ending | None:
    """A cancel that was asked for holds, also if the job was over by then."""
    if entry is None or entry.attempt != attempt:
        return None
    return Ending.CANCELLED if entry.state is JobState.CANCELLED else entry.ending


def _forgotten(view: JobView) -> Iterator[Change]:
    own = view.own
    if view.runs:
        yield End(view.number, tuple((found.node, found.job.attempt) for found in view.runs))
    attempts = [found.job.attempt for found in view.runs] + [view.started]
    newest = max([*attempts, view.entry.attempt if view.entry else 0])
    if own is None and view.entry is not None and not view.runs:
        yield Lost(view.number, view.entry.state)
    elif own is not None and not own.is_final and newest > own.attempt:
        yield Wait(own.id, newest)
    elif own is not None and own.state in HOLDING_STATES:
        yield from _end_of_a_known_attempt(own, view)


def _end_of_a_known_attempt(own: Job, view: JobView) -> Iterator[Change]:
    """The state knows this attempt, so it is not forgotten: how it ended holds, and it is not run twice."""
    if view.entry is None:
        yield Wait(own.id, own.attempt)
    elif (change := _as_the_journal_says(own, view.entry, False)) is not None:
        yield change


def described(changes: Iterable[Change]) -> tuple[JobChange, ...]:
    """The changes in words, by job; jobs of which nothing is left share a line for each of their states."""
    found = list(changes)
    lost: dict[JobState, list[int]] = {}
    for change in found:
        if isinstance(change, Lost):
            lost.setdefault(change.state, []).append(change.job)
    texts = [_words(change) for change in found if not isinstance(change, Lost)]
    return (*sorted(texts, key=lambda one: one.job), *(_lost(state, jobs) for state, jobs in lost.items()))


def _words(change: Take | Settle | Wait | Recall | Cancel | End) -> JobChange:
    match change:
        case Take(job, ending, nodes):
            then = "; it is cancelled, as was asked" if ending is Ending.CANCELLED else ""
            return JobChange(job.id, "take", f"recorded: attempt {job.attempt} on {', '.join(nodes)}{then}")
        case Settle(number, attempt, state, reason):
            return JobChange(number, "settle", f"recorded as {state} in attempt {attempt}: {reason}")
        case Wait(number, attempt):
            return JobChange(number, "wait", f"waits for attempt {attempt + 1}; nothing of it runs")
        case Recall(job, nodes, then):
            found = f"found again by attempt {job.attempt} on {', '.join(nodes)}"
            return JobChange(job.id, "recall", f"{found}; {_words(then).text}")
        case Cancel(number):
            return JobChange(number, "cancel", "cancelled, as was asked after this state was saved")
        case End(number, runs):
            places = ", ".join(f"attempt {attempt} on {node}" for node, attempt in runs)
            return JobChange(number, "end", f"ended and removed: {places}")


def _lost(state: JobState, jobs: list[int]) -> JobChange:
    count = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {ranges(jobs)}"
    if state in FINAL_STATES:
        ended = "been cancelled" if state is JobState.CANCELLED else state
        text = f"{count} had {ended}: not in the state any more; files that came from nodes are in jobs/ID"
    elif state is not JobState.QUEUED:
        text = f"{count} had started, and nothing is left on the nodes that were asked"
    else:
        text = f"{count} had been submitted and had not started: submit again what is still wanted"
    return JobChange(jobs[0], "lost", text)
