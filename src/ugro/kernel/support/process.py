"""This process: points at which tests kill or pause it, its open files, and what its children inherit.

The points are between any two durable steps. Without a test they do nothing.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Mapping

# "NAME", "NAME:pause" (SIGSTOP instead of SIGKILL), "NAME@3" (the third time it is passed).
VARIABLE = "UGRO_AGENT_CRASH_POINT"
POINTS = (
    "submit.begun", "submit.asked", "submit.recorded",
    "start.recorded", "start.checked", "start.planned", "start.asked", "start.answered", "running.recorded",
    "cancel.recorded", "stop.recorded", "stop.asked", "stop.answered",
    "conclude.begun", "conclude.logged", "conclude.recorded", "conclude.removed",
    "finish.begun", "finish.logged", "finish.recorded",
    "sweep.found", "sweep.stopped", "sweep.brought",
)  # fmt: skip

SWEEP_POINTS = (
    "sweep.created", "trial.recorded", "trial.submitted", "trial.running", "trial.ending", "trial.ended",
    "trial.closed", "sweep.over",
)  # fmt: skip

SERVICE_POINTS = (
    "service.created", "service.decided", "service.submitted", "service.door", "service.added", "service.updated",
    "service.drained", "service.cancelled", "service.removed", "service.forgotten",
)  # fmt: skip
POWER_POINTS = ("power.recorded", "hook.sending", "hook.sent")

RECONCILE_POINTS = ("reconcile.planned", "reconcile.recorded")

_wanted, _, _how = os.environ.get(VARIABLE, "").partition(":")
_name, _, _count = _wanted.partition("@")
_left = int(_count or 1)


def point(name: str) -> None:
    global _left
    if not _name or name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGSTOP if _how == "pause" else signal.SIGKILL)


# --- open files -------------------------------------------------------------------------------------------------------
# Says how many files and connections this process may have open, and what its children start with.


_ENOUGH = 65_536
# Many programs still assume that no descriptor is above 1023: children get the limit that this process was given.
_given: list[tuple[int, int]] = []


def raise_limit() -> int:
    """Raises the limit as far as it needs no privileges, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse what they offer
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _given[:] = [(soft, hard)]
    return limit()


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft


def restore_limit(pid: int) -> None:
    """Gives a new child the limit that this process was given, before the child has started others."""
    if sys.platform != "linux":
        return
    for given in _given:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's by now
            resource.prlimit(pid, resource.RLIMIT_NOFILE, given)


# --- the environment of a user's command ------------------------------------------------------------------------------
# Of the agent's environment, which may hold secrets, it gets what every program needs.


INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),
    "UGRO_HOME",  # so that the command's own ugro finds this agent
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in INHERITED if name in environ}
