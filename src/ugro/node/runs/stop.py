"""The end of a run, asked for from outside: through its supervisor while that lives, and by its mark when it does not.

All of this may take its time; ``runs`` has it done in a process of its own. It can be cut short anywhere, and done
again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ugro.node.clock import boot_id
from ugro.node.files import checkpoint_dir
from ugro.node.process import terminate
from ugro.node.process.terminate import LIMIT_S, Ending, Family, Processes, ProcessName
from ugro.node.program import Refused
from ugro.node.runs import reaper
from ugro.node.runs.rundir import AgentDir, RunDir, point

_REPEAT_S = 1.0
_LONGEST_REASON = 500  # an order goes through the pipe in one piece
_DELETIONS = 4
_FEW = 64
_LITTLE_BYTES = 16 << 20  # to give back much more space takes a file system its time
_SMALL = frozenset(("spec.json", "claim", "lock", "control", "state.json", "exit.json", "supervisor.log"))
_PAUSE_S = 0.02
# A mark can be taken off: a process that has neither that nor a parent of ours is not found.
_UNPROVEN = ", and so was its reaper: a process that left its session and environment may still run"
_RELEASE_S = 5.0  # that takes a moment, unless the machine is very busy
_ANSWER_S = 10.0  # beyond its grace and the kernel's time, before a supervisor counts as hanging


def stop(run: RunDir, reason: str, grace_s: float, signum: Optional[int] = None) -> Dict[str, Any]:
    """Returns when the run is over, with its status; ``busy`` when it cannot be ended in time.

    ``signum`` is what its ranks get first, instead of what its spec says.
    """
    if not run.exists():
        with run.fence.held() as fence:
            if not run.exists():
                fence.close(run.attempt)  # a start that is still on its way comes too late
                return {**run.status(), "status": "absent"}
    order = {"reason": reason[:_LONGEST_REASON], "grace_s": grace_s, "signal": signum}
    hangs_at = time.monotonic() + grace_s + LIMIT_S + _ANSWER_S
    order_at = 0.0
    while run.exit() is None:
        now = time.monotonic()
        if not run.exists():  # somebody else stopped it, and has removed it since
            return {**run.status(), "status": "absent"}
        if not run.is_alive():
            with _unless_removed(run):
                clean(run)
        elif now >= hangs_at:
            _end_supervisor(run, hangs_at + LIMIT_S)
        elif now >= order_at:
            order_at = now + _REPEAT_S
            _order(run, order)
        time.sleep(_PAUSE_S)
    _await_release(run)
    return run.status()


def _await_release(run: RunDir) -> None:
    """A supervisor lets go of its GPUs after it has written the exit record: the next run may want them."""
    deadline = time.monotonic() + _RELEASE_S
    while run.is_alive() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S / 10)


def clean(run: RunDir) -> None:
    """Ends what a dead supervisor left and writes the run's exit record. Nothing, if another process is at it."""
    lock = run.take_lock(timeout_s=0.1)
    if lock is None:
        return
    try:
        point("clean.locked")
        if run.exit() is None:
            was_claimed = not run.claim()  # a supervisor that comes late must not start any more
            point("clean.claimed")
            _await_reaper(run)
            left = _end_leftovers(run)
            _remove_groups(run)
            point("clean.ended")
            if was_claimed and run.unadopted_exit() is not None:
                run.adopt_exit()
            else:
                run.write_exit(_lost(run, was_claimed, left))
            run.make_exit_last()
    finally:
        os.close(lock)


def remove(run: RunDir) -> None:
    """Also what earlier removals left that were cut short."""
    if run.exists():
        with _unless_removed(run), _over(run, timeout_s=0.5), run.fence.held() as fence:
            fence.close(run.attempt)
            point("remove.closed")
            checkpoints = checkpoint_dir.of_run(run)
            if checkpoints is not None:  # the next attempt resumes from them
                checkpoints.save(run)
            run.set_aside()
    point("remove.renamed")
    _set_orphans_aside(run.agent)
    for path in run.agent.set_aside_before():
        _delete(path)
    point("remove.deleted")


@contextlib.contextmanager
def _unless_removed(run: RunDir) -> Iterator[None]:
    """That something is not there is no error if somebody else has removed the run meanwhile."""
    try:
        yield
    except FileNotFoundError:
        if run.exists():
            raise


def _set_orphans_aside(agent: AgentDir) -> None:
    """Folders that are named after a process that is gone: the pool of a node program, and what a supervisor left.

    In one step each, as a supervisor that outlives its node program takes a folder: one of the two has all of it.
    """
    for parent in (agent.pool_path, agent.supervisors_path):
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(parent):
                path = os.path.join(parent, name)
                if ProcessName.parse(name).is_orphaned() and not _is_reaped(path):
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(path, agent.aside(name))


def _is_reaped(folder: str) -> bool:
    """The reaper is still at what the supervisor left: who cleans up a run must find it by this folder."""
    found = reaper.name_in(folder)
    return found is not None and found.is_alive()


def remove_quickly(run: RunDir) -> bool:
    """True when it is done. Only what takes no time: nothing to wait for, no word to the disk, a small folder."""
    try:
        with _over(run, timeout_s=0):
            # Closed when it was claimed, and that has lasted ever since: the claim can go.
            entries = _few_entries(run.path) if run.fence.is_closed_to(run.attempt) else None
            if entries is None or checkpoint_dir.of_run(run) is not None:
                return False
            aside = run.set_aside()
    except FileNotFoundError:  # not there, or somebody else removes it, too
        return False
    return _delete_entries(aside, entries)


@contextlib.contextmanager
def _over(run: RunDir, timeout_s: float) -> Iterator[None]:
    """Nobody is at it, and nobody comes meanwhile."""
    lock = run.take_lock(timeout_s)
    if lock is None:
        raise Refused("alive", "%s is still alive; stop it first" % run.name)
    try:
        if run.exit() is None:
            raise Refused("not-exited", "%s is not known to be over; stop it first" % run.name)
        yield
    finally:
        os.close(lock)


def _few_entries(folder: str) -> Optional[List[Tuple[str, bool]]]:
    """Names below the folder and whether each is a folder, those to delete first last; None when it is much."""
    found: List[Tuple[str, bool]] = []
    folders = [""]
    size = 0
    while folders:
        inside = folders.pop()
        with os.scandir(os.path.join(folder, inside)) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                name = os.path.join(inside, entry.name)
                found.append((name, is_folder))
                if is_folder:
                    folders.append(name)
                elif entry.name not in _SMALL:
                    size += entry.stat(follow_symlinks=False).st_size
                if len(found) > _FEW or size > _LITTLE_BYTES:
                    return None
    return found


def _delete_entries(folder: str, entries: List[Tuple[str, bool]]) -> bool:
    """False when something is left: it changed meanwhile, or a folder forbids it."""
    with contextlib.suppress(OSError):
        for name, is_folder in reversed(entries):
            path = os.path.join(folder, name)
            os.rmdir(path) if is_folder else os.unlink(path)
        os.rmdir(folder)
        return True
    return False


def _delete(path: str) -> None:
    """A folder that forbids it is opened, and tried again: its user made it, and we are that user."""
    import shutil  # brings much with it, and most runs leave little

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


def start_again(run: RunDir, rank: int, starts: int) -> None:
    """Orders it; the run's status tells what came of it."""
    _tell(run, {"rank": rank, "starts": starts})


def _order(run: RunDir, order: Dict[str, Any]) -> None:
    name = _supervisor(run)
    for pid, started in {**terminate.marked(run.mark), **_processes(name)}.items():
        terminate.send(pid, started, signal.SIGCONT)  # a supervisor that somebody stopped hears nothing
    _tell(run, order)


def _tell(run: RunDir, order: Dict[str, Any]) -> None:
    name = _supervisor(run)
    try:
        control = os.open(run.agent.supervisor(str(name)) + "/control", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):  # not listening yet, or no more
            return
        raise
    try:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(control, json.dumps({"run": run.name, **order}).encode() + b"\n")
    finally:
        os.close(control)


def _supervisor(run: RunDir) -> Optional[ProcessName]:
    """None for a run that none has ever claimed."""
    name = run.supervisor()
    return ProcessName.parse(name) if name else None


def _processes(supervisor: Optional[ProcessName]) -> Processes:
    return supervisor.processes() if supervisor else {}


def _end_supervisor(run: RunDir, until: float) -> None:
    """It hangs: it and all below it are killed, and its runs are cleaned up like those of one that died."""
    for pid, started in {**terminate.marked(run.mark), **_processes(_supervisor(run))}.items():
        terminate.send(pid, started, signal.SIGKILL)
    if time.monotonic() > until:
        raise Refused("busy", "%s cannot be ended: its supervisor hangs in the kernel" % run.name)


def _await_reaper(run: RunDir) -> None:
    """It ends more than can be found here: whatever the supervisor that was killed had below it."""
    supervisor = _supervisor(run)
    if supervisor is None or supervisor.is_alive():
        return
    found = reaper.name_in(run.agent.supervisor(str(supervisor)))
    until = time.monotonic() + LIMIT_S + _ANSWER_S
    while found is not None and found.is_alive() and not run.has_all_ended() and time.monotonic() < until:
        for pid, started in found.processes().items():
            terminate.send(pid, started, signal.SIGCONT)
        time.sleep(_PAUSE_S)


def _end_leftovers(run: RunDir) -> Ending:
    supervisor, state = _supervisor(run), run.state() or {}
    # A supervisor that gave up one run goes on with the others, and all of them are in its control group.
    cgroup = None if supervisor and supervisor.is_alive() else state.get("cgroup")
    is_of_this_boot = run.claimed_in() in ("", boot_id())
    ranks = {rank["pid"]: rank["start_ticks"] for rank in state.get("ranks", ()) if is_of_this_boot}
    is_unproven = not _is_proven(run)

    def find() -> Processes:
        in_groups = {**terminate.in_cgroup(cgroup), **terminate.in_groups(_groups(run))}
        found = {**terminate.alive(ranks), **terminate.marked(run.mark), **in_groups}
        # One that took off the mark still writes to the log, unless it took care of that, too.
        return {**found, **terminate.writing_in(run.file("logs"))} if is_unproven else found

    # No grace: the reaper of a supervisor that was killed gives its ranks none either.
    leftovers = Ending(Family(find), dict, 0.0)
    while not leftovers.step():
        time.sleep(leftovers.pause_s)
    return leftovers


def _is_proven(run: RunDir) -> bool:
    """Nothing of it is left: its reaper had all below it, or it was in a control group, which is empty now."""
    supervisor = _supervisor(run)
    is_alive = supervisor is not None and supervisor.is_alive()  # it gave up this run, and knew that it was over
    has_group = bool((run.state() or {}).get("cgroup") or _groups(run))
    return is_alive or run.has_all_ended() or has_group


def _groups(run: RunDir) -> List[str]:
    """The folders of the control groups that were made for its limits."""
    folders = (run.state() or {}).get("groups") or ()
    return [str(folder) for folder in folders if os.path.basename(str(folder)).rpartition("-")[0].endswith(run.name)]


def _remove_groups(run: RunDir) -> None:
    """Its supervisor would have; what cannot go yet is tidied up before the next run with limits."""
    for folder in _groups(run):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _lost(run: RunDir, was_claimed: bool, leftovers: Ending) -> Dict[str, Any]:
    state: Optional[Dict[str, Any]] = run.state()
    if not was_claimed:
        outcome, reason = "never-started", "it was stopped before it had started"
    elif run.claimed_in() not in (None, "", boot_id()):
        outcome, reason = "lost", "the machine was restarted"
    else:
        outcome, reason = "lost", "its supervisor was killed" + ("" if _is_proven(run) else _UNPROVEN)
    return {
        "run": run.name,
        "outcome": outcome,
        "reason": reason,
        "failure": None,
        "ranks": [],
        "leftovers": len(leftovers.found),
        "unkillable": leftovers.left,
        "may_have_left": reason.endswith(_UNPROVEN),
        "boot_id": boot_id(),
        "started_at": state.get("started_at") if state else None,
        "ended_at": time.time(),
        "duration_s": None,
    }
