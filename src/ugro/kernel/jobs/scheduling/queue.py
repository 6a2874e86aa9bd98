"""The order in which waiting jobs are considered: by priority, then fairly between users, then by age.

Within a priority, the user comes first who holds the fewest devices and has used the fewest lately, relative to the
user's weight. For each quarter of an hour in which none of a user's older jobs has started, one held device is not
counted, and less of the past use. So a user with a long running job does not wait forever behind others, and every job
becomes the first of its priority in the end.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from ugro.kernel.jobs.model import FINAL_STATES, JobState, Launcher, Resources
from ugro.kernel.jobs.scheduling.demand import names_in
from ugro.kernel.jobs.scheduling.model import ClusterView, Holding, Waiting

# --- lines of waiting jobs --------------------------------------------------------------------------------------------
# Jobs of the same user, priority and kind form a line, the oldest first. Lines are kept from pass to pass, so that a
# pass need not look at all jobs. Jobs of the same kind have the same demand and time limit: if one cannot start, no
# later one can. Jobs that cannot start yet for another reason are parked in lines of their own, which most passes skip.


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


# --- the order --------------------------------------------------------------------------------------------------------


FORGIVEN_EVERY_S = 900.0

_Head = tuple[int, float, float, int, int, int, Line]


class Queue:
    """The order of one pass. Lines are read and not changed."""

    def __init__(self, view: ClusterView, waiting: WaitingJobs) -> None:
        self.skips_closed = True  # else every job has its turn
        self._now = view.now
        held: dict[str, list[Holding]] = defaultdict(list)
        for holder in view.holding:
            held[holder.user].append(holder)
        self._lines = list(waiting.lines)
        self._users = {user: _User(user, held[user], view) for user in {line.user for line in self._lines}}
        self._given = 0
        self._closed: set[Kind] = set()
        self._held_back: set[tuple[str, Kind]] = set()
        self._is_all_closed = False

    def __iter__(self) -> Iterator[tuple[Waiting, Kind]]:
        heads = [self._head(line, 0) for line in self._lines]
        heapq.heapify(heads)
        while heads:
            _, standing, submitted_at, job_id, given, position, line = heads[0]
            if self.skips_closed and self._is_skipped(line):
                heapq.heappop(heads)
                continue
            # Its user may have been given devices since it was entered; that only moves it back.
            if given != self._given and self._standing(line, submitted_at, job_id) > standing:
                heapq.heapreplace(heads, self._head(line, position))
                continue
            yield line.jobs[position][2], line.kind
            if position + 1 < len(line.jobs):
                heapq.heapreplace(heads, self._head(line, position + 1))
            else:
                heapq.heappop(heads)

    def given(self, job: Waiting, devices: int) -> None:
        """The job was just yielded and starts."""
        self._given += 1
        self._users[job.user].given(job, devices)

    def close(self, kind: Kind) -> None:
        """No further job of this kind can start or have anything kept for it in this pass."""
        self._closed.add(kind)

    def hold_back(self, user: str, kind: Kind) -> None:
        """No further job of this kind and user can start in this pass, because of a quota."""
        self._held_back.add((user, kind))

    def is_held_back(self, user: str, kind: Kind) -> bool:
        return (user, kind) in self._held_back

    def is_closed(self, kind: Kind) -> bool:
        return kind in self._closed or self._is_all_closed

    def close_all(self) -> None:
        self._is_all_closed = True

    def _is_skipped(self, line: Line) -> bool:
        kind = line.kind
        if kind is PARKED or kind in self._closed or (self._is_all_closed and kind is not DOOMED):
            return True
        return bool(self._held_back) and (line.user, kind) in self._held_back

    def _head(self, line: Line, position: int) -> _Head:
        submitted_at, job_id, _ = line.jobs[position]
        standing = self._standing(line, submitted_at, job_id)
        return (-line.priority, standing, submitted_at, job_id, self._given, position, line)

    def _standing(self, line: Line, submitted_at: float, job_id: int) -> float:
        return self._users[line.user].standing(submitted_at, job_id, self._now)


class _User:
    def __init__(self, user: str, holders: list[Holding], view: ClusterView) -> None:
        now, self._fair = view.now, view.accounts.fair
        self.devices = sum(holder.devices for holder in holders)
        self._weight = self._fair.weight(user)
        self._average = view.accounts.averages.get(user, 0.0) + sum(
            self._fair.running(holder.devices, now - holder.started_at)
            for holder in holders
            if holder.started_at is not None
        )
        holders = sorted(holders, key=lambda holder: (holder.submitted_at, holder.id))
        starts = [now if holder.started_at is None else holder.started_at for holder in holders]
        # With the id, because all jobs of a sweep are submitted in one moment.
        self._submitted = [(holder.submitted_at, holder.id) for holder in holders]
        self._latest_start = list(accumulate(starts, max))
        self._oldest_given = (float("inf"), 0)  # of the jobs that were started in this pass

    def given(self, job: Waiting, devices: int) -> None:
        self.devices += devices
        self._oldest_given = min(self._oldest_given, (job.submitted_at, job.id))

    def standing(self, submitted_at: float, job_id: int, now: float) -> float:
        """The devices held and used lately, less those that the job's wait makes up for."""
        if not self.devices and not self._average:
            return 0.0
        waited_s = self._waited_s(submitted_at, job_id, now)
        held = max(0, self.devices - int(waited_s // FORGIVEN_EVERY_S))
        return (held + self._fair.standing(self._average, waited_s)) / self._weight

    def _waited_s(self, submitted_at: float, job_id: int, now: float) -> float:
        """Since its submission, or since an older job of its user started."""
        place = (submitted_at, job_id)
        if self._oldest_given < place:
            return 0.0
        since = submitted_at
        older = bisect_left(self._submitted, place)
        if older:
            since = max(since, self._latest_start[older - 1])
        return max(0.0, now - since)
