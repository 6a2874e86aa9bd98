"""The waiting jobs in lines that are kept from pass to pass, so that a pass need not look at all jobs.

Jobs of the same user, priority and kind form a line, the oldest first. Jobs of the same kind have the same demand and
time limit: if one cannot start, no later one can. Jobs that cannot start yet for another reason are parked in lines of
their own, which most passes skip.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ugro.core.job import FINAL_STATES, JobState, Launcher, Resources
from ugro.policy.scheduling.cluster_view import Waiting
from ugro.policy.scheduling.demand import names_in


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What decides whether a job can start now. Equal kinds are one object, compared by identity."""

    resources: Resources
    is_command: bool  # runs on one node, whatever number is requested
    time_limit_s: float | None
    grace_s: float
    imports: tuple[str, ...] = ()
    is_firm: bool = False  # without what it imports it fails: nothing installs it first
    user: str = ""  # whose jobs they are, where nodes let in some users and not others

    def end(self, now: float) -> float | None:
        """When a job that starts now has ended at the latest."""
        return None if self.time_limit_s is None else now + self.time_limit_s + self.grace_s


PARKED = Kind(Resources(), False, None, 0.0)  # waits before its next attempt, or for a job that it runs after
DOOMED = Kind(Resources(), False, None, 0.0)  # requires the success of a job that did not succeed

_NOT_SUCCEEDED = FINAL_STATES - {JobState.SUCCEEDED}
_FEW_KINDS = 64


@dataclass(slots=True, eq=False)
class Line:
    priority: int
    user: str
    kind: Kind
    jobs: list[tuple[float, int, Waiting]] = field(default_factory=list)  # by time of submission and id


class WaitingJobs:
    def __init__(self) -> None:
        self._jobs: dict[int, Waiting] = {}
        self._lines: dict[tuple[int, str, Kind], Line] = {}
        self._line_of: dict[int, Line] = {}
        self._kinds: dict[tuple[object, ...], Kind] = {}
        self._pauses: list[tuple[float, int]] = []  # a heap of when pauses end, and of which job
        self._paused: set[int] = set()
        self._followers: dict[int, set[int]] = defaultdict(set)  # the jobs that run after another, by that one
        self._outcomes: dict[int, JobState] = {}  # of those that others follow and that have ended
        self._unknown: set[int] = set()
        self._tells_users_apart = False

    @classmethod
    def of(cls, jobs: Iterable[Waiting], ended: Mapping[int, JobState]) -> WaitingJobs:
        made = cls()
        for job in jobs:
            made.put(job)
        for job_id in made.unknown_jobs():
            if (state := ended.get(job_id)) is not None:
                made.learn(job_id, state)
        return made

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._jobs.values())

    def tell_users_apart(self, is_needed: bool) -> None:
        """Whether jobs of two users may be of one kind: not where a node lets in one of them only."""
        if is_needed != self._tells_users_apart:
            self._tells_users_apart = is_needed
            for job in list(self._jobs.values()):
                self._move(job)

    def named_nodes(self) -> frozenset[str]:
        """The nodes that waiting jobs ask for by name."""
        kinds = {line.kind for line in self._lines.values() if line.kind.resources.only or line.kind.resources.any_of}
        return frozenset(name for kind in kinds for name in names_in(kind.resources))

    def get(self, job_id: int) -> Waiting | None:
        return self._jobs.get(job_id)

    @property
    def lines(self) -> Iterable[Line]:
        return self._lines.values()

    @property
    def outcomes(self) -> Mapping[int, JobState]:
        """The final states of the ended jobs that waiting ones run after."""
        return self._outcomes

    def kind_of(self, job_id: int) -> Kind:
        return self._line_of[job_id].kind

    def put(self, job: Waiting) -> None:
        """A new job, or a known one that has changed."""
        self.discard(job.id)
        self._jobs[job.id] = job
        for other in _followed(job):
            self._followers[other].add(job.id)
            if other not in self._outcomes:
                self._unknown.add(other)
        if job.not_before is not None:
            heapq.heappush(self._pauses, (job.not_before, job.id))
            self._paused.add(job.id)
        self._enter(job)

    def discard(self, job_id: int) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        self._leave(job)
        self._paused.discard(job_id)
        for other in _followed(job):
            self._followers[other].discard(job_id)
            if not self._followers[other]:
                del self._followers[other]
                self._outcomes.pop(other, None)
                self._unknown.discard(other)

    def end_pauses(self, now: float) -> None:
        """Jobs whose pause is over may start. A pass begins with this."""
        while self._pauses and self._pauses[0][0] <= now:
            not_before, job_id = heapq.heappop(self._pauses)
            job = self._jobs.get(job_id)
            if job is not None and job.not_before == not_before:
                self._paused.discard(job_id)
                self._move(job)

    def unknown_jobs(self) -> list[int]:
        """Jobs that others run after and whose state is to be looked up."""
        return list(self._unknown)

    def learn(self, job_id: int, state: JobState) -> None:
        """The state of a job that others may run after."""
        self._unknown.discard(job_id)
        if state not in FINAL_STATES or job_id not in self._followers:
            return
        self._outcomes[job_id] = state
        for follower in self._followers[job_id]:
            self._move(self._jobs[follower])

    def _move(self, job: Waiting) -> None:
        self._leave(job)
        self._enter(job)

    def _kind(self, job: Waiting) -> Kind:
        if job.id in self._paused:
            return PARKED
        spec, followed = job.spec, _followed(job)
        if followed:
            if any(self._outcomes.get(other) in _NOT_SUCCEEDED for other in spec.after.ok):
                return DOOMED
            if any(other not in self._outcomes for other in followed):
                return PARKED
        imports = spec.node_imports
        key = (
            spec.resources, spec.launcher is Launcher.COMMAND, spec.time_limit_s, spec.stop.grace_s,
            imports.names, imports.is_certain and bool(imports.names), job.user if self._tells_users_apart else "",
        )  # fmt: skip
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(*key)
        return kind

    def _enter(self, job: Waiting) -> None:
        key = (job.spec.priority, job.user, self._kind(job))
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(*key)
        place = (job.submitted_at, job.id, job)
        if line.jobs and line.jobs[-1][:2] > place[:2]:
            insort(line.jobs, place)
        else:
            line.jobs.append(place)
        self._line_of[job.id] = line

    def _leave(self, job: Waiting) -> None:
        line = self._line_of.pop(job.id)
        del line.jobs[bisect_left(line.jobs, (job.submitted_at, job.id))]
        if not line.jobs:
            del self._lines[line.priority, line.user, line.kind]
            if len(self._kinds) > 2 * len(self._lines) + _FEW_KINDS:
                used = {other.kind for other in self._lines.values()}
                self._kinds = {key: kind for key, kind in self._kinds.items() if kind in used}


def _followed(job: Waiting) -> tuple[int, ...]:
    """The jobs that must have ended before it starts. Between attempts there are none: they ended before the first."""
    return (*job.spec.after.ok, *job.spec.after.any) if job.state is JobState.QUEUED else ()
