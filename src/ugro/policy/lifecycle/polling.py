"""How soon a node is probed again: often while there are jobs, rarely when the cluster has been idle for long."""

from __future__ import annotations

from dataclasses import dataclass

RECENT_S = 30 * 60.0
QUIET_S = 2 * 60 * 60.0
LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between two probes of a node, by how long ago there were jobs."""

    busy_s: float = 5.0
    recent_s: float = 10.0
    quiet_s: float = 20.0
    idle_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Poll:
    interval_s: float
    reason: str


def poll(pace: Pace, *, jobs: int, idle_s: float, failures: int = 0) -> Poll:
    """``jobs``: how many have not ended. ``idle_s``: since a job last changed. ``failures`` of this node in a row."""
    if jobs:
        return _poll(pace.busy_s, f"{jobs} jobs are not over" if jobs > 1 else "a job is not over")
    if failures:
        return _poll(pace.busy_s, "it did not answer the last time")
    if idle_s < RECENT_S:
        return _poll(pace.recent_s, "there was work within the last 30 minutes")
    if idle_s < QUIET_S:
        return _poll(pace.quiet_s, "there was work within the last 2 hours")
    return _poll(pace.idle_s, "there was no work for 2 hours")


def _poll(interval_s: float, reason: str) -> Poll:
    return Poll(min(interval_s, LONGEST_S), reason)
