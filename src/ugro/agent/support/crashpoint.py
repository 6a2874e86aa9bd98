"""Points at which tests kill or pause the agent, between any two durable steps. Without a test they do nothing."""

from __future__ import annotations

import os
import signal

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
