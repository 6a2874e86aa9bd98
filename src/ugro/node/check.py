"""`check`: what ``ugro doctor`` and a launch look at on a node, one thing per call.

Each of these may hang: on a dead file server, a driver, a firewall that drops packets. So each runs in a forked
process. The node program watches its pipe, keeps answering other calls, and kills it when its time is over or the
call is cancelled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import time
from dataclasses import asdict
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence

from ugro.node import connectivity, system, wire
from ugro.node.machine import user_name
from ugro.node.messages import Modules, Ports, PortUse
from ugro.node.process import process_tree
from ugro.node.process.execute import close_all_but
from ugro.node.program import Call, method
from ugro.node.runs.ports import bind_errno

# --- modules ----------------------------------------------------------------------------------------------------------
# Which modules the Python that runs the ranks finds, asked of that Python itself, without importing them.


MOST_NAMES = 500

# A module counts as missing only if every finder says so: also those of editable installations and of .pth files.
_FIND = r"""
import json, os, sys
from importlib import util

def changed(path):
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0

def is_missing(name):
    try:
        return util.find_spec(name) is None
    except Exception:
        return False

sys.path = [path for path in sys.path if path]  # not the current folder: ranks have their script's
# Before the look: what is installed meanwhile is then seen by the next one.
folders = [(path, changed(path)) for path in sys.path]
missing = [name for name in sys.argv[1:] if is_missing(name)]
sys.stdout.write("\n" + json.dumps({"missing": missing, "folders": folders}))
"""


def modules(
    *, names: Sequence[str], folders: Sequence[Sequence[Any]] = (), python: Optional[str] = None
) -> Modules:
    """``python``: that of an environment; None: the one that runs ranks without an environment."""
    known = [(str(path), int(changed)) for path, changed in folders or ()]
    if known and all(_changed(path) == changed for path, changed in known):
        return Modules(is_same=True)
    wanted = [str(name) for name in names][:MOST_NAMES]
    found = system.asked_python(_FIND, *(name for name in wanted if name.isidentifier()), python=python)
    return Modules(tuple(found["missing"]), tuple((path, changed) for path, changed in found["folders"]))


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


# --- ports ------------------------------------------------------------------------------------------------------------
# Whether ports of a node are free, and which process uses those that are not.


_TIME_WAIT = 6
_BIND_TRIES = 6


def ports(*, ports: Sequence[int]) -> Ports:
    return Ports(tuple(port_use(int(number)) for number in ports))


def port_use(port: int) -> PortUse:
    for _ in range(_BIND_TRIES):
        number = bind_errno(port)
        if number is None:
            return PortUse(port, is_free=True)
        if number != errno.EADDRINUSE:
            return PortUse(port, is_free=False, error=os.strerror(number))
        seen = _sockets_at(port)
        users = [entry for entry in seen if entry.state != _TIME_WAIT]
        if users:
            return _used(port, users)
        if seen:  # only closed connections in TIME_WAIT: a server that sets SO_REUSEADDR, as most do, can listen
            return PortUse(port, is_free=True)
        # Bound but not in use: most likely another node program on this machine that runs the same check.
        time.sleep(random.uniform(0.005, 0.05))
    return PortUse(port, is_free=False)


class _Socket(NamedTuple):
    state: int
    uid: int
    inode: str


def _sockets_at(port: int) -> List[_Socket]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines)
            for line in lines:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(_Socket(int(fields[3], 16), int(fields[7]), fields[9]))
    return found


def _used(port: int, sockets: List[_Socket]) -> PortUse:
    """The process, if we may see it; otherwise only its user."""
    wanted = {"socket:[%s]" % entry.inode for entry in sockets}
    user = user_name(sockets[0].uid)
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            links = (os.readlink("/proc/%s/fd/%s" % (pid, fd)) for fd in os.listdir("/proc/%s/fd" % pid))
            if any(link in wanted for link in links):
                with open("/proc/%s/comm" % pid, encoding="utf-8", errors="replace") as name:
                    return PortUse(port, False, None, int(pid), name.read().strip(), user)
    return PortUse(port, is_free=False, user=user)


# --- check ------------------------------------------------------------------------------------------------------------


# Each gets its parameters as keywords, and returns its answer: one of the values in ``messages``. An agent asks by the
# function (``kernel.links.checks.answer``), so this is all that is declared of a check.
WORK: Dict[str, Callable[..., Any]] = {
    work.__name__: work
    for work in (
        *(system.root, system.packages, system.environment, system.survival),
        *(modules, ports, connectivity.listen, connectivity.connect),
    )
}


@method("check", is_routine=True)
def check(call: Call, /, *, what: str, timeout_s: float, **params: Any) -> None:
    """Runs one of WORK in a process of its own."""
    work = WORK[str(what)]
    _Check(call, work, {**params, "path": call.program.root} if work is system.root else params, float(timeout_s))


class _Check:
    """The node program's side: forwards what the process writes, and ends it."""

    def __init__(self, call: Call, work: Callable[..., Any], params: Dict[str, Any], timeout_s: float) -> None:
        self._call = call
        self._unread = b""
        self._end_of_pipe = ("crashed", "the check ended without an answer")
        self._timeout_s = timeout_s
        parent = os.getpid()
        self._pipe, write = os.pipe()
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _run(work, params, write, parent)
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(write)
        call.program.watch(self._pipe, self._receive)
        call.program.after(self._timeout_s, self._give_up)
        call.on_cancel = self._cancel

    def _receive(self) -> None:
        part = os.read(self._pipe, wire.CHUNK)
        if part:
            *lines, self._unread = (self._unread + part).split(b"\n")
            for line in lines:
                self._pass_on(json.loads(line))
            return
        self._call.program.unwatch(self._pipe)
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):  # reaped together with a command's
            os.waitpid(self._pid, 0)
        self._call.fail(*self._end_of_pipe)

    def _pass_on(self, said: Dict[str, Any]) -> None:
        if "answer" in said:
            self._call.finish(said["answer"])
        elif "error" in said:
            self._call.fail("os", said["error"])
        else:
            self._call.data(wire.OUT, json.dumps(said).encode())

    def _give_up(self) -> None:
        if not self._call.is_done:
            # Not waited for here: a process that hangs in the kernel dies later, and is reaped when its pipe closes.
            self._kill()
            self._call.fail("timed-out", "it did not end within %g s" % self._timeout_s)

    def _cancel(self) -> None:
        # Answered when the process is gone: what it held, such as a port, may be needed next.
        self._end_of_pipe = ("cancelled", "it was cancelled")
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _run(work: Callable[..., Any], params: Dict[str, Any], pipe: int, parent: int) -> NoReturn:
    """Runs in the forked process; never returns to the node program's code."""

    def say(message: Dict[str, Any]) -> None:
        os.write(pipe, json.dumps(message).encode() + b"\n")

    try:
        process_tree.die_with_parent()
        if os.getppid() == parent:
            close_all_but([pipe])
            first = (lambda message: say(asdict(message)),) if work is connectivity.listen else ()
            answer = work(*first, **params)
            say({"answer": asdict(answer) if answer is not None else {}})
    except OSError as error:
        say({"error": str(error)})
    finally:
        os._exit(0)
