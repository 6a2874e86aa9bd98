"""The run directory: which file means what, its lease, and the guards that make a start happen at most once.

``<root>/.ugro/agents/<agent>@<node>@<machine>/`` holds the agent's generation, its lease, a fence for each job, and a
directory for each run (one attempt at a job on this node). It belongs to one node name on one machine, also where
machines share their home folders. Everything known of a run is in its files; no process has to be asked. The lock is
the proof of life: the kernel gives it back when its holder is gone, and pids are reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import signal
from typing import Any, Dict, Iterator, List, Optional

from ugro.node import durable
from ugro.node.clock import age_s, boot_id, clock_s, moment, wall_s
from ugro.node.durable import Numbers
from ugro.node.machine import machine_id
from ugro.node.program import Call, Refused
from ugro.node.runs.fence import Fence, replaced

VERSION = 1
# By this variable the processes of a run are found. A path, since two nodes may be one machine, with the same run.
MARK = "UGRO_RUN_DIR"
CRASH_VARIABLE = "UGRO_CRASH_POINT"
# Where tests kill or stop us; together they are every step between two durable things.
POINTS = (
    "start.launched", "supervisor.begun", "supervisor.admitted", "supervisor.alone", "supervisor.made",
    "supervisor.fenced", "supervisor.locked", "supervisor.moved", "supervisor.claimed", "supervisor.closed",
    "supervisor.first", "supervisor.all", "supervisor.stated", "supervisor.ending", "supervisor.ended",
    "exit.written", "exit.renamed", "clean.locked", "clean.claimed", "clean.ended",
    "remove.closed", "remove.renamed", "remove.deleted",
)  # fmt: skip
# Large enough for the last lines of a log; a record that is longer loses some of them.
EXIT_BYTES = 64 * 1024
MOST_MARK_BYTES = 4096
LEAST_EXIT_BYTES = 4096  # with how one rank ended, and little of its log
_GENERATION_S = 0.5
_REMOVING = ".removing"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_RUN = re.compile(r"(%s)\.([1-9][0-9]{0,8})" % _JOB.pattern)
# Kept: json.dumps makes a new one on every call.
_encode = json.JSONEncoder(ensure_ascii=False).encode
_encode_sorted = json.JSONEncoder(sort_keys=True).encode
_crash_point, _, _crash_how = os.environ.get(CRASH_VARIABLE, "").partition(":")


def point(name: str) -> None:
    """A place where a test may end or stop this process; nothing otherwise."""
    if _crash_point and name == _crash_point:
        os.kill(os.getpid(), signal.SIGSTOP if _crash_how == "pause" else signal.SIGKILL)


def spec_hash(spec: Dict[str, Any]) -> str:
    return str(_sha256()(_encode_sorted(spec).encode()).hexdigest())


@functools.lru_cache(maxsize=None)
def _sha256() -> Any:
    """Python's own: hashlib would bring OpenSSL, and every process that is forked would carry that along."""
    import importlib

    for module in ("_sha2", "_sha256", "hashlib"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(module).sha256
    raise ImportError("no SHA-256 in this Python")


class AgentDir:
    """What one agent has on this node."""

    def __init__(self, root: str, name: str, node_key: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError("no name for an agent: %.40r" % name)
        self.root = _real(root)  # however it is spelled: processes are found by it
        self.name = name
        self.node = node_key.rpartition("@")[0]
        self.path = os.path.join(self.root, ".ugro", "agents", "%s@%s" % (name, node_key))
        self.words = [self.root, name, node_key]  # what a process of its own makes this object from
        self.runs_path = os.path.join(self.path, "runs")
        self.supervisors_path = os.path.join(self.path, "supervisors")
        self.pool_path = os.path.join(self.path, "pool")
        self._fences_path = os.path.join(self.path, "fence")
        self._generation = Numbers(os.path.join(self.path, "generation"), 1)
        self._lease = Numbers(os.path.join(self.path, "lease"), 2)
        self._heard_s = 0.0
        self._mark_path = os.path.join(self.path, "mark")

    def admit(self, generation: int) -> None:
        """Remembers the newest generation; an agent that was replaced has no say any more."""
        newest = self._generation.read()[0]
        if generation > newest:
            for folder in (self.runs_path, self._fences_path):
                durable.make_folder(folder)
            with durable.locked(self._generation.path, _GENERATION_S):
                newest = self._generation.read()[0]
                if generation > newest:
                    self._generation.write(generation)
        if generation < newest:
            raise replaced(generation, newest)

    @property
    def newest_generation(self) -> int:
        return self._generation.read()[0]

    def mark(self) -> Optional[str]:
        """What the agent left here to recognize by it that its state is an older one. Only the agent can read it."""
        with contextlib.suppress(OSError, UnicodeDecodeError), open(self._mark_path, encoding="utf-8") as file:
            return file.read(MOST_MARK_BYTES)
        return None

    def put_mark(self, mark: str) -> None:
        fresh = "%s.%s.new" % (self._mark_path, os.urandom(4).hex())
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            durable.write_all(fd, mark.encode("utf-8", "replace"))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(fresh, self._mark_path)
        durable.sync_folder(self.path)

    def fence(self, job: str) -> Fence:
        return Fence(self._fences_path, job)

    def supervisor(self, name: str) -> str:
        """The folder of a supervisor, which has its process's name."""
        return os.path.join(self.supervisors_path, name)

    def run(self, job: str, attempt: int) -> RunDir:
        if not _JOB.fullmatch(job) or not 0 < attempt < 10**9:
            raise ValueError("no name for a run: %.40r, attempt %d" % (job, attempt))
        return RunDir(self, job, attempt)

    def runs(self) -> List[RunDir]:
        found = (self.named(name) for name in sorted(os.listdir(self.runs_path)))
        return [run for run in found if run is not None]

    def named(self, name: str) -> Optional[RunDir]:
        """The run of that folder, if it is one's name."""
        match = _RUN.fullmatch(name)
        return RunDir(self, match[1], int(match[2])) if match else None

    @staticmethod
    def is_name(name: str) -> bool:
        """Whether a run's folder may be called that."""
        return _RUN.fullmatch(name) is not None

    def aside(self, name: str) -> str:
        """A path for what is to be deleted, not used before."""
        return "%s/%s.%s%s" % (self.runs_path, name, os.urandom(4).hex(), _REMOVING)

    def set_aside_before(self) -> List[str]:
        """What were set aside and are still there: their deletion was cut short."""
        names = os.listdir(self.runs_path)
        return [os.path.join(self.runs_path, name) for name in names if name.endswith(_REMOVING)]

    def renew(self, as_of: Optional[Dict[str, Any]]) -> float:
        """The agent was alive at that moment. A renewal that comes late renews no more than its own moment."""
        silent_s = age_s(as_of)
        if silent_s == float("inf"):
            raise Refused("other-boot", "the node was restarted after what this renewal refers to")
        heard_ms = int((clock_s() - silent_s) * 1000)
        with durable.locked(self._lease.path, _GENERATION_S):
            boot, latest_ms = 0, 0
            with contextlib.suppress(OSError):  # damaged: this mends it
                boot, latest_ms = self._lease.read()
            if boot != _boot_number() or heard_ms > latest_ms:
                self._lease.write(_boot_number(), heard_ms, is_lasting=False)
        return silent_s

    def heard_s(self) -> float:
        """When the agent last renewed, by ``clock_s``; 0 when it never did since this machine started.

        Where that cannot be read now (a file server is away, no descriptor is left), it is what was read last: that
        ends a run no sooner than its lease does.
        """
        with contextlib.suppress(OSError):
            boot, latest_ms = self._lease.read()
            self._heard_s = latest_ms / 1000 if boot == _boot_number() else 0.0
        return self._heard_s


class RunDir:
    """One attempt at a job on this node."""

    def __init__(self, agent: AgentDir, job: str, attempt: int) -> None:
        self.agent = agent
        self.job = job
        self.attempt = attempt
        self.name = "%s.%d" % (job, attempt)
        self.path = "%s/%s" % (agent.runs_path, self.name)

    @property
    def fence(self) -> Fence:
        return self.agent.fence(self.job)

    def variables(self) -> Dict[str, str]:
        """Carried by every process of this run, its supervisor included."""
        return {
            "UGRO_RUN": "%s/%s" % (self.agent.name, self.name),
            MARK: self.path,
            "UGRO_JOB": self.job,
            "UGRO_ATTEMPT": str(self.attempt),
            "UGRO_OUTPUT": self.file("output"),
        }

    @property
    def mark(self) -> bytes:
        return os.fsencode("%s=%s" % (MARK, self.path))

    def file(self, *names: str) -> str:
        return "/".join((self.path, *names))

    def log(self, rank: int) -> str:
        return "%s/logs/rank_%d.log" % (self.path, rank)

    def note(self, name: str, most_bytes: int) -> Optional[bytes]:
        """What one of its ranks has written to a file there; None if there is none that could be."""
        with contextlib.suppress(OSError):
            fd = os.open(self.file(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return os.read(fd, most_bytes)
            finally:
                os.close(fd)
        return None

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    # --- what it is to do ---------------------------------------------------------------------------------------

    def make(self, envelope: Dict[str, Any]) -> None:
        """Where it is. The fence is held by the caller, so that of two with different specs one is refused.

        Nothing of it has to be durable: without a durable claim it is made again.
        """
        for name in ("", "logs", "output", "work"):
            durable.make_folder(self.file(name) if name else self.path)
        if self.envelope() is not None:
            self.expect_spec(envelope["hash"])
        durable.write_json(self.file("spec.json"), envelope, is_lasting=False)

    def expect_spec(self, wanted_hash: str) -> None:
        if (self.envelope() or {}).get("hash") != wanted_hash:
            text = "%s is on this node already, with another spec"
            raise Refused("conflict", text % self.name)

    def envelope(self) -> Optional[Dict[str, Any]]:
        return self._read("spec.json")

    def supervisor(self) -> Optional[str]:
        """The name of its supervisor's process; None for a run that none has ever claimed."""
        return (self.envelope() or {}).get("supervisor")

    def ticket(self) -> Optional[str]:
        """What the agent gave along with the start: by it the agent recognizes a run that its state does not know."""
        ticket = (self.envelope() or {}).get("ticket")
        return ticket if isinstance(ticket, str) else None

    def _read(self, name: str) -> Optional[Dict[str, Any]]:
        """Not what was there for another run: folders are used again, and a power cut may bring that back."""
        content = durable.read_json(self.file(name))
        return content if content is None or content.get("run", self.name) == self.name else None

    # --- the guards ---------------------------------------------------------------------------------------------

    def claim(self) -> bool:
        """True for one caller, ever: that one may start the ranks."""
        try:
            fd = os.open(self.file("claim"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        try:
            with contextlib.suppress(OSError):  # a full disk; it is a claim without that, too
                os.write(fd, boot_id().encode())
        finally:
            os.close(fd)
        return True

    def is_claimed(self) -> bool:
        return os.path.exists(self.file("claim"))

    def claimed_in(self) -> Optional[str]:
        """The boot it was claimed in: None when it was not, empty when that could not be written down."""
        with contextlib.suppress(OSError), open(self.file("claim"), encoding="ascii", errors="replace") as file:
            return file.read(100)
        return None

    def make_claim_last(self) -> None:
        """Before the first rank starts. A claim or a fence that a power cut takes back would let it start again.

        With it the names of all that was made before: the run's folder, and the space for its exit record.
        """
        durable.sync_file(self.file("claim"))
        durable.sync_folder(self.path)
        durable.sync_folder(self.agent.runs_path)
        durable.sync_file(self.fence.path)
        durable.sync_folder(os.path.dirname(self.fence.path))

    def take_lock(self, timeout_s: float) -> Optional[int]:
        return take_lock(self.file("lock"), timeout_s)

    def is_alive(self) -> bool:
        try:
            # Not for writing: closing a file that was open for writing wakes those who watch it.
            fd = os.open(self.file("lock"), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not durable.lock_within(fd, fcntl.LOCK_SH, 0)
        finally:
            os.close(fd)

    def note_all_ended(self, supervisor: str) -> None:
        """By the reaper of that supervisor, which was killed: no process of the run is left."""
        fd = os.open(self.file("ended"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            durable.write_all(fd, supervisor.encode())
        finally:
            os.close(fd)

    def has_all_ended(self) -> bool:
        """Not if another supervisor has taken it up since: the first was killed before its claim."""
        with contextlib.suppress(OSError), open(self.file("ended"), encoding="utf-8", errors="replace") as file:
            return file.read(1000) == self.supervisor()
        return False

    # --- what became of it --------------------------------------------------------------------------------------

    def write_state(self, state: Dict[str, Any]) -> bytes:
        """Returns what was written. Need not be durable: what it tells is over when the machine is."""
        content = _encode({"v": VERSION, **state}).encode("utf-8", "surrogateescape")
        fd = os.open(self.file("state.new"), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            durable.write_all(fd, content)
            os.ftruncate(fd, len(content))
        finally:
            os.close(fd)
        os.rename(self.file("state.new"), self.file("state.json"))
        return content

    def state(self) -> Optional[Dict[str, Any]]:
        return self._read("state.json")

    def began_ns(self) -> Optional[int]:
        """By the wall clock, and no later than the times of files that its ranks wrote; None if it has not begun."""
        state = self.state()
        if not state or not state.get("started_at"):
            return None
        return int(wall_s(state.get("boot_id"), float(state.get("clock_s") or 0), float(state["started_at"])) * 1e9)

    def reserve_exit(self) -> None:
        """Takes the space for the exit record now; the disk may be full by then."""
        durable.take_space(self.file("exit.reserve"), EXIT_BYTES)

    def write_exit(self, record: Dict[str, Any]) -> bytes:
        """What was written: it can be read when this returns, and lasts after ``make_exit_last``."""
        content = _fitting({"v": VERSION, **record}, EXIT_BYTES)
        fd = os.open(self.file("exit.reserve"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _overwritten(fd, content):
                content = _fitting({"v": VERSION, **record}, LEAST_EXIT_BYTES)
                if not _overwritten(fd, content):
                    # A file system that copies what is overwritten: give the space back first.
                    os.ftruncate(fd, 0)
                    os.lseek(fd, 0, os.SEEK_SET)
                    durable.write_all(fd, content)
        finally:
            os.close(fd)
        point("exit.written")
        self.adopt_exit()
        return content

    def adopt_exit(self) -> None:
        os.rename(self.file("exit.reserve"), self.file("exit.json"))
        point("exit.renamed")

    def make_exit_last(self) -> None:
        """Under its new name or under the one that ``make_claim_last`` made last: both are looked at."""
        durable.sync_file(self.file("exit.json"))

    def unadopted_exit(self) -> Optional[Dict[str, Any]]:
        """An exit record that was written and not yet renamed."""
        return self._read("exit.reserve")

    def exit(self) -> Optional[Dict[str, Any]]:
        return self._read("exit.json")

    def status(self) -> Dict[str, Any]:
        # Before the look at the lock: a claim is made under it, so a claimed run whose lock is free is dead.
        claimed_in = self.claimed_in()
        is_alive = False
        record = self.exit()
        if record is None:
            is_alive = self.is_alive()
            record = self.exit()  # it may have ended between the two looks
        state = self.state()
        if record is not None:
            word = "exited"
        elif is_alive:
            word = "starting" if state is None else "running"
        else:
            word = "dead"
        if word != "dead":
            claimed_in = self.claimed_in()
        envelope = self.envelope() if record is not None or state is None else None
        outputs = {"has_outputs": True} if record is not None and self._has_outputs(envelope) else {}
        return {
            "job": self.job,
            "attempt": self.attempt,
            "status": word,
            "is_claimed": claimed_in is not None,
            "claimed_in": claimed_in,
            "spec_hash": (state or envelope or {}).get("hash"),
            "state": state,
            "exit": record,
            **outputs,
        }

    def _has_outputs(self, envelope: Optional[Dict[str, Any]]) -> bool:
        """Or may have: what it made in its working directory is not told from its code here."""
        spec = (envelope or {}).get("spec") or {}
        is_collected = not spec.get("cwd") and spec.get("workdir") is not False
        return bool(spec.get("outputs")) or self.has_written() or (is_collected and self.has_work())

    def has_written(self) -> bool:
        """Whether there is anything in its output folder."""
        return _has_entries(self.file("output"))

    def has_work(self) -> bool:
        """Whether there is anything in the working directory that is ours: code, or what the job made."""
        return _has_entries(self.file("work"))

    # --- its end ------------------------------------------------------------------------------------------------

    def set_aside(self) -> str:
        """Takes it out of sight in one step; what it leaves can then be deleted piece by piece.

        Need not last: a run that a power cut brings back is removed once more.
        """
        aside = self.agent.aside(self.name)
        os.rename(self.path, aside)
        return aside


def take_lock(path: str, timeout_s: float) -> Optional[int]:
    """Held until the descriptor is closed. Those who only look hold it shared for a moment, hence the time."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if durable.lock_within(fd, fcntl.LOCK_EX, timeout_s):
        return fd
    os.close(fd)
    return None


def new_envelope(
    spec: Dict[str, Any], as_of: Optional[Dict[str, Any]], is_of_this_boot: bool, **more: Any
) -> Dict[str, Any]:
    head = {"v": VERSION, "hash": spec_hash(spec), "as_of": as_of or moment()}
    return {**head, "is_of_this_boot": is_of_this_boot, **more, "spec": spec}


def _has_entries(folder: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.listdir(folder))
    return False


def _overwritten(fd: int, content: bytes) -> bool:
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        durable.write_all(fd, content)
        os.ftruncate(fd, len(content))
    except OSError:
        return False
    return True


def _fitting(record: Dict[str, Any], most_bytes: int) -> bytes:
    while True:
        content = _encode(record).encode("utf-8", "replace")
        tail = (record.get("failure") or {}).get("tail")
        if len(content) <= most_bytes or not tail:
            return content
        record["failure"]["tail"] = tail[(len(tail) + 1) // 2 :]


@functools.lru_cache(maxsize=None)
def _real(root: str) -> str:
    return os.path.realpath(root)


def _boot_number() -> int:
    return int(boot_id().replace("-", ""), 16)


# --- access -----------------------------------------------------------------------------------------------------------
# Which agent and which run a call is about. An agent that was replaced is refused.


def agent_of(call: Call) -> AgentDir:
    agent = seen_agent_of(call)
    agent.admit(int(call.asker["generation"]))
    return agent


def seen_agent_of(call: Call) -> AgentDir:
    """Also of an agent that was replaced: for calls that change nothing."""
    return AgentDir(call.program.root, str(call.asker["agent"]), call.program.node_key)


def run_of(call: Call, job: str, attempt: int) -> RunDir:
    return agent_of(call).run(str(job), int(attempt))


# --- live runs --------------------------------------------------------------------------------------------------------
# Runs that may still have processes, of all agents: what they use on this node must stay.
#
# Their folders are looked at, not only locks: a supervisor may have been killed, or live on another machine that shares
# the folder.


def those_that_may_live(root: str) -> Iterator[RunDir]:
    return (run for run in _runs(root) if _may_live(run))


def _runs(root: str) -> Iterator[RunDir]:
    agents = os.path.join(root, ".ugro", "agents")
    for folder in os.listdir(agents) if os.path.isdir(agents) else ():
        name, at, node_key = folder.partition("@")
        with contextlib.suppress(OSError, ValueError):
            if at:
                yield from AgentDir(root, name, node_key).runs()


def _may_live(run: RunDir) -> bool:
    if run.exit() is not None:
        return False
    if run.is_alive():
        return True
    claimed_in = run.claimed_in()
    if claimed_in is None:  # it has started nothing; if it ever does, it looks for what it needs first
        return False
    is_here = run.agent.path.endswith("@" + machine_id())
    if is_here and claimed_in not in ("", boot_id()):
        return False
    return not run.has_all_ended()
