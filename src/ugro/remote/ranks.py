"""One rank: how its process is started, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from typing import Any, Dict, List, NoReturn, Optional

from ugro.remote import ending, tree
from ugro.remote.flood import CappedLog
from ugro.remote.runspec import RankSpec

_OOM_ADJUSTMENT = 200  # when memory runs out, a rank goes before what supervises it
_LONGEST_EXEC_S = 60.0
_LONGEST_COMPLAINT = 4096


# What the machine lacks when a program cannot be started; everything else is wrong with the program or its folder.
_OF_THE_NODE = {
    errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EROFS,
    errno.ESTALE, errno.EHOSTDOWN, errno.EREMOTEIO, errno.ETIMEDOUT,
}  # fmt: skip
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)


class NotStarted(Exception):
    """In words for the user. ``kind`` says whose fault it is: "program" or "node"."""

    def __init__(self, rank: int, number: int, what: str = "") -> None:
        """``number`` is the system's number of the error, ``what`` the program or the folder it is about."""
        why = os.strerror(number)
        parts = ["rank %d" % rank, *([what] if what else []), why[:1].lower() + why[1:]]
        super().__init__(": ".join(parts))
        self.rank = rank
        self.kind = "node" if number in _OF_THE_NODE else "program"
        self.code = _code(number)


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
        try:
            self.pid = os.fork()
        except OSError as error:
            os.close(said)
            raise NotStarted(self.number, error.errno or 0) from error
        finally:
            if os.getpid() == supervisor:
                os.close(say)
        if self.pid == 0:
            self._become(env, cwd, say, supervisor)
        try:
            # Closed by the exec. A program on a file server that hangs is not waited for: it starts when it starts.
            is_said = select.select([said], [], [], _LONGEST_EXEC_S)[0]
            complaint = os.read(said, _LONGEST_COMPLAINT) if is_said else b""
        finally:
            os.close(said)
        if complaint:
            number, _, what = complaint.partition(b" ")
            raise NotStarted(self.number, int(number), what.decode("utf-8", "replace"))
        self.start_ticks = ending.start_time(self.pid) or 0

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
        what = b"working directory " + cwd
        try:
            os.chdir(cwd)
            what = self.spec.argv[0]
            _run(self.spec.argv, env)
        except OSError as error:
            number = error.errno or 0
            if number == errno.ENOENT and b"/" in what and what != cwd and os.path.exists(what):
                what += b": what its first line names"
            with contextlib.suppress(OSError):
                os.write(2, what + b": " + os.strerror(number).encode() + b"\n")
            os.write(say, (b"%d " % number + what)[:_LONGEST_COMPLAINT])
            os._exit(_code(number))


def _run(argv: List[bytes], env: Dict[bytes, bytes]) -> NoReturn:
    """As a shell would find it; of several reasons, one that is more than "not here" is the one to tell."""
    program = argv[0]
    folders = [b""] if b"/" in program else env.get(b"PATH", os.defpath.encode()).split(b":")
    reason = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for folder in folders:
        try:
            os.execve(os.path.join(folder, program), argv, env)
        except OSError as error:
            if error.errno not in _NOT_FOUND:
                reason = error
                if error.errno != errno.EACCES:
                    break
    raise reason


def _code(number: int) -> int:
    return 127 if number in _NOT_FOUND else 126


def _offer_to_oom_killer() -> None:
    with contextlib.suppress(OSError, ValueError):
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        os.pwrite(fd, b"%d" % min(1000, int(os.read(fd, 20)) + _OOM_ADJUSTMENT), 0)
        os.close(fd)
