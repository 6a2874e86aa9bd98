"""Jobs that waited already when this agent started go on waiting until the nodes have said what they run.

If an older copy of the whole state directory was put back, only nodes can say that such a job was started since then.
Jobs that are submitted later do not wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ugro.agent.tracking.run_tracker import RunTracker
from ugro.core.job import Job
from ugro.policy.wording import names

_LONGEST_S = 10.0


class FirstAnswers:
    def __init__(self, watch: RunTracker, longest_s: float = _LONGEST_S) -> None:
        self._watch = watch
        self._longest_s = longest_s
        self._held: frozenset[int] | None = None  # None: nobody has looked yet
        self._since = 0.0

    def look(self, waiting: Callable[[], Iterable[Job]]) -> bool:
        """Called again and again. Whether the jobs that waited may start from now on."""
        if self._held is None:
            self._held, self._since = frozenset(job.id for job in waiting()), time.monotonic()
        if not self._held or (self._watch.unheard() and time.monotonic() - self._since < self._longest_s):
            return False
        self._held = frozenset()
        return True

    def waits(self, job: int) -> bool:
        return self._held is None or job in self._held

    def reason(self, job: int) -> str | None:
        """Why it does not start yet, for users."""
        unheard = self._watch.unheard()
        if not self._held or job not in self._held or not unheard:
            return None
        return f"was queued before the agent started: waits until it is known what runs on {names(unheard)}"
