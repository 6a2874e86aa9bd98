"""How a supervisor is started so that it stays when everything that started it goes: node program, session, login.

Where a session of its own is enough, it is forked, with all that is loaded already. Where it needs a control group of
its own, or cannot be told from the node program otherwise, it is a fresh Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
from typing import Any, Dict, Iterator, List, NoReturn, Tuple

from ugro.remote import oom, tree
from ugro.remote.ending import UNIT_PREFIX
from ugro.remote.execute import close_all_but
from ugro.remote.guise import Guise
from ugro.remote.program import Refused
from ugro.remote.rundir import RunDir, point
from ugro.remote.supervisor import Supervisor
from ugro.remote.survival import survival as survival_here

_GET_CHILD_SUBREAPER = 37
_SET_CHILD_SUBREAPER = tree.PR_SET_CHILD_SUBREAPER
_BEGIN = "import sys; sys.path.insert(0, sys.argv[1]); from ugro.remote.supervisor import main; main(sys.argv[2:])"
_TITLE = b"ugro.remote.supervisor"
_SURVIVAL_S = 5.0  # a user who was refused allows it, and tries again
_libc = ctypes.CDLL(None, use_errno=True)
_survival: List[Tuple[float, Dict[str, Any]]] = []


def ways(survival: Dict[str, Any], unit: str, prefix: str = "/") -> List[List[str]]:
    """What to put before the supervisor's command, best first; the next is for when one ends without starting it.

    A control group of its own survives a logout only where the user lingers; a session of its own only where
    logind leaves a user's processes alone. ``prefix`` is where the system's files are.
    """
    found: List[List[str]] = []
    manager = os.path.join(prefix, "run/user/%d/systemd" % os.getuid())
    scope = ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--unit=%s" % unit]
    if survival["lingers"] and os.path.isdir(manager) and _has_systemd_run():
        # One rank that runs out of memory must not take its supervisor along; older systemds do not know how.
        found += [[*scope, "--property=OOMPolicy=continue", "--"], [*scope, "--"]]
    if not (survival["has_logind"] and survival["kills_processes"]):
        found.append([])
    if not found:
        text = "a logout would end the run: logind ends this user's processes. Allow them: loginctl enable-linger %s"
        raise Refused("would-be-killed", text % survival["user"])
    return found


def _has_systemd_run() -> bool:
    import shutil  # brings much with it, and most machines do not come this far

    return shutil.which("systemd-run") is not None


def ways_here(run: RunDir) -> List[List[str]]:
    now = time.monotonic()
    if not _survival or now - _survival[0][0] > _SURVIVAL_S:
        _survival[:] = [(now, survival_here())]
    unit = "%s%s-%s" % (UNIT_PREFIX, run.name.replace(".", "-"), os.urandom(4).hex())
    return ways(_survival[0][1], unit)


def launch(run: RunDir, way: List[str]) -> int:
    """Starts a supervisor and returns a pipe: it ends when the ranks run, or when the supervisor is gone."""
    oom.look()  # the supervisor takes it over
    env = {**os.environb, **{os.fsencode(key): os.fsencode(text) for key, text in run.variables().items()}}
    guise = Guise([_TITLE, run.name.encode()], env)
    ready, say = os.pipe()
    try:
        with _no_subreaper():
            between = os.fork()
            if between == 0:
                _leave(run, way, guise, say)
            os.waitpid(between, 0)
    except OSError:
        os.close(ready)
        raise
    finally:
        os.close(say)
    point("start.launched")
    return ready


@contextlib.contextmanager
def _no_subreaper() -> Iterator[None]:
    """The node program adopts orphans, and ends those it does not know. A supervisor is not to be its child."""
    was_on = ctypes.c_int(0)
    _libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(was_on), 0, 0, 0)
    _libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET_CHILD_SUBREAPER, was_on.value, 0, 0, 0)


def _leave(run: RunDir, way: List[str], guise: Guise, say: int) -> NoReturn:
    """Runs in the process between; its child is an orphan from the start, and of another session."""
    try:
        os.setsid()
        if os.fork() == 0:
            _become(run, way, guise, say)
    finally:
        os._exit(0)


def _become(run: RunDir, way: List[str], guise: Guise, say: int) -> NoReturn:
    """Nothing of the node program is let go of: what it had open is closed, and must not be closed again."""
    try:
        gc.freeze()
        _settle(run, way, guise, say)
        Supervisor(run, say).run()
    finally:
        if sys.exc_info()[0] is not None:
            import traceback  # takes longer to load than most runs last

            _open_log(run)
            traceback.print_exc()
        os._exit(1)


def _open_log(run: RunDir) -> None:
    """Of the supervisor itself: empty, unless it has a fault."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(run.file("supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), 2)


def _settle(run: RunDir, way: List[str], guise: Guise, say: int) -> None:
    try:
        close_all_but([say])
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir("/")  # keeps no file system from being unmounted
        if way or not _is_shown(guise):
            _start_afresh(run, way, guise.env, say)
    except OSError as error:
        os.write(say, json.dumps({"kind": "os", "message": "no supervisor can be started: %s" % error}).encode())
        os._exit(1)


def _is_shown(guise: Guise) -> bool:
    try:
        guise.put_on()
    except OSError:
        return False
    return True


def _start_afresh(run: RunDir, way: List[str], env: Dict[bytes, bytes], say: int) -> NoReturn:
    _open_log(run)
    os.set_inheritable(say, True)
    argv = [*way, *_command(run, say)]
    runtime = b"/run/user/%d" % os.getuid()
    os.execvpe(argv[0], argv, {b"XDG_RUNTIME_DIR": runtime, **env} if way else env)


def _command(run: RunDir, say: int) -> List[str]:
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    python = sys.executable or os.readlink("/proc/self/exe")
    where = [run.agent.root, run.agent.name, run.job, str(run.attempt), str(say)]
    return [python, "-I", "-S", "-c", _BEGIN, home, *where]
