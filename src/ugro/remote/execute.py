"""`exec`: a command on the node whose output streams home and whose whole tree ends with it.

Between the node program and the command stands a guard, a small forked process: it adopts whatever the command
leaves behind and ends it when the command ends, is cancelled, or the node program is gone, killed -9 included.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from typing import Any, Dict, List, NoReturn, Optional

from ugro.remote import tree, wire
from ugro.remote.program import Call, Program

MARK = "UGRO_EXEC"
GRACE_S = 5.0


def execute(call: Call, params: Dict[str, Any]) -> None:
    argv = [str(word) for word in params["argv"]]
    if not argv or any("\0" in word for word in argv):
        raise ValueError("a command is needed")
    extra = {str(key): str(value) for key, value in dict(params.get("env", {})).items()}
    marker = str(params["marker"])
    env = {**os.environ, **extra, MARK: marker}
    cwd = os.path.expanduser(str(params.get("cwd") or "~"))
    _Execution(call, _Command(argv, env, cwd, float(params.get("grace_s", GRACE_S))), marker)


class _Command:
    def __init__(self, argv: List[str], env: Dict[str, str], cwd: str, grace_s: float) -> None:
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.grace_s = grace_s


class _Pipe:
    def __init__(self) -> None:
        self.read, self.write = os.pipe()


class _Execution:
    """The node program's side: forwards output as credit allows, and answers when everything has ended."""

    def __init__(self, call: Call, command: _Command, marker: str) -> None:
        self._call = call
        self._program: Program = call.program
        self._marker = marker
        self._credit = wire.WINDOW
        self._is_paused = False
        self._is_cancelled = False
        self._status = b""
        control, status, out, err = _Pipe(), _Pipe(), _Pipe(), _Pipe()
        tree.become_subreaper()  # if even the guard is killed, its orphans come to us
        self._guard = os.fork()
        if self._guard == 0:
            _Guard(command, control.read, status.write, out.write, err.write).run()
        for fd in (control.read, status.write, out.write, err.write):
            os.close(fd)
        self._control = control.write
        self._open = {out.read: wire.OUT, err.read: wire.ERR}
        for fd in self._open:
            self._program.watch(fd, self._reader(fd))
        self._status_fd: Optional[int] = status.read
        self._program.watch(status.read, self._read_status)
        call.on_cancel = self._cancel
        call.on_credit = self._grant

    def _reader(self, fd: int) -> Any:
        return lambda: self._read_output(fd)

    def _read_output(self, fd: int) -> None:
        if self._is_paused or fd not in self._open:  # changed by an event of the same round
            return
        payload = os.read(fd, min(wire.CHUNK, self._credit))
        if payload:
            self._forward(self._open[fd], payload)
            return
        del self._open[fd]
        self._close(fd)
        self._finish_if_ended()

    def _forward(self, kind: int, payload: bytes) -> None:
        if self._is_cancelled:  # nobody reads any more, and a full pipe must not keep the command from ending
            return
        self._call.data(kind, payload)
        self._credit -= len(payload)
        if self._credit == 0:
            self._is_paused = True
            for fd in self._open:
                self._program.unwatch(fd)

    def _grant(self, amount: int) -> None:
        self._credit += amount
        if self._is_paused:
            self._is_paused = False
            for fd in self._open:
                self._program.watch(fd, self._reader(fd))

    def _read_status(self) -> None:
        assert self._status_fd is not None
        part = os.read(self._status_fd, 65536)
        self._status += part
        if not part:
            self._close(self._status_fd)
            self._status_fd = None
            self._finish_if_ended()

    def _cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            os.close(self._control)  # the guard sees the end of its control pipe
            self._grant(wire.WINDOW)

    def _close(self, fd: int) -> None:
        self._program.unwatch(fd)
        os.close(fd)

    def _finish_if_ended(self) -> None:
        if self._open or self._status_fd is not None:
            return
        self._cancel()
        with contextlib.suppress(ChildProcessError):  # reaped together with another command's
            os.waitpid(self._guard, 0)
        tree.reap()
        if self._status:
            self._call.finish(json.loads(self._status))
            return
        for pid in tree.marked(("%s=%s" % (MARK, self._marker)).encode()):
            os.kill(pid, signal.SIGKILL)
        self._call.fail("guard-lost", "the process that watched the command was killed; the command was ended")


class _Guard:
    """Runs in the forked process and never returns to the node program's code."""

    def __init__(self, command: _Command, control: int, status: int, out: int, err: int) -> None:
        self._command = command
        self._control = control
        self._status = status
        self._outputs = (out, err)

    def run(self) -> NoReturn:
        code = 1
        try:
            self._watch()
            code = 0
        finally:
            os._exit(code)

    def _watch(self) -> None:
        os.setsid()
        keep = sorted((self._control, self._status, *self._outputs))
        close_all_but(keep)
        tree.become_subreaper()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda signum, stack: None)
        child = self._start()
        for fd in self._outputs:
            os.close(fd)
        wait_status = self._wait(child, wake_read)
        left = tree.end_descendants(self._command.grace_s)
        if wait_status is None:
            wait_status = int(signal.SIGTERM)
        self._report(wait_status, left)

    def _wait(self, child: int, wake: int) -> Optional[int]:
        """The command's wait status, or None when it was cancelled first."""
        while True:
            ended = tree.reap()
            if child in ended:
                return ended[child]
            ready, _, _ = select.select([self._control, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
            if self._control in ready and not os.read(self._control, 1):
                return None

    def _start(self) -> int:
        child = os.fork()
        if child:
            return child
        try:
            tree.die_with_parent()
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._outputs[0], 1)
            os.dup2(self._outputs[1], 2)
            os.chdir(self._command.cwd)
            os.execvpe(self._command.argv[0], self._command.argv, self._command.env)
        except OSError as error:
            os.write(2, ("%s: %s\n" % (self._command.argv[0], error.strerror)).encode("utf-8", "replace"))
            os._exit(126 if isinstance(error, PermissionError) else 127)
        finally:
            os._exit(127)

    def _report(self, wait_status: int, left: List[int]) -> None:
        code = os.WEXITSTATUS(wait_status) if os.WIFEXITED(wait_status) else None
        signum = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else None
        os.write(self._status, json.dumps({"code": code, "signal": signum, "unkillable": left}).encode())


def close_all_but(keep: List[int]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    start = 3
    for fd in keep:
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, highest + 1)
