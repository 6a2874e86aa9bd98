"""`exec`: a command on the node whose output streams home and whose whole tree ends with it.

Between the node program and the command stands a guard, a small forked process: it adopts whatever the command
leaves behind and ends it when the command ends, is cancelled, or the node program is gone, killed -9 included.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import signal
from typing import Any, Callable, Dict, List, NoReturn, Optional, Set, Tuple

from ugro.node import wire
from ugro.node.process import process_tree
from ugro.node.program import Call, Program, method

# --- wakeup -----------------------------------------------------------------------------------------------------------
# Signals as something to wait for: a descriptor that can be read when one came.


def listen(on_term: Callable[[], None]) -> int:
    """For processes that look after ranks: the end of a child wakes them, and only SIGTERM means anything."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    wake, wake_write = os.pipe()
    for fd in (wake, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    # Handled and not ignored: what is ignored here would be ignored by the ranks, too.
    for signum in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, lambda number, stack: None)
    signal.signal(signal.SIGTERM, lambda number, stack: on_term())
    return wake


def drain(wake: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)


def is_readable(fd: int, timeout_s: Optional[float]) -> bool:
    """Waits for it, without an end if the time is None. ``select.select`` would take no descriptor above 1023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))


def open_control(path: str) -> int:
    """A pipe with a name, for orders."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    # For writing, too: it then never comes to an end while nobody else has it open.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


# --- execute ----------------------------------------------------------------------------------------------------------


MARK = "UGRO_EXEC"
GRACE_S = 5.0
MAX_GRACE_S = 3600.0
LEFT_OUTPUT_S = 0.5


@method("exec")
def execute(
    call: Call,
    *,
    argv: List[str],
    marker: str,
    env: Optional[Dict[str, str]] = None,
    cwd: Optional[str] = None,
    grace_s: float = GRACE_S,
) -> None:
    """Runs a command; its output streams beside the answer."""
    words = [_encoded(word) for word in argv]
    if not words or not isinstance(argv, list):
        raise ValueError("a command is needed, as a list of words")
    extra = {_encoded(key): _encoded(value) for key, value in dict(env or {}).items()}
    if any(b"=" in key or not key for key in extra):
        raise ValueError("a variable's name is empty or has a = in it")
    mark = _encoded(marker)
    variables = {**os.environb, **extra, MARK.encode(): mark}
    folder, grace_s = os.path.expanduser(_encoded(cwd or "~")), float(grace_s)
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise ValueError("grace_s is not between 0 and %g" % MAX_GRACE_S)
    run_guarded(call, Command(words, variables, folder, grace_s), mark)


def _encoded(word: Any) -> bytes:
    """As a program is given it; refused here, where it can still be said, what no program can be given."""
    encoded = os.fsencode(str(word))
    if b"\0" in encoded:
        raise ValueError("a NUL character in %.40r" % str(word))
    return encoded


class Command:
    """``keep``: a descriptor that is open as long as anything of the command may live, such as one with a lock."""

    def __init__(
        self, argv: List[bytes], env: Dict[bytes, bytes], cwd: bytes, grace_s: float, keep: Optional[int] = None
    ) -> None:
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.grace_s = grace_s
        self.keep = keep

    def become(self) -> NoReturn:
        """In the process that is the command's."""
        culprit = self.cwd
        try:
            os.chdir(self.cwd)
            culprit = self.argv[0]
            os.execvpe(self.argv[0], self.argv, self.env)
        except OSError as error:
            os.write(2, culprit + b": " + os.strerror(error.errno or 0).encode() + b"\n")
            os._exit(127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126)

    def clean_up(self) -> None:
        """In the guard, when nothing of the command lives any more."""


def run_guarded(call: Call, command: Command, marker: bytes) -> None:
    """``marker`` is no other command's, on this whole machine."""
    _Execution(call, command, marker)


class _Pipes:
    """Control and status of the guard, output and errors of its command; the first of each pair is to read."""

    def __init__(self) -> None:
        self._all: List[Tuple[int, int]] = []
        try:
            for _ in range(4):
                self._all.append(os.pipe())
        except OSError:
            self.close()
            raise
        self.control, self.status, self.out, self.err = self._all

    def close(self) -> None:
        for ends in self._all:
            for fd in ends:
                os.close(fd)


# The guards that are alive. Whatever else leads a session of its own below us lost its guard.
_guards: Set[int] = set()


class _Execution:
    """The node program's side: forwards output as credit allows, and answers when everything has ended."""

    def __init__(self, call: Call, command: Command, marker: bytes) -> None:
        self._call = call
        self._program: Program = call.program
        self._marker = marker
        self._credit = wire.WINDOW
        self._is_paused = False
        self._is_cancelled = False
        self._status = b""
        pipes = _Pipes()
        process_tree.become_subreaper()  # if even the guard is killed, its orphans come to us
        try:
            self._guard = os.fork()
        except OSError:
            pipes.close()
            raise
        if self._guard == 0:
            _Guard(command, pipes).run()
        _guards.add(self._guard)
        for fd in (pipes.control[0], pipes.status[1], pipes.out[1], pipes.err[1]):
            os.close(fd)
        self._control = pipes.control[1]
        self._open = {pipes.out[0]: wire.OUT, pipes.err[0]: wire.ERR}
        for fd in self._open:
            self._program.watch(fd, self._reader(fd))
        self._status_fd: Optional[int] = pipes.status[0]
        self._program.watch(self._status_fd, self._read_status)
        call.on_cancel = self._cancel
        call.on_credit = self._receive_credit

    def _reader(self, fd: int) -> Any:
        return lambda: self._read_output(fd)

    def _read_output(self, fd: int) -> None:
        if self._is_paused or fd not in self._open:  # changed by an event of the same round
            return
        payload = os.read(fd, min(wire.CHUNK, self._credit))
        if payload:
            self._forward(self._open[fd], payload)
        else:
            self._end_output(fd)

    def _end_output(self, fd: int) -> None:
        del self._open[fd]
        self._program.unwatch(fd)
        os.close(fd)
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

    def _receive_credit(self, amount: int) -> None:
        if self._is_cancelled:
            return
        if self._credit + amount > wire.WINDOW:
            raise wire.ProtocolError("call %d was granted more than it sent" % self._call.number)
        self._grant(amount)

    def _grant(self, amount: int) -> None:
        self._credit += amount
        if self._is_paused and self._credit:
            self._is_paused = False
            for fd in self._open:
                self._program.watch(fd, self._reader(fd))

    def _read_status(self) -> None:
        assert self._status_fd is not None
        part = os.read(self._status_fd, 65536)
        self._status += part
        if not part:
            self._program.unwatch(self._status_fd)
            os.close(self._status_fd)
            self._status_fd = None
            self._bury_guard()
            self._finish_if_ended()

    def _bury_guard(self) -> None:
        os.waitpid(self._guard, 0)
        _guards.discard(self._guard)
        if not self._status:
            process_tree.kill_all(self._orphans)
        if self._open:
            self._program.after(LEFT_OUTPUT_S, self._drop_outputs)

    def _orphans(self) -> List[int]:
        marked = process_tree.marked(MARK.encode() + b"=" + self._marker)
        return [*marked, *process_tree.strangers_below(os.getpid(), _is_known)]

    def _drop_outputs(self) -> None:
        """The guard ended all it could; who still holds a pipe is out of reach, and not waited for."""
        if not self._is_paused:
            for fd in list(self._open):
                if not is_readable(fd, 0):
                    self._end_output(fd)
        if self._open:
            self._program.after(LEFT_OUTPUT_S, self._drop_outputs)

    def _cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            os.close(self._control)  # the guard sees the end of its control pipe
            self._grant(wire.WINDOW)

    def _finish_if_ended(self) -> None:
        if self._open or self._status_fd is not None:
            return
        self._cancel()
        if self._status:
            self._call.finish(json.loads(self._status))
        else:
            self._call.fail("guard-lost", "the process that watched the command was killed; the command was ended")


def _is_known(pid: int) -> bool:
    """A guard, or a supervisor: those are not ours to end, even if we are their parent."""
    return pid in _guards or any(entry.startswith(b"UGRO_RUN=") for entry in process_tree.environment(pid))


class _Guard:
    """Runs in the forked process and never returns to the node program's code."""

    def __init__(self, command: Command, pipes: _Pipes) -> None:
        self._command = command
        self._control = pipes.control[0]
        self._status = pipes.status[1]
        self._outputs = (pipes.out[1], pipes.err[1])

    def run(self) -> NoReturn:
        code = 1
        try:
            self._watch()
            code = 0
        finally:
            os._exit(code)

    def _watch(self) -> None:
        os.setsid()
        kept = [] if self._command.keep is None else [self._command.keep]
        close_all_but(sorted([self._control, self._status, *self._outputs, *kept]))
        process_tree.become_subreaper()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda signum, stack: None)
        child = self._start()
        for fd in self._outputs:
            os.close(fd)
        wait_status = self._wait(child, wake_read)
        left, ended = process_tree.end_descendants(self._command.grace_s)
        self._command.clean_up()
        if wait_status is None:  # it was cancelled: how it took that is known only now
            wait_status = ended.get(child, int(signal.SIGKILL))
        self._report(wait_status, left)

    def _wait(self, child: int, wake: int) -> Optional[int]:
        """The command's wait status, or None when it was cancelled first."""
        while True:
            ended = process_tree.reap()
            if child in ended:
                return ended[child]
            ready, _, _ = select.select([self._control, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
            if self._control in ready and not os.read(self._control, 1):
                return None

    def _start(self) -> int:
        guard = os.getpid()
        child = os.fork()
        if child:
            return child
        try:
            process_tree.die_with_parent()
            if os.getppid() == guard:
                self._become_command()
        finally:
            os._exit(127)

    def _become_command(self) -> NoReturn:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # Python's, not a command's
            signal.signal(signum, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(self._outputs[0], 1)
        os.dup2(self._outputs[1], 2)
        self._command.become()

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
