"""The end of a run, asked for from outside: through its supervisor while that lives, and by its mark when it does not.

All of this may take its time; ``runs`` has it done in a process of its own. It can be cut short anywhere, and done
again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import stat
import time
from typing import Any, Dict, List, Optional

from ugro.remote import ending
from ugro.remote.ending import LIMIT_S, Ending, Processes
from ugro.remote.program import Refused
from ugro.remote.rundir import RunDir, boot_id, point

_REPEAT_S = 1.0
_LONGEST_REASON = 500  # an order goes through the pipe in one piece
_DELETIONS = 4
_PAUSE_S = 0.02
_ANSWER_S = 10.0  # beyond its grace and the kernel's time, before a supervisor counts as hanging


def stop(run: RunDir, reason: str, grace_s: float) -> Dict[str, Any]:
    """Returns when the run is over, with its status; ``busy`` when it cannot be ended in time."""
    if not run.exists():
        with run.fence.held():
            if not run.exists():
                run.fence.close(run.attempt)  # a start that is still on its way comes too late
                return {**run.status(), "status": "absent"}
    hangs_at = time.monotonic() + grace_s + LIMIT_S + _ANSWER_S
    order_at = 0.0
    while run.exit() is None:
        now = time.monotonic()
        if not run.is_alive():
            clean(run)
        elif now >= hangs_at:
            _end_supervisor(run, hangs_at + LIMIT_S)
        elif now >= order_at:
            order_at = now + _REPEAT_S
            _order(run, {"reason": reason[:_LONGEST_REASON], "grace_s": grace_s})
        time.sleep(_PAUSE_S)
    return run.status()


def clean(run: RunDir) -> None:
    """Ends what a dead supervisor left and writes the run's last word. Nothing, if somebody else is at it."""
    lock = run.take_lock(timeout_s=0.1)
    if lock is None:
        return
    try:
        point("clean.locked")
        if run.exit() is None:
            was_claimed = not run.claim()  # a supervisor that comes late must not start any more
            point("clean.claimed")
            left = _end_leftovers(run)
            point("clean.ended")
            if was_claimed and run.unadopted_exit() is not None:
                run.adopt_exit()
            else:
                run.write_exit(_lost(run, was_claimed, left))
    finally:
        os.close(lock)


def remove(run: RunDir) -> None:
    if run.exists():
        lock = run.take_lock(timeout_s=0.5)
        if lock is None:
            raise Refused("alive", "%s is still alive; stop it first" % run.name)
        try:
            if run.exit() is None:
                raise Refused("not-exited", "%s is not known to be over; stop it first" % run.name)
            _set_aside(run)
        finally:
            os.close(lock)
    for path in run.set_aside_before():
        _delete(path)
    point("remove.deleted")


def _set_aside(run: RunDir) -> None:
    with run.fence.held():
        run.fence.close(run.attempt)
        point("remove.closed")
        with contextlib.suppress(FileNotFoundError):  # somebody else removed it meanwhile
            run.set_aside()
    point("remove.renamed")


def _delete(path: str) -> None:
    """A folder that forbids it is opened, and tried again: its user made it, and we are that user."""
    problems: List[BaseException] = []

    def open_up(function: Any, name: str, problem: Any) -> None:
        problems.append(problem[1])
        for folder in (os.path.dirname(name), name):
            if os.path.isdir(folder) and not os.path.islink(folder):
                with contextlib.suppress(OSError):
                    os.chmod(folder, stat.S_IRWXU)

    for _ in range(_DELETIONS):
        shutil.rmtree(path, onerror=open_up)
        if not os.path.lexists(path):
            return
    raise problems[-1]


def _order(run: RunDir, order: Dict[str, Any]) -> None:
    for pid, started in ending.marked(run.mark).items():
        ending.send(pid, started, signal.SIGCONT)  # a supervisor that somebody stopped hears nothing
    try:
        control = os.open(run.file("control"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):  # not listening yet, or no more
            return
        raise
    try:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(control, json.dumps(order).encode() + b"\n")
    finally:
        os.close(control)


def _end_supervisor(run: RunDir, until: float) -> None:
    """It hangs: it and all below it are killed, and then it is cleaned up like one that died."""
    for pid, started in ending.marked(run.mark).items():
        ending.send(pid, started, signal.SIGKILL)
    if time.monotonic() > until:
        raise Refused("busy", "%s cannot be ended: its supervisor hangs in the kernel" % run.name)


def _end_leftovers(run: RunDir) -> Ending:
    cgroup = (run.state() or {}).get("cgroup")

    def find() -> Processes:
        return {**ending.marked(run.mark), **ending.in_cgroup(cgroup)}

    # No grace: their ranks were killed with their supervisor.
    leftovers = Ending(find, dict, 0.0)
    while not leftovers.step():
        time.sleep(leftovers.pause_s)
    return leftovers


def _lost(run: RunDir, was_claimed: bool, leftovers: Ending) -> Dict[str, Any]:
    state: Optional[Dict[str, Any]] = run.state()
    if not was_claimed:
        outcome, reason = "never-started", "it was stopped before it had started"
    elif state is not None and state.get("boot_id") != boot_id():
        outcome, reason = "lost", "the machine was restarted"
    else:
        outcome, reason = "lost", "its supervisor was killed"
    return {
        "outcome": outcome,
        "reason": reason,
        "failure": None,
        "ranks": [],
        "leftovers": len(leftovers.found),
        "unkillable": leftovers.left,
        "boot_id": boot_id(),
        "started_at": state.get("started_at") if state else None,
        "ended_at": time.time(),
        "duration_s": None,
    }
