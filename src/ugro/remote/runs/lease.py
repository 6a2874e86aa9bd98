"""The lease of a run as its reaper keeps it: what to do at a moment, when the supervisor may be stopped or hang.

Decisions only; times are those of ``clock_s``. A supervisor sees by itself that a lease is over and ends the run with
grace. One that does not hears of it and is continued, and at the end of the grace all below it is killed.
"""

from __future__ import annotations

from typing import NamedTuple

LOOK_S = 0.2  # between two looks, of supervisor and reaper
PATIENCE_S = 0.5  # for a supervisor that sees it by itself
KILL_AFTER_S = 2.0  # beyond the grace: by then a supervisor that works has ended the run

WAIT, TELL, KILL = "wait", "tell", "kill"


def killed_after_s(lease_s: float, grace_s: float) -> float:
    """From the last renewal to the kill, at the latest; an agent that counts a run as dead must wait for longer."""
    return lease_s + grace_s + KILL_AFTER_S + LOOK_S


def grace_left_s(lease_s: float, grace_s: float, silent_s: float) -> float:
    """A supervisor that comes late (it was stopped, or the machine slept) gives no more time than one in time."""
    return min(grace_s, max(0.0, lease_s + grace_s - silent_s))


class Lease(NamedTuple):
    run: str
    lease_s: float
    grace_s: float
    as_of_s: float  # when the agent decided the start


class KeptLease:
    def __init__(self, lease: Lease) -> None:
        self.run = lease.run
        self._lease = lease
        self._heard_s = lease.as_of_s
        self._is_over = False

    def silent_s(self, now_s: float) -> float:
        return now_s - self._heard_s

    def look(self, now_s: float, heard_s: float) -> str:
        """``heard_s``: when the agent was last heard. What was once over stays over, whatever is heard then."""
        if not self._is_over:
            self._heard_s = max(self._heard_s, heard_s)
            self._is_over = self.silent_s(now_s) > self._lease.lease_s
        if not self._is_over:
            return WAIT
        silent_s = self.silent_s(now_s)
        if silent_s > self._lease.lease_s + self._lease.grace_s + KILL_AFTER_S:
            return KILL
        return TELL if silent_s > self._lease.lease_s + PATIENCE_S else WAIT
