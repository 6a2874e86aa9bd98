"""One rank: how its process is started, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, NoReturn, Optional, Tuple

from ugro.node import foreign
from ugro.node.process import process_tree, terminate
from ugro.node.process.execute import is_readable
from ugro.node.runs.logs import CappedLog
from ugro.node.runs.ownership import Ownership
from ugro.node.runs.rundir import RunDir
from ugro.node.runs.runspec import MOST_RANKS, RankSpec

# --- oom --------------------------------------------------------------------------------------------------------------
# Was it the kernel that killed a process for want of memory? It says so nowhere directly; it counts.


_SAMPLE_EVERY_S = 5.0
# A large process takes a while from its death sentence to its end.
_WINDOW_S = 30.0


class _Look(NamedTuple):
    at_s: float
    files: List[str]
    counts: List[int]


_latest: List[_Look] = []


def look() -> _Look:
    """What the counters say, at most so old as the time between two samples. A forked process takes it over."""
    now = time.monotonic()
    if not _latest or now - _latest[0].at_s >= _SAMPLE_EVERY_S:
        files = _counters()
        _latest[:] = [_Look(now, files, [_value(path) for path in files])]
    return _latest[0]


class OomCounter:
    """How many processes the kernel killed lately: on the whole machine, and in our own control group."""

    def __init__(self) -> None:
        first = look()
        self._files = first.files
        self._samples: List[Tuple[float, List[int]]] = [(first.at_s, first.counts)]

    def sample(self) -> None:
        now = time.monotonic()
        if now - self._samples[-1][0] >= _SAMPLE_EVERY_S:
            while len(self._samples) > 1 and self._samples[1][0] < now - _WINDOW_S:
                self._samples.pop(0)
            self._samples.append((now, self._counts()))

    def recent(self) -> int:
        before = self._samples[0][1]
        return max((now - before[place] for place, now in enumerate(self._counts())), default=0)

    def _counts(self) -> List[int]:
        return [_value(path) for path in self._files]


def _counters() -> List[str]:
    files = ["/proc/vmstat"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as cgroups:
        for line in cgroups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                files.append("/sys/fs/cgroup%s/memory.events" % path)
            elif "memory" in controllers.split(","):
                files.append("/sys/fs/cgroup/memory%s/memory.oom_control" % path)
    return [path for path in files if os.access(path, os.R_OK)]


def _value(path: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, "rb") as file:
        _, _, rest = (b"\n" + file.read()).partition(b"\noom_kill ")
        return int(rest.split(None, 1)[0])
    return 0


# --- ranks ------------------------------------------------------------------------------------------------------------


_OOM_ADJUSTMENT = 200  # when memory runs out, a rank goes before what supervises it
_OOM_FILE = "/proc/self/oom_score_adj"
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
_LONGEST_EXEC_S = 60.0
_LONGEST_COMPLAINT = 4096


# What the machine lacks when a program cannot be started; everything else is wrong with the program or its folder.
_OF_THE_NODE = {
    errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EROFS,
    errno.ESTALE, errno.EHOSTDOWN, errno.EREMOTEIO, errno.ETIMEDOUT,
}  # fmt: skip
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)  # ignored by Python, and that would be inherited
_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)


class NotStarted(Exception):
    """In words for the user. ``kind`` says whose fault it is: "program" or "node"."""

    def __init__(self, rank: int, number: int, what: str = "", *, is_of_node: bool = False) -> None:
        """``number`` is the system's number of the error, ``what`` the program or the folder it is about."""
        why = os.strerror(number)
        parts = ["rank %d" % rank, *([what] if what else []), why[:1].lower() + why[1:]]
        super().__init__(": ".join(parts))
        self.rank = rank
        self.kind = "node" if is_of_node or number in _OF_THE_NODE else "program"
        self.is_disk_full = number in (errno.ENOSPC, errno.EDQUOT)
        self.code = _code(number)


class Rank:
    def __init__(self, spec: RankSpec, log: CappedLog, enter: Optional[Callable[[], None]] = None) -> None:
        """``enter``: what its process does before it becomes the program."""
        self.spec = spec
        self.number = spec.number
        self.log = log
        self.pid = 0
        self.start_ticks = 0
        self.wait_status: Optional[int] = None
        self.starts = 1  # how often it was started, with this time
        self.was_lost = False  # it failed by itself, and the others went on
        self.is_oom = False
        self.reached_bytes: Optional[int] = None  # the memory limit of its run, if that was reached
        self._enter = enter
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
            is_said = is_readable(said, _LONGEST_EXEC_S)
            complaint = os.read(said, _LONGEST_COMPLAINT) if is_said else b""
        finally:
            os.close(said)
        if complaint:
            # It ends by itself, now, and must not be killed before: how it ended is recorded.
            self.end(os.waitpid(self.pid, 0)[1])
            number, _, what = complaint.partition(b" ")
            raise NotStarted(self.number, int(number), what.decode("utf-8", "replace"))
        self.start_ticks = terminate.start_time(self.pid) or 0

    def start_quickly(self, env: Dict[bytes, bytes], cwd: bytes) -> None:
        """As ``start``, at half the cost, but it does not die with us: the reaper sees to that.

        What keeps it from starting is found out by doing it once more, slowly.
        """
        if self._enter is not None:
            self.start(env, cwd)
            return
        before = _ticks()
        try:
            os.chdir(cwd)  # ours; nothing else of us depends on it
            self.pid = self._spawn(env)
        except (OSError, NotImplementedError):  # or a C library that cannot begin a session
            self.start(env, cwd)
        else:
            # Asked about a program that only just begins, the kernel takes its time.
            self.start_ticks = before if _ticks() == before else terminate.start_time(self.pid) or 0
        finally:
            os.chdir("/")

    def _spawn(self, env: Dict[bytes, bytes]) -> int:
        log = self.log.fileno()
        with _offering_to_oom_killer():
            return os.posix_spawn(
                _found(self.spec.argv[0], env),
                self.spec.argv,
                env,
                file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
                setsid=True,
                setsigdef=_PYTHONS_OWN,
            )

    def again(self) -> Rank:
        """The same rank, to be started once more."""
        rank = Rank(self.spec, self.log, self._enter)
        rank.starts = self.starts + 1
        return rank

    def note(self, words: str) -> None:
        """In its log."""
        with contextlib.suppress(OSError):
            os.write(self.log.fileno(), b"ugro: rank %d was %s\n" % (self.number, words.encode()))

    def end(self, wait_status: int) -> None:
        self.wait_status = wait_status
        self._ended_at = time.time()

    def record(self) -> Dict[str, Any]:
        return {
            "rank": self.number,
            "code": self.code,
            "signal": self.signal,
            "is_oom": self.is_oom,
            **({} if self.reached_bytes is None else {"reached_bytes": self.reached_bytes}),
            **({"was_lost": True} if self.was_lost else {}),
            "ended_at": self._ended_at,
        }

    def _become(self, env: Dict[bytes, bytes], cwd: bytes, say: int, supervisor: int) -> NoReturn:
        try:
            process_tree.die_with_parent()
            if os.getppid() == supervisor:  # else it died before it could take us along
                self._exec(env, cwd, say)
        finally:
            os._exit(127)

    def _exec(self, env: Dict[bytes, bytes], cwd: bytes, say: int) -> NoReturn:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for signum in _PYTHONS_OWN:
            signal.signal(signum, signal.SIG_DFL)
        _offer_to_oom_killer()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(self.log.fileno(), 1)
        os.dup2(self.log.fileno(), 2)
        what = b"its limits"
        try:
            if self._enter is not None:
                self._enter()
            what = b"working directory " + cwd
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


def _found(program: bytes, env: Dict[bytes, bytes]) -> bytes:
    """Where it probably is."""
    if b"/" in program:
        return program
    for folder in env.get(b"PATH", os.defpath.encode()).split(b":"):
        path = b"%s/%s" % (folder, program) if folder else program
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)


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


def _ticks() -> int:
    """Now, as the kernel counts when a process began."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // _TICK_NS


def _offer_to_oom_killer() -> None:
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(_OOM_FILE, os.O_RDWR)
        os.pwrite(fd, b"%d" % min(1000, int(os.read(fd, 20)) + _OOM_ADJUSTMENT), 0)
        os.close(fd)


@contextlib.contextmanager
def _offering_to_oom_killer() -> Iterator[None]:
    """Of what is started meanwhile: it takes over what holds for us."""
    fd, own = _own_oom()
    if fd is None:
        yield
        return
    os.pwrite(fd, b"%d" % min(1000, own + _OOM_ADJUSTMENT), 0)
    try:
        yield
    finally:
        os.pwrite(fd, b"%d" % own, 0)


@functools.lru_cache(maxsize=None)
def _own_oom() -> Tuple[Optional[int], int]:
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(_OOM_FILE, os.O_RDWR | os.O_CLOEXEC)
        return fd, int(os.read(fd, 20))
    return None, 0


# --- elastic ----------------------------------------------------------------------------------------------------------
# A run of a training that goes on without ranks that are lost: it lives as long as its agent wants it to.
#
# A rank of it that dies does not end the others. It can be started again, once for each order: an order names how often
# it was started before, and one that comes twice finds another number. Ranks write to a file who trains on.


_MEMBERS_FILE = "members.json"
_MOST_BYTES = 64 * 1024
_MOST_MEMBERS = 4096


class Members(NamedTuple):
    """The ranks of the newest group that this node has heard of, and its number."""

    number: int
    ranks: List[int]


def read_members(run: RunDir) -> Optional[Members]:
    """None if there is no such file, or none that could be."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = foreign.parsed(run.note(_MEMBERS_FILE, _MOST_BYTES) or b"")
        ranks = [int(rank) for rank in found["ranks"]]
        if 0 < len(ranks) <= _MOST_MEMBERS and int(found["number"]) >= 0:
            return Members(int(found["number"]), ranks)
    return None


def lost(ranks: List[Rank]) -> List[Dict[str, Any]]:
    """Those that have ended and not with 0, and how often each was started."""
    return [{**rank.record(), "starts": rank.starts} for rank in ranks if rank.has_failed][:MOST_RANKS]


def may_start_again(rank: Rank, starts: int, ownership: Ownership) -> bool:
    """Never two processes for one rank: it has ended, and so has all that it left in its session."""
    if rank.starts != starts or rank.is_running or not rank.has_failed:
        return False
    ownership.forget_look()
    left = [pid for pid in ownership.orphans() if terminate.place(pid).session == rank.pid]
    for pid in left:
        terminate.kill_child(pid)
    return not left
