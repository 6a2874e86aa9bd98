"""How a supervisor is started so that it stays when all that started it goes: node program, session, login.

Where a session of its own is enough, it is forked, with all that is loaded already. Where it needs a control group of
its own, or would look like the node program otherwise, it is a fresh Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import struct
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, NoReturn, Tuple

from ugro.node import loader
from ugro.node.machine import has_user_manager
from ugro.node.machine import survival as survival_here
from ugro.node.process import process_tree
from ugro.node.process.cgroup import UNIT_PREFIX
from ugro.node.process.execute import close_all_but
from ugro.node.program import Refused
from ugro.node.runs import ranks as oom
from ugro.node.runs import supervisor as supervisor_module
from ugro.node.runs.rundir import AgentDir, point
from ugro.node.runs.supervisor import begin

# --- proc title -------------------------------------------------------------------------------------------------------
# A forked process that has its own command line and environment in /proc, as if it had been started afresh.
#
# The environment tells which processes are ours; a fork alone would show its parent's. Starting afresh takes twenty
# times as long.


_SET_MM = 35
_SET_MM_MAP = 14
_NO_EXE = 0xFFFFFFFF
# Of /proc/self/stat, counted from the state on: where code, data and heap begin and end, and where the stack begins.
_CODE, _DATA, _HEAP, _STACK = (23, 24), (42, 43), 44, 25
_MAP = struct.Struct("=12QII")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_libc.sbrk.argtypes = [ctypes.c_ssize_t]


class ProcessTitle:
    """Made before the fork, where that costs less; kept for good, since the kernel reads it whenever somebody looks."""

    def __init__(self, argv: List[bytes], env: Dict[bytes, bytes]) -> None:
        self.env = env
        command = b"".join(word + b"\0" for word in argv)
        variables = b"".join(b"%s=%s\0" % pair for pair in env.items())
        self._text = ctypes.create_string_buffer(command + variables)
        start = ctypes.addressof(self._text)
        middle = start + len(command)
        self._places = (start, middle, middle, middle + len(variables))

    def show(self) -> None:
        """``OSError`` where the kernel was built without it."""
        layout = _MAP.pack(*_memory(), *self._places, 0, 0, _NO_EXE)
        if _libc.prctl(_SET_MM, _SET_MM_MAP, layout, len(layout), 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _memory() -> List[int]:
    """What stays as it is; the kernel takes only all values at once."""
    with open("/proc/self/stat", "rb") as stat:
        text = stat.read()
    # The name is in brackets and may hold spaces and brackets itself.
    fields = text[text.rindex(b")") + 2 :].split()
    places = [*_CODE, *_DATA, _HEAP]
    return [*(int(fields[place]) for place in places), int(_libc.sbrk(0)), int(fields[_STACK])]


# --- daemonize --------------------------------------------------------------------------------------------------------


_GET_CHILD_SUBREAPER = 37
_SET_CHILD_SUBREAPER = process_tree.PR_SET_CHILD_SUBREAPER
_SURVIVAL_S = 5.0  # a user who was refused allows it, and tries again
_daemonize_libc = ctypes.CDLL(None, use_errno=True)
_survival: List[Tuple[float, Dict[str, Any]]] = []


def ways(survival: Dict[str, Any], unit: str, prefix: str = "/") -> List[List[str]]:
    """What to put before its command, best first; the next is for when one ends without starting it.

    A control group of its own survives a logout only where the user lingers; a session of its own only where
    logind leaves a user's processes alone. ``prefix`` is where the system's files are.
    """
    found: List[List[str]] = []
    # Delegated: a supervisor makes groups in it, for the limits of its runs.
    scope = ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--unit=%s" % unit, "--property=Delegate=yes"]
    if survival["lingers"] and has_user_manager(prefix):
        # One rank that runs out of memory must not take its supervisor along; older systemds do not know how.
        found += [[*scope, "--property=OOMPolicy=continue", "--"], [*scope, "--"]]
    if not (survival["has_logind"] and survival["kills_processes"]):
        found.append([])
    if not found:
        text = "a logout would end the run: logind ends this user's processes. Allow them: loginctl enable-linger %s"
        raise Refused("would-be-killed", text % survival["user"])
    return found


def ways_here(name: str) -> List[List[str]]:
    now = time.monotonic()
    if not _survival or now - _survival[0][0] > _SURVIVAL_S:
        _survival[:] = [(now, survival_here())]
    unit = "%s%s-%s" % (UNIT_PREFIX, name.replace(".", "-"), os.urandom(4).hex())
    return ways(_survival[0][1], unit)


class Detached(NamedTuple):
    """What is started, and how it shows itself."""

    module: str  # whose ``main`` is called with ``words`` and a descriptor where it is started afresh
    words: List[str]
    begin: Callable[[int], None]  # where it is forked; with the descriptor
    name: str
    variables: Dict[str, str]
    log: str  # of its own: empty, unless it has a fault


def supervisor(agent: AgentDir, name: str, is_shared: bool) -> Detached:
    """``name``: of its run, or what it is called instead."""
    # As every process of ours, it carries this: so the node program does not end it as an orphan of its commands.
    variables = {"UGRO_RUN": "%s/supervisor" % agent.name}
    words = [*agent.words, "shared" if is_shared else "own"]
    log = os.path.join(agent.path, "supervisor.log")
    return Detached(supervisor_module.__name__, words, lambda fd: begin(agent, is_shared, fd), name, variables, log)


def launch(what: Detached, way: List[str], fd: int) -> None:
    """``fd`` is given to it, and closed here."""
    oom.look()  # it takes that over
    env = {**os.environb, **{os.fsencode(key): os.fsencode(text) for key, text in what.variables.items()}}
    title = ProcessTitle([what.module.encode(), what.name.encode()], env)
    try:
        with _no_subreaper():
            between = os.fork()
            if between == 0:
                _leave(what, way, title, fd)
            os.waitpid(between, 0)
    finally:
        os.close(fd)
    point("start.launched")


@contextlib.contextmanager
def _no_subreaper() -> Iterator[None]:
    """The node program adopts orphans, and ends those it does not know. A supervisor is not to be its child."""
    was_on = ctypes.c_int(0)
    _daemonize_libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(was_on), 0, 0, 0)
    _daemonize_libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    try:
        yield
    finally:
        _daemonize_libc.prctl(_SET_CHILD_SUBREAPER, was_on.value, 0, 0, 0)


def _leave(what: Detached, way: List[str], title: ProcessTitle, fd: int) -> NoReturn:
    """Runs in the process between; its child is an orphan from the start, and of another session."""
    try:
        os.setsid()
        if os.fork() == 0:
            _become(what, way, title, fd)
    finally:
        os._exit(0)


def _become(what: Detached, way: List[str], title: ProcessTitle, fd: int) -> NoReturn:
    """Nothing of the node program is let go of: what it had open is closed, and must not be closed again."""
    try:
        gc.freeze()
        _settle(what, way, title, fd)
        what.begin(fd)
    finally:
        has_failed = sys.exc_info()[0] is not None
        if has_failed:
            import traceback  # takes longer to load than most runs last

            _open_log(what.log)
            traceback.print_exc()
        os._exit(1 if has_failed else 0)  # its reaper looks at it


def _open_log(path: str) -> None:
    with contextlib.suppress(OSError):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), 2)


def _settle(what: Detached, way: List[str], title: ProcessTitle, fd: int) -> None:
    try:
        close_all_but([fd])
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir("/")  # keeps no file system from being unmounted
        if way or not _is_shown(title):
            _start_afresh(what, way, title.env, fd)
    except OSError as error:
        os.write(fd, b"E %s\n" % json.dumps({"kind": "os", "message": "it cannot be started: %s" % error}).encode())
        os._exit(1)


def _is_shown(title: ProcessTitle) -> bool:
    try:
        title.show()
    except OSError:
        return False
    return True


def _start_afresh(what: Detached, way: List[str], env: Dict[bytes, bytes], fd: int) -> NoReturn:
    _open_log(what.log)
    os.set_inheritable(fd, True)
    modules = loader.installed().descriptor(os.path.dirname(what.log))
    python = sys.executable or os.readlink("/proc/self/exe")
    argv = [*way, python, "-I", "-S", "-c", loader.FRESH, str(modules), what.module, *what.words, str(fd)]
    runtime = b"/run/user/%d" % os.getuid()
    os.execvpe(argv[0], argv, {b"XDG_RUNTIME_DIR": runtime, **env} if way else env)
