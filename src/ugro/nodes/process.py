"""The process behind a link: ssh, a shell on this machine, or the node's transport command.

Its stdin and stdout are one socket of ours. The end of its stderr is kept for error messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from ugro.core.support.descriptors import restore_limit

# ssh prints a line or two, rc files perhaps a page; a process that prints more never stops.
MAX_STDERR = 1 << 20
_KEPT_STDERR = 16 * 1024
_FIRST_LOOK_S = 0.002
_MAX_PAUSE_S = 1.0


class LinkProcess:
    """Raises ``OSError`` if it cannot be started."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], on_flood: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_flood = on_flood
        self._process, self.socket, self._stderr = _start(argv, env)
        self._said = b""
        self._said_bytes = 0
        self.is_gone: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._stderr, self._hear)

    def exit_code(self) -> int | None:
        """None while it runs. Does not reap the process: until then its group id cannot be reused."""
        if self._process.returncode is not None:
            return self._process.returncode
        seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def complaint(self) -> str:
        """The end of its stderr."""
        while self._stderr >= 0 and self._hear():
            pass
        return self._said.decode("utf-8", "replace").strip()

    def end(self) -> None:
        """Ends it and the processes it started to reach the node (a jump, a proxy), even if it ended before them."""
        self._stop_hearing()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._look_for_end(_FIRST_LOOK_S)

    def _look_for_end(self, pause_s: float) -> None:
        # This may take a while, and the agent must keep talking to other nodes.
        if self._process.poll() is None:
            self._loop.call_later(pause_s, self._look_for_end, min(2 * pause_s, _MAX_PAUSE_S))
        elif not self.is_gone.done():
            self.is_gone.set_result(None)

    def _hear(self) -> bool:
        """True if there may be more to read."""
        try:
            part = os.read(self._stderr, 64 * 1024)
        except BlockingIOError:
            return False
        if not part:
            self._stop_hearing()
            return False
        self._said = (self._said + part)[-_KEPT_STDERR:]
        self._said_bytes += len(part)
        if self._said_bytes > MAX_STDERR:
            self._on_flood()
        return True

    def _stop_hearing(self) -> None:
        if self._stderr >= 0:
            self._loop.remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = -1


def _start(argv: Sequence[str], env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        talk, other_end = socket.socketpair()
        ours.callback(talk.close)
        theirs.callback(other_end.close)
        heard, stderr = os.pipe()
        ours.callback(os.close, heard)
        theirs.callback(os.close, stderr)
        # In a session of its own: it has no terminal to prompt on, and its group can be killed as a whole.
        process = subprocess.Popen(
            argv,
            stdin=other_end.fileno(),
            stdout=other_end.fileno(),
            stderr=stderr,
            env=env,
            start_new_session=True,
        )
        restore_limit(process.pid)  # it starts nothing before it has read what we send
        ours.pop_all()
    talk.setblocking(False)
    os.set_blocking(heard, False)
    return process, talk, heard
