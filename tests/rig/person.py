"""A person at a terminal of this machine: a shell on a real pseudo-terminal, as a login or a window has one."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.rig.waiting import is_alive, wait_until

_AN_HOUR_NS = 3600 * 10**9


class Person:
    def __init__(
        self, dev: Path, env: Mapping[str, str] | None = None, script: str = "while read line; do :; done"
    ) -> None:
        """``dev``: a folder that has this terminal, and not those of others; ``script``: what their shell runs."""
        argv = ["/bin/sh", "-c", script]
        self._env = {"PATH": os.environ["PATH"], **(env or {})}
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(argv[0], argv, self._env)
        self.path = wait_until(self._terminal, 10, "the shell to have its terminal and its environment")
        self._link = dev / self.name
        self._link.parent.mkdir(parents=True, exist_ok=True)
        self._link.symlink_to(self.path)

    def __enter__(self) -> Person:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()

    @property
    def name(self) -> str:
        return self.path.removeprefix("/dev/")

    @property
    def device(self) -> tuple[int, int]:
        number = os.stat(self.path).st_rdev
        return os.major(number), os.minor(number)

    def rest(self) -> None:
        """As if they had typed nothing for an hour: the kernel notes new times in steps of 8 seconds only."""
        before_ns = time.time_ns() - _AN_HOUR_NS
        os.utime(self.path, ns=(before_ns, before_ns))

    def go_on(self) -> None:
        """As if they typed just now, also within the same 8 seconds."""
        os.utime(self.path)

    def type(self, text: str = "hello\n") -> None:
        os.write(self._fd, text.encode())

    def leave(self) -> None:
        self._link.unlink(missing_ok=True)
        if is_alive(self.pid):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _terminal(self) -> str:
        with contextlib.suppress(OSError):
            # The terminal is there before the shell: until then the environment is that of the test's own process.
            environment = Path(f"/proc/{self.pid}/environ").read_bytes()
            path = os.readlink(f"/proc/{self.pid}/fd/0")
            return path if path.startswith("/dev/pts/") and environment == self._environ() else ""
        return ""

    def _environ(self) -> bytes:
        return b"".join(f"{name}={value}\0".encode() for name, value in self._env.items())
