"""One rank: how its process is started, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from typing import Any, Dict, NoReturn, Optional

from ugro.remote import ending, tree
from ugro.remote.flood import CappedLog
from ugro.remote.runspec import RankSpec

_OOM_ADJUSTMENT = 200  # when memory runs out, a rank goes before what supervises it
_LONGEST_EXEC_S = 60.0


class NotStarted(Exception):
    """In words for the user."""


class Rank:
    def __init__(self, spec: RankSpec, log: CappedLog) -> None:
        self.spec = spec
        self.number = spec.number
        self.log = log
        self.pid = 0
        self.start_ticks = 0
        self.wait_status: Optional[int] = None
        self.is_oom = False
        self._ended_at: Optional[float] = None

    @property
    def is_running(self) -> bool:
        return self.pid != 0 and self.wait_status is None

    @property
    def has_failed(self) -> bool:
        return self.wait_status not in (None, 0)

    @property
    def signal(self) -> Optional[int]:
        if self.wait_status is None or not os.WIFSIGNALED(self.wait_status):
            return None
        return os.WTERMSIG(self.wait_status)

    @property
    def code(self) -> Optional[int]:
        if self.wait_status is None or self.signal is not None:
            return None
        return os.WEXITSTATUS(self.wait_status)

    def start(self, env: Dict[bytes, bytes], cwd: bytes) -> None:
        """Returns when it runs the rank's own program; ``NotStarted`` says why it cannot."""
        said, say = os.pipe()
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(env, cwd, say, supervisor)
        os.close(say)
        self.start_ticks = ending.start_time(self.pid) or 0
        try:
            # Closed by the exec. A program on a file server that hangs is not waited for: it starts when it starts.
            is_said = select.select([said], [], [], _LONGEST_EXEC_S)[0]
            complaint = os.read(said, 4096) if is_said else b""
        finally:
            os.close(said)
        if complaint:
            raise NotStarted("rank %d: %s" % (self.number, complaint.decode("utf-8", "replace")))

    def end(self, wait_status: int) -> None:
        self.wait_status = wait_status
        self._ended_at = time.time()

    def record(self) -> Dict[str, Any]:
        return {
            "rank": self.number,
            "code": self.code,
            "signal": self.signal,
            "is_oom": self.is_oom,
            "ended_at": self._ended_at,
        }

    def _become(self, env: Dict[bytes, bytes], cwd: bytes, say: int, supervisor: int) -> NoReturn:
        try:
            tree.die_with_parent()
            if os.getppid() == supervisor:  # else it died before it could take us along
                self._exec(env, cwd, say)
        finally:
            os._exit(127)

    def _exec(self, env: Dict[bytes, bytes], cwd: bytes, say: int) -> NoReturn:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and that would be inherited
            signal.signal(signum, signal.SIG_DFL)
        _offer_to_oom_killer()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(self.log.fileno(), 1)
        os.dup2(self.log.fileno(), 2)
        culprit = cwd
        try:
            os.chdir(cwd)
            culprit = self.spec.argv[0]
            os.execvpe(culprit, self.spec.argv, env)
        except OSError as error:
            complaint = culprit + b": " + os.strerror(error.errno or 0).encode()
            with contextlib.suppress(OSError):
                os.write(2, complaint + b"\n")
            os.write(say, complaint[:4096])
            os._exit(127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126)


def _offer_to_oom_killer() -> None:
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        wanted = min(1000, int(file.read()) + _OOM_ADJUSTMENT)
        file.seek(0)
        file.write(str(wanted))
