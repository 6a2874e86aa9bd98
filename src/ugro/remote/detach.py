"""How a supervisor is started so that it stays when everything that started it goes: node program, session, login."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
from typing import Any, Dict, Iterator, List, NoReturn

from ugro.remote import check_system, tree
from ugro.remote.ending import UNIT_PREFIX
from ugro.remote.execute import close_all_but
from ugro.remote.program import Refused
from ugro.remote.rundir import RunDir, point

_GET_CHILD_SUBREAPER = 37
_SET_CHILD_SUBREAPER = tree.PR_SET_CHILD_SUBREAPER
_BEGIN = "import sys; sys.path.insert(0, sys.argv[1]); from ugro.remote.supervisor import main; main(sys.argv[2:])"
_libc = ctypes.CDLL(None, use_errno=True)


def ways(survival: Dict[str, Any], unit: str, prefix: str = "/") -> List[List[str]]:
    """What to put before the supervisor's command, best first; the next is for when one ends without starting it.

    A control group of its own survives a logout only where the user lingers; a session of its own only where
    logind leaves a user's processes alone. ``prefix`` is where the system's files are.
    """
    found: List[List[str]] = []
    manager = os.path.join(prefix, "run/user/%d/systemd" % os.getuid())
    scope = ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--unit=%s" % unit]
    if survival["lingers"] and os.path.isdir(manager) and shutil.which("systemd-run"):
        # One rank that runs out of memory must not take its supervisor along; older systemds do not know how.
        found += [[*scope, "--property=OOMPolicy=continue", "--"], [*scope, "--"]]
    if not (survival["has_logind"] and survival["kills_processes"]):
        found.append([])
    if not found:
        text = "a logout would end the run: logind ends this user's processes. Allow them: loginctl enable-linger %s"
        raise Refused("would-be-killed", text % survival["user"])
    return found


def ways_here(run: RunDir) -> List[List[str]]:
    unit = "%s%s-%s" % (UNIT_PREFIX, run.name.replace(".", "-"), os.urandom(4).hex())
    return ways(check_system.survival(), unit)


def launch(run: RunDir, way: List[str]) -> int:
    """Starts a supervisor and returns a pipe: it ends when the ranks run, or when the supervisor is gone."""
    ready, say = os.pipe()
    try:
        with _no_subreaper():
            between = os.fork()
            if between == 0:
                _leave(run, way, say)
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


def _leave(run: RunDir, way: List[str], say: int) -> NoReturn:
    """Runs in the process between; its child is an orphan from the start, and of another session."""
    try:
        os.setsid()
        if os.fork() == 0:
            _become(run, way, say)
    finally:
        os._exit(0)


def _become(run: RunDir, way: List[str], say: int) -> NoReturn:
    try:
        close_all_but([say])
        os.set_inheritable(say, True)
        os.dup2(os.open(run.file("supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir("/")  # keeps no file system from being unmounted
        argv = [*way, *_command(run, say)]
        env = {"XDG_RUNTIME_DIR": "/run/user/%d" % os.getuid(), **os.environ} if way else dict(os.environ)
        os.execvpe(argv[0], argv, {**env, **run.variables()})
    except OSError as error:
        os.write(say, json.dumps({"kind": "os", "message": "no supervisor can be started: %s" % error}).encode())
    finally:
        os._exit(1)


def _command(run: RunDir, say: int) -> List[str]:
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    python = sys.executable or os.readlink("/proc/self/exe")
    where = [run.agent.root, run.agent.name, run.job, str(run.attempt), str(say)]
    return [python, "-I", "-S", "-c", _BEGIN, home, *where]
