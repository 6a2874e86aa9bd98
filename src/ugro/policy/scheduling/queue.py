"""The order in which waiting jobs are considered: by priority, then fairly between users, then by age.

Within a priority the user who holds the fewest devices comes first. So that nobody with a long running job waits
forever behind users who come and go, each quarter of an hour that passes without any of a user's older jobs
starting forgives one held device. So every job becomes the first of its priority in the end.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from operator import attrgetter

from ugro.policy.scheduling.snapshot import Holding, Snapshot, Waiting

FORGIVEN_EVERY_S = 900.0


class Queue:
    def __init__(self, snapshot: Snapshot) -> None:
        self._now = snapshot.now
        held: dict[str, list[Holding]] = defaultdict(list)
        for holder in snapshot.holding:
            held[holder.user].append(holder)
        self._lines: dict[tuple[int, str], list[Waiting]] = defaultdict(list)
        for job in snapshot.waiting:
            self._lines[job.spec.priority, job.user].append(job)
        self._users = {user: _User(held[user], snapshot.now) for _, user in self._lines}
        self._gifts = 0

    def __iter__(self) -> Iterator[Waiting]:
        for line in self._lines.values():
            line.sort(key=attrgetter("submitted_at", "id"), reverse=True)
        heads = [self._entry(line[-1]) for line in self._lines.values()]
        heapq.heapify(heads)
        while heads:
            _, _, _, _, job, gifts = heads[0]
            # Its user may have been given something since it was entered; that only ever moves it back.
            if gifts != self._gifts and (fresh := self._entry(job))[1] > heads[0][1]:
                heapq.heapreplace(heads, fresh)
                continue
            line = self._lines[job.spec.priority, job.user]
            line.pop()
            yield job
            if line:
                heapq.heapreplace(heads, self._entry(line[-1]))
            else:
                heapq.heappop(heads)

    def given(self, job: Waiting, devices: int) -> None:
        """The job was just yielded and starts."""
        self._gifts += 1
        self._users[job.user].given(job, devices)

    def _entry(self, job: Waiting) -> tuple[int, int, float, int, Waiting, int]:
        standing = self._users[job.user].standing(job, self._now)
        return (-job.spec.priority, standing, job.submitted_at, job.id, job, self._gifts)


class _User:
    def __init__(self, holders: list[Holding], now: float) -> None:
        self.devices = sum(holder.devices for holder in holders)
        holders = sorted(holders, key=lambda holder: (holder.submitted_at, holder.id))
        starts = [now if holder.started_at is None else holder.started_at for holder in holders]
        # With the id, because all jobs of a sweep are submitted in one moment.
        self._submitted = [(holder.submitted_at, holder.id) for holder in holders]
        self._latest_start = list(accumulate(starts, max))
        self._oldest_given = (float("inf"), 0)  # of the jobs that were started in this pass

    def given(self, job: Waiting, devices: int) -> None:
        self.devices += devices
        self._oldest_given = min(self._oldest_given, (job.submitted_at, job.id))

    def standing(self, job: Waiting, now: float) -> int:
        """The devices held, less what the job's wait forgives."""
        place = (job.submitted_at, job.id)
        if not self.devices or self._oldest_given < place:
            return self.devices
        since = job.submitted_at
        older = bisect_left(self._submitted, place)
        if older:
            since = max(since, self._latest_start[older - 1])
        return max(0, self.devices - int(max(0.0, now - since) // FORGIVEN_EVERY_S))
