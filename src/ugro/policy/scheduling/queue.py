"""The order in which waiting jobs are considered: by priority, then fairly between users, then by age.

Within a priority, the user comes first who holds the fewest devices and has used the fewest lately, relative to the
user's weight. For each quarter of an hour in which none of a user's older jobs has started, one held device is not
counted, and less of the past use. So a user with a long running job does not wait forever behind others, and every job
becomes the first of its priority in the end.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate

from ugro.policy.scheduling.cluster_view import ClusterView, Holding, Waiting
from ugro.policy.scheduling.waiting_jobs import DOOMED, PARKED, Kind, Line, WaitingJobs

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
